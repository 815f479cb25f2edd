"""Attention of the decoder: packed rows for training, a cache for decoding.

Both are grouped-query attention: query heads n * G .. n * G + G - 1 read kv
head n, and K/V are never repeated in memory. Softmax runs in f32 or wider.
"""

import jax

from thundersync_jax.kernels.flash_attention import reference


def packed_attention(
  q: jax.Array,  # [B, T, N, H], rotary positions applied
  k: jax.Array,  # [B, T, K, H]
  v: jax.Array,  # [B, T, K, H]
  segment_ids: jax.Array,  # i32[B, T], 0 is padding
  branch_ids: jax.Array,  # i32[B, T], 0 is the shared prompt of a segment
  *,
  compute_dtype: str = 'float32',
  implementation: str | None = None,
) -> jax.Array:  # [B, T, N, H]
  """softmax(q k^T / sqrt(H)) v under the packed mask.

  Token q sees token k iff k <= q in the row, both are of one segment, and k is
  in the shared prompt (branch 0) or in the branch of q. Padding is a segment
  of its own that no other token sees, so every query sees itself at least.

  Raises:
    ValueError: an unknown implementation.
  """
  return _look_up(PACKED, implementation)(
    q, k, v, segment_ids, branch_ids, compute_dtype
  )


def cached_attention(
  q: jax.Array,  # [B, T, N, H], rotary positions applied
  k: jax.Array,  # [B, K, H, S], the cache; keys are transposed
  v: jax.Array,  # [B, K, S, H]
  positions: jax.Array,  # i32[B, T], positions of the queries in the cache
  *,
  compute_dtype: str = 'float32',
  implementation: str | None = None,
) -> jax.Array:  # [B, T, N, H]
  """softmax(q k^T / sqrt(H)) v, each query over cache positions <= its own.

  Raises:
    ValueError: an unknown implementation.
  """
  return _look_up(CACHED, implementation)(q, k, v, positions, compute_dtype)


def _look_up(table, implementation):
  name = implementation or 'xla'
  if name not in table:
    raise ValueError(
      f'attention implementation {name!r} does not exist; '
      f'known: {sorted(table)}'
    )
  return table[name]


PACKED = {'xla': reference.packed_attention}
CACHED = {'xla': reference.cached_attention}
