"""A tiny model, an engine of it, and the slow loop that it must equal.

The loop runs one full forward pass a token, without a cache or a batch.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from thundersync_jax import mesh as mesh_lib
from thundersync_jax.models import families, transformer
from thundersync_jax.rollout import engine as engine_lib
from thundersync_jax.rollout import sampling as programs
from thundersync_jax.types import Sampling

VOCAB = 31
STOP = 7
CONTEXT = 52
ONE_BUCKET = {'cache_buckets': (CONTEXT,), 'prompt_buckets': (8,)}
MAX_TOKENS = 10
CONFIG = families.ModelConfig(
  family='llama',
  vocab_size=VOCAB,
  embed_dim=16,
  mlp_dim=24,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
)


@functools.cache
def weights(seed=0):
  """Random parameters with a wide spread of logits, in decode layout."""
  params = transformer.init(CONFIG, jax.random.key(seed))
  return transformer.unstack(params | {'head': params['head'] * 2})


def make_engine(device=0, mesh=None, config=CONFIG, params=None, **changes):
  mesh = mesh or mesh_lib.make_mesh(jax.devices()[device : device + 1])
  settings = {
    'slots': 5,
    'chunk': 3,
    'max_context': CONTEXT,
    'cache_buckets': (16, CONTEXT),
    'prompt_buckets': (4, 8),
    'stop_ids': (STOP,),
    'seed': 11,
    'sampling': Sampling(),
    'prefill_rows': 2,
    'extend_rows': 2,
  }
  engine = engine_lib.Engine(config, mesh, **settings | changes)
  publish(engine, mesh, params or weights(), 0)
  return engine


def publish(engine, mesh, params, policy_version):
  """Hands weights over, sharded as their logical axes say."""
  axes = transformer.logical_axes(CONFIG)
  layer = {name: names[1:] for name, names in axes['layers'].items()}
  axes = axes | {'layers': [layer] * CONFIG.num_layers}
  shardings = mesh_lib.tree_shardings(mesh, params, axes)
  engine.publish(jax.device_put(params, shardings), policy_version)


def requests_of(prompts=4, members=3, max_tokens=MAX_TOKENS, step=2):
  """Prompts of 1, 4, 7, 2, 5, 8, ... tokens."""
  rng = np.random.default_rng(5)
  return [
    engine_lib.Request(prompt_id, member, step, tokens, max_tokens)
    for prompt_id in range(prompts)
    for tokens in [rng.integers(8, VOCAB, 1 + 3 * prompt_id % 8)]
    for member in range(members)
  ]


def no_answer(turn, number):
  return None


def two_answers(turn, number):
  """Observations of 0 to 10 tokens: more than the longest bucket takes."""
  if number == 3:
    return None
  return np.arange(8, VOCAB)[: 5 * (number + turn.member - 1)][:10]


def reply(engine, played, answer, ended):
  """Resumes or finishes the turns that ended, and files them in `played`."""
  for turn in ended:
    turns = played.setdefault((turn.prompt_id, turn.member), [])
    turns.append(turn)
    observation = answer(turn, len(turns))
    if observation is None:
      engine.finish(turn.prompt_id, turn.member)
    else:
      engine.resume(turn.prompt_id, turn.member, observation, MAX_TOKENS)


def advance(engine, played, answer):
  """One harvest and launch; returns whether a chunk is in flight."""
  reply(engine, played, answer, engine.harvest(block=True))
  return engine.launch()


def run(engine, requests, answer=no_answer):
  """Turns of every trajectory by (prompt_id, member)."""
  played = {}
  for request in requests:
    engine.submit(request)
  while advance(engine, played, answer):
    pass
  return played


def next_logits(params, tokens):
  """f32[V] after the tokens, by a full forward pass."""
  padded = np.zeros(CONTEXT, np.int32)
  padded[: len(tokens)] = tokens
  return _padded_logits(params, padded, len(tokens))


@jax.jit
def _padded_logits(params, tokens, count):
  positions = jnp.arange(CONTEXT)[None]
  ids = (positions < count).astype(jnp.int32)
  hidden = transformer.forward(
    CONFIG, params, tokens[None], positions, ids, ids
  )
  return transformer.head(params) @ hidden[0, count - 1]


def slow_token(params, tokens, request, temperature):
  """The next token and its log-probability, from the definition."""
  scaled = next_logits(params, tokens) / (temperature or 1)
  key = programs.root_key(11)
  path = request.step, request.prompt_id, request.member, len(tokens)
  for number in path:
    key = jax.random.fold_in(key, number)
  noise = jax.random.gumbel(key, (VOCAB,)) * (temperature > 0)
  token = int(jnp.argmax(scaled + noise))
  return token, float(jax.nn.log_softmax(scaled)[token])


def check(request, turns, answer=no_answer, temperature=1.0, params=None):
  """Compares turns with the slow loop; row 5 asks for 1e-4 in f32.

  params: a list of parameters by policy_version.
  """
  params = params or [weights()]
  tokens, limit = list(request.tokens), request.max_tokens
  for number, turn in enumerate(turns, start=1):
    for i, token in enumerate(turn.tokens):
      version = turn.policy_versions[i]
      expected = slow_token(params[version], tokens, request, temperature)
      assert token == expected[0]
      assert abs(turn.logprobs[i] - expected[1]) < 1e-4
      assert token != STOP or i == len(turn.tokens) - 1
      tokens.append(int(token))
    if tokens[-1] == STOP:
      assert turn.finish_reason == 'stop'
    elif len(turn.tokens) == limit:
      assert turn.finish_reason == 'length'
    else:
      assert (turn.finish_reason, len(tokens)) == ('context', CONTEXT)
    observation = answer(turn, number)
    tokens += [] if observation is None else observation.tolist()
    limit = MAX_TOKENS


def same(a, b, atol=0.0):
  """Token for token and, by default, bit for bit."""
  assert a.keys() == b.keys()
  for key, turns in a.items():
    assert len(turns) == len(b[key])
    for one, other in zip(turns, b[key], strict=True):
      np.testing.assert_array_equal(one.tokens, other.tokens)
      np.testing.assert_allclose(one.logprobs, other.logprobs, 0, atol)
      assert one.finish_reason == other.finish_reason
