"""Delays: their distributions, that they are drawn alike, and their spans."""

import math
import time

import agent_play
import numpy as np
import pytest

from thundersync_jax.envs import base, latency
from thundersync_jax.runs import timeline as timeline_lib


def draws(trace, count=4000):
  return np.array([latency.draw(trace, 5, i, i % 7, 1) for i in range(count)])


def test_log_normal_delays_have_the_mean_or_median_that_was_asked():
  sigma, count = 0.8, 4000
  by_mean = draws(latency.lognormal(mean=2.0, sigma=sigma), count)
  # Standard error of the mean: 2 sqrt(exp(sigma^2) - 1) / sqrt(n) = 0.03.
  error = 2 * math.sqrt(math.expm1(sigma**2) / count)
  assert abs(by_mean.mean() - 2.0) < 4 * error
  assert abs(np.log(by_mean).std() - sigma) < 0.04
  by_median = draws(latency.lognormal(median=2.0, sigma=sigma), count)
  assert abs(np.log(by_median).mean() - math.log(2.0)) < 4 * sigma / 63
  np.testing.assert_allclose(
    by_median / by_mean, math.exp(sigma**2 / 2), rtol=1e-9
  )


def test_measured_delays_are_drawn_as_often_as_they_stand(tmp_path):
  path = tmp_path / 'delays.txt'
  path.write_text('# seconds\n0.5\n0.5\n4\n')
  drawn = draws(latency.read(path))
  assert set(drawn) == {0.5, 4.0}
  assert abs((drawn == 0.5).mean() - 2 / 3) < 4 * math.sqrt(2 / 9 / 4000)
  path.write_text('7\n')
  assert set(draws(latency.read(path), 3)) == {7.0}


def test_a_delay_depends_on_seed_prompt_member_and_turn_alone():
  trace = latency.lognormal(mean=1.0, sigma=1.0)
  keys = [(s, p, m, t) for s in (0, 1) for p in (2, 3) for m in (0, 1, 2)
          for t in (1, 2)]  # fmt: skip
  first = {key: latency.draw(trace, *key) for key in keys}
  again = {key: latency.draw(trace, *key) for key in reversed(keys)}
  assert first == again and len(set(first.values())) == len(keys)


def test_a_delayed_environment_sleeps_its_draws(monkeypatch):
  slept = []
  monkeypatch.setattr(time, 'sleep', slept.append)
  trace = latency.lognormal(mean=1.0, sigma=1.0)
  inner = agent_play.Talker(turns=2)
  for on_reset in (False, True):
    made = latency.Latency(trace, 9, on_reset).wrap(inner, 4, 1)
    assert made.max_turns == inner.max_turns
    assert not hasattr(made, 'demonstrate')
    made.reset({})
    made.step('a')
    made.step('b')
    made.reset({})  # starts over
    made.step('a')
    made.close()
    turns = [0, 1, 2, 0, 1] if on_reset else [1, 2, 1]
    expected = [latency.draw(trace, 9, 4, 1, turn) for turn in turns]
    assert slept == expected
    slept.clear()


def test_the_config_block():
  assert latency.make(3) is None
  trace = latency.make(3, kind='constant', seconds=4.0, scale=0.5).trace
  assert set(draws(trace, 3)) == {2.0}
  cut = {'kind': 'lognormal', 'seconds': 1.0, 'sigma': 2.0, 'max_seconds': 1.0}
  drawn = draws(latency.make(3, median=True, **cut).trace)
  assert drawn.max() == 1.0 and abs((drawn == 1.0).mean() - 0.5) < 0.04
  trace = latency.make(3, kind='empirical', samples=(1.0, 3.0)).trace
  assert set(draws(trace, 50)) == {1.0, 3.0}


@pytest.mark.parametrize(
  'args, match',
  [
    ({'kind': 'slow'}, r"latency.kind='slow' does not exist: \['constant'"),
    ({'sed': 1}, r"task.latency: unknown arguments \['sed'\]"),
    ({'kind': 'constant', 'seconds': -1.0}, 'seconds=-1.0 must be a finite'),
    ({'kind': 'constant', 'seconds': math.nan}, 'seconds=nan must be'),
    ({'kind': 'lognormal'}, 'a log-normal of 0.0 seconds'),
    ({'kind': 'lognormal', 'seconds': 1.0, 'sigma': -1.0}, 'sigma=-1.0'),
    ({'kind': 'empirical'}, "file='' with 0 samples"),
    ({'kind': 'empirical', 'samples': (1, -2)}, 'delay=-2.0 must be'),
    ({'scale': -1.0}, 'scale=-1.0 must be'),
  ],
)
def test_what_is_no_delay_is_refused(args, match):
  with pytest.raises(ValueError, match=match):
    latency.make(0, **args)


class Graded(agent_play.Talker):
  """Fails on purpose."""

  def step(self, text):
    super().step(text)
    raise OSError('gone') if self._count == 2 else base.RewardError('none')


def test_steps_are_spans_that_say_whose_they_are():
  clock = timeline_lib.Timeline()
  clock.begin_step(0)
  late = latency.Latency(latency.constant(0.01), 0)
  makers = [lambda: agent_play.Talker(turns=3)] * 2 + [Graded]
  _, events, _ = agent_play.play(
    makers, agent_play.limits_of(), timeline=clock, latency=late
  )
  assert 'Graded.step raised RewardError' in events[2, 0][-1].failure
  spans = clock.end_step().spans
  seen = {
    (s.args['prompt_id'], s.args['member'], s.args['turn'], s.name)
    for s in spans
  }
  expected = {(p, 0, t, 'tool') for p in (0, 1) for t in (1, 2)}
  expected |= {(p, 0, 3, 'grading') for p in (0, 1)} | {(2, 0, 1, 'grading')}
  assert seen == expected and len(spans) == len(expected)
  assert {span.track for span in spans} == {'environment'}
  assert all(span.end - span.start >= 0.01 for span in spans)
