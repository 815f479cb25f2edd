"""The directory of one run: one config, one process at a time.

  config.json     the config that the run was started with
  lock            held by the process that runs here
  metrics.jsonl   one line a step, beside the TensorBoard event files
  checkpoints/    one directory a saved step
  summary.json    the figures of the finished run
  timeline.json, timeline.png, curve.png

A run that is started again with the same config and workdir resumes.
"""

import contextlib
import fcntl
import json
import os
import pathlib
import socket
import weakref
from typing import Any, TextIO

import ml_collections
from absl import logging

# A resumed run may have other values here; a key stands for its whole block.
MAY_CHANGE = (
  'steps',
  'checkpoint_every_steps',
  'keep_checkpoints',
  'eval',
  'export_dir',
)

_ABSENT = '(absent)'


class WorkdirError(RuntimeError):
  """The workdir cannot be used: not writable, in use, or of another config."""


class Workdir:
  """An opened workdir; it holds the lock until close() or the process ends."""

  def __init__(self, path: pathlib.Path, lock: TextIO):
    self.path = path
    self._lock = lock

  def close(self) -> None:
    """Releases the lock; closing twice is fine."""
    self._lock.close()

  def __enter__(self) -> 'Workdir':
    return self

  def __exit__(self, *exception) -> None:
    self.close()


def open_workdir(
  path: str | os.PathLike, config: ml_collections.ConfigDict
) -> Workdir:
  """Creates or reopens a workdir, locks it and writes config.json.

  With several hosts, only process 0 opens the workdir.

  Args:
    path: the directory; `~` is expanded, missing parents are created.
    config: the config of the run. Where config.json exists already it must
      agree in every key that MAY_CHANGE does not list.

  Raises:
    WorkdirError: path cannot be written, another process runs in it, or it
      belongs to a run of another config; the message lists what differs.
  """
  directory = pathlib.Path(path).expanduser().absolute()
  with contextlib.ExitStack() as stack:
    try:
      directory.mkdir(parents=True, exist_ok=True)
      lock = (directory / 'lock').open('a+', encoding='utf-8')
      stack.callback(lock.close)
      _acquire(directory, lock)
      _write_config(directory / 'config.json', config)
    except OSError as error:
      raise WorkdirError(
        f'workdir={directory} cannot be written ({error.strerror}); give'
        ' --workdir a directory that this user may create and write'
      ) from error
    _close_in_forked_children(lock)
    stack.pop_all()
  return Workdir(directory, lock)


def write_atomic(path: str | os.PathLike, text: str) -> None:
  """Writes a text file so that readers see the old or the new, never a part.

  The new file is on the disk before it takes the place of the old one. A file
  has one writer at a time: the process that holds the workdir.
  """
  path = pathlib.Path(path)
  partial = path.with_name(f'.{path.name}.partial')
  try:
    with open(partial, 'w', encoding='utf-8') as file:
      file.write(text)
      file.flush()
      os.fsync(file.fileno())
    os.replace(partial, path)
  except BaseException:
    partial.unlink(missing_ok=True)
    raise


def _acquire(directory: pathlib.Path, lock: TextIO) -> None:
  """Takes the lock; the system gives it back whatever ends the process."""
  try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError as error:
    lock.seek(0)
    raise WorkdirError(
      f'workdir={directory} is in use by {lock.read().strip() or "a run"};'
      ' wait until that run ends, stop it, or choose another --workdir'
    ) from error
  except OSError as error:
    logging.warning(
      'workdir %s: its file system has no locks (%s); nothing keeps a'
      ' second run out of it.',
      directory,
      error.strerror,
    )
  lock.truncate(0)
  lock.write(f'process {os.getpid()} on {socket.gethostname()}\n')
  lock.flush()


def _close_in_forked_children(lock: TextIO) -> None:
  """A forked worker that outlives a killed run must not keep its lock."""
  reference = weakref.ref(lock)

  def close():
    file = reference()
    if file is not None:
      file.close()

  os.register_at_fork(after_in_child=close)


def _write_config(
  path: pathlib.Path, config: ml_collections.ConfigDict
) -> None:
  """Compares with the config that is there, then writes the new one."""
  new = json.loads(json.dumps(config.to_dict(), default=_refuse))
  if path.exists():
    try:
      old = json.loads(path.read_text(encoding='utf-8'))
    except ValueError as error:
      raise WorkdirError(
        f'{path} is not JSON ({error}); restore it or choose another --workdir'
      ) from error
    if old == new:
      return
    _check_differences(path.parent, _differences(old, new))
  write_atomic(path, json.dumps(new, indent=2, sort_keys=True) + '\n')


def _refuse(value: Any) -> None:
  raise TypeError(
    f'config value {value!r} is no JSON; use numbers, strings, lists, blocks'
  )


def _differences(old: dict, new: dict) -> dict[str, tuple[Any, Any]]:
  """Dotted key -> (old, new) for every value that differs."""
  old, new = _flatten(old), _flatten(new)
  keys = sorted(old.keys() | new.keys())
  pairs = {key: (old.get(key, _ABSENT), new.get(key, _ABSENT)) for key in keys}
  return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _check_differences(
  directory: pathlib.Path, differences: dict[str, tuple[Any, Any]]
) -> None:
  """Logs the differences that are allowed, raises on the others."""
  refused = []
  for key, (old, new) in differences.items():
    if any(key == name or key.startswith(f'{name}.') for name in MAY_CHANGE):
      logging.info('workdir %s: %s changes %r -> %r', directory, key, old, new)
    else:
      refused.append(f'  {key}: {old!r} in the workdir, {new!r} now')
  if refused:
    raise WorkdirError(
      f'workdir={directory} belongs to a run of another config:\n'
      + '\n'.join(refused)
      + '\nchoose another --workdir, or give the old values to resume this'
      f' run (only {", ".join(MAY_CHANGE)} may change)'
    )


def _flatten(tree: dict, prefix: str = '') -> dict[str, Any]:
  """{'a': {'b': 1}} -> {'a.b': 1}; an empty block stays a value."""
  flat = {}
  for key, value in tree.items():
    if isinstance(value, dict) and value:
      flat |= _flatten(value, f'{prefix}{key}.')
    else:
      flat[prefix + key] = value
  return flat
