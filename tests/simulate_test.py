"""Simulated steps against schedules worked out by hand, and against bounds."""

import dataclasses

import numpy as np
import pytest

from thundersync_jax.runs import critical_path, traces
from thundersync_jax.streaming import (
  simulate,
  virtual_engine,
  virtual_learner,
)

GRADIENT_S, BARRIER_S, PUBLISH_S = 2.0, 0.5, 0.25
END_S = BARRIER_S + PUBLISH_S
ENGINE = virtual_engine.Settings(slots=2, chunk=1, decode_s=1.0)
# A launch takes one item, of any length.
LEARNER = virtual_learner.Learner(
  virtual_learner.linear_packer(GRADIENT_S, 0.0, max_tokens=0),
  BARRIER_S,
  PUBLISH_S,
)


def times(member, waits, *, sampled=2, step=0, reward=None, early=False):
  """A trajectory of group `step` with a turn of `sampled` tokens a wait."""
  turns = tuple(traces.TurnTimes(sampled, 3, wait) for wait in waits)
  reward = float(member) if reward is None else reward
  return traces.TrajectoryTimes(step, step, member, 5, turns, reward, early)


def seconds(trajectories, schedule, engine=ENGINE, learner=LEARNER):
  steps = simulate.simulate(trajectories, engine, learner, schedule)
  return [report.seconds for report in steps]


# Both decode for 2 s; the rewards come at 3 s and at 5 s.
PAIR = [times(0, [1.0]), times(1, [3.0])]
EARLY = [dataclasses.replace(t, leaves_early=True) for t in PAIR]


@pytest.mark.parametrize(
  ('trajectories', 'name', 'end'),
  [
    (PAIR, 'sync', 5 + 4),
    (PAIR, 'thundersync', 5 + 2),  # 3-5, 5-7
    (PAIR, 'thundersync_group', 5 + 4),
    (EARLY, 'sync', 5 + 4),
    (EARLY, 'thundersync', 2 + 4),  # 2-4, 4-6; the rewards decide nothing
    (EARLY, 'thundersync_group', 5 + 4),
  ],
)
def test_two_trajectories_by_hand(trajectories, name, end):
  got = seconds(trajectories, simulate.SCHEDULES[name])
  assert got == [end + END_S]


def test_a_slot_is_kept_until_the_environment_has_answered():
  # Turn 0-2, wait 2-3, turn 3-5, wait 5-6; then the same for the other.
  pair = [times(m, [1.0, 1.0]) for m in range(2)]
  one = dataclasses.replace(ENGINE, slots=1)
  assert seconds(pair, simulate.SCHEDULES['sync'], one) == [12 + 4 + END_S]
  # Let go before the reward, it is free at 5: the other ends at 11.
  early = [dataclasses.replace(t, leaves_early=True) for t in pair]
  assert seconds(early, simulate.SCHEDULES['sync'], one) == [11 + 4 + END_S]


def test_chunks_prefill_extend_and_workers_by_hand():
  engine = virtual_engine.Settings(
    slots=2,
    chunk=4,
    decode_s=1.0,
    prefill_s=10.0,
    extend_s=100.0,
    extend_token_s=1.0,
    extend_tokens=2,
    workers=1,
  )
  pair = [times(m, [1000.0, 0.0], sampled=5) for m in range(2)]
  # The prompt once; chunks of 4 and 1. One wait after the other to 1015 and
  # 2015; each time 3 observed tokens in 2 programs, and two chunks.
  assert seconds(pair, simulate.SCHEDULES['sync'], engine) == [
    2015 + 203 + 5 + 4 + END_S
  ]


def test_turns_are_gradients_of_their_own():
  one = [times(0, [1.0, 1.0], reward=1.0)]
  # Turns end at 2 and 5; the last answer is not waited for.
  turn = seconds(one, simulate.DISTILLED['thundersync_turn'])
  assert turn == [5 + 2 + END_S]
  # At the end of the trajectory, and of its last answer, in one piece.
  assert seconds(one, simulate.DISTILLED['thundersync']) == [6 + 2 + END_S]


def test_async_by_hand():
  """Two groups of one prompt each; slots for all, no rewards to wait for."""
  both = [times(0, [1.0], step=step, reward=1.0) for step in range(2)]
  schedule = simulate.DISTILLED['async']
  steps = simulate.simulate(both, ENGINE, LEARNER, schedule)
  # Both end at 3; the second gradient follows the first publication.
  assert [s.seconds for s in steps] == [3 + 2 + END_S, 2 + END_S]
  assert [s.waiting_staleness for s in steps] == [0, 1]
  assert [s.generation_staleness for s in steps] == [0, 0]
  assert [s.waiting_s for s in steps] == [0, 2 + END_S]


def test_staleness_while_a_trajectory_goes_on():
  # The second has 2 tokens by 2 s, waits until 7 (step 1 begins at 5.75), and
  # samples two more with new weights.
  both = [
    times(0, [1.0], step=0, reward=1.0),
    times(0, [5.0, 0.0], step=1, reward=1.0),
  ]
  steps = simulate.simulate(both, ENGINE, LEARNER, simulate.DISTILLED['async'])
  assert steps[1].generation_staleness == 0.5  # 2 of 4 tokens, one step
  assert steps[1].waiting_staleness == 0
  assert steps[1].seconds == 9 - (5 + END_S) + 2 + END_S


def workload(seed, steps=2, prompts=4, group=4, rewards=3):
  rng = np.random.default_rng(seed)
  return [
    traces.TrajectoryTimes(
      step,
      step * prompts + prompt,
      member,
      int(rng.integers(3, 9)),
      tuple(
        traces.TurnTimes(
          int(rng.integers(1, 9)), int(rng.integers(5)), rng.lognormal(1, 1)
        )
        for _ in range(rng.integers(1, 4))
      ),
      float(rng.integers(rewards)),
      bool(rng.integers(2)),
    )
    for step in range(steps)
    for prompt in range(prompts)
    for member in range(group)
  ]


RANDOM_ENGINE = virtual_engine.Settings(
  slots=9, chunk=3, decode_s=0.1, prefill_s=0.2, extend_s=0.1, workers=6
)
RANDOM_LEARNER = virtual_learner.Learner(
  virtual_learner.linear_packer(0.1, 0.05, max_tokens=30), 0.3, 0.1
)


def play(trajectories, name, **changes):
  learner = dataclasses.replace(RANDOM_LEARNER, **changes)
  schedule = simulate.SCHEDULES[name]
  return simulate.simulate(trajectories, RANDOM_ENGINE, learner, schedule)


@pytest.mark.parametrize('seed', range(6))
def test_every_schedule_gives_the_same_gradient(seed):
  """Through the real accumulators, against the definition."""
  trajectories = workload(seed)
  want = []
  for step in range(2):
    total = 0.0
    for prompt in range(4):
      group = [t for t in trajectories if t.prompt_id == 4 * step + prompt]
      rewards = np.array([t.reward for t in group])
      centred = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
      total += centred @ [t.tokens for t in group]
    want.append(total)
  for name in simulate.SCHEDULES:
    got = [report.gradient for report in play(trajectories, name)]
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize('seed', range(6))
def test_times_keep_to_their_bounds(seed):
  trajectories = workload(seed)
  sync, streamed, group = (
    play(trajectories, name)
    for name in ('sync', 'thundersync', 'thundersync_group')
  )
  for one, other, third in zip(sync, streamed, group, strict=True):
    end = 0.3 + 0.1
    learner_s = sum(took for _, took in one.released)
    rollout_s = max(r for r, _ in one.released)
    # Nothing overlaps in sync; the last reward may come after the last turn.
    assert one.seconds >= rollout_s + learner_s + end - 1e-9
    busy = (1 - one.learner_idle) * one.seconds
    assert busy == pytest.approx(learner_s + 0.3)
    # The streamed learner conserves its work.
    released, took = zip(*other.released, strict=True)
    bound = critical_path.makespan(released, took) + end
    tail = max(took) + 1e-9
    assert bound <= other.seconds + 1e-9
    assert other.seconds <= max(one.seconds - learner_s, bound) + tail
    assert other.seconds <= third.seconds + tail
    assert third.seconds <= one.seconds + tail


def test_memory_bounds_hold_and_make_work_wait():
  trajectories = workload(0, rewards=2)
  free, tight = (
    play(trajectories, 'thundersync', max_open_groups=n, gradient_bytes=10)
    for n in (100, 1)
  )
  assert max(s.peak_groups for s in free) > 1
  assert max(s.peak_bytes for s in free) > 20
  assert {s.peak_groups for s in tight} == {1}
  assert sum(s.seconds for s in tight) >= sum(s.seconds for s in free)


def test_one_mesh_does_one_thing_at_a_time():
  for name in ('sync', 'thundersync', 'async'):
    for report in play(workload(1), name, shared=True):
      busy = 2 - report.rollout_idle - report.learner_idle
      assert busy <= 1 + 1e-9


def test_what_cannot_be_simulated():
  with pytest.raises(ValueError, match='no trajectories'):
    seconds([], simulate.SCHEDULES['sync'])
  with pytest.raises(ValueError, match='no turns'):
    seconds([times(0, [])], simulate.SCHEDULES['sync'])
  with pytest.raises(ValueError, match='granularity=turn'):
    simulate.Schedule('turn')
