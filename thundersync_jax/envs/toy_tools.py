"""A toy agent at work: long prompts, several tool calls, a reward at the end.

What the tools answer, how many turns a task takes and whether it is solved are
read from digests of what was said, so that any model gets work of a known size
and rewards with spread. It takes no time itself: see latency.py.
"""

import dataclasses
import hashlib
import string
from collections.abc import Iterator
from typing import Any

from thundersync_jax.envs import base


@dataclasses.dataclass(frozen=True)
class Settings:
  """The config block of the toy agent.

  Attributes:
    prompt_letters: length of a task.
    answer_letters: length of a tool's answer.
    min_turns, max_turns: of a trajectory; all numbers in between are alike.
    solved: share of the trajectories with reward 1; the others have 0.
  """

  prompt_letters: int = 64
  answer_letters: int = 16
  min_turns: int = 1
  max_turns: int = 4
  solved: float = 0.5

  def __post_init__(self):
    if not 1 <= self.min_turns <= self.max_turns:
      raise ValueError(
        f'min_turns={self.min_turns} must lie in 1..max_turns={self.max_turns}'
      )
    if self.prompt_letters < 8:
      raise ValueError(
        f'prompt_letters={self.prompt_letters} must be at least 8, so that '
        'tasks differ'
      )
    if not 0 <= self.solved <= 1:
      raise ValueError(f'solved={self.solved} must lie in 0..1')


def make_tasks(seed: int, fold: str, **args: Any) -> Iterator[dict[str, Any]]:
  """Endless texts of random letters."""
  settings = base.parse_settings(Settings, 'toy_tools', args)
  number = 0
  while True:
    text = _letters(f'{seed}/{fold}/{number}', settings.prompt_letters)
    yield {'key': text, 'question': text}
    number += 1


class ToolsEnvironment:
  """Each text calls a tool; the last one ends the task."""

  def __init__(self, settings: Settings):
    self._settings = settings
    self.max_turns = settings.max_turns
    self._said: list[str] = []
    self._turns = 0

  def reset(self, task: dict[str, Any]) -> list[base.Message]:
    self._said = [task['question']]
    self._turns = 0
    return [{'role': 'user', 'content': task['question']}]

  def step(self, text: str) -> base.EnvStep:
    settings = self._settings
    self._said.append(text)
    said = '\n'.join(self._said)
    if len(self._said) == 2:
      spread = settings.max_turns - settings.min_turns + 1
      self._turns = settings.min_turns + int(_uniform(said) * spread)
    if len(self._said) > self._turns:
      solved = _uniform('end\n' + said) < settings.solved
      return base.EnvStep(messages=(), reward=float(solved), done=True)
    answer = _letters(said, settings.answer_letters)
    message = {'role': 'tool', 'content': answer}
    return base.EnvStep(messages=(message,), reward=None, done=False)

  def close(self) -> None:
    """Holds nothing."""


def make(**args: Any) -> ToolsEnvironment:
  """The environment of a config block (see Settings)."""
  return ToolsEnvironment(base.parse_settings(Settings, 'toy_tools', args))


def _digest(text: str) -> bytes:
  return hashlib.sha256(text.encode()).digest()


def _uniform(text: str) -> float:
  """A number in [0, 1) that depends on the text alone."""
  return int.from_bytes(_digest(text)[:6], 'big') / 2**48


def _letters(text: str, count: int) -> str:
  """So many letters that depend on the text alone."""
  drawn = hashlib.shake_256(text.encode()).digest(count)
  return ''.join(string.ascii_lowercase[byte % 26] for byte in drawn)


FAMILY = base.TaskFamily('toy_tools', make_tasks, make)
