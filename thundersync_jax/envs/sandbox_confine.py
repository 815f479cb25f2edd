"""Limits and filters that a sandboxed process cannot take off again.

Runs inside, in the worker (standard library only), before any code of a model.
Layers, in this order: resource limits; an unprivileged user; no new
privileges; Landlock, which narrows the files that can be opened and the
processes that can be signalled (Linux 5.13, signals 6.12); a system-call
filter, which refuses sockets, tracing, mounts and new namespaces.
"""

import contextlib
import ctypes
import os
import resource
import struct

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 22, 24, 38
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_EPERM, _EACCES, _ENOSYS = 1, 13, 38
# CLONE_NEW* of user, pid, network, mount, ipc, uts and cgroup namespaces.
_CLONE_NEW = 0x7E020000

# machine -> (audit architecture, numbers of the system calls in _CALLS).
_CALLS = (
  *('acct', 'add_key', 'bpf', 'chroot', 'delete_module', 'finit_module'),
  *('init_module', 'keyctl', 'mount', 'open_by_handle_at', 'perf_event_open'),
  *('pivot_root', 'process_vm_readv', 'process_vm_writev', 'ptrace'),
  *('quotactl', 'request_key', 'setns', 'swapon', 'umount2', 'unshare'),
  *('userfaultfd', 'socket', 'clone', 'prlimit64', 'kill', 'tkill', 'tgkill'),
  *('rt_sigqueueinfo', 'rt_tgsigqueueinfo'),
)
_NUMBERS = {
  'x86_64': (
    0xC000003E,
    '163 248 321 161 176 313 175 250 165 304 298 155 310 311 101 179 249 308 '
    '167 166 272 323 41 56 302 62 200 234 129 297',
  ),
  'aarch64': (
    0xC00000B7,
    '89 217 280 51 106 273 105 219 40 265 241 41 270 271 117 60 218 268 224 '
    '39 97 282 198 220 261 129 130 131 138 240',
  ),
}
# The same everywhere: io_uring, pidfd signals and fds, the new mount calls.
_NEWER = (424, 425, 426, 427, 438, 428, 429, 430, 431, 432, 433, 442)
_CLONE3 = 435
_CAPSET = {'x86_64': 126, 'aarch64': 91}
_SIGNALS = {'kill', 'tkill', 'tgkill', 'rt_sigqueueinfo', 'rt_tgsigqueueinfo'}
_WITH_ARGUMENT = {'socket', 'clone', 'prlimit64', *_SIGNALS}


def _check(result: int, what: str) -> int:
  if result < 0:
    error = ctypes.get_errno()
    raise OSError(error, f'{what}: {os.strerror(error)}')
  return result


def limit_resources(limits: dict[str, int]) -> None:
  """Sets soft and hard limits by name, e.g. {'NPROC': 64}."""
  for name, value in limits.items():
    kind = getattr(resource, f'RLIMIT_{name}')
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
      value = min(value, hard)
    resource.setrlimit(kind, (value, value))


def become(uid: int) -> None:
  """Gives up root for good."""
  os.setgroups([])
  os.setresgid(uid, uid, uid)
  os.setresuid(uid, uid, uid)


def drop_capabilities(number: int) -> None:
  """Leaves a superuser, who has to stay one, with the rights of an owner."""
  for capability in range(64):
    _LIBC.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)  # not all exist
  header = struct.pack('II', 0x20080522, 0)
  _check(_LIBC.syscall(number, header, bytes(24)), 'capset')


def _instruction(code: int, yes: int, no: int, value: int) -> bytes:
  return struct.pack('HBBI', code, yes, no, value)


def system_call_filter(machine: str, signals: bool) -> bytes | None:
  """The BPF program, or None for a machine whose numbers are not known.

  Args:
    machine: as os.uname().machine names it.
    signals: whether programs may signal others; without, only nobody.
  """
  if machine not in _NUMBERS:
    return None
  architecture, text = _NUMBERS[machine]
  numbers = dict(zip(_CALLS, map(int, text.split()), strict=True))
  load, equal, any_bit, done = 0x20, 0x15, 0x45, 0x06
  program = [
    _instruction(load, 0, 0, 4),
    _instruction(equal, 1, 0, architecture),
    _instruction(done, 0, 0, _KILL),
    _instruction(load, 0, 0, 0),
  ]
  if machine == 'x86_64':  # the x32 numbers would go around the list
    program += [
      _instruction(0x35, 0, 1, 0x40000000),
      _instruction(done, 0, 0, _ERRNO | _ENOSYS),
    ]
  refused = {n: _EPERM for c, n in numbers.items() if c not in _WITH_ARGUMENT}
  refused |= {number: _EPERM for number in _NEWER}
  refused |= {numbers['socket']: _EACCES, _CLONE3: _ENOSYS}
  if not signals:
    refused |= {numbers[call]: _EPERM for call in _SIGNALS}
  for number, error in refused.items():
    program += [
      _instruction(equal, 0, 1, number),
      _instruction(done, 0, 0, _ERRNO | error),
    ]
  # clone without new namespaces; prlimit64 of oneself (process 0) alone.
  for call, test, value in (
    ('clone', any_bit, _CLONE_NEW),
    ('prlimit64', any_bit, 0xFFFFFFFF),
  ):
    program += [
      _instruction(equal, 0, 3, numbers[call]),
      _instruction(load, 0, 0, 16),
      _instruction(test, 0, 1, value),
      _instruction(done, 0, 0, _ERRNO | _EPERM),
      _instruction(load, 0, 0, 0),
    ]
  program.append(_instruction(done, 0, 0, _ALLOW))
  return b''.join(program)


class _Program(ctypes.Structure):
  _fields_ = (('length', ctypes.c_ushort), ('code', ctypes.c_char_p))


def filter_system_calls(program: bytes) -> None:
  """Installs a BPF program for this process and all that come from it."""
  filled = _Program(len(program) // 8, program)
  _check(_LIBC.prctl(_PR_SET_SECCOMP, 2, ctypes.byref(filled), 0, 0), 'seccomp')


def landlock_version() -> int:
  """The Landlock interface of the kernel; 0 where there is none."""
  return max(_LIBC.syscall(444, None, ctypes.c_size_t(0), 1), 0)


def restrict_files(readable: list[str], writable: list[str]) -> None:
  """Only these files and what lies below them can be opened from now on."""
  version = landlock_version()
  bits = 13 + (version >= 2) + (version >= 3) + (version >= 5)
  every = (1 << bits) - 1
  read = 0b1101  # execute, read a file, list a folder
  for_files = 0b111 | (1 << 14 & every) | (1 << 15 & every)
  ports = 0b11 if version >= 4 else 0
  scopes = 0b11 if version >= 6 else 0  # abstract sockets, signals
  attributes = struct.pack('QQQ', every, ports, scopes)
  size = 8 if version < 4 else 16 if version < 6 else 24
  rules = _check(
    _LIBC.syscall(444, attributes, ctypes.c_size_t(size), 0), 'landlock'
  )
  for paths, access in ((readable, read), (writable, every)):
    for path in paths:
      with contextlib.suppress(FileNotFoundError):
        target = os.open(path, os.O_PATH | os.O_CLOEXEC)
        allowed = access if os.path.isdir(path) else access & for_files
        rule = struct.pack('=Qi', allowed, target)
        _check(_LIBC.syscall(445, rules, 1, rule, 0), f'landlock {path}')
        os.close(target)
  _check(_LIBC.syscall(446, rules, 0), 'landlock')
  os.close(rules)


def refuse_signals() -> None:
  """From now on this process signals nobody, not even its own children."""
  program = system_call_filter(os.uname().machine, signals=False)
  if program:
    filter_system_calls(program)


def confine(config: dict) -> bool:
  """Confines this process (see sandbox_backends.confinement).

  Returns:
    Whether it can signal nothing outside. Where not, its children must not
    signal at all (refuse_signals), while it has to: it ends them.

  Raises:
    OSError: if a layer that the kernel has cannot be put on.
  """
  with contextlib.suppress(OSError), open('/proc/self/oom_score_adj', 'w') as f:
    f.write('1000')  # where memory runs out, this goes first
  limit_resources(config['limits'])
  machine = os.uname().machine
  if config['uid'] is not None:
    become(config['uid'])
  elif os.geteuid() == 0 and machine in _CAPSET:
    drop_capabilities(_CAPSET[machine])
  _check(_LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 'no_new_privs')
  os.chdir(config['directory'])  # its owner alone may enter
  reaches_inside_alone = config['namespaces'] or config['uid'] is not None
  if not config['namespaces']:
    version = landlock_version()
    if version:
      restrict_files(config['readable'], config['writable'])
    reaches_inside_alone |= version >= 6
  program = system_call_filter(machine, signals=True)
  if program:
    filter_system_calls(program)
  return reaches_inside_alone
