"""Comparison of runs: tokens by key, parameters leaf by leaf."""

import numpy as np
import pytest

from thundersync_jax.runs import compare
from thundersync_jax.types import Trajectory, Turn


def trajectory(prompt_id, member, tokens, mask=None):
  n = len(tokens)
  mask = np.ones(n, bool) if mask is None else np.array(mask)
  turn = Turn(
    np.array(tokens, np.int32), mask, np.zeros(n), np.zeros(n), 'stop'
  )
  prompt = np.array([9], np.int32)
  return Trajectory(prompt_id, member, 0, prompt, (turn,), 1.0)


def record(*steps):
  made = compare.TokenRecord()
  for step, trajectories in enumerate(steps):
    made(step, trajectories)
  return made


def test_equal_tokens_in_any_order_of_arrival():
  a = record([trajectory(0, 0, [1, 2]), trajectory(0, 1, [3])])
  b = record([trajectory(0, 1, [3]), trajectory(0, 0, [1, 2])])
  assert compare.unequal_tokens(a, b) == []


@pytest.mark.parametrize(
  'other',
  [
    [trajectory(0, 0, [1, 5])],  # another token
    [trajectory(0, 0, [1])],  # shorter
    [trajectory(0, 1, [1, 2])],  # another member
    [],  # missing
  ],
)
def test_what_differs_is_named(other):
  found = compare.unequal_tokens(
    record([trajectory(0, 0, [1, 2])]), record(other)
  )
  assert (0, 0, 0) in found
  assert set(found) <= {(0, 0, 0), (0, 0, 1)}


def test_observations_are_not_compared():
  a = record([trajectory(0, 0, [1, 7, 2], [True, False, True])])
  b = record([trajectory(0, 0, [1, 8, 2], [True, False, True])])
  assert compare.unequal_tokens(a, b) == []


def test_difference_by_hand():
  b = {'x': np.array([3.0, 4.0]), 'y': {'z': np.array([10.0])}}
  a = {'x': np.array([3.0, 4.5]), 'y': {'z': np.array([10.5])}}
  # |(0, 0.5)| / 5 = 0.1 against 0.5 / 10 = 0.05.
  found = compare.largest_difference(a, b)
  assert found.leaf == 'x'
  assert found.relative == pytest.approx(0.1)
  # Of the update: 0.5 / |b - start|, 5 for x and 0.25 for z.
  start = {'x': np.zeros(2), 'y': {'z': np.array([9.75])}}
  found = compare.largest_difference(a, b, start)
  assert found.leaf == 'y/z'
  assert found.relative == pytest.approx(2.0)


def test_difference_from_nothing_is_infinite():
  zero, one = {'x': np.zeros(2)}, {'x': np.ones(2)}
  assert compare.largest_difference(zero, zero).relative == 0
  assert compare.largest_difference(one, zero).relative == np.inf


def run(tokens, value, schedule='sync'):
  summary = {
    'schedule': schedule,
    'granularity': 'batch',
    'time/step_s': 2.0,
    'time/rollout_idle_s': 0.5,
    'time/learner_idle_s': 1.0,
    'staleness/max_steps': 0,
    'queue/open_groups': 0,
  }
  trajectories = [trajectory(0, 0, tokens)] if tokens else []
  return compare.Finished(
    record(trajectories), {'x': np.array([value])}, summary
  )


@pytest.mark.parametrize(
  'other,equal',
  [
    (run([1], 1.0), True),
    (run([1], 1.0 + 5e-7), True),
    (run([1], 1.0 + 5e-6), False),
    (run([2], 1.0), False),
  ],
)
def test_verdict(other, equal):
  reference, start = run([1], 1.0), {'x': np.array([0.5])}
  rows = [
    compare.row(made, reference, start)
    for made in (reference, other, run([3], 7.0, 'async'))  # may differ
  ]
  assert compare.verdict(rows, 1e-6)['equal'] == equal
  assert rows[1]['rollout_idle'] == 0.25
  assert rows[1]['learner_idle'] == 0.5
  assert 'rollout_idle' in compare.table(rows).splitlines()[0]


def test_runs_that_trained_on_nothing_are_not_equal():
  rows = [compare.row(run([], 1.0), run([], 1.0), {'x': 0.0})]
  assert not compare.verdict(rows, 1e-6)['equal']
