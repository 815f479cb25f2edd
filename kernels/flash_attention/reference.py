"""Attention in plain XLA, with the memory of flash attention.

The packed form works through blocks of queries and keeps, for the backward
pass, only the output and the logsumexp of each query (arXiv 2205.14135); a
block of scores lives while it is used. A block reads the keys up to its own
end only, so half of the square is never computed.
"""

import functools

import jax
import jax.numpy as jnp

from thundersync_jax.kernels import precision

_QUERY_BLOCK = 512


def packed_attention(q, k, v, segment_ids, branch_ids, compute_dtype):
  """See api.packed_attention."""
  return _packed(q, k, v, segment_ids, branch_ids, compute_dtype)


def cached_attention(q, k, v, positions, compute_dtype):
  """See api.cached_attention."""
  b, t, n, h = q.shape
  visible = jnp.arange(k.shape[1]) <= positions[:, :, None]
  scores = _scores(_group(q, k.shape[2]), k, visible, compute_dtype)
  probs = jax.nn.softmax(scores, axis=-1)
  out = precision.einsum(
    'bktgs,bskh->btkgh', probs, v, compute_dtype=compute_dtype
  )
  return out.reshape(b, t, n, h)


def _group(q: jax.Array, kv_heads: int) -> jax.Array:  # [B, T, K, G, H]
  """Query heads by the kv head that they read, scaled by 1 / sqrt(H)."""
  b, t, n, h = q.shape
  return (q * h**-0.5).reshape(b, t, kv_heads, n // kv_heads, h)


def _scores(q, k, visible, compute_dtype):  # [B, K, T, G, S]
  scores = precision.einsum(
    'btkgh,bskh->bktgs', q, k, compute_dtype=compute_dtype
  )
  hidden = jnp.finfo(scores.dtype).min / 2
  return jnp.where(visible[:, None, :, None, :], scores, hidden)


def _visible(segment_ids, branch_ids, start, stop):  # bool[B, stop-start, stop]
  """The packed mask of queries start..stop over keys 0..stop."""
  causal = jnp.arange(stop) <= jnp.arange(start, stop)[:, None]
  same = segment_ids[:, start:stop, None] == segment_ids[:, None, :stop]
  key_branch = branch_ids[:, None, :stop]
  own = key_branch == branch_ids[:, start:stop, None]
  return causal & same & (own | (key_branch == 0))


def _blocks(length: int) -> list[tuple[int, int]]:
  return [
    (start, min(start + _QUERY_BLOCK, length))
    for start in range(0, length, _QUERY_BLOCK)
  ]


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _packed(q, k, v, segment_ids, branch_ids, compute_dtype):
  return _packed_fwd(q, k, v, segment_ids, branch_ids, compute_dtype)[0]


def _packed_fwd(q, k, v, segment_ids, branch_ids, compute_dtype):
  grouped = _group(q, k.shape[2])
  outs, logsums = [], []
  for start, stop in _blocks(q.shape[1]):
    scores = _scores(
      grouped[:, start:stop],
      k[:, :stop],
      _visible(segment_ids, branch_ids, start, stop),
      compute_dtype,
    )
    peak = scores.max(axis=-1, keepdims=True)
    weights = jnp.exp(scores - peak)
    total = weights.sum(axis=-1, keepdims=True)
    out = precision.einsum(
      'bktgs,bskh->bktgh', weights, v[:, :stop], compute_dtype=compute_dtype
    )
    outs.append((out / total).swapaxes(1, 2))
    logsums.append(peak + jnp.log(total))
  out = jnp.concatenate(outs, axis=1).reshape(q.shape)
  return out, (q, k, v, segment_ids, branch_ids, out, tuple(logsums))


def _packed_bwd(compute_dtype, residuals, cotangent):
  q, k, v, segment_ids, branch_ids, out, logsums = residuals
  einsum = functools.partial(precision.einsum, compute_dtype=compute_dtype)
  grouped = _group(q, k.shape[2])
  cotangent = cotangent.reshape(grouped.shape)
  # sum_s p_s dp_s of each query, from the output instead of the scores.
  inner = (cotangent * out.reshape(grouped.shape)).sum(axis=-1)
  inner = inner.swapaxes(1, 2)[..., None]
  grad_q, grad_k, grad_v = [], jnp.zeros_like(k), jnp.zeros_like(v)
  for (start, stop), logsum in zip(_blocks(q.shape[1]), logsums, strict=True):
    block_q, block_g = grouped[:, start:stop], cotangent[:, start:stop]
    keys, values = k[:, :stop], v[:, :stop]
    visible = _visible(segment_ids, branch_ids, start, stop)
    probs = jnp.exp(_scores(block_q, keys, visible, compute_dtype) - logsum)
    grad_probs = einsum('btkgh,bskh->bktgs', block_g, values)
    grad_scores = probs * (grad_probs - inner[:, :, start:stop])
    grad_q.append(einsum('bktgs,bskh->btkgh', grad_scores, keys))
    grad_k = grad_k.at[:, :stop].add(
      einsum('bktgs,btkgh->bskh', grad_scores, block_q)
    )
    grad_v = grad_v.at[:, :stop].add(
      einsum('bktgs,btkgh->bskh', probs, block_g)
    )
  grad_q = jnp.concatenate(grad_q, axis=1).reshape(q.shape)
  return grad_q * q.shape[-1] ** -0.5, grad_k, grad_v, None, None


_packed.defvjp(_packed_fwd, _packed_bwd)
