"""What holds a sandbox in: bubblewrap, namespaces, or limits alone.

  bwrap    bubblewrap, where it is installed and may make namespaces
  unshare  the same namespaces made by sandbox_launch.py
  rlimits  no namespaces: resource limits, a system-call filter (no sockets)
           and, where the kernel has it, Landlock (files and signals)

In all three sandbox_worker.py confines itself (sandbox_confine.py), then
serves. A
superuser's sandbox runs as an unprivileged user id of its own, because the
limit on processes does not bind the superuser.
"""

import base64
import dataclasses
import functools
import importlib.resources
import json
import marshal
import os
import pathlib
import random
import shutil
import stat
import sys
from collections.abc import Callable
from typing import Any

from absl import logging

WORK = '/work'  # the working directory, as a program in namespaces sees it
_PYTHON = '/opt/python'
_SYSTEM = ('bin', 'sbin', 'lib', 'lib32', 'lib64', 'libx32')
_FLAGS = ('-I', '-S', '-B', '-X', 'utf8', '-W', 'ignore', '-c')
_CAP_SETUID, _CAP_SYS_ADMIN = 7, 21
# The worker's first line of input holds its own code (see first_line): a
# command line would show it to each program that lists processes.
_BOOT = """
import base64, json, marshal, sys, types
given = json.loads(sys.stdin.buffer.readline())
for name, code in given.pop('modules').items():
  module = sys.modules[name] = types.ModuleType(name)
  exec(marshal.loads(base64.b64decode(code)), module.__dict__)
  parent, _, leaf = name.rpartition('.')
  if parent:
    setattr(sys.modules[parent], leaf, module)
module.main(given)
"""
_MODULES = (
  'sandbox_confine',
  'sandbox_launch',
  'sandbox_calls',
  'sandbox_worker',
)
# User ids that the superuser's sandboxes draw from.
_OWN_UIDS = range(300_000, 1_000_000)


@dataclasses.dataclass(frozen=True)
class Place:
  """A sandbox's folder on the host, and who it belongs to.

  Attributes:
    base: folder that holds all of it; deleted at the end.
    uid: user id that its programs run as, or None for the caller's own.
  """

  base: pathlib.Path
  uid: int | None

  @property
  def work(self) -> pathlib.Path:
    """The working directory of its programs."""
    return self.base / 'work'


@functools.cache
def source(name: str) -> str:
  """The text of a program that runs inside."""
  return (
    importlib.resources.files(__package__).joinpath(name).read_text('utf-8')
  )


@functools.cache
def _capabilities() -> int:
  for line in pathlib.Path('/proc/self/status').read_text().splitlines():
    if line.startswith('CapEff:'):
      return int(line.split()[1], 16)
  return 0


def _has(capability: int) -> bool:
  return bool(_capabilities() >> capability & 1)


def _all_may_enter(path: str) -> bool:
  """Whether every user may read what lies at the path."""
  folders = [path, *pathlib.Path(path).parents]
  return all(os.stat(p).st_mode & stat.S_IXOTH for p in folders)


def draw_uid(backend: str) -> int | None:
  """A user id for one sandbox; None where the caller's own has to do."""
  if os.geteuid() != 0 or not _has(_CAP_SETUID):
    return None
  if backend != 'rlimits' and not _has(_CAP_SYS_ADMIN):
    return None  # it gets a user namespace instead
  if backend == 'rlimits' and not _all_may_enter(sys.base_prefix):
    return None  # it could not read the interpreter
  mapped = pathlib.Path('/proc/self/uid_map').read_text().split()
  if int(mapped[0]) != 0 or int(mapped[2]) < _OWN_UIDS.stop:
    return None
  return random.SystemRandom().choice(_OWN_UIDS)


def _interpreter() -> str:
  return os.path.realpath(sys.executable)


def _relocated() -> bool:
  return not pathlib.Path(_interpreter()).is_relative_to('/usr')


def python(backend: str) -> str:
  """Path of the Python interpreter as the sandbox sees it."""
  if backend == 'rlimits' or not _relocated():
    return _interpreter()
  return f'{_PYTHON}/bin/{pathlib.Path(_interpreter()).name}'


def _worker(backend: str) -> list[str]:
  return [python(backend), *_FLAGS, _BOOT]


def environment(backend: str) -> dict[str, str]:
  """Every variable that a sandboxed program gets; none is the caller's."""
  prefix = _PYTHON if backend != 'rlimits' else sys.base_prefix
  path = '/usr/local/bin:/usr/bin:/bin'
  # Bytecode is found stale by whole seconds alone: edits would be missed.
  values = {'LANG': 'C.UTF-8', 'PYTHONDONTWRITEBYTECODE': '1'}
  if _relocated():
    path = f'{prefix}/bin:{path}'
    # Found by its old place otherwise, where it is a shared library.
    values['LD_LIBRARY_PATH'] = f'{prefix}/lib'
  return {'PATH': path, **values}


def _readable() -> list[tuple[str, str]]:
  """Host path and inner path of what a program may read."""
  paths = [('/usr', '/usr')]
  paths += [
    (f'/{name}', f'/{name}')
    for name in _SYSTEM
    if os.path.isdir(f'/{name}') and not os.path.islink(f'/{name}')
  ]
  for path in ('/etc/alternatives', '/etc/ld.so.cache'):
    if os.path.exists(path):
      paths.append((path, path))
  if _relocated():
    bin_folder = os.path.dirname(_interpreter())
    paths.append((bin_folder, f'{_PYTHON}/bin'))
    paths.append((f'{sys.base_prefix}/lib', f'{_PYTHON}/lib'))
  return paths


def _links() -> list[tuple[str, str]]:
  return [
    (os.readlink(f'/{name}'), f'/{name}')
    for name in _SYSTEM
    if os.path.islink(f'/{name}')
  ]


def _accounts(place: Place) -> list[tuple[str, str]]:
  """Writes the users that a program sees: itself and root."""
  uid = _inner_uid(place)
  texts = {
    'passwd': f'root:x:0:0::/:/bin/sh\nagent:x:{uid}:{uid}::{WORK}:/bin/sh\n',
    'group': f'root:x:0:\nagent:x:{uid}:\n',
  }
  for name, text in texts.items():
    (place.base / name).write_text(text)
  return [(str(place.base / name), f'/etc/{name}') for name in texts]


def _inner_uid(place: Place) -> int:
  return 1000 if place.uid is None else place.uid


def confinement(
  backend: str, place: Place, limits: dict[str, int]
) -> dict[str, Any]:
  """What the worker does to itself before it serves (sandbox_confine.py)."""
  config = {
    'limits': limits,
    'uid': place.uid,
    'namespaces': backend != 'rlimits',
    'directory': directory(backend, place),
  }
  if backend == 'rlimits':
    config['readable'] = [path for path, _ in _readable()] + ['/proc']
    devices = ('null', 'zero', 'full', 'random', 'urandom')
    config['writable'] = [str(place.work), *(f'/dev/{d}' for d in devices)]
  return config


@functools.cache
def _modules() -> dict[str, str]:
  """Compiled modules of a worker by name, in the order of their imports."""
  texts = dict.fromkeys([__package__.partition('.')[0], __package__], '')
  for name in _MODULES:
    texts[f'{__package__}.{name}'] = source(f'{name}.py')
  return {
    name: base64.b64encode(marshal.dumps(compile(text, name, 'exec'))).decode()
    for name, text in texts.items()
  }


def first_line(config: dict[str, Any]) -> bytes:
  """What a worker reads first: its program and its settings."""
  return json.dumps({**config, 'modules': _modules()}).encode() + b'\n'


def directory(backend: str, place: Place) -> str:
  """The working directory as the sandbox sees it."""
  return str(place.work) if backend == 'rlimits' else WORK


def _with_home(backend: str, place: Place) -> dict[str, str]:
  home = directory(backend, place)
  temporary = home if backend == 'rlimits' else '/tmp'
  return {**environment(backend), 'HOME': home, 'TMPDIR': temporary}


def bwrap(place: Place, temporary: int) -> list[str]:
  """The command that starts a worker in bubblewrap."""
  path = shutil.which('bwrap')
  if path is None:
    raise FileNotFoundError('bwrap is not installed')
  command = [path, '--unshare-net', '--unshare-pid', '--unshare-ipc']
  command += ['--unshare-uts', '--unshare-cgroup-try', '--hostname', 'sandbox']
  if place.uid is None:
    inner = str(_inner_uid(place))
    command += ['--unshare-user', '--uid', inner, '--gid', inner]
  else:
    command += ['--cap-drop', 'ALL']
    command += ['--cap-add', 'CAP_SETUID', '--cap-add', 'CAP_SETGID']
  command += ['--as-pid-1', '--clearenv']
  for name, value in _with_home('bwrap', place).items():
    command += ['--setenv', name, value]
  for folder in ('/etc', '/opt', _PYTHON):  # those it makes itself are closed
    command += ['--dir', folder]
  for outside, inside in [*_readable(), *_accounts(place)]:
    command += ['--ro-bind', outside, inside]
  for target, link in _links():
    command += ['--symlink', target, link]
  command += ['--proc', '/proc', '--dev', '/dev']
  size = ['--size', str(temporary)]
  for folder in ('/tmp', '/dev/shm'):
    command += ['--perms', '1777', *size, '--tmpfs', folder]
  command += ['--bind', str(place.work), WORK, '--remount-ro', '/', '--']
  return [*command, *_worker('bwrap')]


def unshare(place: Place, temporary: int) -> list[str]:
  """The command that starts a worker in namespaces of our own making."""
  root = place.base / 'root'
  root.mkdir(exist_ok=True)
  config = {
    'namespaces': True,
    'user': _inner_uid(place) if place.uid is None else None,
    'root': str(root),
    'readable': [*_readable(), *_accounts(place)],
    'links': _links(),
    'writable': [(str(place.work), WORK)],
    'temporary_bytes': temporary,
    'environment': _with_home('unshare', place),
  }
  return [*_launch(config), *_worker('unshare')]


def rlimits(place: Place, temporary: int) -> list[str]:
  """The command that starts a worker with limits and filters alone."""
  config = {
    'namespaces': False,
    'environment': _with_home('rlimits', place),
  }
  return [*_launch(config), *_worker('rlimits')]


def _launch(config: dict) -> list[str]:
  program = [_interpreter(), *_FLAGS, source('sandbox_launch.py')]
  return [*program, json.dumps(config)]


def counted_elsewhere(backend: str, uid: int | None) -> int:
  """Processes outside a sandbox that count against its limit on processes.

  The limit is counted by user; by user and namespace from Linux 5.14 on.
  """
  release = os.uname().release.split('.')
  version = tuple(
    int(''.join(filter(str.isdigit, p)) or 0) for p in release[:2]
  )
  if uid is not None or (backend != 'rlimits' and version >= (5, 14)):
    return 0
  own, count = os.geteuid(), 0
  for task in pathlib.Path('/proc').glob('[0-9]*'):
    try:
      if task.stat().st_uid == own:
        count += len(os.listdir(task / 'task'))
    except OSError:  # it ended meanwhile
      continue
  return count


def log_choice(name: str, provides: frozenset[str], missing: frozenset[str]):
  """The start-up line that says what is in force."""
  if missing:
    logging.warning(
      'sandbox: backend %s does NOT isolate %s here (it does: %s). Install '
      'bubblewrap, or allow user namespaces, before running untrusted models.',
      name,
      ', '.join(sorted(missing)),
      ', '.join(sorted(provides)),
    )
  else:
    logging.info(
      'sandbox: backend %s, checked: %s', name, ', '.join(sorted(provides))
    )


# Best first.
BACKENDS: dict[str, Callable[[Place, int], list[str]]] = {
  'bwrap': bwrap,
  'unshare': unshare,
  'rlimits': rlimits,
}
