"""Who worked when: spans of host time of the rollout, learner and environments.

The driver records a span for each thing it waits for or launches; what lies
between the spans of a track is idle time, the figure that streaming is about:

  idle = (end - start) - |union of the spans of the track, clipped to it|

A timeline is saved as a Chrome trace (opens in Perfetto, ui.perfetto.dev) and
drawn by runs/plots.py. Times are seconds of one monotonic clock, now().
"""

import collections
import contextlib
import dataclasses
import json
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

from thundersync_jax.runs import workdir as workdir_lib

TRACKS = ('rollout', 'learner', 'environment', 'host')
NAMES = (
  'prefill',
  'extend',
  'decode',
  'evict',
  'tool',
  'grading',
  'score',
  'gradient',
  'barrier',
  'publish',
  'checkpoint',
  'evaluate',
)


@dataclasses.dataclass(frozen=True)
class Span:
  """One stretch of work on a track, in seconds of the timeline's clock."""

  track: str
  name: str
  start: float
  end: float
  args: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class StepSpans:
  """The spans recorded from the start of one step to the start of the next.

  Attributes:
    step: the optimizer step.
    start: when it began, in seconds.
    end: when it ended; None while it goes on.
    spans: in the order of their recording.
  """

  step: int
  start: float
  end: float | None = None
  spans: list[Span] = dataclasses.field(default_factory=list)


class Timeline:
  """Records spans of the last steps; every method may be called by any thread.

  Args:
    schedule: 'sync', 'thundersync' or 'async', shown in the pictures.
    keep_steps: how many steps to keep; the spans of older ones are dropped.
  """

  def __init__(self, schedule: str = '', keep_steps: int = 4):
    if keep_steps < 1:
      raise ValueError(f'keep_steps={keep_steps} must be at least 1')
    self.schedule = schedule
    self._steps = collections.deque(maxlen=keep_steps)
    self._lock = threading.Lock()

  def now(self) -> float:
    """Returns seconds of the clock that all spans share."""
    return time.perf_counter()

  def begin_step(self, step: int, start: float | None = None) -> None:
    """Starts a step; spans are kept with the step begun last."""
    start = self.now() if start is None else start
    with self._lock:
      self._steps.append(StepSpans(step, start))

  def end_step(self, end: float | None = None) -> StepSpans:
    """Ends the step begun last and returns it.

    Raises:
      RuntimeError: no step has begun.
    """
    end = self.now() if end is None else end
    with self._lock:
      if not self._steps:
        raise RuntimeError('end_step() needs a begin_step(step) before it')
      self._steps[-1].end = end
      return self._steps[-1]

  def span(
    self, track: str, name: str, start: float, end: float, **args
  ) -> None:
    """Records one span.

    Args:
      track: one of TRACKS.
      name: one of NAMES.
      start: seconds, by now().
      end: seconds, not before start.
      **args: what Perfetto shows beside the span (rows, tokens, prompt_id).

    Raises:
      ValueError: unknown track or name, end before start, or no step begun.
    """
    if track not in TRACKS or name not in NAMES:
      raise ValueError(
        f'span {track}/{name}: tracks are {", ".join(TRACKS)}; names are'
        f' {", ".join(NAMES)}'
      )
    if not start <= end:
      raise ValueError(f'span {track}/{name} ends at {end} before {start}')
    with self._lock:
      if not self._steps:
        raise ValueError(f'span {track}/{name} needs a begin_step(step) first')
      self._steps[-1].spans.append(Span(track, name, start, end, args))

  @contextlib.contextmanager
  def measure(self, track: str, name: str, **args) -> Iterator[None]:
    """Records the time that a with block takes, also when it raises."""
    start = self.now()
    try:
      yield
    finally:
      self.span(track, name, start, self.now(), **args)

  def steps(self) -> list[StepSpans]:
    """Returns the steps kept, oldest first, as they are at this moment."""
    with self._lock:
      return [
        dataclasses.replace(record, spans=list(record.spans))
        for record in self._steps
      ]

  def busy_s(self, track: str, start: float, end: float) -> float:
    """Returns the seconds in [start, end] in which a track did anything.

    Overlapping spans count once. Steps that are no longer kept count as idle.
    """
    spans = [
      (max(span.start, start), min(span.end, end))
      for record in self.steps()
      for span in record.spans
      if span.track == track
    ]
    return union_s([(a, b) for a, b in spans if a < b])

  def idle_s(self, track: str, start: float, end: float) -> float:
    """Returns the seconds in [start, end] in which a track did nothing."""
    return end - start - self.busy_s(track, start, end)

  def save(self, path: str | os.PathLike) -> None:
    """Writes the kept steps as Chrome trace JSON, times in microseconds."""
    workdir_lib.write_atomic(path, json.dumps(self._trace(), default=float))

  def _trace(self) -> dict[str, Any]:
    records = self.steps()
    spans = [
      *(
        Span('step', f'step {record.step}', record.start, record.end)
        for record in records
        if record.end is not None
      ),
      *(span for record in records for span in record.spans),
    ]
    # An environment may have begun before the oldest step that is kept.
    origin = min((span.start for span in spans), default=0.0)
    events = [_metadata('process_name', 1, self.schedule or 'timeline')]
    thread = 0
    for track in ('step', *TRACKS):
      lanes = stack([span for span in spans if span.track == track])
      for lane, held in enumerate(lanes, start=1):
        thread += 1
        label = track if lane == 1 else f'{track} {lane}'
        events.append(_metadata('thread_name', thread, label))
        events += [_event(thread, span, origin) for span in held]
    return {
      'traceEvents': events,
      'displayTimeUnit': 'ms',
      'otherData': {'schedule': self.schedule},
    }


def union_s(intervals: list[tuple[float, float]]) -> float:
  """Returns the length of the union of [start, end] intervals."""
  total, reached = 0.0, float('-inf')
  for start, end in sorted(intervals):
    total += max(0.0, end - max(start, reached))
    reached = max(reached, end)
  return total


def stack(spans: list[Span]) -> list[list[Span]]:
  """Splits spans into the fewest lanes in which none overlap."""
  lanes = []
  for span in sorted(spans, key=lambda span: (span.start, span.end)):
    for lane in lanes:
      if lane[-1].end <= span.start:
        lane.append(span)
        break
    else:
      lanes.append([span])
  return lanes


def _event(thread: int, span: Span, origin: float) -> dict[str, Any]:
  """A complete event ('X') of the trace event format, in microseconds."""
  return {
    'ph': 'X',
    'pid': 1,
    'tid': thread,
    'cat': span.track,
    'name': span.name,
    'ts': round(1e6 * (span.start - origin), 3),
    'dur': round(1e6 * (span.end - span.start), 3),
    'args': span.args,
  }


def _metadata(kind: str, thread: int, name: str) -> dict[str, Any]:
  """A metadata event ('M'): the name of the process or of a thread."""
  # Numbers start at 1: Perfetto takes thread 0 for the idle task of the system.
  return {
    'ph': 'M',
    'pid': 1,
    'tid': thread,
    'name': kind,
    'args': {'name': name},
  }
