"""Streamed gradients of a real model equal batch gradients, leaf by leaf.

In f64 the difference is below 1e-12: the algebra is exact. In f32 both are
wrong by their own rounding, which depends on the shape that a trajectory is
packed into, so their difference cannot be smaller than that. What is bounded:

  5e-7  the difference of the whole gradients (relative, 2-norm), in every case
  5e-7  that of each leaf, root mean square over the cases
  1e-6  that of each leaf, in every case

and streaming adds nothing to the error of the batch gradient itself, measured
against f64. Weights are drawn with the usual standard deviation of 0.02; with
1/sqrt(width), far from what models start with, any two packings of one batch
differ three times as much. Measured: 2.8e-7, 3.1e-7 and 6.0e-7 (one leaf of
330 above 5e-7, a norm whose 32 numbers cancel; another order of summation does
not change that). What did change it are the centred affine sums: without them
rewards in [0, 1] cost a factor of two.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import random_steps

from thundersync_jax import mesh as mesh_lib
from thundersync_jax.learner import gradient_stream, gradients
from thundersync_jax.learner import learner as learner_lib
from thundersync_jax.models import families, transformer
from thundersync_jax.objectives import advantages, aggregation

CONFIG = families.ModelConfig(
  family='llama',
  vocab_size=random_steps.VOCAB,
  embed_dim=16,
  mlp_dim=24,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=4,
  max_context=64,
  tied=True,
)
ONE_SHAPE = random_steps.SHAPES[1:]
CASES = tuple(
  itertools.product(
    advantages.ESTIMATORS,
    aggregation.AGGREGATIONS,
    (random_steps.binary, random_steps.fraction),
  )
)


def weights(seed, std=0.02):
  """f32 values, so that f64 programs start from the same ones."""
  rng = np.random.default_rng(seed)

  def leaf(path, x):
    norm = jax.tree_util.keystr(path[-1:], simple=True).endswith('norm')
    values = (
      1 + rng.normal(0, std, x.shape) if norm else rng.normal(0, std, x.shape)
    )
    return values.astype(np.float32)

  shapes = jax.eval_shape(
    functools.partial(transformer.init, CONFIG), jax.random.key(0)
  )
  return jax.tree_util.tree_map_with_path(leaf, shapes)


@functools.cache
def make_learner(dtype, kl_coef=0.0, on_host=False, shapes=ONE_SHAPE):
  """A learner, parameters and a reference; compiles in the dtype given."""
  params, ref = (
    jax.tree.map(lambda x: jnp.asarray(x, dtype), weights(seed))
    for seed in (0, 1)
  )
  learner = learner_lib.Learner(
    CONFIG,
    gradients.Objective(kl_coef=kl_coef),
    optax.sgd(1.0),
    mesh_lib.make_mesh(jax.devices()[:1]),
    shapes=shapes,
    sums_on_host=on_host,
  )
  return learner, params, ref if kl_coef else None


def make_plan(name, how, **changes):
  return gradient_stream.Plan(
    advantages.ESTIMATORS[name],
    aggregation.AGGREGATIONS[how],
    constant_tokens=random_steps.CONSTANT_TOKENS,
    max_open_groups=3,
    **changes,
  )


def gradient_of(parts, step, plan, seed):
  """Streams a step in the random order of the seed; f64 leaves, launches."""
  learner, params, ref = parts
  rng = np.random.default_rng(seed)
  stream = gradient_stream.GradientStream(
    learner, plan, pad_id=0, params=params
  )
  random_steps.open_step(stream, step)
  events = random_steps.arrivals(rng, step)
  gradient = random_steps.play(stream, events, rng, params, ref)
  total = jax.tree.map(
    lambda x: np.asarray(x, np.float64) / gradient.denominator, gradient.total
  )
  return total, stream.scheduler.launches


@functools.cache
def all_gradients(dtype):
  """[(streamed, batch)] over CASES, and the launches of each release class."""
  pairs, launched = [], dict.fromkeys(('final', 'known', 'content'), 0)
  with jax.enable_x64(dtype == 'float64'):
    # f32 rounds by shape, so there the two of them matter.
    shapes = ONE_SHAPE if dtype == 'float64' else random_steps.SHAPES
    parts = make_learner(dtype, shapes=shapes)
    for seed, (name, how, rewards) in enumerate(CASES):
      step = random_steps.make_step(seed, rewards)
      plan = make_plan(name, how)
      streamed, releases = gradient_of(parts, step, plan, seed)
      whole = dataclasses.replace(plan, granularity='batch')
      batch, _ = gradient_of(parts, step, whole, seed)
      pairs.append((streamed, batch))
      launched = {k: launched[k] + releases[k] for k in launched}
  return pairs, launched


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


def slow_gradient(parts, step, plan):
  """A loop over trajectories, without any of our machinery."""
  learner, params, ref = parts
  pairs, denominator = random_steps.coefficients(
    step, plan.estimator, plan.aggregation
  )
  total = jax.tree.map(jnp.zeros_like, params)
  for t, coefficient in pairs:
    p, n = len(t.prompt_tokens), len(t.tokens)
    ids, mask = np.zeros(24, np.int32), np.zeros(24)
    ids[: p + n] = np.concatenate([t.prompt_tokens, t.tokens])
    mask[p : p + n] = t.loss_mask
    kl = learner.objective.kl_coef * plan.aggregation.weight(t.num_sampled)
    term = slow_term(params, ref or params, ids, coefficient * mask, kl * mask)
    total = jax.tree.map(jnp.add, total, term)
  return jax.tree.map(lambda x: np.asarray(x) / denominator, total)


def leaf_errors(got, want):
  """Relative 2-norm of the difference, f64[leaves]."""
  pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
  return np.array([np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in pairs])


def whole_error(got, want):
  def flat(tree):
    return np.concatenate([x.ravel() for x in jax.tree.leaves(tree)])

  difference = np.linalg.norm(flat(got) - flat(want))
  return difference / np.linalg.norm(flat(want))


def test_streamed_equals_batch_f64():
  """cases row 22: every estimator, aggregation and kind of reward."""
  pairs, launched = all_gradients('float64')
  assert all(launched.values()), launched  # every release class was used
  assert max(leaf_errors(*pair).max() for pair in pairs) < 1e-12


def test_batch_equals_slow_loop_f64():
  with jax.enable_x64(True):
    parts = make_learner('float64')
    for seed in range(0, len(CASES), 7):
      name, how, rewards = CASES[seed]
      step = random_steps.make_step(seed, rewards)
      want = slow_gradient(parts, step, make_plan(name, how))
      batch = all_gradients('float64')[0][seed][1]
      assert leaf_errors(batch, want).max() < 1e-12, CASES[seed]


def test_streamed_equals_batch_f32():
  """See the module's docstring for the bounds."""
  pairs, _ = all_gradients('float32')
  leaves = np.array([leaf_errors(*pair) for pair in pairs])
  wholes = np.array([whole_error(*pair) for pair in pairs])
  assert wholes.max() < 5e-7
  assert np.sqrt(np.mean(leaves**2, axis=0)).max() < 5e-7
  assert leaves.max() < 1e-6


def test_streaming_rounds_no_worse_than_the_batch():
  """Both against f64: the errors of f32 differ by less than a tenth."""
  truth = [batch for _, batch in all_gradients('float64')[0]]
  pairs, _ = all_gradients('float32')
  errors = np.array(
    [
      [whole_error(gradient, true) for gradient in pair]
      for pair, true in zip(pairs, truth, strict=True)
    ]
  )
  streamed, batch = np.sqrt(np.mean(errors**2, axis=0))
  assert streamed < 1.1 * batch
  assert (errors[:, 0] < 2 * errors[:, 1] + 1e-7).all()


@pytest.mark.parametrize('name', ['grpo', 'reinforce'])
def test_kl_is_an_additive_sum_f64(name):
  """Streamed, in one batch, and by the slow loop."""
  with jax.enable_x64(True):
    parts = make_learner('float64', kl_coef=0.3)
    for how in ('token', 'sequence'):
      step = random_steps.make_step(3)
      plan = make_plan(name, how)
      streamed, launched = gradient_of(parts, step, plan, seed=5)
      whole = dataclasses.replace(plan, granularity='batch')
      batch, _ = gradient_of(parts, step, whole, seed=5)
      assert launched['known'] and launched['content']
      assert leaf_errors(streamed, batch).max() < 1e-12
      assert leaf_errors(batch, slow_gradient(parts, step, plan)).max() < 1e-12


def test_sums_in_host_memory_are_the_same_bit_for_bit():
  step = random_steps.make_step(1, random_steps.fraction)
  plan = make_plan('grpo', 'token')
  shapes = random_steps.SHAPES
  device, host = (
    make_learner('float32', on_host=on_host, shapes=shapes)
    for on_host in (False, True)
  )
  one, other = (gradient_of(x, step, plan, seed=2)[0] for x in (device, host))
  jax.tree.map(np.testing.assert_array_equal, one, other)
