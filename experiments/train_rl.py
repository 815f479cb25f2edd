"""Trains a language model with reinforcement learning, or resumes a run.

  python experiments/train_rl.py --config=configs/quickstart.py --workdir=DIR

Any setting can be changed on the command line (--config.steps=40). The last
line of output is the run's summary as JSON.
"""

import json

from absl import app, flags
from ml_collections import config_flags

from thundersync_jax import mesh
from thundersync_jax.runs import console

CONFIG = config_flags.DEFINE_config_file(
  'config', None, 'Config file, e.g. configs/quickstart.py.', lock_config=True
)
WORKDIR = flags.DEFINE_string(
  'workdir', None, 'Directory of the run; one that exists is resumed.'
)
CPU_DEVICES = flags.DEFINE_integer(
  'cpu_devices', 2, 'Devices to split a CPU into: rollout and learner overlap.'
)


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments {argv[1:]}')
  mesh.force_cpu_devices(CPU_DEVICES.value)
  console.quiet_libraries()
  from thundersync_jax import train_rl  # after the devices are chosen

  result = train_rl.train(CONFIG.value, WORKDIR.value)
  print(json.dumps(result.summary))


if __name__ == '__main__':
  flags.mark_flags_as_required(['config', 'workdir'])
  app.run(main)
