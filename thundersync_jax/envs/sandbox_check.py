"""Measures what a sandbox holds in: its code attacks, the host looks.

A backend that claims isolation may still not deliver it (a container without
namespaces, a kernel without a filter). So the first sandbox of each backend
runs a probe that tries each attack in small, and what the host then finds on
its own side decides; the probe's word is taken only where it reports success.
"""

import contextlib
import fcntl
import json
import os
import pathlib
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable

# What a sandbox may provide; namespaces give all of it.
FILES, NETWORK, SIGNALS = 'files', 'network', 'signals'
PROCESSES, MEMORY, ORPHANS = 'processes', 'memory', 'orphans'
EVERYTHING = frozenset([FILES, NETWORK, SIGNALS, PROCESSES, MEMORY, ORPHANS])
# Backend -> what it is refused without.
CLAIMS = {
  'bwrap': EVERYTHING,
  'unshare': EVERYTHING,
  'rlimits': frozenset([MEMORY, ORPHANS]),
}

_PROBE = r"""
import fcntl, json, os, resource, signal, socket, time
done = {}
def attempt(name, action):
  try:
    done[name] = action() or True
  except BaseException as error:
    done[name] = False
def read():
  return open(given['secret']).read()
def write():
  open(given['outside'], 'w').close()
def network():
  socket.create_connection(('127.0.0.1', given['port']), 1).close()
def kill():
  os.kill(given['canary'], signal.SIGKILL)
def memory():
  block = bytearray(given['memory'])
  block[::4096] = b'x' * len(block[::4096])
def fork():
  for count in range(given['processes']):
    try:
      if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
    except OSError:
      return count
  return given['processes']
def orphan():
  if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
      held = open('held', 'w')
      fcntl.flock(held, fcntl.LOCK_EX)
      os.write(ready, b'x')
      time.sleep(60)
    os._exit(0)
  os.read(wait, 1)
wait, ready = os.pipe()
attempt('read', read)
attempt('write', write)
attempt('network', network)
attempt('signals', kill)
attempt('memory', memory)
attempt('orphans', orphan)
attempt('processes', fork)
print(json.dumps(done))
"""


def provided(run_python: Callable, work: pathlib.Path, limits) -> frozenset:
  """What the sandbox holds in, by trial.

  Args:
    run_python: the sandbox's method, which returns a result with `output`.
    work: its working directory on the host.
    limits: with memory_bytes and processes.

  Returns:
    Names out of EVERYTHING.
  """
  secret_text, name = secrets.token_hex(16), secrets.token_hex(8)
  outside = pathlib.Path(tempfile.gettempdir(), f'sandbox_probe_{name}')
  secret = work.parent / 'secret'
  secret.write_text(secret_text)
  with socket.create_server(('127.0.0.1', 0)) as server, _canary() as canary:
    given = {
      'secret': str(secret),
      'outside': str(outside),
      'port': server.getsockname()[1],
      'canary': canary.pid,
      'memory': 2 * limits.memory_bytes,
      'processes': limits.processes + 20,
    }
    result = run_python(f'given = {given!r}\n{_PROBE}')
    reported = _reported(result.output)
    if reported is None:  # not even a child could be started and read
      return frozenset()
    broken = {
      FILES: secret_text in result.output or outside.exists(),
      NETWORK: _was_reached(server) or reported['network'],
      SIGNALS: canary.poll() is not None,
      MEMORY: reported['memory'],
      ORPHANS: not reported['orphans'] or _is_held(work / 'held'),
      # None at all is as wrong as too many: a shell could start nothing.
      PROCESSES: not 2 <= int(reported['processes']) <= limits.processes,
    }
  outside.unlink(missing_ok=True)
  return frozenset(name for name, failed in broken.items() if not failed)


@contextlib.contextmanager
def _canary():
  """A process of the caller's own user that only waits."""
  command = [sys.executable, '-I', '-S', '-c', 'import time; time.sleep(120)']
  process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
  try:
    yield process
  finally:
    process.kill()
    process.wait()


def _reported(output: str) -> dict | None:
  for line in output.splitlines():
    with contextlib.suppress(ValueError):
      return json.loads(line)
  return None


def _was_reached(server: socket.socket) -> bool:
  server.setblocking(False)
  with contextlib.suppress(BlockingIOError):
    server.accept()[0].close()
    return True
  return False


def _is_held(path: pathlib.Path) -> bool:
  """Whether a living process still holds the lock on the file."""
  descriptor = os.open(path, os.O_RDONLY)
  try:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    return True
  finally:
    os.close(descriptor)
  return False
