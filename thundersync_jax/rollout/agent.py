"""The turn loop: prompts in, trajectories out.

  reset (worker) -> submit -> sampled turn (engine) -> step (worker)
       -> resume with the observation, or a finished trajectory

The engine belongs to the driver thread; environments run in worker threads,
which only hand over results. While its environment answers, a trajectory is
parked, with its K/V while no other needs the slot. Sampled ids are stored and
never tokenised again; where the chat template rewrites what was said, the
trajectory forks into a new row.
"""

import collections
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from absl import logging

from thundersync_jax.envs import base as envs_base
from thundersync_jax.envs import latency as latency_lib
from thundersync_jax.envs import prompt_sets, worker_pool
from thundersync_jax.rollout import conversation
from thundersync_jax.rollout import engine as engine_lib
from thundersync_jax.rollout import live as live_lib
from thundersync_jax.rollout import slots as slots_lib
from thundersync_jax.types import EndedTurn, Trajectory

Limits = live_lib.Limits
# What looking at the answer of an environment may raise.
_NONSENSE = (
  ValueError,
  TypeError,
  AttributeError,
  LookupError,
  ArithmeticError,
  RuntimeError,
)


class Agent:
  """Plays trajectories with one engine. Driver thread only.

  Args:
    engine: samples the turns.
    tokenizer: see models/tokenizer.py.
    make_environment: makes one environment for one trajectory.
    pool: where environments run.
    limits: see Limits.
    timeline: records the environments' spans, may be None.
    latency: makes the environments answer late, may be None.
    max_live: trajectories under way, 0: no limit. Other groups wait, and start
      whole; one is always under way.
  """

  def __init__(
    self,
    engine: engine_lib.Engine,
    tokenizer: Any,
    make_environment: Callable[[], envs_base.Environment],
    pool: worker_pool.WorkerPool,
    limits: Limits,
    timeline=None,
    latency: latency_lib.Latency | None = None,
    max_live: int = 0,
  ):
    self.engine = engine
    self._tokenizer = tokenizer
    self._make_environment = make_environment
    self._pool = pool
    self._limits = limits
    self._timeline = timeline
    self._latency = latency
    self._max_live = max_live
    self._appends = conversation.keeps_history(tokenizer)
    self._pending = collections.deque()  # (prompt, step, members) to start
    self._live: dict[live_lib.Key, live_lib.Live] = {}
    self._resets: dict[int, int] = {}  # prompt_id -> members not reset yet
    self._ended_turns: list[Trajectory] = []
    self.failures = collections.Counter()  # reason -> trajectories
    probe = make_environment()
    self.max_turns = min(probe.max_turns, limits.max_turns)
    probe.close()

  @property
  def live(self) -> int:
    """Trajectories under way, and those that max_live keeps waiting."""
    waiting = sum(len(members) for *_, members in self._pending)
    return len(self._live) + waiting

  def submit(
    self, prompt: prompt_sets.Prompt, step: int, members: range
  ) -> None:
    """Starts the members of one prompt's group, when max_live lets them."""
    self._pending.append((prompt, step, members))
    self._start_pending()

  def _start_pending(self) -> None:
    while self._pending:
      prompt, step, members = self._pending[0]
      count = len(self._live) + len(members)
      if self._max_live and self._live and count > self._max_live:
        return
      self._pending.popleft()
      self._reset(prompt, step, members)

  def _reset(
    self, prompt: prompt_sets.Prompt, step: int, members: range
  ) -> None:
    self._resets[prompt.prompt_id] = len(members)
    for member in members:
      trajectory = Trajectory(
        prompt.prompt_id, member, step, np.zeros(0, np.int32)
      )
      live = live_lib.Live(
        trajectory,
        self._environment(prompt.prompt_id, member),
        conversation.Conversation(self._tokenizer, self._appends),
        self._limits,
      )
      self._live[live.key] = live
      self._pool.submit(
        (live.key, 'reset'), live.environment.reset, prompt.task
      )

  def advance(self) -> list[Trajectory]:
    """Moves everything on that can move; does not wait.

    Returns:
      Trajectories that are finished (reward None), scored or failed. A
      finished one comes again when its reward is there.
    """
    events, self._ended_turns = [], []
    for ended in self.engine.harvest():
      events += self._turn_ended(
        self._live[ended.prompt_id, ended.member], ended
      )
    for outcome in self._pool.results():
      (key, stage) = outcome.ticket
      self._record(outcome, *key, stage)
      if stage == 'close':
        self._check_closed(outcome)
      elif key in self._live:
        events += self._answered(self._live[key], stage, outcome)
    self._start_pending()
    self.engine.launch()
    return events

  def ended_turns(self) -> list[Trajectory]:
    """Trajectories up to turns that ended in the last advance, drained once.

    Their environments work at the answer, which is not in them, and may still
    end them: the turn is the last one then. Reward is None. A last turn that
    limits decide is not here: advance returns that trajectory itself.
    """
    ended, self._ended_turns = self._ended_turns, []
    return ended

  def wait(self, timeout_s: float) -> None:
    """Sleeps until an environment has answered, or the time is over."""
    if self._pool.in_flight:
      self._pool.wait(timeout_s)
    else:
      time.sleep(timeout_s)

  # What came back.

  def _turn_ended(
    self, live: live_lib.Live, ended: EndedTurn
  ) -> list[Trajectory]:
    text = live.end_turn(ended)
    self._pool.submit((live.key, 'step'), live.environment.step, text)
    if self._may_go_on(live):
      self._ended_turns.append(live.trajectory)
      return []
    self._leave_engine(live)
    return [live.trajectory]

  def _answered(
    self, live: live_lib.Live, stage: str, outcome
  ) -> list[Trajectory]:
    if stage == 'reset':
      self._resets[live.trajectory.prompt_id] -= 1
    events = []
    try:
      if outcome.error is not None:
        events = self._fail(live, outcome.error)
      elif stage == 'reset':
        live.open(outcome.value)
      else:
        events = self._stepped(live, outcome.value)
    except _NONSENSE as error:
      # What an environment hands over may be anything: mask, count and log.
      reason = f'{live.name}.{stage}: {type(error).__name__}: {error}'
      events = self._fail(live, reason)
    return events + (self._start_group(live) if stage == 'reset' else [])

  def _start_group(self, live: live_lib.Live) -> list[Trajectory]:
    """Submits a group once all its members are reset, so it shares K/V."""
    prompt_id = live.trajectory.prompt_id
    if self._resets.get(prompt_id) != 0:
      return []
    del self._resets[prompt_id]
    group = [
      other
      for (owner, _), other in self._live.items()
      if owner == prompt_id and len(other.trajectory.prompt_tokens)
    ]
    prompts = [other.trajectory.prompt_tokens.tobytes() for other in group]
    shared = collections.Counter(prompts).most_common(1)
    events = []
    for other, prompt in zip(group, prompts, strict=True):
      if prompt != shared[0][0]:
        events += self._fail(
          other,
          f'{other.name}.reset gave members of one group different prompts',
        )
        continue
      events += self._start(other)
    return events

  def _start(self, live: live_lib.Live) -> list[Trajectory]:
    trajectory = live.trajectory
    request = slots_lib.Request(
      trajectory.prompt_id,
      trajectory.member,
      trajectory.step,
      trajectory.prompt_tokens,
      live.room,
    )
    try:
      self.engine.submit(request)
    except ValueError as error:  # the prompt is too long
      return self._fail(live, str(error))
    live.in_engine = True
    return []

  def _stepped(self, live: live_lib.Live, result: Any) -> list[Trajectory]:
    if not isinstance(result, envs_base.EnvStep):
      raise TypeError(f'returned {type(result).__name__}, not an EnvStep')
    if result.reward is not None:
      live.rewards.append(envs_base.checked_reward(result.reward, live.name))
    cut = self._resume(live, result.messages) if not result.done else ''
    if cut is None:
      return []
    last = live.turns >= live.environment.max_turns
    if (result.done or last) and not live.rewards:
      envs_base.checked_reward(None, live.name)
    if cut:
      live.cut(cut)
    # A task that the limits ended unfinished has earned what it got so far.
    reward = float(sum(live.rewards))
    trajectory = dataclasses.replace(live.trajectory, reward=reward)
    self._end(live)
    return [trajectory]

  def _resume(self, live: live_lib.Live, messages: Any) -> str | None:
    """Begins the next turn, or says which limit keeps it from beginning."""
    if not live.in_engine:
      if live.turns >= self.max_turns:
        return 'turns'
      return 'trajectory' if live.room <= 0 else 'context'
    what = live.continuation(messages)
    if cut := live.stopped_by(what, self.engine.max_context):
      return cut
    live.go_on(what)
    begin = self.engine.fork if what.forks else self.engine.resume
    begin(*live.key, what.tokens, live.room)
    return None

  def _fail(self, live: live_lib.Live, reason: str) -> list[Trajectory]:
    if live.key not in self._live:
      return []
    self.failures[reason] += 1
    if self.failures[reason] == 1:
      logging.warning('prompt_id=%d member=%d is masked: %s', *live.key, reason)
    self._end(live)
    return [dataclasses.replace(live.trajectory, failure=reason)]

  def _end(self, live: live_lib.Live) -> None:
    self._leave_engine(live)
    del self._live[live.key]
    self._pool.submit((live.key, 'close'), live.environment.close)

  def _may_go_on(self, live: live_lib.Live) -> bool:
    return (
      live.turns < self.max_turns
      and live.ended.finish_reason not in ('context', 'trajectory')
      and live.room > 0
    )

  def _leave_engine(self, live: live_lib.Live) -> None:
    if live.in_engine:
      self.engine.finish(*live.key)
      live.in_engine = False

  def _environment(self, prompt_id: int, member: int) -> envs_base.Environment:
    environment = self._make_environment()
    if self._latency is None:
      return environment
    return self._latency.wrap(environment, prompt_id, member)

  def _record(self, outcome, prompt_id: int, member: int, stage: str) -> None:
    if self._timeline is None or stage != 'step':
      return
    live = self._live.get((prompt_id, member))
    going = live is not None and live.in_engine
    self._timeline.span(
      'environment',
      'tool' if going and _goes_on(outcome.value) else 'grading',
      outcome.ended - outcome.seconds,
      outcome.ended,
      prompt_id=prompt_id,
      member=member,
      turn=len(live.trajectory.turns) if live else 0,
    )

  def _check_closed(self, outcome) -> None:
    if outcome.error is not None:
      self.failures[f'close: {outcome.error}'] += 1


def _goes_on(answer: Any) -> bool:
  """Whether an answer, which may be anything, asks for another turn."""
  try:
    return not answer.done
  except _NONSENSE:
    return False
