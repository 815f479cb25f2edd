"""The gradient stream of a run: from rewards, or from a teacher.

Both have one interface, so a driver does not care: queue.put and turn_ended,
settle, launch, poll, step_complete, finish. With `distill.teacher` set there
are no rewards and no groups in the gradient (learner/turn_stream.py).
"""

import dataclasses
import operator

import jax
from absl import logging
from jax.sharding import Mesh
from ml_collections import ConfigDict

from thundersync_jax import assembly
from thundersync_jax import mesh as mesh_lib
from thundersync_jax.learner import (
  distill_loss,
  gradient_stream,
  slab,
  turn_device,
  turn_stream,
)
from thundersync_jax.learner import learner as learner_lib
from thundersync_jax.models import families, pretrained, transformer
from thundersync_jax.objectives import distillation, losses
from thundersync_jax.streaming import turn_gradients, turn_pieces, turn_plans

Stream = gradient_stream.GradientStream | turn_stream.TurnStream
CHOICES = {
  'distill.loss': distillation.LOSSES,
  'distill.plan': ('auto', *turn_gradients.PLANS),
  'distill.teacher_on': ('learner', 'rollout'),
}
# Multiply-adds a second before anything is measured; only ratios matter then.
_FIRST_GUESS = 2e10


def check(config: ConfigDict) -> None:
  """Refuses settings that a teacher contradicts.

  Raises:
    ValueError: naming the values and the fix.
  """
  block, granularity = config.distill, config.stream.granularity
  for name, known in CHOICES.items():
    value = operator.attrgetter(name)(config)
    if value not in known:
      raise ValueError(f'{name}={value!r} does not exist: {sorted(known)}')
  if not block.teacher:
    if granularity == 'turn':
      raise ValueError(
        'stream.granularity=turn needs distill.teacher: a reward does not '
        'exist before the trajectory has ended; use trajectory'
      )
    return
  if granularity not in turn_stream.GRANULARITIES:
    raise ValueError(
      f'stream.granularity={granularity!r} with distill.teacher: choose from '
      f'{turn_stream.GRANULARITIES}'
    )
  if config.objective.kl_coef:
    raise ValueError(
      f'objective.kl_coef={config.objective.kl_coef} with distill.teacher: the '
      'teacher is the only reference; set it to 0'
    )
  if config.estimator.resample_zero_variance or config.estimator.mask_truncated:
    raise ValueError(
      'estimator.resample_zero_variance and mask_truncated have no meaning '
      'with distill.teacher: set both to False'
    )
  if config.estimator.aggregation != 'token':
    raise ValueError(
      f'estimator.aggregation={config.estimator.aggregation!r} with '
      'distill.teacher: the loss is a mean over tokens; use token'
    )
  if config.objective.loss in losses.SIGN_DEPENDENT:
    raise ValueError(
      f'objective.loss={config.objective.loss} with distill.teacher: use '
      'truncated_is'
    )


def make(
  config: ConfigDict,
  loaded: pretrained.Pretrained,
  learner: learner_lib.Learner,
  meshes: tuple[Mesh, Mesh],
  params,
  timeline,
) -> Stream:
  """The stream of a run; that of a teacher is compiled already."""
  pad_id = loaded.tokenizer.pad_id
  if not config.distill.teacher:
    return gradient_stream.GradientStream(
      learner,
      assembly.plan(config),
      pad_id=pad_id,
      params=params,
      timeline=timeline,
    )
  teacher = load_teacher(config, loaded, meshes)
  plan = assembly.plan(config)
  plans = _plans(config, plan.granularity)
  limits, shapes = sizes(config)
  device = turn_device.Device(
    learner, loss(config), teacher, limits, shapes, plans, params
  )
  logging.info(
    'compiling distillation; %.2f GiB of K/V and adjoints of %d trajectories',
    device.slab_bytes / 2**30,
    limits.max_open if plans else 0,
  )
  device.warm_up(params)
  return turn_stream.TurnStream(
    learner,
    device,
    limits,
    turn_plans.Planner(
      config.distill.plan, costs(loaded.config, teacher.config), plans
    ),
    granularity=plan.granularity,
    pad_id=pad_id,
    score_track=config.distill.teacher_on,
    timeline=timeline,
    max_in_flight=plan.max_in_flight,
  )


def load_teacher(
  config: ConfigDict,
  student: pretrained.Pretrained,
  meshes: tuple[Mesh, Mesh],
) -> turn_device.TeacherModel:
  """Loads the teacher onto its mesh.

  Raises:
    ValueError: another tokenizer than the student's, or a shorter context.
  """
  block = config.distill
  loaded = pretrained.load(block.teacher)
  same_tokens(student, loaded, block.teacher)
  if loaded.config.max_context < config.rollout.max_context:
    raise ValueError(
      f'distill.teacher={block.teacher} has {loaded.config.max_context} tokens '
      f'of context, rollout.max_context={config.rollout.max_context}: lower it'
    )
  compute_dtype = config.model.compute_dtype
  model = dataclasses.replace(loaded.config, compute_dtype=compute_dtype)
  mesh = meshes[('rollout', 'learner').index(block.teacher_on)]
  shardings = mesh_lib.tree_shardings(
    mesh, loaded.params, transformer.logical_axes(model)
  )
  params = jax.device_put(loaded.params, shardings)
  return turn_device.TeacherModel(model, params, mesh)


def same_tokens(
  student: pretrained.Pretrained, teacher: pretrained.Pretrained, name: str
) -> None:
  """Checks that every token means the same to both.

  Raises:
    ValueError: naming the first token that does not.
  """
  ours, theirs = student.tokenizer, teacher.tokenizer
  fix = 'choose a teacher with the tokenizer of the student'
  if ours.vocab_size != theirs.vocab_size:
    raise ValueError(
      f'distill.teacher={name} has {theirs.vocab_size} tokens, the student '
      f'{ours.vocab_size}: {fix}'
    )
  for token in range(ours.vocab_size):
    texts = [t.decode([token], skip_special=False) for t in (ours, theirs)]
    if texts[0] != texts[1]:
      raise ValueError(
        f'token {token} is {texts[1]!r} to distill.teacher={name} and '
        f'{texts[0]!r} to the student: {fix}'
      )


def loss(config: ConfigDict) -> distill_loss.Loss:
  """The loss of the config's schedule."""
  block = config.objective
  return distill_loss.Loss(
    config.distill.loss,
    # One step a batch on data of the same parameters: the ratio is 1.
    block.loss if config.schedule == 'async' else 'on_policy',
    losses.Bounds(block.clip_low, block.clip_high, block.is_cap),
    config.distill.jsd_beta,
    config.rollout.temperature,
    config.model.compute_dtype,
  )


def sizes(config: ConfigDict) -> tuple[turn_pieces.Limits, turn_device.Shapes]:
  """Rows of the slab, and the shapes of pieces."""
  block, rollout = config.distill, config.rollout
  context = assembly.round_up(rollout.max_context)
  turn = assembly.round_up(rollout.max_turn_tokens)
  feed = tuple(block.feed_tokens) or (turn, 4 * turn)
  prompt = assembly.round_up(rollout.max_prompt_tokens)
  unwind = tuple(block.unwind_tokens) or tuple(sorted({prompt, context}))
  # Few: columns of K/V cost little beside layers, programs cost compilation.
  starts = tuple(block.start_tokens) or assembly.doubling(256, context)
  if max(starts) < context:
    raise ValueError(
      f'distill.start_tokens={starts} must reach rollout.max_context={context}'
    )
  shapes = turn_device.Shapes(
    tuple(
      slab.Shape(rows, tokens, start + tokens, min(tokens, turn))
      for rows in block.rows
      for tokens in feed
      for start in starts
    ),
    tuple(
      slab.Shape(rows, tokens, start + tokens)
      for rows in block.rows
      for tokens in unwind
      for start in starts
    ),
  )
  limits = turn_pieces.Limits(
    max_open=block.max_open,
    # Of the step at hand: those of later steps have no row.
    max_prompts=min(block.max_open, rollout.prompts_per_step),
    feed_tokens=max(feed),
    feed_targets=turn,
    unwind_tokens=max(unwind),
  )
  return limits, shapes


def costs(
  student: families.ModelConfig, teacher: families.ModelConfig
) -> turn_plans.Costs:
  """Seconds by the number of multiply-adds, until launches are measured."""

  def layers(c):
    attention = 2 * c.embed_dim * c.head_dim * (c.num_heads + c.num_kv_heads)
    return c.num_layers * (attention + 3 * c.embed_dim * c.mlp_dim)

  heads = student.vocab_size * (student.embed_dim + teacher.embed_dim)
  return turn_plans.Costs(layers(student), layers(teacher), heads).scaled(
    1 / _FIRST_GUESS
  )


def _plans(config: ConfigDict, granularity: str) -> tuple[str, ...]:
  """Plans that need the slab."""
  if granularity != 'turn' or config.distill.plan == 'close':
    return ()
  if config.distill.plan == 'auto':
    return ('forward', 'turn')
  return (config.distill.plan,)
