"""What tasks with tools in a sandbox share: settings and the turn loop.

  files of the task -> sandbox;  text -> calls -> outputs -> observation
  'done', or the last turn -> reward

A family says what its tools do and how the end is graded.
"""

import abc
from collections.abc import Iterator
from typing import Any

from thundersync_jax.envs import base, sandbox, tool_calls

_MAX_CALLS = 4  # of one turn that are run


def check_settings(settings: Any, forms: tuple[str, ...]) -> None:
  """Refuses limits of 0 and forms of calls that the family does not read."""
  if settings.form not in forms:
    raise ValueError(
      f'form={settings.form!r} does not exist; choose one of {list(forms)}'
    )
  for name in ('max_turns', 'max_output', 'wall_s'):
    if not getattr(settings, name) > 0:
      raise ValueError(f'{name}={getattr(settings, name)} must be above 0')


class ToolEnvironment(abc.ABC):
  """One sandbox a task; 'tool' messages carry what the calls gave.

  A family says what `demonstrate`, `_run` and `_reward` do.
  """

  hint = ''  # the observation of a turn without a call

  def __init__(self, settings: Any):
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
    return base.opening(self._question(task), self._settings.system, '')

  def step(self, text: str) -> base.EnvStep:
    self._turns += 1
    calls, observation = [], ''
    try:
      calls = self._parse(text)
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
    message = {'role': 'tool', 'content': observation or self.hint}
    return base.EnvStep(messages=(message,), reward=None, done=False)

  @abc.abstractmethod
  def demonstrate(self) -> Iterator[str]:
    """The model's turns on a gold path."""

  def close(self) -> None:
    """Ends the sandbox; a second call does nothing."""
    if self._box is not None:
      self._box.close()
      self._box = None

  def _question(self, task: dict[str, Any]) -> str:
    return task['question']

  def _parse(self, text: str) -> list[tool_calls.Call]:
    return tool_calls.PARSERS[self._settings.form](text)

  @abc.abstractmethod
  def _run(self, call: tool_calls.Call) -> str:
    """What a call gave."""

  @abc.abstractmethod
  def _reward(self) -> float:
    """Grades what is in the sandbox."""
