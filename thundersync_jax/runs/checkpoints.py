"""Checkpoints of a run: the last complete one survives whatever happens.

One directory a step: the arrays (orbax), the counters of the host (JSON) and
the list of leaves, by which a restore into another tree is refused by name. A
save writes beside its final place and is renamed when all of it is there; what
a killed process left half-written is removed when the directory is opened.
"""

import dataclasses
import json
import os
import pathlib
import shutil
from typing import Any

import jax
import orbax.checkpoint as ocp
from absl import logging

_DELETED = '.deleted'
# Array files are not compressed; this is the room for their indices.
_OVERHEAD_BYTES = 1 << 20
# What orbax and tensorstore raise when the disk fails them.
_DISK_ERRORS = (OSError, ValueError, RuntimeError, KeyError)


class CheckpointError(RuntimeError):
  """A checkpoint cannot be saved, or does not fit what should be restored."""


@dataclasses.dataclass(frozen=True)
class Restored:
  """What a checkpoint holds.

  Attributes:
    step: the step that it was saved as.
    state: tree of jax.Array, with the structure, dtypes and shardings asked.
    counters: the JSON counters given to save.
  """

  step: int
  state: Any
  counters: dict[str, Any]


class Checkpoints:
  """Saves and restores checkpoints in one directory of a local file system.

  Every process of a run calls save and restore alike; files are removed by
  process 0 only. Nothing runs in the background: save returns when the
  checkpoint is complete.

  Args:
    directory: made when it does not exist.
    keep: complete checkpoints to keep; the oldest are removed after a save.
  """

  def __init__(self, directory: str | os.PathLike, keep: int = 2):
    if keep < 1:
      raise ValueError(f'keep={keep} must be at least 1')
    self._directory = pathlib.Path(directory).expanduser().absolute()
    self._directory.mkdir(parents=True, exist_ok=True)
    self._keep = keep
    arrays = ocp.PyTreeCheckpointHandler(use_compression=False, use_zarr3=True)
    self._checkpointer = ocp.Checkpointer(
      ocp.CompositeCheckpointHandler(
        state=arrays,
        counters=ocp.JsonCheckpointHandler(),
        leaves=ocp.JsonCheckpointHandler(),
      )
    )
    self._remove_partial()

  def steps(self) -> list[int]:
    """Returns the steps of the complete checkpoints, ascending."""
    names = [path.name for path in self._directory.iterdir()]
    return sorted(int(name) for name in names if name.isdecimal())

  def latest_step(self) -> int | None:
    """Returns the newest step, None when there is no complete checkpoint."""
    return max(self.steps(), default=None)

  def save(self, step: int, state: Any, counters: dict[str, Any]) -> None:
    """Saves one checkpoint, then removes the oldest beyond `keep`.

    Args:
      step: a step that is not saved yet.
      state: tree of arrays; empty containers and None stay as they are.
      counters: what the host needs to go on; exactly what JSON can hold.

    Raises:
      CheckpointError: the step exists, or the disk is full or refuses; the
        earlier checkpoints are as they were.
      TypeError: counters would not come back from JSON as they are, or a leaf
        of state is no array.
    """
    path = self._path(step)
    if path.exists():
      raise CheckpointError(
        f'{path} exists already: to replay from an earlier step, move the'
        ' later checkpoints away or choose another workdir'
      )
    _check_counters(counters)
    leaves = _describe(state)
    needed = sum(x.nbytes for x in jax.tree.leaves(state)) + _OVERHEAD_BYTES
    self._check_free(path, needed)
    items = ocp.args.Composite(
      state=ocp.args.PyTreeSave(state),
      counters=ocp.args.JsonSave(counters),
      leaves=ocp.args.JsonSave(leaves),
    )
    try:
      self._checkpointer.save(path, args=items)
    except _DISK_ERRORS as error:
      self._remove_partial()
      raise CheckpointError(
        f'{path} could not be saved: {error}. ' + _room(self._directory, needed)
      ) from error
    self._remove_old()

  def restore(
    self, state_like: Any, step: int | None = None
  ) -> Restored | None:
    """Reads a checkpoint into the structure and shardings of `state_like`.

    Args:
      state_like: tree of jax.ShapeDtypeStruct with shardings, or of arrays,
        of which only shape, dtype and sharding are used. A leaf without a
        sharding goes to the first local device.
      step: which checkpoint; the latest when None.

    Returns:
      None when step is None and there is no checkpoint.

    Raises:
      CheckpointError: there is no such step, its files are damaged, or its
        tree, a shape or a dtype is another; the message names the leaves.
    """
    step = self.latest_step() if step is None else step
    if step is None:
      return None
    path = self._path(step)
    if not path.exists():
      raise CheckpointError(
        f'{path} does not exist; complete steps there: {self.steps()}'
      )
    abstract = jax.tree.map(_abstract, state_like)
    found = self._restore(
      path, counters=ocp.args.JsonRestore(), leaves=ocp.args.JsonRestore()
    )
    _check_leaves(path, found['leaves'], _describe(abstract))
    arrays = ocp.args.PyTreeRestore(
      abstract,
      restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
    )
    state = self._restore(path, state=arrays)['state']
    return Restored(step, state, found['counters'])

  def _restore(self, path: pathlib.Path, **items) -> ocp.args.Composite:
    try:
      return self._checkpointer.restore(path, args=ocp.args.Composite(**items))
    except _DISK_ERRORS as error:
      raise CheckpointError(
        f'{path} cannot be read: {error}. Complete steps there:'
        f' {self.steps()}; remove the damaged one to resume from another'
      ) from error

  def _path(self, step: int) -> pathlib.Path:
    return self._directory / str(int(step))

  def _check_free(self, path: pathlib.Path, needed: int) -> None:
    """Refuses a save that cannot fit, before anything is written."""
    if shutil.disk_usage(self._directory).free < needed:
      raise CheckpointError(
        f'{path} was not saved. {_room(self._directory, needed)}'
      )

  def _remove_old(self) -> None:
    """Renames before removing: no half-removed one counts as complete."""
    if jax.process_index() != 0:
      return
    for step in self.steps()[: -self._keep]:
      path = self._path(step)
      doomed = path.with_name(path.name + _DELETED)
      path.rename(doomed)
      shutil.rmtree(doomed)

  def _remove_partial(self) -> None:
    """Removes what a killed or failed save left behind, nothing else."""
    if jax.process_index() != 0:
      return
    for path in self._directory.iterdir():
      if path.name.endswith(_DELETED) or ocp.utils.is_tmp_checkpoint(path):
        logging.warning('removing the incomplete checkpoint %s', path)
        shutil.rmtree(path)


def _describe(tree: Any) -> dict[str, str]:
  """Path of every leaf -> its dtype and shape, as in 'float32[2,3]'."""
  described = {}
  for keys, leaf in jax.tree_util.tree_leaves_with_path(tree):
    name = jax.tree_util.keystr(keys, simple=True, separator='/')
    if not hasattr(leaf, 'shape') or not hasattr(leaf, 'dtype'):
      raise TypeError(f'leaf {name}={leaf!r} of the state is no array')
    shape = ','.join(str(size) for size in leaf.shape)
    described[name] = f'{leaf.dtype}[{shape}]'
  return described


def _check_leaves(
  path: pathlib.Path, saved: dict[str, str], asked: dict[str, str]
) -> None:
  """Raises on the first few leaves that differ, by name."""
  differing = [
    f'  {name}: {saved.get(name, "absent")} in the checkpoint,'
    f' {asked.get(name, "absent")} asked'
    for name in sorted(saved.keys() | asked.keys())
    if saved.get(name) != asked.get(name)
  ]
  if differing:
    more = f'\n  and {len(differing) - 8} more' if len(differing) > 8 else ''
    raise CheckpointError(
      f'{path} holds another state; model and optimizer settings must be those'
      ' of the run that saved it:\n' + '\n'.join(differing[:8]) + more
    )


def _check_counters(counters: dict[str, Any]) -> None:
  """Tuples, integer keys and the like would come back as something else."""
  if json.loads(json.dumps(counters)) != counters:
    raise TypeError(
      f'counters={counters!r} change on their way through JSON; use string'
      ' keys, lists, numbers, strings, booleans and None'
    )


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
  sharding = getattr(leaf, 'sharding', None)
  if sharding is None:
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _room(directory: pathlib.Path, needed: int) -> str:
  """What a full disk needs, has, and what to do about it."""
  free = shutil.disk_usage(directory).free
  return (
    f'It needs {needed:,} bytes, and {free:,} bytes are free in {directory}:'
    ' where the disk is full, free some space or move the workdir to another'
    ' disk, then resume; the earlier checkpoints are untouched'
  )
