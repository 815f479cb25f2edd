"""Device side of turn streaming: gradients of one stretch of open trajectories.

A trajectory is cut into pieces, each of whose tokens is fed once:

  local     forward of a piece behind its prefix K/V, its loss, and both pulled
            back: parameter gradients are complete for the piece's own loss,
            cotangents of the prefix K/V are added to the adjoints
  replay    the piece again, with the adjoints of its own K/V as cotangents:
            what later pieces asked of it. Latest first, the prompt last
  ahead     forward and loss only; layer inputs and the cotangent of the last
            layer's output are kept
  backward  from what `ahead` kept and the adjoints: layer by layer, downwards

vjp is linear in the cotangent, so local parts may be added at once and the sum
is the gradient of the whole trajectory (arXiv 2610.05935). K/V, adjoints and
the rest of open trajectories live in a slab of fixed size; the prompt of a
group has a row of its own, which its members read and whose adjoints they sum.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from thundersync_jax.kernels.flash_attention import api as attention_api
from thundersync_jax.learner import distill_loss
from thundersync_jax.models import families, transformer

Tree = Any


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


# Programs. `size` is Shape.prefix; slab and sink are donated by the caller.


def local(
  config: families.ModelConfig,
  loss: distill_loss.Loss,
  size: int,
  params: Tree,
  teacher: distill_loss.Teacher,
  slab: Slab,
  pieces: Pieces,
  sink: Tree,
  stats: distill_loss.Stats,
) -> tuple[Slab, Tree, distill_loss.Stats]:
  """Forward, loss and backward of pieces; adds to sink, adjoints and stats."""

  def run(params, prefix):
    x, own, _ = _feed(config, params, prefix, pieces)
    total, new = _loss(config, loss, params, teacher, pieces, x)
    return total, (own, new)

  prefix = _prefix(slab, pieces, size)
  total, pull, (own, new) = jax.vjp(run, params, prefix, has_aux=True)
  gradient, grad_prefix = pull(jnp.ones_like(total))
  slab = _add_adjoints(_store(slab, pieces, own), pieces, grad_prefix)
  return slab, jax.tree.map(jnp.add, sink, gradient), stats + new


def replay(
  config: families.ModelConfig,
  size: int,
  params: Tree,
  slab: Slab,
  pieces: Pieces,
  sink: Tree,
) -> tuple[Slab, Tree]:
  """Pulls the adjoints of the pieces' own K/V back; they are then zero."""

  def run(params, prefix):
    return _feed(config, params, prefix, pieces)[1]

  _, pull = jax.vjp(run, params, _prefix(slab, pieces, size))
  own, slab = _take_adjoints(slab, pieces)
  gradient, grad_prefix = pull(own)
  slab = _add_adjoints(slab, pieces, grad_prefix)
  return slab, jax.tree.map(jnp.add, sink, gradient)


def ahead(
  config: families.ModelConfig,
  loss: distill_loss.Loss,
  size: int,
  params: Tree,
  teacher: distill_loss.Teacher,
  slab: Slab,
  pieces: Pieces,
  sink: Tree,
  stats: distill_loss.Stats,
) -> tuple[Slab, Tree, distill_loss.Stats]:
  """Forward and loss of pieces; the head's gradient is complete."""
  prefix = _prefix(slab, pieces, size)
  x, own, inputs = _feed(config, params, prefix, pieces, keep_inputs=True)
  top = {name: leaf for name, leaf in params.items() if name != 'layers'}

  def run(top, x):
    return _loss(config, loss, top, teacher, pieces, x)

  total, pull, new = jax.vjp(run, top, x, has_aux=True)
  gradient, grad_x = pull(jnp.ones_like(total))
  slab = _store(slab, pieces, own)
  slab = dataclasses.replace(
    slab,
    inputs=_write(slab.inputs, pieces, inputs, axis=2),
    pulls=_write(slab.pulls[None], pieces, grad_x[None], axis=2)[0],
  )
  new_top = {k: sink[k] + g for k, g in gradient.items()}
  return slab, sink | new_top, stats + new


def backward(
  config: families.ModelConfig,
  size: int,
  params: Tree,
  slab: Slab,
  pieces: Pieces,
  sink: Tree,
) -> tuple[Slab, Tree]:
  """Layers of pieces downwards; only the layer at hand is computed again."""
  prefix = _prefix(slab, pieces, size)
  own, slab = _take_adjoints(slab, pieces)
  length = pieces.tokens.shape[1]
  inputs = _read(slab.inputs, pieces, length, axis=2)
  grad_x = _real(_read(slab.pulls[None], pieces, length, axis=2), pieces, 2)[0]
  rope = transformer.rope_angles(config, _positions(pieces), grad_x.dtype)

  def step(grad_x, at_layer):
    layer, x, layer_prefix, layer_own = at_layer
    run = functools.partial(_layer, config, rope, pieces)
    _, pull = jax.vjp(run, layer, x, layer_prefix)
    grad_layer, grad_x, grad_prefix = pull((grad_x, layer_own))
    return grad_x, (grad_layer, grad_prefix)

  grad_x, (grad_layers, grad_prefix) = jax.lax.scan(
    step, grad_x, (params['layers'], inputs, prefix, own), reverse=True
  )
  slab = _add_adjoints(slab, pieces, grad_prefix)
  # Padding has a cotangent of 0.
  embed = sink['embed'].at[pieces.tokens].add(grad_x)
  layers = jax.tree.map(jnp.add, sink['layers'], grad_layers)
  return slab, sink | {'embed': embed, 'layers': layers}


def prefill(
  config: families.ModelConfig,
  size: int,
  params: Tree,
  slab: Slab,
  pieces: Pieces,
) -> Slab:
  """K/V of pieces without a loss: the prompt."""
  _, own, _ = _feed(config, params, _prefix(slab, pieces, size), pieces)
  return _store(slab, pieces, own)


def score(
  config: families.ModelConfig,
  size: int,
  params: Tree,
  slab: Slab,
  pieces: Pieces,
) -> tuple[Slab, jax.Array]:
  """The teacher's hidden states of the loss entries, [B, N, E]."""
  x, own, _ = _feed(config, params, _prefix(slab, pieces, size), pieces)
  hidden = transformer.rms_norm(x, params['final_norm'], config.norm_eps)
  rows = jnp.take_along_axis(hidden, pieces.sources[..., None], axis=1)
  return _store(slab, pieces, own), rows


# Their parts.


def _positions(pieces):  # i32[B, T]
  return pieces.starts[:, None] + jnp.arange(pieces.tokens.shape[1])


def _layer(config, rope, pieces, layer, x, prefix):
  """One layer of pieces: output, and their own K/V."""
  positions = _positions(pieces)

  def place(buffer, new, axis):
    put = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=axis)
    return jax.vmap(put)(buffer, new, pieces.starts)

  def attend(q, k, v):
    k, v = k.transpose(0, 2, 3, 1), v.swapaxes(1, 2)
    keys, values = place(prefix[0], k, 2), place(prefix[1], v, 1)
    out = attention_api.cached_attention(
      q, keys, values, positions, compute_dtype=config.compute_dtype
    )
    return out, (k, v)

  return transformer.apply_layer(config, layer, x, rope, attend)


def _feed(config, params, prefix, pieces, keep_inputs=False):
  """Runs pieces through the layers behind their prefix K/V.

  Returns the last layer's output [B, T, D], own K/V ([L, B, K, H, T],
  [L, B, K, T, H]) and the layers' inputs [L, B, T, D] or None.
  """
  x = transformer.embed_tokens(params, pieces.tokens)
  rope = transformer.rope_angles(config, _positions(pieces), x.dtype)

  def step(x, at_layer):
    layer, layer_prefix = at_layer
    new, own = _layer(config, rope, pieces, layer, x, layer_prefix)
    return new, (own, x if keep_inputs else None)

  if config.remat and not keep_inputs:
    step = jax.checkpoint(step, prevent_cse=False)
  x, (own, inputs) = jax.lax.scan(step, x, (params['layers'], prefix))
  return x, own, inputs


def _loss(config, loss, params, teacher, pieces, x):
  """The sum to be maximised, and statistics."""
  rows = jnp.take_along_axis(x, pieces.sources[..., None], axis=1)
  hidden = transformer.rms_norm(rows, params['final_norm'], config.norm_eps)
  entries = distill_loss.Entries(
    pieces.targets, pieces.weights, pieces.behaviour_logprobs
  )
  head = transformer.head(params)
  return distill_loss.total(loss, hidden, head, teacher, entries)


def _prefix(slab, pieces, size):
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


def _read(buffer, pieces, length, axis):
  """The columns of the pieces, B on axis 1."""
  size = list(buffer.shape)
  size[1], size[axis] = 1, length
  found = [
    jax.lax.dynamic_slice(buffer, _at(pieces, i, buffer.ndim, axis), size)
    for i in range(pieces.rows.shape[0])
  ]
  return jnp.concatenate(found, axis=1)


def _write(buffer, pieces, new, axis):
  """Puts new columns where the pieces are; padding goes behind them."""
  for i in range(pieces.rows.shape[0]):
    one = jax.lax.slice_in_dim(new, i, i + 1, axis=1).astype(buffer.dtype)
    buffer = jax.lax.dynamic_update_slice(
      buffer, one, _at(pieces, i, buffer.ndim, axis)
    )
  return buffer


def _real(x, pieces, axis):
  """x with zeros in columns of padding."""
  shape = [1] * x.ndim
  shape[1], shape[axis] = x.shape[1], x.shape[axis]
  real = jnp.arange(x.shape[axis]) < pieces.lengths[:, None]
  return jnp.where(real.reshape(shape), x, 0)


def _store(slab, pieces, own):
  return dataclasses.replace(
    slab,
    keys=_write(slab.keys, pieces, own[0], axis=4),
    values=_write(slab.values, pieces, own[1], axis=3),
  )


def _take_adjoints(slab, pieces):
  """The adjoints of the pieces' own K/V, and a slab where they are zero."""
  length = pieces.tokens.shape[1]

  def take(buffer, axis):
    found = _read(buffer, pieces, length, axis)
    own = _real(found, pieces, axis)
    return own, _write(buffer, pieces, found - own, axis)

  keys, key_adjoints = take(slab.key_adjoints, 4)
  values, value_adjoints = take(slab.value_adjoints, 3)
  slab = dataclasses.replace(
    slab, key_adjoints=key_adjoints, value_adjoints=value_adjoints
  )
  return (keys, values), slab


def _add_adjoints(slab, pieces, grad_prefix):
  """Adds cotangents of a prefix, the prompt's part in the prompt's row."""

  def add(buffer, grads, axis):
    shape = [1] * buffer.ndim
    shape[axis] = size = grads.shape[axis]
    for i in range(grads.shape[1]):
      grad = jax.lax.slice_in_dim(grads, i, i + 1, axis=1)
      shared = jnp.arange(size).reshape(shape) < pieces.prompt_lengths[i]
      for row, part in (
        (pieces.rows[i], jnp.where(shared, 0, grad)),
        (pieces.prompt_rows[i], jnp.where(shared, grad, 0)),
      ):
        index = _start(buffer.ndim, row)
        old = jax.lax.dynamic_slice(buffer, index, part.shape)
        buffer = jax.lax.dynamic_update_slice(buffer, old + part, index)
    return buffer

  return dataclasses.replace(
    slab,
    key_adjoints=add(slab.key_adjoints, grad_prefix[0], 4),
    value_adjoints=add(slab.value_adjoints, grad_prefix[1], 3),
  )
