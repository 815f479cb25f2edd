"""Mathematics with a known answer, graded by math-verify; one turn a task.

Tasks come from a JSONL file ({"question": ..., "answer": ...} a line), from a
list in the config, or from a reasoning-gym generator with numeric answers.
math-verify hands the answer to sympy, and its own time limits need signals,
which worker threads do not have: so it runs in a child process (isolated).
"""

import dataclasses
import hashlib
import json
import logging
import pathlib
import random
import re
from collections.abc import Iterator
from typing import Any

from thundersync_jax.envs import base, isolated, reasoning

_VERIFY = 'thundersync_jax.envs.maths:verify'
_CHILDREN = isolated.Children(imports=('math_verify', 'sympy'))
_PLAIN_NUMBER = re.compile(r'-?\d+(\.\d+)?')


@dataclasses.dataclass(frozen=True)
class Settings:
  """The config block of a maths task. Give one source, the last by default."""

  path: str = ''  # JSONL file
  items: tuple[dict[str, str], ...] = ()  # dicts of question and answer
  generator: str = 'gsm_symbolic'  # of reasoning-gym
  generator_args: dict[str, Any] = dataclasses.field(default_factory=dict)
  system: str = ''  # system message; none if empty
  suffix: str = '\nPut the final answer in \\boxed{}.'  # behind the question
  timeout_s: float = 5.0  # of grading one answer

  def __post_init__(self):
    if self.path and self.items:
      raise ValueError(
        f'maths: path={self.path!r} and {len(self.items)} items exclude each '
        'other; give one of them'
      )
    if not self.timeout_s > 0:
      raise ValueError(f'timeout_s={self.timeout_s} must be above 0')


def verify(gold: str, text: str) -> bool:
  """Whether the text ends in an answer that equals the gold answer.

  Args:
    gold: the right answer, plain or LaTeX.
    text: the model's whole text; math-verify finds the answer in it.
  """
  import math_verify  # takes seconds; only child processes need it

  # It warns that its time limits are off: the process is the limit.
  logging.getLogger('math_verify').setLevel(logging.ERROR)
  if '$' not in gold and '\\boxed' not in gold:
    gold = f'\\boxed{{{gold}}}'
  parsed = [math_verify.parse(part, parsing_timeout=0) for part in (gold, text)]
  return math_verify.verify(*parsed, timeout_seconds=0)


def _check_answer(answer: str, where: str) -> None:
  """Raises ValueError unless math-verify finds the answer equal to itself."""
  if _PLAIN_NUMBER.fullmatch(answer):
    return
  try:
    is_equal = _CHILDREN.call(_VERIFY, answer, answer, timeout_s=30.0)
  except isolated.IsolatedError as error:
    raise ValueError(f'{where}: answer={answer!r}: {error}') from error
  if not is_equal:
    raise ValueError(
      f'{where}: answer={answer!r} does not parse as mathematics; write a '
      'number or LaTeX'
    )


def _to_task(item: Any, where: str) -> dict[str, Any]:
  for field in ('question', 'answer'):
    value = item.get(field) if isinstance(item, dict) else None
    if not isinstance(value, str) or not value.strip():
      raise ValueError(
        f'{where}: {field}={value!r} must be text; expected '
        '{"question": "...", "answer": "..."}'
      )
  answer = item['answer'].strip()
  _check_answer(answer, where)
  question = item['question']
  return {'key': question, 'question': question, 'answer': answer}


def _read_jsonl(path: str) -> list[dict[str, Any]]:
  tasks = []
  lines = pathlib.Path(path).read_text(encoding='utf-8').splitlines()
  for number, line in enumerate(lines, start=1):
    if not line.strip():
      continue
    where = f'{path}, line {number}'
    try:
      item = json.loads(line)
    except json.JSONDecodeError as error:
      raise ValueError(
        f'{where}: {line[:80]!r} is not JSON: {error}'
      ) from error
    tasks.append(_to_task(item, where))
  return tasks


def make_tasks(seed: int, fold: str, **args: Any) -> Iterator[dict[str, Any]]:
  """The tasks of a list or file in the order of the seed, or endless ones.

  Both folds of a finite source get the same tasks in the same order: the
  prompt set gives each task to one fold.

  Raises:
    ValueError: on a line or item that is no question with a gradable answer.
  """
  settings = base.parse_settings(Settings, 'maths', args)
  if settings.path:
    tasks = _read_jsonl(settings.path)
  elif settings.items:
    tasks = [
      _to_task(item, f'maths items[{index}]')
      for index, item in enumerate(settings.items)
    ]
  else:
    generated = reasoning.make_tasks(
      seed,
      fold,
      generator=settings.generator,
      generator_args=settings.generator_args,
    )
    where = f'reasoning_gym {settings.generator}'
    yield from (_to_task(item, where) for item in generated)
    return
  random.Random(seed).shuffle(tasks)
  yield from tasks


class MathsEnvironment:
  """One question, one text, reward 1 if its answer is right, else 0."""

  max_turns = 1

  def __init__(self, settings: Settings):
    self._settings = settings
    self._answer = ''

  def reset(self, task: dict[str, Any]) -> list[base.Message]:
    self._answer = task['answer']
    settings = self._settings
    return base.opening(task['question'], settings.system, settings.suffix)

  def step(self, text: str) -> base.EnvStep:
    limit_s = self._settings.timeout_s
    try:
      right = _CHILDREN.call(_VERIFY, self._answer, text, timeout_s=limit_s)
    except isolated.IsolatedError as error:
      base.SCORING_FAILURES.add('maths math_verify', error)
      right = False
    reward = base.checked_reward(right, 'maths math_verify')
    return base.EnvStep(messages=(), reward=reward, done=True)

  def close(self) -> None:
    """Holds nothing: the child processes serve all environments."""


def make(**args: Any) -> MathsEnvironment:
  """The environment of a config block (see Settings)."""
  return MathsEnvironment(base.parse_settings(Settings, 'maths', args))


def fingerprint(**args: Any) -> str:
  """Digest of the file that the tasks are read from; '' without one."""
  path = base.parse_settings(Settings, 'maths', args).path
  if not path:
    return ''
  return hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()


FAMILY = base.TaskFamily('maths', make_tasks, make, fingerprint)
