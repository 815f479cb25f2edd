"""BFCL multi-turn: several requests a task, answered with calls of functions.

The benchmark's data, its eight simulated services and its checks come from the
package bfcl-eval: `pip install --no-deps bfcl-eval mpmath`. The model writes
`[cd(folder='a'), ls()]` and reads the results; words without a call end a
request. Then the state of the services must equal that after the benchmark's
own calls, and the results of those must be among the model's
(gorilla.cs.berkeley.edu, BFCL V3).
"""

import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from thundersync_jax.envs import base, bfcl_services, folds, tool_calls
from thundersync_jax.envs.bfcl_services import Services

CATEGORIES = ('base', 'miss_func', 'miss_param', 'long_context')
_CALLS_A_TURN = 16  # of a demonstration; the parser takes no more


@dataclass(frozen=True)
class Settings:
  """The config block of BFCL multi-turn."""

  category: str = 'base'
  max_turns: int = 24
  max_request_turns: int = 6  # of the model for one request; more fail it
  reward: str = 'success'  # 1 if all requests pass; or 'requests': their share
  functions: str = 'involved'  # that are listed; or 'needed': the gold path's
  max_result: int = 300  # characters of a call's result that are shown
  max_results: int = 1000  # characters of a turn's results that are shown
  system: str = 'Reply with calls like [f(a=1), g()]. When all is done, say so.'

  def __post_init__(self):
    for name, valid in (
      ('category', CATEGORIES),
      ('reward', ('success', 'requests')),
      ('functions', ('involved', 'needed')),
    ):
      if getattr(self, name) not in valid:
        raise ValueError(
          f'{name}={getattr(self, name)!r} does not exist; choose one of '
          f'{sorted(valid)}'
        )
    for name in ('max_turns', 'max_request_turns', 'max_result', 'max_results'):
      if getattr(self, name) < 1:
        raise ValueError(f'{name}={getattr(self, name)} must be at least 1')


def make_tasks(seed: int, fold: str, **args: Any) -> Iterator[dict[str, Any]]:
  """The category's tasks of a fold, in an order of the seed.

  Variants of one scenario are in the same fold. A task is left out if the
  services, untouched, pass every check of state: it asks for nothing.
  """
  settings = base.parse_settings(Settings, 'bfcl', args)
  folds.check(fold)
  names = [
    name for name in bfcl_services.entries(settings.category) if _in(name, fold)
  ]
  random.Random(f'bfcl/{seed}/{fold}').shuffle(names)
  for name in names:
    if not solved_untouched(bfcl_services.entries(settings.category)[name]):
      yield {'key': name, 'category': settings.category}


def _in(name: str, fold: str) -> bool:
  number = name.rsplit('_', 1)[-1]
  digest = hashlib.sha256(f'bfcl/{number}'.encode()).digest()
  return int.from_bytes(digest[:8], 'big') % 10 in folds.DIGITS[fold]


def solved_untouched(entry: dict[str, Any]) -> bool:
  """Whether the gold calls leave all services as they were."""
  mine, gold = Services(entry), Services(entry)
  for calls in entry['ground_truth']:
    gold.run(calls)
    if not bfcl_services.same_state(mine, gold):
      return False
  return True


def fingerprint(**args: Any) -> str:
  """A digest of the benchmark's files."""
  settings = base.parse_settings(Settings, 'bfcl', args)
  content = json.dumps(bfcl_services.entries(settings.category), sort_keys=True)
  return hashlib.sha256(content.encode()).hexdigest()


class BfclEnvironment:
  """The requests of one task, one after the other; 'tool' carries results."""

  def __init__(self, settings: Settings):
    self._settings = settings
    self.max_turns = settings.max_turns
    bfcl_services.entries(settings.category)  # a missing package is missed now
    self._entry: dict[str, Any] = {}
    self._mine: Services | None = None
    self._gold: Services | None = None

  def reset(self, task: dict[str, Any]) -> list[base.Message]:
    entry = bfcl_services.entries(task['category'])[task['key']]
    self._entry = entry
    self._mine, self._gold = Services(entry), Services(entry)
    self._results: list[str] = []  # of all the model's calls
    self._passed: list[bool] = []  # of the requests so far
    self._turns = self._request_turns = self._request_calls = 0
    listed = _functions(entry, self._settings.functions)
    later = sum(entry.get('missed_function', {}).values(), [])
    self._listed = {n: s for n, s in listed.items() if n not in later}
    self._hidden = {n: s for n, s in listed.items() if n in later}
    functions = f'Functions: {" ".join(self._listed.values())}'
    question = f'{functions}\n{entry["question"][0][0]["content"]}'
    return base.opening(question, self._settings.system, '')

  def step(self, text: str) -> base.EnvStep:
    self._turns += 1
    self._request_turns += 1
    try:
      calls = tool_calls.python(text, self._mine.parameters)
    except tool_calls.ToolCallError as error:
      return self._answer('tool', str(error))
    if calls:
      limit = self._settings.max_results
      content = _cut('\n'.join(self._run(call) for call in calls), limit)
      if self._mine.too_large:
        return self._end(failed=True)
      return self._answer('tool', content)
    self._passed.append(self._check())
    failed = not self._passed[-1] and self._settings.reward == 'success'
    number = len(self._passed)
    if failed or number == len(self._entry['question']):
      return self._end(failed=failed)
    self._request_turns = self._request_calls = 0
    return self._answer('user', self._request(number))

  def demonstrate(self) -> Iterator[str]:
    """The benchmark's calls of each request, then a word that ends it."""
    for calls in self._entry['ground_truth']:
      for start in range(0, len(calls), _CALLS_A_TURN):
        yield f'[{", ".join(calls[start : start + _CALLS_A_TURN])}]'
      yield 'Done.'

  def close(self) -> None:
    """Drops the services."""
    self._mine = self._gold = None

  def _run(self, call: tool_calls.Call) -> str:
    self._request_calls += 1
    if call.name.rpartition('.')[2] not in self._listed:
      return f'error: there is no function {call.name:.40}'
    result = self._mine.call(call)
    self._results.append(result)
    return _cut(result, self._settings.max_result)

  def _check(self) -> bool:
    """Runs the gold calls of this request and compares, as the benchmark."""
    number = len(self._passed)
    calls = self._entry['ground_truth'][number]
    results = self._gold.run(calls)
    if not calls:  # nothing could be done: nothing may be called
      return not self._request_calls
    if not self._request_calls or not bfcl_services.same_state(
      self._mine, self._gold
    ):
      return False
    return bfcl_services.results_hold(self._results, results)

  def _request(self, number: int) -> str:
    if messages := self._entry['question'][number]:
      return messages[0]['content']
    # The functions that were missing so far are here now.
    names = self._entry['missed_function'][str(number)]
    new = {n: s for n, s in self._hidden.items() if n in names}
    self._listed.update(new)
    return f'New functions: {" ".join(new.values())}. What about now?'

  def _answer(self, role: str, content: str) -> base.EnvStep:
    over = self._request_turns >= self._settings.max_request_turns
    if over or self._turns >= self.max_turns:
      return self._end(failed=True)
    message = {'role': role, 'content': content}
    return base.EnvStep(messages=(message,), reward=None, done=False)

  def _end(self, failed: bool) -> base.EnvStep:
    reward = float(not failed)
    if self._settings.reward == 'requests':
      reward = sum(self._passed) / len(self._entry['question'])
    return base.EnvStep(messages=(), reward=reward, done=True)


def _cut(text: str, limit: int) -> str:
  return text if len(text) <= limit else text[:limit] + '...'


def _functions(entry: dict[str, Any], which: str) -> dict[str, str]:
  """Name -> signature of the functions that the task lists."""
  listed: dict[str, str] = {}
  for name in entry['involved_classes']:
    listed |= bfcl_services.signatures(name)
  if which == 'needed':
    calls = sum(entry['ground_truth'], [])
    needed = {text.partition('(')[0] for text in calls}
    return {n: s for n, s in listed.items() if n in needed}
  excluded = set(entry.get('excluded_function', []))
  return {n: s for n, s in listed.items() if n not in excluded}


def make(**args: Any) -> BfclEnvironment:
  """The environment of a config block (see Settings)."""
  return BfclEnvironment(base.parse_settings(Settings, 'bfcl', args))


FAMILY = base.TaskFamily('bfcl', make_tasks, make, fingerprint)
