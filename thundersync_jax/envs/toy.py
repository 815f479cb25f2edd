"""Toy tasks that take no time: letters for one turn, a guessing game for many.

`toy`: reward is the share of the text's characters that lie in a target set.
A random byte model gets rewards with spread and learns within a few steps.
`toy_guess`: find a secret letter; the environment answers higher or lower.
"""

import dataclasses
import hashlib
import random
import string
import time
from collections.abc import Iterator
from typing import Any

from thundersync_jax.envs import base


def _stream(seed: int, fold: str, name: str) -> random.Random:
  text = f'{name}/{seed}/{fold}'.encode()
  return random.Random(int.from_bytes(hashlib.sha256(text).digest()[:8], 'big'))


@dataclasses.dataclass(frozen=True)
class Settings:
  """The config block of the toy task."""

  targets: str = string.ascii_lowercase  # characters that earn reward
  rule: str = 'fraction'  # of the characters; or 'any': 1 if one is there
  word_length: int = 4  # letters that make prompts differ
  latency_s: float = 0.0  # seconds that the environment takes to answer

  def __post_init__(self):
    if not self.targets:
      raise ValueError("targets='' must hold at least one character")
    if self.rule not in RULES:
      raise ValueError(
        f'rule={self.rule!r} does not exist; choose one of {sorted(RULES)}'
      )
    if self.word_length < 1:
      raise ValueError(f'word_length={self.word_length} must be at least 1')


def fraction(text: str, targets: str) -> float:
  """The share of characters in targets; 0 for an empty text."""
  return sum(character in targets for character in text) / max(len(text), 1)


def any_of(text: str, targets: str) -> float:
  """1 if a character of the text is in targets, else 0."""
  return float(any(character in targets for character in text))


RULES = {'fraction': fraction, 'any': any_of}


def make_tasks(seed: int, fold: str, **args: Any) -> Iterator[dict[str, Any]]:
  """Endless prompts of random letters (26 ** word_length different ones)."""
  settings = base.parse_settings(Settings, 'toy', args)
  stream = _stream(seed, fold, 'toy')
  while True:
    letters = stream.choices(string.ascii_lowercase, k=settings.word_length)
    word = ''.join(letters)
    yield {'key': word, 'question': word}


class ToyEnvironment:
  """One turn; the reward depends on the text alone."""

  max_turns = 1

  def __init__(self, settings: Settings):
    self._settings = settings

  def reset(self, task: dict[str, Any]) -> list[base.Message]:
    return [{'role': 'user', 'content': task['question']}]

  def step(self, text: str) -> base.EnvStep:
    time.sleep(self._settings.latency_s)
    reward = RULES[self._settings.rule](text, self._settings.targets)
    return base.EnvStep(messages=(), reward=reward, done=True)

  def close(self) -> None:
    """Holds nothing."""


def make(**args: Any) -> ToyEnvironment:
  """The environment of a config block (see Settings)."""
  return ToyEnvironment(base.parse_settings(Settings, 'toy', args))


@dataclasses.dataclass(frozen=True)
class GuessSettings:
  """The config block of the guessing game."""

  max_turns: int = 4
  max_letters: int = 10  # width of the range that holds the secret
  latency_s: float = 0.0  # seconds that the environment takes to answer

  def __post_init__(self):
    if self.max_turns < 1:
      raise ValueError(f'max_turns={self.max_turns} must be at least 1')
    if not 2 <= self.max_letters <= 26:
      raise ValueError(f'max_letters={self.max_letters} must be in 2..26')


def make_guess_tasks(
  seed: int, fold: str, **args: Any
) -> Iterator[dict[str, Any]]:
  """Endless (low, high, secret) of letters, at most max_letters wide.

  There are sum over width w in 2..max_letters of w * (27 - w) different ones.
  """
  settings = base.parse_settings(GuessSettings, 'toy_guess', args)
  stream = _stream(seed, fold, 'toy_guess')
  while True:
    width = stream.randint(2, settings.max_letters)
    start = stream.randint(0, 26 - width)
    letters = string.ascii_lowercase[start : start + width]
    secret = stream.choice(letters)
    yield {
      'key': f'{letters[0]}{letters[-1]}{secret}',
      'low': letters[0],
      'high': letters[-1],
      'secret': secret,
    }


class GuessEnvironment:
  """Several turns; the first letter of a text within the range is the guess.

  Reward at the end: 1 if found, else half of how near the best guess came
  (0.5 * (1 - distance / (width - 1))), and 0 if no letter was ever named.
  """

  def __init__(self, settings: GuessSettings):
    self._settings = settings
    self.max_turns = settings.max_turns
    self._task: dict[str, Any] = {}
    self._turns = 0
    self._nearest: int | None = None  # distance of the best guess, in letters

  def reset(self, task: dict[str, Any]) -> list[base.Message]:
    self._task = task
    self._turns = 0
    self._nearest = None
    content = f'Guess my letter from {task["low"]} to {task["high"]}.'
    return [{'role': 'user', 'content': content}]

  def step(self, text: str) -> base.EnvStep:
    time.sleep(self._settings.latency_s)
    low, high = self._task['low'], self._task['high']
    guess = next((c for c in text.lower() if low <= c <= high), '')
    offset = ord(self._task['secret']) - ord(guess) if guess else 0
    if guess:
      best = abs(offset) if self._nearest is None else self._nearest
      self._nearest = min(best, abs(offset))
    self._turns += 1
    if self._nearest == 0 or self._turns >= self.max_turns:
      return base.EnvStep(messages=(), reward=self._reward(), done=True)
    if not guess:
      answer = f'Name a letter from {low} to {high}.'
    else:
      answer = 'higher' if offset > 0 else 'lower'
    message = {'role': 'user', 'content': answer}
    return base.EnvStep(messages=(message,), reward=None, done=False)

  def demonstrate(self) -> Iterator[str]:
    """Halves the range until the letter is found."""
    low, high = ord(self._task['low']), ord(self._task['high'])
    while low <= high:
      middle = (low + high) // 2
      yield chr(middle)
      if chr(middle) < self._task['secret']:
        low = middle + 1
      else:
        high = middle - 1

  def close(self) -> None:
    """Holds nothing."""

  def _reward(self) -> float:
    if self._nearest is None:
      return 0.0
    if self._nearest == 0:
      return 1.0
    widest = ord(self._task['high']) - ord(self._task['low'])
    return 0.5 * (1 - self._nearest / widest)


def make_guess(**args: Any) -> GuessEnvironment:
  """The environment of a config block (see GuessSettings)."""
  settings = base.parse_settings(GuessSettings, 'toy_guess', args)
  return GuessEnvironment(settings)


FAMILY = base.TaskFamily('toy', make_tasks, make)
GUESS_FAMILY = base.TaskFamily('toy_guess', make_guess_tasks, make_guess)
