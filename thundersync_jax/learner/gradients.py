"""Gradients of packed batches into sums: pure functions of arrays.

  accumulate   sink += grad sum_n c_n f(log pi_n), with c the weights times
               batch   the advantage (minus the KL term)   final work
               score   1: the score gradient               known, content work
               reward  the reward                          affine known work

Sums are those of an objective to be maximised.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from thundersync_jax.kernels.token_logprobs import api as token_logprobs
from thundersync_jax.models import families, transformer
from thundersync_jax.objectives import losses
from thundersync_jax.types import Batch, WeightedSum

Tree = Any


@dataclasses.dataclass(frozen=True)
class Objective:
  """What is maximised, token by token.

  Attributes:
    loss: name in losses.LOSSES.
    bounds: of the ratio.
    kl_coef: weight of the KL to the reference; 0 needs no reference.
    kl_estimator: name in losses.KL_ESTIMATORS.
    temperature: that the tokens were sampled at.
  """

  loss: str = 'on_policy'
  bounds: losses.Bounds = losses.Bounds()
  kl_coef: float = 0.0
  kl_estimator: str = 'k3'
  temperature: float = 1.0

  def __post_init__(self):
    for value, table in (
      (self.loss, losses.LOSSES),
      (self.kl_estimator, losses.KL_ESTIMATORS),
    ):
      if value not in table:
        raise ValueError(f'{value!r} does not exist; choose from {list(table)}')
    if self.temperature <= 0:
      raise ValueError(
        f'temperature={self.temperature} must be above 0 for training: greedy '
        'rollouts have no spread to learn from'
      )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stats:
  """Sums over the loss entries of a step.

  Attributes:
    logprob_diff_max: largest |learner - rollout| log-probability.
    logprob: of the targets, nats a token.
    entropy: of the policy, nats a token.
    kl: to the reference, nats a token.
    clipped: share of entries whose gradient the clip removes.
  """

  logprob_diff_max: jax.Array
  logprob: WeightedSum
  entropy: WeightedSum
  kl: WeightedSum
  clipped: WeightedSum

  @classmethod
  def zeros(cls) -> 'Stats':
    empty = WeightedSum(np.float32(0), np.float32(0))
    return cls(np.float32(0), empty, empty, empty, empty)


def entry_logprobs(
  config: families.ModelConfig, params: Tree, batch: Batch, temperature: float
) -> tuple[jax.Array, jax.Array]:
  """Returns log-probabilities and entropies of the loss entries, f32[B, N]."""
  hidden = transformer.forward(
    config,
    params,
    batch.tokens,
    batch.positions,
    batch.segment_ids,
    batch.branch_ids,
  )
  rows = jnp.take_along_axis(hidden, batch.sources[..., None], axis=1)
  logprobs, entropy = token_logprobs.token_logprobs(
    rows.reshape(-1, rows.shape[-1]),
    transformer.head(params),
    batch.targets.reshape(-1),
    temperature=temperature,
    compute_dtype=config.compute_dtype,
  )
  shape = batch.targets.shape
  return logprobs.reshape(shape), entropy.reshape(shape)


def batch_sums(
  config: families.ModelConfig,
  objective: Objective,
  params: Tree,
  ref_params: Tree | None,
  batch: Batch,
) -> tuple[dict[str, jax.Array], Stats]:
  """Returns the sums that sinks take gradients of, and statistics."""
  logprobs, entropy = entry_logprobs(
    config, params, batch, objective.temperature
  )
  weights = batch.weights.astype(logprobs.dtype)
  behaviour, bounds = batch.behaviour_logprobs, objective.bounds

  def terms_of(advantages):
    loss = losses.LOSSES[objective.loss]
    return loss(logprobs, behaviour, advantages, bounds)

  terms = terms_of(batch.advantages)
  kl = jnp.zeros_like(logprobs)
  if ref_params is not None:
    ref_logprobs, _ = entry_logprobs(
      config, ref_params, batch, objective.temperature
    )
    estimate = losses.KL_ESTIMATORS[objective.kl_estimator]
    kl = estimate(logprobs, jax.lax.stop_gradient(ref_logprobs))
    terms = terms - objective.kl_coef * kl
  sums = {
    'batch': jnp.sum(weights * terms),
    'score': jnp.sum(weights * terms_of(jnp.ones_like(logprobs))),
    'reward': jnp.sum(weights * terms_of(batch.rewards)),
  }

  real = (batch.weights > 0).astype(jnp.float32)
  count = real.sum()

  def over_real(x):
    return WeightedSum((real * x).sum().astype(real.dtype), count)

  clipped = losses.clipped_mask(
    objective.loss, logprobs, behaviour, batch.advantages, bounds
  )
  difference = jnp.where(real > 0, jnp.abs(logprobs - behaviour), 0)
  stats = Stats(
    difference.max().astype(real.dtype),
    over_real(logprobs),
    over_real(entropy),
    over_real(kl),
    over_real(clipped),
  )
  return sums, jax.lax.stop_gradient(stats)


def accumulate(
  config: families.ModelConfig,
  objective: Objective,
  params: Tree,
  ref_params: Tree | None,
  batch: Batch,
  sinks: dict[str, Tree],
  stats: Stats,
) -> tuple[dict[str, Tree], Stats]:
  """Adds a batch's gradients to sinks and its statistics to stats."""

  def wanted(params):
    sums, new = batch_sums(config, objective, params, ref_params, batch)
    return {name: sums[name] for name in sinks}, new

  sums, pull, new = jax.vjp(wanted, params, has_aux=True)
  for name, sink in sinks.items():
    one = {k: jnp.asarray(k == name, s.dtype) for k, s in sums.items()}
    (gradient,) = pull(one)
    sinks = sinks | {name: jax.tree.map(jnp.add, sink, gradient)}
  return sinks, Stats(
    jnp.maximum(stats.logprob_diff_max, new.logprob_diff_max),
    stats.logprob + new.logprob,
    stats.entropy + new.entropy,
    stats.kl + new.kl,
    stats.clipped + new.clipped,
  )
