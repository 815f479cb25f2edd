"""Weights from the learner to the rollout: cast, unstack, reshard."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from thundersync_jax import mesh as mesh_lib
from thundersync_jax.models import families, transformer


def publisher(
  config: families.ModelConfig, rollout_mesh: Mesh, dtype: str
) -> Callable:
  """Returns a function from params (stacked) to the rollout's decode layout.

  Args:
    config: the model.
    rollout_mesh: where the weights go.
    dtype: of matrices and embeddings; norms stay as they are.
  """
  cast = jax.jit(functools.partial(_cast_and_unstack, dtype=dtype))
  axes = transformer.logical_axes(config)
  layer_axes = {k: names[1:] for k, names in axes['layers'].items()}
  axes = axes | {'layers': [layer_axes] * config.num_layers}

  def publish(params):
    published = cast(params)
    shardings = mesh_lib.tree_shardings(rollout_mesh, published, axes)
    return jax.device_put(published, shardings)

  return publish


def _cast_and_unstack(params, dtype):
  def leaf(path, value):
    name = jax.tree_util.keystr(path[-1:], simple=True)
    # A copy, since the learner donates its parameters to the next step.
    target = value.dtype if name.endswith('norm') else jnp.dtype(dtype)
    return jnp.array(value, target, copy=True)

  cast = jax.tree_util.tree_map_with_path(leaf, params)
  return transformer.unstack(cast)
