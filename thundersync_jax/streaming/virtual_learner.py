"""The learner's side of a simulation: its time, and numbers for gradients.

A launch takes the seconds that a packer says. The score gradient of an item is
the number of its tokens, so every schedule must add up to the same number.
"""

import dataclasses
from collections.abc import Callable, Sequence

from thundersync_jax.objectives import advantages as advantages_lib
from thundersync_jax.runs import traces
from thundersync_jax.streaming import accumulators as accumulators_lib
from thundersync_jax.streaming import scheduler as scheduler_lib
from thundersync_jax.types import Item

# Work -> seconds of one launch, and the items that it takes.
Packer = Callable[[scheduler_lib.Work], tuple[float, Sequence[Item]]]


@dataclasses.dataclass(frozen=True)
class Learner:
  """How the learner spends its time.

  Attributes:
    pack: see Packer.
    barrier_s, publish_s: of a step; the driver does nothing else meanwhile.
    host_s: of the driver, to prepare a launch.
    max_in_flight: launches that run or wait on the device.
    shared: rollout and learner are one mesh.
    contention: seconds that a gradient takes longer for each second that a
      rollout program runs beside it: slices of one host share its cores.
    gradient_bytes: of one sum.
    max_open_groups, max_open_bytes: see accumulators.py.
    estimator: of the groups.
  """

  pack: Packer
  barrier_s: float = 0.0
  publish_s: float = 0.0
  host_s: float = 0.0
  max_in_flight: int = 2
  shared: bool = False
  contention: float = 0.0
  gradient_bytes: int = 4
  max_open_groups: int = 1 << 30
  max_open_bytes: int = 1 << 60
  estimator: advantages_lib.Estimator = advantages_lib.ESTIMATORS['grpo']


def linear_packer(
  launch_s: float, token_s: float, max_tokens: float = float('inf')
) -> Packer:
  """Launches of launch_s + token_s a token, of at most max_tokens together."""

  def pack(work):
    taken, tokens = [], 0
    for item in work.items:
      size = item.trajectory.learner_tokens
      if taken and tokens + size > max_tokens:
        break
      taken.append(item)
      tokens += size
    return launch_s + token_s * tokens, taken

  return pack


@dataclasses.dataclass(frozen=True)
class Played:
  """What the queue sorts, a trajectory or a turn: the times of it.

  Stands in for types.Trajectory.

  Attributes:
    times: of the trajectory.
    turn: the turn, from 1; None for all of them.
    ended: seconds, when its gradient became possible.
    version: learner steps done at that time.
    sampled: (policy_version, tokens) of it.
  """

  prompt_id: int
  member: int
  step: int
  times: traces.TrajectoryTimes
  turn: int | None
  ended: float
  version: int
  sampled: tuple[tuple[int, int], ...]
  reward: float | None = None
  failure: str | None = None
  truncated: bool = False

  @property
  def num_sampled(self) -> int:
    return sum(count for _, count in self.sampled)

  @property
  def learner_tokens(self) -> int:
    """Tokens that its gradient computes: a turn keeps the K/V before it."""
    if self.turn is None:
      return self.times.tokens
    first = self.turn == 1
    before = self.times.turns[self.turn - 2].observed
    fed = self.times.prompt_tokens if first else before
    return fed + self.times.turns[self.turn - 1].sampled


def gradient(work: scheduler_lib.Work, sink: int, item: Item) -> float:
  """The number that stands for what an item adds to a sink of a launch."""
  score = float(item.trajectory.learner_tokens)
  if work.release == 'final':
    return item.advantage * score
  return item.reward * score if sink else score


def numbers(nbytes: int) -> accumulators_lib.Arithmetic:
  """Arithmetic of gradient trees that are one number each."""
  return accumulators_lib.Arithmetic(
    zeros=float,
    add_scaled=lambda acc, scale, tree: acc + scale * tree,
    park=lambda tree: tree,
    unpark=lambda tree: tree,
    nbytes=nbytes,
  )
