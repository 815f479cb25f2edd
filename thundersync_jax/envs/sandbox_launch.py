"""Starts a program in namespaces of its own, and outlives what it starts.

Runs as a program (standard library only, `python -c`): argv[1] is a JSON
object, argv[2:] the program. With 'namespaces' the program sees a new file
tree, its own processes, no network; it is process 1 there, so that its end is
the end of every process it left. Without, this process adopts what outlives
its parent, and kills it when the program ends.
"""

import contextlib
import ctypes
import json
import os
import signal
import sys
import time

_LIBC = ctypes.CDLL(None, use_errno=True)
_NEW_USER = 0x10000000
# Mount, cgroup, uts, ipc, pid and network namespaces.
_NEW_OTHERS = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x60000000
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT = 1, 2, 4, 8, 32
_BIND, _REC, _PRIVATE = 4096, 16384, 1 << 18
_LOCKED = {'nosuid': _NOSUID, 'nodev': _NODEV, 'noexec': _NOEXEC}
_LOCKED |= {'noatime': 1024, 'nodiratime': 2048, 'relatime': 1 << 21}
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_DEVICES = ('null', 'zero', 'full', 'random', 'urandom')


def _check(result: int, what: str) -> None:
  if result < 0:
    error = ctypes.get_errno()
    raise OSError(error, f'{what}: {os.strerror(error)}')


def _mount(source: str, target: str, kind: str, flags: int, data: str = ''):
  arguments = (source, target, kind)
  encoded = [text.encode() or None for text in arguments]
  result = _LIBC.mount(
    *encoded, ctypes.c_ulong(flags), data.encode() if data else None
  )
  _check(result, f'mount {target}')


def _bind(source: str, target: str, writable: bool) -> None:
  """Shows a file or folder at another place, by default read-only."""
  if os.path.isdir(source):
    os.makedirs(target, exist_ok=True)
  else:
    os.makedirs(os.path.dirname(target), exist_ok=True)
    os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
  _mount(source, target, '', _BIND | _REC)
  flags = _BIND | _REMOUNT | _NOSUID | (0 if writable else _RDONLY)
  # Flags that the mount already has may not be taken off in a new namespace.
  with open('/proc/self/mounts', encoding='utf-8', errors='replace') as lines:
    entries = [line.split() for line in lines]
  for _, place, _, options, *_ in entries:
    if place.replace('\\040', ' ') == target:
      for option in options.split(','):
        flags |= _LOCKED.get(option, 0)
  _mount('', target, '', flags)


def _enter_user_namespace(uid: int) -> None:
  outside, group = os.geteuid(), os.getegid()
  _check(_LIBC.unshare(_NEW_USER | _NEW_OTHERS), 'unshare')
  for name, text in (
    ('setgroups', 'deny'),
    ('uid_map', f'{uid} {outside} 1'),
    ('gid_map', f'{uid} {group} 1'),
  ):
    with open(f'/proc/self/{name}', 'w', encoding='ascii') as file:
      file.write(text)


def _new_tree(config: dict) -> None:
  """Replaces the root by one that holds what the config names."""
  _mount('', '/', '', _REC | _PRIVATE)
  root = config['root']
  _mount('tmpfs', root, 'tmpfs', _NOSUID | _NODEV, 'size=1m,mode=755')
  for source, target in config['readable']:
    _bind(source, root + target, writable=False)
  for source, target in config['links']:
    os.makedirs(os.path.dirname(root + target), exist_ok=True)
    os.symlink(source, root + target)
  for name in _DEVICES:
    _bind(f'/dev/{name}', f'{root}/dev/{name}', writable=True)
  for source, target in config['writable']:
    _bind(source, root + target, writable=True)
  size = config['temporary_bytes']
  for target in ('/tmp', '/dev/shm'):
    os.makedirs(root + target)
    options = f'size={size},mode=1777,nr_inodes=10000'
    _mount('tmpfs', root + target, 'tmpfs', _NOSUID | _NODEV, options)
  os.makedirs(f'{root}/proc')
  _mount('proc', f'{root}/proc', 'proc', _NOSUID | _NODEV | _NOEXEC)
  os.makedirs(f'{root}/old')
  os.chdir(root)
  _check(_LIBC.pivot_root(b'.', b'old'), 'pivot_root')
  os.chdir('/')
  _check(_LIBC.umount2(b'/old', 2), 'umount old root')
  os.rmdir('/old')
  _mount('', '/', '', _BIND | _REMOUNT | _RDONLY | _NOSUID | _NODEV)


def descendants(pid: int) -> list[int]:
  """Living processes below `pid`, by the table of processes."""
  parents = {}
  for name in filter(str.isdigit, os.listdir('/proc')):
    with contextlib.suppress(OSError), open(f'/proc/{name}/stat', 'rb') as file:
      state, parent = file.read().rpartition(b')')[2].split()[:2]
      if state != b'Z':
        parents[int(name)] = int(parent)
  found = {pid}
  while more := {p for p, up in parents.items() if up in found} - found:
    found |= more
  return sorted(found - {pid})


def sweep() -> None:
  """Kills all descendants, also those that are born meanwhile."""
  for _ in range(1000):
    left = descendants(os.getpid())
    for pid in left:
      with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
      while os.waitpid(-1, os.WNOHANG)[0]:
        pass
    if not left:
      return
    time.sleep(0.001)


def _start(config: dict, program: list[str]) -> int:
  child = os.fork()
  if child:
    return child
  try:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _check(_LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), 'prctl')
    if config['namespaces']:
      _LIBC.sethostname(b'sandbox', 7)
      _new_tree(config)
    os.execve(program[0], program, config['environment'])
  except BaseException as error:
    os.write(2, f'sandbox: {error}\n'.encode(errors='replace'))
  finally:
    os._exit(111)


def main() -> None:
  config, program = json.loads(sys.argv[1]), sys.argv[2:]
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
  if config['namespaces']:
    if config['user'] is None:
      _check(_LIBC.unshare(_NEW_OTHERS), 'unshare')
    else:
      _enter_user_namespace(config['user'])
  else:
    _check(_LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), 'prctl')
  child = _start(config, program)
  os.closerange(0, 2)  # the program alone holds the pipes
  try:
    while True:
      ended, _ = os.waitpid(-1, 0)
      if ended == child:
        return
  finally:
    if config['namespaces']:
      with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    else:
      sweep()


if __name__ == '__main__':
  main()
