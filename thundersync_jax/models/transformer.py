"""One decoder for every family of families.py: pure functions over params.

    x = embed[token]
    x = x + o(attention(rope(norm(q(n))), rope(norm(k(n))), v(n))),  n = rms(x)
    x = x + down(silu(gate(n)) * up(n)),                             n = rms(x)
    hidden = rms(x)

Layers are flax.nnx modules; outside this file parameters are plain nested
dicts. `forward` is for packed training rows, `extend` for a K/V cache. Layers
come stacked (leading axis L, scanned) or, faster for decoding on CPU, as a
list with one dict a layer (`unstack`).
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from thundersync_jax.kernels import precision
from thundersync_jax.kernels.flash_attention import api as attention_api
from thundersync_jax.models import families

Params = dict[str, Any]
Cache = list[tuple[jax.Array, jax.Array]]


class Block(nnx.Module):
  """One layer: attention and gated mlp, each on a normed residual."""

  def __init__(self, config: families.ModelConfig, key: jax.Array):
    d, f, h = config.embed_dim, config.mlp_dim, config.head_dim
    n, k = config.num_heads, config.num_kv_heads
    shapes = {
      'q': ((d, n, h), d),
      'k': ((d, k, h), d),
      'v': ((d, k, h), d),
      'o': ((n, h, d), n * h),
      'gate': ((d, f), d),
      'up': ((d, f), d),
      'down': ((f, d), f),
    }
    for name, matrix in _matrices(key, shapes).items():
      setattr(self, name, matrix)
    self.config = config
    self.attn_norm = nnx.Param(jnp.ones(d))
    self.mlp_norm = nnx.Param(jnp.ones(d))
    if config.qkv_bias:
      self.q_bias = nnx.Param(jnp.zeros((n, h)))
      self.k_bias = nnx.Param(jnp.zeros((k, h)))
      self.v_bias = nnx.Param(jnp.zeros((k, h)))
    if config.qk_norm:
      self.q_norm = nnx.Param(jnp.ones(h))
      self.k_norm = nnx.Param(jnp.ones(h))

  def __call__(
    self,
    x: jax.Array,  # [B, T, D]
    rope: tuple[jax.Array, jax.Array],  # cos, sin [B, T, 1, H/2]
    attend: Callable,  # q, k, v -> (out [B, T, N, H], what the caller keeps)
  ) -> tuple[jax.Array, Any]:
    """The layer's output and what `attend` kept (the cache, or None)."""
    config = self.config
    dot = functools.partial(
      precision.einsum, compute_dtype=config.compute_dtype
    )
    h = rms_norm(x, self.attn_norm[...], config.norm_eps)
    q = dot('btd,dnh->btnh', h, self.q[...])
    k = dot('btd,dkh->btkh', h, self.k[...])
    v = dot('btd,dkh->btkh', h, self.v[...])
    if config.qkv_bias:
      q, k, v = q + self.q_bias[...], k + self.k_bias[...], v + self.v_bias[...]
    if config.qk_norm:
      q = rms_norm(q, self.q_norm[...], config.norm_eps)
      k = rms_norm(k, self.k_norm[...], config.norm_eps)
    out, kept = attend(_rotate(q, *rope), _rotate(k, *rope), v)
    x = x + dot('btnh,nhd->btd', out, self.o[...])
    h = rms_norm(x, self.mlp_norm[...], config.norm_eps)
    gate = jax.nn.silu(dot('btd,df->btf', h, self.gate[...]))
    h = gate * dot('btd,df->btf', h, self.up[...])
    return x + dot('btf,fd->btd', h, self.down[...]), kept


class Transformer(nnx.Module):
  """All parameters of a decoder; `init` turns it into a plain dict."""

  def __init__(self, config: families.ModelConfig, key: jax.Array):
    layers_key, tables_key = jax.random.split(key)
    make = nnx.vmap(lambda k: Block(config, k), in_axes=0, out_axes=0)
    self.layers = make(jax.random.split(layers_key, config.num_layers))
    self.final_norm = nnx.Param(jnp.ones(config.embed_dim))
    table = ((config.vocab_size, config.embed_dim), config.embed_dim)
    names = ('embed',) if config.tied else ('embed', 'head')
    tables = _matrices(tables_key, dict.fromkeys(names, table))
    for name, matrix in tables.items():
      setattr(self, name, matrix)


def init(config: families.ModelConfig, key: jax.Array) -> Params:
  """Random f32 parameters, layers stacked; matrices have std 1/sqrt(fan in)."""
  return nnx.to_pure_dict(nnx.state(Transformer(config, key)))


def logical_axes(config: families.ModelConfig) -> Params:
  """The tree of `init` with the logical axis names of each array."""
  layer = {
    'attn_norm': ('embed',),
    'q': ('embed', 'heads', 'head_dim'),
    'k': ('embed', 'kv_heads', 'head_dim'),
    'v': ('embed', 'kv_heads', 'head_dim'),
    'o': ('heads', 'head_dim', 'embed'),
    'mlp_norm': ('embed',),
    'gate': ('embed', 'mlp'),
    'up': ('embed', 'mlp'),
    'down': ('mlp', 'embed'),
  }
  if config.qkv_bias:
    layer['q_bias'] = ('heads', 'head_dim')
    layer['k_bias'] = layer['v_bias'] = ('kv_heads', 'head_dim')
  if config.qk_norm:
    layer['q_norm'] = layer['k_norm'] = ('head_dim',)
  axes = {
    'embed': ('vocab', 'embed'),
    'final_norm': ('embed',),
    'layers': {name: ('layers',) + names for name, names in layer.items()},
  }
  if not config.tied:
    axes['head'] = ('vocab', 'embed')
  return axes


def forward(
  config: families.ModelConfig,
  params: Params,
  tokens: jax.Array,  # i32[B, T]
  positions: jax.Array,  # i32[B, T], for the rotary embedding only
  segment_ids: jax.Array,  # i32[B, T], 0 is padding
  branch_ids: jax.Array,  # i32[B, T], 0 is the shared prompt
) -> jax.Array:  # f32[B, T, D] after the final norm
  """Hidden states of packed rows, for head(params).

  Token q sees token k iff k <= q in the row, their segments are equal, and k
  is in branch 0 or in the branch of q: several members share one prompt,
  and never see each other. Padding sees padding only, and yields finite values.
  """
  chex.assert_rank(tokens, 2)
  chex.assert_equal_shape((tokens, positions, segment_ids, branch_ids))

  def attend(q, k, v):
    out = attention_api.packed_attention(
      q, k, v, segment_ids, branch_ids, compute_dtype=config.compute_dtype
    )
    return out, None

  x = embed_tokens(params, tokens)
  rope = rope_angles(config, positions, x.dtype)
  x, _ = _over_layers(config, params, x, lambda _: attend, None, rope)
  return rms_norm(x, params['final_norm'], config.norm_eps)


def extend(
  config: families.ModelConfig,
  params: Params,
  cache: Cache,
  tokens: jax.Array,  # i32[B, T]
  starts: jax.Array,  # i32[B], >= 0
) -> tuple[jax.Array, Cache]:  # f32[B, T, D] after the final norm
  """Appends T tokens a row to the cache: T > 1 is prefill, T = 1 decode.

  Token t of row b sits at position starts[b] + t, is written there, and sees
  the cache positions <= its own. Positions past the end are dropped, so a slot
  is parked by starts[b] = length: its cache stays as it is.
  """
  chex.assert_rank(tokens, 2)
  chex.assert_shape(starts, (tokens.shape[0],))
  positions = starts[:, None] + jnp.arange(tokens.shape[1])
  rows = jnp.arange(tokens.shape[0])[:, None]

  def attend_with(layer_cache):
    def attend(q, k, v):
      keys, values = layer_cache
      k, v = k.astype(keys.dtype), v.astype(values.dtype)
      keys = keys.at[rows, :, :, positions].set(k, mode='drop')
      values = values.at[rows, :, positions].set(v, mode='drop')
      out = attention_api.cached_attention(
        q, keys, values, positions, compute_dtype=config.compute_dtype
      )
      return out, (keys, values)

    return attend

  x = embed_tokens(params, tokens)
  rope = rope_angles(config, positions, x.dtype)
  x, cache = _over_layers(config, params, x, attend_with, cache, rope)
  return rms_norm(x, params['final_norm'], config.norm_eps), cache


def empty_cache(
  config: families.ModelConfig, rows: int, length: int, dtype: jnp.dtype
) -> Cache:
  """L pairs of zeros: keys [rows, K, H, length], values [rows, K, length, H].

  Keys are transposed: a decode step multiplies with them as they lie, and its
  rounding does not depend on the length.
  """
  k, h = config.num_kv_heads, config.head_dim
  return [
    (
      jnp.zeros((rows, k, h, length), dtype),
      jnp.zeros((rows, k, length, h), dtype),
    )
    for _ in range(config.num_layers)
  ]


def head(params: Params) -> jax.Array:  # [V, D]
  """The output matrix: its own, or the embedding when the two are tied."""
  return params.get('head', params['embed'])


def unstack(params: Params) -> Params:
  """The decode layout: layers as a list of L dicts."""
  layers = params['layers']
  count = layers['q'].shape[0]
  layers = [jax.tree.map(lambda x, i=i: x[i], layers) for i in range(count)]
  return params | {'layers': layers}


def stack(params: Params) -> Params:
  """The training layout again: layers as one dict with a leading axis L."""
  layers = jax.tree.map(lambda *xs: jnp.stack(xs), *params['layers'])
  return params | {'layers': layers}


def rms_norm(
  x: jax.Array,  # [..., D]
  scale: jax.Array,  # [D]
  eps: float,
) -> jax.Array:
  """x / sqrt(mean x^2 + eps) * scale, in f32 or wider (arXiv 1910.07467)."""
  x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
  mean_square = jnp.square(x).mean(axis=-1, keepdims=True)
  return x * jax.lax.rsqrt(mean_square + eps) * scale


def rope_frequencies(config: families.ModelConfig) -> np.ndarray:  # f64[H/2]
  """Radians per position of each pair (arXiv 2104.09864), scaling applied."""
  exponents = np.arange(0, config.head_dim, 2) / config.head_dim
  frequencies = config.rope_theta**-exponents
  scaling = config.rope_scaling
  if scaling is None:
    return frequencies
  if scaling.kind == 'linear':
    return frequencies / scaling.factor
  turns = scaling.original_context * frequencies / (2 * np.pi)
  span = scaling.high_freq_factor - scaling.low_freq_factor
  kept = np.clip((turns - scaling.low_freq_factor) / span, 0, 1)
  return frequencies * (kept + (1 - kept) / scaling.factor)


def embed_tokens(params: Params, tokens: jax.Array) -> jax.Array:
  """Rows of the embedding, [B, T, D], f32 or wider."""
  x = params['embed'][tokens]
  return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def rope_angles(
  config: families.ModelConfig,
  positions: jax.Array,  # i32[B, T]
  dtype: jnp.dtype,
) -> tuple[jax.Array, jax.Array]:
  """cos and sin [B, T, 1, H/2] of explicit positions."""
  frequencies = jnp.asarray(rope_frequencies(config), dtype)
  angles = positions[:, :, None, None].astype(dtype) * frequencies
  return jnp.cos(angles), jnp.sin(angles)


def apply_layer(
  config: families.ModelConfig,
  layer: Params,
  x: jax.Array,  # [B, T, D]
  rope: tuple[jax.Array, jax.Array],
  attend: Callable,  # see Block
) -> tuple[jax.Array, Any]:
  """One layer, from its entry of params['layers']; see Block."""
  return nnx.merge(_block_graph(config), layer)(x, rope, attend)


def _matrices(key, shapes):
  """Params of std 1/sqrt(fan in) by name, from {name: (shape, fan in)}."""
  sizes = [math.prod(shape) for shape, _ in shapes.values()]
  # One draw for all: a draw each would take seconds to compile.
  draws = jax.random.normal(key, (sum(sizes),))
  draws = jnp.split(draws, np.cumsum(sizes)[:-1])
  return {
    name: nnx.Param(draw.reshape(shape) * fan_in**-0.5)
    for (name, (shape, fan_in)), draw in zip(shapes.items(), draws, strict=True)
  }


def _rotate(x, cos, sin):  # [B, T, N, H]
  """Turns the pairs (i, i + H/2): the layout of Hugging Face checkpoints."""
  first, second = jnp.split(x, 2, axis=-1)
  return jnp.concatenate(
    [first * cos - second * sin, second * cos + first * sin], axis=-1
  )


@functools.cache
def _block_graph(config):
  block = nnx.eval_shape(lambda: Block(config, jax.random.key(0)))
  return nnx.split(block)[0]


def _over_layers(config, params, x, attend_with, kept, rope):
  """Runs every layer: a scan when they are stacked, a loop when listed.

  attend_with maps the layer's entry of `kept` (a list of L, or None) to its
  `attend`; the second result is the list of what the layers kept.
  """

  def step(x, layer_and_kept):
    layer, old = layer_and_kept
    return apply_layer(config, layer, x, rope, attend_with(old))

  layers = params['layers']
  unrolled = isinstance(layers, list)
  if config.remat:
    # Inside a scan nothing can merge the recomputation with the original.
    step = jax.checkpoint(step, prevent_cse=unrolled)
  if unrolled:
    new = []
    for i, layer in enumerate(layers):
      x, entry = step(x, (layer, None if kept is None else kept[i]))
      new.append(entry)
    return x, new
  if kept is not None:
    kept = jax.tree.map(lambda *xs: jnp.stack(xs), *kept)
  x, new = jax.lax.scan(step, x, (layers, kept))
  if kept is None:
    return x, None
  return x, [jax.tree.map(lambda a, i=i: a[i], new) for i in range(len(kept))]
