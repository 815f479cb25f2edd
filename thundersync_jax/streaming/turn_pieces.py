"""A row of a trajectory, cut into pieces that are fed or unwound one by one.

Positions are the prompt, then turns (sampled tokens, observation). Each is fed
once; a sampled token is predicted from the position before it. So what a turn
adds reaches from the last token before it up to, and without, its own last
sampled token; the prompt's piece ends before its last token.
"""

import dataclasses

import numpy as np

from thundersync_jax.types import Row, Trajectory

Key = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Limits:
  """Sizes of the slab and of the programs.

  Attributes:
    max_open: trajectories that have a row at once.
    max_prompts: prompts that have one.
    feed_tokens: longest piece that is fed.
    feed_targets: most loss entries in it.
    unwind_tokens: longest piece of a prompt, or that is unwound.
  """

  max_open: int
  max_prompts: int
  feed_tokens: int
  feed_targets: int
  unwind_tokens: int

  @property
  def rows(self) -> int:
    """Of the slab; the last one is nobody's."""
    return self.max_open + self.max_prompts + 1


@dataclasses.dataclass(frozen=True)
class Place:
  """Where a row of a trajectory lives; see learner/turn_programs.py."""

  row: int
  prompt_row: int
  prompt_length: int


@dataclasses.dataclass(frozen=True)
class Piece:
  """A stretch of a row, for one program.

  Attributes:
    key: of the trajectory; for a prompt the member is -1.
    place: where it lives.
    start: position of the first token.
    tokens: i32[n].
    sources: i32[m], offsets in the piece of what predicts a sampled token.
    targets: i32[m].
    behaviour_logprobs: f32[m].
    turn: the last one that it touches.
  """

  key: Key
  place: Place
  start: int
  tokens: np.ndarray
  sources: np.ndarray
  targets: np.ndarray
  behaviour_logprobs: np.ndarray
  turn: int = 0

  @property
  def stop(self) -> int:
    """The position behind its last token."""
    return self.start + len(self.tokens)


def sources(row: Row) -> np.ndarray:
  """i64[m], positions that predict the sampled tokens."""
  return np.flatnonzero(row.loss_mask) + len(row.prompt_tokens) - 1


def stop(row: Row) -> int:
  """The position up to which a row is fed: its last sampled token's."""
  return int(sources(row)[-1]) + 1


def cut(row: Row, start: int, limits: Limits) -> int:
  """The end of a piece with few enough tokens and loss entries."""
  end = min(stop(row), start + limits.feed_tokens)
  inside = sources(row)
  inside = inside[(inside >= start) & (inside < end)]
  most = limits.feed_targets
  return int(inside[most]) if len(inside) > most else end


def fed(key: Key, row: Row, place: Place, start: int, end: int) -> Piece:
  """The piece [start, end) with its loss entries."""
  prompt, inside = len(row.prompt_tokens), sources(row)
  inside = inside[(inside >= start) & (inside < end)]
  ids = np.concatenate([row.prompt_tokens, row.tokens])
  ends = np.cumsum([len(turn.tokens) for turn in row.turns])
  return Piece(
    key,
    place,
    start,
    ids[start:end].astype(np.int32),
    (inside - start).astype(np.int32),
    ids[inside + 1].astype(np.int32),
    row.behaviour_logprobs[inside + 1 - prompt],
    int(np.searchsorted(ends, end - prompt, side='right')),
  )


def bare(
  key: Key, tokens: np.ndarray, place: Place, start: int, end: int
) -> Piece:
  """The piece [start, end) of i32[n] tokens, without loss entries."""
  none = np.zeros(0, np.int32)
  part = tokens[start:end].astype(np.int32)
  return Piece(key, place, start, part, none, none, none.astype(np.float32))


def behind_fork(trajectory: Trajectory, streamed: int) -> Trajectory | None:
  """What the first `streamed` rows leave of a trajectory; None for nothing."""
  if not streamed:
    return trajectory
  rows = trajectory.rows[streamed:]
  if not rows:
    return None
  turns = [turn for row in rows for turn in row.turns]
  turns[0] = dataclasses.replace(turns[0], context=None)
  return dataclasses.replace(
    trajectory, prompt_tokens=rows[0].prompt_tokens, turns=tuple(turns)
  )
