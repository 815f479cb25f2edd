"""The parts of a run, from its config. Drivers put them to work.

Each function reads one or two blocks of the config and names the block in its
errors. Shapes that the config leaves out are derived from its length limits.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable

from jax.sharding import Mesh
from ml_collections import ConfigDict

from thundersync_jax import mesh as mesh_lib
from thundersync_jax.envs import (
  base,
  latency,
  prompt_sets,
  task_family,
  worker_pool,
)
from thundersync_jax.learner import (
  gradient_stream,
  gradients,
  optimizer,
  packing,
  weight_sync,
)
from thundersync_jax.learner import learner as learner_lib
from thundersync_jax.models import pretrained
from thundersync_jax.objectives import advantages, aggregation, losses
from thundersync_jax.rollout import agent as agent_lib
from thundersync_jax.rollout import engine as engine_lib
from thundersync_jax.rollout import eviction
from thundersync_jax.streaming import scheduler
from thundersync_jax.types import Sampling

# Setting -> its values.
CHOICES = {
  'schedule': ('sync', 'thundersync', 'async'),
  'estimator.name': advantages.ESTIMATORS,
  'estimator.aggregation': aggregation.AGGREGATIONS,
  'objective.loss': losses.LOSSES,
  'objective.kl_estimator': losses.KL_ESTIMATORS,
  'eval.fold': ('validation', 'test'),
  'stream.granularity': (*scheduler.GRANULARITIES, 'turn'),
  'stream.sums_on': ('device', 'host'),
  'optimizer.schedule': optimizer.SCHEDULES,
  'rollout.weights_dtype': ('float32', 'bfloat16'),
  'rollout.evict': eviction.EVICT,
}
# Setting -> its smallest value.
AT_LEAST = {
  'steps': 1,
  'checkpoint_every_steps': 0,
  'max_failed_fraction': 0,
  'rollout.prompts_per_step': 1,
  'rollout.group_size': 1,
  'rollout.max_turn_tokens': 1,
  'rollout.max_trajectory_tokens': 1,
  'rollout.max_turns': 1,
  'rollout.extend_rows': 1,
  'rollout.max_live': 0,
  'estimator.constant_tokens': 0,
  'estimator.max_resampled_prompts': 0,
  'objective.kl_coef': 0,
  'optimizer.learning_rate': 0,
  'optimizer.warmup_steps': 0,
  'optimizer.weight_decay': 0,
  'optimizer.clip_norm': 0,
  'distill.max_open': 1,
  'sft.steps': 0,
  'sft.batch': 1,
  'sft.demonstrations': 1,
  'sft.learning_rate': 0,
  'eval.prompts': 0,
  'eval.every_steps': 0,
  'eval.samples': 0,
}


def check(config: ConfigDict) -> None:
  """Refuses settings that contradict each other, before anything is loaded.

  Raises:
    ValueError: naming the values and the fix.
  """
  for name, known in CHOICES.items():
    value = operator.attrgetter(name)(config)
    if value not in known:
      raise ValueError(f'{name}={value!r} does not exist: {sorted(known)}')
  for name, least in AT_LEAST.items():
    value = operator.attrgetter(name)(config)
    if not value >= least:  # NaN too
      raise ValueError(f'{name}={value} must be at least {least}')
  task_family(config.task.family)
  scope = advantages.ESTIMATORS[config.estimator.name].scope
  if config.estimator.resample_zero_variance:
    if scope != 'group':
      raise ValueError(
        f'estimator.resample_zero_variance needs groups, but '
        f'estimator.name={config.estimator.name!r} has scope {scope!r}'
      )
    if config.objective.kl_coef:
      raise ValueError(
        f'objective.kl_coef={config.objective.kl_coef} with '
        'estimator.resample_zero_variance=True: the KL of a group is added '
        'before it is known to be replaced; set one of them to 0 or False'
      )
    if config.schedule == 'async':
      raise ValueError(
        'estimator.resample_zero_variance=True with schedule=async: prompts of '
        'later steps are on their way already; use sync or thundersync'
      )
  grouped = scope == 'group' and not config.distill.teacher
  if grouped and config.rollout.group_size < 2:
    raise ValueError(
      f'rollout.group_size={config.rollout.group_size} with '
      f'estimator.name={config.estimator.name!r}: a group baseline needs '
      'at least 2 members; or choose reinforce'
    )
  if config.schedule == 'async' and config.stream.max_staleness < 1:
    raise ValueError(
      f'stream.max_staleness={config.stream.max_staleness} with '
      'schedule=async must be at least 1; schedule=sync has staleness 0'
    )
  if config.schedule == 'async' and config.objective.loss == 'on_policy':
    raise ValueError(
      'objective.loss=on_policy with schedule=async ignores the ratio to the '
      'behaviour_logprobs: use truncated_is or ppo_clip'
    )


def max_staleness(config: ConfigDict) -> int:
  """Steps that a token may be older than the parameters that train on it."""
  return config.stream.max_staleness if config.schedule == 'async' else 0


def model(config: ConfigDict) -> pretrained.Pretrained:
  """Loads the weights; the compute settings are the config's."""
  block = config.model
  loaded = pretrained.load(block.source)
  if block.new:
    loaded = pretrained.untrained(loaded, block.new.to_dict(), config.seed)
  compute = {'compute_dtype': block.compute_dtype, 'remat': block.remat}
  return dataclasses.replace(
    loaded, config=dataclasses.replace(loaded.config, **compute)
  )


def prompts(config: ConfigDict, data_dir) -> dict[str, prompt_sets.PromptSet]:
  """Writes the task's data set, or finds it, and opens its folds."""
  task = config.task
  sizes = {
    'train': task.train_prompts,
    'validation': task.validation_prompts,
    'test': task.test_prompts,
  }
  sizes = {fold: size for fold, size in sizes.items() if size}
  path = prompt_sets.build(
    'prompts',
    task_family(task.family),
    sizes,
    seed=config.seed,
    args=task.args.to_dict(),
    data_dir=data_dir,
  )
  return {
    fold: prompt_sets.PromptSet(path, fold, config.seed) for fold in sizes
  }


def meshes(config: ConfigDict) -> tuple[Mesh, Mesh]:
  """The rollout mesh and the learner mesh."""
  block = config.mesh
  return mesh_lib.rollout_and_learner(
    rollout_devices=block.rollout_devices,
    data=block.data,
    fsdp=block.fsdp,
    tensor=block.tensor,
  )


def share_mesh(config: ConfigDict) -> bool:
  """Whether rollout and learner take turns on one mesh."""
  rollout_mesh, learner_mesh = meshes(config)
  return rollout_mesh == learner_mesh


def publisher(
  config: ConfigDict, loaded: pretrained.Pretrained, mesh: Mesh
) -> Callable:
  """From the learner's parameters to the rollout's weights."""
  dtype = config.rollout.weights_dtype
  return weight_sync.publisher(loaded.config, mesh, dtype)


def environment(config: ConfigDict) -> Callable[[], base.Environment]:
  """Returns a function that makes an environment of the task."""
  family = task_family(config.task.family)
  return functools.partial(family.make, **config.task.args.to_dict())


def sampling(config: ConfigDict) -> Sampling:
  """How training trajectories are sampled."""
  block = config.rollout
  return Sampling(block.temperature, block.top_k, block.top_p)


def agent(
  config: ConfigDict,
  loaded: pretrained.Pretrained,
  mesh: Mesh,
  pool: worker_pool.WorkerPool,
  timeline=None,
) -> agent_lib.Agent:
  """An engine and the turn loop around it."""
  block = config.rollout
  context = block.max_context
  if context > loaded.config.max_context:
    raise ValueError(
      f'rollout.max_context={context} exceeds the {loaded.config.max_context} '
      f'tokens of the model {config.model.source}'
    )
  engine = engine_lib.Engine(
    loaded.config,
    mesh,
    slots=block.slots,
    chunk=block.chunk,
    max_context=context,
    cache_buckets=block.cache_buckets or doubling(64, context),
    prompt_buckets=block.prompt_buckets
    or doubling(32, block.max_prompt_tokens),
    stop_ids=sorted(loaded.tokenizer.stop_ids),
    seed=config.seed,
    sampling=sampling(config),
    dtype=block.weights_dtype,
    timeline=timeline,
    evict=block.evict,
    extend_rows=block.extend_rows,
  )
  make = environment(config)
  limits = agent_lib.Limits(
    block.max_turn_tokens,
    block.max_trajectory_tokens,
    block.max_turns,
    max(config.learner.rows),  # one launch takes all rows of a trajectory
  )
  late = latency.make(config.seed, **config.task.get('latency', {}))
  return agent_lib.Agent(
    engine,
    loaded.tokenizer,
    make,
    pool,
    limits,
    timeline,
    late,
    block.max_live,
  )


def shapes(config: ConfigDict) -> tuple[packing.Shape, ...]:
  """The shapes of packed batches: every row count with every row length."""
  block = config.rollout
  rows = config.learner.rows
  tokens, targets = config.learner.row_tokens, config.learner.row_targets
  if not rows or min(rows) < 1 or len(tokens) != len(targets):
    raise ValueError(
      f'learner.rows={rows} must hold numbers from 1, and '
      f'learner.row_tokens={tokens} as many as learner.row_targets={targets}'
    )
  lengths = tuple(zip(tokens, targets, strict=True))
  if not lengths:
    one = block.max_trajectory_tokens
    whole = block.group_size * one
    single = (round_up(block.max_context), round_up(one))
    group = (round_up(block.max_prompt_tokens + whole), round_up(whole))
    lengths = (single, max(single, group))
  # The longest trajectory must fit, or the run would end when it comes.
  most = min(block.max_trajectory_tokens, block.max_context)
  if not any(t >= block.max_context and n >= most for t, n in lengths):
    raise ValueError(
      f'learner.row_tokens={tokens} with learner.row_targets={targets}: one '
      f'row needs at least rollout.max_context={block.max_context} tokens and '
      f'{most} targets (rollout.max_trajectory_tokens)'
    )
  return tuple(
    packing.Shape(count, *length)
    for count in rows
    for length in sorted(set(lengths))
  )


def learner(
  config: ConfigDict, loaded: pretrained.Pretrained, mesh: Mesh
) -> learner_lib.Learner:
  """The learner's programs."""
  block = config.objective
  objective = gradients.Objective(
    # One step a batch on data of the same parameters: the ratio is 1.
    loss=block.loss if config.schedule == 'async' else 'on_policy',
    bounds=losses.Bounds(block.clip_low, block.clip_high, block.is_cap),
    kl_coef=block.kl_coef,
    kl_estimator=block.kl_estimator,
    temperature=config.rollout.temperature,
  )
  return learner_lib.Learner(
    loaded.config,
    objective,
    optimizer.make(config.optimizer, config.steps),
    mesh,
    shapes=shapes(config),
    sums_on_host=config.stream.sums_on == 'host',
  )


def plan(config: ConfigDict) -> gradient_stream.Plan:
  """How gradients stream under the config's schedule."""
  granularity = config.stream.granularity
  if config.schedule == 'sync':
    granularity = 'batch'
  waits = config.objective.loss in losses.SIGN_DEPENDENT
  if config.schedule == 'async' and waits and granularity == 'trajectory':
    granularity = 'group'  # the clip needs the sign of the advantage
  block = config.estimator
  return gradient_stream.Plan(
    advantages.ESTIMATORS[block.name],
    aggregation.AGGREGATIONS[block.aggregation],
    granularity,
    constant_tokens=block.constant_tokens
    or config.rollout.max_trajectory_tokens,
    mask_truncated=block.mask_truncated,
    drop_zero_variance=block.resample_zero_variance,
    max_open_groups=config.stream.max_open_groups,
    max_open_bytes=config.stream.max_open_bytes,
    max_buckets=config.stream.max_buckets,
    affine_sums=config.stream.affine_sums,
    # On a shared mesh a decode chunk waits for one launch at most.
    max_in_flight=1 if share_mesh(config) else 2,
  )


def round_up(size: int) -> int:
  """The next multiple of 8."""
  return -(-size // 8) * 8


def doubling(first: int, last: int) -> tuple[int, ...]:
  """first, 2 first, 4 first, ... up to last, which is rounded up to 8."""
  sizes = []
  while first < last:
    sizes.append(first)
    first *= 2
  return (*sizes, round_up(last))
