"""Timing helpers: medians, what is counted, and plausible limits."""

import time

import pytest

from thundersync_jax.runs import measure


def test_median_of_each_by_itself():
  timings = [
    measure.Timing(1.0, 30.0),
    measure.Timing(2.0, 10.0),
    measure.Timing(9.0, 20.0),
  ]
  assert measure.median(timings) == measure.Timing(2.0, 20.0)
  with pytest.raises(ValueError, match='warmup'):
    measure.median([])


def test_sleep_takes_wall_time_and_no_cpu():
  calls = []

  def nap():
    calls.append(time.sleep(0.05))

  timings = measure.timed(nap, repeats=3, warmup=2)
  middle = measure.median(timings)
  assert len(timings) == 3
  assert len(calls) == 5
  assert middle.wall_s >= 0.05
  assert middle.cpu_s < 0.04


def test_limits_are_positive_and_a_larger_product_takes_longer():
  assert measure.read_bandwidth(1 << 20, repeats=2) > 1e6
  small = measure.matmul_s(2, 8, 8, 'float32', repeats=2)
  large = measure.matmul_s(64, 512, 512, 'float32', repeats=2)
  assert 0 < small < large


def test_rounded_keeps_what_is_no_float():
  figures = {'a': 0.123456, 'b': [12345.678, 3], 'c': None, 'd': True}
  want = {'a': 0.1235, 'b': [12350.0, 3], 'c': None, 'd': True}
  assert measure.rounded(figures) == want
