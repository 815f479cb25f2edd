"""What a sandboxed call may use, and what comes back as text for a model."""

import contextlib
import dataclasses
import signal
from typing import Any

_MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Limits:
  """What one call may use; bytes, seconds, counts."""

  wall_s: float = 10.0
  cpu_s: int = 5  # of each process
  memory_bytes: int = 512 * _MIB  # of each process, and of all together
  processes: int = 32  # alive at a time, the worker included
  file_bytes: int = 16 * _MIB  # of one file
  disk_bytes: int = 64 * _MIB  # of the working directory
  max_files: int = 2000  # files and folders in it
  temporary_bytes: int = 32 * _MIB  # of /tmp and of /dev/shm
  open_files: int = 128  # of each process
  output_bytes: int = _MIB // 4  # printed before the call is stopped
  output_chars: int = 2000  # of the text that comes back
  max_rows: int = 50  # of a query

  def __post_init__(self):
    for field in dataclasses.fields(self):
      if not getattr(self, field.name) > 0:
        raise ValueError(
          f'{field.name}={getattr(self, field.name)} must be above 0'
        )
    if self.processes < 4:
      raise ValueError(f'processes={self.processes} must be at least 4')
    if self.memory_bytes < 64 * _MIB:
      raise ValueError(
        f'memory_bytes={self.memory_bytes} must be at least {64 * _MIB}: '
        "the worker's interpreter needs that much"
      )

  def of_processes(self, elsewhere: int) -> dict[str, int]:
    """Resource limits by name (see resource.RLIMIT_*)."""
    return {
      'AS': self.memory_bytes,
      'NPROC': self.processes + elsewhere,
      'FSIZE': self.file_bytes,
      'NOFILE': self.open_files,
      'CORE': 0,
      'MSGQUEUE': 0,
      'MEMLOCK': 0,
    }


@dataclasses.dataclass(frozen=True)
class Result:
  """How a call ended.

  Attributes:
    output: the observation: what was printed, cut, and how it ended.
    status: exit status, negative for a signal; None if unknown.
    stopped: None, or the limit that ended the call: 'time', 'cpu', 'memory',
      'output', 'disk'; 'lost' if the worker itself had to be replaced.
    seconds: that the call took.
    value: rows of a query, results of functions, a grader's verdict.
  """

  output: str
  status: int | None
  stopped: str | None
  seconds: float
  value: Any = None

  @property
  def ok(self) -> bool:
    """Whether it ended by itself, with status 0."""
    return self.status == 0 and self.stopped is None


def shorten(text: str, limit: int) -> str:
  """The text, its middle left out where it is longer than the limit."""
  if len(text) <= limit:
    return text
  head = limit * 2 // 3
  tail = limit - head
  left_out = len(text) - limit
  return (
    f'{text[:head]}\n... [{left_out} characters left out] ...\n'
    + (text[-tail:])
  )


def readable(text: str) -> str:
  """The text without characters that are neither printable nor white space."""
  return ''.join(
    c if c.isprintable() or c in '\n\t' else '' if c == '\r' else '\ufffd'
    for c in text
  )


def _ending(reply: dict[str, Any], limits: Limits) -> str:
  """The last line of an observation; empty if the call ended well."""
  reasons = {
    'time': f'it ran longer than {limits.wall_s:g} s',
    'cpu': f'it used more than {limits.cpu_s} s of processor time',
    'memory': f'it used more than {limits.memory_bytes // _MIB} MiB of memory',
    'output': f'it printed more than {limits.output_bytes} bytes',
    'disk': f'its files passed {limits.disk_bytes // _MIB} MiB or '
    f'{limits.max_files} files, or lie too deep; delete some',
    'lost': 'the tool died and was started again; files are kept',
  }
  stopped, status = reply['stopped'], reply['status']
  if stopped is not None:
    return f'[stopped: {reasons.get(stopped, stopped)}]'
  if status is None or status == 0:
    return ''
  if status < 0:
    with contextlib.suppress(ValueError):
      return f'[ended by {signal.Signals(-status).name}]'
  return f'[exit status {status}]'


def observation(reply: dict[str, Any], limits: Limits) -> Result:
  """The worker's reply as a result."""
  text = shorten(readable(reply['output']).rstrip(), limits.output_chars)
  lines = [line for line in (text, _ending(reply, limits)) if line]
  return Result(
    output='\n'.join(lines) or '(no output)',
    status=reply['status'],
    stopped=reply['stopped'],
    seconds=reply['seconds'],
    value=reply.get('value'),
  )
