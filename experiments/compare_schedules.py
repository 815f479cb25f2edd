"""Trains one config under every schedule and compares what came out.

  python experiments/compare_schedules.py \
    --config=configs/quickstart.py:debug --steps=3

sync and thundersync at each granularity must sample equal tokens and end with
equal parameters up to --tolerance, else the exit status is 1. A minute.
"""

import copy
import json
import sys
import tempfile

from absl import app, flags
from ml_collections import config_flags

from thundersync_jax import mesh
from thundersync_jax.runs import compare, console, measure
from thundersync_jax.streaming import scheduler

CONFIG = config_flags.DEFINE_config_file('config', None, 'Config file.')
STEPS = flags.DEFINE_integer('steps', 3, 'Optimizer steps of each run.')
WORKDIR = flags.DEFINE_string('workdir', None, 'Keeps the runs; a new folder.')
TOLERANCE = flags.DEFINE_float('tolerance', 1e-6, 'Largest |a - b| / |b|.')
CPU_DEVICES = flags.DEFINE_integer('cpu_devices', 2, 'Devices of a CPU.')
THUNDERSYNC = [('thundersync', size) for size in scheduler.GRANULARITIES]
RUNS = [('sync', 'batch'), *THUNDERSYNC, ('async', 'group')]


def train(folder):
  from thundersync_jax import assembly, train_rl  # the devices are chosen

  start, runs, rows = assembly.model(CONFIG.value).params, [], []
  for schedule, granularity in RUNS:
    config, record = copy.deepcopy(CONFIG.value), compare.TokenRecord()
    config.schedule, config.stream.granularity = schedule, granularity
    config.steps, config.eval.prompts = STEPS.value, 0
    done = train_rl.train(config, f'{folder}/{schedule}_{granularity}', record)
    runs.append(compare.Finished(record, done.params, done.summary))
    rows.append(compare.row(runs[-1], runs[0], start))
  return rows


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments {argv[1:]}')
  mesh.force_cpu_devices(CPU_DEVICES.value)
  console.quiet_libraries()
  with tempfile.TemporaryDirectory() as temporary:
    rows = train(WORKDIR.value or temporary)
  sys.stderr.write(compare.table(rows) + '\n')
  verdict = compare.verdict(rows, TOLERANCE.value)
  print(json.dumps(measure.rounded(verdict | measure.machine())))
  return 0 if verdict['equal'] else 1


if __name__ == '__main__':
  flags.mark_flag_as_required('config')
  app.run(main)
