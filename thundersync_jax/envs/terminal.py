"""Terminal tasks: shell commands in a sandbox, graded on the files they leave.

The model writes a command a turn (```bash ... ```, or a tool-call tag), reads
what it printed, and ends by saying done. A script then compares the directory
with the wanted state, in a fresh sandbox: reward 1 if all of it is there and no
other file of the task has changed, else 0. Tasks are generated: fourteen kinds,
each in many thousands of trees.
"""

import dataclasses
import hashlib
import random
from collections.abc import Iterator
from typing import Any

from thundersync_jax.envs import base, sandbox, terminal_tasks, tool_calls

# Fold -> last digits of its tasks' digests.
FOLDS = {'train': range(8), 'validation': range(8, 9), 'test': range(9, 10)}
_MAX_CALLS = 4  # of one turn that are run
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
    if self.form not in _FORMS:
      raise ValueError(
        f'form={self.form!r} does not exist; choose one of {list(_FORMS)}'
      )
    for name in ('max_turns', 'max_output', 'wall_s'):
      if not getattr(self, name) > 0:
        raise ValueError(f'{name}={getattr(self, name)} must be above 0')


def fold_of(key: str) -> str:
  """The fold that a task of this key belongs to."""
  digit = int(hashlib.sha256(key.encode()).hexdigest()[:8], 16) % 10
  return next(fold for fold, digits in FOLDS.items() if digit in digits)


def make_tasks(seed: int, fold: str, **args: Any) -> Iterator[dict[str, Any]]:
  """Endless tasks; (seed, fold) name the stream.

  Raises:
    ValueError: if the fold does not exist.
  """
  settings = base.parse_settings(Settings, 'terminal', args)
  if fold not in FOLDS:
    raise ValueError(
      f'fold={fold!r} does not exist; choose one of {list(FOLDS)}'
    )
  digest = hashlib.sha256(f'terminal/{seed}/{fold}'.encode()).digest()
  stream = random.Random(int.from_bytes(digest[:8], 'big'))
  while True:
    kind = stream.choice(settings.kinds)
    drawn = terminal_tasks.KINDS[kind](stream)
    state = hashlib.sha256(repr(sorted(drawn.files.items())).encode())
    key = f'{drawn.question} {state.hexdigest()[:12]}'
    if fold_of(key) == fold:
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


class TerminalEnvironment:
  """One directory and one wish; 'tool' messages carry what was printed."""

  def __init__(self, settings: Settings):
    self._settings = settings
    self.max_turns = settings.max_turns
    limits = sandbox.Limits(
      wall_s=settings.wall_s, output_chars=settings.max_output
    )
    sandbox.choose(settings.backend)  # one that does not work is refused now
    self._pool = sandbox.shared_pool(limits, settings.backend)
    self._box: sandbox.Sandbox | None = None
    self._task: dict[str, Any] = {}
    self._turns = 0

  def reset(self, task: dict[str, Any]) -> list[base.Message]:
    self.close()
    self._task, self._turns = task, 0
    self._box = self._pool.take()
    for path, text in task['files'].items():
      self._box.write_file(path, text)
    return base.opening(task['question'], self._settings.system, '')

  def step(self, text: str) -> base.EnvStep:
    self._turns += 1
    calls, observation = [], ''
    try:
      calls = tool_calls.PARSERS[self._settings.form](text)
    except tool_calls.ToolCallError as error:
      observation = str(error)
    ended = not observation and not calls and 'done' in text.lower()
    if calls:
      outputs = [self._run(call) for call in calls[:_MAX_CALLS]]
      if len(calls) > _MAX_CALLS:
        outputs.append(f'[only the first {_MAX_CALLS} calls were run]')
      observation = '\n'.join(outputs)
    if ended or self._turns >= self.max_turns:
      return base.EnvStep(messages=(), reward=self._reward(), done=True)
    observation = (
      observation or 'Write a command in ```bash ...``` or say done.'
    )
    message = {'role': 'tool', 'content': observation}
    return base.EnvStep(messages=(message,), reward=None, done=False)

  def demonstrate(self) -> Iterator[str]:
    """The model's turns on a gold path."""
    write = tool_calls.WRITERS[self._settings.form]
    for command in self._task['gold']:
      yield write(tool_calls.Call('bash', {'code': command}))
    yield 'done'

  def close(self) -> None:
    """Ends the sandbox; a second call does nothing."""
    if self._box is not None:
      self._box.close()
      self._box = None

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
