"""Token log-probabilities in plain XLA: a scan over chunks of the vocabulary.

Forward keeps per row the largest logit, sum exp and sum exp * logit (the
online softmax, arXiv 1805.02867). With p = softmax(logits), one-hot targets y,
entropy S and cotangents g, e of logprobs and entropy:

    d logits = (g (y - p) - e p (log p + S)) / temperature
"""

import functools

import jax
import jax.numpy as jnp

from thundersync_jax.kernels import precision


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def token_logprobs(hidden, head, targets, temperature, chunk, compute_dtype):
  """See api.token_logprobs."""
  args = (hidden, head, targets, temperature, chunk, compute_dtype)
  return _forward(*args)[0]


def _chunk_starts(vocab, chunk):  # i32[number of chunks]
  """First entry of each chunk; the last one reaches back to stay inside."""
  return jnp.minimum(jnp.arange(0, vocab, chunk), vocab - chunk)


def _chunk(i, starts, hidden, head, temperature, chunk, compute_dtype):
  """Logits [N, C] of chunk i, its rows of head, and their vocabulary ids.

  Entries that the chunk before has covered get a logit of about -inf.
  """
  rows = jax.lax.dynamic_slice_in_dim(head, starts[i], chunk)
  logits = precision.einsum(
    'nd,vd->nv', hidden, rows, compute_dtype=compute_dtype
  )
  ids = starts[i] + jnp.arange(chunk)
  lowest = jnp.finfo(logits.dtype).min / 2
  logits = jnp.where(ids >= i * chunk, logits / temperature, lowest)
  return logits, rows, ids


def _forward(hidden, head, targets, temperature, chunk, compute_dtype):
  starts = _chunk_starts(head.shape[0], chunk)

  def step(carry, i):
    peak, total, weighted, target = carry
    logits, _, ids = _chunk(
      i, starts, hidden, head, temperature, chunk, compute_dtype
    )
    new_peak = jnp.maximum(peak, logits.max(axis=1))
    shrink = jnp.exp(peak - new_peak)
    weights = jnp.exp(logits - new_peak[:, None])
    total = total * shrink + weights.sum(axis=1)
    weighted = weighted * shrink + (weights * logits).sum(axis=1)
    is_target = (ids == targets[:, None]) & (ids >= i * chunk)
    target += jnp.where(is_target, logits, 0).sum(axis=1)
    return (new_peak, total, weighted, target), None

  dtype = _dtype(hidden, head, compute_dtype)
  zeros = jnp.zeros(hidden.shape[0], dtype)
  carry = (zeros + jnp.finfo(dtype).min / 2, zeros, zeros, zeros)
  carry, _ = jax.lax.scan(step, carry, jnp.arange(len(starts)))
  peak, total, weighted, target = carry
  logsum = peak + jnp.log(total)
  entropy = logsum - weighted / total
  residuals = (hidden, head, targets, temperature, logsum, entropy)
  return (target - logsum, entropy), residuals


def _dtype(hidden, head, compute_dtype):
  if compute_dtype == 'bfloat16':
    return jnp.float32
  return functools.reduce(
    jnp.promote_types, (hidden.dtype, head.dtype, jnp.float32)
  )


def _backward(chunk, compute_dtype, residuals, cotangents):
  hidden, head, targets, temperature, logsum, entropy = residuals
  grad_logprobs, grad_entropy = (g[:, None] for g in cotangents)
  starts = _chunk_starts(head.shape[0], chunk)
  einsum = functools.partial(precision.einsum, compute_dtype=compute_dtype)

  def step(carry, i):
    grad_hidden, grad_head = carry
    logits, rows, ids = _chunk(
      i, starts, hidden, head, temperature, chunk, compute_dtype
    )
    logprobs = logits - logsum[:, None]
    is_target = (ids == targets[:, None]) & (ids >= i * chunk)
    pull = grad_logprobs + grad_entropy * (logprobs + entropy[:, None])
    grad = jnp.where(is_target, grad_logprobs, 0) - jnp.exp(logprobs) * pull
    grad = jnp.where(ids >= i * chunk, grad / temperature, 0)
    grad_hidden += einsum('nv,vd->nd', grad, rows)
    # Rows that two chunks share get zeros from the second: hence the sum.
    old = jax.lax.dynamic_slice_in_dim(grad_head, starts[i], chunk, axis=1)
    new = old + einsum('nd,nv->dv', hidden, grad)
    grad_head = jax.lax.dynamic_update_slice_in_dim(
      grad_head, new, starts[i], axis=1
    )
    return (grad_hidden, grad_head), None

  dtype = _dtype(hidden, head, compute_dtype)
  # [D, V] until the end: XLA would transpose each chunk of gradients instead.
  carry = (jnp.zeros(hidden.shape, dtype), jnp.zeros(head.T.shape, dtype))
  carry, _ = jax.lax.scan(step, carry, jnp.arange(len(starts)))
  grad_hidden, grad_head = carry
  return (
    grad_hidden.astype(hidden.dtype),
    grad_head.T.astype(head.dtype),
    None,
    jnp.zeros_like(temperature),
  )


token_logprobs.defvjp(_forward, _backward)
