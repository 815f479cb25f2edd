"""K/V, adjoints and more of open trajectories, in a slab of fixed size.

Columns are positions. The prompt of a group has a row of its own, which its
members read, and in which the adjoints that they have for it are summed; the
last row is nobody's. Pieces are stretches of rows, padded to one length.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from thundersync_jax.models import families


@dataclasses.dataclass(frozen=True, order=True)
class Shape:
  """Sizes of a program: B rows of T tokens behind S - T tokens or fewer.

  Attributes:
    rows: B.
    tokens: T of the piece, padded.
    prefix: S, columns of K/V that are read: start + T <= S.
    targets: N loss entries a row; 0 for programs without a loss.
  """

  rows: int
  tokens: int
  prefix: int
  targets: int = 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slab:
  """What is kept of R open trajectories and prompts of at most S tokens.

  Attributes:
    keys: [L, R, K, H, S].
    values: [L, R, K, S, H].
    key_adjoints, value_adjoints: of the same shapes; None for a teacher.
    inputs: [L, R, S, D], of each layer; None where no plan keeps them.
    pulls: [R, S, D], loss cotangents of the last layer's output; or None.
  """

  keys: jax.Array
  values: jax.Array
  key_adjoints: jax.Array | None = None
  value_adjoints: jax.Array | None = None
  inputs: jax.Array | None = None
  pulls: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pieces:
  """Pieces of B trajectories, and their loss entries.

  Attributes:
    rows: i32[B], of the slab; the last row of a slab is nobody's.
    prompt_rows: i32[B], where the first `prompt_lengths` columns live.
    prompt_lengths: i32[B].
    starts: i32[B], position of the first token.
    lengths: i32[B], tokens that are real.
    tokens: i32[B, T].
    sources: i32[B, N], column of the hidden state.
    targets: i32[B, N], token that it predicts.
    weights: f32[B, N]; 0 is padding.
    behaviour_logprobs: f32[B, N].
  """

  rows: jax.Array
  prompt_rows: jax.Array
  prompt_lengths: jax.Array
  starts: jax.Array
  lengths: jax.Array
  tokens: jax.Array
  sources: jax.Array
  targets: jax.Array
  weights: jax.Array
  behaviour_logprobs: jax.Array


def empty_pieces(shape: Shape, rows: int) -> Pieces:
  """Padding, on the host: everything in the slab's last row."""
  b, n = shape.rows, shape.targets

  def ints(*size):
    return np.zeros(size, np.int32)

  nobody = np.full(b, rows - 1, np.int32)
  return Pieces(
    rows=nobody,
    prompt_rows=nobody.copy(),
    prompt_lengths=ints(b),
    starts=ints(b),
    lengths=ints(b),
    tokens=ints(b, shape.tokens),
    sources=ints(b, n),
    targets=ints(b, n),
    weights=np.zeros((b, n)),  # f64 where JAX keeps it
    behaviour_logprobs=np.zeros((b, n)),
  )


def empty_slab(
  config: families.ModelConfig,
  rows: int,
  length: int,
  dtype: jnp.dtype,
  *,
  adjoints: bool,
  inputs: bool,
) -> Slab:
  """Zeros; `rows` includes the one that is nobody's."""
  layers, k = config.num_layers, config.num_kv_heads
  h = config.head_dim
  keys, values = (layers, rows, k, h, length), (layers, rows, k, length, h)
  kept = (layers, rows, length, config.embed_dim)
  zeros = functools.partial(jnp.zeros, dtype=dtype)
  return Slab(
    zeros(keys),
    zeros(values),
    zeros(keys) if adjoints else None,
    zeros(values) if adjoints else None,
    zeros(kept) if inputs else None,
    zeros(kept[1:]) if inputs else None,
  )


def prefix(slab, pieces, size):
  """K/V of the first `size` columns; the prompt's come from its own row."""

  def read(buffer, axis):
    near = jax.lax.slice_in_dim(buffer, 0, size, axis=axis)
    shape = [1] * buffer.ndim
    shape[1], shape[axis] = -1, size
    shared = jnp.arange(size) < pieces.prompt_lengths[:, None]
    return jnp.where(
      shared.reshape(shape), near[:, pieces.prompt_rows], near[:, pieces.rows]
    )

  return read(slab.keys, 4), read(slab.values, 3)


def _for_each_row(pieces, step, carry):
  """A loop, not unrolled: programs of many rows would take long to compile."""
  return jax.lax.fori_loop(0, pieces.rows.shape[0], step, carry)


def _start(ndim, row):
  """Index of the first column of a row."""
  index = [jnp.int32(0)] * ndim
  index[1] = row
  return index


def _at(pieces, i, ndim, axis):
  """Where piece i begins in a buffer [L, R, ...] with columns on `axis`."""
  index = _start(ndim, pieces.rows[i])
  index[axis] = pieces.starts[i]
  return index


def read(buffer, pieces, length, axis):
  """The columns of the pieces, B on axis 1."""
  size = list(buffer.shape)
  size[1], size[axis] = 1, length

  def step(i, found):
    index = _at(pieces, i, buffer.ndim, axis)
    one = jax.lax.dynamic_slice(buffer, index, size)
    return jax.lax.dynamic_update_slice_in_dim(found, one, i, axis=1)

  size_of_all = list(size)
  size_of_all[1] = pieces.rows.shape[0]
  return _for_each_row(pieces, step, jnp.zeros(size_of_all, buffer.dtype))


def write(buffer, pieces, new, axis):
  """Puts new columns where the pieces are; padding goes behind them."""

  def step(i, buffer):
    one = jax.lax.dynamic_slice_in_dim(new, i, 1, axis=1).astype(buffer.dtype)
    index = _at(pieces, i, buffer.ndim, axis)
    return jax.lax.dynamic_update_slice(buffer, one, index)

  return _for_each_row(pieces, step, buffer)


def real(x, pieces, axis):
  """x with zeros in columns of padding."""
  shape = [1] * x.ndim
  shape[1], shape[axis] = x.shape[1], x.shape[axis]
  real = jnp.arange(x.shape[axis]) < pieces.lengths[:, None]
  return jnp.where(real.reshape(shape), x, 0)


def store(slab, pieces, own):
  return dataclasses.replace(
    slab,
    keys=write(slab.keys, pieces, own[0], axis=4),
    values=write(slab.values, pieces, own[1], axis=3),
  )


def take_adjoints(slab, pieces):
  """The adjoints of the pieces' own K/V, and a slab where they are zero."""
  length = pieces.tokens.shape[1]

  def take(buffer, axis):
    found = read(buffer, pieces, length, axis)
    own = real(found, pieces, axis)
    return own, write(buffer, pieces, found - own, axis)

  keys, key_adjoints = take(slab.key_adjoints, 4)
  values, value_adjoints = take(slab.value_adjoints, 3)
  slab = dataclasses.replace(
    slab, key_adjoints=key_adjoints, value_adjoints=value_adjoints
  )
  return (keys, values), slab


def add_adjoints(slab, pieces, grad_prefix):
  """Adds cotangents of a prefix, the prompt's part in the prompt's row."""

  def add(buffer, grads, axis):
    shape = [1] * buffer.ndim
    shape[axis] = size = grads.shape[axis]
    column = jnp.arange(size).reshape(shape)

    def add_part(buffer, row, part):
      index = _start(buffer.ndim, row)
      old = jax.lax.dynamic_slice(buffer, index, part.shape)
      return jax.lax.dynamic_update_slice(buffer, old + part, index)

    def step(i, buffer):
      grad = jax.lax.dynamic_slice_in_dim(grads, i, 1, axis=1)
      shared = column < pieces.prompt_lengths[i]
      buffer = add_part(buffer, pieces.rows[i], jnp.where(shared, 0, grad))
      shared_grad = jnp.where(shared, grad, 0)
      return add_part(buffer, pieces.prompt_rows[i], shared_grad)

    return _for_each_row(pieces, step, buffer)

  return dataclasses.replace(
    slab,
    key_adjoints=add(slab.key_adjoints, grad_prefix[0], 4),
    value_adjoints=add(slab.value_adjoints, grad_prefix[1], 3),
  )
