"""What the learner should do next.

  granularity  a gradient may start when
  trajectory   a trajectory has finished (content), has its reward (known), or
               its group is closed (final)
  group        its group is closed
  batch        every group of the step is closed

All three give the same update. Final work comes first, for it needs no sum of
its own; then known, then content; each in completion order. Memory bounds may
make work wait; they never reorder the maths and never drop anything.
"""

import dataclasses
from collections.abc import Hashable

import numpy as np

from thundersync_jax.objectives import advantages as advantages_lib
from thundersync_jax.streaming import accumulators as accumulators_lib
from thundersync_jax.streaming import queue as queue_lib
from thundersync_jax.types import Item, Trajectory

GRANULARITIES = ('trajectory', 'group', 'batch')


@dataclasses.dataclass(frozen=True)
class Work:
  """Items that one launch may take, all into the same sums.

  Attributes:
    release: 'final', 'known' or 'content'.
    group: whose sums they go to; None for the batch sum.
    sinks: the sums.
    items: as many as wait; a launch takes what fits its shape.
  """

  release: str
  group: Hashable | None
  sinks: tuple[Hashable, ...]
  items: tuple[Item, ...]


class Scheduler:
  """Chooses work for one step at a time. Driver thread only.

  Args:
    queue: where trajectories arrive.
    accumulators: where gradients go.
    estimator: turns rewards into advantages.
    granularity: see the module docstring.
    skip_zero: leave out trajectories of advantage 0; false when a term that
      needs no advantage (KL) is part of the objective.
  """

  def __init__(
    self,
    queue: queue_lib.TrajectoryQueue,
    accumulators: accumulators_lib.Accumulators,
    estimator: advantages_lib.Estimator,
    *,
    granularity: str,
    skip_zero: bool = True,
  ):
    if granularity not in GRANULARITIES:
      raise ValueError(f'granularity={granularity!r}: choose {GRANULARITIES}')
    self._queue = queue
    self._accumulators = accumulators
    self._estimator = estimator
    self._granularity = granularity
    self._skip_zero = skip_zero
    self._advantages: dict[Hashable, dict[Hashable, float]] = {}
    self.launches = dict.fromkeys(queue_lib.RELEASES, 0)  # items taken

  def settle(self) -> list[queue_lib.Group]:
    """Sorts what has arrived; folds the sums of groups that closed.

    Returns:
      The groups that closed.
    """
    closed = self._queue.drain()
    for group in self._queue.touched:
      self._settle_members(group)
    for group in closed:
      advantages = queue_lib.group_advantages(group, self._estimator)
      self._advantages[group.key] = advantages
      self._accumulators.close(
        group.key,
        np.array([t.reward for t in group.scored], np.float64),
        np.array(list(advantages.values()), np.float64),
      )
      if self._skip_zero:
        group.launched.update(k for k, a in advantages.items() if a == 0)
    return closed

  def next(self, step: int) -> Work | None:
    """Returns the best work of the step, or None when nothing may start."""
    groups = [g for g in self._queue.groups(step) if not g.finished]
    if self._granularity == 'batch' and not all(g.closed for g in groups):
      return None
    ready = [(g, t) for g in groups if g.closed for t in g.waiting()]
    if self._granularity == 'batch':  # no work to overlap: one fixed order
      ready.sort(key=lambda pair: queue_lib.member_key(pair[1]))
    final = [self._final(g, t) for g, t in ready]
    if final:
      sinks = (accumulators_lib.BATCH,)
      return Work('final', None, sinks, tuple(final))
    if self._granularity != 'trajectory':
      return None
    waiting = [(g, t) for g in groups if not g.closed for t in g.waiting()]
    return self._known(waiting) or self._content(waiting)

  def launched(self, work: Work, items: list[Item]) -> None:
    """Marks the items that a launch took."""
    for item in items:
      group = self._queue.group_of(item.trajectory)
      group.launched.add(queue_lib.member_key(item.trajectory))
    self.launches[work.release] += len(items)

  def step_complete(self, step: int) -> bool:
    """Every group of the step is closed and launched."""
    return all(group.finished for group in self._queue.groups(step))

  def retire(self, step: int) -> None:
    """Forgets a step whose gradient is complete."""
    for group in self._queue.groups(step):
      self._advantages.pop(group.key, None)
    self._queue.retire(step)

  def _settle_members(self, group: queue_lib.Group) -> None:
    """Moves the sums of content members whose reward or failure is back."""
    for key in list(group.launched):
      trajectory = group.members.get(key)
      if trajectory is None:
        self._accumulators.drop_member(group.key, key)
        group.launched.discard(key)
      elif trajectory.reward is not None:
        self._accumulators.score_member(group.key, key, trajectory.reward)

  def _final(self, group: queue_lib.Group, trajectory: Trajectory) -> Item:
    key = queue_lib.member_key(trajectory)
    return Item(trajectory, self._advantages[group.key][key], trajectory.reward)

  def _known(self, waiting) -> Work | None:
    for group, first in waiting:
      if first.reward is None:
        continue
      sinks = self._accumulators.known_sinks(group.key, first.reward)
      if sinks is None:
        continue
      one_reward = sinks == (first.reward,)
      centre = 0.0 if one_reward else self._accumulators.centre(group.key)
      items = [
        Item(t, reward=t.reward - centre)
        for g, t in waiting
        if g is group
        and t.reward is not None
        and (not one_reward or t.reward == first.reward)
      ]
      return Work('known', group.key, sinks, tuple(items))
    return None

  def _content(self, waiting) -> Work | None:
    for group, trajectory in waiting:
      member = queue_lib.member_key(trajectory)
      sinks = self._accumulators.content_sink(group.key, member)
      if trajectory.reward is None and sinks is not None:
        return Work('content', group.key, sinks, (Item(trajectory),))
    return None
