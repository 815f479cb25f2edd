"""Calls of host functions in child processes that can be killed.

Scorers hand text of the model to eval and to sympy. 9^(9^9) then computes for
hours inside one bytecode, holds the interpreter lock and freezes every thread
of its process; a time limit by threads or signals cannot end that. A child
process can be killed: requests and replies are JSON lines over its pipes.

This bounds time and memory. It is no sandbox against hostile code.
"""

import importlib
import json
import math
import os
import resource
import select
import subprocess
import sys
import threading
import time
import weakref
from typing import Any

_START_LIMIT_S = 120.0
_MEMORY_LIMIT_BYTES = 4 << 30
_SERVE = 'from thundersync_jax.envs import isolated; isolated.serve()'


class IsolatedError(Exception):
  """The called function raised, ran over its time, or ended its process."""


class StartError(Exception):
  """No child process could be started: the installation is at fault."""


class Children:
  """A few child processes, started when first needed, reused, replaced.

  Thread-safe. A child ends with the process that started it; one that is busy
  then is ended by its own limit on processor time.
  """

  def __init__(self, imports: tuple[str, ...] = (), max_children: int = 2):
    """Starts nothing yet.

    Args:
      imports: modules that a child imports before its first call, so that they
        do not count against the time limit of the call.
      max_children: children alive at a time; further calls wait for one.

    Raises:
      ValueError: if max_children is below 1.
    """
    if max_children < 1:
      raise ValueError(f'max_children={max_children} must be at least 1')
    self._imports = imports
    self._free = threading.BoundedSemaphore(max_children)
    self._idle: list[subprocess.Popen] = []
    self._alive: set[subprocess.Popen] = set()
    weakref.finalize(self, _kill_all, self._alive)

  def call(self, target: str, *args: Any, timeout_s: float) -> Any:
    """The result of 'module:function' on JSON-able arguments.

    Raises:
      IsolatedError: if the function raised, took more than timeout_s seconds,
        or its process ended.
      StartError: if no child could be started.
    """
    with self._free:
      child = self._idle.pop() if self._idle else self._start()
      if child.poll() is not None:  # ended while it was idle
        self._kill(child)
        child = self._start()
      request = {'target': target, 'args': args, 'timeout_s': timeout_s}
      try:
        reply = _exchange(child, request, timeout_s)
      except BaseException:
        self._kill(child)
        raise
      self._idle.append(child)
    if 'error' in reply:
      raise IsolatedError(f'{target} raised {reply["error"]}')
    return reply['value']

  def _start(self) -> subprocess.Popen:
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    child = subprocess.Popen(
      [sys.executable, '-P', '-W', 'ignore', '-c', _SERVE],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      bufsize=0,
      env={**os.environ, 'PYTHONPATH': path},
      start_new_session=True,  # an interrupt of the terminal is the parent's
    )
    self._alive.add(child)
    try:
      reply = _exchange(child, {'imports': self._imports}, _START_LIMIT_S)
    except IsolatedError as error:
      self._kill(child)
      raise StartError(
        f'no scoring process could be started: {error}'
      ) from error
    if 'error' in reply:
      self._kill(child)
      raise StartError(
        f'a scoring process cannot import {self._imports}: {reply["error"]}; '
        'install the package that is missing'
      )
    return child

  def _kill(self, child: subprocess.Popen) -> None:
    self._alive.discard(child)
    _kill_all({child})
    child.stdin.close()
    child.stdout.close()


def _kill_all(children: set[subprocess.Popen]) -> None:
  while children:
    child = children.pop()
    child.kill()
    child.wait()


def _exchange(child: subprocess.Popen, request: dict, timeout_s: float) -> dict:
  """Sends one request and waits for its reply."""
  deadline = time.monotonic() + timeout_s
  try:
    _write(child.stdin.fileno(), json.dumps(request))
  except BrokenPipeError as error:
    raise IsolatedError(_how_it_ended(child)) from error
  poll = select.poll()
  poll.register(child.stdout, select.POLLIN)
  received = b''
  while not received.endswith(b'\n'):
    left_s = deadline - time.monotonic()
    if left_s <= 0 or not poll.poll(math.ceil(left_s * 1000)):
      raise IsolatedError(f'no reply within {timeout_s:g} s')
    data = os.read(child.stdout.fileno(), 1 << 16)
    if not data:
      raise IsolatedError(_how_it_ended(child))
    received += data
  return json.loads(received)


def _write(descriptor: int, line: str) -> None:
  left = memoryview(line.encode() + b'\n')
  while left:
    left = left[os.write(descriptor, left) :]


def _how_it_ended(child: subprocess.Popen) -> str:
  try:
    return f'process ended with status {child.wait(timeout=5)}'
  except subprocess.TimeoutExpired:
    return 'process closed its pipes'


def serve() -> None:
  """The loop of a child: one JSON line in, one JSON line out, until the end."""
  requests = os.fdopen(os.dup(0), 'rb')
  replies = os.dup(1)
  # Called code may read its input or print: neither may touch the protocol.
  os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
  os.dup2(2, 1)
  resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_LIMIT_BYTES,) * 2)
  for line in requests:
    try:
      reply = {'value': _answer(json.loads(line))}
      encoded = json.dumps(reply)
    except BaseException as error:  # sent to the caller, which raises it
      encoded = json.dumps({'error': f'{type(error).__name__}: {error}'[:2000]})
    _write(replies, encoded)


def _answer(request: dict) -> Any:
  if 'imports' in request:
    for name in request['imports']:
      importlib.import_module(name)
    return None
  # The kernel ends a busy child by this limit when its parent is gone.
  usage = resource.getrusage(resource.RUSAGE_SELF)
  used_s = usage.ru_utime + usage.ru_stime
  _, hard = resource.getrlimit(resource.RLIMIT_CPU)
  limit = math.ceil(used_s + request['timeout_s']) + 2
  if hard != resource.RLIM_INFINITY:
    limit = min(limit, hard)
  resource.setrlimit(resource.RLIMIT_CPU, (limit, hard))
  module, function = request['target'].split(':')
  return getattr(importlib.import_module(module), function)(*request['args'])
