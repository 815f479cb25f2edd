"""Every setting of a run, with its unit and a default.

A config file (configs/) starts from `config()` and sets what its experiment is
about. Where a value is '', () or 0 and says so, it is derived from others.
"""

import ml_collections


def config() -> ml_collections.ConfigDict:
  """Returns all settings, unlocked."""
  c = ml_collections.ConfigDict()
  c.seed = 0  # of keys, prompts and shuffles
  c.steps = 100  # optimizer steps
  c.schedule = 'thundersync'  # sync, thundersync or async
  c.checkpoint_every_steps = 10  # 0: at the end only
  c.keep_checkpoints = 1
  c.max_failed_fraction = 0.5  # of a step's trajectories, before it is an error
  c.export_dir = ''  # Hugging Face directory to write at the end

  c.model = ml_collections.ConfigDict()
  c.model.source = 'smollm2-135m-instruct'  # or a directory, .gguf, hub:a/b
  c.model.compute_dtype = 'float32'  # of matrix products: float32 or bfloat16
  c.model.remat = False  # recompute layers in the backward pass
  # Sizes (embed_dim, num_layers, ...) of a model to train from nothing with
  # the tokenizer of the source; empty: the weights of the source.
  c.model.new = ml_collections.ConfigDict()

  c.mesh = ml_collections.ConfigDict()
  c.mesh.rollout_devices = -1  # half of them; 0: share one mesh
  c.mesh.data = 1
  c.mesh.fsdp = -1  # what data and tensor leave
  c.mesh.tensor = 1

  c.task = ml_collections.ConfigDict()
  c.task.family = ''  # see envs/__init__.py
  c.task.args = ml_collections.ConfigDict()  # of the family
  c.task.train_prompts = 1000
  c.task.validation_prompts = 0  # 0: no such fold
  c.task.test_prompts = 100
  c.task.latency = ml_collections.ConfigDict()  # waits before each answer
  c.task.latency.kind = 'none'  # constant, lognormal or empirical
  c.task.latency.seconds = 0.0  # a constant, or a log-normal's mean
  c.task.latency.sigma = 0.0  # of a log-normal's logarithm
  c.task.latency.file = ''  # of measured seconds, one a line
  c.task.latency.scale = 1.0  # multiplies every delay

  c.rollout = ml_collections.ConfigDict()
  c.rollout.prompts_per_step = 8
  c.rollout.group_size = 8
  c.rollout.temperature = 1.0
  c.rollout.top_k = 0  # 0: all
  c.rollout.top_p = 1.0
  c.rollout.slots = 32  # trajectories decoded at once; others wait
  c.rollout.chunk = 4  # tokens between two looks at what has ended
  c.rollout.max_prompt_tokens = 128
  c.rollout.max_turn_tokens = 128
  c.rollout.max_trajectory_tokens = 128  # sampled, all turns
  c.rollout.max_turns = 16  # beside what the environment allows
  c.rollout.max_context = 256  # prompt included
  c.rollout.prompt_buckets = ()  # tokens; (): derived
  c.rollout.cache_buckets = ()
  c.rollout.extend_rows = 4  # slots that one program feeds observations to
  c.rollout.weights_dtype = 'float32'  # of decode weights and cache
  c.rollout.env_workers = 8  # threads
  c.rollout.env_timeout_s = 60.0
  c.rollout.evict = 'auto'  # parked K/V: host, recompute, never; auto: cheaper
  c.rollout.max_live = 0  # trajectories under way; 0: all that are admitted

  c.estimator = ml_collections.ConfigDict()
  c.estimator.name = 'grpo'
  c.estimator.aggregation = 'token'  # token, sequence or constant
  c.estimator.constant_tokens = 0  # 0: max_trajectory_tokens
  c.estimator.mask_truncated = False
  c.estimator.resample_zero_variance = False
  c.estimator.max_resampled_prompts = 8  # a step

  c.objective = ml_collections.ConfigDict()
  c.objective.loss = 'truncated_is'  # for async; else the ratio is 1
  c.objective.is_cap = 2.0  # of the ratio, for truncated_is
  c.objective.clip_low = 0.2
  c.objective.clip_high = 0.28
  c.objective.kl_coef = 0.0  # to the initial weights
  c.objective.kl_estimator = 'k3'

  c.stream = ml_collections.ConfigDict()
  c.stream.granularity = 'trajectory'  # turn (with a teacher), group or batch
  c.stream.max_open_groups = 4
  c.stream.max_open_bytes = 5 << 30
  c.stream.max_buckets = 2  # distinct rewards a group may stream apart
  c.stream.affine_sums = False  # with more: two affine sums, else an error
  c.stream.sums_on = 'device'  # or host
  c.stream.max_staleness = 1  # steps, for async

  c.distill = ml_collections.ConfigDict()
  c.distill.teacher = ''  # as model.source, with its tokenizer; '': rewards
  c.distill.loss = 'reverse_kl_sampled'  # reverse_kl, forward_kl or jsd
  c.distill.jsd_beta = 0.5  # weight of the teacher in the mixture
  c.distill.plan = 'auto'  # close, forward, turn; auto: least delay of a step
  c.distill.teacher_on = 'learner'  # its mesh; or rollout
  c.distill.max_open = 16  # trajectories with K/V and adjoints; others: close
  c.distill.rows = (1, 4)  # trajectories of one launch
  c.distill.feed_tokens = ()  # of a piece of turns; (): derived
  c.distill.unwind_tokens = ()  # of a piece going back, or of a prompt
  c.distill.start_tokens = ()  # where pieces start, rounded up

  c.learner = ml_collections.ConfigDict()
  c.learner.rows = (1, 4)  # of a packed batch
  c.learner.row_tokens = ()  # (): derived
  c.learner.row_targets = ()  # loss entries a row

  c.optimizer = ml_collections.ConfigDict()
  c.optimizer.learning_rate = 1e-5
  c.optimizer.schedule = 'constant'  # constant, linear or cosine
  c.optimizer.warmup_steps = 0
  c.optimizer.b1 = 0.9
  c.optimizer.b2 = 0.99
  c.optimizer.eps = 1e-8
  c.optimizer.weight_decay = 0.0
  c.optimizer.clip_norm = 1.0  # 0: none

  c.sft = ml_collections.ConfigDict()
  c.sft.steps = 0  # of a warm start on gold paths; 0: none
  c.sft.demonstrations = 1  # prompts of the training fold to play
  c.sft.batch = 1  # demonstrations a step
  c.sft.learning_rate = 1e-4  # the other settings are the optimizer's
  c.sft.schedule = 'cosine'
  c.sft.warmup_steps = 0

  c.eval = ml_collections.ConfigDict()
  c.eval.fold = 'test'  # or validation
  c.eval.prompts = 100  # 0: no evaluation
  c.eval.every_steps = 0  # 0: before and after only
  c.eval.samples = 0  # a prompt, for pass@k; 0: none
  c.eval.k = 4
  c.eval.solved = 1.0  # reward from which a trajectory counts
  return c
