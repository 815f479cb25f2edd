"""Jitted programs of the rollout: prefill, insert, extend, decode and sample.

    token = argmax(logits / T + gumbel(key))
    key = fold_in(fold_in(fold_in(fold_in(root, step), prompt_id), member),
                  position)

so a token depends on its own trajectory and the parameters, never on the slot,
on the other rows or on time. Only decode_chunk computes logits: the last token
of a prefix is never prefilled, it is the first token that the next chunk feeds.
The cache (transformer.empty_cache) stays on the devices; the host (engine.py)
keeps everything else and sends what a program needs.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from thundersync_jax import mesh as mesh_lib
from thundersync_jax.kernels import precision
from thundersync_jax.models import families, transformer

_CACHE_AXES = ('slots', 'kv_heads', None, None)

# Rows of the table that the host sends with each chunk, one column a slot.
ROWS = ('token', 'position', 'limit', 'active', 'step', 'prompt_id', 'member')


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Chunk:
  """What a decode chunk sampled.

  Attributes:
    tokens: i32[S, chunk].
    logprobs: f32[S, chunk], untruncated, at the sampling temperature.
    counts: i32[S], how many of a slot's tokens are real.
    active: bool[S], whether the slot's turn goes on.
    steps: i32, how many steps the chunk ran: less than its length when every
      turn ended before.
  """

  tokens: jax.Array
  logprobs: jax.Array
  counts: jax.Array
  active: jax.Array
  steps: jax.Array


def root_key(seed: int) -> jax.Array:
  """The key that all trajectories of a run derive from."""
  return jax.random.key(seed, impl='threefry2x32')


def slot_keys(
  root: jax.Array,
  steps: jax.Array,  # i32[S]
  prompt_ids: jax.Array,  # i32[S]
  members: jax.Array,  # i32[S]
) -> jax.Array:  # key[S]
  """The keys of trajectories; fold_in the position for a token's key."""

  def one(step, prompt_id, member):
    key = jax.random.fold_in(jax.random.fold_in(root, step), prompt_id)
    return jax.random.fold_in(key, member)

  return jax.vmap(one)(steps, prompt_ids, members)


def sample(
  logits: jax.Array,  # f32[S, V]
  keys: jax.Array,  # key[S], one a token
  temperature: jax.Array,  # f32 scalar; 0 is greedy
  top_k: jax.Array | None = None,  # i32 scalar, at least 1; None keeps all
  top_p: jax.Array | None = None,  # f32 scalar, below 1; None keeps all
) -> tuple[jax.Array, jax.Array]:  # tokens i32[S], logprobs f32[S]
  """Draws a token a row by the Gumbel-argmax trick (arXiv 1411.0030).

  The log-probability is that of the untruncated distribution at the sampling
  temperature (at temperature 1 for greedy): what a learner recomputes.
  """
  scaled = logits / jnp.where(temperature > 0, temperature, 1)
  allowed = _truncate(scaled, top_k, top_p)
  noise = jnp.where(temperature > 0, gumbel(keys, logits.shape[1]), 0)
  tokens = _argmax(allowed + noise)
  chosen = jnp.take_along_axis(scaled, tokens[:, None], axis=1)[:, 0]
  return tokens, chosen - jax.nn.logsumexp(scaled, axis=1)


def gumbel(keys: jax.Array, size: int) -> jax.Array:  # f32[S, size]
  """jax.random.gumbel(key, size) for each key, bit for bit.

  On CPU jax.random runs threefry as a loop, ten times slower than one fused
  pass, which would be a tenth of a decode step.
  """
  first, second = jnp.split(jax.random.key_data(keys), 2, axis=1)
  counts = jnp.arange(size, dtype=jnp.uint32)[None]
  first, second = _threefry(first, second, jnp.zeros_like(counts), counts)
  bits = (first ^ second) >> 9 | jnp.uint32(0x3F800000)
  uniform = lax.bitcast_convert_type(bits, jnp.float32) - 1
  uniform = jnp.maximum(uniform, jnp.finfo(jnp.float32).tiny)
  return -jnp.log(-jnp.log(uniform))


@functools.partial(
  jax.jit,
  static_argnames=('config', 'mesh', 'chunk'),
  donate_argnames='cache',
)
def decode_chunk(
  config: families.ModelConfig,
  mesh: Mesh,
  params: transformer.Params,  # decode layout
  cache: transformer.Cache,  # donated
  table: jax.Array,  # i32[len(ROWS), S]
  root: jax.Array,  # key
  stop_ids: jax.Array,  # i32[n]
  temperature: jax.Array,
  top_k: jax.Array | None,
  top_p: jax.Array | None,
  *,
  chunk: int,
) -> tuple[transformer.Cache, Chunk]:
  """Feeds and samples up to `chunk` tokens in every slot.

  A slot stops after a token of stop_ids, or when its trajectory holds `limit`
  tokens. A slot that is not active feeds its token again and again: the K/V
  that it writes at `position` are those of that very token.
  """
  rows = dict(zip(ROWS, table, strict=True))
  slots = table.shape[1]
  keys = slot_keys(root, rows['step'], rows['prompt_id'], rows['member'])

  def unfinished(carry):
    return (carry[0] < chunk) & carry[-1].any()

  def step(carry):
    i, cache, token, position, tokens, logprobs, active = carry
    hidden, cache = transformer.extend(
      config, params, cache, token[:, None], position
    )
    logits = precision.einsum(
      'sd,vd->sv',
      hidden[:, 0],
      transformer.head(params),
      compute_dtype=config.compute_dtype,
    )
    token_keys = jax.vmap(jax.random.fold_in)(keys, position + 1)
    new, logprob = sample(logits, token_keys, temperature, top_k, top_p)
    token = jnp.where(active, new, token)
    position = position + active
    tokens = lax.dynamic_update_index_in_dim(tokens, token, i, 1)
    logprobs = lax.dynamic_update_index_in_dim(logprobs, logprob, i, 1)
    stopped = (token[:, None] == stop_ids).any(axis=1)
    active &= ~stopped & (position + 1 < rows['limit'])
    return i + 1, cache, token, position, tokens, logprobs, active

  carry = (
    jnp.int32(0),
    cache,
    rows['token'],
    rows['position'],
    jnp.zeros((slots, chunk), jnp.int32),
    jnp.zeros((slots, chunk), jnp.float32),
    rows['active'].astype(bool),
  )
  steps, cache, _, position, tokens, logprobs, active = lax.while_loop(
    unfinished, step, carry
  )
  counts = position - rows['position']
  return _place(mesh, cache), Chunk(tokens, logprobs, counts, active, steps)


@functools.partial(jax.jit, static_argnames=('config', 'mesh', 'dtype'))
def prefill(
  config: families.ModelConfig,
  mesh: Mesh,
  params: transformer.Params,
  tokens: jax.Array,  # i32[B, T], padded at the end
  dtype: str,
) -> transformer.Cache:  # of length T
  """K/V of whole prompts. What lies behind a prompt's end is meaningless."""
  rows, length = tokens.shape
  cache = transformer.empty_cache(config, rows, length, jnp.dtype(dtype))
  starts = jnp.zeros(rows, jnp.int32)
  _, cache = transformer.extend(config, params, cache, tokens, starts)
  return _place(mesh, cache)


@functools.partial(jax.jit, static_argnames='mesh', donate_argnames='cache')
def insert(
  mesh: Mesh,
  cache: transformer.Cache,  # donated
  prompts: transformer.Cache,  # of prefill
  pairs: jax.Array,  # i32[S, 2]: row of prompts, slot
  count: jax.Array,  # i32, how many pairs are real
) -> transformer.Cache:
  """Copies prompts to slots: the members of a group share one prefill."""

  def copy(i, cache):
    row, slot = pairs[i]

    def one(old, new):
      new = lax.dynamic_slice_in_dim(new, row, 1)
      common = tuple(map(min, old.shape, new.shape))  # one may be longer
      new = lax.slice(new, (0,) * new.ndim, common)
      return lax.dynamic_update_slice_in_dim(old, new, slot, 0)

    return jax.tree.map(one, cache, prompts)

  return _place(mesh, lax.fori_loop(0, count, copy, cache))


@functools.partial(jax.jit, static_argnames=('config', 'mesh', 'length'))
def read(
  config: families.ModelConfig,
  mesh: Mesh,
  cache: transformer.Cache,
  slot: jax.Array,  # i32
  length: int,
) -> transformer.Cache:  # of one row
  """The first `length` positions of a slot."""
  dtype = cache[0][0].dtype
  shapes = jax.eval_shape(
    lambda: transformer.empty_cache(config, 1, length, dtype)
  )

  def one(x, like):
    row = lax.dynamic_slice_in_dim(x, slot, 1)
    return lax.slice(row, (0,) * row.ndim, like.shape)

  return _place(mesh, jax.tree.map(one, cache, shapes))


@functools.partial(
  jax.jit, static_argnames=('config', 'mesh'), donate_argnames='cache'
)
def extend(
  config: families.ModelConfig,
  mesh: Mesh,
  params: transformer.Params,
  cache: transformer.Cache,  # donated
  slots: jax.Array,  # i32[R]; a number past the last slot is a row unused
  tokens: jax.Array,  # i32[R, T], padded at the end
  starts: jax.Array,  # i32[R], position of the first token
) -> tuple[transformer.Cache, jax.Array]:
  """Appends tokens to a few slots. The second result is ready when this is."""
  rows = jax.tree.map(lambda x: x.at[slots].get(mode='clip'), cache)
  _, rows = transformer.extend(config, params, rows, tokens, starts)
  cache = jax.tree.map(
    lambda x, new: x.at[slots].set(new, mode='drop'), cache, rows
  )
  return _place(mesh, cache), rows[-1][0].ravel()[0]


@functools.partial(
  jax.jit, static_argnames=('config', 'mesh', 'slots', 'length', 'dtype')
)
def empty_cache(
  config: families.ModelConfig, mesh: Mesh, slots: int, length: int, dtype: str
) -> transformer.Cache:
  """A cache of zeros on the mesh."""
  cache = transformer.empty_cache(config, slots, length, jnp.dtype(dtype))
  return _place(mesh, cache)


@functools.partial(jax.jit, static_argnames=('mesh', 'shape'))
def grow(mesh: Mesh, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """One array of the cache, padded to the shape of a longer bucket."""
  padding = [(0, new - old) for old, new in zip(x.shape, shape, strict=True)]
  return _place(mesh, jnp.pad(x, padding))


def _place(mesh, cache):
  """Keeps the cache where it is: a moved output would recompile its reader."""
  return jax.tree.map(
    lambda x: lax.with_sharding_constraint(
      x, mesh_lib.sharding(mesh, x.shape, _CACHE_AXES)
    ),
    cache,
  )


def _argmax(x):  # i32[S]
  """First index of each row's maximum; the last index for a row of NaN.

  Two plain reductions over a stored x: jnp.argmax is one reduction over pairs,
  which XLA does not vectorise on CPU.
  """
  x = lax.optimization_barrier(x)
  ids = jnp.arange(x.shape[1], dtype=jnp.int32)
  best = x >= x.max(axis=1, keepdims=True)
  return jnp.where(best, ids, x.shape[1] - 1).min(axis=1)


def _truncate(scaled, top_k, top_p):
  """-inf outside top_k, then outside top_p of what is left, without a sort.

  Both keep what is at or above a threshold, so ties at the threshold stay.
  """
  image = _ordered(scaled)
  if top_k is not None:
    least = _threshold(lambda kept: kept.sum(axis=1) >= top_k, image)
    scaled = jnp.where(image >= least[:, None], scaled, -jnp.inf)
  if top_p is not None:
    probs = jax.nn.softmax(scaled, axis=1)
    wanted = top_p * probs.sum(axis=1)

    def enough(kept):
      return jnp.where(kept, probs, 0).sum(axis=1) >= wanted

    least = _threshold(enough, image)
    scaled = jnp.where(image >= least[:, None], scaled, -jnp.inf)
  return scaled


def _ordered(x):  # u32, in the order of the f32 numbers
  bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
  negative = bits >> 31 == 1
  return jnp.where(negative, ~bits, bits | jnp.uint32(1 << 31))


def _threshold(enough, image):  # u32[S]
  """The largest t with enough(image >= t): one bit a pass, from the top."""

  def refine(i, least):
    candidate = least | jnp.uint32(1) << (31 - i).astype(jnp.uint32)
    good = enough(image >= candidate[:, None])
    return jnp.where(good, candidate, least)

  return lax.fori_loop(0, 32, refine, jnp.zeros(len(image), jnp.uint32))


_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def _threefry(key0, key1, x0, x1):
  """Threefry-2x32 with 20 rounds (Salmon et al., Random123, SC 2011)."""
  keys = (key0, key1, key0 ^ key1 ^ np.uint32(0x1BD11BDA))
  x0, x1 = x0 + keys[0], x1 + keys[1]
  for i in range(5):
    for rotation in _ROTATIONS[i % 2]:
      x0 = x0 + x1
      x1 = x0 ^ (x1 << rotation | x1 >> (32 - rotation))
    x0 = x0 + keys[(i + 1) % 3]
    x1 = x1 + keys[(i + 2) % 3] + np.uint32(i + 1)
  return x0, x1
