"""Simulators written in Java: few processes, shared by many environments.

A process (JVM) holds any number of simulators, each an object of the package's
interface class; an environment leases one and gives it back, and the next
lease finds it warm. A process that dies is replaced when the next simulator is
asked for; those leased from it fail. It ends with this process, killed or not:
it reads the end of its standard input.
"""

import atexit
import contextlib
import importlib
import shutil
import threading
from typing import Any

from absl import logging

_CALL_LIMIT_S = 120.0  # a process that does not answer by then is given up


class JavaError(RuntimeError):
  """Java is missing, its process died, or a simulator failed."""


def plain_action(text: str, max_length: int) -> str:
  """The first line that says something, without quotes, in ASCII.

  Lone surrogates cannot be sent to Java, and simulators know plain letters.
  """
  lines = (line.strip(' \t>"\'`.') for line in text.splitlines())
  action = next((line for line in lines if line), '')
  return action[:max_length].encode('ascii', 'replace').decode()


class Simulator:
  """One simulator, leased to one environment; used by one thread at a time."""

  def __init__(self, process: '_Process', interface: Any):
    self.process = process
    self._interface = interface
    self.busy = False  # a call is under way, maybe in a thread left behind
    self.loaded: Any = None  # what its user has loaded, for the next one

  def call(self, method: str, *args: Any) -> Any:
    """Calls a method of the interface.

    Raises:
      JavaError: if the process is gone, or the method raises.
    """
    protocol = importlib.import_module('py4j.protocol')
    self.busy = True
    try:
      value = getattr(self._interface, method)(*args)
    except protocol.Py4JJavaError as error:
      self.busy = False
      kind = str(error.java_exception).splitlines()[0]
      raise JavaError(f'{method}{args} raised {kind:.200}') from error
    except (protocol.Py4JError, OSError) as error:
      self.process.kill()
      raise JavaError(
        f'the Java process {self.process.pid} did not answer {method}{args}; '
        'the next reset starts another one'
      ) from error
    self.busy = False
    return value


class _Process:
  """A JVM and the connections to it."""

  def __init__(self, jar: str, folder: str, heap_mib: int):
    py4j = importlib.import_module('py4j.java_gateway')
    if shutil.which('java') is None:
      raise JavaError(
        'there is no `java` on the path; install the package '
        'default-jre-headless (apt-get install default-jre-headless)'
      )
    options = [
      f'-Xmx{heap_mib}m',
      '-XX:+UseSerialGC',  # one thread, little memory
      '-XX:TieredStopAtLevel=1',  # starts faster
    ]
    port, token, self._child = py4j.launch_gateway(
      classpath=jar,
      cwd=folder,
      javaopts=options,
      die_on_exit=True,
      enable_auth=True,  # its port is open to every user of the machine
      return_proc=True,
    )
    self._gateway = py4j.JavaGateway(
      gateway_parameters=py4j.GatewayParameters(
        port=port,
        auth_token=token,
        auto_field=True,
        read_timeout=_CALL_LIMIT_S,
      ),
      java_process=self._child,
    )
    self.pid = self._child.pid
    self.leases = 0

  @property
  def alive(self) -> bool:
    return self._child.poll() is None

  def make(self, class_name: str) -> Simulator:
    """A new object of a class with its full name."""
    target = self._gateway.jvm
    for part in class_name.split('.'):
      target = getattr(target, part)
    return Simulator(self, target())

  def kill(self) -> None:
    """Ends the process and waits for its end; a second call does nothing."""
    # Else each object that Python frees later looks for the dead process.
    self._gateway._gateway_client.is_connected = False
    if self.alive:
      self._child.kill()
      self._child.wait()
    with contextlib.suppress(OSError):
      self._child.stdin.close()


class Simulators:
  """Simulators of one package in at most `processes` JVMs.

  Any thread may call. Nothing starts before the first lease.
  """

  def __init__(
    self,
    jar: str,
    folder: str,  # working directory of the processes
    class_name: str,
    processes: int = 1,
    heap_mib: int = 512,
  ):
    self._arguments = (jar, folder, heap_mib)
    self._class_name = class_name
    self._limit = processes
    self._lock = threading.Lock()
    self._processes: list[_Process] = []
    self._idle: list[Simulator] = []
    atexit.register(self.close)

  @property
  def pids(self) -> list[int]:
    """Processes that run now."""
    with self._lock:
      return [process.pid for process in self._processes if process.alive]

  def lease(self) -> Simulator:
    """A simulator that no one else uses, in whatever state it was left.

    Raises:
      JavaError: if Java is missing or the process does not start.
    """
    with self._lock:
      self._drop_dead()
      simulator = self._idle.pop() if self._idle else self._make()
      simulator.process.leases += 1
      return simulator

  def give_back(self, simulator: Simulator) -> None:
    """Ends a lease; one that is still busy is not used again."""
    with self._lock:
      simulator.process.leases -= 1
      if simulator.process.alive and not simulator.busy:
        self._idle.append(simulator)

  def close(self) -> None:
    """Ends all processes; a later lease starts new ones."""
    with self._lock:
      for process in self._processes:
        process.kill()
      self._processes, self._idle = [], []

  def _drop_dead(self) -> None:
    for process in self._processes:
      if not process.alive:
        process.kill()
        logging.warning('the Java process %d has ended', process.pid)
    self._processes = [p for p in self._processes if p.alive]
    self._idle = [s for s in self._idle if s.process.alive]

  def _make(self) -> Simulator:
    if len(self._processes) < self._limit:
      self._processes.append(_Process(*self._arguments))
    process = min(self._processes, key=lambda process: process.leases)
    py4j = importlib.import_module('py4j.protocol')
    try:
      return process.make(self._class_name)
    except (py4j.Py4JError, OSError) as error:
      process.kill()
      raise JavaError(f'{self._class_name} does not start: {error}') from error
