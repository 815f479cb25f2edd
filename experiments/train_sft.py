"""Trains a language model to imitate gold paths of a task, or resumes a run.

  python experiments/train_sft.py --config=configs/agent_sql.py --workdir=DIR

The `sft` block of the config says how many steps and demonstrations. The last
line of output is the run's summary as JSON; --export writes a Hugging Face
directory, which model.source can name.
"""

import json

from absl import app, flags
from ml_collections import config_flags

from thundersync_jax import mesh
from thundersync_jax.runs import console

CONFIG = config_flags.DEFINE_config_file(
  'config', None, 'Config file, e.g. configs/agent_sql.py.', lock_config=True
)
WORKDIR = flags.DEFINE_string(
  'workdir', None, 'Directory of the run; one that exists is resumed.'
)
EXPORT = flags.DEFINE_string('export', '', 'Hugging Face directory to write.')
CPU_DEVICES = flags.DEFINE_integer(
  'cpu_devices', 2, 'Devices to split a CPU into: rollout and learner.'
)


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments {argv[1:]}')
  mesh.force_cpu_devices(CPU_DEVICES.value)
  console.quiet_libraries()
  from thundersync_jax import train_sft  # after the devices are chosen
  from thundersync_jax.models import hf_checkpoint

  result = train_sft.train(CONFIG.value, WORKDIR.value)
  if EXPORT.value:
    model = result.loaded
    hf_checkpoint.export(
      EXPORT.value, model.config, model.params, model.directory
    )
  print(json.dumps(result.summary))


if __name__ == '__main__':
  flags.mark_flags_as_required(['config', 'workdir'])
  app.run(main)
