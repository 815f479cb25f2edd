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

from thundersync_jax.kernels.flash_attention import api as attention_api
from thundersync_jax.learner import distill_loss
from thundersync_jax.learner import slab as slab_lib
from thundersync_jax.learner.slab import Pieces, Slab
from thundersync_jax.models import families, transformer

Tree = Any


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

  prefix = slab_lib.prefix(slab, pieces, size)
  total, pull, (own, new) = jax.vjp(run, params, prefix, has_aux=True)
  gradient, grad_prefix = pull(jnp.ones_like(total))
  slab = slab_lib.store(slab, pieces, own)
  slab = slab_lib.add_adjoints(slab, pieces, grad_prefix)
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

  _, pull = jax.vjp(run, params, slab_lib.prefix(slab, pieces, size))
  own, slab = slab_lib.take_adjoints(slab, pieces)
  gradient, grad_prefix = pull(own)
  slab = slab_lib.add_adjoints(slab, pieces, grad_prefix)
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
  prefix = slab_lib.prefix(slab, pieces, size)
  x, own, inputs = _feed(config, params, prefix, pieces, keep_inputs=True)
  top = {name: leaf for name, leaf in params.items() if name != 'layers'}

  def run(top, x):
    return _loss(config, loss, top, teacher, pieces, x)

  total, pull, new = jax.vjp(run, top, x, has_aux=True)
  gradient, grad_x = pull(jnp.ones_like(total))
  slab = slab_lib.store(slab, pieces, own)
  slab = dataclasses.replace(
    slab,
    inputs=slab_lib.write(slab.inputs, pieces, inputs, axis=2),
    pulls=slab_lib.write(slab.pulls[None], pieces, grad_x[None], axis=2)[0],
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
  prefix = slab_lib.prefix(slab, pieces, size)
  own, slab = slab_lib.take_adjoints(slab, pieces)
  length = pieces.tokens.shape[1]
  inputs = slab_lib.read(slab.inputs, pieces, length, axis=2)
  pulls = slab_lib.read(slab.pulls[None], pieces, length, axis=2)
  grad_x = slab_lib.real(pulls, pieces, axis=2)[0]
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
  slab = slab_lib.add_adjoints(slab, pieces, grad_prefix)
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
  _, own, _ = _feed(config, params, slab_lib.prefix(slab, pieces, size), pieces)
  return slab_lib.store(slab, pieces, own)


def score(
  config: families.ModelConfig,
  size: int,
  params: Tree,
  slab: Slab,
  pieces: Pieces,
) -> tuple[Slab, jax.Array]:
  """The teacher's hidden states of the loss entries, [B, N, E]."""
  x, own, _ = _feed(config, params, slab_lib.prefix(slab, pieces, size), pieces)
  hidden = transformer.rms_norm(x, params['final_norm'], config.norm_eps)
  rows = jnp.take_along_axis(hidden, pieces.sources[..., None], axis=1)
  return slab_lib.store(slab, pieces, own), rows


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
