"""Pictures of simulated schedules: splits of clusters, granularities."""

import itertools
import os
from collections.abc import Sequence
from typing import Any

from matplotlib import figure as figure_lib

from thundersync_jax.runs import plots

COLOURS = {
  'sync': '#8c8c8c',
  'thundersync': '#f28e2b',
  'thundersync_group': '#b5a642',
  'async': '#2f7fc1',
  'trajectory': '#f28e2b',
  'group': '#b5a642',
  'turn': '#c8402f',
}


def plot_splits(
  rows: Sequence[dict[str, Any]], path: str | os.PathLike
) -> None:
  """Draws step time over the learner's share, a panel a cluster size.

  Args:
    rows: of streaming/studies.splits.
    path: PNG file to write.
  """
  _panels(
    rows,
    path,
    panel='chips',
    title='{} chips',
    line='schedule',
    x='learner_share',
    y='step_s',
    labels=("learner's share of the chips", 'simulated step [s]'),
  )


def plot_regimes(
  rows: Sequence[dict[str, Any]], path: str | os.PathLike
) -> None:
  """Draws the gain over sync, a panel a study.

  Args:
    rows: of streaming/studies.regimes.
    path: PNG file to write.
  """
  _panels(
    rows,
    path,
    panel='study',
    title='{}',
    line='granularity',
    x='value',
    y='faster',
    labels=(None, 'times as fast as sync'),
  )


def _panels(rows, path, *, panel, title, line, x, y, labels) -> None:
  names = list(dict.fromkeys(row[panel] for row in rows))
  figure = figure_lib.Figure(figsize=(4.2 * len(names), 3.6), dpi=150)
  grid = figure.subplots(1, len(names), squeeze=False, sharey=True)
  for axes, name in zip(grid[0], names, strict=True):
    held = [row for row in rows if row[panel] == name]
    for key, group in itertools.groupby(
      sorted(held, key=lambda row: list(COLOURS).index(row[line])),
      key=lambda row: row[line],
    ):
      points = [(row[x], row[y]) for row in group]
      axes.plot(
        *zip(*points, strict=True), color=COLOURS[key], marker='o', label=key
      )
    axes.set_title(title.format(name), loc='left', color=plots.INK)
    axes.set_xlabel(labels[0] or name, color=plots.INK)
    axes.set_ylim(bottom=0)
    plots.plain(axes, grid='y')
  grid[0][0].set_ylabel(labels[1], color=plots.INK)
  grid[0][0].legend(frameon=False, labelcolor=plots.INK)
  figure.tight_layout()
  figure.savefig(path, format='png')
