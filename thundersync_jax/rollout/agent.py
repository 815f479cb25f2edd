"""The turn loop: prompts in, trajectories out.

  reset (worker) -> submit -> sampled turn (engine) -> step (worker)
       -> resume with the observation, or a finished trajectory

The engine belongs to the driver thread; environments run in worker threads,
which only hand over results. A slot stays parked, with its K/V, while its
environment answers. Sampled ids are stored and never tokenised again.
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
from thundersync_jax.rollout import engine as engine_lib
from thundersync_jax.rollout import slots as slots_lib
from thundersync_jax.types import EndedTurn, Trajectory, Turn

Key = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Limits:
  """Lengths in tokens; the engine has max_context.

  Attributes:
    max_turn_tokens: sampled tokens of one turn.
    max_trajectory_tokens: sampled tokens of all turns.
    max_turns: turns of the model, beside what the environment allows.
  """

  max_turn_tokens: int
  max_trajectory_tokens: int
  max_turns: int = 1_000_000


@dataclasses.dataclass
class _Live:
  """A trajectory under way, and its environment."""

  trajectory: Trajectory
  environment: envs_base.Environment
  rewards: list[float] = dataclasses.field(default_factory=list)
  in_engine: bool = False
  ended: EndedTurn | None = None  # the turn that the environment looks at

  @property
  def key(self) -> Key:
    return (self.trajectory.prompt_id, self.trajectory.member)


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
  ):
    self.engine = engine
    self._tokenizer = tokenizer
    self._make_environment = make_environment
    self._pool = pool
    self._limits = limits
    self._timeline = timeline
    self._latency = latency
    self._live: dict[Key, _Live] = {}
    self._resets: dict[int, int] = {}  # prompt_id -> members not reset yet
    self._ended_turns: list[Trajectory] = []
    self.failures = collections.Counter()  # reason -> trajectories
    probe = make_environment()
    self.max_turns = min(probe.max_turns, limits.max_turns)
    probe.close()

  @property
  def live(self) -> int:
    """Trajectories under way."""
    return len(self._live)

  def submit(
    self, prompt: prompt_sets.Prompt, step: int, members: range
  ) -> None:
    """Starts the members of one prompt's group."""
    self._resets[prompt.prompt_id] = len(members)
    for member in members:
      trajectory = Trajectory(
        prompt.prompt_id, member, step, np.zeros(0, np.int32)
      )
      live = _Live(trajectory, self._environment(prompt.prompt_id, member))
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

  def _turn_ended(self, live: _Live, ended: EndedTurn) -> list[Trajectory]:
    spent = live.trajectory.num_sampled + len(ended.tokens)
    reason = ended.finish_reason
    if reason == 'length' and spent >= self._limits.max_trajectory_tokens:
      reason = 'trajectory'
    live.ended = dataclasses.replace(ended, finish_reason=reason)
    live.trajectory = _with_turn(live.trajectory, live.ended, ())
    text = self._tokenizer.decode(ended.tokens)
    self._pool.submit((live.key, 'step'), live.environment.step, text)
    if self._may_go_on(live):
      self._ended_turns.append(live.trajectory)
      return []
    self._leave_engine(live)
    return [live.trajectory]

  def _answered(self, live: _Live, stage: str, outcome) -> list[Trajectory]:
    if stage == 'reset':
      self._resets[live.trajectory.prompt_id] -= 1
    events = []
    try:
      if outcome.error is not None:
        events = self._fail(live, outcome.error)
      elif stage == 'reset':
        self._set_prompt(live, outcome.value)
      else:
        events = self._stepped(live, outcome.value)
    except (ValueError, TypeError, AttributeError, LookupError) as error:
      # What an environment hands over may be anything: mask, count and log.
      name = _name(live.environment)
      reason = f'{name}.{stage}: {type(error).__name__}: {error}'
      events = self._fail(live, reason)
    return events + (self._start_group(live) if stage == 'reset' else [])

  def _set_prompt(self, live: _Live, messages: Any) -> None:
    if not isinstance(messages, (list, tuple)):  # nothing lazy runs here
      kind = type(messages).__name__
      raise TypeError(f'returned {kind}, not a list of messages')
    prompt = self._tokenizer.apply_chat_template(list(messages))
    if not len(prompt):
      raise ValueError(f'the messages {messages} make no prompt token')
    live.trajectory = dataclasses.replace(
      live.trajectory, prompt_tokens=np.asarray(prompt, np.int32)
    )

  def _start_group(self, live: _Live) -> list[Trajectory]:
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
    events = []
    for other in group:
      first, mine = group[0].trajectory, other.trajectory
      if not np.array_equal(first.prompt_tokens, mine.prompt_tokens):
        name = _name(other.environment)
        events += self._fail(
          other, f'{name}.reset gave members of one group different prompts'
        )
        continue
      events += self._start(other)
    return events

  def _start(self, live: _Live) -> list[Trajectory]:
    trajectory = live.trajectory
    request = slots_lib.Request(
      trajectory.prompt_id,
      trajectory.member,
      trajectory.step,
      trajectory.prompt_tokens,
      self._room(live),
    )
    try:
      self.engine.submit(request)
    except ValueError as error:  # the prompt is too long
      return self._fail(live, str(error))
    live.in_engine = True
    return []

  def _stepped(self, live: _Live, result: Any) -> list[Trajectory]:
    name = _name(live.environment)
    if not isinstance(result, envs_base.EnvStep):
      raise TypeError(f'returned {type(result).__name__}, not an EnvStep')
    if result.reward is not None:
      live.rewards.append(envs_base.checked_reward(result.reward, name))
    if not result.done and live.in_engine:
      observation = self._observation(live, result.messages)
      if len(observation) < self._context_left(live):
        live.trajectory = _with_turn(
          _without_last(live.trajectory), live.ended, observation
        )
        self.engine.resume(*live.key, observation, self._room(live))
        return []
    last = len(live.trajectory.turns) >= live.environment.max_turns
    if (result.done or last) and not live.rewards:
      envs_base.checked_reward(None, name)
    if not result.done:
      live.trajectory = self._cut(live)
    # A task that the limits ended unfinished has earned what it got so far.
    reward = float(sum(live.rewards))
    trajectory = dataclasses.replace(live.trajectory, reward=reward)
    self._end(live)
    return [trajectory]

  def _fail(self, live: _Live, reason: str) -> list[Trajectory]:
    if live.key not in self._live:
      return []
    self.failures[reason] += 1
    if self.failures[reason] == 1:
      logging.warning('prompt_id=%d member=%d is masked: %s', *live.key, reason)
    self._end(live)
    return [dataclasses.replace(live.trajectory, failure=reason)]

  def _end(self, live: _Live) -> None:
    self._leave_engine(live)
    del self._live[live.key]
    self._pool.submit((live.key, 'close'), live.environment.close)

  # Small answers.

  def _may_go_on(self, live: _Live) -> bool:
    turns = len(live.trajectory.turns)
    return (
      turns < self.max_turns
      and live.ended.finish_reason not in ('context', 'trajectory')
      and self._room(live) > 0
    )

  def _room(self, live: _Live) -> int:
    """Tokens that the next turn may sample."""
    left = self._limits.max_trajectory_tokens - live.trajectory.num_sampled
    return min(self._limits.max_turn_tokens, left)

  def _context_left(self, live: _Live) -> int:
    trajectory = live.trajectory
    used = len(trajectory.prompt_tokens) + len(trajectory.tokens)
    return self.engine.max_context - used

  def _observation(self, live: _Live, messages) -> np.ndarray:
    stopped = live.ended.finish_reason == 'stop'
    return observation_tokens(self._tokenizer, messages, stopped)

  def _cut(self, live: _Live) -> Trajectory:
    """The trajectory, with the limit that ended it before its environment."""
    reason = live.ended.finish_reason
    if reason == 'stop':
      reason = 'context'  # no room for the observation, if nothing else
      if len(live.trajectory.turns) >= self.max_turns:
        reason = 'turns'
      elif self._room(live) <= 0:
        reason = 'trajectory'
    ended = dataclasses.replace(live.ended, finish_reason=reason)
    return _with_turn(_without_last(live.trajectory), ended, ())

  def _leave_engine(self, live: _Live) -> None:
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
    done = outcome.error is not None or getattr(outcome.value, 'done', True)
    self._timeline.span(
      'environment',
      'tool' if going and not done else 'grading',
      outcome.ended - outcome.seconds,
      outcome.ended,
      prompt_id=prompt_id,
      member=member,
      turn=len(live.trajectory.turns) if live else 0,
    )

  def _check_closed(self, outcome) -> None:
    if outcome.error is not None:
      self.failures[f'close: {outcome.error}'] += 1


def observation_tokens(
  tokenizer: Any, messages, turn_ended: bool
) -> np.ndarray:
  """Tokens that open the next turn after what the model has said.

  The new messages are rendered behind a fixed exchange, of which everything up
  to its end-of-turn token is cut off; the tokens so far stay as they are.

  Args:
    tokenizer: see models/tokenizer.py.
    messages: of the environment.
    turn_ended: the model sampled its end-of-turn token; else it is added here.

  Returns:
    i32[n].

  Raises:
    ValueError: the template changes what stands before new messages.
  """
  exchange = [
    {'role': 'user', 'content': '.'},
    {'role': 'assistant', 'content': '.'},
  ]
  before = tokenizer.apply_chat_template(exchange, add_generation_prompt=False)
  after = tokenizer.apply_chat_template([*exchange, *messages])
  ends = [i for i, t in enumerate(before) if int(t) in tokenizer.stop_ids]
  if not ends:
    raise ValueError(
      'the chat template puts no end-of-turn token behind an answer, so turns '
      'cannot be told apart: use another template, or one turn'
    )
  kept = ends[-1] + 1
  if not np.array_equal(before[:kept], after[:kept]):
    raise ValueError(
      'the chat template rewrites earlier messages, so a turn cannot be '
      'appended: use a template that only appends'
    )
  return np.asarray(after[kept if turn_ended else kept - 1 :], np.int32)


def _with_turn(
  trajectory: Trajectory, ended: EndedTurn, observation
) -> Trajectory:
  """Appends a turn: its sampled tokens, then the observation."""
  sampled, observed = len(ended.tokens), len(observation)
  versions = ended.policy_versions
  turn = Turn(
    tokens=np.concatenate([ended.tokens, observation]).astype(np.int32),
    loss_mask=np.arange(sampled + observed) < sampled,
    behaviour_logprobs=np.pad(ended.logprobs, (0, observed)),
    policy_versions=np.pad(versions, (0, observed), constant_values=-1),
    finish_reason=ended.finish_reason,
  )
  return dataclasses.replace(trajectory, turns=(*trajectory.turns, turn))


def _without_last(trajectory: Trajectory) -> Trajectory:
  return dataclasses.replace(trajectory, turns=trajectory.turns[:-1])


def _name(environment: envs_base.Environment) -> str:
  return type(getattr(environment, 'wrapped', environment)).__name__
