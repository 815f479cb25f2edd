"""Devices: axis names, meshes, and the one table from logical to mesh axes.

Arrays name their axes by meaning ('vocab', 'heads', ...); RULES says which mesh
axes shard each meaning. An axis that a mesh does not divide stays replicated.
"""

import math

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXES = ('data', 'fsdp', 'tensor')

RULES = {
  'rows': ('data', 'fsdp'),  # packed learner rows
  'slots': ('data', 'fsdp'),  # decode batch
  'vocab': ('tensor',),
  'embed': ('fsdp',),
  'heads': ('tensor',),
  'kv_heads': ('tensor',),
  'mlp': ('tensor',),
}


def force_cpu_devices(count: int) -> None:
  """Splits the CPU into `count` devices; call before the first JAX program.

  Two devices overlap programs, one runs them in turn. Without effect on other
  platforms.
  """
  jax.config.update('jax_num_cpu_devices', count)


def make_mesh(devices, data: int = 1, fsdp: int = -1, tensor: int = 1) -> Mesh:
  """Returns a mesh over `devices`; one axis may be -1 (what is left)."""
  sizes = [data, fsdp, tensor]
  if sizes.count(-1) > 1:
    raise ValueError(f'mesh {AXES} = {sizes}: only one may be -1')
  known = math.prod(size for size in sizes if size != -1)
  if -1 in sizes:
    sizes[sizes.index(-1)] = len(devices) // known
  if math.prod(sizes) != len(devices):
    raise ValueError(
      f'mesh {AXES} = {sizes} must multiply to {len(devices)} devices'
    )
  array = np.asarray(devices, dtype=object).reshape(sizes)
  return Mesh(array, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def rollout_and_learner(
  devices=None, rollout_devices: int = -1, **axes: int
) -> tuple[Mesh, Mesh]:
  """Returns the rollout mesh and the learner mesh.

  Args:
    devices: all devices, by default jax.devices().
    rollout_devices: how many go to the rollout slice; 0 shares one mesh between
      both; -1 takes half, or shares where there is one device.
    **axes: sizes of data, fsdp and tensor, for each mesh.

  Raises:
    ValueError: rollout_devices leaves the learner without a device.
  """
  devices = list(jax.devices() if devices is None else devices)
  if rollout_devices == -1:
    rollout_devices = len(devices) // 2
  if rollout_devices == 0:
    mesh = make_mesh(devices, **axes)
    return mesh, mesh
  if not 0 < rollout_devices < len(devices):
    raise ValueError(
      f'rollout_devices={rollout_devices} must lie between 0 and '
      f'{len(devices) - 1} (there are {len(devices)} devices, and the learner '
      'needs one)'
    )
  rollout = make_mesh(devices[:rollout_devices], **axes)
  learner = make_mesh(devices[rollout_devices:], **axes)
  return rollout, learner


def sharding(mesh: Mesh, shape=(), names=()) -> NamedSharding:
  """Returns the sharding of an array from the logical names of its axes.

  Args:
    mesh: the mesh.
    shape: sizes of the array's axes; a mesh axis that does not divide its
      array axis is left out.
    names: one logical name or None an axis; () replicates.
  """
  spec, used = [], set()
  for size, name in zip(shape, names, strict=True) if names else ():
    axes = tuple(a for a in RULES.get(name, ()) if a not in used)
    count = math.prod(mesh.shape[a] for a in axes)
    fits = axes and size % count == 0
    spec.append(axes if fits else None)
    used.update(axes if fits else ())
  return NamedSharding(mesh, P(*spec))


def tree_shardings(mesh: Mesh, tree, names):
  """Returns the shardings of a tree from an equal tree of name tuples."""
  return jax.tree.map(
    lambda leaf, axes: sharding(mesh, leaf.shape, axes), tree, names
  )
