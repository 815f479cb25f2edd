"""ScienceWorld: experiments in a simulated house, an action a turn.

Needs the package scienceworld and Java (default-jre-headless). Thirty kinds of
tasks with 10 to 1400 variations each (arXiv 2203.07540); the folds are the
package's. A simulated step takes milliseconds, loading a variation seconds.
"""

import dataclasses
import functools
import importlib
import pathlib
import random
import re
from collections.abc import Iterator
from typing import Any

from thundersync_jax.envs import base, folds, java

# Fold -> the method that lists its variations.
FOLDS = {
  'train': 'getVariationsTrain',
  'validation': 'getVariationsDev',
  'test': 'getVariationsTest',
}
_MAX_ACTION = 200  # characters of the model's text that the simulator gets
_UNKNOWN = 'No known action matches that input.'


@dataclasses.dataclass(frozen=True)
class Settings:
  """The config block of ScienceWorld."""

  tasks: tuple[str, ...] = ('find-non-living-thing',)
  simplifications: str = 'easy'  # names joined by commas, '' for none
  max_turns: int = 20
  reward: str = 'score'  # at the end, in 0..1; or 'success': 1 if solved
  observation: str = 'compact'  # or 'full': the text of the simulator
  system: str = (
    'Actions: open/close/go to/focus on/pick up/put down/look at/activate/'
    'deactivate/read/eat/mix X, move/pour/dunk X to/in/in Y, use/connect X '
    'on/to Y, teleport to X, look around, inventory, wait1, wait'
  )
  processes: int = 1  # Java processes that all environments share

  def __post_init__(self):
    if not self.tasks or isinstance(self.tasks, str):
      raise ValueError(f'tasks={self.tasks!r} must be a list of names')
    for name, valid in (
      ('reward', ('score', 'success')),
      ('observation', tuple(OBSERVATIONS)),
    ):
      if getattr(self, name) not in valid:
        raise ValueError(
          f'{name}={getattr(self, name)!r} does not exist; choose one of '
          f'{sorted(valid)}'
        )
    for name in ('max_turns', 'processes'):
      if getattr(self, name) < 1:
        raise ValueError(f'{name}={getattr(self, name)} must be at least 1')


def _constants() -> Any:
  try:
    return importlib.import_module('scienceworld.constants')
  except ImportError as error:
    raise ImportError(
      'ScienceWorld needs the package scienceworld: pip install '
      "'thundersync_jax[agents]'"
    ) from error


@functools.cache
def simulators(processes: int) -> java.Simulators:
  """The simulators that all environments share.

  Raises:
    ImportError: if the package is missing.
  """
  jar = _constants().JAR_PATH
  return java.Simulators(
    jar,
    str(pathlib.Path(jar).parent),
    'scienceworld.runtime.pythonapi.PythonInterface',
    processes,
    heap_mib=1024,
  )


def _checked(tasks: tuple[str, ...]) -> None:
  valid = set(_constants().ID2TASK.values())
  if unknown := set(tasks) - valid:
    raise ValueError(
      f'tasks {sorted(unknown)} do not exist in ScienceWorld; choose from '
      f'{sorted(valid)}'
    )


@functools.cache
def _variations(processes: int, task: str, fold: str) -> tuple[int, ...]:
  pool = simulators(processes)
  simulator = pool.lease()
  try:
    simulator.call('load', task, 0, '', False)
    return tuple(simulator.call(FOLDS[fold]))
  finally:
    pool.give_back(simulator)


def make_tasks(seed: int, fold: str, **args: Any) -> Iterator[dict[str, Any]]:
  """The variations of the fold, in an order of (seed, fold).

  Raises:
    ValueError: if the fold or a task does not exist.
  """
  settings = base.parse_settings(Settings, 'scienceworld', args)
  folds.check(fold, FOLDS)
  _checked(settings.tasks)
  tasks = [
    {
      'key': f'{task}/{variation}/{settings.simplifications}',
      'task': task,
      'variation': variation,
      'simplifications': settings.simplifications,
    }
    for task in settings.tasks
    for variation in _variations(settings.processes, task, fold)
  ]
  random.Random(f'scienceworld/{seed}/{fold}').shuffle(tasks)
  yield from tasks


_PHRASES = (
  (r'This (?:room|outside location) is called the ([^.]*)\.', r'\1:'),
  (r'(?:In it, you|Here you) see:', ''),
  (r'You also see:', 'exits:'),
  (r'\bA door to the ([^(]*) \(that is ([a-z]*)\)', r'\1 (\2)'),
  (r'\ba substance called ', ''),
  (r' \(containing nothing\)', ''),
  (r'(?:In|On|Inside) the [^.:]* is: nothing\.?', ''),
  (r'\bThe [^.]* door is closed\.', '(closed)'),
  (r'\bThe [^.]* door is open\.', '(open)'),
  (r', which is turned off\.?', ' (off)'),
  (r', which is turned on\.?', ' (on)'),
)
_IGNORED = frozenset({'', 'the agent', 'air'})


def compact(text: str) -> str:
  """The observation on one line, without phrases, air and empty things."""
  lines = []
  for line in text.splitlines():
    for pattern, words in _PHRASES:
      line = re.sub(pattern, words, line)
    line = ' '.join(line.split()).replace('. (', ' (').rstrip('. ')
    if line not in _IGNORED:
      lines.append(re.sub(r'^(?:an?|the) ', '', line))
  joined = ', '.join(lines)
  return re.sub(r':,', ':', joined).replace(', exits:', '. exits:')


def full(text: str) -> str:
  """The observation as the simulator gives it."""
  return text.strip()


OBSERVATIONS = {'compact': compact, 'full': full}


class ScienceWorldEnvironment:
  """One variation; the first line of the model's text is the action."""

  def __init__(self, settings: Settings):
    self._settings = settings
    self.max_turns = settings.max_turns
    self._pool = simulators(settings.processes)
    self._simulator: java.Simulator | None = None
    self._task: dict[str, Any] = {}
    self._turns = 0

  def reset(self, task: dict[str, Any]) -> list[base.Message]:
    self.close()
    self._simulator = self._pool.lease()
    self._task = task
    self._turns = 0
    self._load(gold=False)
    description = ' '.join(self._simulator.call('getTaskDescription').split())
    room = self._show(self._simulator.call('step', 'look around'))
    question = f'{description}\n{room}'
    return base.opening(question, self._settings.system, '')

  def step(self, text: str) -> base.EnvStep:
    self._turns += 1
    action = java.plain_action(text, _MAX_ACTION)
    refused = not action or action.startswith('reset')
    said = _UNKNOWN if refused else self._simulator.call('step', action)
    score = float(self._simulator.call('getScore'))
    over = self._simulator.call('getCompleted') or score < 0
    if over or self._turns >= self.max_turns:
      score = min(max(score, 0.0), 1.0)
      reward = score if self._settings.reward == 'score' else float(score >= 1)
      return base.EnvStep(messages=(), reward=reward, done=True)
    message = {'role': 'user', 'content': self._show(said)}
    return base.EnvStep(messages=(message,), reward=None, done=False)

  def demonstrate(self) -> Iterator[str]:
    """The simulator's gold path, which takes another load."""
    self._load(gold=True)
    self._simulator.call('step', 'look around')
    yield from list(self._simulator.call('getGoldActionSequence'))

  def close(self) -> None:
    """Gives the simulator back."""
    if self._simulator is not None:
      self._pool.give_back(self._simulator)
      self._simulator = None

  def _load(self, gold: bool) -> None:
    task = self._task
    arguments = (task['task'], task['variation'], task['simplifications'])
    self._simulator.call('load', *arguments, gold)

  def _show(self, text: str) -> str:
    return OBSERVATIONS[self._settings.observation](text)


def make(**args: Any) -> ScienceWorldEnvironment:
  """The environment of a config block (see Settings)."""
  settings = base.parse_settings(Settings, 'scienceworld', args)
  _checked(settings.tasks)
  return ScienceWorldEnvironment(settings)


FAMILY = base.TaskFamily('scienceworld', make_tasks, make)
