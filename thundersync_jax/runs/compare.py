"""Two runs side by side: the tokens that they sampled, and their parameters.

  relative difference of a leaf   |a - b| / |b|      (2-norms)
  of its update                   |a - b| / |b - start|

Runs that must be equal sample equal tokens, and differ in parameters by what
the order of f32 sums leaves.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from thundersync_jax.types import Trajectory

Tree = Any
Key = tuple[int, int, int]  # step, prompt_id, member


class TokenRecord:
  """Observer of a run: what each trajectory of its gradients sampled.

  Attributes:
    tokens: (step, prompt_id, member) -> i32[n].
  """

  def __init__(self):
    self.tokens: dict[Key, np.ndarray] = {}

  def __call__(self, step: int, trajectories: Sequence[Trajectory]) -> None:
    for t in trajectories:
      self.tokens[step, t.prompt_id, t.member] = t.tokens[t.loss_mask]

  @property
  def count(self) -> int:
    """Sampled tokens."""
    return sum(map(len, self.tokens.values()))


@dataclasses.dataclass(frozen=True)
class Difference:
  """The leaf that differs most, by its path, and by how much."""

  leaf: str
  relative: float


def unequal_tokens(a: TokenRecord, b: TokenRecord) -> list[Key]:
  """Trajectories that only one run has, or whose tokens differ."""
  keys = a.tokens.keys() | b.tokens.keys()
  nothing = np.full(1, -1)  # no token
  return sorted(
    key
    for key in keys
    if not np.array_equal(a.tokens.get(key, nothing), b.tokens.get(key, ()))
  )


def largest_difference(
  a: Tree, b: Tree, start: Tree | None = None
) -> Difference:
  """The largest relative difference of a leaf of `a` from that of `b`.

  Args:
    a, b: trees of arrays, of one structure.
    start: divide by the norm of b - start instead of that of b.

  Returns:
    Infinite where the divisor is 0 and the difference is not.
  """
  paths, leaves = zip(*jax.tree_util.tree_leaves_with_path(b), strict=True)
  starts = [0.0] * len(leaves) if start is None else jax.tree.leaves(start)
  found = []
  for path, x, y, z in zip(
    paths, jax.tree.leaves(a), leaves, starts, strict=True
  ):
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    name = jax.tree_util.keystr(path, simple=True, separator='/')
    found.append(Difference(name, _ratio(x - y, y - z)))
  return max(found, key=lambda d: d.relative)


def _ratio(numerator: np.ndarray, denominator: np.ndarray) -> float:
  top, bottom = np.linalg.norm(numerator), np.linalg.norm(denominator)
  if bottom == 0:
    return 0.0 if top == 0 else float('inf')
  return float(top / bottom)


@dataclasses.dataclass(frozen=True)
class Finished:
  """A run that has ended: its tokens, parameters and summary."""

  record: TokenRecord
  params: Tree
  summary: dict[str, Any]


def row(run: Finished, reference: Finished, start: Tree) -> dict[str, Any]:
  """What a run did, and how it differs from `reference`.

  Args:
    run, reference: of one config but for the schedule.
    start: the parameters that both started from.
  """
  difference = largest_difference(run.params, reference.params)
  update = largest_difference(run.params, reference.params, start)
  summary = run.summary
  step_s = summary['time/step_s']
  return {
    'schedule': summary['schedule'],
    'granularity': summary['granularity'],
    'trajectories': len(run.record.tokens),
    'unequal': len(unequal_tokens(run.record, reference.record)),
    'difference': difference.relative,
    'leaf': difference.leaf,
    'update_difference': update.relative,
    'open_groups': summary['queue/open_groups'],
    'staleness': summary['staleness/max_steps'],
    'step_s': step_s,
    'rollout_idle': summary['time/rollout_idle_s'] / step_s,
    'learner_idle': summary['time/learner_idle_s'] / step_s,
  }


def verdict(rows: Sequence[dict[str, Any]], tolerance: float) -> dict[str, Any]:
  """Whether the synchronous runs among rows of `row` equal the first one.

  Args:
    rows: of one config; the reference first.
    tolerance: largest relative difference of a leaf.

  Returns:
    'equal' and the largest figures; async runs add their staleness only.
  """
  exact = [r for r in rows if r['schedule'] != 'async']
  worst = max(exact, key=lambda r: r['difference'])
  unequal = sum(r['unequal'] for r in exact)
  trained = min(r['trajectories'] for r in exact)
  return {
    'equal': trained > 0 and not unequal and worst['difference'] <= tolerance,
    'unequal_trajectories': unequal,
    'largest_difference': worst['difference'],
    'leaf': worst['leaf'],
    'largest_update_difference': max(r['update_difference'] for r in exact),
    'tolerance': tolerance,
    'async_staleness': max(
      (r['staleness'] for r in rows if r['schedule'] == 'async'), default=None
    ),
    'runs': list(rows),
  }


def table(rows: Sequence[dict[str, Any]]) -> str:
  """Rows of equal keys as text in columns."""
  heads = list(rows[0])
  lines = [heads, *([_cell(row[h]) for h in heads] for row in rows)]
  widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
  return '\n'.join(
    '  '.join(cell.ljust(w) for cell, w in zip(line, widths, strict=True))
    for line in lines
  )


def _cell(value: Any) -> str:
  return f'{value:.3g}' if isinstance(value, float) else str(value)
