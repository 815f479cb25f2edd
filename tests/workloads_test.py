"""Drawn workloads against their own parameters, clusters by hand."""

import dataclasses

import numpy as np
import pytest

from thundersync_jax.runs import schedule_plots, traces
from thundersync_jax.streaming import (
  simulate,
  studies,
  virtual_learner,
  workloads,
)
from thundersync_jax.types import Item

ONE = workloads.LogNormal(1)
POPULATION = workloads.Population(
  prompts=300,
  group=8,
  turns=ONE,
  prompt_tokens=10,
  sampled=workloads.LogNormal(5),
  observed=workloads.LogNormal(3),
  wait_s=workloads.LogNormal(2.0, 0.5),
)


def log_waits(correlation):
  """f64[prompts, group]."""
  population = dataclasses.replace(POPULATION, correlation=correlation)
  drawn = list(workloads.draw(population, steps=1, seed=3))
  waits = [t.turns[0].wait_s for t in drawn]
  return np.log(waits).reshape(300, 8)


@pytest.mark.parametrize('correlation', [0.0, 0.4, 1.0])
def test_waits_have_the_mean_the_spread_and_the_correlation(correlation):
  x = log_waits(correlation)
  # Groups are independent: 300 of them leave 6 % of a deviation.
  assert x.mean() == pytest.approx(np.log(2) - 0.5**2 / 2, abs=0.1)
  assert x.std() == pytest.approx(0.5, abs=0.06)  # 3 deviations of 300 groups
  # The variance of group means is rho + (1 - rho) / 8 of the whole.
  between = x.mean(axis=1).var() / x.var()
  assert between == pytest.approx(correlation + (1 - correlation) / 8, abs=0.08)


def test_constants_steps_and_seeds():
  two = dataclasses.replace(POPULATION, prompts=2, group=2, solved=1.0)
  drawn = list(workloads.draw(two, steps=2, seed=0))
  where = [(t.step, t.prompt_id, t.member) for t in drawn]
  assert where == [(p // 2, p, m) for p in range(4) for m in range(2)]
  assert {(t.turns[0].sampled, t.turns[0].observed) for t in drawn} == {(5, 3)}
  assert {t.reward for t in drawn} == {1.0}
  assert drawn == list(workloads.draw(two, steps=2, seed=0))
  assert drawn != list(workloads.draw(two, steps=2, seed=1))


class _Work:
  """Work of trajectories with so many tokens each."""

  def __init__(self, sizes):
    turns = (traces.TurnTimes(1, 0, 0.0),)
    self.items = [
      Item(
        virtual_learner.Played(
          0,
          member,
          0,
          traces.TrajectoryTimes(0, 0, member, size - 1, turns, 0.0),
          None,
          0.0,
          0,
          ((0, 1),),
        )
      )
      for member, size in enumerate(sizes)
    ]


def test_a_cluster_by_hand():
  cluster = workloads.Cluster(
    replica_chips=2,
    replica_slots=8,
    prefill_token_s=6.0,
    gradient_token_s=1.0,
    row_tokens=100,
    launch_s=10.0,
  )
  engine, learner = cluster.parts(rollout_chips=6, learner_chips=8)
  assert engine.slots == 24  # three replicas
  assert engine.prefill_token_s == 1.0  # six chips
  # Four rows, 30 s a launch. One trajectory takes half its tokens in seconds.
  seconds, taken = learner.pack(_Work([40]))
  assert (seconds, len(taken)) == (30 + 20, 1)
  # Rows of 40, 60 and 50; the longest counts. The fourth row takes 90.
  seconds, taken = learner.pack(_Work([40, 60, 50, 90]))
  assert (seconds, len(taken)) == (30 + 45, 4)
  # The next would make the emptiest row longer than 100.
  seconds, taken = learner.pack(_Work([90] * 5))
  assert len(taken) == 4
  with pytest.raises(ValueError, match='needs a replica of 2'):
    cluster.parts(1, 8)


def test_studies_and_their_pictures(tmp_path, monkeypatch):
  small = dataclasses.replace(studies.POPULATION, prompts=2, group=2)
  monkeypatch.setattr(studies, 'POPULATION', small)
  monkeypatch.setattr(studies, '_SEEDS', 1)
  monkeypatch.setattr(studies, '_PROMPTS', 1)
  splits = studies.splits(64, (0.25, 0.5))
  assert len(splits) == 2 * len(simulate.SCHEDULES)
  for row in splits:
    assert (row['waiting_staleness'] > 0) <= (row['schedule'] == 'async')
  regimes = studies.regimes()
  assert len(regimes) == 15 * len(studies.GRANULARITIES)
  assert all(row['faster'] > 0.9 for row in regimes)
  schedule_plots.plot_splits(splits, tmp_path / 'a.png')
  schedule_plots.plot_regimes(regimes, tmp_path / 'b.png')
  for name in ('a.png', 'b.png'):
    assert (tmp_path / name).read_bytes().startswith(b'\x89PNG')
