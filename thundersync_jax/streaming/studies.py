"""Two questions for the simulator: how to split a cluster, and when to start.

`splits` moves chips from the rollout to the learner under every schedule.
`regimes` changes one thing at a time, at an even split, and asks how much
faster than `sync` each granularity is:

  correlation   do members of a group end together? then a group is as good as
                a trajectory
  open groups   how many may hold sums? with few, trajectories wait for groups
  launch cost   what does a launch cost beside its tokens? many small ones lose
"""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from thundersync_jax.streaming import simulate, workloads

# An agent whose tools take half of the time of a rollout, on average.
POPULATION = workloads.Population(
  prompts=16,
  group=8,
  turns=workloads.LogNormal(8, 0.3),
  prompt_tokens=8000,
  sampled=workloads.LogNormal(2000, 0.4),
  observed=workloads.LogNormal(6000, 0.4),
  wait_s=workloads.LogNormal(40, 1.0),
  correlation=0.3,
)
# Chips -> chips that hold the model once. The model grows with them, so the
# times of a replica stay what they are.
REPLICAS = {64: 8, 512: 32, 4096: 128}
_PROMPTS = 4  # of a step, for each replica
GRANULARITIES = {
  'trajectory': simulate.SCHEDULES['thundersync'],
  'group': simulate.SCHEDULES['thundersync_group'],
  'turn': simulate.DISTILLED['thundersync_turn'],
}
CORRELATIONS = (0.0, 0.25, 0.5, 0.75, 1.0)
OPEN_GROUPS = (1, 2, 4, 8, 16)
LAUNCHES_S = (0.0, 2.0, 4.0, 8.0, 16.0)
_SEEDS = 3  # of which the studies show the mean
_STEPS = 2  # the first is left out: async starts with an empty pipeline


def splits(
  chips: int, shares: Sequence[float], seed: int = 0
) -> list[dict[str, Any]]:
  """A line for each schedule and share of the chips that the learner has.

  Args:
    chips: of REPLICAS.
    shares: above 0 and below 1; rounded to whole replicas.
    seed: of the workload.
  """
  replica = REPLICAS[chips]
  base = workloads.Cluster()
  growth = replica / base.replica_chips
  cluster = dataclasses.replace(
    base,
    replica_chips=replica,
    prefill_token_s=base.prefill_token_s * growth,
    gradient_token_s=base.gradient_token_s * growth,
  )
  prompts = _PROMPTS * chips // replica
  population = dataclasses.replace(POPULATION, prompts=prompts)
  trajectories = list(workloads.draw(population, _STEPS, seed))
  lines = []
  for share in shares:
    learner = round(share * chips / replica) * replica
    for name, schedule in simulate.SCHEDULES.items():
      parts = cluster.parts(chips - learner, learner)
      steps = simulate.simulate(trajectories, *parts, schedule)
      line = {'chips': chips, 'learner_share': share, 'schedule': name}
      lines.append(line | averages(steps[1:]))
  return lines


def averages(steps: Sequence[simulate.StepReport]) -> dict[str, float]:
  """Means over steps, peaks over all of them."""

  def mean(name):
    return statistics.fmean(getattr(step, name) for step in steps)

  return {
    'step_s': mean('seconds'),
    'rollout_idle': mean('rollout_idle'),
    'learner_idle': mean('learner_idle'),
    'generation_staleness': mean('generation_staleness'),
    'waiting_staleness': mean('waiting_staleness'),
    'waiting_s': mean('waiting_s'),
    'open_groups': max(step.peak_groups for step in steps),
    'open_bytes': max(step.peak_bytes for step in steps),
  }


def regimes() -> list[dict[str, Any]]:
  """A line for each study, value and granularity: times as fast as sync.

  A turn is compared with distillation in step, which waits for no reward; what
  the replay of K/V adjoints costs is not counted. The others have rewards.
  """
  base = workloads.Cluster()
  cases = [
    ('correlation', x, dataclasses.replace(POPULATION, correlation=x), base)
    for x in CORRELATIONS
  ]
  cases += [
    ('open groups', n, POPULATION, dataclasses.replace(base, max_open_groups=n))
    for n in OPEN_GROUPS
  ]
  cases += [
    ('launch cost [s]', s, POPULATION, dataclasses.replace(base, launch_s=s))
    for s in LAUNCHES_S
  ]
  return [
    {'study': study, 'value': float(value), 'granularity': name, 'faster': gain}
    for study, value, population, cluster in cases
    for name, gain in gains(population, cluster).items()
  ]


def gains(
  population: workloads.Population, cluster: workloads.Cluster
) -> dict[str, float]:
  """Granularity -> times as fast as sync, mean over seeds, one learner row."""
  chips = cluster.replica_chips
  parts = cluster.parts(2 * chips, chips)
  found = dict.fromkeys(GRANULARITIES, 0.0)
  for seed in range(_SEEDS):
    trajectories = list(workloads.draw(population, 1, seed))

    def seconds(schedule, trajectories=trajectories):
      return simulate.simulate(trajectories, *parts, schedule)[0].seconds

    sync = {
      rewards: seconds(simulate.Schedule('batch', rewards=rewards))
      for rewards in (True, False)
    }
    for name, schedule in GRANULARITIES.items():
      found[name] += sync[schedule.rewards] / seconds(schedule) / _SEEDS
  return found
