"""A small model learns to find the coin in houses of TextWorld-Express.

  python experiments/train_rl.py --config=configs/agent_textworld.py \
    --workdir=runs/agent_textworld
"""

import ml_collections

from thundersync_jax import defaults


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  """Returns the config; arg is ''."""
  if arg:
    raise ValueError(f'agent_textworld.py:{arg} does not exist: use nothing')
  c = defaults.config()
  c.steps = 40
  c.checkpoint_every_steps = 20

  c.model.new = {
    'embed_dim': 128,
    'mlp_dim': 384,
    'num_layers': 4,
    'num_heads': 2,
    'num_kv_heads': 2,
    'head_dim': 64,
  }

  c.task.family = 'textworld'
  c.task.args.game = 'coin'
  c.task.args.game_args = {
    'numLocations': 6,
    'includeDoors': 0,
    'numDistractorItems': 0,
  }
  c.task.args.max_turns = 8
  c.task.args.reward = 'success'
  c.task.args.actions = False
  c.task.train_prompts = 1200
  c.task.validation_prompts = 100
  c.task.test_prompts = 100

  c.sft.steps = 100
  c.sft.demonstrations = 600
  c.sft.batch = 16
  c.sft.learning_rate = 2e-3
  c.sft.warmup_steps = 10

  c.rollout.prompts_per_step = 8
  c.rollout.group_size = 8
  c.rollout.slots = 32
  c.rollout.chunk = 2
  c.rollout.max_prompt_tokens = 64
  c.rollout.max_turn_tokens = 8
  c.rollout.max_trajectory_tokens = 64
  c.rollout.max_turns = 8
  c.rollout.max_context = 320
  c.rollout.prompt_buckets = (40, 64)
  c.rollout.cache_buckets = (320,)

  c.learner.rows = (1, 4)
  c.learner.row_tokens = (512,)
  c.learner.row_targets = (80,)

  c.optimizer.learning_rate = 5e-4
  c.optimizer.b2 = 0.99

  c.eval.fold = 'validation'
  c.eval.prompts = 100

  c.lock()
  return c
