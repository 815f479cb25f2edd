"""A recorded run, simulated: what its steps take under any schedule.

Lengths and waits are those of the trace (runs/traces.py), seconds those that
its programs took, and launches are packed as the learner packs them. So the
trace of a synchronous run, with the contention seen in a streamed one, says
what any schedule would have taken.
"""

import dataclasses
import statistics
from typing import Any

import numpy as np

from thundersync_jax.learner import packing
from thundersync_jax.runs import traces
from thundersync_jax.streaming import (
  simulate,
  virtual_engine,
  virtual_learner,
)
from thundersync_jax.types import Item, Trajectory, Turn


def play(
  trace: traces.Trace, schedule: simulate.Schedule, scale: float = 1.0
) -> list[simulate.StepReport]:
  """Plays a trace under a schedule, its waits multiplied by scale."""
  settings, costs = trace.settings, trace.costs
  engine = virtual_engine.Settings(
    slots=settings['slots'],
    chunk=settings['chunk'],
    decode_s=costs.decode_s,
    prefill_s=costs.prefill_s,
    extend_s=costs.extend_s,
    extend_rows=settings['extend_rows'],
    extend_tokens=settings['extend_tokens'],
    workers=settings['workers'],
  )
  learner = virtual_learner.Learner(
    packer(costs.gradients),
    costs.barrier_s,
    costs.publish_s,
    max_open_groups=settings['max_open_groups'],
    contention=costs.contention,
  )
  trajectories = [scaled(t, scale) for t in trace.trajectories]
  return simulate.simulate(trajectories, engine, learner, schedule)


def schedules(trace: traces.Trace) -> dict[str, simulate.Schedule]:
  """Those that the trace of a synchronous run foretells, by name.

  A trace with a teacher holds no seconds of the programs of single turns.
  """
  if trace.settings['rewards']:
    return simulate.SCHEDULES
  known = simulate.DISTILLED.items()
  return {name: s for name, s in known if s.granularity != 'turn'}


def scaled(
  times: traces.TrajectoryTimes, scale: float
) -> traces.TrajectoryTimes:
  """The trajectory with other waits."""
  turns = tuple(
    dataclasses.replace(turn, wait_s=scale * turn.wait_s)
    for turn in times.turns
  )
  return dataclasses.replace(times, turns=turns)


def packer(
  gradients: tuple[traces.GradientCost, ...],
) -> virtual_learner.Packer:
  """Launches as learner/packing.py makes them, with measured seconds."""
  shapes = {
    packing.Shape(g.rows, g.tokens, g.targets): g.seconds for g in gradients
  }

  def pack(work):
    items = {id(item): Item(_lengths(item.trajectory)) for item in work.items}
    shape, _, left = packing.choose(list(items.values()), list(shapes))
    skipped = {id(item) for item in left}
    taken = [i for i in work.items if id(items[id(i)]) not in skipped]
    return shapes[shape], taken

  return pack


def _lengths(played: virtual_learner.Played) -> Trajectory:
  """A trajectory of the right lengths and no content."""
  turns = []
  for turn in played.times.turns:
    size = turn.sampled + turn.observed
    zeros = np.zeros(size, np.int32)
    mask = np.arange(size) < turn.sampled
    turns.append(Turn(zeros, mask, zeros.astype(np.float32), zeros, 'length'))
  prompt = np.zeros(played.times.prompt_tokens, np.int32)
  return Trajectory(
    played.prompt_id, played.member, played.step, prompt, tuple(turns)
  )


def predict(trace: traces.Trace) -> list[dict[str, Any]]:
  """A line a schedule that was measured beside the trace: seconds of a step.

  Both figures are medians over the timed steps. What the trace does not
  foretell (see schedules) has no line.
  """
  known = schedules(trace)
  timed = [step.step for step in trace.steps]
  lines = []
  for name, measured in trace.measured.items():
    if name not in known:
      continue
    steps = play(trace, known[name])
    predicted = statistics.median(steps[i].seconds for i in timed)
    measured_s = statistics.median(measured)
    lines.append(
      {
        'schedule': name,
        'measured_s': measured_s,
        'predicted_s': predicted,
        'error': predicted / measured_s - 1,
      }
    )
  return lines
