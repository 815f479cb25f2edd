"""Predicts measured steps from traces, then simulates what is not there.

  python experiments/simulate.py --traces=a.jsonl,b.jsonl --plots=DIR

A trace is that of a synchronous run by experiments/bench_schedules.py; steps of
the other schedules are simulated from its lengths, waits and programs, and from
what programs cost each other beside one another, and compared with those that
were measured. Then come splits of clusters of up to thousands of chips, and how
correlation within groups, the limit of open groups and the cost of a launch
decide between trajectory, group and turn. Exit status 1 where a prediction is
off by more than --tolerance. Five minutes, most of them for 4096 chips.
"""

import pathlib

from absl import app, flags

from thundersync_jax import replay
from thundersync_jax.runs import compare, schedule_plots, traces
from thundersync_jax.streaming import studies

TRACES = flags.DEFINE_list('traces', [], 'Traces with measured steps.')
PLOTS = flags.DEFINE_string('plots', None, 'Folder for the pictures.')
TOLERANCE = flags.DEFINE_float('tolerance', 0.1, 'Of a predicted step.')
CHIPS = flags.DEFINE_multi_integer(
  'chips', list(studies.REPLICAS), 'Sizes of clusters.'
)
SHARES = (0.125, 0.25, 0.375, 0.5, 0.75)


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments {argv[1:]}')
  predicted = []
  for path in TRACES.value:
    rows = replay.predict(traces.read(path))
    predicted += [{'trace': path} | row for row in rows]
  if predicted:
    print(compare.table(predicted), end='\n\n')
  splits = [row for n in CHIPS.value for row in studies.splits(n, SHARES)]
  print(compare.table(splits), end='\n\n')
  regimes = studies.regimes()
  print(compare.table(regimes))
  if PLOTS.value:
    folder = pathlib.Path(PLOTS.value)
    folder.mkdir(parents=True, exist_ok=True)
    schedule_plots.plot_splits(splits, folder / 'splits.png')
    schedule_plots.plot_regimes(regimes, folder / 'regimes.png')
  worst = max((abs(row['error']) for row in predicted), default=0.0)
  return 1 if worst > TOLERANCE.value else 0


if __name__ == '__main__':
  app.run(main)
