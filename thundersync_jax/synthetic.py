"""GRPO steps of a fixed size, to be timed: random weights, prompts, rewards.

Every trajectory has the same number of tokens, for its stop token cannot occur.
The reward is the share of its tokens in the lower half of the vocabulary, so
the work of a step is known and equals that of another framework at one shape.
Engine, gradient stream and learner are those of training.
"""

import dataclasses
import statistics
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from thundersync_jax import mesh as mesh_lib
from thundersync_jax.learner import (
  gradient_stream,
  gradients,
  packing,
  weight_sync,
)
from thundersync_jax.learner import learner as learner_lib
from thundersync_jax.models import families, pretrained, transformer
from thundersync_jax.objectives import advantages, aggregation
from thundersync_jax.rollout import engine as engine_lib
from thundersync_jax.rollout import slots as slots_lib
from thundersync_jax.runs import compilations, measure, timeline
from thundersync_jax.types import Sampling, Trajectory, Turn

LEARNING_RATE = 1e-3
_STD = 0.02  # of random weights


def _size(default: int, text: str) -> int:
  return dataclasses.field(default=default, metadata={'help': text})


@dataclasses.dataclass(frozen=True)
class Shape:
  """Sizes of a model (llama, tied) and of a step."""

  layers: int = _size(4, 'Layers of the model.')
  hidden: int = _size(256, 'Width of the residual stream.')
  ffn: int = _size(704, 'Width of the mlp.')
  heads: int = _size(4, 'Query heads.')
  kv_heads: int = _size(2, 'Key and value heads.')
  head_dim: int = _size(64, 'Width of a head.')
  vocab: int = _size(4096, 'Tokens of the vocabulary.')
  prompts: int = _size(4, 'Prompts of a step.')
  group: int = _size(8, 'Trajectories of a prompt.')
  prompt_tokens: int = _size(64, 'Tokens of a prompt.')
  tokens: int = _size(64, 'Sampled tokens of a trajectory.')

  @property
  def context(self) -> int:
    return self.prompt_tokens + self.tokens

  def for_slots(self, slots: int) -> 'Shape':
    """With as many trajectories as slots, or the rest of a group more."""
    group = min(self.group, slots)
    return dataclasses.replace(self, group=group, prompts=-(-slots // group))


@dataclasses.dataclass(frozen=True)
class StepTimes:
  """How long one step took, and what it was rewarded with.

  Attributes:
    rollout: from the first prompt to the last reward.
    update: gradients, optimizer step and publication of the weights.
    step: both.
    reward: mean of the step.
  """

  rollout: measure.Timing
  update: measure.Timing
  step: measure.Timing
  reward: float


def load(
  shape: Shape, source: str | None, compute_dtype: str
) -> tuple[families.ModelConfig, dict]:
  """Config and parameters of a source, or random ones of the shape."""
  if source is None:
    config = model_config(shape, compute_dtype)
    return config, random_params(config, seed=0)
  loaded = pretrained.load(source)
  config = dataclasses.replace(loaded.config, compute_dtype=compute_dtype)
  return config, loaded.params


def model_config(shape: Shape, compute_dtype: str) -> families.ModelConfig:
  """The model of a shape."""
  return families.ModelConfig(
    family='llama',
    vocab_size=shape.vocab,
    embed_dim=shape.hidden,
    mlp_dim=shape.ffn,
    num_layers=shape.layers,
    num_heads=shape.heads,
    num_kv_heads=shape.kv_heads,
    head_dim=shape.head_dim,
    norm_eps=1e-5,
    tied=True,
    max_context=shape.context,
    compute_dtype=compute_dtype,
  )


def random_params(config: families.ModelConfig, seed: int) -> dict:
  """f32 numpy parameters, layers stacked: N(0, 0.02) and norms of 1."""
  rng = np.random.default_rng(seed)
  shapes = jax.eval_shape(
    lambda key: transformer.init(config, key), jax.random.key(0)
  )

  def leaf(path, x):
    if jax.tree_util.keystr(path).endswith("norm']"):
      return np.ones(x.shape, np.float32)
    return (_STD * rng.standard_normal(x.shape)).astype(np.float32)

  return jax.tree_util.tree_map_with_path(leaf, shapes)


def make_engine(
  config: families.ModelConfig,
  mesh: Mesh,
  shape: Shape,
  *,
  slots: int,
  chunk: int,
  dtype: str,
  timeline=None,
) -> engine_lib.Engine:
  """An engine with one bucket of each kind and a stop token beyond all."""
  return engine_lib.Engine(
    config,
    mesh,
    slots=slots,
    chunk=chunk,
    max_context=shape.context,
    cache_buckets=(shape.context,),
    prompt_buckets=(shape.prompt_tokens,),
    stop_ids=(config.vocab_size + 7,),
    seed=0,
    sampling=Sampling(),
    dtype=dtype,
    timeline=timeline,
  )


def rollout(
  engine: engine_lib.Engine, shape: Shape, vocab: int, step: int
) -> list[Trajectory]:
  """Plays the random prompts of a step to their end, with rewards."""
  rng = np.random.default_rng((step, 1))
  size = (shape.prompts, shape.prompt_tokens)
  prompts = rng.integers(4, vocab, size, np.int32)
  first = step * shape.prompts
  for i, tokens in enumerate(prompts):
    for member in range(shape.group):
      engine.submit(
        slots_lib.Request(first + i, member, step, tokens, shape.tokens)
      )
  played = []
  while engine.launch():
    for ended in engine.harvest(block=True):
      engine.finish(ended.prompt_id, ended.member)
      prompt = prompts[ended.prompt_id - first]
      played.append(_trajectory(ended, prompt, step, vocab))
  return played


def _trajectory(ended, prompt, step, vocab) -> Trajectory:
  turn = Turn(
    ended.tokens,
    np.ones(len(ended.tokens), bool),
    ended.logprobs,
    ended.policy_versions,
    ended.finish_reason,
  )
  reward = float(np.mean(ended.tokens < vocab // 2))
  return Trajectory(
    ended.prompt_id, ended.member, step, prompt, (turn,), reward
  )


def measure_rollout(
  config: families.ModelConfig,
  params: dict,
  shape: Shape,
  *,
  slots: int,
  chunk: int,
  repeats: int,
) -> dict[str, Any]:
  """Times rollouts of a shape against what the machine allows.

  Weights, cache and products have the config's compute_dtype.

  Args:
    config, params: the model; params stacked.
    shape: prompts, group and lengths.
    slots, chunk: see rollout/engine.py.
    repeats: rollouts timed, after one that compiles.

  Returns:
    Medians, and the limit of the decode steps.
  """
  dtype, mesh = config.compute_dtype, mesh_lib.make_mesh(jax.devices())
  clock = timeline.Timeline(keep_steps=repeats)  # the first one is dropped
  engine = make_engine(
    config, mesh, shape, slots=slots, chunk=chunk, dtype=dtype, timeline=clock
  )
  engine.publish(weight_sync.publisher(config, mesh, dtype)(params), 0)
  times, compiled = [], []
  for step in range(repeats + 1):
    clock.begin_step(step)
    watch = measure.Stopwatch.start()
    trajectories = rollout(engine, shape, config.vocab_size, step)
    times.append(watch.read())
    compiled.append(len(compilations.names()))
  tokens = sum(t.num_sampled for t in trajectories)
  took = measure.median(times[1:])
  prefill_s, decode_s = (
    statistics.median(_spent(record, name) for record in clock.steps())
    for name in ('prefill', 'decode')
  )
  limit = decode_limit(config, slots, shape)
  return {
    'slots': slots,
    'tokens': tokens,
    'complete': tokens == shape.prompts * shape.group * shape.tokens,
    'compiled': compiled[-1] - compiled[0],
    'rollout_s': took.wall_s,
    'cpu_s': took.cpu_s,
    'tokens_per_s': tokens / took.wall_s,
    'prefill_share': prefill_s / took.wall_s,
    'decode_tokens_per_s': tokens / decode_s,
    'limit': dataclasses.asdict(limit),
    'limit_tokens_per_s': slots / limit.seconds,
    'reached': tokens / decode_s * limit.seconds / slots,
  }


def _spent(record: timeline.StepSpans, name: str) -> float:
  return sum(
    span.end - span.start for span in record.spans if span.name == name
  )


def decode_limit(
  config: families.ModelConfig, slots: int, shape: Shape
) -> measure.Limit:
  """The limit of a decode step with the cache half filled by sampling."""
  wide = config.num_heads * config.head_dim
  narrow = config.num_kv_heads * config.head_dim
  d, f, layers = config.embed_dim, config.mlp_dim, config.num_layers
  seen = int(slots * (shape.prompt_tokens + shape.tokens / 2))
  return measure.product_limit(
    slots,
    {
      'q': (d, wide, layers),
      'k, v': (d, narrow, 2 * layers),
      'o': (wide, d, layers),
      'gate, up': (d, f, 2 * layers),
      'down': (f, d, layers),
      'head': (d, config.vocab_size, 1),
    },
    dtype=config.compute_dtype,
    more_numbers=2 * seen * narrow * layers,
    more_flops=4 * seen * wide * layers,
  )


def learner_shape(shape: Shape, shared: bool) -> packing.Shape:
  """One launch a step: a row a group, or a row a trajectory."""
  branch = shape.tokens - 1  # the last token is a target only
  if shared:
    tokens = shape.prompt_tokens + shape.group * branch
    return packing.Shape(shape.prompts, tokens, shape.group * shape.tokens)
  rows = shape.prompts * shape.group
  return packing.Shape(rows, shape.prompt_tokens + branch, shape.tokens)


class Trainer:
  """Steps of schedule `sync`: roll out, then update.

  Args:
    shape: the sizes.
    compute_dtype: of matrix products.
    weights_dtype: of decode weights and cache.
    chunk: see rollout/engine.py; there is a slot for each trajectory.
    shared: compute the prompt once a group.
  """

  def __init__(
    self,
    shape: Shape,
    *,
    compute_dtype: str,
    weights_dtype: str,
    chunk: int,
    shared: bool,
  ):
    self._shape = shape
    meshes = mesh_lib.rollout_and_learner()
    config = model_config(shape, compute_dtype)
    self._config = config
    self._engine = make_engine(
      config,
      meshes[0],
      shape,
      slots=shape.prompts * shape.group,
      chunk=chunk,
      dtype=weights_dtype,
    )
    self.learner_shape = learner_shape(shape, shared)
    self._learner = learner_lib.Learner(
      config,
      gradients.Objective(),
      optax.adamw(LEARNING_RATE, weight_decay=0.0),
      meshes[1],
      shapes=(self.learner_shape,),
    )
    self._publish = weight_sync.publisher(config, meshes[0], weights_dtype)
    self._state = self._learner.init_state(random_params(config, seed=0))
    self._stream = gradient_stream.GradientStream(
      self._learner,
      gradient_stream.Plan(
        advantages.ESTIMATORS['grpo'],
        aggregation.AGGREGATIONS['token'],
        granularity='batch',
      ),
      pad_id=0,
      params=self._state.params,
    )
    self._engine.publish(self._publish(self._state.params), 0)

  def step(self) -> StepTimes:
    """One optimizer step; the first one compiles."""
    whole, step = measure.Stopwatch.start(), int(self._state.step)
    trajectories = rollout(
      self._engine, self._shape, self._config.vocab_size, step
    )
    played, rest = whole.read(), measure.Stopwatch.start()
    self._update(trajectories, step)
    reward = float(np.mean([t.reward for t in trajectories]))
    return StepTimes(played, rest.read(), whole.read(), reward)

  def _update(self, trajectories: list[Trajectory], step: int) -> None:
    stream = self._stream
    ids = sorted({t.prompt_id for t in trajectories})
    stream.queue.open(step, ids, self._shape.group)
    for trajectory in trajectories:
      stream.queue.put(trajectory)
    stream.settle()
    while not stream.step_complete(step):
      stream.launch(step, self._state.params, None)
      stream.poll(block=True)
    gradient, _ = stream.finish(step)
    self._state, _ = self._learner.apply_step(self._state, gradient)
    self._engine.publish(self._publish(self._state.params), step + 1)
    jax.block_until_ready(self._engine.params)


def measure_steps(trainer: Trainer, warmup: int, steps: int) -> dict[str, Any]:
  """Times steps of a trainer.

  Args:
    trainer: a new one.
    warmup: steps before, at least 1; the first compiles.
    steps: steps timed.

  Returns:
    Medians, and the mean reward of the first and the last step.
  """
  first = [trainer.step() for _ in range(warmup)][0]
  before = len(compilations.names())
  times = [trainer.step() for _ in range(steps)]
  played = measure.median([t.rollout for t in times])
  update = measure.median([t.update for t in times])
  step = measure.median([t.step for t in times])
  shape = trainer.learner_shape
  return {
    'rollout_s': played.wall_s,
    'update_s': update.wall_s,
    'step_s': step.wall_s,
    'steps_per_s': 1 / step.wall_s,
    'cpu_s_rollout': played.cpu_s,
    'cpu_s_update': update.cpu_s,
    'cpu_s_step': step.cpu_s,
    'learner_tokens': shape.rows * shape.tokens,
    'reward_first_last': [first.reward, times[-1].reward],
    'compiled': len(compilations.names()) - before,
  }
