"""The worker inside a sandbox: one JSON line in, one JSON line out, warm.

Runs as a program (standard library only). Each request is served by a forked
child, so no state or patched module of one call reaches the next, and a call
costs about a millisecond. The worker reads the child's output, stops it at its
limits, and kills everything that the call started.

Each request has 'kind', one of sandbox_calls.KINDS, and what that needs.
"""

import contextlib
import ctypes
import importlib
import json
import os
import resource
import select
import signal
import sys
import time

from thundersync_jax.envs import (
  sandbox_calls,
  sandbox_confine,
  sandbox_launch,
)

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 4, 36
_TICK_S = 0.02  # between two looks at memory and disk
_PAGE = resource.getpagesize()


class _Call:
  """A child at work: its output so far, and why it was stopped."""

  def __init__(self, request: dict, crowded: bool):
    self.request = request
    # After a call that filled the disk another one has room to clean up.
    self.room = {
      **request,
      'disk_bytes': request['disk_bytes'] * (1 + crowded),
      'max_files': request['max_files'] * (1 + crowded),
    }
    self.started = time.monotonic()
    self.output, self.value = bytearray(), bytearray()
    self.stopped, self.status, self.cpu_s = None, None, 0.0
    output, output_in = os.pipe()
    value, value_in = os.pipe()
    self.pid = os.fork()
    if self.pid == 0:
      sandbox_calls.serve(request, output_in, value_in)
    os.close(output_in)
    os.close(value_in)
    self.pipes = {output: self.output, value: self.value}
    for pipe in self.pipes:
      os.set_blocking(pipe, False)

  def watch(self) -> None:
    """Waits until the child ends or passes a limit; then ends everything."""
    poll = select.poll()
    for pipe in self.pipes:
      poll.register(pipe, select.POLLIN)
    poll.register(0, 0)  # the host hangs up
    with contextlib.suppress(OSError):
      ended = os.pidfd_open(self.pid)
      poll.register(ended, select.POLLIN)
    look = self.started + _TICK_S
    while self.status is None and self.stopped is None:
      events = poll.poll(_TICK_S * 1000)
      for pipe, _ in events:
        if pipe in self.pipes and not self._read(pipe):
          poll.unregister(pipe)
        elif pipe == 0:
          self.stopped = 'the host hung up'
      self._reap()
      now = time.monotonic()
      if now - self.started > self.request['wall_s']:
        self.stopped = self.stopped or 'time'
      elif now > look and self.stopped is None and self.status is None:
        self.stopped = over_limit(self.room)
        look = now + _TICK_S + 20 * (time.monotonic() - now)
    with contextlib.suppress(NameError):
      os.close(ended)
    self._end()

  def _read(self, pipe: int) -> bool:
    """Reads what is there; false at the end of the pipe."""
    kept, limit = self.pipes[pipe], self.request['output_bytes']
    with contextlib.suppress(BlockingIOError):
      data = os.read(pipe, 1 << 16)
      kept += data
      if kept is self.output and len(kept) > limit:
        self.stopped = self.stopped or 'output'
      if len(kept) > max(limit, 2 * sandbox_calls.VALUE_BYTES):
        self.stopped = self.stopped or 'output'
      return bool(data)
    return True

  def _reap(self) -> None:
    with contextlib.suppress(ChildProcessError):
      while True:
        pid, status, used = os.wait4(-1, os.WNOHANG)
        if pid == self.pid:
          self.status = os.waitstatus_to_exitcode(status)
          self.cpu_s = used.ru_utime + used.ru_stime
        if not pid:
          return

  def _end(self) -> None:
    kill_all(self.request['own_processes'])
    self.stopped = self.stopped or over_disk(self.request)
    for pipe in self.pipes:
      before = None
      while before != len(self.pipes[pipe]) and self.stopped != 'output':
        before = len(self.pipes[pipe])
        self._read(pipe)
      os.close(pipe)

  def reply(self) -> dict:
    # A shell tells of a signal as 128 and its number.
    if self.status in (-signal.SIGXCPU, 128 + signal.SIGXCPU):
      self.stopped = self.stopped or 'cpu'
    # The hard limit's SIGKILL; the kernel counts in ticks.
    killed = self.status in (-signal.SIGKILL, 128 + signal.SIGKILL)
    if killed and self.cpu_s > 0.9 * self.request['cpu_s']:
      self.stopped = self.stopped or 'cpu'
    value = None
    if self.value:
      with contextlib.suppress(ValueError):
        value = json.loads(self.value)
    return {
      'output': self.output.decode(errors='replace'),
      'status': self.status,
      'stopped': self.stopped,
      'seconds': time.monotonic() - self.started,
      'value': value,
    }


def kill_all(own_processes: bool) -> None:
  """Kills all that a call left behind.

  Args:
    own_processes: whether this process may signal nothing but its own
      descendants, so that one kill(-1) reaches them all at one moment.
  """
  deadline = time.monotonic() + 5
  while time.monotonic() < deadline:
    left = [-1] if own_processes else sandbox_launch.descendants(os.getpid())
    for pid in left:
      with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)
    try:
      while os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | os.WNOHANG):
        os.waitpid(-1, 0)
    except ChildProcessError:
      return
    time.sleep(0.0005)


def over_limit(request: dict) -> str | None:
  """'memory' or 'disk' if the processes or files of a call are too big."""
  used = 0
  for pid in sandbox_launch.descendants(os.getpid()):
    with contextlib.suppress(OSError, ValueError):
      used += _memory(pid)
  return 'memory' if used > request['memory_bytes'] else over_disk(request)


def over_disk(request: dict) -> str | None:
  """'disk' if the working directory holds too much; looks at no more."""
  size, count, folders = 0, 0, [request['directory']]
  while folders:
    folder = folders.pop()
    if not os.access(folder, os.R_OK | os.X_OK):
      with contextlib.suppress(OSError):
        os.chmod(folder, 0o700)  # behind a lock anything could grow
    try:
      with os.scandir(folder) as entries:
        for entry in entries:
          count += 1
          size += entry.stat(follow_symlinks=False).st_blocks * 512
          if entry.is_dir(follow_symlinks=False):
            folders.append(entry.path)
          if size > request['disk_bytes'] or count > request['max_files']:
            return 'disk'
    except (FileNotFoundError, NotADirectoryError):
      continue  # it has gone meanwhile
    except OSError:
      return 'disk'  # its path is too long to count what it holds
  return None


def _memory(pid: int) -> int:
  """Bytes of memory of a process; what it shares counts in parts."""
  try:
    with open(f'/proc/{pid}/smaps_rollup', 'rb') as file:
      for line in file:
        if line.startswith(b'Pss:'):
          return int(line.split()[1]) << 10
  except PermissionError:
    pass
  with open(f'/proc/{pid}/statm', 'rb') as file:
    return int(file.read().split()[1]) * _PAGE


def main(common: dict) -> None:
  """Confines this process, then serves until the host hangs up."""
  confinement = common.pop('confinement')
  common['may_signal'] = sandbox_confine.confine(confinement)
  _LIBC.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # no child reads this memory
  _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
  for number in (signal.SIGINT, signal.SIGPIPE):
    signal.signal(number, signal.SIG_DFL)
  # kill(-1) is for a process table, or a user, that is this sandbox's alone.
  common['own_processes'] = os.getpid() == 1 or (
    confinement['uid'] is not None and os.getuid() == confinement['uid']
  )
  replies = os.dup(1)
  os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
  _write(replies, {'ready': True})
  crowded = False
  for line in sys.stdin.buffer:
    try:
      request = {**common, **json.loads(line)}
      if request['kind'] == 'sqlite':
        importlib.import_module('sqlite3')  # slow: once, for all its children
      call = _Call(request, crowded)
      call.watch()
      answer = call.reply()
      crowded = answer['stopped'] == 'disk'
    except OSError as error:  # no process or pipe to be had
      kill_all(common['own_processes'])
      answer = {'fault': f'{type(error).__name__}: {error}'}
    _write(replies, answer)


def _write(descriptor: int, answer: dict) -> None:
  left = memoryview(json.dumps(answer).encode() + b'\n')
  while left:
    left = left[os.write(descriptor, left) :]
