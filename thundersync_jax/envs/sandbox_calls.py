"""What a forked child of the worker does for one call: KINDS.

Each function takes the request, prints what the model shall see, may send one
JSON value to the worker, and returns an exit status. The model's code shares
this process, so nothing here is secret and nothing it says is proof.
"""

import contextlib
import ctypes
import io
import json
import linecache
import os
import resource
import sys
import threading
import traceback
import types

from thundersync_jax.envs import sandbox_confine

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_DUMPABLE = 4
_RESULTS, _TEXT = 3, 100  # descriptor of results; characters of a table cell
VALUE_BYTES = 4 << 20  # of a result


def run_python(request: dict) -> int:
  """Runs code as the main module; returns its exit status."""
  code, name = request['code'], 'main.py'
  linecache.cache[name] = (len(code), None, code.splitlines(True), name)
  module = types.ModuleType('__main__')
  module.__dict__['__builtins__'] = __builtins__
  sys.modules['__main__'] = module
  sys.argv, sys.path[:0] = [name], [os.getcwd()]
  try:
    exec(compile(code, name, 'exec'), module.__dict__)
    for thread in threading.enumerate():
      if thread is not threading.current_thread() and not thread.daemon:
        thread.join()
  except SystemExit as stop:
    if stop.code is None or isinstance(stop.code, int):
      return (stop.code or 0) & 255
    sys.stderr.write(f'{stop.code}\n')
    return 1
  except BaseException as error:
    _report(error)
    return 1
  return 0


def _report(error: BaseException) -> None:
  """Writes the traceback without the frames of this file."""
  frames = error.__traceback__
  while frames and frames.tb_frame.f_globals is globals():
    frames = frames.tb_next
  try:
    traceback.print_exception(type(error), error, frames, limit=-10)
  except BaseException:  # an exception whose text cannot be made
    sys.stderr.write(f'{type(error).__name__}\n')


def run_shell(request: dict) -> int:
  """Becomes a shell that runs the command."""
  shell = '/bin/bash' if os.path.exists('/bin/bash') else '/bin/sh'
  environment = {k: v for k, v in os.environ.items() if not k.startswith('LD_')}
  os.execve(shell, [shell, '-c', request['command']], environment)


def call_functions(request: dict) -> int:
  """Evaluates expressions; each result is ['value', repr] or ['error', text].

  Whatever the model's code does here, it can change these answers alone: what
  is expected of them is not known in this process.
  """
  sys.path[:0] = [os.getcwd()]
  names, results = {}, []
  try:
    exec(request['setup'], names)
    for expression in request['expressions']:
      try:
        results.append(['value', repr(eval(expression, names))])
      except Exception as error:
        results.append(['error', type(error).__name__])
  except BaseException as error:
    _report(error)
    return 1
  _send(results)
  return 0


def grade(request: dict) -> int:
  """Runs a grader's grade() and sends what it returns."""
  names = {}
  exec(compile(request['code'], 'grader', 'exec'), names)
  _send(names['grade']())
  return 0


def _deny(action: int, first: str | None, second: str | None, *_) -> int:
  """SQLite's authorizer: no other database, no extension, no switch."""
  import sqlite3  # only where it is needed: it takes as long as the rest

  refused = action in (sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH) or (
    action == sqlite3.SQLITE_FUNCTION and second == 'load_extension'
  )
  if action == sqlite3.SQLITE_PRAGMA:
    refused = second is not None and first.lower() not in _PRAGMAS
  return sqlite3.SQLITE_DENY if refused else sqlite3.SQLITE_OK


_PRAGMAS = {
  'table_info',
  'table_xinfo',
  'index_list',
  'index_info',
  'foreign_key_list',
  'foreign_keys',
}


def _statements(script: str) -> list[str]:
  """Cuts a script at the semicolons that end statements."""
  import sqlite3

  found, start = [], 0
  for end, character in enumerate(script):
    if character == ';' and sqlite3.complete_statement(script[start : end + 1]):
      found.append(script[start : end + 1])
      start = end + 1
  return [s for s in [*found, script[start:]] if s.strip(' \t\r\n;')]


def run_sqlite(request: dict) -> int:
  """Runs statements; prints the rows of the last one that has any."""
  import sqlite3

  write = request['write']
  path = os.path.abspath(request['path']).replace('%', '%25')
  mode = 'rwc' if write else 'ro'
  uri = f'file:{path.replace("?", "%3f").replace("#", "%23")}?mode={mode}'
  result = {'columns': [], 'rows': [], 'more': False}
  try:
    connection = sqlite3.connect(uri, uri=True, isolation_level=None)
    connection.text_factory = lambda data: data.decode(errors='replace')
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, request['value_bytes'])
    connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
    connection.execute(f'PRAGMA query_only={int(not write)}')
    connection.set_authorizer(_deny)
    for statement in _statements(request['sql']):
      cursor = connection.execute(statement)
      if cursor.description:
        rows = cursor.fetchmany(request['max_rows'] + 1)
        result['columns'] = [column[0] for column in cursor.description]
        result['rows'] = rows[: request['max_rows']]
        result['more'] = len(rows) > request['max_rows']
    connection.close()
  except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
    sys.stderr.write(f'error: {error}\n')
    return 1
  except (MemoryError, OverflowError) as error:
    sys.stderr.write(f'error: {type(error).__name__}: {error}\n')
    return 1
  _print_table(result)
  _send({**result, 'rows': [[_plain(v) for v in r] for r in result['rows']]})
  return 0


def _plain(value):
  """A value of a cell as JSON holds it; a blob as its hexadecimal text."""
  return value.hex() if isinstance(value, bytes) else value


def _print_table(result: dict) -> None:
  if not result['columns']:
    return
  for row in (result['columns'], *result['rows']):
    cells = ('NULL' if v is None else str(_plain(v)) for v in row)
    cut = (c if len(c) <= _TEXT else c[: _TEXT - 3] + '...' for c in cells)
    sys.stdout.write(' | '.join(cut) + '\n')
  if result['more']:
    sys.stdout.write(f'... more than {len(result["rows"])} rows\n')
  elif not result['rows']:
    sys.stdout.write('(no rows)\n')


def _send(value) -> None:
  data = json.dumps(value).encode()
  if len(data) > VALUE_BYTES:
    raise ValueError(f'a result of {len(data)} bytes is over {VALUE_BYTES}')
  with os.fdopen(os.dup(_RESULTS), 'wb') as file:
    file.write(data)


def serve(request: dict, output: int, results: int) -> None:
  """Serves one request in a forked child; never returns."""
  status = 70
  try:
    os.setsid()
    results = os.dup(results)  # may itself stand where another one goes
    output = os.dup(output)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for target in (1, 2):
      os.dup2(output, target)
    os.dup2(results, _RESULTS, inheritable=False)
    os.closerange(_RESULTS + 1, 1 << 12)
    limit = request['cpu_s']
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 1))
    os.chdir(request['directory'])
    sys.stdin = os.fdopen(0)
    sys.stdout = io.TextIOWrapper(os.fdopen(1, 'wb'), errors='replace')
    sys.stderr = sys.stdout
    if request['kind'] != 'grade':  # a grader's memory stays its own
      _LIBC.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
    if not request['may_signal']:
      sandbox_confine.refuse_signals()
    status = KINDS[request['kind']](request)
    sys.stdout.flush()
  except BaseException as error:
    with contextlib.suppress(BaseException):
      _report(error)
      sys.stdout.flush()
  finally:
    os._exit(status)


KINDS = {
  'python': run_python,
  'shell': run_shell,
  'sqlite': run_sqlite,
  'call': call_functions,
  'grade': grade,
}
