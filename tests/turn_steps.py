"""Random multi-turn steps, and their distillation gradient in a slow way.

`play` hands the snapshots of trajectories to a TurnStream in a random order, as
an agent would; `slow_gradient` is jax.grad of a dense loss, one trajectory at a
time, with nothing of the machinery.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from thundersync_jax import mesh as mesh_lib
from thundersync_jax.learner import (
  distill_loss,
  gradients,
  packing,
  slab,
  turn_device,
  turn_stream,
)
from thundersync_jax.learner import learner as learner_lib
from thundersync_jax.models import families, transformer
from thundersync_jax.streaming import turn_pieces, turn_plans
from thundersync_jax.types import Trajectory, Turn

VOCAB = 29
LENGTH = 56  # longest trajectory
LIMITS = turn_pieces.Limits(
  max_open=5, max_prompts=3, feed_tokens=6, feed_targets=3, unwind_tokens=8
)
SHAPES = turn_device.Shapes(
  feed=(slab.Shape(2, 6, LENGTH + 8, 3),),
  unwind=(slab.Shape(2, 8, LENGTH + 8),),
)
PACKED = (packing.Shape(2, 2 * LENGTH, 64),)
COSTS = turn_plans.Costs(1.0, 1.0, 1.0)


def model(family, **changes):
  switches = families.switches(family)
  sizes = {
    'embed_dim': 16,
    'mlp_dim': 24,
    'num_layers': 2,
    'num_heads': 4,
    'num_kv_heads': 2,
    'head_dim': 4,
  }
  return families.ModelConfig(
    family=family,
    vocab_size=VOCAB,
    tied=family != 'qwen3',
    max_context=LENGTH,
    **(sizes | switches | {'qkv_bias': family == 'qwen3'} | changes),
  )


TEACHER = model('llama', embed_dim=12, num_layers=1, head_dim=6)


def weights(config, seed, std=0.2):
  """f32 values, so that f64 programs start from the same ones."""
  rng = np.random.default_rng(seed)

  def leaf(path, x):
    norm = jax.tree_util.keystr(path[-1:], simple=True).endswith('norm')
    return (float(norm) + rng.normal(0, std, x.shape)).astype(np.float32)

  shapes = jax.eval_shape(
    functools.partial(transformer.init, config), jax.random.key(0)
  )
  return jax.tree_util.tree_map_with_path(leaf, shapes)


def trajectory(rng, prompt_id, member, prompt, turns, **changes):
  """Turns of 1 to 4 sampled tokens and 0 to 3 observed ones."""
  made = []
  for _ in range(turns):
    sampled, observed = rng.integers(1, 5), rng.integers(0, 4)
    n = sampled + observed
    mask = np.arange(n) < sampled
    logprobs = np.where(mask, rng.normal(-3, 0.1, n), 0).astype(np.float32)
    tokens = rng.integers(0, VOCAB, n).astype(np.int32)
    made.append(Turn(tokens, mask, logprobs, np.zeros(n, np.int32), 'stop'))
  found = Trajectory(prompt_id, member, 0, prompt, tuple(made), 0.0)
  return dataclasses.replace(found, **changes)


def make_step(seed, groups=3, size=3):
  """Every number of turns from 1 to 6 is there."""
  rng = np.random.default_rng(seed)
  step = []
  for g in range(groups):
    prompt = rng.integers(0, VOCAB, rng.integers(1, 13)).astype(np.int32)
    for m in range(size):
      turns = 1 + (g * size + m) % 6
      step.append(trajectory(rng, g, m, prompt, turns))
  return step


def snapshots(whole):
  """What an agent shows of a trajectory: after each turn, then the end."""
  shown = []
  for i in range(1, len(whole.turns) + 1):
    last = whole.turns[i - 1]
    sampled = int(last.loss_mask.sum())
    cut = Turn(
      last.tokens[:sampled],
      last.loss_mask[:sampled],
      last.behaviour_logprobs[:sampled],
      last.policy_versions[:sampled],
      last.finish_reason,
      last.context,
    )
    turns = (*whole.turns[: i - 1], cut)
    shown.append(
      dataclasses.replace(whole, turns=turns, reward=None, failure=None)
    )
  return shown


@dataclasses.dataclass(frozen=True)
class Parts:
  """A student, a teacher and the compiled programs between them."""

  config: families.ModelConfig
  learner: learner_lib.Learner
  params: dict
  teacher: turn_device.TeacherModel
  loss: distill_loss.Loss
  device: turn_device.Device


@functools.cache
def parts(family, loss, dtype, plans=('forward', 'turn'), remat=False):
  """Compiles in the dtype given."""
  config = model(family, remat=remat)
  student, teacher = (
    jax.tree.map(lambda x: jnp.asarray(x, dtype), weights(c, seed))
    for seed, c in enumerate((config, TEACHER))
  )
  mesh = mesh_lib.make_mesh(jax.devices()[:1])
  learner = learner_lib.Learner(
    config, gradients.Objective(), optax.sgd(1.0), mesh, shapes=PACKED
  )
  params, frozen = (
    learner.place(student),
    turn_device.TeacherModel(
      TEACHER, jax.device_put(teacher, mesh_lib.sharding(mesh)), mesh
    ),
  )
  device = turn_device.Device(
    learner, loss, frozen, LIMITS, SHAPES, plans, params
  )
  return Parts(config, learner, params, frozen, loss, device)


def stream(made, plan, granularity='turn'):
  planner = turn_plans.Planner(plan, COSTS, ('forward', 'turn'))
  return turn_stream.TurnStream(
    made.learner,
    made.device,
    LIMITS,
    planner,
    granularity=granularity,
    pad_id=0,
  )


def play(made, step, plan, seed, granularity='turn'):
  """Streams a step in the random order of the seed.

  Returns its gradient (f64 leaves, divided) and the stream.
  """
  rng = np.random.default_rng(seed)
  playing = stream(made, plan, granularity)
  playing.queue.open(0, sorted({t.prompt_id for t in step}), len(step) // 3)
  waiting = {i: snapshots(t) for i, t in enumerate(step)}
  while waiting:
    i = rng.choice(list(waiting))
    shown = waiting[i].pop(0) if waiting[i] else None
    if waiting[i] or (shown and rng.random() < 0.5):
      playing.turn_ended(shown)
    if not waiting[i]:
      del waiting[i]
      if step[i].failure is None and rng.random() < 0.5:
        playing.queue.put(dataclasses.replace(step[i], reward=None))
      playing.queue.put(step[i])
    playing.settle()
    while rng.random() < 0.7 and playing.launch(0, made.params, None):
      playing.poll(block=True)
  while not playing.step_complete(0):
    playing.settle()
    assert playing.launch(0, made.params, None) or playing.step_complete(0)
    playing.poll(block=True)
  gradient, stats = playing.finish(0)
  total = jax.tree.map(
    lambda x: np.asarray(x, np.float64) / gradient.denominator, gradient.total
  )
  return total, stats, playing


def dense_term(name, beta, log_p, log_q, behaviour, targets):
  """What is minimised at each sampled token, from [n, V] log-probabilities."""
  if name == 'reverse_kl_sampled':
    rows = jnp.arange(len(targets))
    advantage = log_q[rows, targets] - behaviour
    return -jax.lax.stop_gradient(advantage) * log_p[rows, targets]
  p, q = jnp.exp(log_p), jnp.exp(log_q)
  if name == 'reverse_kl':
    return jnp.sum(p * (log_p - log_q), axis=1)
  if name == 'forward_kl':
    return jnp.sum(q * (log_q - log_p), axis=1)
  log_m = jnp.log(beta * q + (1 - beta) * p)
  parts_of = beta * q * (log_q - log_m) + (1 - beta) * p * (log_p - log_m)
  return jnp.sum(parts_of, axis=1)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _slow_term(config, loss, params, teacher, ids, behaviour, mask):
  """Gradient (of what is maximised) of one padded sequence."""

  def log_softmax(config, p):
    ones = jnp.ones_like(ids)[None]
    hidden = transformer.forward(
      config, p, ids[None], jnp.arange(len(ids))[None], ones, 0 * ones
    )
    logits = hidden[0] @ transformer.head(p).T / loss.temperature
    return jax.nn.log_softmax(logits)[:-1]

  def objective(p):
    terms = dense_term(
      loss.name,
      loss.jsd_beta,
      log_softmax(config, p),
      log_softmax(TEACHER, teacher),
      behaviour[1:],
      ids[1:],
    )
    return -jnp.sum(mask[1:] * terms)

  return jax.grad(objective)(params)


def slow_gradient(made, step):
  """A loop over the rows of trajectories; f64 leaves, divided."""
  total, count = jax.tree.map(jnp.zeros_like, made.params), 0
  for t in step:
    for row in t.rows:
      p, n = len(row.prompt_tokens), len(row.tokens)
      ids, mask, behaviour = (np.zeros(LENGTH) for _ in range(3))
      ids[: p + n] = np.concatenate([row.prompt_tokens, row.tokens])
      mask[p : p + n] = row.loss_mask
      behaviour[p : p + n] = row.behaviour_logprobs
      term = _slow_term(
        made.config,
        made.loss,
        made.params,
        made.teacher.params,
        ids.astype(np.int32),
        behaviour,
        mask,
      )
      total = jax.tree.map(jnp.add, total, term)
      count += row.num_sampled
  return jax.tree.map(lambda x: np.asarray(x, np.float64) / count, total)


def leaf_errors(got, want):
  """Relative 2-norm of the difference, f64[leaves]."""
  pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
  return np.array([np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in pairs])
