"""The distillation loss of loss entries, from hidden states and heads.

The teacher hands over hidden states of the loss entries, whatever the loss;
its head lies beside the student's. So one program shape serves the sampled
reverse KL and the divergences over the whole vocabulary.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from thundersync_jax.kernels import precision
from thundersync_jax.kernels.token_logprobs import api as token_logprobs
from thundersync_jax.models import families, transformer
from thundersync_jax.objectives import distillation, losses
from thundersync_jax.types import Batch, WeightedSum

Tree = Any


@dataclasses.dataclass(frozen=True)
class Loss:
  """What is minimised, token by token.

  Attributes:
    name: in distillation.LOSSES.
    token_loss: in losses.LOSSES, what the sampled loss does with its advantage:
      on_policy where the ratio is 1.
    bounds: of the ratio, for token_loss.
    jsd_beta: see distillation.py.
    temperature: that the tokens were sampled at, of both models.
    compute_dtype: of the products with the heads.
  """

  name: str = distillation.SAMPLED
  token_loss: str = 'on_policy'
  bounds: losses.Bounds = losses.Bounds()
  jsd_beta: float = 0.5
  temperature: float = 1.0
  compute_dtype: str = 'float32'

  def __post_init__(self):
    for value, table in (
      (self.name, distillation.LOSSES),
      (self.token_loss, losses.LOSSES),
    ):
      if value not in table:
        raise ValueError(f'{value!r} does not exist; choose from {list(table)}')


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Teacher:
  """What the teacher says of loss entries: [..., E], and its head [V, E]."""

  hidden: jax.Array
  head: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Entries:
  """Loss entries [...]: see types.Batch."""

  targets: jax.Array
  weights: jax.Array
  behaviour_logprobs: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stats:
  """Sums over the loss entries of a step.

  Attributes:
    logprob_diff_max: largest |learner - rollout| log-probability.
    entropy: of the student, nats a token.
    teacher_entropy: nats a token.
    kl: the loss: log b - log q of the sampled tokens, or the divergence.
  """

  logprob_diff_max: jax.Array
  entropy: WeightedSum
  teacher_entropy: WeightedSum
  kl: WeightedSum

  @classmethod
  def zeros(cls) -> 'Stats':
    empty = WeightedSum(np.float32(0), np.float32(0))
    return cls(np.float32(0), empty, empty, empty)

  def __add__(self, other: 'Stats') -> 'Stats':
    return Stats(
      jnp.maximum(self.logprob_diff_max, other.logprob_diff_max),
      self.entropy + other.entropy,
      self.teacher_entropy + other.teacher_entropy,
      self.kl + other.kl,
    )


def total(
  loss: Loss,
  hidden: jax.Array,  # [B, N, D], after the final norm
  head: jax.Array,  # [V, D]
  teacher: Teacher,
  entries: Entries,  # [B, N]
) -> tuple[jax.Array, Stats]:
  """Returns the sum to be maximised, differentiable in hidden and head."""
  targets = entries.targets.reshape(-1)
  weights = entries.weights.reshape(-1)
  behaviour = entries.behaviour_logprobs.reshape(-1)
  hidden, teacher_hidden = (
    x.reshape(-1, x.shape[-1]) for x in (hidden, teacher.hidden)
  )
  if loss.name == distillation.SAMPLED:
    found, terms = _sampled(
      loss, hidden, head, teacher_hidden, teacher.head, targets, behaviour
    )
  else:
    found = distillation.divergence(
      hidden,
      head,
      teacher_hidden,
      teacher.head,
      targets,
      name=loss.name,
      beta=loss.jsd_beta,
      temperature=loss.temperature,
      vocab_chunk=token_logprobs.default_chunk(len(targets)),
      project=functools.partial(
        precision.einsum, compute_dtype=loss.compute_dtype
      ),
    )
    terms = -found.value
  objective = jnp.sum(weights.astype(terms.dtype) * terms)
  return objective, jax.lax.stop_gradient(_stats(found, weights, behaviour))


def packed(
  config: families.ModelConfig,
  loss: Loss,
  params: Tree,
  teacher: Teacher,
  batch: Batch,
  sink: Tree,
  stats: Stats,
) -> tuple[Tree, Stats]:
  """Adds the gradient of whole trajectories, packed in rows, to sink."""

  def run(params):
    rows = packed_hidden(config, params, batch)
    entries = Entries(batch.targets, batch.weights, batch.behaviour_logprobs)
    return total(loss, rows, transformer.head(params), teacher, entries)

  value, pull, new = jax.vjp(run, params, has_aux=True)
  (gradient,) = pull(jnp.ones_like(value))
  return jax.tree.map(jnp.add, sink, gradient), stats + new


def packed_hidden(
  config: families.ModelConfig, params: Tree, batch: Batch
) -> jax.Array:
  """Hidden states of the loss entries of packed rows, [B, N, D]."""
  hidden = transformer.forward(
    config,
    params,
    batch.tokens,
    batch.positions,
    batch.segment_ids,
    batch.branch_ids,
  )
  return jnp.take_along_axis(hidden, batch.sources[..., None], axis=1)


def _sampled(loss, hidden, head, teacher, teacher_head, targets, behaviour):
  read = functools.partial(
    token_logprobs.token_logprobs,
    temperature=loss.temperature,
    compute_dtype=loss.compute_dtype,
  )
  logprobs, entropy = read(hidden, head, targets)
  teacher_logprobs, teacher_entropy = read(teacher, teacher_head, targets)
  advantages = distillation.sampled_advantages(behaviour, teacher_logprobs)
  terms = losses.LOSSES[loss.token_loss](
    logprobs, behaviour, advantages, loss.bounds
  )
  found = distillation.Divergence(
    -advantages, logprobs, entropy, teacher_entropy
  )
  return found, terms


def _stats(found, weights, behaviour):
  real = (weights > 0).astype(jnp.float32)
  count = real.sum()

  def over_real(x):
    return WeightedSum((real * x).sum().astype(real.dtype), count)

  difference = jnp.where(real > 0, jnp.abs(found.logprobs - behaviour), 0)
  return Stats(
    difference.max().astype(real.dtype),
    over_real(found.entropy),
    over_real(found.teacher_entropy),
    over_real(found.value),
  )
