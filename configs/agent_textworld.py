"""SmolLM2-135M trains on what Simon says, a game of TextWorld-Express.

  pip install -e '.[quickstart,agents]'
  python experiments/train_rl.py --config=configs/agent_textworld.py \
    --workdir=runs/agent_textworld

Simon names four actions at once; the agent takes one a turn, from memory. Needs
Java (default-jre-headless). Hardware: 2 CPU cores, 10 GiB of memory, 16
minutes. Validation success (60 games, greedy): 0.00 before, 0.15 after the warm
start, 0.52 after GRPO.
"""

import ml_collections

from thundersync_jax import defaults


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  """Returns the config; arg is ''."""
  if arg:
    raise ValueError(f'agent_textworld.py:{arg} does not exist: use nothing')
  c = defaults.config()
  c.steps = 6
  c.checkpoint_every_steps = 3

  c.task.family = 'textworld'
  c.task.args.game = 'simonsays'
  c.task.args.game_args = {'gameLength': 4, 'memorization': 1}
  c.task.args.max_turns = 4
  c.task.args.actions = False
  c.task.train_prompts = 500
  c.task.validation_prompts = 60
  c.task.test_prompts = 60

  c.sft.steps = 2
  c.sft.demonstrations = 32
  c.sft.batch = 16
  c.sft.learning_rate = 5e-5

  c.rollout.prompts_per_step = 8
  c.rollout.group_size = 8
  c.rollout.temperature = 0.6
  c.rollout.slots = 64
  c.rollout.chunk = 3
  c.rollout.max_prompt_tokens = 88
  c.rollout.max_turn_tokens = 8
  c.rollout.max_trajectory_tokens = 32
  c.rollout.max_turns = 4
  c.rollout.max_context = 224
  c.rollout.extend_rows = 8
  c.rollout.prompt_buckets = (16, 88)
  c.rollout.cache_buckets = (224,)

  c.stream.granularity = 'group'  # on two cores compute is what is scarce

  c.learner.rows = (1,)
  c.learner.row_tokens = (320, 640)
  c.learner.row_targets = (128, 256)

  c.optimizer.learning_rate = 1e-5

  c.eval.fold = 'validation'
  c.eval.prompts = 60

  c.lock()
  return c
