"""Pictures of a run: timeline.png of one step, curve.png of all of them."""

import os
import pathlib

import numpy as np
from matplotlib import figure as figure_lib
from matplotlib import lines, patches, ticker

from thundersync_jax.runs import metrics as metrics_lib
from thundersync_jax.runs import timeline as timeline_lib

# Blues generate, oranges learn, the rest serves both.
COLOURS = {
  'prefill': '#1b4f8a',
  'extend': '#2f7fc1',
  'decode': '#8cc1e8',
  'evict': '#5b7f95',
  'tool': '#d9a5d0',
  'grading': '#8f6bb3',
  'score': '#f7c27d',
  'gradient': '#f28e2b',
  'barrier': '#c8402f',
  'publish': '#2e9e6b',
  'checkpoint': '#7a5c43',
  'evaluate': '#b5a642',
}
IDLE = '#ececec'
INK = '#333333'
_GAP = 0.25  # between two tracks, in heights of the rollout track


def plot_timeline(
  timeline: timeline_lib.Timeline,
  path: str | os.PathLike,
  step: int | None = None,
) -> None:
  """Draws who worked when in one step; grey is idle time.

  Args:
    timeline: what was recorded.
    path: PNG file to write.
    step: a complete step that the timeline keeps; the newest when None.

  Raises:
    ValueError: that step is not there.
  """
  record = _complete_step(timeline, step)
  length = record.end - record.start
  # A span of the step before or after shows where it reaches into this one.
  spans = [
    span
    for other in timeline.steps()
    for span in other.spans
    if span.end > record.start and span.start < record.end
  ]
  tracks = [t for t in timeline_lib.TRACKS if any(s.track == t for s in spans)]
  scale, unit = (1.0, 's') if length >= 1.0 else (1e3, 'ms')

  heights = [_height(track, spans) for track in tracks]
  figure = figure_lib.Figure(figsize=(12, 1.2 + 0.8 * sum(heights)), dpi=150)
  axes = figure.add_subplot()
  top = 0.0
  centres = []
  for track, height in zip(tracks, heights, strict=True):
    held = [span for span in spans if span.track == track]
    _draw_track(axes, top, height - _GAP, held, record, scale)
    centres.append(top + (height - _GAP) / 2)
    top += height
  axes.set_yticks(centres, [_label(timeline, t, record) for t in tracks])
  axes.set_ylim(top, -_GAP)
  axes.set_xlim(0, scale * length)
  axes.set_xlabel(f'time in the step [{unit}]', color=INK)
  name = f'{timeline.schedule}, ' if timeline.schedule else ''
  axes.set_title(
    f'{name}step {record.step}: {scale * length:.3g} {unit}',
    loc='left',
    color=INK,
    fontsize=13,
    pad=30,
  )
  _add_names(axes, spans)
  plain(axes, grid='x')
  axes.tick_params(axis='y', length=0)
  axes.spines['left'].set_visible(False)
  figure.savefig(path, format='png', bbox_inches='tight')


def plot_curve(
  workdir: str | os.PathLike, path: str | os.PathLike | None = None
) -> pathlib.Path:
  """Draws training reward and held-out accuracy over the steps of a run.

  The pale line is the mean reward of each step, the strong one its running
  mean over a tenth of the run. Accuracy has an axis of its own when rewards
  leave [0, 1].

  Args:
    workdir: a run's directory with metrics.jsonl.
    path: PNG file to write, curve.png in the workdir when None.

  Returns:
    The path written.

  Raises:
    ValueError: metrics.jsonl holds neither rewards nor accuracies.
  """
  source = pathlib.Path(workdir) / 'metrics.jsonl'
  path = source.with_name('curve.png') if path is None else pathlib.Path(path)
  records = metrics_lib.read(source)
  rewards = _series(records, 'reward/mean')
  accuracies = _series(records, 'eval/accuracy')
  if not len(rewards) + len(accuracies):
    raise ValueError(f'{source} holds no reward/mean and no eval/accuracy')

  figure = figure_lib.Figure(figsize=(8, 4.5), dpi=150)
  axes = figure.add_subplot()
  axes.set_xlabel('step', color=INK)
  axes.xaxis.set_major_locator(
    ticker.MaxNLocator(integer=True, steps=[1, 2, 5, 10])
  )
  axes.set_title(
    pathlib.Path(workdir).resolve().name, loc='left', color=INK, fontsize=12
  )
  plain(axes, grid='y')
  shared = not len(rewards) or np.all(
    (rewards[:, 1] >= 0) & (rewards[:, 1] <= 1)
  )
  right = axes if shared else axes.twinx()
  handles = _draw_rewards(axes, rewards) if len(rewards) else []
  if len(accuracies):
    handles += _draw_accuracies(right, accuracies)
  axes.set_ylabel('reward, accuracy' if shared else 'reward', color=INK)
  for shown in {axes, right} if shared else {right}:
    shown.set_ylim(-0.03, 1.05)
  if not shared:
    right.set_ylabel('held-out accuracy', color=INK)
    plain(right, grid=None)
  axes.legend(handles=handles, frameon=False, loc='best', labelcolor=INK)
  figure.savefig(path, format='png', bbox_inches='tight')
  return path


def smooth(
  values: np.ndarray,  # f64[n]
  window: int,
) -> np.ndarray:  # f64[n]
  """Centred running mean over `window` values, fewer at the two ends."""
  n, half = len(values), window // 2
  sums = np.concatenate([[0.0], np.cumsum(values)])
  first = np.maximum(np.arange(n) - half, 0)
  last = np.minimum(np.arange(n) + half + 1, n)
  return (sums[last] - sums[first]) / (last - first)


def _complete_step(
  timeline: timeline_lib.Timeline, step: int | None
) -> timeline_lib.StepSpans:
  complete = [record for record in timeline.steps() if record.end is not None]
  for record in reversed(complete):
    if step is None or record.step == step:
      return record
  raise ValueError(
    f'step={step} is not among the complete steps kept,'
    f' {[record.step for record in complete]}'
  )


def _height(track: str, spans: list[timeline_lib.Span]) -> float:
  """Room of a track: environments by how many run at once, the host little."""
  if track == 'host':
    return 0.35 + _GAP
  if track != 'environment':
    return 1.0
  lanes = timeline_lib.stack([span for span in spans if span.track == track])
  return min(max(0.1 * len(lanes), 0.5), 2.0) + _GAP


def _label(
  timeline: timeline_lib.Timeline, track: str, record: timeline_lib.StepSpans
) -> str:
  """The name of a track, and how much of the step it was idle."""
  if track == 'host':
    return track
  idle_s = timeline.idle_s(track, record.start, record.end)
  return f'{track}\nidle {idle_s / (record.end - record.start):.0%}'


def _draw_track(
  axes,
  top: float,
  height: float,
  spans: list[timeline_lib.Span],
  record: timeline_lib.StepSpans,
  scale: float,
) -> None:
  """Draws the spans of one track, overlapping ones in lanes below another."""
  step = (0, scale * (record.end - record.start))
  axes.broken_barh([step], (top, height), facecolors=IDLE)
  lanes = timeline_lib.stack(spans)
  lane_height = height / len(lanes)
  thinnest = (record.end - record.start) / 500  # what the eye still finds
  for lane, held in enumerate(lanes):
    for name in dict.fromkeys(span.name for span in held):
      widths = [max(s.end - s.start, thinnest) for s in held if s.name == name]
      starts = [s.start - record.start for s in held if s.name == name]
      bars = [
        (scale * start, scale * width)
        for start, width in zip(starts, widths, strict=True)
      ]
      axes.broken_barh(
        bars,
        (top + lane * lane_height, lane_height),
        facecolors=COLOURS[name],
        edgecolors='white',
        # Edges tell neighbours apart; around very thin bars they hide them.
        linewidth=0.4 if min(widths) > thinnest else 0.0,
      )


def _add_names(axes, spans: list[timeline_lib.Span]) -> None:
  """The legend: the names that occur, in the order of a step, and idle."""
  present = {span.name for span in spans}
  handles = [
    patches.Patch(color=COLOURS[name], label=name)
    for name in timeline_lib.NAMES
    if name in present
  ]
  handles.append(patches.Patch(color=IDLE, label='idle'))
  axes.legend(
    handles=handles,
    ncols=len(handles),
    frameon=False,
    loc='lower left',
    bbox_to_anchor=(0.0, 1.0),
    borderaxespad=0.3,
    borderpad=0.0,
    handlelength=1.0,
    handleheight=1.0,
    columnspacing=1.2,
    handletextpad=0.5,
    labelcolor=INK,
    fontsize=9,
  )


def _draw_rewards(axes, rewards: np.ndarray) -> list[lines.Line2D]:
  """Draws the reward of each step and its running mean."""
  steps, values = rewards.T
  window = max(1, len(values) // 10)
  colour = COLOURS['extend']
  axes.plot(steps, values, color=colour, alpha=0.3, linewidth=1)
  return axes.plot(
    steps,
    smooth(values, window),
    color=colour,
    linewidth=2,
    label='training reward',
  )


def _draw_accuracies(axes, accuracies: np.ndarray) -> list[lines.Line2D]:
  """Draws the evaluations and writes the first and the last beside them."""
  for step, value in accuracies[list({0, len(accuracies) - 1})]:
    axes.annotate(
      f'{value:.2f}',
      (step, value),
      xytext=(0, 7),
      textcoords='offset points',
      ha='center',
      color=COLOURS['barrier'],
      fontsize=10,
      fontweight='bold',
    )
  return axes.plot(
    *accuracies.T,
    color=COLOURS['barrier'],
    marker='o',
    markersize=7,
    markeredgecolor='white',
    linewidth=1,
    linestyle=':',
    label='held-out accuracy',
  )


def _series(records: list[dict], name: str) -> np.ndarray:
  """f64[n, 2] of (step, value), where a record has a finite value."""
  pairs = [(r['step'], r[name]) for r in records if r.get(name) is not None]
  return np.array(pairs, np.float64).reshape(-1, 2)


def plain(axes, grid: str | None) -> None:
  """Quiet axes: no box, pale grid behind the data."""
  for side in ('top', 'right'):
    axes.spines[side].set_visible(False)
  for spine in axes.spines.values():
    spine.set_color('#999999')
  axes.tick_params(colors=INK)
  axes.set_axisbelow(True)
  if grid:
    axes.grid(axis=grid, color='#dddddd', linewidth=0.6)
