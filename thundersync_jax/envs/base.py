"""The environment protocol, checked rewards, and how a task family looks.

An environment answers text with messages until it is done:

  messages = env.reset(task)
  while not done: messages, reward, done = env.step(text of the model)

A single-turn task is the case max_turns = 1. A task is a JSON-able dict whose
'key' is equal for two tasks if and only if they are the same problem.
"""

import collections
import dataclasses
import math
import numbers
import reprlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import numpy as np
from absl import logging

Message = dict[str, str]  # {'role': 'system' | 'user' | 'tool', 'content': ...}
Settings = TypeVar('Settings')

_FLOAT32_MAX = float(np.finfo(np.float32).max)
_NOT_NUMBERS = 'USOMmc'  # dtype kinds: texts, objects, dates, complex


@dataclasses.dataclass(frozen=True)
class EnvStep:
  """The answer of an environment to one turn of the model."""

  messages: tuple[Message, ...]  # observation; empty when done
  reward: float | None  # of this env step; None where there is none yet
  done: bool


class Environment(Protocol):
  """One task at a time; reset starts over, so an instance can be used again.

  The methods run in worker threads and may block; they make no JAX calls.
  """

  max_turns: int  # turns of the model after which step says done

  def reset(self, task: dict[str, Any]) -> list[Message]:
    """The messages that open the task."""

  def step(self, text: str) -> EnvStep:
    """Answers the text of the model's turn."""

  def close(self) -> None:
    """Frees what the environment holds; called once, at the end."""


@dataclasses.dataclass(frozen=True)
class TaskFamily:
  """How tasks of one kind are drawn, and how their environment is made.

  Both functions take the whole `args` block of a config and refuse unknown
  names (see parse_settings).
  """

  name: str
  # make_tasks(seed, fold, **args): tasks in a fixed order, endless or finite.
  make_tasks: Callable[..., Iterator[dict[str, Any]]]
  make: Callable[..., Environment]
  # fingerprint(**args): digest of inputs outside args (files), '' if none.
  fingerprint: Callable[..., str] = lambda **args: ''


class RewardError(ValueError):
  """A reward that is not one finite number."""


def checked_reward(value: Any, source: str) -> float:
  """The reward as a float, if it is one finite number that float32 holds.

  Python, numpy and 0-d array numbers pass, and booleans as 0 and 1.

  Args:
    value: what the environment or reward function returned.
    source: its name, for the message.

  Raises:
    RewardError: on None, NaN, infinity, text, or an array or list, which has
      the wrong length even where it holds one number.
  """
  shape = getattr(value, 'shape', None)
  is_number = isinstance(value, numbers.Real) or (
    shape == () and value.dtype.kind not in _NOT_NUMBERS
  )
  if is_number:
    try:
      number = float(value)
    except OverflowError:  # an integer beyond float64
      number = math.inf
    if math.isfinite(number) and abs(number) <= _FLOAT32_MAX:
      return number
    problem = f'which is not finite in float32 (limit {_FLOAT32_MAX:.3g})'
  elif shape is not None or isinstance(value, (list, tuple, set, dict)):
    size = shape if shape is not None else f'({len(value)},)'
    problem = f'of shape {size} where one number, shape (), is expected'
  else:
    problem = f'of type {type(value).__name__} where a number is expected'
  raise RewardError(
    f'{source} returned the reward {reprlib.repr(value)} {problem}; return '
    'one finite float for each trajectory, and raise if it cannot be scored'
  )


def parse_settings(
  settings_type: type[Settings], source: str, args: dict[str, Any]
) -> Settings:
  """Makes the dataclass of a family's settings from its config block.

  Raises:
    ValueError: on an unknown or missing argument; lists the valid ones.
  """
  fields = dataclasses.fields(settings_type)
  valid = {field.name for field in fields}
  needed = {
    field.name
    for field in fields
    if field.default is dataclasses.MISSING
    and field.default_factory is dataclasses.MISSING
  }
  for problem, names in (
    ('unknown', set(args) - valid),
    ('missing', needed - set(args)),
  ):
    if names:
      raise ValueError(
        f'{source}: {problem} arguments {sorted(names)}; valid are '
        f'{sorted(valid)}'
      )
  return settings_type(**args)


def opening(question: str, system: str, suffix: str) -> list[Message]:
  """The messages of a single-turn task: a system message, if any, and it."""
  messages = [{'role': 'user', 'content': question + suffix}]
  if system:
    messages.insert(0, {'role': 'system', 'content': system})
  return messages


class FailureCounts:
  """Counts of handled failures by source; the first of each kind is logged."""

  def __init__(self):
    self._lock = threading.Lock()
    self._counts = collections.Counter()
    self._seen = set()

  def add(self, source: str, error: BaseException) -> None:
    kind = (source, type(error).__name__)
    with self._lock:
      self._counts[source] += 1
      first = kind not in self._seen
      self._seen.add(kind)
    if first:
      logging.warning(
        '%s failed with %s: %.300s; its reward is 0. Further failures of this '
        'kind are counted, not logged.',
        *kind,
        error,
      )

  def counts(self) -> dict[str, int]:
    """Failures so far, by source."""
    with self._lock:
      return dict(self._counts)


# Answers on which a scorer itself failed; they got reward 0.
SCORING_FAILURES = FailureCounts()
