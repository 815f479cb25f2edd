"""The gradient of a step, from trajectories as they come.

Ties queue, scheduler and accumulators to the learner's programs:

  put -> settle -> launch, launch, ... -> finish (at the barrier)

One stream serves a run; params are frozen between two barriers.
"""

import collections
import dataclasses
import time
from typing import Any

import jax
import numpy as np

from thundersync_jax.learner import gradients, packing
from thundersync_jax.learner import learner as learner_lib
from thundersync_jax.objectives import advantages, aggregation
from thundersync_jax.streaming import accumulators, queue, scheduler
from thundersync_jax.types import Item, Trajectory

Tree = Any


@dataclasses.dataclass(frozen=True)
class Plan:
  """How gradients stream.

  Attributes:
    estimator: see objectives/advantages.py.
    aggregation: see objectives/aggregation.py.
    granularity: see streaming/scheduler.py.
    constant_tokens: denominator of a trajectory for 'constant'.
    mask_truncated: trajectories cut at a limit leave their group.
    drop_zero_variance: groups without spread leave the denominator too.
    max_open_groups, max_open_bytes, max_buckets, affine_sums: see accumulators.
    max_in_flight: launches that may wait on the device.
  """

  estimator: advantages.Estimator
  aggregation: aggregation.Aggregation
  granularity: str = 'trajectory'
  constant_tokens: float = 1.0
  mask_truncated: bool = False
  drop_zero_variance: bool = False
  max_open_groups: int = 8
  max_open_bytes: int = 8 << 30
  max_buckets: int = 2
  affine_sums: bool = True
  max_in_flight: int = 2

  def __post_init__(self):
    if self.granularity == 'trajectory' and not self.estimator.equal_rewards:
      raise ValueError(
        'granularity=trajectory with an estimator of equal_rewards=False: no '
        'few sums represent its open groups; set granularity=group'
      )


@dataclasses.dataclass(frozen=True)
class Launch:
  """A gradient program on its way."""

  release: str
  start: float
  items: tuple[Item, ...]
  shape: packing.Shape
  sinks: int
  marker: Any


class GradientStream:
  """See the module docstring. Driver thread only, but for queue.put.

  Args:
    learner: its programs.
    plan: how gradients stream.
    pad_id: fills unused columns.
    params: of the first step, for sizes and shardings.
    timeline: records the learner's spans, may be None.
  """

  def __init__(
    self, learner, plan: Plan, *, pad_id: int, params, timeline=None
  ):
    self._learner = learner
    self._plan = plan
    self._pad_id = pad_id
    self._timeline = timeline
    self._has_kl = learner.objective.kl_coef > 0
    self.queue = queue.TrajectoryQueue(
      plan.estimator.scope, plan.mask_truncated
    )
    self.accumulators = accumulators.Accumulators(
      learner.arithmetic(params),
      plan.estimator,
      max_open_groups=plan.max_open_groups,
      max_open_bytes=plan.max_open_bytes,
      max_buckets=plan.max_buckets,
      affine_sums=plan.affine_sums,
      has_kl=self._has_kl,
    )
    self.scheduler = scheduler.Scheduler(
      self.queue,
      self.accumulators,
      plan.estimator,
      granularity=plan.granularity,
      skip_zero=not self._has_kl,
    )
    self._stats = gradients.Stats.zeros()
    self._flying: collections.deque[Launch] = collections.deque()
    self._last_end = 0.0
    self.launches = 0

  def sink_kinds(self) -> list[tuple[str, ...]]:
    """The tuples of sinks that launches may ask for, for warm-up."""
    kinds = [('batch',)]
    if self._plan.granularity == 'trajectory':
      extra = ('batch',) if self._has_kl else ()
      kinds += [('score',) + extra]
      if self._plan.affine_sums and self._plan.estimator.affine_in_reward:
        kinds += [('score', 'reward') + extra]
    return kinds

  @property
  def peaks(self) -> accumulators.Peaks:
    """The most that was open at once, of the step so far."""
    sums = self.accumulators
    return accumulators.Peaks(sums.peak_groups, sums.peak_bytes)

  def turn_ended(self, trajectory: Trajectory) -> None:
    """A turn tells nothing here: the reward of its trajectory is missing."""

  def settle(self) -> list[queue.Group]:
    """Takes in what has arrived; returns the groups that closed."""
    return self.scheduler.settle()

  def launch(self, step: int, params: Tree, ref_params: Tree | None) -> bool:
    """Launches the best work of the step, if there is any and room for it."""
    self.poll()
    if len(self._flying) >= self._plan.max_in_flight:
      return False
    work = self.scheduler.next(step)
    if work is None:
      return False
    batch, shape, items = packing.pack(
      work.items,
      self._learner.shapes,
      self._plan.aggregation.weight,
      self._pad_id,
    )
    places = self._places(work)
    sinks = {k: self.accumulators.take(*at) for k, at in places.items()}
    start = time.perf_counter()
    sums, self._stats = self._learner.accumulate(
      params, ref_params, batch, sinks, self._stats
    )
    for kind, tree in sums.items():
      self.accumulators.give(*places[kind], tree)
    self.scheduler.launched(work, items)
    marker = self._stats.logprob_diff_max
    self._flying.append(
      Launch(work.release, start, tuple(items), shape, len(sinks), marker)
    )
    self.launches += 1
    return True

  def poll(self, block: bool = False) -> int:
    """Notes launches that have ended; returns how many have not."""
    while self._flying and (block or self._flying[0].marker.is_ready()):
      launch = self._flying.popleft()
      launch.marker.block_until_ready()
      now = time.perf_counter()
      if self._timeline is not None:
        start = max(launch.start, self._last_end)
        self._timeline.span(
          'learner',
          'gradient',
          start,
          now,
          release=launch.release,
          trajectories=len(launch.items),
          keys=[queue.member_key(item.trajectory) for item in launch.items],
          sinks=launch.sinks,
          **dataclasses.asdict(launch.shape),
        )
      self._last_end = now
    return len(self._flying)

  def step_complete(self, step: int) -> bool:
    """Every group of the step is closed and launched."""
    return self.scheduler.step_complete(step)

  def finish(
    self, step: int
  ) -> tuple[learner_lib.BatchGradient, gradients.Stats]:
    """The barrier: returns the step's gradient, and forgets the step."""
    groups = self.queue.groups(step)
    if self._plan.drop_zero_variance:
      # A step without any spread keeps them: its gradient is zero.
      groups = [g for g in groups if not g.zero_variance] or groups
    sound = [t for group in groups for t in group.scored]
    share = self._plan.aggregation.share
    denominator = sum(
      share(t.num_sampled, self._plan.constant_tokens) for t in sound
    )
    versions = frozenset(
      int(v) for t in sound for v in np.unique(t.policy_versions[t.loss_mask])
    )
    self.scheduler.retire(step)
    gradient = learner_lib.BatchGradient(
      self.accumulators.finish(), denominator, versions
    )
    stats, self._stats = jax.device_get(self._stats), gradients.Stats.zeros()
    return gradient, stats

  def _places(self, work: scheduler.Work):
    """Sink kind of the program -> where the accumulators keep it."""
    if work.release == 'final':
      return {'batch': (None, accumulators.BATCH)}
    content = work.release == 'content'
    kinds = ('score', 'batch') if content else ('score', 'reward')
    kinds = kinds[: len(work.sinks)]
    places = {
      k: (work.group, s) for k, s in zip(kinds, work.sinks, strict=True)
    }
    if self._has_kl and not content:
      places['batch'] = (None, accumulators.BATCH)
    return places
