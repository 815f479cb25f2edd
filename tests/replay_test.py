"""Steps that were measured beside a trace, foretold from the trace."""

import pathlib

import pytest

from thundersync_jax import replay
from thundersync_jax.runs import traces

# Written by experiments/bench_schedules.py on two cores.
TRACES = sorted((pathlib.Path(__file__).parent / 'data').glob('trace_*.jsonl'))


def test_there_are_traces_of_three_workloads():
  workloads = {path.stem.split('_')[1] for path in TRACES}
  assert len(workloads) == 3


@pytest.mark.parametrize('path', TRACES, ids=lambda path: path.stem)
def test_measured_steps_are_foretold(path):
  lines = replay.predict(traces.read(path))
  assert {'sync', 'thundersync', 'async'} <= {
    line['schedule'] for line in lines
  }
  wrong = [line for line in lines if abs(line['error']) > 0.1]
  assert not wrong
