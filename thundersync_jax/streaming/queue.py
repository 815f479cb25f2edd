"""Trajectories on their way to the learner, in groups and release classes.

Rollout callbacks `put` from any thread; the driver `drain`s. A group is the
scope of a baseline: the trajectories of one prompt, of the whole batch, or one
trajectory alone. It closes when every member is scored or has failed. What a
trajectory may be used for is its release class (arXiv 2610.05935):

  content  finished, reward not back: its score gradient, into a sum of its own
  known    own reward back, group open: score gradient, into the group's sums
  final    group closed: gradient with its advantage, into the batch sum
"""

import collections
import queue
from collections.abc import Hashable

import numpy as np

from thundersync_jax.objectives import advantages as advantages_lib
from thundersync_jax.types import Trajectory

RELEASES = ('final', 'known', 'content')


class Group:
  """The members of one baseline scope. Driver thread only."""

  def __init__(self, key: Hashable, step: int, size: int):
    self.key = key
    self.step = step
    self.size = size
    self.members: dict[Hashable, Trajectory] = {}  # in completion order
    self.failures: dict[Hashable, str] = {}
    self.launched: set[Hashable] = set()
    self._closed = self._finished = False  # once true, they stay true

  @property
  def scored(self) -> list[Trajectory]:
    """By member, so that sums over them do not depend on the time of day."""
    members = sorted(self.members.items())
    return [t for _, t in members if t.reward is not None]

  @property
  def closed(self) -> bool:
    """Every member is scored or has failed."""
    if not self._closed:
      scored = sum(t.reward is not None for t in self.members.values())
      self._closed = scored + len(self.failures) == self.size
    return self._closed

  @property
  def finished(self) -> bool:
    """Closed, and no member waits to be launched."""
    if not self._finished:
      self._finished = self.closed and self.launched >= set(self.members)
    return self._finished

  @property
  def zero_variance(self) -> bool:
    """Closed, with no two rewards apart: no estimator learns from it."""
    rewards = {t.reward for t in self.scored}
    return self.closed and len(rewards) <= 1

  def waiting(self) -> list[Trajectory]:
    """Members that no launch has taken yet, in completion order."""
    return [t for k, t in self.members.items() if k not in self.launched]


def member_key(trajectory: Trajectory) -> tuple[int, int]:
  """Identifies a trajectory within a run."""
  return (trajectory.prompt_id, trajectory.member)


class TrajectoryQueue:
  """Sorts trajectories into groups.

  Args:
    scope: of the estimator, 'trajectory', 'group' or 'batch'.
    mask_truncated: trajectories cut at a limit leave their group: loss,
      baseline and denominator alike.
  """

  def __init__(self, scope: str, mask_truncated: bool = False):
    self._scope = scope
    self._mask_truncated = mask_truncated
    self._inbox: queue.SimpleQueue[Trajectory] = queue.SimpleQueue()
    self._groups: dict[Hashable, Group] = {}
    self.failures = collections.Counter()  # reason -> members, for metrics
    self.touched: list[Group] = []  # by the last drain

  def put(self, trajectory: Trajectory) -> None:
    """Hands over a trajectory that is finished, scored or failed."""
    self._inbox.put(trajectory)

  def open(self, step: int, prompt_ids: list[int], group_size: int) -> None:
    """Declares what step `step` is going to put."""
    if self._scope == 'batch':
      keys = {('batch', step): len(prompt_ids) * group_size}
    elif self._scope == 'group':
      keys = {prompt_id: group_size for prompt_id in prompt_ids}
    else:
      keys = {(p, m): 1 for p in prompt_ids for m in range(group_size)}
    for key, size in keys.items():
      if key in self._groups:
        raise ValueError(f'group {key} is open already: ids must be unique')
      self._groups[key] = Group(key, step, size)

  def drain(self) -> list[Group]:
    """Sorts what has been put; returns the groups that it closed."""
    closed, touched = [], {}
    while True:
      try:
        trajectory = self._inbox.get_nowait()
      except queue.Empty:
        self.touched = list(touched.values())
        return closed
      group = self.group_of(trajectory)
      touched[group.key] = group
      if group.closed:
        raise ValueError(f'{member_key(trajectory)} came to a closed group')
      self._sort(group, trajectory)
      if group.closed:
        closed.append(group)

  def groups(self, step: int) -> list[Group]:
    """The groups of a step, oldest first."""
    return [g for g in self._groups.values() if g.step == step]

  def open_groups(self) -> list[Group]:
    """Groups that wait for a reward."""
    return [g for g in self._groups.values() if not g.closed]

  def group_of(self, trajectory: Trajectory) -> Group:
    """The group that a trajectory belongs to."""
    return self._groups[self._group_key(trajectory)]

  def retire(self, step: int) -> None:
    """Forgets a step whose gradient is complete.

    Raises:
      ValueError: a group of the step is not finished.
    """
    for group in self.groups(step):
      if not group.finished:
        raise ValueError(f'group {group.key} of step {step} is not finished')
      del self._groups[group.key]

  def _group_key(self, trajectory: Trajectory) -> Hashable:
    if self._scope == 'batch':
      return ('batch', trajectory.step)
    if self._scope == 'group':
      return trajectory.prompt_id
    return member_key(trajectory)

  def _sort(self, group: Group, trajectory: Trajectory) -> None:
    key = member_key(trajectory)
    failure = trajectory.failure
    if failure is None and self._mask_truncated and trajectory.truncated:
      failure = 'truncated'
    if failure is None and trajectory.num_sampled == 0:
      failure = 'nothing sampled'
    if failure is not None:
      if trajectory.reward is None and trajectory.failure is None:
        return  # masked anyway: it leaves once, when its environment is done
      # A content member may have been launched: its sum is dropped at close.
      group.failures[key] = failure
      group.members.pop(key, None)
      self.failures[failure] += 1
    else:
      group.members[key] = trajectory


def group_advantages(
  group: Group, estimator: advantages_lib.Estimator
) -> dict[Hashable, float]:
  """Returns the advantage of each scored member of a closed group.

  Raises:
    FloatingPointError: an advantage is not finite.
  """
  scored = group.scored
  rewards = np.array([t.reward for t in scored], np.float64)
  values = estimator.advantages(rewards) if scored else rewards
  if not np.all(np.isfinite(values)):
    raise FloatingPointError(
      f'group {group.key}: rewards {rewards} give advantages {values}'
    )
  return {member_key(t): float(v) for t, v in zip(scored, values, strict=True)}
