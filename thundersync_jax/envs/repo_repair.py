"""Repository repair: find and mend the bug of a small Python package.

The model lists, reads and edits files and runs the visible tests, one call or
a few a turn ([read(path='a.py')] or a tool-call tag), and ends by saying done.
Reward 1 if hidden calls of the package give the right values, else 0. They run
in a fresh sandbox that gets the package alone; the right values stay outside.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from thundersync_jax.envs import (
  base,
  folds,
  repo_tasks,
  sandbox,
  sandbox_results,
  tool_calls,
  tool_loop,
)

_FORMS = ('python', 'hermes')
_PARAMETERS = {
  'list': (),
  'read': ('path',),
  'replace': ('path', 'old', 'new'),
  'edit': ('path', 'start', 'end', 'text'),
  'test': (),
}


@dataclasses.dataclass(frozen=True)
class Settings:
  """The config block of repository repair."""

  max_turns: int = 8
  max_output: int = 600  # characters of a tool's answer that are shown
  wall_s: float = 10.0  # of one run of the tests
  form: str = 'python'  # how calls are written: a name in tool_calls.PARSERS
  backend: str | None = None  # of the sandbox; by default the best
  system: str = (
    "Tools: [list()], [read(path='')], [replace(path='', old='', new='')], "
    "[edit(path='', start=1, end=1, text='')], [test()]. Fix the bug; when "
    'the tests pass, say done.'
  )

  def __post_init__(self):
    tool_loop.check_settings(self, _FORMS)


def make_tasks(seed: int, fold: str, **args: Any) -> Iterator[dict[str, Any]]:
  """Endless tasks; (seed, fold) name the stream.

  The key is the broken module and its path: other tests of it are the same
  problem.

  Raises:
    ValueError: if the fold does not exist.
  """
  base.parse_settings(Settings, 'repo_repair', args)
  folds.check(fold)
  stream = folds.draws('repo_repair', seed, fold)
  while True:
    drawn = repo_tasks.draw(stream)
    if drawn is None:
      continue
    key = f'{drawn.path}\n{drawn.files[drawn.path]}'
    if folds.of_key(key) == fold:
      task = dataclasses.asdict(drawn)
      yield {'key': key, **task, 'hidden': [list(h) for h in drawn.hidden]}


# Runs the visible tests in the sandbox; stops at the first that fails.
_RUN_TESTS = """
import ast, glob, linecache
for path in sorted(glob.glob('test_*.py')):
  with open(path) as file:
    tree = ast.parse(file.read())
  names = {}
  for node in tree.body:
    if not isinstance(node, ast.FunctionDef):
      exec(compile(ast.Module([node], []), path, 'exec'), names)
      continue
    for check in node.body:
      if not isinstance(check, ast.Assert):
        continue
      text = ast.unparse(check.test)
      left = getattr(check.test, 'left', check.test)
      try:
        value = eval(ast.unparse(left), names)
        if eval(text, names):
          continue
        found = f'it gave {value!r}'
      except Exception as error:
        found = f'it raised {type(error).__name__}: {error}'
      raise SystemExit(f'FAILED {path}: {text}\\n{found}')
print('all tests passed')
"""


class RepairEnvironment(tool_loop.ToolEnvironment):
  """One package and one bug; 'tool' messages carry what the tools say."""

  hint = 'Call a tool, e.g. [list()], or say done.'

  def __init__(self, settings: Settings):
    super().__init__(settings)
    self._tools: dict[str, Callable[..., str]] = {
      'list': self._list,
      'read': self._read,
      'replace': self._replace,
      'edit': self._edit,
      'test': self._test,
    }

  def demonstrate(self) -> Iterator[str]:
    """The model's turns on a gold path."""
    task, write = self._task, tool_calls.WRITERS[self._settings.form]
    old, new = task['wrong'].strip(), task['right'].strip()
    text = task['files'][task['path']]
    yield write(tool_calls.Call('test', {}))
    yield write(tool_calls.Call('read', {'path': task['path']}))
    if text.count(old) == 1:
      arguments = {'path': task['path'], 'old': old, 'new': new}
      yield write(tool_calls.Call('replace', arguments))
    else:
      line = task['line']
      arguments = {'path': task['path'], 'start': line, 'end': line}
      arguments['text'] = task['right']
      yield write(tool_calls.Call('edit', arguments))
    yield write(tool_calls.Call('test', {}))
    yield 'done'

  def _question(self, task: dict[str, Any]) -> str:
    return f'A test of the package {task["package"]} fails. Repair it.'

  def _parse(self, text: str) -> list[tool_calls.Call]:
    if self._settings.form == 'python':
      return tool_calls.python(text, _PARAMETERS)
    return super()._parse(text)

  def _run(self, call: tool_calls.Call) -> str:
    if call.name not in self._tools:
      return (
        f'There is no tool {call.name}; there are {", ".join(self._tools)}.'
      )
    wanted = _PARAMETERS[call.name]
    if set(call.arguments) != set(wanted):
      return f'{call.name} needs {", ".join(wanted) or "no arguments"}.'
    for name, value in call.arguments.items():
      kind = int if name in ('start', 'end') else str
      if type(value) is not kind:
        return f'{name} must be of type {kind.__name__}.'
    try:
      answer = self._tools[call.name](**call.arguments)
    except sandbox.FileError as error:
      answer = str(error)
    return sandbox_results.shorten(answer, self._settings.max_output)

  def _list(self) -> str:
    return '\n'.join(self._box.list_files()) or '(no files)'

  def _read(self, path: str) -> str:
    lines = self._box.read_file(path).splitlines()
    return (
      '\n'.join(f'{i} {line}' for i, line in enumerate(lines, 1)) or '(empty)'
    )

  def _replace(self, path: str, old: str, new: str) -> str:
    text = self._box.read_file(path)
    count = text.count(old) if old else 0
    if count != 1:
      return f'{path}: old stands there {count} times; it must be exactly once.'
    self._box.write_file(path, text.replace(old, new))
    return 'replaced'

  def _edit(self, path: str, start: int, end: int, text: str) -> str:
    lines = self._box.read_file(path).splitlines()
    if not 1 <= start <= end <= len(lines):
      return f'{path}: start and end must be lines from 1 to {len(lines)}.'
    lines[start - 1 : end] = text.splitlines()
    self._box.write_file(path, '\n'.join(lines) + '\n')
    return f'replaced lines {start} to {end}'

  def _test(self) -> str:
    return self._box.run_python(_RUN_TESTS).output

  def _reward(self) -> float:
    task = self._task
    expressions = [expression for expression, _ in task['hidden']]
    wanted = [['value', value] for _, value in task['hidden']]
    with self._pool.take() as judge:
      for path in self._box.list_files():
        if path.startswith(f'{task["package"]}/') and path.endswith('.py'):
          try:
            judge.write_file(path, self._box.read_file(path))
          except sandbox.FileError:  # it vanished, or is too large
            return 0.0
      result = judge.call_functions(task['setup'], expressions)
    return float(result.ok and result.value == wanted)


def make(**args: Any) -> RepairEnvironment:
  """The environment of a config block (see Settings)."""
  settings = base.parse_settings(Settings, 'repo_repair', args)
  return RepairEnvironment(settings)


FAMILY = base.TaskFamily('repo_repair', make_tasks, make)
