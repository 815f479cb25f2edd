"""Attention against a dense mask, its memory, and its independence of rows."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from thundersync_jax.kernels.flash_attention import api as attention_api


def dense_attention(q, k, v, segments, branches):
  """The packed mask as one [T, T] matrix, K and V repeated."""
  t, group = q.shape[1], q.shape[2] // k.shape[2]
  k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
  mask = np.zeros((q.shape[0], t, t), bool)
  for b, i in np.ndindex(q.shape[0], t):
    for j in range(i + 1):
      own = branches[b, j] in (0, branches[b, i])
      mask[b, i, j] = own and segments[b, j] == segments[b, i]
  scores = jnp.einsum('btnh,bsnh->bnts', q, k) / math.sqrt(q.shape[-1])
  probs = jax.nn.softmax(jnp.where(mask[:, None], scores, -jnp.inf))
  return jnp.einsum('bnts,bsnh->btnh', probs, v)


def test_attention_in_blocks_agrees_with_a_dense_mask():
  """Three blocks of queries, the last one not full; values and gradients."""
  rng = np.random.default_rng(0)
  b, t, n, k, h = 2, 300, 4, 2, 4
  with jax.enable_x64(True):
    q, keys, values, weights = (
      jnp.asarray(rng.normal(size=(b, t, heads, h))) for heads in (n, k, k, n)
    )
    segments = np.sort(rng.integers(0, 4, (b, t)))
    branches = rng.integers(0, 3, (b, t))

    def loss(attention, *qkv):
      return (attention(*qkv, segments, branches) * weights).sum()

    results = [
      jax.jit(jax.value_and_grad(functools.partial(loss, f), (0, 1, 2)))(
        q, keys, values
      )
      for f in (attention_api.packed_attention, dense_attention)
    ]
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-11),
    *results,
  )


def cached_and_dense(t, s):
  """Both attentions for queries at the end of a cache that is full."""
  rng = np.random.default_rng(1)
  q, k, v = (rng.normal(size=(2, s, heads, 4)) for heads in (4, 2, 2))
  positions = np.arange(s - t, s) * np.ones((2, 1), int)
  ones = np.ones((2, s), int)
  cached = attention_api.cached_attention(
    jnp.asarray(q[:, -t:]),
    jnp.asarray(k).transpose(0, 2, 3, 1),
    jnp.asarray(v).swapaxes(1, 2),
    positions,
  )
  dense = dense_attention(*map(jnp.asarray, (q, k, v)), ones, ones)
  return cached, dense[:, -t:]


@pytest.mark.parametrize('t', [1, 7, 129])
def test_attention_over_a_cache_agrees_with_a_dense_mask(t):
  with jax.enable_x64(True):
    cached, dense = cached_and_dense(t, 140)
  np.testing.assert_allclose(cached, dense, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize('compute_dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('t', [1, 6])
def test_a_row_depends_on_neither_its_slot_nor_the_cache_length(
  compute_dtype, t
):
  """Bit for bit: schedules that fill slots otherwise sample the same tokens.

  Behind a row's own positions the cache holds what other turns left there. The
  shape is that of a real model: XLA picks other code for a few hundred numbers.
  """
  rng = np.random.default_rng(2)
  slots, heads, h = 16, 3, 64
  q = rng.normal(size=(slots, t, 3 * heads, h)).astype(np.float32)
  k = rng.normal(size=(slots, heads, h, 128)).astype(np.float32)
  v = rng.normal(size=(slots, heads, 128, h)).astype(np.float32)
  positions = rng.integers(0, 30, (slots, 1)) + np.arange(t)
  attend = jax.jit(
    functools.partial(
      attention_api.cached_attention, compute_dtype=compute_dtype
    )
  )
  expected = attend(q, k[..., :64], v[:, :, :64], positions)
  for length in (48, 72, 96, 128):
    moved = rng.permutation(slots)
    keys, values = k[moved, ..., :length], v[moved, :, :length]
    keys[..., 35:] = rng.normal(size=keys[..., 35:].shape)
    values[:, :, 35:] = rng.normal(size=values[:, :, 35:].shape)
    out = attend(q[moved], keys, values, positions[moved])
    np.testing.assert_array_equal(out, expected[moved])


def test_training_attention_keeps_no_square_of_scores():
  rows, length, heads = 1, 2048, 4
  qkv = jax.ShapeDtypeStruct((rows, length, heads, 8), jnp.float32)
  ids = jax.ShapeDtypeStruct((rows, length), jnp.int32)

  def loss(q, k, v, segments, branches):
    return attention_api.packed_attention(q, k, v, segments, branches).sum()

  grad = jax.jit(jax.grad(loss, (0, 1, 2)))
  memory = grad.lower(qkv, qkv, qkv, ids, ids).compile().memory_analysis()
  square = 4 * heads * length * length
  assert memory.temp_size_in_bytes < square / 4


def test_unknown_attention_is_refused():
  x = jnp.ones((1, 2, 2, 4))
  ids = jnp.ones((1, 2), jnp.int32)
  with pytest.raises(ValueError, match="'tpu_v9' does not exist.*xla"):
    attention_api.packed_attention(x, x, x, ids, ids, implementation='tpu_v9')
  with pytest.raises(ValueError, match="'tpu_v9' does not exist.*xla"):
    attention_api.cached_attention(x, x, x, ids, implementation='tpu_v9')
