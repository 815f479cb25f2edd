"""A run without a model: discrete events over the real queue and scheduler.

The driver's loop (train_rl.py) is played with a clock in the place of devices
and environments. Trajectories come from a trace (runs/traces.py) or from a
distribution (workloads.py); what decides their order is the code of training:
TrajectoryQueue, Scheduler and Accumulators, with numbers for gradient trees.

  engine        slots, chunks of decode steps, waits (virtual_engine.py)
  learner       launches one after another, at most max_in_flight waiting
                (virtual_learner.py)
  shared mesh   a gradient starts only while no slot can decode
"""

import collections
import dataclasses
from collections.abc import Iterable

import numpy as np

from thundersync_jax.objectives import advantages as advantages_lib
from thundersync_jax.runs import traces
from thundersync_jax.streaming import accumulators as accumulators_lib
from thundersync_jax.streaming import queue as queue_lib
from thundersync_jax.streaming import scheduler as scheduler_lib
from thundersync_jax.streaming import virtual_engine, virtual_learner

# Distilled tokens have no baseline; any factor but 0 does.
_NO_REWARD = advantages_lib.ESTIMATORS['reinforce_no_baseline']
_FACTOR = 1.0


@dataclasses.dataclass(frozen=True)
class Schedule:
  """When gradients start.

  Attributes:
    granularity: 'trajectory', 'group' or 'batch'; or 'turn', where every turn
      is a gradient of its own.
    max_staleness: steps that rollouts may run ahead.
    rewards: false for distillation: what has ended is final.
  """

  granularity: str
  max_staleness: int = 0
  rewards: bool = True

  def __post_init__(self):
    if self.granularity == 'turn' and self.rewards:
      raise ValueError(
        'granularity=turn with rewards=True: a turn has no reward of its own; '
        'set rewards=False or granularity=trajectory'
      )


SCHEDULES = {
  'sync': Schedule('batch'),
  'thundersync': Schedule('trajectory'),
  'thundersync_group': Schedule('group'),
  'async': Schedule('group', max_staleness=1),
}
DISTILLED = {
  'sync': Schedule('batch', rewards=False),
  'thundersync': Schedule('trajectory', rewards=False),
  'thundersync_turn': Schedule('turn', rewards=False),
  'async': Schedule('trajectory', max_staleness=1, rewards=False),
}


@dataclasses.dataclass(frozen=True)
class StepReport:
  """What a step took.

  Attributes:
    seconds: from the start of the step to the end of its publication.
    rollout_idle, learner_idle: shares of the seconds.
    generation_staleness: learner steps, mean over tokens, from the parameters
      that sampled a token to the end of its trajectory.
    waiting_staleness: from there to its gradient.
    waiting_s: seconds from the end of a trajectory to its launch, mean.
    peak_groups, peak_bytes: of open groups.
    launches: gradient programs.
    released: (seconds since the start of the step, seconds of gradient) of each
      piece of work, for runs/critical_path.py.
    gradient: of the numbers; equal for all schedules.
  """

  seconds: float
  rollout_idle: float
  learner_idle: float
  generation_staleness: float
  waiting_staleness: float
  waiting_s: float
  peak_groups: int
  peak_bytes: int
  launches: int
  released: tuple[tuple[float, float], ...]
  gradient: float


def simulate(
  trajectories: Iterable[traces.TrajectoryTimes],
  engine: virtual_engine.Settings,
  learner: virtual_learner.Learner,
  schedule: Schedule,
) -> list[StepReport]:
  """Plays all steps of a workload.

  Args:
    trajectories: of the steps, in the order of their submission.
    engine: slots, environments and their times.
    learner: launches and their times.
    schedule: when gradients start.

  Raises:
    ValueError: no trajectories, or one without turns.
  """
  by_step = collections.defaultdict(list)
  for t in trajectories:
    if not t.turns:
      raise ValueError(f'prompt_id={t.prompt_id} member={t.member}: no turns')
    by_step[t.step].append(t)
  if not by_step:
    raise ValueError('no trajectories to simulate')
  run = _Run([by_step[s] for s in sorted(by_step)], engine, learner, schedule)
  return [run.step(number) for number in range(len(by_step))]


class _Run:
  """State of a simulated run; its methods are those of the driver."""

  def __init__(self, steps, engine, learner, schedule):
    self._steps, self._learner, self._schedule = steps, learner, schedule
    self._turns = schedule.granularity == 'turn'
    estimator = learner.estimator if schedule.rewards else _NO_REWARD
    self._engine = virtual_engine.Engine(engine)
    self._queue = queue_lib.TrajectoryQueue(estimator.scope)
    self._accumulators = accumulators_lib.Accumulators(
      virtual_learner.numbers(learner.gradient_bytes),
      estimator,
      max_open_groups=learner.max_open_groups,
      max_open_bytes=learner.max_open_bytes,
    )
    self._scheduler = scheduler_lib.Scheduler(
      self._queue,
      self._accumulators,
      estimator,
      granularity='trajectory' if self._turns else schedule.granularity,
    )
    self._now = self._learner_free = 0.0
    self._admitted = 0
    self._flying: collections.deque[float] = collections.deque()  # their ends
    self._busy = virtual_engine.Busy()
    self._unscored: dict[virtual_engine.Live, virtual_learner.Played] = {}
    self._units = collections.Counter()  # prompt_id -> turns put
    self._launched: list[
      tuple[virtual_learner.Played, float, float]
    ] = []  # when, seconds

  def step(self, step: int) -> StepReport:
    """One optimizer step."""
    start, self._launched = self._now, []
    launches, last = 0, len(self._steps) - 1
    while self._admitted <= min(step + self._schedule.max_staleness, last):
      self._admit()
    while True:
      moved = self._advance()
      launched = self._launch(step)
      launches += launched
      if self._scheduler.step_complete(step):
        break
      if not (moved or launched):
        self._sleep()
    self._now = max(self._now, self._learner_free)
    return self._barrier(step, start, launches)

  def _admit(self) -> None:
    groups = collections.defaultdict(list)
    for times in self._steps[self._admitted]:
      groups[times.prompt_id].append(times)
    for prompt_id, group in groups.items():
      units = sum(len(t.turns) for t in group) if self._turns else len(group)
      self._queue.open(self._admitted, [prompt_id], units)
      for member, times in enumerate(group):
        self._engine.submit(virtual_engine.Live(times, self._admitted, member))
    self._admitted += 1

  def _advance(self) -> bool:
    ended, answered = self._engine.harvest(self._now)
    for live in ended:
      if self._turns:
        self._put_turn(live)
      elif live.left:
        self._put(live, scored=not self._schedule.rewards)
    for live in answered:
      early = live.times.leaves_early and not self._schedule.rewards
      if not (self._turns or early):
        self._put(live, scored=True)
    shared = self._learner.shared
    end = self._engine.launch(self._now, self._learner_free if shared else 0.0)
    if shared and end is not None:
      self._learner_free = end
    elif end is not None:
      self._slow_down(end)
    self._scheduler.settle()
    return bool(ended or answered)

  def _slow_down(self, end: float) -> None:
    """Gradients under way take longer: a rollout program runs until `end`."""
    before = self._learner_free
    self._flying = collections.deque(
      flight + self._lost(self._now, end, flight) for flight in self._flying
    )
    self._learner_free += self._lost(self._now, end, before)
    self._busy.add(before, self._learner_free)

  def _lost(self, start: float, chunk_end: float, work_end: float) -> float:
    """Seconds that gradients in [start, work_end] lose to a rollout program.

    They run beside it until it ends, or until they end themselves, later.
    """
    c, work = self._learner.contention, work_end - start
    beside = max(0.0, min(chunk_end - start, work / max(1 - c, 1e-9)))
    return c * beside if work > 0 else 0.0

  def _put(self, live: virtual_engine.Live, scored: bool) -> None:
    played = self._unscored.pop(live, None) or virtual_learner.Played(
      live.times.prompt_id,
      live.member,
      live.step,
      live.times,
      None,
      self._now,
      self._engine.version,
      tuple(live.sampled),
    )
    if scored:
      reward = live.times.reward if self._schedule.rewards else _FACTOR
      played = dataclasses.replace(played, reward=reward)
    else:
      self._unscored[live] = played
    self._queue.put(played)

  def _put_turn(self, live: virtual_engine.Live) -> None:
    prompt_id = live.times.prompt_id
    played = virtual_learner.Played(
      prompt_id,
      self._units[prompt_id],
      live.step,
      live.times,
      live.turn,
      self._now,
      self._engine.version,
      tuple(live.sampled),
      reward=_FACTOR,
    )
    live.sampled.clear()
    self._units[prompt_id] += 1
    self._queue.put(played)

  def _launch(self, step: int) -> bool:
    learner = self._learner
    while self._flying and self._flying[0] <= self._now:
      self._flying.popleft()
    limit = 1 if learner.shared else learner.max_in_flight
    if len(self._flying) >= limit:
      return False
    if learner.shared and self._engine.decoding:
      return False
    work = self._scheduler.next(step)
    if work is None:
      return False
    seconds, items = learner.pack(work)
    for number, sink in enumerate(work.sinks):
      total = self._accumulators.take(work.group, sink)
      total += sum(
        virtual_learner.gradient(work, number, item) for item in items
      )
      self._accumulators.give(work.group, sink, total)
    self._scheduler.launched(work, list(items))
    self._now += learner.host_s
    start = max(self._now, self._learner_free)
    if not learner.shared:
      seconds += self._lost(start, self._engine.chunk_end, start + seconds)
    self._learner_free = start + seconds
    self._busy.add(start, self._learner_free)
    self._flying.append(self._learner_free)
    share = seconds / len(items)
    self._launched += [(i.trajectory, start, share) for i in items]
    return True

  def _sleep(self) -> None:
    end = self._flying[0] if self._flying else virtual_engine.NEVER
    self._now = max(self._now, min(self._engine.next_event(), end))
    if self._now == virtual_engine.NEVER:
      raise RuntimeError('work is left, but nothing will happen any more')

  def _barrier(self, step: int, start: float, launches: int) -> StepReport:
    peak_groups = self._accumulators.peak_groups
    peak_bytes = self._accumulators.peak_bytes
    self._busy.add(self._now, self._now + self._learner.barrier_s)
    self._now += self._learner.barrier_s + self._learner.publish_s
    self._learner_free = max(self._learner_free, self._now)
    self._scheduler.retire(step)
    gradient = self._accumulators.finish()
    self._engine.publish()
    seconds = self._now - start
    return StepReport(
      seconds,
      1 - self._engine.busy.within(start, self._now) / seconds,
      1 - self._busy.within(start, self._now) / seconds,
      *_staleness(step, self._launched),
      peak_groups,
      peak_bytes,
      launches,
      tuple((p.ended - start, took) for p, _, took in self._launched),
      gradient,
    )


def _staleness(step: int, launched) -> tuple[float, float, float]:
  """Generation and waiting part in steps, and the wait in seconds."""
  if not launched:
    return 0.0, 0.0, 0.0
  counts = np.array([p.num_sampled for p, _, _ in launched])
  generated = [
    sum((p.version - version) * count for version, count in p.sampled)
    for p, _, _ in launched
  ]
  waited = np.array([step - p.version for p, _, _ in launched])
  seconds = np.mean([when - p.ended for p, when, _ in launched])
  return (
    float(sum(generated) / counts.sum()),
    float(waited @ counts / counts.sum()),
    float(seconds),
  )
