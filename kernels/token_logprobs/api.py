"""Log-probability and entropy of given tokens, without the [N, V] logits.

    logits = hidden head^T / temperature
    logprobs[n] = logits[n, targets[n]] - logsumexp_v logits[n, v]
    entropy[n]  = -sum_v p[n, v] log p[n, v]

The vocabulary is read in chunks: the forward pass keeps a running logsumexp,
the backward pass computes each chunk of logits again.
"""

import jax
import jax.numpy as jnp

from thundersync_jax.kernels.token_logprobs import reference


def token_logprobs(
  hidden: jax.Array,  # [N, D]
  head: jax.Array,  # [V, D]
  targets: jax.Array,  # i32[N], each in 0 .. V - 1
  *,
  temperature: float | jax.Array = 1.0,  # scalar; a constant, no gradient
  vocab_chunk: int | None = None,  # vocabulary entries a chunk; None chooses
  compute_dtype: str = 'float32',
  implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:  # logprobs, entropy [N], f32 or wider
  """Differentiable in hidden and head; V need not divide by vocab_chunk.

  A target outside of the vocabulary is not detected: mask such tokens out.

  Raises:
    ValueError: shapes that do not match, vocab_chunk or temperature not
      positive, an unknown implementation.
  """
  _check(hidden, head, targets, temperature, vocab_chunk)
  name = implementation or 'xla'
  if name not in IMPLEMENTATIONS:
    raise ValueError(
      f'token_logprobs implementation {name!r} does not exist; '
      f'known: {sorted(IMPLEMENTATIONS)}'
    )
  if vocab_chunk is None:
    vocab_chunk = default_chunk(hidden.shape[0])
  return IMPLEMENTATIONS[name](
    hidden,
    head,
    targets,
    jnp.asarray(temperature, jnp.result_type(hidden, jnp.float32)),
    min(vocab_chunk, head.shape[0]),
    compute_dtype,
  )


def _check(hidden, head, targets, temperature, vocab_chunk):
  if hidden.ndim != 2 or head.ndim != 2 or hidden.shape[1] != head.shape[1]:
    raise ValueError(
      f'hidden {hidden.shape} and head {head.shape} must be [N, D] and [V, D]; '
      'flatten rows first'
    )
  if targets.shape != hidden.shape[:1]:
    raise ValueError(
      f'targets {targets.shape} must be [N] for hidden {hidden.shape}'
    )
  if isinstance(temperature, (int, float)) and not temperature > 0:
    raise ValueError(
      f'temperature={temperature} must be positive; greedy decoding has no '
      'log-probabilities to train on'
    )
  if vocab_chunk is not None and vocab_chunk < 1:
    raise ValueError(f'vocab_chunk={vocab_chunk} must be at least 1')


def default_chunk(rows: int) -> int:
  """Vocabulary entries a chunk that keep a block of f32 logits near 16 MiB."""
  return max(512, min(8192, 4 * 1024 * 1024 // max(rows, 1) // 128 * 128))


IMPLEMENTATIONS = {'xla': reference.token_logprobs}
