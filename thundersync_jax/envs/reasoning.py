"""reasoning-gym: any generator by name and arguments, one turn a task.

Reward: the generator's own score_answer of the answer taken from the text.
Many of those scorers hand the answer to eval or sympy, so an answer that need
not be an integer is scored in a child process with a time limit (isolated).

The quickstart task is generator='chain_sum' with 2 terms of 1 digit (200
different problems), answer='last_integer', exact=True.
"""

import ast
import dataclasses
import functools
import hashlib
import importlib
import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from thundersync_jax.envs import base, isolated

_CHUNK = 1000  # tasks drawn from one seed of the generator
_RESERVED = {'seed', 'size'}  # generator arguments that the prompt set gives
_SCORE = 'thundersync_jax.envs.reasoning:score'
_CHILDREN = isolated.Children(imports=('reasoning_gym',))


def raw(text: str) -> str:
  """The text without white space around it."""
  return text.strip()


# A minus sign behind a digit, letter or bracket subtracts: '7-5' ends with 5.
_NUMBER = re.compile(
  r'(?:(?<![\w.)\]])-)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?'
)


def last_integer(text: str) -> str:
  """The last number of the text in plain digits; '' if none, or no integer.

  '12.', '12.0' and '1,234' are integers; '12.5' is not.
  """
  numbers = _NUMBER.findall(text.replace('\N{MINUS SIGN}', '-'))
  whole, _, decimals = (numbers or [''])[-1].replace(',', '').partition('.')
  return '' if decimals.strip('0') else whole


_TAG = re.compile(r'<answer>(.*?)</answer>', re.DOTALL)


def tag(text: str) -> str:
  """What stands in the last <answer>...</answer>; '' if there is none."""
  return (_TAG.findall(text) or [''])[-1].strip()


ANSWERS = {'raw': raw, 'last_integer': last_integer, 'tag': tag}


@dataclasses.dataclass(frozen=True)
class Settings:
  """The config block of a reasoning-gym task."""

  generator: str
  generator_args: dict[str, Any] = dataclasses.field(default_factory=dict)
  system: str = ''  # system message; none if empty
  suffix: str = ''  # text behind the question
  answer: str = 'raw'  # how it is taken from the text: a name in ANSWERS
  exact: bool = False  # reward 1 where the score is 1, else 0
  timeout_s: float = 5.0  # of a score that runs in a child process

  def __post_init__(self):
    if self.answer not in ANSWERS:
      raise ValueError(
        f'answer={self.answer!r} does not exist; choose one of '
        f'{sorted(ANSWERS)}'
      )
    if not self.timeout_s > 0:
      raise ValueError(f'timeout_s={self.timeout_s} must be above 0')


def make_dataset(generator: str, arguments: dict[str, Any], **reserved: int):
  """The reasoning-gym data set of a generator.

  The generator 'composite' takes its `datasets` as dicts of name, weight and
  config.

  Raises:
    ValueError: if the generator or an argument does not exist, or a value is
      refused; lists the names that exist.
  """
  factory = importlib.import_module('reasoning_gym.factory')
  if generator not in factory.DATASETS:
    raise ValueError(
      f'generator={generator!r} does not exist in reasoning_gym; choose one of '
      f'{sorted(factory.DATASETS)}'
    )
  fields = dataclasses.fields(factory.DATASETS[generator][1])
  valid = {field.name for field in fields} - _RESERVED
  if unknown := set(arguments) - valid:
    raise ValueError(
      f'generator {generator} has no arguments {sorted(unknown)}; valid are '
      f'{sorted(valid)}'
    )
  if generator == 'composite':
    spec = importlib.import_module('reasoning_gym.composite').DatasetSpec
    parts = [spec(**part) for part in arguments.get('datasets', [])]
    arguments = {**arguments, 'datasets': parts}
  try:
    return factory.create_dataset(generator, **arguments, **reserved)
  except (AssertionError, TypeError, ValueError) as error:
    raise ValueError(
      f'generator {generator} refuses {arguments}: {error}'
    ) from error


def make_tasks(seed: int, fold: str, **args: Any) -> Iterator[dict[str, Any]]:
  """Endless tasks of the generator; (seed, fold) name the stream.

  Neighbouring seeds of a generator give the same tasks, one place apart, so
  the seeds here are digests.
  """
  settings = base.parse_settings(Settings, 'reasoning_gym', args)
  for chunk in itertools.count():
    name = f'{seed}/{fold}/{chunk}'.encode()
    chunk_seed = int.from_bytes(hashlib.sha256(name).digest()[:4], 'big')
    dataset = make_dataset(
      settings.generator, settings.generator_args, seed=chunk_seed, size=_CHUNK
    )
    for index in range(_CHUNK):
      yield _to_task(dataset[index])


def _to_task(entry: dict[str, Any]) -> dict[str, Any]:
  # Metadata is kept as a Python literal: JSON would turn tuples into lists and
  # integer keys into text, and some scorers tell them apart.
  metadata = repr(_plain(entry['metadata']))
  ast.literal_eval(metadata)  # fails now, not when an answer is scored
  return {
    'key': entry['question'],
    'question': entry['question'],
    'answer': entry['answer'],
    'metadata': metadata,
  }


def _plain(value: Any) -> Any:
  """The value with numpy scalars and arrays as Python numbers and lists."""
  if isinstance(value, (np.generic, np.ndarray)):
    return value.tolist()
  if isinstance(value, dict):
    return {_plain(key): _plain(item) for key, item in value.items()}
  if isinstance(value, (list, tuple, set)):
    return type(value)(_plain(item) for item in value)
  return value


@functools.lru_cache(maxsize=16)
def _scorer(generator: str, arguments: str):
  return make_dataset(generator, json.loads(arguments), seed=0)


def score(
  generator: str, arguments: str, task: dict[str, Any], answer: str
) -> Any:
  """What the generator's score_answer gives, unchecked.

  Args:
    generator: its name.
    arguments: its arguments as a JSON text.
    task: from make_tasks.
    answer: the answer alone, without the text around it.
  """
  entry = {**task, 'metadata': ast.literal_eval(task['metadata'])}
  return _scorer(generator, arguments).score_answer(answer, entry)


class ReasoningEnvironment:
  """One question, one answer, one reward in [0, 1]."""

  max_turns = 1

  def __init__(self, settings: Settings):
    self._settings = settings
    self._arguments = json.dumps(settings.generator_args, sort_keys=True)
    self._source = f'reasoning_gym {settings.generator}.score_answer'
    self._task: dict[str, Any] = {}
    # Refuses a wrong generator or argument now, and imports before any thread.
    _scorer(settings.generator, self._arguments)

  def reset(self, task: dict[str, Any]) -> list[base.Message]:
    self._task = task
    settings = self._settings
    return base.opening(task['question'], settings.system, settings.suffix)

  def step(self, text: str) -> base.EnvStep:
    answer = ANSWERS[self._settings.answer](text)
    reward = base.checked_reward(self._score(answer), self._source)
    if self._settings.exact:
      reward = float(reward >= 1)
    return base.EnvStep(messages=(), reward=reward, done=True)

  def close(self) -> None:
    """Holds nothing."""

  def _score(self, answer: str) -> Any:
    """The score; 0 for no answer, and where the scorer fails on it."""
    if not answer:
      return 0.0
    args = (self._settings.generator, self._arguments, self._task, answer)
    try:
      if self._settings.answer == 'last_integer':  # harmless to evaluate
        return score(*args)
      limit_s = self._settings.timeout_s
      return _CHILDREN.call(_SCORE, *args, timeout_s=limit_s)
    except isolated.StartError:  # the installation is at fault
      raise
    except Exception as error:
      base.SCORING_FAILURES.add(self._source, error)
      return 0.0


def make(**args: Any) -> ReasoningEnvironment:
  """The environment of a config block (see Settings)."""
  settings = base.parse_settings(Settings, 'reasoning_gym', args)
  return ReasoningEnvironment(settings)


FAMILY = base.TaskFamily('reasoning_gym', make_tasks, make)
