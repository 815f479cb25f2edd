"""Token objectives, to be maximised, as sums over the entries of a batch.

  on_policy     A log pi                   gradient: the score gradient times A
  truncated_is  sg(min(r, cap)) A log pi,            r = exp(log pi - behaviour)
  ppo_clip      min(r A, clip(r, 1-e_l, 1+e_h) A)

With one optimizer step a batch and data of the same parameters r = 1, and all
three have the same gradient. On stale data the first two still stream with the
advantage unknown, for they are linear in it; `ppo_clip` depends on its sign.
"""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Bounds:
  """Limits of the ratio.

  Attributes:
    clip_low, clip_high: ppo_clip holds it in [1 - clip_low, 1 + clip_high].
    is_cap: truncated_is holds it below.
  """

  clip_low: float = 0.2
  clip_high: float = 0.2
  is_cap: float = 2.0


def on_policy(
  logprobs: jax.Array,  # f32[N]
  behaviour_logprobs: jax.Array,  # f32[N], unused: the ratio is 1
  advantages: jax.Array,  # f32[N]
  bounds: Bounds,
) -> jax.Array:
  """Returns A log pi, f32[N] (REINFORCE; arXiv 2610.05935, S_i)."""
  del behaviour_logprobs, bounds
  return advantages * logprobs


def truncated_is(
  logprobs: jax.Array,  # f32[N]
  behaviour_logprobs: jax.Array,  # f32[N], recorded by the sampler
  advantages: jax.Array,  # f32[N]
  bounds: Bounds,
) -> jax.Array:
  """Returns sg(min(r, is_cap)) A log pi, f32[N].

  Truncated importance sampling (Ionides, 2008): bounded variance on stale
  tokens, and a weight that knows nothing of the advantage.
  """
  ratio = jnp.exp(jax.lax.stop_gradient(logprobs) - behaviour_logprobs)
  return jnp.minimum(ratio, bounds.is_cap) * advantages * logprobs


def ppo_clip(
  logprobs: jax.Array,  # f32[N]
  behaviour_logprobs: jax.Array,  # f32[N], recorded by the sampler
  advantages: jax.Array,  # f32[N]
  bounds: Bounds,
) -> jax.Array:
  """Returns the clipped surrogate, f32[N].

  arXiv 1707.06347; clip_high > clip_low is DAPO's clip-higher (2503.14476).
  """
  ratio = jnp.exp(logprobs - behaviour_logprobs)
  clipped = jnp.clip(ratio, 1 - bounds.clip_low, 1 + bounds.clip_high)
  return jnp.minimum(ratio * advantages, clipped * advantages)


def clipped_mask(
  loss: str,
  logprobs: jax.Array,  # f32[N]
  behaviour_logprobs: jax.Array,  # f32[N]
  advantages: jax.Array,  # f32[N]
  bounds: Bounds,
) -> jax.Array:
  """Returns bool[N]: entries that a loss of LOSSES clips or truncates."""
  ratio = jnp.exp(logprobs - behaviour_logprobs)
  if loss == 'truncated_is':
    return ratio > bounds.is_cap
  if loss == 'ppo_clip':
    above = (ratio > 1 + bounds.clip_high) & (advantages > 0)
    below = (ratio < 1 - bounds.clip_low) & (advantages < 0)
    return above | below
  return jnp.zeros(logprobs.shape, bool)


def kl_k2(logprobs: jax.Array, ref_logprobs: jax.Array) -> jax.Array:
  """(log pi - log ref)^2 / 2, f32[N]: its gradient is that of KL(pi || ref)."""
  return 0.5 * jnp.square(logprobs - ref_logprobs)


def kl_k3(logprobs: jax.Array, ref_logprobs: jax.Array) -> jax.Array:
  """exp(d) - d - 1, d = log ref - log pi, f32[N] (GRPO, arXiv 2402.03300)."""
  difference = ref_logprobs - logprobs
  return jnp.expm1(difference) - difference


LOSSES = {
  'on_policy': on_policy,
  'truncated_is': truncated_is,
  'ppo_clip': ppo_clip,
}
SIGN_DEPENDENT = frozenset({'ppo_clip'})
KL_ESTIMATORS = {'k2': kl_k2, 'k3': kl_k3}
