"""Terminal tasks: shell commands in a sandbox, graded on the files they leave.

The model writes a command a turn (```bash ... ```, or a tool-call tag), reads
what it printed, and ends by saying done. A script then compares the directory
with the wanted state, in a fresh sandbox: reward 1 if all of it is there and no
other file of the task has changed, else 0. Tasks are generated: fourteen kinds,
each in many thousands of trees.
"""

import dataclasses
import hashlib
from collections.abc import Iterator
from typing import Any

from thundersync_jax.envs import (
  base,
  folds,
  terminal_tasks,
  tool_calls,
  tool_loop,
)

_FORMS = ('fenced', 'hermes')


@dataclasses.dataclass(frozen=True)
class Settings:
  """The config block of the terminal task."""

  kinds: tuple[str, ...] = tuple(terminal_tasks.KINDS)
  max_turns: int = 5
  max_output: int = 300  # characters of a command's output that are shown
  wall_s: float = 10.0  # of one command
  form: str = 'fenced'  # how calls are written: a name in tool_calls.PARSERS
  backend: str | None = None  # of the sandbox; by default the best
  system: str = 'Use the shell with ```bash ...```. When finished, say done.'

  def __post_init__(self):
    if not self.kinds or set(self.kinds) - set(terminal_tasks.KINDS):
      raise ValueError(
        f'kinds={self.kinds} must be some of {sorted(terminal_tasks.KINDS)}'
      )
    tool_loop.check_settings(self, _FORMS)


def make_tasks(seed: int, fold: str, **args: Any) -> Iterator[dict[str, Any]]:
  """Endless tasks; (seed, fold) name the stream.

  Raises:
    ValueError: if the fold does not exist.
  """
  settings = base.parse_settings(Settings, 'terminal', args)
  folds.check(fold)
  stream = folds.draws('terminal', seed, fold)
  while True:
    kind = stream.choice(settings.kinds)
    drawn = terminal_tasks.KINDS[kind](stream)
    state = hashlib.sha256(repr(sorted(drawn.files.items())).encode())
    key = f'{drawn.question} {state.hexdigest()[:12]}'
    if folds.of_key(key) == fold:
      yield {'key': key, 'kind': kind, **dataclasses.asdict(drawn)}


# Runs in the sandbox, on a copy of what the model left behind.
_GRADER = """
import os

def words(text):
  return text.strip().replace('./', '').split()

def same(found, text):
  if len(words(text)) == 1 and words(found) == words(text):
    return True
  return [line.split() for line in found.strip().splitlines()] == [
    line.split() for line in text.strip().splitlines()
  ]

def grade():
  for path in ABSENT:
    if os.path.lexists(path):
      return f'{path} is still there'
  for path, text in WANTED.items():
    if not os.path.isfile(path):
      return f'{path} is missing'
    with open(path, errors='replace') as file:
      if not same(file.read(), text):
        return f'{path} differs'
  return ''
"""


class TerminalEnvironment(tool_loop.ToolEnvironment):
  """One directory and one wish; 'tool' messages carry what was printed."""

  hint = 'Write a command in ```bash ...``` or say done.'

  def demonstrate(self) -> Iterator[str]:
    """The model's turns on a gold path."""
    write = tool_calls.WRITERS[self._settings.form]
    for command in self._task['gold']:
      yield write(tool_calls.Call('bash', {'code': command}))
    yield 'done'

  def _run(self, call: tool_calls.Call) -> str:
    code = call.arguments.get('code')
    if call.name != 'bash' or not isinstance(code, str):
      return 'The only tool is bash; its argument is code, a string.'
    return self._box.run_shell(code).output

  def _reward(self) -> float:
    wanted, absent = self._task['wanted'], self._task['absent']
    code = f'WANTED = {wanted!r}\nABSENT = {absent!r}\n{_GRADER}'
    with self._pool.take() as judge:
      judge.copy_from(self._box)
      verdict = judge.grade(code)
    if verdict.stopped in ('lost', 'time'):  # no word on what the model did
      raise RuntimeError(f'the grader was stopped: {verdict.stopped}')
    return float(verdict.value == '')


def make(**args: Any) -> TerminalEnvironment:
  """The environment of a config block (see Settings)."""
  settings = base.parse_settings(Settings, 'terminal', args)
  return TerminalEnvironment(settings)


FAMILY = base.TaskFamily('terminal', make_tasks, make)
