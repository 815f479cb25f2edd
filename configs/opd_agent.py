"""A student is trained on its own queries by a teacher, without rewards.

  python experiments/train_rl.py --config=configs/agent_sql.py \
    --workdir=runs/agent_sql
  python experiments/train_rl.py --config=configs/opd_agent.py \
    --workdir=runs/opd_agent

The teacher is what the first command exports; the student is SmolLM2-135M after
a short warm start. No reward is used: the teacher scores what the student
samples. Validation accuracy (60 prompts, greedy): 0.17 before, 0.47 after; the
teacher has 0.45. Hardware: 2 CPU cores, 12 GiB of memory, 20 minutes.
"""

import pathlib
import runpy

import ml_collections

_TEACHER = pathlib.Path(__file__).with_name('agent_sql.py')


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  """Returns the config; arg is ''."""
  if arg:
    raise ValueError(f'opd_agent.py:{arg} does not exist: use nothing')
  c = runpy.run_path(str(_TEACHER))['get_config']()
  c.unlock()
  c.steps = 5
  c.distill.teacher = c.export_dir
  c.export_dir = ''

  # Queries answer at once here; where tools are slow, 'turn' uses their waits.
  c.stream.granularity = 'trajectory'
  c.distill.plan = 'close'
  c.distill.loss = 'reverse_kl'
  c.optimizer.learning_rate = 2e-5

  c.lock()
  return c
