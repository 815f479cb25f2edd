"""SmolLM2-135M answers questions with SQL: a warm start, then GRPO.

  python experiments/train_rl.py --config=configs/agent_sql.py \
    --workdir=runs/agent_sql

Hardware: 2 CPU cores, 10 GiB of memory, 24 minutes. Validation accuracy (60
prompts, greedy): 0.00 before, 0.17 after the warm start, 0.45 after GRPO.

The warm start is short on purpose: after five steps of it (0.57), seven steps
of GRPO at a learning rate of 2e-6 gave 0.58.
"""

import ml_collections

from thundersync_jax import defaults


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  """Returns the config; arg is ''."""
  if arg:
    raise ValueError(f'agent_sql.py:{arg} does not exist: use nothing')
  c = defaults.config()
  c.steps = 10
  c.checkpoint_every_steps = 5
  c.export_dir = 'runs/agent_sql/model'  # teacher of opd_agent.py

  c.task.family = 'sql'
  c.task.args.levels = (1, 2, 3)
  c.task.train_prompts = 1000
  c.task.validation_prompts = 100
  c.task.test_prompts = 100

  c.sft.steps = 3
  c.sft.demonstrations = 48
  c.sft.batch = 16
  c.sft.learning_rate = 5e-5
  c.rollout.prompts_per_step = 8
  c.rollout.group_size = 8
  c.rollout.temperature = 0.8
  c.rollout.slots = 64
  c.rollout.chunk = 4
  c.rollout.max_prompt_tokens = 72
  c.rollout.max_turn_tokens = 32
  c.rollout.max_trajectory_tokens = 80
  c.rollout.max_turns = 3
  c.rollout.max_context = 192
  c.rollout.extend_rows = 8
  c.rollout.prompt_buckets = (24, 72)
  c.rollout.cache_buckets = (192,)

  c.stream.granularity = 'group'  # on two cores compute is what is scarce

  # A prompt and what its group answers are one row, as a rule.
  c.learner.rows = (1,)
  c.learner.row_tokens = (240, 480)
  c.learner.row_targets = (128, 256)

  c.optimizer.learning_rate = 1e-5

  c.eval.fold = 'validation'
  c.eval.prompts = 60

  c.lock()
  return c
