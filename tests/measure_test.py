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


def test_limit_by_hand():
  limit = measure.Limit(
    nbytes=100, flops=60, bytes_per_s=50.0, flops_per_s=20.0
  )
  assert limit.seconds == 3.0  # 2 s of reading, 3 s of products
  # 3 rows, two matrices of 4 by 5 and one of 6 by 7, in 2 bytes a number.
  found = measure.product_limit(
    3,
    {'a': (4, 5, 2), 'b': (6, 7, 1)},
    dtype='bfloat16',
    more_numbers=9,
    more_flops=11,
  )
  assert found.nbytes == 2 * (2 * 20 + 42 + 9)
  assert found.flops == 2 * 3 * (2 * 20 + 42) + 11


def test_rounded_keeps_what_is_no_float():
  figures = {'a': 0.123456, 'b': [12345.678, 3], 'c': None, 'd': True}
  want = {'a': 0.1235, 'b': [12350.0, 3], 'c': None, 'd': True}
  assert measure.rounded(figures) == want
