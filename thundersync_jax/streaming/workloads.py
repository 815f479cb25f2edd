"""Workloads and clusters to simulate where there is no trace.

A wait is log-normal. Its logarithm has a part that all members of a group share
(a hard task is hard for each) and a part of its own:

  log w = mu + sigma (sqrt(rho) z_group + sqrt(1 - rho) z_wait)

rho is the within-group correlation. Lengths are drawn the same way.

A cluster of equal chips is split between rollout and learner. A replica of the
rollout is a few chips with so many slots, and decodes a step in the same time
whatever their number (weights are read once). The learner has as many rows as
it has replicas; a launch fills rows with whole trajectories and takes

  launch_s (1 + log2 rows) + token_s * longest row / chips of a replica

so a launch of one trajectory leaves all rows but one idle.
"""

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from thundersync_jax.runs import traces
from thundersync_jax.streaming import virtual_engine, virtual_learner


@dataclasses.dataclass(frozen=True)
class LogNormal:
  """A log-normal quantity; sigma 0 is a constant."""

  mean: float
  sigma: float = 0.0

  def value(self, normal: float) -> float:
    """Where a standard normal number falls."""
    return self.mean * math.exp(self.sigma * normal - self.sigma**2 / 2)


@dataclasses.dataclass(frozen=True)
class Population:
  """What trajectories are drawn from.

  Attributes:
    prompts, group: of a step.
    turns: of a trajectory, rounded, at least 1.
    prompt_tokens: of a prompt.
    sampled, observed: tokens of a turn, rounded, at least 1 and 0.
    wait_s: of the environment, after each turn.
    correlation: within groups, of the logarithms; 0 to 1.
    solved: share with reward 1, the others 0.
    leaves_early: see traces.TrajectoryTimes.
  """

  prompts: int
  group: int
  turns: LogNormal
  prompt_tokens: int
  sampled: LogNormal
  observed: LogNormal
  wait_s: LogNormal
  correlation: float = 0.0
  solved: float = 0.5
  leaves_early: bool = False

  def __post_init__(self):
    if not 0 <= self.correlation <= 1:
      raise ValueError(f'correlation={self.correlation} must lie in 0..1')


def draw(
  population: Population, steps: int, seed: int
) -> Iterator[traces.TrajectoryTimes]:
  """Yields the trajectories of some steps."""
  rng = np.random.default_rng(seed)
  shared, own = math.sqrt(population.correlation), 0.0
  own = math.sqrt(1 - population.correlation)
  for number in range(steps * population.prompts):
    group = rng.standard_normal(4)

    def value(quantity, which, group=group):
      normal = shared * group[which] + own * rng.standard_normal()
      return quantity.value(normal)

    for member in range(population.group):
      count = max(1, round(value(population.turns, 0)))
      turns = tuple(
        traces.TurnTimes(
          max(1, round(value(population.sampled, 1))),
          round(value(population.observed, 2)),
          value(population.wait_s, 3),
        )
        for _ in range(count)
      )
      yield traces.TrajectoryTimes(
        number // population.prompts,
        number,
        member,
        population.prompt_tokens,
        turns,
        float(rng.random() < population.solved),
        population.leaves_early,
      )


@dataclasses.dataclass(frozen=True)
class Cluster:
  """Chips and their times; see the module docstring.

  Attributes:
    replica_chips: of a replica, of the rollout or the learner.
    replica_slots: of a rollout replica.
    chunk: decode steps between two looks.
    decode_s: of a decode step of a replica.
    prefill_token_s, gradient_token_s: of a token on one chip.
    row_tokens: that a row of the learner holds at most.
    launch_s: of a launch, beside its tokens.
    barrier_s, publish_s: of a step.
    gradient_bytes: of one sum.
    max_open_groups: see streaming/accumulators.py.
  """

  replica_chips: int = 4
  replica_slots: int = 64
  chunk: int = 64
  decode_s: float = 0.02
  prefill_token_s: float = 4e-5
  gradient_token_s: float = 7e-4
  row_tokens: int = 1 << 18
  launch_s: float = 0.2
  barrier_s: float = 1.0
  publish_s: float = 2.0
  gradient_bytes: int = 4 * 27_000_000_000
  max_open_groups: int = 1 << 20

  def parts(
    self, rollout_chips: int, learner_chips: int
  ) -> tuple[virtual_engine.Settings, virtual_learner.Learner]:
    """The two sides of a split.

    Raises:
      ValueError: a side has less than a replica.
    """
    replicas = rollout_chips // self.replica_chips
    rows = learner_chips // self.replica_chips
    if not replicas or not rows:
      raise ValueError(
        f'{rollout_chips} + {learner_chips} chips: each side needs a replica '
        f'of {self.replica_chips}'
      )
    prefill_s = self.prefill_token_s / (replicas * self.replica_chips)
    engine = virtual_engine.Settings(
      slots=replicas * self.replica_slots,
      chunk=self.chunk,
      decode_s=self.decode_s,
      prefill_token_s=prefill_s,
      extend_token_s=prefill_s,
    )
    learner = virtual_learner.Learner(
      self._packer(rows),
      self.barrier_s,
      self.publish_s,
      gradient_bytes=self.gradient_bytes,
      max_open_groups=self.max_open_groups,
    )
    return engine, learner

  def _packer(self, rows: int) -> virtual_learner.Packer:
    fixed_s = self.launch_s * (1 + math.log2(rows))
    token_s = self.gradient_token_s / self.replica_chips

    def pack(work):
      loads, taken = [0] * rows, []
      for item in work.items:
        size = item.trajectory.learner_tokens
        row = min(range(rows), key=loads.__getitem__)
        if taken and loads[row] + size > self.row_tokens:
          break
        loads[row] += size
        taken.append(item)
      return fixed_s + token_s * max(loads), taken

    return pack
