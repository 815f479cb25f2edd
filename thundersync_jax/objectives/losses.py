"""Token objectives, to be maximised, as sums over the entries of a batch.

  on_policy  A log pi                      gradient: the score gradient times A
  ppo_clip   min(r A, clip(r, 1-e_l, 1+e_h) A),   r = exp(log pi - behaviour)

With one optimizer step a batch and data of the same parameters r = 1, the clip
is inactive and both have the same gradient; only `on_policy` can then be
streamed with the advantage unknown. `ppo_clip` depends on the sign of A.
"""

import jax
import jax.numpy as jnp


def on_policy(
  logprobs: jax.Array,  # f32[N]
  behaviour_logprobs: jax.Array,  # f32[N], unused: the ratio is 1
  advantages: jax.Array,  # f32[N]
  *,
  clip_low: float,
  clip_high: float,
) -> jax.Array:
  """Returns A log pi, f32[N] (REINFORCE; arXiv 2610.05935, S_i)."""
  del behaviour_logprobs, clip_low, clip_high
  return advantages * logprobs


def ppo_clip(
  logprobs: jax.Array,  # f32[N]
  behaviour_logprobs: jax.Array,  # f32[N], recorded by the sampler
  advantages: jax.Array,  # f32[N]
  *,
  clip_low: float,
  clip_high: float,
) -> jax.Array:
  """Returns the clipped surrogate, f32[N].

  arXiv 1707.06347; clip_high > clip_low is DAPO's clip-higher (2503.14476).
  """
  ratio = jnp.exp(logprobs - behaviour_logprobs)
  clipped = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
  return jnp.minimum(ratio * advantages, clipped * advantages)


def clipped_mask(
  logprobs: jax.Array,  # f32[N]
  behaviour_logprobs: jax.Array,  # f32[N]
  advantages: jax.Array,  # f32[N]
  *,
  clip_low: float,
  clip_high: float,
) -> jax.Array:
  """Returns bool[N]: entries of ppo_clip whose gradient the clip removes."""
  ratio = jnp.exp(logprobs - behaviour_logprobs)
  above = (ratio > 1 + clip_high) & (advantages > 0)
  below = (ratio < 1 - clip_low) & (advantages < 0)
  return above | below


def kl_k2(logprobs: jax.Array, ref_logprobs: jax.Array) -> jax.Array:
  """(log pi - log ref)^2 / 2, f32[N]: its gradient is that of KL(pi || ref)."""
  return 0.5 * jnp.square(logprobs - ref_logprobs)


def kl_k3(logprobs: jax.Array, ref_logprobs: jax.Array) -> jax.Array:
  """exp(d) - d - 1, d = log ref - log pi, f32[N] (GRPO, arXiv 2402.03300)."""
  difference = ref_logprobs - logprobs
  return jnp.expm1(difference) - difference


LOSSES = {'on_policy': on_policy, 'ppo_clip': ppo_clip}
SIGN_DEPENDENT = frozenset({'ppo_clip'})
KL_ESTIMATORS = {'k2': kl_k2, 'k3': kl_k3}
