"""The benchmark of schedules: equal work, its trace, and the chosen wait.

A race of tiny runs is made once. Nothing here is about how long it took.
"""

import dataclasses
import pathlib

import pytest

from thundersync_jax import replay, schedule_bench
from thundersync_jax.envs import latency
from thundersync_jax.runs import timeline, traces
from thundersync_jax.streaming import simulate

WORKLOAD = schedule_bench.WORKLOADS['debug']
DATA = pathlib.Path(__file__).parent / 'data'


@pytest.fixture(scope='module')
def raced(tmp_path_factory):
  folder = tmp_path_factory.mktemp('race')
  found = schedule_bench.race(WORKLOAD, 'grpo', folder, blocks=1, steps=2)
  schedule_bench.save(found, folder)
  return found, traces.read(folder / traces.NAME)


def work(trace):
  """What a trace says of the work alone, without any time."""
  return {
    (t.step, t.prompt_id, t.member): (
      t.prompt_tokens,
      t.reward,
      [(turn.sampled, turn.observed) for turn in t.turns],
    )
    for t in trace.trajectories
  }


def test_every_schedule_has_the_same_work(raced):
  found, _ = raced
  want = work(found['sync'].trace())
  assert len(want) == 3 * WORKLOAD.prompts * WORKLOAD.group
  for runner in found.values():
    assert work(runner.trace()) == want


def test_waits_derive_from_the_turn(raced):
  """Under every schedule a wait is at least what is drawn for its turn."""
  found, _ = raced
  for runner in found.values():
    config = runner.config
    late = latency.make(config.seed, **config.task.latency)
    for t in runner.trace().trajectories:
      for number, turn in enumerate(t.turns, start=1):
        drawn = latency.draw(
          late.trace, late.seed, t.prompt_id, t.member, number
        )
        assert 0 < drawn <= turn.wait_s + 1e-3


def test_no_timed_step_compiles_and_the_bound_holds(raced):
  found, _ = raced
  for name, runner in found.items():
    for measured in runner.measured:
      assert not measured.compiled
      if name.startswith('thundersync'):
        assert measured.bound.bound_s <= measured.times.seconds
      assert (measured.staleness > 0) <= (name == 'async')
  rows = schedule_bench.rows(found)
  assert [row['schedule'] for row in rows] == list(found)
  assert rows[0]['faster'] == 1


def test_a_trace_is_read_as_it_was_written(raced):
  found, read = raced
  trace = found['sync'].trace()
  assert work(read) == work(trace)
  assert read.settings == trace.settings
  assert [s.step for s in read.steps] == [1, 2]
  assert set(read.measured) == set(schedule_bench.METHODS['grpo'])
  for one, other in zip(read.steps, trace.steps, strict=True):
    assert one.seconds == pytest.approx(other.seconds, rel=1e-5)


def test_replay_launches_what_the_learner_launched(raced):
  """A row holds one trajectory; those of advantage 0 are left out."""
  _, trace = raced
  rewards = {}
  for t in trace.trajectories:
    rewards.setdefault((t.step, t.prompt_id), []).append(t.reward)
  for name in ('sync', 'thundersync'):
    steps = replay.play(trace, simulate.SCHEDULES[name])
    for number, report in enumerate(steps):
      groups = [r for (step, _), r in rewards.items() if step == number]
      spread = sum(len(r) for r in groups if len(set(r)) > 1)
      everything = sum(map(len, groups))
      assert spread <= report.launches <= everything
      if name == 'sync':
        assert report.launches == spread


def made_up(waits, gradient_s=0.5):
  """A trace of one turn of four tokens and a known wait a trajectory."""
  return traces.Trace(
    'sync',
    'batch',
    {
      'slots': 8,
      'chunk': 4,
      'extend_rows': 1,
      'extend_tokens': 8,
      'workers': 8,
      'max_open_groups': 4,
      'rewards': True,
    },
    traces.Costs(
      0.01, 0, 0, 0, 0, (traces.GradientCost(1, 16, 4, 1, gradient_s),)
    ),
    (traces.StepTimes(0, 1.0, 0.5, 0.5),),
    tuple(
      traces.TrajectoryTimes(
        0, 0, member, 8, (traces.TurnTimes(4, 0, wait),), float(member)
      )
      for member, wait in enumerate(waits)
    ),
  )


def test_the_wait_that_balances_rollout_and_learner():
  trace = made_up([0.1, 0.4])
  # Learner: 1 s. Rollout: 0.04 s and the longest wait, to be 2 s.
  workload = dataclasses.replace(WORKLOAD, balance=2.0)
  scale = schedule_bench.wait_for(trace, workload)
  assert scale == pytest.approx((2 - 0.04) / 0.4, rel=1e-3)


def test_a_prediction_by_hand():
  trace = dataclasses.replace(
    made_up([0.1, 1.0]), measured={'sync': [2.0], 'thundersync': [1.5, 1.6]}
  )
  sync, streamed = replay.predict(trace)
  # Turns end at 0.04 s, gradients take 0.5 s: 1.04 + 1; 0.14 + 0.5, 1.04 + 0.5.
  assert sync['predicted_s'] == pytest.approx(2.04)
  assert sync['error'] == pytest.approx(0.02)
  assert streamed['predicted_s'] == pytest.approx(1.54)
  assert streamed['measured_s'] == pytest.approx(1.55)


def test_a_rollout_program_slows_a_gradient_down():
  """One slot: 0.04 s of decoding, 0.1 s of waiting, then the second's 0.04 s.

  They run beside the first gradient, which loses as much again: 0.14 + 0.54,
  then the second's 0.5.
  """
  trace = made_up([0.1, 0.1])
  trace = dataclasses.replace(
    trace,
    settings=trace.settings | {'slots': 1},
    costs=dataclasses.replace(trace.costs, contention=1.0),
  )
  schedules = replay.schedules(trace)
  (streamed,) = replay.play(trace, schedules['thundersync'])
  assert streamed.seconds == pytest.approx(1.18)
  (sync,) = replay.play(trace, schedules['sync'])
  assert sync.seconds == pytest.approx(0.28 + 1.0)


def test_contention_of_spans_by_hand():
  """Three seconds of gradients took four, two of them beside the rollout."""
  shape = {'rows': 1, 'tokens': 16, 'targets': 4, 'sinks': 1}

  def span(track, name, start, end):
    return timeline.Span(track, name, start, end, shape)

  recorder = traces.Recorder(max_turns=1)
  spans = [
    span('learner', 'gradient', 0, 2),
    span('learner', 'gradient', 3, 4),
    span('learner', 'gradient', 4, 5),
    span('rollout', 'decode', 1, 2.5),
    span('rollout', 'extend', 2.5, 4),
    span('environment', 'tool', 0, 9),
  ]
  record = timeline.StepSpans(0, 0.0, 9.0, spans)
  idle = {'time/rollout_idle_s': 6.0, 'time/learner_idle_s': 5.0}
  recorder.add(record, [], idle, slots=1)
  alone = made_up([], gradient_s=1.0).costs
  assert recorder.contention(alone) == pytest.approx((4 - 3) / 2)


def test_a_prediction_with_a_teacher_by_hand():
  trace = made_up([0.1, 1.0])
  trace = dataclasses.replace(
    trace,
    settings=trace.settings | {'rewards': False},
    measured={'sync': [2.0], 'thundersync_turn': [3.0]},
  )
  # No advantage is 0, and no seconds of a turn are known.
  (sync,) = replay.predict(trace)
  assert sync['schedule'] == 'sync'
  assert sync['predicted_s'] == pytest.approx(2.04)


def test_costs_of_spans_by_hand():
  def span(name, start, end, **args):
    return timeline.Span('learner', name, start, end, args)

  shape = {'rows': 1, 'tokens': 8, 'targets': 4, 'sinks': 1}
  costs = traces.costs(
    [
      span('decode', 0, 3),
      span('decode', 4, 5),
      span('prefill', 0, 2),
      *(span('gradient', 0, end, **shape) for end in (1, 2, 9)),
      span('score', 0, 1, **shape),
      timeline.Span('rollout', 'score', 0, 50, shape),
      span('barrier', 0, 1),
      span('publish', 0, 4),
    ],
    decode_steps=8,
    steps=2,
  )
  assert costs == traces.Costs(
    decode_s=0.5,
    prefill_s=2,
    extend_s=0.0,
    barrier_s=0.5,
    publish_s=2.0,
    gradients=(traces.GradientCost(1, 8, 4, 1, 4 + 1),),
  )


def test_a_file_that_is_no_trace(tmp_path):
  path = tmp_path / 'a.jsonl'
  path.write_text('{"kind": "stp"}\n')
  with pytest.raises(ValueError, match=r'a.jsonl:1: kind=.stp. is none of'):
    traces.read(path)
  path.write_text('')
  with pytest.raises(ValueError, match='no line of kind run'):
    traces.read(path)


def test_waits_can_be_scaled():
  times = made_up([0.5]).trajectories[0]
  assert replay.scaled(times, 3.0).turns[0].wait_s == 1.5
