"""Runs Python, shell and SQLite calls that a model wrote, in a box.

  with sandbox.Sandbox() as box:
    box.write_file('a.txt', 'hello')
    observation = box.run_shell('wc -c a.txt').output

One Sandbox is one working directory and one warm worker (sandbox_worker.py):
files last from call to call, processes and Python state do not. What comes
back is text that a model can read, cut in the middle where it is long, with a
last line that says how the call ended if it did not end well.
"""

import contextlib
import functools
import os
import pathlib
import tempfile
import threading
import time
import weakref
from typing import Any

from absl import logging

from thundersync_jax.envs import (
  sandbox_backends,
  sandbox_check,
  sandbox_files,
  sandbox_process,
  sandbox_results,
)
from thundersync_jax.envs.sandbox_results import Limits, Result

FileError = sandbox_files.FileError

_GRACE_S = 10.0  # for the worker to stop a call by itself
_MIB = 1 << 20


class SandboxError(RuntimeError):
  """No sandbox could be started, or it does not hold in what it must."""


class Sandbox:
  """A working directory and a worker; used by one thread at a time."""

  def __init__(self, limits: Limits | None = None, backend: str | None = None):
    """Starts the worker and does not wait for it.

    Args:
      limits: of each call.
      backend: a name in sandbox_backends.BACKENDS; by default the best one
        that works here.

    Raises:
      SandboxError: if the backend does not work here.
    """
    self.limits = limits or Limits()
    self.backend, self.provides = choose(backend)
    self._open()

  @classmethod
  def unchecked(cls, limits: Limits, backend: str) -> 'Sandbox':
    """A sandbox of which it is not known what it holds in."""
    made = cls.__new__(cls)
    made.limits, made.backend, made.provides = limits, backend, frozenset()
    made._open()
    return made

  def _open(self) -> None:
    base = pathlib.Path(tempfile.mkdtemp(prefix='sandbox_'))
    uid = sandbox_backends.draw_uid(self.backend)
    self._place = sandbox_backends.Place(base, uid)
    self._workers = []  # the living one; the finalizer ends it
    self._finalizer = weakref.finalize(self, _dispose, self._workers, base)
    try:
      if uid is not None:
        base.chmod(0o711)
      self._place.work.mkdir(mode=0o700)
      if uid is not None:
        os.chown(self._place.work, uid, uid)
      self._start()
    except BaseException:
      self.close()
      raise
    limits = self.limits
    self.files = sandbox_files.Folder(
      self._place.work, uid, limits.file_bytes, limits.max_files
    )

  def __enter__(self) -> 'Sandbox':
    return self

  def __exit__(self, *_) -> None:
    self.close()

  def close(self) -> None:
    """Ends every process of the sandbox and deletes its files."""
    self._finalizer()

  @property
  def directory(self) -> str:
    """The working directory, as programs inside see it."""
    return sandbox_backends.directory(self.backend, self._place)

  @property
  def host_directory(self) -> pathlib.Path:
    """The working directory on the host; its content is not to be trusted."""
    return self._place.work

  def run_python(
    self, code: str, files: dict[str, str | bytes] | None = None
  ) -> Result:
    """Runs code as a script, after writing `files` (path to content)."""
    for path, content in (files or {}).items():
      self.write_file(path, content)
    return self._call('python', code=code)

  def run_shell(self, command: str) -> Result:
    """Runs a command line."""
    if '\0' in command:
      return self._refused('the command holds a null byte')
    return self._call('shell', command=command)

  def run_sqlite(
    self, database: str | bytes, sql: str, write: bool = False
  ) -> Result:
    """Runs SQL statements; value: columns, rows and whether there are more.

    Args:
      database: path below the working directory, or a database's content.
      sql: one or several statements; the last one's rows come back.
      write: whether it may change the database.
    """
    path = database
    if isinstance(database, bytes):
      path = '.database'
      self.write_file(path, database)
    try:
      sandbox_files.parts(path)
    except FileError as error:
      return self._refused(str(error))
    return self._call('sqlite', path=path, sql=sql, write=write)

  def call_functions(self, setup: str, expressions: list[str]) -> Result:
    """Evaluates expressions on the model's code; value: one pair for each.

    A pair is ['value', repr] or ['error', name of the exception]. The values
    come from a process that the model's code controls: compare them out here.
    """
    return self._call('call', setup=setup, expressions=expressions)

  def grade(self, code: str) -> Result:
    """Runs a grader's `grade()`; value: what it returns, None if it fails.

    Its code stays in memory and its answer takes a pipe that no program
    started by it inherits. Use a fresh sandbox that holds only the model's
    files, and run those, if at all, as subprocesses of the grader.
    """
    return self._call('grade', code=code)

  def read_file(self, path: str) -> str:
    """The text of a file.

    Raises:
      FileError: if it is no plain file, or too large.
    """
    return self.files.read(path).decode(errors='replace')

  def write_file(self, path: str, content: str | bytes) -> None:
    """Writes a file and the folders above it.

    Raises:
      FileError: if it cannot be written, or is too large.
    """
    if isinstance(content, str):
      content = content.encode(errors='replace')
    self.files.write(path, content)

  def list_files(self) -> list[str]:
    """Paths of the regular files, sorted."""
    return sorted(p for p, is_folder in self.files.entries() if not is_folder)

  def copy_from(self, other: 'Sandbox') -> None:
    """Copies the other's regular files and folders; skips unreadable ones."""
    for path, is_folder in other.files.entries():
      with contextlib.suppress(FileError):
        if is_folder:
          self.files.make_folder(path)
        else:
          self.files.write(path, other.files.read(path))

  def _refused(self, reason: str) -> Result:
    return Result(f'[refused: {reason}]', None, 'refused', 0.0)

  def _call(self, kind: str, **fields: Any) -> Result:
    if not self._workers:
      raise SandboxError('this sandbox is closed; make another')
    started = time.monotonic()
    timeout_s = self.limits.wall_s + _GRACE_S
    try:
      reply = self._workers[0].ask({'kind': kind, **fields}, timeout_s)
    except sandbox_process.LostError as error:
      logging.warning('sandbox: worker lost (%s); starting another', error)
      self._workers.pop().end()
      self._start()
      reply = {'output': '', 'status': None, 'stopped': 'lost'}
      reply['seconds'] = time.monotonic() - started
    except sandbox_process.StartError as error:
      raise SandboxError(
        f'backend {self.backend} cannot start a worker: {error}'
      ) from error
    return sandbox_results.observation(reply, self.limits)

  def _start(self) -> None:
    place, limits = self._place, self.limits
    elsewhere = sandbox_backends.counted_elsewhere(self.backend, place.uid)
    config = {
      'wall_s': limits.wall_s,
      'cpu_s': limits.cpu_s,
      'memory_bytes': limits.memory_bytes,
      'disk_bytes': limits.disk_bytes,
      'max_files': limits.max_files,
      'output_bytes': limits.output_bytes,
      'max_rows': limits.max_rows,
      'value_bytes': limits.output_bytes,
      'directory': self.directory,
      'confinement': sandbox_backends.confinement(
        self.backend, place, limits.of_processes(elsewhere)
      ),
    }
    command = sandbox_backends.BACKENDS[self.backend](
      place, limits.temporary_bytes
    )
    worker = sandbox_process.Worker(
      command,
      sandbox_backends.environment('rlimits'),
      place.base,
      sandbox_backends.first_line(config),
    )
    self._workers.append(worker)


def _dispose(workers: list[sandbox_process.Worker], base: pathlib.Path) -> None:
  while workers:
    workers.pop().end()
  sandbox_files.delete(base)


@functools.cache
def measure(backend: str) -> frozenset[str]:
  """What the backend holds in on this machine, tried once a process.

  Raises:
    SandboxError: if it does not start, or does not deliver what it claims.
  """
  small = Limits(wall_s=30, memory_bytes=128 * _MIB)
  try:
    with Sandbox.unchecked(small, backend) as box:
      provides = sandbox_check.provided(
        box.run_python, box.host_directory, small
      )
  except OSError as error:
    raise SandboxError(f'backend {backend} does not work: {error}') from error
  lacking = sandbox_check.CLAIMS[backend] - provides
  if lacking:
    raise SandboxError(
      f'backend {backend} claims to isolate {sorted(lacking)} and does not '
      'here; choose another one'
    )
  return provides


_CHOICE = threading.Lock()


@functools.cache
def _best() -> str:
  """The best backend that works here; logs which."""
  for name in sandbox_backends.BACKENDS:
    try:
      provides = measure(name)
    except SandboxError as error:
      logging.info('sandbox: %s', error)
      continue
    missing = sandbox_check.EVERYTHING - provides
    sandbox_backends.log_choice(name, provides, missing)
    return name
  raise SandboxError(
    f'none of {list(sandbox_backends.BACKENDS)} works on this machine'
  )


def choose(backend: str | None = None) -> tuple[str, frozenset[str]]:
  """Name of the backend, and what it holds in here.

  Raises:
    SandboxError: if it does not work here.
    ValueError: if there is none of that name.
  """
  known = sandbox_backends.BACKENDS
  if backend is not None and backend not in known:
    raise ValueError(
      f'backend={backend!r} does not exist; choose one of {list(known)}'
    )
  with _CHOICE:
    name = backend or _best()
    return name, measure(name)


class Pool:
  """Fresh sandboxes, started ahead: each is taken once and then closed."""

  def __init__(
    self, limits: Limits, backend: str | None = None, ahead: int = 1
  ):
    """Starts nothing yet.

    Raises:
      ValueError: if ahead is negative.
    """
    if ahead < 0:
      raise ValueError(f'ahead={ahead} must be at least 0')
    self._limits, self._backend, self._ahead = limits, backend, ahead
    self._lock = threading.Lock()
    self._spare: list[Sandbox] = []

  def take(self) -> Sandbox:
    """A sandbox that nothing ran in; the caller closes it."""
    with self._lock:
      taken = self._spare.pop(0) if self._spare else None
      missing = self._ahead - len(self._spare)
    made = [self._make() for _ in range(missing + (taken is None))]
    taken = taken or made.pop(0)
    with self._lock:
      self._spare += made
    return taken

  def close(self) -> None:
    """Closes those that wait."""
    with self._lock:
      waiting, self._spare = self._spare, []
    for box in waiting:
      box.close()

  def _make(self) -> Sandbox:
    return Sandbox(self._limits, self._backend)


@functools.cache
def shared_pool(limits: Limits, backend: str | None = None) -> Pool:
  """The pool of the process for these limits."""
  return Pool(limits, backend)
