"""What flows through the code: turns, trajectories and groups; device batches.

Host types hold numpy arrays and check their lengths when they are made, so a
mask can never grow apart from its tokens. Device types are registered pytrees.
"""

import dataclasses
import functools

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class Turn:
  """One model output and the observation that answers it.

  Attributes:
    tokens: i32[n], sampled tokens followed by observation tokens.
    loss_mask: bool[n], true on sampled tokens, the end-of-turn token included.
    behaviour_logprobs: f32[n], recorded by the sampler, untruncated, at the
      sampling temperature; 0 on observation tokens.
    policy_versions: i32[n], step whose parameters sampled the token.
    finish_reason: 'stop' (end-of-turn token), 'length' (max_turn_tokens),
      'trajectory' (max_trajectory_tokens), 'context' (max_context), 'turns'
      (max_turns) or 'rows' (max_rows); anything but 'stop' cut the trajectory
      short if it is the last.
    context: i32[c], what stands before this turn in the place of the prompt
      and of the earlier turns; None when the turn extends what was there.
  """

  tokens: np.ndarray
  loss_mask: np.ndarray
  behaviour_logprobs: np.ndarray
  policy_versions: np.ndarray
  finish_reason: str
  context: np.ndarray | None = None

  def __post_init__(self):
    if self.behaviour_logprobs is None:
      raise ValueError(
        'behaviour_logprobs=None: record them while sampling; they cannot be '
        "replaced by the learner's own"
      )
    lengths = {
      name: len(getattr(self, name))
      for name in (
        'tokens',
        'loss_mask',
        'behaviour_logprobs',
        'policy_versions',
      )
    }
    if len(set(lengths.values())) != 1:
      raise ValueError(f'a turn needs arrays of one length, got {lengths}')


class _Joined:
  """The arrays of `turns`, one behind the other."""

  turns: tuple[Turn, ...]

  def _join(self, name, dtype):
    parts = [np.asarray(getattr(turn, name), dtype) for turn in self.turns]
    return np.concatenate(parts) if parts else np.zeros(0, dtype)

  @functools.cached_property
  def tokens(self) -> np.ndarray:
    """i32[n], every token after the prompt; contexts are not among them."""
    return self._join('tokens', np.int32)

  @functools.cached_property
  def loss_mask(self) -> np.ndarray:
    """bool[n], true on sampled tokens."""
    return self._join('loss_mask', bool)

  @functools.cached_property
  def behaviour_logprobs(self) -> np.ndarray:
    """f32[n], 0 on observation tokens."""
    return self._join('behaviour_logprobs', np.float32)

  @functools.cached_property
  def policy_versions(self) -> np.ndarray:
    """i32[n]."""
    return self._join('policy_versions', np.int32)

  @functools.cached_property
  def num_sampled(self) -> int:
    return int(self.loss_mask.sum())

  @functools.cached_property
  def last_sampled(self) -> int:
    """Index of the last sampled token; 0 where there is none."""
    sampled = np.flatnonzero(self.loss_mask)
    return int(sampled[-1]) if len(sampled) else 0


@dataclasses.dataclass(frozen=True)
class Row(_Joined):
  """Turns of a trajectory that extend one another.

  Attributes:
    prompt_tokens: i32[p], the prompt, or the context of the first turn.
    turns: at least one, unless the trajectory has none.
  """

  prompt_tokens: np.ndarray
  turns: tuple[Turn, ...] = ()


@dataclasses.dataclass(frozen=True)
class Trajectory(_Joined):
  """A prompt and all its turns: the unit of credit.

  Attributes:
    prompt_id: the draw of a prompt, unique in a run.
    member: index within the group, 0 to group_size - 1.
    step: the optimizer step that this trajectory is sampled for.
    prompt_tokens: i32[p].
    turns: the turns so far.
    reward: None until the environment has answered.
    failure: why this trajectory is masked; None for a sound one.
  """

  prompt_id: int
  member: int
  step: int
  prompt_tokens: np.ndarray
  turns: tuple[Turn, ...] = ()
  reward: float | None = None
  failure: str | None = None

  @functools.cached_property
  def rows(self) -> tuple[Row, ...]:
    """The rows that it forks into, in order; one if no turn has a context."""
    starts = [i for i, t in enumerate(self.turns) if t.context is not None]
    prompts = [self.prompt_tokens, *(self.turns[i].context for i in starts)]
    ends = [*starts, len(self.turns)]
    return tuple(
      Row(prompt, self.turns[start:end])
      for prompt, start, end in zip(prompts, [0, *starts], ends, strict=True)
    )

  @property
  def truncated(self) -> bool:
    return bool(self.turns) and self.turns[-1].finish_reason != 'stop'


@dataclasses.dataclass(frozen=True)
class Item:
  """A trajectory and what its loss entries are multiplied by."""

  trajectory: Trajectory
  advantage: float = 0.0
  reward: float = 0.0


@dataclasses.dataclass(frozen=True)
class EndedTurn:
  """What the engine hands over when a slot stops: the sampled part of a turn.

  Attributes:
    prompt_id, member: whose turn it is.
    tokens: i32[n], end-of-turn token included.
    logprobs: f32[n].
    policy_versions: i32[n].
    finish_reason: see Turn.
  """

  prompt_id: int
  member: int
  tokens: np.ndarray
  logprobs: np.ndarray
  policy_versions: np.ndarray
  finish_reason: str


@dataclasses.dataclass(frozen=True)
class Sampling:
  """How tokens are drawn.

  Attributes:
    temperature: divides the logits; 0 is greedy (log-probabilities are then
      those at temperature 1).
    top_k: keep the k best tokens, 0 keeps all.
    top_p: keep the smallest set of best tokens with at least this mass.
  """

  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0

  def __post_init__(self):
    if self.temperature < 0:
      raise ValueError(f'temperature={self.temperature} must be at least 0')
    if self.top_k < 0:
      raise ValueError(f'top_k={self.top_k} must be at least 0 (0: all tokens)')
    if not 0 < self.top_p <= 1:
      raise ValueError(f'top_p={self.top_p} must lie in (0, 1]')


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
  """Packed rows. Each row holds whole segments [prompt | y1 | ... | yG].

  A loss entry n says: the hidden state at `sources[n]` predicts `targets[n]`.
  So G members can share the hidden state of the last prompt token, and the
  vocabulary matrix is applied to sampled tokens only.

  Attributes:
    tokens: i32[B, T].
    positions: i32[B, T], restarting at the prompt's length for each branch.
    segment_ids: i32[B, T], from 1; 0 is padding.
    branch_ids: i32[B, T], 0 for the prompt, from 1 for the members.
    sources: i32[B, N], column of the hidden state.
    targets: i32[B, N], token that it predicts.
    weights: f32[B, N], w_t, free of rewards; 0 is padding.
    advantages: f32[B, N], multiplies w_t in the batch gradient.
    rewards: f32[B, N], multiplies w_t in a group's reward sum.
    behaviour_logprobs: f32[B, N].
  """

  tokens: jax.Array
  positions: jax.Array
  segment_ids: jax.Array
  branch_ids: jax.Array
  sources: jax.Array
  targets: jax.Array
  weights: jax.Array
  advantages: jax.Array
  rewards: jax.Array
  behaviour_logprobs: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WeightedSum:
  """A sum and the weight to divide it by, once, at the barrier."""

  total: jax.Array
  weight: jax.Array

  def __add__(self, other: 'WeightedSum') -> 'WeightedSum':
    return WeightedSum(self.total + other.total, self.weight + other.weight)

  def mean(self) -> float:
    """The quotient on the host; 0 for an empty sum."""
    weight = float(self.weight)
    return float(self.total) / weight if weight else 0.0
