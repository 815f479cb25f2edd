"""Runs env calls in daemon threads, so that the driver loop never waits.

submit() puts a call; results() takes what has ended. A call that raises or
runs over its time becomes an error outcome. A thread that hangs cannot be
ended: it is left behind, replaced, and its late result dropped. Neither
close() nor the end of the process waits for it.
"""

import collections
import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

from absl import logging


@dataclasses.dataclass(frozen=True)
class Outcome:
  """How one call ended: `error` is None and `value` holds, or the reverse."""

  ticket: Any
  value: Any
  error: str | None  # source, type and message
  seconds: float  # from the start of the call in its thread
  timed_out: bool = False
  ended: float = dataclasses.field(default_factory=time.perf_counter)


@dataclasses.dataclass(eq=False)
class _Call:
  ticket: Any
  function: Callable[..., Any]
  args: tuple[Any, ...]
  started: float = 0.0  # time.monotonic()

  @property
  def source(self) -> str:
    """The env's class and method, for messages."""
    owner = getattr(self.function, '__self__', None)
    owner = getattr(owner, 'wrapped', owner)  # see latency.Delayed
    name = getattr(self.function, '__name__', repr(self.function))
    return name if owner is None else f'{type(owner).__name__}.{name}'


class WorkerPool:
  """Threads for blocking host work: env steps, graders, tools. No JAX.

  Time limits are looked at in results() and wait(), and count from the start
  of a call, not from its submit. They need the interpreter: code that holds
  its lock must run elsewhere (see isolated).
  """

  def __init__(self, num_workers: int, timeout_s: float):
    if num_workers < 1:
      raise ValueError(f'num_workers={num_workers} must be at least 1')
    if not timeout_s > 0:
      raise ValueError(f'timeout_s={timeout_s} must be above 0')
    self._timeout_s = timeout_s
    self._lock = threading.RLock()
    self._called = threading.Condition(self._lock)  # a call waits; for workers
    self._changed = threading.Condition(self._lock)  # for wait()
    self._waiting: collections.deque[_Call] = collections.deque()
    self._running: set[_Call] = set()
    self._outcomes: list[Outcome] = []
    self._abandoned = 0
    self._closed = False
    for _ in range(num_workers):
      self._start_worker()

  @property
  def in_flight(self) -> int:
    """Calls that wait or run; their outcomes are still to come."""
    with self._lock:
      return len(self._waiting) + len(self._running)

  def submit(
    self, ticket: Any, function: Callable[..., Any], *args: Any
  ) -> None:
    """Queues function(*args); its outcome will carry the ticket.

    Raises:
      RuntimeError: after close().
    """
    with self._lock:
      if self._closed:
        raise RuntimeError(f'ticket {ticket!r} submitted to a closed pool')
      self._waiting.append(_Call(ticket, function, args))
      self._called.notify()

  def results(self) -> list[Outcome]:
    """The outcomes since the last call, in order of ending; never waits."""
    with self._lock:
      self._expire()
      outcomes, self._outcomes = self._outcomes, []
      return outcomes

  def wait(self, timeout_s: float) -> bool:
    """Waits until results() has something; whether it does.

    Returns at once where nothing is in flight, else after timeout_s seconds at
    the latest.
    """
    deadline = time.monotonic() + timeout_s
    with self._changed:
      while True:
        self._expire()
        left_s = deadline - time.monotonic()
        idle = not self._waiting and not self._running
        if self._outcomes or idle or left_s <= 0:
          return bool(self._outcomes)
        ends = [call.started + self._timeout_s for call in self._running]
        next_s = min(ends, default=deadline) - time.monotonic()
        self._changed.wait(max(min(left_s, next_s), 0))

  def close(self) -> None:
    """Drops what waits and what runs; never blocks."""
    with self._lock:
      self._closed = True
      self._waiting.clear()
      self._running.clear()
      self._outcomes.clear()
      self._called.notify_all()
      self._changed.notify_all()

  def _start_worker(self) -> None:
    threading.Thread(target=self._work, name='env-worker', daemon=True).start()

  def _work(self) -> None:
    while True:
      with self._lock:
        while not self._waiting and not self._closed:
          self._called.wait()
        if self._closed:
          return
        call = self._waiting.popleft()
        call.started = time.monotonic()
        self._running.add(call)
        self._changed.notify_all()  # wait() must learn when this call is late
      outcome = _run(call)
      with self._lock:
        if call not in self._running:  # abandoned: a replacement is at work
          return
        self._running.remove(call)
        self._outcomes.append(outcome)
        self._changed.notify_all()

  def _expire(self) -> None:
    """Gives up calls over their time; the lock is held."""
    now = time.monotonic()
    late = [c for c in self._running if now - c.started >= self._timeout_s]
    for call in sorted(late, key=lambda call: call.started):
      self._running.remove(call)
      self._abandoned += 1
      error = f'{call.source} timed out after {self._timeout_s:g} s'
      self._outcomes.append(
        Outcome(call.ticket, None, error, now - call.started, timed_out=True)
      )
      logging.error(
        '%s; its thread is left behind (%d so far)', error, self._abandoned
      )
      self._start_worker()


def _run(call: _Call) -> Outcome:
  value, error = None, None
  try:
    value = call.function(*call.args)
  except BaseException as raised:  # SystemExit too: the pool must answer
    error = f'{call.source} raised {type(raised).__name__}: {raised}'
    logging.exception('%s', error)
  return Outcome(call.ticket, value, error, time.monotonic() - call.started)
