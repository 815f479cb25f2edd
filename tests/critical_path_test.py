"""The bound of a streamed step, against every order of its work."""

import itertools

import numpy as np
import pytest

from thundersync_jax.runs import critical_path, timeline


def finish(order):
  """The end of a learner that takes work in this order as it can."""
  now = 0.0
  for released, seconds in order:
    now = max(now, released) + seconds
  return now


@pytest.mark.parametrize('seed', range(20))
def test_makespan_is_the_best_of_all_orders(seed):
  rng = np.random.default_rng(seed)
  work = [tuple(rng.integers(0, 9, 2).tolist()) for _ in range(seed % 6 + 1)]
  best = min(finish(order) for order in itertools.permutations(work))
  assert critical_path.makespan(*zip(*work, strict=True)) == best


def test_makespan_by_hand():
  # 0-2 busy, 2-5 idle, then 5-9 and on to 12.
  assert critical_path.makespan([0, 5, 6], [2, 4, 3]) == 12
  assert critical_path.makespan([], []) == 0


def recorded():
  """A step from 100 to 112 s: one gradient of two, one of one, the barrier."""
  record = timeline.StepSpans(3, 100.0, 112.0)
  record.spans += [
    timeline.Span('learner', 'gradient', 104, 106, {'keys': [(0, 0), (0, 1)]}),
    timeline.Span('learner', 'gradient', 107, 110, {'keys': [[1, 0]]}),
    timeline.Span('learner', 'barrier', 110, 110.5),
    timeline.Span('host', 'publish', 110.5, 111),
  ]
  return record


def releases(**changes):
  times = {(0, 0): 101.0, (0, 1): 103.0, (1, 0): 105.0}
  return critical_path.Releases(times, **{'answered': 106.0} | changes)


def test_bound_of_a_recorded_step():
  bound = critical_path.of_step(recorded(), releases())
  # 1-2, 3-4 and 5-8, then half a second twice.
  assert bound == critical_path.Bound(12.0, 9.0, 6.0, 5.0)
  assert bound.ratio == 12 / 9


def test_an_answer_without_a_gradient_comes_all_the_same():
  bound = critical_path.of_step(recorded(), releases(answered=109.0))
  assert bound.bound_s == 10.0


def test_pieces_of_turns():
  """Fed turns wait for themselves, what goes back for the trajectory."""
  record = timeline.StepSpans(0, 0.0, 9.0)
  two = {'prompt_id': [4, 4], 'member': [0, 1], 'turn': [0, 2]}
  record.spans += [
    timeline.Span('learner', 'score', 2, 3, {'work': 'feed'} | two),
    timeline.Span('learner', 'gradient', 3, 4, {'work': 'feed'} | two),
    timeline.Span('learner', 'gradient', 6, 8, {'work': 'unwind'} | two),
    timeline.Span('rollout', 'score', 0, 9, {'work': 'feed'} | two),
  ]
  times = {(4, 0, 0): 1.0, (4, 1, 2): 2.0, (4, 0): 5.0, (4, 1): 6.0}
  bound = critical_path.of_step(record, critical_path.Releases(times, 6.0))
  assert bound == critical_path.Bound(9.0, 7.0, 6.0, 4.0)


def test_a_step_that_cannot_be_bounded():
  with pytest.raises(ValueError, match=r'no release of \(0, 0\)'):
    critical_path.of_step(recorded(), critical_path.Releases({}, 0.0))
  with pytest.raises(ValueError, match='goes on'):
    critical_path.of_step(timeline.StepSpans(0, 0.0), releases())
