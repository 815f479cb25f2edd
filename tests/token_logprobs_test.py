"""Token log-probabilities in chunks against log_softmax of all the logits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from thundersync_jax.kernels.token_logprobs import api

ROWS, EMBED, VOCAB = 7, 5, 23


def inputs(dtype=np.float64):
  rng = np.random.default_rng(0)
  hidden = rng.normal(size=(ROWS, EMBED)).astype(dtype)
  head = rng.normal(size=(VOCAB, EMBED)).astype(dtype)
  targets = rng.integers(0, VOCAB, ROWS)
  targets[:2] = 0, VOCAB - 1  # the ends of the first and the last chunk
  return hidden, head, targets


def expected(hidden, head, targets, temperature):
  """By the [N, V] logits."""
  logprobs = jax.nn.log_softmax(hidden @ head.T / temperature)
  entropy = -(jnp.exp(logprobs) * logprobs).sum(axis=1)
  return logprobs[np.arange(len(targets)), targets], entropy


def mixed(function, targets, **kwargs):
  """A scalar of both outputs, with another weight for each."""
  weights = np.linspace(-1, 2, len(targets))

  def loss(hidden, head):
    logprobs, entropy = function(hidden, head, targets, **kwargs)
    return logprobs @ weights + entropy @ np.cos(weights)

  return loss


@pytest.mark.parametrize('chunk', [1, 5, 12, 22, 23, 100, None])
@pytest.mark.parametrize('temperature', [1.0, 0.6])
def test_values_and_gradients_equal_those_of_log_softmax(chunk, temperature):
  """cases row 6: any chunk, V divisible or not, any temperature."""
  hidden, head, targets = inputs()
  with jax.enable_x64(True):
    ours = functools.partial(
      api.token_logprobs, temperature=temperature, vocab_chunk=chunk
    )
    full = functools.partial(expected, temperature=temperature)
    results = []
    for function in (ours, full):
      grad = jax.jit(jax.grad(mixed(function, targets), (0, 1)))
      values = function(jnp.asarray(hidden), jnp.asarray(head), targets)
      results.append((values, grad(hidden, head)))
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12),
    *results,
  )
  assert {x.dtype for x in jax.tree.leaves(results[0])} == {np.dtype('f8')}


@pytest.mark.parametrize('temperature', [0.6, 1.7])
def test_gradient_equals_finite_differences(temperature):
  """cases row 6: of log_softmax(logits / T), by numpy alone."""
  hidden, head, targets = inputs()
  weights = np.linspace(-1, 2, ROWS)

  def loss(hidden, head):
    logits = hidden @ head.T / temperature
    logits -= logits.max(axis=1, keepdims=True)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    entropy = -(np.exp(logprobs) * logprobs).sum(axis=1)
    chosen = logprobs[np.arange(ROWS), targets]
    return chosen @ weights + entropy @ np.cos(weights)

  with jax.enable_x64(True):
    ours = mixed(
      api.token_logprobs, targets, temperature=temperature, vocab_chunk=6
    )
    grads = jax.jit(jax.grad(ours, (0, 1)))(hidden, head)
  for argument in (0, 1):
    numeric = np.zeros_like((hidden, head)[argument])
    for index in np.ndindex(numeric.shape):
      sides = []
      for step in (1e-5, -1e-5):
        moved = [hidden.copy(), head.copy()]
        moved[argument][index] += step
        sides.append(loss(*moved))
      numeric[index] = (sides[0] - sides[1]) / 2e-5
    np.testing.assert_allclose(grads[argument], numeric, rtol=1e-6, atol=1e-8)


def test_extreme_logits_stay_finite():
  """One logit far above the rest, in a chunk after the others, and before."""
  head = jnp.zeros((10, 1)).at[8].set(1.0)
  hidden = jnp.array([[3e4], [-3e4]])
  logprobs, entropy = api.token_logprobs(
    hidden, head, jnp.array([8, 8]), vocab_chunk=3
  )
  np.testing.assert_allclose(logprobs, [0.0, -3e4 - np.log(9)], rtol=1e-6)
  np.testing.assert_allclose(entropy, [0.0, np.log(9)], atol=1e-5)
  grads = jax.grad(
    mixed(api.token_logprobs, jnp.array([8, 8]), vocab_chunk=3), (0, 1)
  )(hidden, head)
  assert all(np.isfinite(grad).all() for grad in grads)


def test_bf16_operands_give_a_close_gradient_in_the_dtype_of_the_inputs():
  hidden, head, targets = inputs(np.float32)
  grads = {
    dtype: jax.jit(
      jax.grad(
        mixed(api.token_logprobs, targets, vocab_chunk=6, compute_dtype=dtype),
        (0, 1),
      )
    )(hidden, head)
    for dtype in ('float32', 'bfloat16')
  }
  for exact, rounded in zip(*grads.values(), strict=True):
    assert rounded.dtype == jnp.float32
    exact, rounded = np.ravel(exact), np.ravel(rounded)
    cosine = exact @ rounded / np.linalg.norm(exact) / np.linalg.norm(rounded)
    assert 0.999 < cosine < 1.0
  cast = jnp.asarray(head, jnp.bfloat16)
  loss = mixed(api.token_logprobs, targets, compute_dtype='bfloat16')
  value, grad = jax.value_and_grad(loss, 1)(hidden, cast)
  assert grad.dtype == jnp.bfloat16
  np.testing.assert_allclose(value, loss(hidden, head), rtol=1e-6)


@pytest.mark.parametrize('compute_dtype', ['float32', 'bfloat16'])
def test_memory_at_8k_tokens_and_150k_vocabulary(compute_dtype):
  """cases row 39: value and gradient, at most a fiftieth of [N, V] in f32."""
  rows, vocab, embed = 8192, 150_000, 16

  def loss(hidden, head, targets):
    logprobs, entropy = api.token_logprobs(
      hidden, head, targets, compute_dtype=compute_dtype
    )
    return (logprobs + entropy).sum()

  compiled = (
    jax.jit(jax.value_and_grad(loss, (0, 1)))
    .lower(
      jax.ShapeDtypeStruct((rows, embed), jnp.float32),
      jax.ShapeDtypeStruct((vocab, embed), jnp.float32),
      jax.ShapeDtypeStruct((rows,), jnp.int32),
    )
    .compile()
  )
  logits = 4 * rows * vocab
  assert compiled.memory_analysis().temp_size_in_bytes < logits / 50


@pytest.mark.parametrize(
  'change, message',
  [
    ({'temperature': 0.0}, 'temperature=0.0 must be positive'),
    ({'vocab_chunk': 0}, 'vocab_chunk=0'),
    ({'implementation': 'tpu_v9'}, "'tpu_v9' does not exist.*xla"),
    ({'compute_dtype': 'float16'}, "'float16' must be"),
    ({'targets': np.zeros(3, int)}, r'targets \(3,\) must be \[N\]'),
    ({'hidden': np.zeros((1, ROWS, EMBED))}, 'flatten rows first'),
    ({'head': np.zeros((VOCAB, 4))}, r'head \(23, 4\)'),
  ],
)
def test_bad_arguments_are_named(change, message):
  arguments = dict(zip(('hidden', 'head', 'targets'), inputs(), strict=True))
  with pytest.raises(ValueError, match=message):
    api.token_logprobs(**(arguments | change))
