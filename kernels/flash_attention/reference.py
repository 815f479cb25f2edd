"""Attention in plain XLA, with the memory of flash attention.

The packed form visits pairs (block of queries, block of keys) on and below the
diagonal, with an online softmax forward, and computes the scores of a pair
again backward (arXiv 2205.14135). Kept are the output and one logsumexp a
query; one block of scores lives at a time, and the upper half of the square is
never computed. Heads come before positions, so that a product reads and writes
whole blocks: XLA would copy every operand of another order.
"""

import functools

import jax
import jax.numpy as jnp

from thundersync_jax.kernels import precision

# On CPU faster than 64 or 256, and 3 x faster than one square of 1280.
_BLOCK = 128


def cached_attention(q, k, v, positions, compute_dtype):
  """See api.cached_attention."""
  length = q.shape[1]
  grouped = _group(q, k.shape[1])
  if length == 1:
    out = _decode(grouped[:, :, 0], k, v, positions, compute_dtype)
    return out.reshape(q.shape)
  block = _block(length)
  grouped, positions = (_pad(x, block) for x in (grouped, positions[:, None]))
  einsum = functools.partial(precision.einsum, compute_dtype=compute_dtype)

  def attend(out, i):
    own = _take(positions, i, block)[..., None, None]
    scores = einsum('bktgh,bkhs->bktgs', _take(grouped, i, block), k)
    scores = _masked(scores, jnp.arange(k.shape[3]) <= own)
    peak = jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True))
    weights = jnp.exp(scores - peak)
    part = einsum('bktgs,bksh->bktgh', weights, v)
    return _put(out, part / weights.sum(axis=-1, keepdims=True), i, block), None

  out = jnp.zeros(grouped.shape, jnp.promote_types(q.dtype, jnp.float32))
  out, _ = jax.lax.scan(attend, out, jnp.arange(out.shape[2] // block))
  return out.swapaxes(1, 2)[:, :length].reshape(q.shape)


def _decode(q, k, v, positions, compute_dtype):  # [B, K, G, H]
  """One query a row; values are summed by hand, faster than a CPU matmul.

  Rounds where the matmuls of the other forms do, so that bf16 sampling and
  training see the same numbers. No sum runs along the last axis of its operand:
  it would round differently for another cache length S.
  """
  rounded = functools.partial(precision.rounded, compute_dtype=compute_dtype)
  scores = precision.einsum(
    'bkgh,bkhs->bkgs', q, k, compute_dtype=compute_dtype
  )
  visible = jnp.arange(k.shape[3]) <= positions[:, :, None, None]
  scores = _masked(scores, visible)
  peak = jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True))
  weights = jnp.exp(scores - peak)
  out = (rounded(weights)[..., None] * rounded(v)[:, :, None]).sum(axis=3)
  return out / weights.sum(axis=-1, keepdims=True)


def packed_attention(q, k, v, segment_ids, branch_ids, compute_dtype):
  """See api.packed_attention."""
  length = q.shape[1]
  block = _block(length)
  heads_first = _group(q, k.shape[2]), k.swapaxes(1, 2), v.swapaxes(1, 2)
  ids = segment_ids[:, None], branch_ids[:, None]
  arrays = (_pad(x, block) for x in heads_first + ids)
  out = _packed(*arrays, block, compute_dtype)
  return out.swapaxes(1, 2)[:, :length].reshape(q.shape)


def _block(length: int) -> int:
  """At most _BLOCK, with as little padding as multiples of 8 leave."""
  count = -(-length // _BLOCK)
  return length if count == 1 else -(-length // (8 * count)) * 8


def _pad(x, block):  # to whole blocks along T, axis 2
  widths = [(0, 0)] * x.ndim
  widths[2] = (0, -x.shape[2] % block)
  return jnp.pad(x, widths)


def _group(q: jax.Array, kv_heads: int) -> jax.Array:  # [B, K, T, G, H]
  """Query heads by the kv head that they read, scaled by 1 / sqrt(H)."""
  b, t, n, h = q.shape
  grouped = (q * h**-0.5).reshape(b, t, kv_heads, n // kv_heads, h)
  return grouped.swapaxes(1, 2)


def _lowest(x):
  return jnp.finfo(x.dtype).min / 2


def _masked(scores, visible):
  return jnp.where(visible, scores, _lowest(scores))


def _take(x, i, size):  # block i of axis 2
  return jax.lax.dynamic_slice_in_dim(x, i * size, size, axis=2)


def _put(x, new, i, size):
  return jax.lax.dynamic_update_slice_in_dim(x, new, i * size, axis=2)


def _pairs(length, block):
  """Indices of query and key block; keys of one query block in order."""
  count = length // block
  pairs = [(i, j) for i in range(count) for j in range(i + 1)]
  return tuple(jnp.array(indices) for indices in zip(*pairs, strict=True))


def _pair_scores(q, k, segment_ids, branch_ids, pair, block, compute_dtype):
  """Masked scores of a pair of blocks, [B, K, block, G, block]."""
  i, j = pair
  scores = precision.einsum(
    'bktgh,bksh->bktgs',
    _take(q, i, block),
    _take(k, j, block),
    compute_dtype=compute_dtype,
  )
  index = jnp.arange(block)
  causal = j * block + index <= (i * block + index)[:, None, None]
  segment_q, branch_q = (
    _take(ids, i, block)[..., None, None] for ids in (segment_ids, branch_ids)
  )
  segment_k, branch_k = (
    _take(ids, j, block)[:, :, None, None] for ids in (segment_ids, branch_ids)
  )
  shared_or_own = (branch_k == 0) | (branch_k == branch_q)
  return _masked(scores, causal & (segment_k == segment_q) & shared_or_own)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _packed(*args):
  return _packed_fwd(*args)[0]


def _packed_fwd(q, k, v, segment_ids, branch_ids, block, compute_dtype):
  ids = (segment_ids, branch_ids)

  def step(carry, pair):
    out, peak, total = carry
    i, j = pair
    scores = _pair_scores(q, k, *ids, pair, block, compute_dtype)
    old_peak = _take(peak, i, block)
    # A block without a visible key counts 1 a key until a visible one shrinks
    # that to 0; each query sees itself in the last block of its own.
    new_peak = jnp.maximum(old_peak, scores.max(axis=-1))
    weights = jnp.exp(scores - new_peak[..., None])
    shrink = jnp.exp(old_peak - new_peak)
    part = precision.einsum(
      'bktgs,bksh->bktgh',
      weights,
      _take(v, j, block),
      compute_dtype=compute_dtype,
    )
    part += _take(out, i, block) * shrink[..., None]
    sums = weights.sum(axis=-1) + _take(total, i, block) * shrink
    return (
      _put(out, part, i, block),
      _put(peak, new_peak, i, block),
      _put(total, sums, i, block),
    ), None

  dtype = jnp.promote_types(q.dtype, jnp.float32)
  zeros = jnp.zeros(q.shape, dtype)
  carry = (zeros, zeros[..., 0] + _lowest(zeros), zeros[..., 0])
  (out, peak, total), _ = jax.lax.scan(step, carry, _pairs(q.shape[2], block))
  out = out / total[..., None]
  return out, (q, k, v, ids, out, peak + jnp.log(total))


def _packed_bwd(block, compute_dtype, residuals, cotangent):
  q, k, v, ids, out, logsum = residuals
  einsum = functools.partial(precision.einsum, compute_dtype=compute_dtype)
  # sum_s p_s dp_s of each query, from the output instead of the scores.
  inner = (cotangent * out).sum(axis=-1)

  def step(carry, pair):
    grad_q, grad_k, grad_v = carry
    i, j = pair
    scores = _pair_scores(q, k, *ids, pair, block, compute_dtype)
    probs = jnp.exp(scores - _take(logsum, i, block)[..., None])
    pull = _take(cotangent, i, block)
    grad_probs = einsum('bktgh,bksh->bktgs', pull, _take(v, j, block))
    grad_scores = probs * (grad_probs - _take(inner, i, block)[..., None])
    part_q = einsum('bktgs,bksh->bktgh', grad_scores, _take(k, j, block))
    part_k = einsum('bktgs,bktgh->bksh', grad_scores, _take(q, i, block))
    part_v = einsum('bktgs,bktgh->bksh', probs, pull)
    return (
      _put(grad_q, _take(grad_q, i, block) + part_q, i, block),
      _put(grad_k, _take(grad_k, j, block) + part_k, j, block),
      _put(grad_v, _take(grad_v, j, block) + part_v, j, block),
    ), None

  carry = tuple(jnp.zeros(x.shape, out.dtype) for x in (q, k, v))
  grads, _ = jax.lax.scan(step, carry, _pairs(q.shape[2], block))
  grads = (g.astype(x.dtype) for g, x in zip(grads, (q, k, v), strict=True))
  return *grads, None, None


_packed.defvjp(_packed_fwd, _packed_bwd)
