"""Trajectories into rows of fixed shapes, each group's prompt once a row.

  row   [prompt a | y1 | y2 | ...] [prompt b | y1 | ...] padding

Members of a group share the prompt's tokens and never see each other; their
positions restart at the prompt's length (shared-prompt mask, arXiv 2511.18871).
A trajectory that forked is several such pieces, each behind its own context.
The last sampled token of a branch predicts nothing, so it is a target only.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from thundersync_jax.types import Batch, Item, Row


@dataclasses.dataclass(frozen=True, order=True)
class Shape:
  """Sizes of a packed batch: B rows of T tokens with N loss entries each."""

  rows: int
  tokens: int
  targets: int


@dataclasses.dataclass(frozen=True)
class Piece:
  """One row of a trajectory; most trajectories have no other."""

  item: Item
  row: Row

  @property
  def length(self) -> int:
    """Columns that it needs after its prompt."""
    return self.row.last_sampled


@dataclasses.dataclass
class _PackedRow:
  """A row under construction; `tokens` and `targets` count what is used."""

  tokens: int = 0
  targets: int = 0
  segments: list[tuple[np.ndarray, list[Piece]]] = dataclasses.field(
    default_factory=list
  )


def place(
  items: Sequence[Item], shape: Shape
) -> tuple[list[_PackedRow], list[Item]]:
  """First fit, pieces with one prompt together.

  All rows of a trajectory are placed, or none.

  Returns:
    The rows, and the items that did not fit.
  """
  rows: list[_PackedRow] = []
  left: dict[int, Item] = {}
  by_prompt: dict[tuple[int, bytes], list[Piece]] = {}
  for item in items:
    for row in item.trajectory.rows:
      key = item.trajectory.prompt_id, row.prompt_tokens.tobytes()
      by_prompt.setdefault(key, []).append(Piece(item, row))
  for pieces in by_prompt.values():
    rest = pieces
    while rest := [p for p in rest if id(p.item) not in left]:
      row, taken = _place_group(rows, rest, shape)
      if row is None:
        left[id(rest[0].item)] = rest[0].item
        _withdraw(rows, rest[0].item)
      rest = rest[taken:]
  return rows, list(left.values())


def _place_group(rows, pieces, shape) -> tuple[_PackedRow | None, int]:
  """Puts a prompt and as many of its pieces as fit into one row."""
  prompt = pieces[0].row.prompt_tokens
  lengths = [piece.length for piece in pieces]
  targets = [piece.row.num_sampled for piece in pieces]
  whole = len(prompt) + sum(lengths)
  row = _row_for(rows, whole, sum(targets), shape)
  row = row or _row_for(rows, len(prompt) + lengths[0], targets[0], shape)
  if row is None:
    return None, 0
  segment = []
  row.segments.append((prompt, segment))
  row.tokens += len(prompt)
  for piece, length, count in zip(pieces, lengths, targets, strict=True):
    if not _fits(row, length, count, shape):
      break
    segment.append(piece)
    row.tokens += length
    row.targets += count
  return row, len(segment)


def _withdraw(rows, item) -> None:
  """Takes out the pieces of an item of which another did not fit."""
  for row in rows:
    kept = []
    for prompt, pieces in row.segments:
      for piece in pieces:
        if piece.item is item:
          row.tokens -= piece.length
          row.targets -= piece.row.num_sampled
      others = [piece for piece in pieces if piece.item is not item]
      if others:
        kept.append((prompt, others))
      else:
        row.tokens -= len(prompt)
    row.segments = kept


def _fits(row: _PackedRow, tokens: int, targets: int, shape: Shape) -> bool:
  return (
    row.tokens + tokens <= shape.tokens
    and row.targets + targets <= shape.targets
  )


def _row_for(rows, tokens, targets, shape) -> _PackedRow | None:
  for row in rows:
    if _fits(row, tokens, targets, shape):
      return row
  if len(rows) < shape.rows and _fits(_PackedRow(), tokens, targets, shape):
    rows.append(_PackedRow())
    return rows[-1]
  return None


def choose(
  items: Sequence[Item], shapes: Sequence[Shape]
) -> tuple[Shape, list[_PackedRow], list[Item]]:
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
    need = [len(row.prompt_tokens) + row.last_sampled for row in first.rows]
    raise ValueError(
      f'a trajectory of {sum(need)} tokens with {first.num_sampled} loss '
      f'entries in {len(need)} rows fits none of the shapes {list(shapes)}: '
      'raise row_tokens, row_targets or rows'
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


def _fill(batch: Batch, index: int, row: _PackedRow, weight) -> None:
  column, entry = 0, 0
  for number, (prompt, pieces) in enumerate(row.segments, start=1):
    end = column + len(prompt)
    batch.tokens[index, column:end] = prompt
    batch.positions[index, column:end] = np.arange(len(prompt))
    batch.segment_ids[index, column:end] = number
    last_of_prompt, column = end - 1, end
    for branch, piece in enumerate(pieces, start=1):
      item, part, length = piece.item, piece.row, piece.length
      here = slice(column, column + length)
      batch.tokens[index, here] = part.tokens[:length]
      batch.positions[index, here] = len(prompt) + np.arange(length)
      batch.segment_ids[index, here] = number
      batch.branch_ids[index, here] = branch

      sampled = np.flatnonzero(part.loss_mask)
      there = slice(entry, entry + len(sampled))
      batch.sources[index, there] = np.where(
        sampled == 0, last_of_prompt, column + sampled - 1
      )
      batch.targets[index, there] = part.tokens[sampled]
      # Of the whole trajectory: forks give it no more weight.
      batch.weights[index, there] = weight(item.trajectory.num_sampled)
      batch.advantages[index, there] = item.advantage
      batch.rewards[index, there] = item.reward
      batch.behaviour_logprobs[index, there] = part.behaviour_logprobs[sampled]
      column, entry = column + length, entry + len(sampled)
