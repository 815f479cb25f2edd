"""A trajectory under way: its environment, its messages and its turns so far.

Limits are looked at here, so that they are one place:

  max_turn_tokens        ends a turn, 'length'
  max_trajectory_tokens  ends the trajectory, 'trajectory'
  max_turns, max_rows    end it before the next turn, 'turns' and 'rows'
  max_context            ends it in a turn or before the next one, 'context'
"""

import dataclasses
from typing import Any

import numpy as np

from thundersync_jax.envs import base as envs_base
from thundersync_jax.rollout import conversation as conversation_lib
from thundersync_jax.types import EndedTurn, Trajectory, Turn

Key = tuple[int, int]  # prompt_id, member


@dataclasses.dataclass(frozen=True)
class Limits:
  """Lengths in tokens; the engine has max_context.

  Attributes:
    max_turn_tokens: sampled tokens of one turn.
    max_trajectory_tokens: sampled tokens of all turns.
    max_turns: turns of the model, beside what the environment allows.
    max_rows: rows that a trajectory may fork into, as one launch of the
      learner takes.
  """

  max_turn_tokens: int
  max_trajectory_tokens: int
  max_turns: int = 1_000_000
  max_rows: int = 64

  def __post_init__(self):
    for name, value in dataclasses.asdict(self).items():
      if value < 1:
        raise ValueError(f'{name}={value} must be at least 1')


@dataclasses.dataclass
class Live:
  """One trajectory; the agent moves it on.

  Attributes:
    context: of the turn to come, see Turn.
    ended: the turn that the environment looks at.
  """

  trajectory: Trajectory
  environment: envs_base.Environment
  conversation: conversation_lib.Conversation
  limits: Limits
  rewards: list[float] = dataclasses.field(default_factory=list)
  in_engine: bool = False
  context: np.ndarray | None = None
  ended: EndedTurn | None = None

  @property
  def key(self) -> Key:
    return (self.trajectory.prompt_id, self.trajectory.member)

  @property
  def name(self) -> str:
    """The environment's class, for messages."""
    return type(getattr(self.environment, 'wrapped', self.environment)).__name__

  @property
  def turns(self) -> int:
    return len(self.trajectory.turns)

  @property
  def room(self) -> int:
    """Tokens that the next turn may sample, before max_context."""
    spent = self.trajectory.num_sampled
    left = self.limits.max_trajectory_tokens - spent
    return min(self.limits.max_turn_tokens, left)

  def open(self, messages: Any) -> None:
    """Sets the prompt.

    Raises:
      TypeError, ValueError: what reset returned makes none.
    """
    _check_list(messages)
    prompt = self.conversation.open(messages)
    if not len(prompt):
      raise ValueError(f'the messages {messages} make no prompt token')
    self.trajectory = dataclasses.replace(
      self.trajectory, prompt_tokens=np.asarray(prompt, np.int32)
    )

  def end_turn(self, ended: EndedTurn) -> str:
    """Takes a sampled turn; returns its text."""
    spent = self.trajectory.num_sampled + len(ended.tokens)
    reason = ended.finish_reason
    if reason == 'length' and spent >= self.limits.max_trajectory_tokens:
      reason = 'trajectory'
    self.ended = dataclasses.replace(ended, finish_reason=reason)
    self._set_last(())
    return self.conversation.say(ended.tokens)

  def continuation(self, messages: Any) -> conversation_lib.Continuation:
    """What comes behind the ended turn; see Conversation.hear.

    Raises:
      TypeError, ValueError: the messages are none.
    """
    _check_list(messages)
    stopped = self.ended.finish_reason == 'stop'
    return self.conversation.hear(messages, stopped)

  def stopped_by(
    self, next_tokens: conversation_lib.Continuation, max_context: int
  ) -> str:
    """The limit that keeps the next turn from beginning, '' if none."""
    rows, used = self.trajectory.rows, 0
    if next_tokens.forks and len(rows) >= self.limits.max_rows:
      return 'rows'
    if not next_tokens.forks:
      used = len(rows[-1].prompt_tokens) + len(rows[-1].tokens)
    return '' if used + len(next_tokens.tokens) < max_context else 'context'

  def go_on(self, next_tokens: conversation_lib.Continuation) -> None:
    """Ends the turn with its observation, or begins a row of its own."""
    if not next_tokens.forks:
      self._set_last(next_tokens.tokens, replace=True)
    self.context = next_tokens.tokens if next_tokens.forks else None

  def cut(self, reason: str) -> None:
    """Says which limit ended it before its environment did."""
    if self.ended.finish_reason == 'stop':
      self.ended = dataclasses.replace(self.ended, finish_reason=reason)
      self._set_last((), replace=True)

  def _set_last(self, observation, replace: bool = False) -> None:
    """The ended turn as the last one: sampled tokens, then observation."""
    ended = self.ended
    sampled, observed = len(ended.tokens), len(observation)
    versions = ended.policy_versions
    turn = Turn(
      tokens=np.concatenate([ended.tokens, observation]).astype(np.int32),
      loss_mask=np.arange(sampled + observed) < sampled,
      behaviour_logprobs=np.pad(ended.logprobs, (0, observed)),
      policy_versions=np.pad(versions, (0, observed), constant_values=-1),
      finish_reason=ended.finish_reason,
      context=self.context,
    )
    turns = self.trajectory.turns
    turns = (*(turns[:-1] if replace else turns), turn)
    self.trajectory = dataclasses.replace(self.trajectory, turns=turns)


def _check_list(messages) -> None:
  if not isinstance(messages, (list, tuple)):  # nothing lazy runs here
    kind = type(messages).__name__
    raise TypeError(f'returned {kind}, not a list of messages')
