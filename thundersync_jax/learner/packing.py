"""Trajectories into rows of fixed shapes, each group's prompt once a row.

  row   [prompt a | y1 | y2 | ...] [prompt b | y1 | ...] padding

Members of a group share the prompt's tokens and never see each other; their
positions restart at the prompt's length (shared-prompt mask, arXiv 2511.18871).
The last sampled token of a branch predicts nothing, so it is a target only.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from thundersync_jax.types import Batch, Item, Trajectory


@dataclasses.dataclass(frozen=True, order=True)
class Shape:
  """Sizes of a packed batch: B rows of T tokens with N loss entries each."""

  rows: int
  tokens: int
  targets: int


@dataclasses.dataclass
class _Row:
  """A row under construction; `tokens` and `targets` count what is used."""

  tokens: int = 0
  targets: int = 0
  segments: list[tuple[np.ndarray, list[Item]]] = dataclasses.field(
    default_factory=list
  )


def branch_length(trajectory: Trajectory) -> int:
  """Columns that a trajectory needs after its prompt."""
  sampled = np.flatnonzero(trajectory.loss_mask)
  return int(sampled[-1]) if len(sampled) else 0


def place(items: Sequence[Item], shape: Shape) -> tuple[list[_Row], list[Item]]:
  """First fit, members of a group together.

  Returns:
    The rows, and the items that did not fit.
  """
  rows: list[_Row] = []
  left = []
  by_prompt: dict[int, list[Item]] = {}
  for item in items:
    by_prompt.setdefault(item.trajectory.prompt_id, []).append(item)
  for members in by_prompt.values():
    rest = list(members)
    while rest:
      row, taken = _place_group(rows, rest, shape)
      if row is None:
        left.append(rest.pop(0))
      rest = rest[taken:]
  return rows, left


def _place_group(rows, members, shape) -> tuple[_Row | None, int]:
  """Puts a prompt and as many of its members as fit into one row."""
  prompt = members[0].trajectory.prompt_tokens
  lengths = [branch_length(item.trajectory) for item in members]
  targets = [item.trajectory.num_sampled for item in members]
  whole = len(prompt) + sum(lengths)
  row = _row_for(rows, whole, sum(targets), shape)
  row = row or _row_for(rows, len(prompt) + lengths[0], targets[0], shape)
  if row is None:
    return None, 0
  segment = []
  row.segments.append((prompt, segment))
  row.tokens += len(prompt)
  for item, length, count in zip(members, lengths, targets, strict=True):
    if not _fits(row, length, count, shape):
      break
    segment.append(item)
    row.tokens += length
    row.targets += count
  return row, len(segment)


def _fits(row: _Row, tokens: int, targets: int, shape: Shape) -> bool:
  return (
    row.tokens + tokens <= shape.tokens
    and row.targets + targets <= shape.targets
  )


def _row_for(rows, tokens, targets, shape) -> _Row | None:
  for row in rows:
    if _fits(row, tokens, targets, shape):
      return row
  if len(rows) < shape.rows and _fits(_Row(), tokens, targets, shape):
    rows.append(_Row())
    return rows[-1]
  return None


def choose(
  items: Sequence[Item], shapes: Sequence[Shape]
) -> tuple[Shape, list[_Row], list[Item]]:
  """Returns the cheapest shape that takes everything, or the one taking most.

  Raises:
    ValueError: not even one item fits any shape.
  """
  best = None
  for shape in sorted(shapes, key=lambda s: (s.rows * s.tokens, s.targets)):
    rows, left = place(items, shape)
    if not left:
      return shape, rows, left
    if best is None or len(left) < len(best[2]):
      best = (shape, rows, left)
  if best is None or len(best[2]) == len(items):
    first = items[0].trajectory
    need = len(first.prompt_tokens) + branch_length(first)
    raise ValueError(
      f'a trajectory of {need} tokens with {first.num_sampled} loss entries '
      f'fits none of the shapes {list(shapes)}: raise row_tokens'
    )
  return best


def pack(
  items: Sequence[Item], shapes: Sequence[Shape], weight, pad_id: int
) -> tuple[Batch, Shape, list[Item]]:
  """Packs as many items as the best shape takes.

  Args:
    items: what waits, in order.
    shapes: the shapes that programs exist for.
    weight: sampled tokens of a trajectory -> weight of each of its tokens.
    pad_id: fills unused columns; it has weight 0 and segment 0.

  Returns:
    The batch (numpy leaves), its shape, and the items that it holds.
  """
  shape, rows, left = choose(items, shapes)
  skipped = {id(item) for item in left}
  batch = empty(shape, pad_id)
  for index, row in enumerate(rows):
    _fill(batch, index, row, weight)
  return batch, shape, [item for item in items if id(item) not in skipped]


def empty(shape: Shape, pad_id: int) -> Batch:
  """A batch of padding."""
  columns = (shape.rows, shape.tokens)
  entries = (shape.rows, shape.targets)

  def ints(size):
    return np.zeros(size, np.int32)

  def floats():
    return np.zeros(entries)  # f64 where JAX keeps it

  return Batch(
    tokens=np.full(columns, pad_id, np.int32),
    positions=ints(columns),
    segment_ids=ints(columns),
    branch_ids=ints(columns),
    sources=ints(entries),
    targets=ints(entries),
    weights=floats(),
    advantages=floats(),
    rewards=floats(),
    behaviour_logprobs=floats(),
  )


def _fill(batch: Batch, index: int, row: _Row, weight) -> None:
  column, entry = 0, 0
  for number, (prompt, members) in enumerate(row.segments, start=1):
    end = column + len(prompt)
    batch.tokens[index, column:end] = prompt
    batch.positions[index, column:end] = np.arange(len(prompt))
    batch.segment_ids[index, column:end] = number
    last_of_prompt, column = end - 1, end
    for branch, item in enumerate(members, start=1):
      trajectory = item.trajectory
      length = branch_length(trajectory)
      here = slice(column, column + length)
      batch.tokens[index, here] = trajectory.tokens[:length]
      batch.positions[index, here] = len(prompt) + np.arange(length)
      batch.segment_ids[index, here] = number
      batch.branch_ids[index, here] = branch

      sampled = np.flatnonzero(trajectory.loss_mask)
      there = slice(entry, entry + len(sampled))
      batch.sources[index, there] = np.where(
        sampled == 0, last_of_prompt, column + sampled - 1
      )
      batch.targets[index, there] = trajectory.tokens[sampled]
      batch.weights[index, there] = weight(len(sampled))
      batch.advantages[index, there] = item.advantage
      batch.rewards[index, there] = item.reward
      batch.behaviour_logprobs[index, there] = trajectory.behaviour_logprobs[
        sampled
      ]
      column, entry = column + length, entry + len(sampled)
