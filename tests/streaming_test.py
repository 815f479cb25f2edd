"""Streamed gradients equal batch gradients, whatever the order of arrival."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from thundersync_jax import mesh as mesh_lib
from thundersync_jax.learner import gradient_stream, gradients, packing
from thundersync_jax.learner import learner as learner_lib
from thundersync_jax.models import families, transformer
from thundersync_jax.objectives import advantages, aggregation
from thundersync_jax.types import Trajectory, Turn

CONFIG = families.ModelConfig(
  family='llama',
  vocab_size=37,
  embed_dim=16,
  mlp_dim=24,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=4,
  max_context=64,
  tied=True,
)
SHAPES = (packing.Shape(1, 24, 12), packing.Shape(2, 40, 24))
GROUPS, SIZE = 4, 4


def trajectory(rng, prompt_id, member, prompt, reward):
  n = rng.integers(1, 7)
  tokens = rng.integers(0, 37, n + 2).astype(np.int32)
  mask = np.ones(n + 2, bool)
  if n > 3:
    mask[2:4] = False  # an observation in the middle
  turn = Turn(
    tokens,
    mask,
    rng.normal(-3, 0.1, n + 2).astype(np.float32),
    np.zeros(n + 2, np.int32),
    'stop',
  )
  return Trajectory(prompt_id, member, 0, prompt, (turn,), reward)


def make_step(seed, rewards):
  rng = np.random.default_rng(seed)
  step = []
  for g in range(GROUPS):
    prompt = rng.integers(0, 37, rng.integers(2, 9)).astype(np.int32)
    for m in range(SIZE):
      step.append(trajectory(rng, g, m, prompt, rewards(rng, g)))
  return step


@jax.jit
def slow_term(params, ref, ids, coefficients, kl_weights):
  """Gradient of one padded sequence; dense log_softmax, no packing."""

  def log_softmax(p):
    ones = jnp.ones_like(ids)[None]
    hidden = transformer.forward(
      CONFIG, p, ids[None], jnp.arange(len(ids))[None], ones, 0 * ones
    )
    logits = hidden[0] @ transformer.head(p).T
    return jax.nn.log_softmax(logits)[jnp.arange(len(ids) - 1), ids[1:]]

  def objective(p):
    lp = log_softmax(p)
    d = log_softmax(ref) - lp
    kl = jnp.exp(d) - d - 1
    return jnp.sum(coefficients[1:] * lp - kl_weights[1:] * kl)

  return jax.grad(objective)(params)


def slow_gradient(params, step, estimator, agg, kl_coef, ref):
  """A loop over scopes and trajectories."""
  scopes, denominator = {}, 0.0
  for t in step:
    key = {'group': t.prompt_id, 'batch': 0}.get(
      estimator.scope, (t.prompt_id, t.member)
    )
    scopes.setdefault(key, []).append(t)
  total = jax.tree.map(jnp.zeros_like, params)
  for members in scopes.values():
    values = estimator.advantages(np.array([t.reward for t in members]))
    for t, a in zip(members, values, strict=True):
      n = int(t.loss_mask.sum())
      p = len(t.prompt_tokens)
      ids, weights = np.zeros(24, np.int32), np.zeros(24)
      ids[: p + len(t.tokens)] = np.concatenate([t.prompt_tokens, t.tokens])
      weights[p : p + len(t.tokens)] = agg.weight(n) * t.loss_mask
      term = slow_term(params, ref, ids, a * weights, kl_coef * weights)
      total = jax.tree.map(jnp.add, total, term)
      denominator += agg.share(n, 5.0)
  return jax.tree.map(lambda x: x / denominator, total)


def setup(dtype, kl_coef=0.0, on_host=False):
  def cast(t):
    return jax.tree.map(lambda x: x.astype(dtype), t)

  params = cast(transformer.init(CONFIG, jax.random.key(0)))
  ref = cast(transformer.init(CONFIG, jax.random.key(1)))
  mesh = mesh_lib.make_mesh(jax.devices()[:1])
  learner = learner_lib.Learner(
    CONFIG,
    gradients.Objective(kl_coef=kl_coef),
    optax.sgd(1.0),
    mesh,
    shapes=SHAPES,
    sums_on_host=on_host,
  )
  return learner, params, ref


def streamed_gradient(learner, params, ref, step, plan, seed):
  """Arrives in a random order; content before reward for about half."""
  rng = np.random.default_rng(seed)
  stream = gradient_stream.GradientStream(
    learner, plan, pad_id=0, params=params
  )
  ref = ref if learner.objective.kl_coef else None
  stream.queue.open(0, list(range(GROUPS)), SIZE)
  events = []
  for t in step:
    at = rng.random()
    events.append((at, t))
    if rng.random() < 0.5:
      events.append((at * 0.5, dataclasses.replace(t, reward=None)))
  for _, event in sorted(events, key=lambda e: e[0]):
    stream.queue.put(event)
    stream.settle()
    while rng.random() < 0.7 and stream.launch(0, params, ref):
      stream.poll(block=True)
  while not stream.step_complete(0):
    stream.settle()
    assert stream.launch(0, params, ref) or stream.step_complete(0)
    stream.poll(block=True)
  launched = dict(stream.scheduler.launches)
  gradient, _ = stream.finish(0)
  total = jax.tree.map(lambda x: x / gradient.denominator, gradient.total)
  return total, launched


def relative(a, b):
  return max(
    float(np.linalg.norm(x - y) / np.linalg.norm(y))
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
  )


def binary(rng, group):
  return float(rng.integers(0, 2)) if group else 1.0  # group 0 has no spread


def continuous(rng, group):
  return float(rng.normal())


def cases():
  yield from itertools.product(
    advantages.ESTIMATORS, aggregation.AGGREGATIONS, (binary, continuous)
  )


@pytest.mark.parametrize('kl_coef', [0.0, 0.3])
@pytest.mark.parametrize('dtype,bound', [('float64', 1e-12), ('float32', 5e-7)])
def test_streamed_equals_batch(dtype, bound, kl_coef):
  """cases row 22: over estimators, aggregations, arrival orders."""
  with jax.enable_x64(dtype == 'float64'):
    learner, params, ref = setup(dtype, kl_coef)
    seen = {}
    for seed, (name, agg, rewards) in enumerate(cases()):
      estimator = advantages.ESTIMATORS[name]
      step = make_step(seed, rewards)
      plan = gradient_stream.Plan(
        estimator,
        aggregation.AGGREGATIONS[agg],
        constant_tokens=5.0,
        max_open_groups=3,
      )
      got, launched = streamed_gradient(learner, params, ref, step, plan, seed)
      whole = dataclasses.replace(plan, granularity='batch')
      want, _ = streamed_gradient(learner, params, ref, step, whole, seed)
      assert relative(got, want) < bound, (name, agg, rewards.__name__)
      for release, count in launched.items():
        seen[release] = seen.get(release, 0) + count
      if seed % 3 == 0:  # the slow loop, without any of our machinery
        slow = slow_gradient(
          params, step, estimator, plan.aggregation, kl_coef, ref
        )
        assert relative(got, slow) < bound * 10, (name, agg)
    assert all(seen.values()), seen  # every release class has been used
