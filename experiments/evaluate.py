"""Evaluates the latest checkpoint of a run on its held-out prompts.

  python experiments/evaluate.py --config=configs/quickstart.py \
    --workdir=runs/quickstart --config.eval.samples=8 --config.eval.k=8

Greedy accuracy and, with eval.samples, pass@k. The config is that of the run,
but for its eval block. The last line of output is JSON.
"""

import json

from absl import app, flags
from ml_collections import config_flags

from thundersync_jax import mesh
from thundersync_jax.runs import checkpoints, console, measure, workdir

CONFIG = config_flags.DEFINE_config_file(
  'config', None, 'Config file of the run.', lock_config=True
)
WORKDIR = flags.DEFINE_string('workdir', None, 'Directory of the run.')
CPU_DEVICES = flags.DEFINE_integer('cpu_devices', 2, 'Devices of a CPU.')


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments {argv[1:]}')
  mesh.force_cpu_devices(CPU_DEVICES.value)
  console.quiet_libraries()
  from thundersync_jax import assembly, train_rl  # the devices are chosen

  config = CONFIG.value
  assembly.check(config)
  with workdir.open_workdir(WORKDIR.value, config) as directory:
    saved = checkpoints.Checkpoints(directory.path / 'checkpoints')
    if saved.latest_step() is None:
      raise app.UsageError(f'{directory.path} holds no checkpoint: train first')
    run = train_rl.set_up(config, directory.path)
    try:
      state, _ = train_rl.restore(run, saved)
      step = int(state.step)
      run.agent.engine.publish(run.publish(state.params), step)
      figures = train_rl.evaluate_weights(run, step)
    finally:
      for pool in run.pools:
        pool.close()
  print(json.dumps(measure.rounded({'step': step} | figures)))


if __name__ == '__main__':
  flags.mark_flags_as_required(['config', 'workdir'])
  app.run(main)
