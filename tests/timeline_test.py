"""Timeline: idle time against a fine grid, the trace format, the pictures."""

import json
import random
import threading

import numpy as np
import pytest
from matplotlib import image

from thundersync_jax.runs import metrics as metrics_lib
from thundersync_jax.runs import plots
from thundersync_jax.runs import timeline as timeline_lib


def random_timeline(seed, spans=60):
  """Spans on a millisecond grid, partly outside the step [10, 12]."""
  rng = random.Random(seed)
  timeline = timeline_lib.Timeline('thundersync')
  timeline.begin_step(5, start=10.0)
  for _ in range(spans):
    start = rng.randint(9_800, 12_100)
    end = start + rng.randint(0, 150)
    track = rng.choice(timeline_lib.TRACKS)
    name = rng.choice(timeline_lib.NAMES)
    timeline.span(track, name, start / 1e3, end / 1e3, rows=end - start)
  timeline.end_step(end=12.0)
  return timeline


@pytest.mark.parametrize('seed', range(3))
def test_busy_time_equals_the_milliseconds_that_any_span_covers(seed):
  timeline = random_timeline(seed)
  for track in timeline_lib.TRACKS:
    covered = np.zeros(2_000, bool)
    for span in timeline.steps()[0].spans:
      if span.track == track:
        first = round(1e3 * span.start) - 10_000
        last = round(1e3 * span.end) - 10_000
        covered[max(first, 0) : max(last, 0)] = True
    busy_s = timeline.busy_s(track, 10.0, 12.0)
    assert busy_s == pytest.approx(covered.sum() / 1e3, abs=1e-9)
    idle_s = timeline.idle_s(track, 10.0, 12.0)
    assert idle_s == pytest.approx((~covered).sum() / 1e3, abs=1e-9)


def test_overlapping_touching_and_nested_spans_count_once():
  timeline = timeline_lib.Timeline()
  timeline.begin_step(0, start=0.0)
  for start, end in ((1, 4), (2, 3), (3.5, 5), (5, 6), (8, 8), (9, 20)):
    timeline.span('environment', 'grading', start, end)
  # [1, 6] and [9, 10].
  assert timeline.busy_s('environment', 0.0, 10.0) == 6.0
  assert timeline.idle_s('environment', 0.0, 10.0) == 4.0
  assert timeline.idle_s('learner', 0.0, 10.0) == 10.0


def test_a_span_of_the_next_step_counts_where_it_reaches_into_this_one():
  timeline = timeline_lib.Timeline('async')
  timeline.begin_step(0, start=0.0)
  timeline.end_step(end=10.0)
  timeline.begin_step(1, start=10.0)
  timeline.span('rollout', 'decode', 7.0, 12.0)
  assert timeline.busy_s('rollout', 0.0, 10.0) == 3.0
  assert timeline.busy_s('rollout', 10.0, 20.0) == 2.0


def test_lanes_hold_no_overlap_and_are_as_few_as_spans_at_once():
  spans = random_timeline(7, spans=300).steps()[0].spans
  lanes = timeline_lib.stack(spans)
  for lane in lanes:
    for before, after in zip(lane, lane[1:], strict=False):
      assert before.end <= after.start
  assert sorted(map(id, sum(lanes, []))) == sorted(map(id, spans))
  instants = np.arange(9_800, 12_300) / 1e3 + 5e-4
  at_once = [sum(s.start < t < s.end for s in spans) for t in instants]
  assert len(lanes) == max(at_once)


def test_only_the_last_steps_are_kept():
  timeline = timeline_lib.Timeline(keep_steps=2)
  for step in range(5):
    timeline.begin_step(step, start=float(step))
    timeline.span('host', 'publish', step, step + 0.5)
    timeline.end_step(end=step + 1.0)
  assert [record.step for record in timeline.steps()] == [3, 4]
  assert timeline.busy_s('host', 0.0, 5.0) == 1.0


def test_threads_lose_no_span():
  timeline = timeline_lib.Timeline()
  timeline.begin_step(0)

  def work():
    for _ in range(200):
      with timeline.measure('environment', 'grading'):
        pass

  threads = [threading.Thread(target=work) for _ in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert len(timeline.end_step().spans) == 800


def test_measure_records_a_block_that_raises():
  timeline = timeline_lib.Timeline()
  timeline.begin_step(0)
  with pytest.raises(OSError), timeline.measure('host', 'checkpoint', n=3):
    raise OSError
  (span,) = timeline.end_step().spans
  assert (span.track, span.name, span.args) == ('host', 'checkpoint', {'n': 3})
  assert span.start <= span.end


def test_bad_spans_are_refused():
  timeline = timeline_lib.Timeline()
  with pytest.raises(RuntimeError, match='begin_step'):
    timeline.end_step()
  with pytest.raises(ValueError, match='begin_step'):
    timeline.span('host', 'publish', 0.0, 1.0)
  timeline.begin_step(0)
  with pytest.raises(ValueError, match='tracks are rollout, learner'):
    timeline.span('gpu', 'decode', 0.0, 1.0)
  with pytest.raises(ValueError, match='names are prefill'):
    timeline.span('rollout', 'dekode', 0.0, 1.0)
  with pytest.raises(ValueError, match='ends at 1.0 before 2.0'):
    timeline.span('rollout', 'decode', 2.0, 1.0)


def test_the_trace_holds_every_span_in_microseconds_and_lanes(tmp_path):
  timeline = random_timeline(3)
  timeline.span('host', 'publish', 12.0, 12.25, count=np.int64(4))
  timeline.save(tmp_path / 'timeline.json')
  trace = json.loads((tmp_path / 'timeline.json').read_text())
  assert trace['otherData'] == {'schedule': 'thundersync'}
  events = trace['traceEvents']
  names = {
    e['tid']: e['args']['name'] for e in events if e['name'] == 'thread_name'
  }
  complete = [e for e in events if e['ph'] == 'X']
  assert len(events) == len(complete) + len(names) + 1
  assert {e['pid'] for e in events} == {1}
  assert min(names) == 1  # thread 0 is the idle task of the system
  spans = timeline.steps()[0].spans
  origin = min(span.start for span in spans)
  step = next(e for e in complete if e['name'] == 'step 5')
  assert names[step['tid']] == 'step'
  assert step['ts'] == pytest.approx(1e6 * (10.0 - origin), abs=1e-2)
  assert step['dur'] == pytest.approx(2e6, abs=1e-2)
  expected = sorted(
    (s.track, s.name, round(1e3 * (s.start - origin)), s.end - s.start)
    for s in spans
  )
  found = sorted(
    (
      names[e['tid']].split()[0],
      e['name'],
      round(e['ts'] / 1e3),
      pytest.approx(e['dur'] / 1e6, abs=1e-6),
    )
    for e in complete
    if e is not step
  )
  assert expected == found
  assert [e['args'] for e in complete if e['args'].get('count')] == [
    {'count': 4}
  ]
  for thread in names:
    ends = 0.0
    for event in complete:
      if event['tid'] == thread:
        assert event['ts'] >= ends - 2e-3
        ends = event['ts'] + event['dur']


def pixels(path):
  return np.rint(255 * image.imread(path)[..., :3]).astype(int)


def share_of(path, colour):
  """Share of the pixels of a picture that have exactly one colour."""
  rgb = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
  return (pixels(path) == rgb).all(-1).mean()


def test_the_picture_gives_each_name_the_area_of_its_time(tmp_path):
  path = tmp_path / 'timeline.png'
  timeline = timeline_lib.Timeline('sync')
  timeline.begin_step(2, start=100.0)
  timeline.span('rollout', 'decode', 99.0, 106.0)  # 6 of it in the step
  timeline.span('learner', 'gradient', 107.0, 109.0)
  timeline.end_step(end=110.0)
  timeline.begin_step(3, start=110.0)
  plots.plot_timeline(timeline, path)
  decode = share_of(path, plots.COLOURS['decode'])
  gradient = share_of(path, plots.COLOURS['gradient'])
  idle = share_of(path, plots.IDLE)
  # The legend's squares and white edges add some to each.
  assert decode / gradient == pytest.approx(6 / 2, rel=0.05)
  assert idle / decode == pytest.approx((20 - 8) / 6, rel=0.05)
  assert share_of(path, plots.COLOURS['barrier']) == 0
  with pytest.raises(ValueError, match=r'step=3 .*\[2\]'):
    plots.plot_timeline(timeline, path, step=3)


def test_a_step_without_spans_and_one_with_many_are_drawn(tmp_path):
  timeline = random_timeline(1, spans=800)
  timeline.begin_step(6, start=12.2)
  timeline.end_step(end=12.4)
  for step in (5, 6):
    plots.plot_timeline(timeline, tmp_path / f'{step}.png', step)
    assert pixels(tmp_path / f'{step}.png').std() > 0


def test_smooth_equals_a_slow_mean():
  values = np.random.default_rng(0).normal(size=23)
  for window in (1, 2, 5, 40):
    half = window // 2
    slow = [
      np.mean([values[j] for j in range(23) if abs(i - j) <= half])
      for i in range(23)
    ]
    np.testing.assert_allclose(plots.smooth(values, window), slow, atol=1e-12)


@pytest.mark.parametrize('shift', [0.0, -3.0])
def test_the_curve_shows_rewards_and_accuracies(tmp_path, shift):
  metrics = metrics_lib.Metrics(tmp_path)
  for step in range(20):
    metrics.write(step, {'reward/mean': shift + step / 20})
    if step % 10 == 0:
      metrics.write(step, {'eval/accuracy': step / 20})
  metrics.close()
  path = plots.plot_curve(tmp_path)
  assert path == tmp_path / 'curve.png'
  assert share_of(path, plots.COLOURS['extend']) > 0
  assert share_of(path, plots.COLOURS['barrier']) > 0


def test_a_run_without_rewards_has_no_curve(tmp_path):
  (tmp_path / 'metrics.jsonl').write_text(
    '{"step": 0, "learner/grad_norm": 1}\n'
  )
  with pytest.raises(ValueError, match='holds no reward/mean'):
    plots.plot_curve(tmp_path)
