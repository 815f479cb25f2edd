"""Gradient sums of a step: one for the batch, a few for each open group.

For a group whose advantages are not known yet (arXiv 2610.05935):

  buckets  B[r] = sum of H_i with r_i = r;     at close  sum_r a(r) B[r]
  affine   G1 = sum (r_i - c) H_i,  G2 = sum H_i;  at close  alpha G1 + beta G2
  member   H_i of a trajectory without reward; moves into one of the above,
           its KL gradient, if there is one, into the batch sum

A group starts with buckets (binary rewards need two) and collapses to the two
affine sums when it meets more distinct rewards than `max_buckets`; c is the
mean of the first few, so that beta G2 is a small correction and not the
difference of two large numbers (it halves the f32 error). Open groups
are bounded by number and by bytes: at the bound `reserve` says no, and the
work waits until its group is closed, when it needs no sum of its own.
"""

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from thundersync_jax.objectives import advantages as advantages_lib

Tree = Any
BATCH = 'batch'
SUM = 'sum'
KL = 'kl'
REWARD_SUM = 'reward_sum'


@dataclasses.dataclass(frozen=True)
class Arithmetic:
  """What the accumulators need of the learner; all calls are asynchronous.

  Attributes:
    zeros: () -> gradient tree of zeros, on the learner's devices.
    add_scaled: (acc, scale, tree) -> acc + scale tree; acc is donated.
    park: tree -> the same tree where open sums are kept (device or host).
    unpark: the way back.
    nbytes: size of a gradient tree.
  """

  zeros: Callable[[], Tree]
  add_scaled: Callable[[Tree, float, Tree], Tree]
  park: Callable[[Tree], Tree]
  unpark: Callable[[Tree], Tree]
  nbytes: int


@dataclasses.dataclass(frozen=True)
class Peaks:
  """The most that was open at once: groups (or trajectories), and bytes."""

  groups: int
  nbytes: int


class Accumulators:
  """The sums of one step. Driver thread only.

  Args:
    arithmetic: see Arithmetic.
    estimator: what the sums must represent.
    max_open_groups: groups that may hold sums at once.
    max_open_bytes: bytes that the sums of all open groups may take.
    max_buckets: distinct rewards of a group that have a sum each.
    affine_sums: whether a group with more may turn affine.
    has_kl: launches have a KL gradient too.
  """

  def __init__(
    self,
    arithmetic: Arithmetic,
    estimator: advantages_lib.Estimator,
    *,
    max_open_groups: int,
    max_open_bytes: int,
    max_buckets: int = 2,
    affine_sums: bool = True,
    has_kl: bool = False,
  ):
    if max_buckets < 2:
      raise ValueError(f'max_buckets={max_buckets} must be at least 2')
    self._maths = arithmetic
    self._estimator = estimator
    self._max_open_groups = max_open_groups
    self._max_open_bytes = max_open_bytes
    self._max_buckets = max_buckets
    self._has_kl = has_kl
    self._affine = affine_sums and estimator.affine_in_reward
    self._sums: dict[Hashable, dict[Hashable, Tree]] = {}
    self._centres: dict[Hashable, float] = {}
    self._batch: Tree | None = None
    self.peak_bytes = 0
    self.peak_groups = 0

  @property
  def open_groups(self) -> list[Hashable]:
    """Groups that hold a sum."""
    return list(self._sums)

  @property
  def open_bytes(self) -> int:
    count = sum(len(sums) for sums in self._sums.values())
    return count * self._maths.nbytes

  # What a launch adds to.

  def known_sinks(
    self, group: Hashable, reward: float
  ) -> tuple[Hashable, ...] | None:
    """Returns the sums for a scored member of an open group.

    Returns:
      (reward,) or (SUM, REWARD_SUM), or None: at the bound, let it wait.

    Raises:
      ValueError: the estimator has neither form.
    """
    sums = self._sums.get(group, {})
    if SUM in sums:
      return (SUM, REWARD_SUM)
    buckets = [key for key in sums if isinstance(key, float)]
    if reward in buckets:
      return (reward,)
    if self._estimator.equal_rewards and len(buckets) < self._max_buckets:
      return (reward,) if self._fits(group, 1) else None
    if not self._affine:
      raise ValueError(
        f'group {group} has more than max_buckets={self._max_buckets} distinct '
        'rewards, and no affine sums: raise max_buckets, set granularity=group '
        'or, where the estimator is affine in the reward, affine_sums=True'
      )
    self._collapse(group, buckets)  # never takes more room
    return (SUM, REWARD_SUM)

  def centre(self, group: Hashable) -> float:
    """What REWARD_SUM subtracts from every reward of an affine group."""
    return self._centres[group]

  def content_sink(
    self, group: Hashable, member: Hashable
  ) -> tuple[Hashable, ...] | None:
    """Returns the sums for a member without reward, or None at the bound.

    They are its own, KL included, for it may still fail and leave no trace.
    """
    sinks = (member, (KL, member)) if self._has_kl else (member,)
    return sinks if self._fits(group, len(sinks)) else None

  def take(self, group: Hashable | None, sink: Hashable) -> Tree:
    """Lends a sum to a launch, which donates it; `give` brings it back."""
    if group is None:
      batch, self._batch = self._batch, None
      return self._maths.zeros() if batch is None else batch
    kept = self._sums.get(group, {}).get(sink)
    return self._maths.zeros() if kept is None else self._maths.unpark(kept)

  def give(self, group: Hashable | None, sink: Hashable, tree: Tree) -> None:
    """Stores a sum that a launch has added to."""
    if group is None:
      self._batch = tree
      return
    self._sums.setdefault(group, {})[sink] = self._maths.park(tree)
    self.peak_bytes = max(self.peak_bytes, self.open_bytes)
    self.peak_groups = max(self.peak_groups, len(self._sums))

  # What the rewards decide.

  def score_member(
    self, group: Hashable, member: Hashable, reward: float
  ) -> None:
    """Moves a content member's sum to where its reward belongs."""
    sums = self._sums.get(group, {})
    if member not in sums:
      return
    tree = sums.pop(member)
    if self._has_kl:
      kl = self._maths.unpark(sums.pop((KL, member)))
      batch = self.take(None, BATCH)
      self.give(None, BATCH, self._maths.add_scaled(batch, 1.0, kl))
    # The place that the member's own sum leaves is always enough.
    if self.known_sinks(group, reward) == (reward,):
      sums[reward] = self._plus(sums.get(reward), 1.0, tree)
    else:
      sums[SUM] = self._plus(sums[SUM], 1.0, tree)
      excess = reward - self.centre(group)
      sums[REWARD_SUM] = self._plus(sums[REWARD_SUM], excess, tree)

  def drop_member(self, group: Hashable, member: Hashable) -> None:
    """Forgets the sums of a content member that failed."""
    sums = self._sums.get(group, {})
    sums.pop(member, None)
    sums.pop((KL, member), None)
    if not sums:
      self._sums.pop(group, None)

  def close(
    self, group: Hashable, rewards: np.ndarray, advantages: np.ndarray
  ) -> None:
    """Folds a closed group's sums into the batch sum and forgets them.

    Args:
      group: the group.
      rewards: f64[m], of all its sound members.
      advantages: f64[m].
    """
    sums = self._sums.pop(group, {})
    centred = rewards - self._centres.pop(group, 0.0)
    for sink, scale in self._coefficients(sums, centred, advantages).items():
      if scale:
        batch = self.take(None, BATCH)
        tree = self._maths.unpark(sums[sink])
        self.give(None, BATCH, self._maths.add_scaled(batch, scale, tree))

  def finish(self) -> Tree:
    """Returns the batch sum and starts the next step, peaks included.

    Raises:
      ValueError: a group is still open.
    """
    if self._sums:
      raise ValueError(
        f'groups {self.open_groups} are open: close them before the step'
      )
    self.peak_bytes = self.peak_groups = 0
    return self.take(None, BATCH)

  def _fits(self, group: Hashable, more: int) -> bool:
    groups = len(self._sums) + (group not in self._sums)
    size = self.open_bytes + more * self._maths.nbytes
    return groups <= self._max_open_groups and size <= self._max_open_bytes

  def _plus(self, acc: Tree | None, scale: float, tree: Tree) -> Tree:
    """acc + scale tree, where open sums are kept; may be `tree` itself."""
    if acc is None:
      return tree
    maths = self._maths
    acc, tree = maths.unpark(acc), maths.unpark(tree)
    return maths.park(maths.add_scaled(acc, scale, tree))

  def _collapse(self, group: Hashable, buckets: list[float]) -> None:
    """Two or more buckets become the two affine sums."""
    sums = self._sums[group]
    self._centres[group] = centre = float(np.mean(buckets))
    total, weighted = None, self._maths.park(self._maths.zeros())
    for reward in buckets:
      tree = sums.pop(reward)
      weighted = self._plus(weighted, reward - centre, tree)
      total = self._plus(total, 1.0, tree)  # last: it may become `tree`
    sums[SUM], sums[REWARD_SUM] = total, weighted

  def _coefficients(self, sums, rewards, advantages) -> dict[Hashable, float]:
    if not sums:
      return {}
    if SUM in sums:
      slope, offset = advantages_lib.affine_coefficients(rewards, advantages)
      return {REWARD_SUM: slope, SUM: offset}
    by_reward = dict(zip(rewards.tolist(), advantages.tolist(), strict=True))
    return {reward: by_reward[reward] for reward in sums}
