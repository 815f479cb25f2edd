"""What a run did, as numbers that a simulation can play again.

A trace holds no token and no weight: of each trajectory the lengths of its
turns and the seconds that its environment took, of the devices the seconds of
their programs, of the steps what they took in all. It is written as JSON lines,
the first of which describes the run:

  {"kind": "run", "schedule": ..., "settings": {...}, "costs": {...}}
  {"kind": "step", "step": 3, "seconds": 2.1, ...}
  {"kind": "trajectory", "step": 3, "prompt_id": 24, "member": 0, ...}
"""

import collections
import dataclasses
import json
import os
import pathlib
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from absl import logging

from thundersync_jax.runs import timeline as timeline_lib
from thundersync_jax.types import Trajectory

NAME = 'trace.jsonl'
# Spans of an environment at work on a turn.
_WAITS = ('tool', 'grading')


@dataclasses.dataclass(frozen=True)
class TurnTimes:
  """One turn.

  Attributes:
    sampled: tokens of the model.
    observed: tokens of the observation that the next turn begins with.
    wait_s: that the environment took: a tool, or at the last turn the reward.
  """

  sampled: int
  observed: int
  wait_s: float


@dataclasses.dataclass(frozen=True)
class TrajectoryTimes:
  """One trajectory.

  Attributes:
    step, prompt_id, member: see types.Trajectory.
    prompt_tokens: length of the prompt.
    turns: its turns.
    reward: what it earned.
    leaves_early: the last turn was known to be the last when it ended, so that
      the slot was free and the score gradient possible before the reward.
  """

  step: int
  prompt_id: int
  member: int
  prompt_tokens: int
  turns: tuple[TurnTimes, ...]
  reward: float
  leaves_early: bool = False

  @property
  def sampled(self) -> int:
    return sum(turn.sampled for turn in self.turns)

  @property
  def tokens(self) -> int:
    """All tokens, the prompt included."""
    observed = sum(turn.observed for turn in self.turns)
    return self.prompt_tokens + self.sampled + observed


@dataclasses.dataclass(frozen=True)
class GradientCost:
  """Seconds of a gradient program: of one shape, with so many sinks."""

  rows: int
  tokens: int  # of a row
  targets: int  # of a row
  sinks: int
  seconds: float


@dataclasses.dataclass(frozen=True)
class Costs:
  """Seconds of the devices' programs.

  Attributes:
    decode_s: one decode step of all slots.
    prefill_s, extend_s: one program.
    barrier_s, publish_s: a step.
    gradients: of each shape and number of sinks, and what a teacher takes of
      the learner's time before them.
    contention: seconds that gradients take longer for each second of a rollout
      program beside them.
  """

  decode_s: float
  prefill_s: float
  extend_s: float
  barrier_s: float
  publish_s: float
  gradients: tuple[GradientCost, ...] = ()
  contention: float = 0.0


@dataclasses.dataclass(frozen=True)
class StepTimes:
  """One step as it was measured; the shares are of its seconds."""

  step: int
  seconds: float
  rollout_idle: float
  learner_idle: float


@dataclasses.dataclass(frozen=True)
class Trace:
  """A run.

  Attributes:
    schedule, granularity: of the run.
    settings: numbers by name (slots, chunk, ...).
    costs: of the devices' programs.
    steps: those that were timed.
    trajectories: of all steps.
    measured: schedule -> seconds of the timed steps, where others were run
      beside this one.
  """

  schedule: str
  granularity: str
  settings: dict[str, Any]
  costs: Costs
  steps: tuple[StepTimes, ...]
  trajectories: tuple[TrajectoryTimes, ...]
  measured: dict[str, list[float]] = dataclasses.field(default_factory=dict)


class Recorder:
  """Collects the steps of a run.

  Args:
    max_turns: after which a trajectory leaves without being asked.
  """

  def __init__(self, max_turns: int):
    self._max_turns = max_turns
    self._spans: list[timeline_lib.Span] = []
    self._waits: dict[tuple[int, int, int], float] = {}
    self._decode_steps = 0
    self.steps: list[StepTimes] = []
    self.trajectories: list[TrajectoryTimes] = []

  def add(
    self,
    record: timeline_lib.StepSpans,
    trajectories: Iterable[Trajectory],
    values: dict[str, float],
    slots: int,
    timed: bool = True,
  ) -> None:
    """Adds a step.

    Args:
      record: its spans.
      trajectories: that its gradient was made of.
      values: its metrics.
      slots: rows of a decode step.
      timed: false for a warm-up, of which only the trajectories are kept.
    """
    for span in record.spans:
      if span.name in _WAITS and 'turn' in span.args:
        key = (span.args['prompt_id'], span.args['member'], span.args['turn'])
        self._waits[key] = span.end - span.start
    self.trajectories += [self._times(t) for t in trajectories]
    if not timed:
      return
    self._spans += record.spans
    used = values.get('rollout/slots_used_fraction', 0.0)
    if used:
      rows = values['rollout/tokens'] / used
      self._decode_steps += round(rows / slots)
    seconds = record.end - record.start
    self.steps.append(
      StepTimes(
        record.step,
        seconds,
        values['time/rollout_idle_s'] / seconds,
        values['time/learner_idle_s'] / seconds,
      )
    )

  def contention(self, alone: Costs) -> float:
    """What gradients of these steps lost to rollout programs beside them.

    Args:
      alone: seconds of programs where no other ran.

    Returns:
      See Costs.

    Raises:
      KeyError: a shape of which `alone` knows no seconds.
    """
    seconds = {
      (g.rows, g.tokens, g.targets, g.sinks): g.seconds for g in alone.gradients
    }
    learner, rollout, expected = [], [], 0.0
    for span in self._spans:
      if span.track == 'rollout':
        rollout.append((span.start, span.end))
      elif span.name in ('score', 'gradient') and span.track == 'learner':
        learner.append((span.start, span.end))
        if span.name == 'gradient':
          expected += seconds[_shape(span)]
    union = timeline_lib.union_s
    beside = union(learner) + union(rollout) - union(learner + rollout)
    lost = (union(learner) - expected) / beside if beside else 0.0
    if lost > 1.0:
      logging.warning(
        'gradients lost %.1f s for each second of a rollout program beside '
        'them: above 1 something else disturbed them, so 1 is taken',
        lost,
      )
    return min(max(lost, 0.0), 1.0)

  def trace(
    self, schedule: str, granularity: str, settings: dict[str, Any]
  ) -> Trace:
    """What has been added so far."""
    return Trace(
      schedule,
      granularity,
      settings,
      costs(self._spans, self._decode_steps, len(self.steps)),
      tuple(self.steps),
      tuple(self.trajectories),
    )

  def _times(self, t: Trajectory) -> TrajectoryTimes:
    turns = []
    for number, turn in enumerate(t.turns, start=1):
      sampled = int(turn.loss_mask.sum())
      wait_s = self._waits.pop((t.prompt_id, t.member, number), 0.0)
      turns.append(TurnTimes(sampled, len(turn.tokens) - sampled, wait_s))
    cut = t.turns[-1].finish_reason in ('context', 'trajectory')
    return TrajectoryTimes(
      t.step,
      t.prompt_id,
      t.member,
      len(t.prompt_tokens),
      tuple(turns),
      t.reward,
      cut or len(turns) >= self._max_turns,
    )


def costs(
  spans: Sequence[timeline_lib.Span], decode_steps: int, steps: int
) -> Costs:
  """Seconds of the programs behind the spans of some steps.

  Means: the driver sees the ends of programs when it looks, often of several at
  once, so that only sums of spans are right. Decode chunks may end early: their
  sum is divided by the steps that they decoded.
  """
  by_name = collections.defaultdict(list)
  gradients = collections.defaultdict(lambda: collections.defaultdict(list))
  for span in spans:
    took = span.end - span.start
    by_name[span.name].append(took)
    scores = span.name == 'score' and span.track == 'learner'
    if (scores or span.name == 'gradient') and 'rows' in span.args:
      gradients[_shape(span)][span.name].append(took)
  return Costs(
    decode_s=sum(by_name['decode']) / max(decode_steps, 1),
    prefill_s=_mean(by_name['prefill']),
    extend_s=_mean(by_name['extend']),
    barrier_s=sum(by_name['barrier']) / steps,
    publish_s=sum(by_name['publish']) / steps,
    gradients=tuple(
      GradientCost(*shape, sum(map(_mean, took.values())))
      for shape, took in sorted(gradients.items())
    ),
  )


def _shape(span: timeline_lib.Span) -> tuple[int, ...]:
  """Rows, tokens, targets and sinks of a gradient program."""
  return tuple(span.args[k] for k in ('rows', 'tokens', 'targets', 'sinks'))


def write(trace: Trace, path: str | os.PathLike) -> None:
  """Writes a trace as JSON lines, floats with 6 digits."""
  run = {
    'kind': 'run',
    'schedule': trace.schedule,
    'granularity': trace.granularity,
    'settings': trace.settings,
    'costs': dataclasses.asdict(trace.costs),
    'measured': trace.measured,
  }
  lines = [run]
  lines += [{'kind': 'step'} | dataclasses.asdict(s) for s in trace.steps]
  lines += [
    {'kind': 'trajectory'}
    | dataclasses.asdict(t)
    | {'turns': [dataclasses.astuple(turn) for turn in t.turns]}
    for t in trace.trajectories
  ]
  text = ''.join(json.dumps(_rounded(line)) + '\n' for line in lines)
  pathlib.Path(path).write_text(text, encoding='utf-8')


def read(path: str | os.PathLike) -> Trace:
  """Reads what `write` wrote.

  Raises:
    ValueError: the file holds no run, or a line of another kind.
  """
  run, steps, trajectories = None, [], []
  text = pathlib.Path(path).read_text(encoding='utf-8')
  for number, line in enumerate(text.splitlines(), start=1):
    fields = json.loads(line)
    kind = fields.pop('kind', None)
    if kind == 'run':
      run = fields
    elif kind == 'step':
      steps.append(StepTimes(**fields))
    elif kind == 'trajectory':
      turns = tuple(TurnTimes(*turn) for turn in fields.pop('turns'))
      trajectories.append(TrajectoryTimes(turns=turns, **fields))
    else:
      raise ValueError(
        f'{path}:{number}: kind={kind!r} is none of run, step, trajectory'
      )
  if run is None:
    raise ValueError(f'{path} has no line of kind run: it is no trace')
  gradients = run['costs'].pop('gradients')
  return Trace(
    run['schedule'],
    run['granularity'],
    run['settings'],
    Costs(
      gradients=tuple(GradientCost(**g) for g in gradients), **run['costs']
    ),
    tuple(steps),
    tuple(trajectories),
    run['measured'],
  )


def _mean(values: Sequence[float]) -> float:
  return statistics.fmean(values) if values else 0.0


def _rounded(value: Any) -> Any:
  if isinstance(value, float):
    return float(f'{value:.6g}')
  if isinstance(value, dict):
    return {key: _rounded(v) for key, v in value.items()}
  if isinstance(value, (list, tuple)):
    return [_rounded(v) for v in value]
  return value
