"""Metrics: names and units, lines on disk, what a resumed run cuts."""

import io
import json
import re
import struct

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from thundersync_jax.runs import metrics as metrics_lib


def read_events(directory):
  """Events of all TensorBoard files: u64 length, u32 crc, event, u32 crc."""
  events = []
  for path in sorted(directory.glob('events.out.tfevents.*')):
    data = path.read_bytes()
    while data:
      (length,) = struct.unpack('<Q', data[:8])
      events.append(event_pb2.Event.FromString(data[12 : 12 + length]))
      data = data[12 + length + 4 :]
  return events


def test_every_metric_has_a_meaning_and_the_unit_of_its_name():
  units = {
    'per_s': 'tokens/s',
    's': 's',
    'tokens': 'tokens',
    'bytes': 'bytes',
    'steps': 'steps',
    'fraction': '0..1',
  }
  for name, text in metrics_lib.METRICS.items():
    assert re.fullmatch(r'[a-z]+/[a-z_]+', name), name
    meaning, unit = re.fullmatch(r'(.{10,}) \[(.+)\]', text).groups()
    assert meaning and unit, name
    suffix = next((s for s in units if name.endswith(f'_{s}')), None)
    if suffix:
      assert unit == units[suffix], name
    else:
      assert unit in ('0..1', '1', 'count', 'nats', 'reward', 'tokens'), name


def test_lines_and_events_hold_what_was_written(tmp_path):
  metrics = metrics_lib.Metrics(tmp_path)
  values = {
    'reward/mean': np.float32(0.25),
    'rollout/tokens': np.int64(12),
    'learner/grad_norm': jnp.asarray(-1.5, jnp.bfloat16),
    'learner/entropy': jnp.ones((1,)),
    'time/step_s': 0.1,
    'queue/open_groups': 3,
  }
  metrics.write(4, values)
  expected = {
    'step': 4,
    'reward/mean': 0.25,
    'rollout/tokens': 12,
    'learner/grad_norm': -1.5,
    'learner/entropy': 1.0,
    'time/step_s': 0.1,
    'queue/open_groups': 3,
  }
  # In the file before close(): a killed run keeps its finished steps.
  assert metrics_lib.read(tmp_path / 'metrics.jsonl') == [expected]
  metrics.close()
  scalars = {
    value.tag: value.simple_value
    for event in read_events(tmp_path)
    for value in event.summary.value
    if event.step == 4
  }
  assert scalars == pytest.approx(
    {name: value for name, value in expected.items() if name != 'step'}
  )


def test_an_unknown_name_gets_the_nearest_ones(tmp_path):
  metrics = metrics_lib.Metrics(tmp_path)
  with pytest.raises(KeyError, match="'reward/meen'.*nearest: reward/mean"):
    metrics.write(0, {'reward/meen': 1.0})
  assert (tmp_path / 'metrics.jsonl').read_text() == ''


@pytest.mark.parametrize('value', ['0.5', None, [1.0, 2.0], jnp.ones(2), 1j])
def test_a_value_that_is_not_one_number_is_refused(tmp_path, value):
  metrics = metrics_lib.Metrics(tmp_path)
  with pytest.raises(TypeError, match='reward/mean=.*must be one number'):
    metrics.write(0, {'reward/mean': value})


def test_a_value_that_is_not_finite_ends_the_run_but_keeps_the_line(tmp_path):
  """cases row 14: a missing reward must not end in a run that looks well."""
  metrics = metrics_lib.Metrics(tmp_path)
  values = {'learner/grad_norm': float('nan'), 'reward/mean': 1.0}
  with pytest.raises(ValueError, match='step 3: learner/grad_norm=nan must be'):
    metrics.write(3, values)
  with pytest.raises(ValueError, match='learner/grad_norm=inf'):
    metrics.write(4, {'learner/grad_norm': np.inf})
  assert metrics_lib.read(tmp_path / 'metrics.jsonl') == [
    {'step': 3, 'learner/grad_norm': None, 'reward/mean': 1.0},
    {'step': 4, 'learner/grad_norm': None},
  ]


def test_steps_do_not_go_back(tmp_path):
  metrics = metrics_lib.Metrics(tmp_path, start_step=2)
  with pytest.raises(ValueError, match='step=1 comes after step 2'):
    metrics.write(1, {'reward/mean': 0.0})
  metrics.write(2, {'reward/mean': 0.0})
  metrics.write(2, {'eval/accuracy': 0.5})
  assert len(metrics_lib.read(tmp_path / 'metrics.jsonl')) == 2


@pytest.mark.parametrize('tail', ['', '{"step": 5, "rew', '{"step": 5}'])
def test_a_resumed_run_leaves_the_lines_of_an_uninterrupted_one(tmp_path, tail):
  """cases row 1: what stands there after a resume is what would have stood."""
  for name in ('killed', 'whole'):
    (tmp_path / name).mkdir()
    metrics = metrics_lib.Metrics(tmp_path / name)
    for step in range(5 if name == 'killed' else 8):
      metrics.write(step, {'reward/mean': 0.1 * step})
    metrics.close()
  with open(tmp_path / 'killed' / 'metrics.jsonl', 'a') as file:
    file.write(tail)
  metrics = metrics_lib.Metrics(tmp_path / 'killed', start_step=3)
  for step in range(3, 8):
    metrics.write(step, {'reward/mean': 0.1 * step})
  metrics.close()
  killed, whole = (
    (tmp_path / name / 'metrics.jsonl').read_bytes()
    for name in ('killed', 'whole')
  )
  assert killed == whole
  events = read_events(tmp_path / 'killed')
  start = event_pb2.SessionLog.SessionStatus.Value('START')
  purged = [e.step for e in events if e.session_log.status == start]
  assert purged == [3]


def test_a_whole_last_line_without_its_newline_is_kept(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  path.write_text('{"step": 0}\n{"step": 1}')
  metrics_lib.Metrics(tmp_path, start_step=2).write(2, {'reward/mean': 1.0})
  assert [line['step'] for line in metrics_lib.read(path)] == [0, 1, 2]


def test_a_broken_line_in_the_middle_is_named(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  path.write_text('{"step": 0}\n{"st\n{"step": 2}\n')
  with pytest.raises(ValueError, match='metrics.jsonl, line 2 is not JSON'):
    metrics_lib.Metrics(tmp_path, start_step=2)


def test_the_summary_holds_metrics_and_facts(tmp_path):
  summary = {
    'eval/accuracy_after': np.float32(0.5),
    'staleness/max_steps': 0,
    'schedule': 'thundersync',
  }
  returned = metrics_lib.write_summary(tmp_path, summary)
  written = json.loads((tmp_path / 'summary.json').read_text())
  assert written == returned
  assert written == {
    'eval/accuracy_after': 0.5,
    'staleness/max_steps': 0,
    'schedule': 'thundersync',
  }
  with pytest.raises(KeyError, match='nearest: eval/accuracy'):
    metrics_lib.write_summary(tmp_path, {'eval/acuracy': 0.5})
  with pytest.raises(ValueError):
    metrics_lib.write_summary(tmp_path, {'time/total_s': float('inf')})
  assert json.loads((tmp_path / 'summary.json').read_text()) == written
  assert [path.name for path in tmp_path.iterdir()] == ['summary.json']


class Terminal(io.StringIO):
  def isatty(self):
    return True


VALUES = {
  'reward/mean': 0.5,
  'rollout/tokens_per_s': 1234.4,
  'time/step_s': 4.0,
  'time/rollout_idle_s': 1.0,
  'time/learner_idle_s': 3.0,
}
STATUS = 'reward 0.500, 1234 tokens/s, rollout idle 25%, learner idle 75%'


def test_progress_on_a_terminal_is_one_bar():
  file = Terminal()
  bar = metrics_lib.ProgressBar(10, start_step=4, file=file)
  bar.update(4, VALUES)
  bar.update(9, VALUES)
  bar.close()
  last = file.getvalue().split('\r')[-1]
  assert '10/10' in last and STATUS in last
  assert file.getvalue().count('\n') == 1


def test_progress_elsewhere_is_a_few_lines():
  file = io.StringIO()
  bar = metrics_lib.ProgressBar(100, file=file)
  for step in range(100):
    bar.update(step, VALUES)
  bar.close()
  assert file.getvalue().splitlines() == [
    f'step 1/100, {STATUS}',
    f'step 100/100, {STATUS}',
  ]
