"""Plays trajectories of a tiny model with a real engine and real threads."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from thundersync_jax import mesh as mesh_lib
from thundersync_jax.envs import base, prompt_sets, worker_pool
from thundersync_jax.models import families, tokenizer, transformer
from thundersync_jax.rollout import agent as agent_lib
from thundersync_jax.rollout import engine as engine_lib
from thundersync_jax.types import Sampling

BYTES = tokenizer.ByteTokenizer()
(END,) = BYTES.stop_ids
LETTERS = np.arange(ord('a'), ord('z') + 1)
CONTEXT = 192
TEMPERATURE = 0.8
CONFIG = families.ModelConfig(
  family='llama',
  vocab_size=BYTES.vocab_size,
  embed_dim=16,
  mlp_dim=24,
  num_layers=2,
  num_heads=2,
  num_kv_heads=1,
  head_dim=8,
)


@functools.cache
def weights(end=0.0):
  """A model that says letters and ends its turn: at 0 after a few.

  Hidden dimension 0 is large and positive everywhere, so that its column of
  the head is a bias.
  """
  params = transformer.init(CONFIG, jax.random.key(0))
  rng = np.random.default_rng(0)
  embed = rng.normal(0, 0.5, (CONFIG.vocab_size, CONFIG.embed_dim))
  head = rng.normal(0, 0.5, embed.shape)
  embed[:, 0], head[:, 0] = 2.0, -20.0
  head[LETTERS, 0], head[END, 0] = 0.0, end
  arrays = {'embed': embed, 'head': head}
  return params | {k: jnp.asarray(v, 'float32') for k, v in arrays.items()}


NEVER, AT_ONCE = -20.0, 20.0


class Talker:
  """Asks and answers as told; a quarter of reward a turn."""

  def __init__(self, question='q', answer='go on', max_turns=100, turns=100):
    self.max_turns = max_turns
    self._question, self._answer, self._turns = question, answer, turns
    self._count = 0

  def reset(self, task):
    return [{'role': 'user', 'content': self._question}]

  def step(self, text):
    self._count += 1
    if self._count >= self._turns:
      return base.EnvStep((), 0.25, True)
    message = {'role': 'user', 'content': self._answer}
    return base.EnvStep((message,), 0.25, False)

  def close(self):
    """Holds nothing."""


def make_engine(end, context, engine_class=engine_lib.Engine):
  mesh = mesh_lib.make_mesh(jax.devices()[:1])
  engine = engine_class(
    CONFIG,
    mesh,
    slots=4,
    chunk=4,
    max_context=context,
    cache_buckets=(CONTEXT,),
    prompt_buckets=(16, 48),
    stop_ids=sorted(BYTES.stop_ids),
    seed=3,
    sampling=Sampling(TEMPERATURE),
    prefill_rows=2,
    extend_rows=2,
  )
  params = transformer.unstack(weights(end))
  engine.publish(jax.device_put(params, mesh_lib.sharding(mesh)), 0)
  return engine


def play(
  makers,
  limits,
  size=1,
  end=0.0,
  context=CONTEXT,
  tasks=None,
  timeout_s=60.0,
  on_turns=None,
  tokenizer=BYTES,
  engine_class=engine_lib.Engine,
  **settings,
):
  """Plays one trajectory a maker of environments, in groups of `size`.

  Returns the agent, what advance() returned by (prompt_id, member), and the
  most slots that were parked at once. on_turns takes what ended_turns() did.
  """
  pool = worker_pool.WorkerPool(num_workers=4, timeout_s=timeout_s)
  queue = iter([makers[0], *makers])  # the agent asks one for its max_turns
  engine = make_engine(end, context, engine_class)
  agent = agent_lib.Agent(
    engine, tokenizer, lambda: next(queue)(), pool, limits, **settings
  )
  groups = len(makers) // size
  for i in range(groups):
    task = tasks[i] if tasks else {'key': str(i)}
    agent.submit(prompt_sets.Prompt(i, 0, task), 0, range(size))
  events, parked = {}, 0
  while agent.live or pool.in_flight:
    for made in agent.advance():
      events.setdefault((made.prompt_id, made.member), []).append(made)
    for ended in agent.ended_turns():
      if on_turns is not None:
        key = ended.prompt_id, ended.member
        on_turns.setdefault(key, []).append(ended)
    assert not agent.ended_turns()
    parked = max(parked, engine.parked)
    agent.wait(0.01)
  assert agent.advance() == []  # takes in the last closes
  pool.close()
  assert engine.waiting == engine.active == engine.parked == 0
  assert len(events) == len(makers)
  return agent, dict(sorted(events.items())), parked


def limits_of(turn=6, trajectory=1000, turns=1000, max_rows=64):
  return agent_lib.Limits(turn, trajectory, turns, max_rows)


def one(maker, limits, **changes):
  """The end of a single trajectory."""
  return play([maker], limits, **changes)[1][0, 0][-1]


def shape_of(trajectory):
  """(sampled tokens, finish reason) of each turn."""
  return [
    (int(turn.loss_mask.sum()), turn.finish_reason) for turn in trajectory.turns
  ]
