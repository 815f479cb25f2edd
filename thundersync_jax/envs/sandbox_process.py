"""A worker process as the host sees it: lines of JSON over its pipes."""

import contextlib
import json
import math
import os
import pathlib
import select
import signal
import subprocess
import time
from typing import Any

from absl import logging

_START_S = 60.0  # a worker's start on a busy machine
_END_S = 5.0
_MAX_REPLY_BYTES = 64 << 20


class LostError(Exception):
  """The worker does not answer any more."""


class StartError(Exception):
  """The worker did not start; the text is what it said."""


class Worker:
  """Starts a command and does not wait for it until it is asked something."""

  def __init__(
    self,
    command: list[str],
    environment: dict[str, str],
    folder: pathlib.Path,
    first_line: bytes,
  ):
    """Starts the command.

    Args:
      command: that becomes a worker (sandbox_worker.py).
      environment: all variables of the command.
      folder: where it starts; its messages go to the file `errors` there.
      first_line: what the worker reads first.
    """
    self._errors = folder / 'errors'
    with self._errors.open('wb') as errors:
      self._process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        bufsize=0,
        cwd=folder,
        env=environment,
        start_new_session=True,
      )
    self._ready = False
    with contextlib.suppress(BrokenPipeError):  # told when it is asked
      self._write(first_line)

  def ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """The reply to one request.

    Raises:
      LostError: if there is none in time.
      StartError: if the worker never came up.
    """
    if not self._ready:
      try:
        self._receive(time.monotonic() + _START_S)
      except LostError as error:
        said = self._errors.read_text(errors='replace').strip()
        raise StartError(f'{said[-500:]} ({error})') from error
      self._ready = True
    deadline = time.monotonic() + timeout_s
    try:
      self._write(json.dumps(request).encode() + b'\n')
    except OSError as error:
      raise LostError(str(error)) from error
    reply = self._receive(deadline)
    if 'fault' in reply:
      raise LostError(reply['fault'])
    return reply

  def end(self) -> None:
    """Ends the worker and everything inside."""
    process = self._process
    with contextlib.suppress(OSError):
      process.stdin.close()  # it kills all that is left inside, then ends
    for number in (signal.SIGTERM, signal.SIGKILL):
      try:
        process.wait(timeout=_END_S)
        break
      except subprocess.TimeoutExpired:
        logging.error('sandbox: process %d does not end; killed', process.pid)
      with contextlib.suppress(OSError):
        os.killpg(process.pid, number)
    with contextlib.suppress(OSError):
      os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()

  def _write(self, line: bytes) -> None:
    left = memoryview(line)
    while left:  # the worker reads as long as it lives
      left = left[os.write(self._process.stdin.fileno(), left) :]

  def _receive(self, deadline: float) -> dict[str, Any]:
    pipe, poll = self._process.stdout.fileno(), select.poll()
    poll.register(pipe, select.POLLIN)
    received = bytearray()
    while not received.endswith(b'\n'):
      left_s = deadline - time.monotonic()
      if left_s <= 0 or not poll.poll(math.ceil(left_s * 1000)):
        raise LostError('no answer in time')
      data = os.read(pipe, 1 << 16)
      if not data:
        raise LostError('its pipe ended')
      received += data
      if len(received) > _MAX_REPLY_BYTES:
        raise LostError(f'an answer of over {_MAX_REPLY_BYTES} bytes')
    return json.loads(received)
