"""On-policy distillation: token losses against a teacher, as sums of entries.

Student p, behaviour b (the student that sampled), teacher q, all at one
temperature; contexts are what the student sampled, their probability is held
fixed (semi-gradient, discount 0).

  sampled     minimise sum_t w_t (log b_t - log q_t) log p_t, the bracket
              detached: the on-policy loss with advantage log q_t - log b_t. Its
              expectation over the sampled token is the gradient of reverse_kl
  reverse_kl  KL(p || q)                                     (arXiv 2306.08543)
  forward_kl  KL(q || p)
  jsd         beta KL(q || m) + (1-beta) KL(p || m),  m = beta q + (1-beta) p
                                                             (arXiv 2306.13649)

With log p - sg(log q) in the place of the bracket's product the teacher would
drop out of the gradient. The last three read the whole vocabulary, in chunks.
"""

import dataclasses
import functools
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp

SAMPLED = 'reverse_kl_sampled'


def sampled_advantages(
  behaviour_logprobs: jax.Array,  # f32[N]
  teacher_logprobs: jax.Array,  # f32[N]
) -> jax.Array:
  """Returns log q - log b, f32[N], detached: what log p is multiplied by."""
  chex.assert_equal_shape((behaviour_logprobs, teacher_logprobs))
  return jax.lax.stop_gradient(teacher_logprobs - behaviour_logprobs)


def reverse_kl(p, q, log_p, log_q, beta):
  """See `divergence` for what the terms are."""
  del q, beta
  term = p * (log_p - log_q)
  return term, term


def forward_kl(p, q, log_p, log_q, beta):
  """See `divergence` for what the terms are."""
  del p, beta
  return q * (log_q - log_p), -q


def jsd(p, q, log_p, log_q, beta):
  """See `divergence` for what the terms are."""
  log_m = jnp.logaddexp(jnp.log(beta) + log_q, jnp.log1p(-beta) + log_p)
  pull = (1 - beta) * p * (log_p - log_m)
  return beta * q * (log_q - log_m) + pull, pull


# Name -> (p, q, log p, log q, beta) of each vocabulary entry to its term f of
# the divergence, and p df/dp up to a multiple of p.
DIVERGENCES = {'reverse_kl': reverse_kl, 'forward_kl': forward_kl, 'jsd': jsd}
LOSSES = (SAMPLED, *DIVERGENCES)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Divergence:
  """What `divergence` finds at each of N entries; f[N], f32 or wider.

  Attributes:
    value: the divergence in nats; the only one with a gradient.
    logprobs: of the targets under the student.
    entropy: of the student, nats.
    teacher_entropy: nats.
  """

  value: jax.Array
  logprobs: jax.Array
  entropy: jax.Array
  teacher_entropy: jax.Array


def divergence(
  student: jax.Array,  # [N, D], hidden states
  student_head: jax.Array,  # [V, D]
  teacher: jax.Array,  # [N, E], hidden states; no gradient
  teacher_head: jax.Array,  # [V, E]; no gradient
  targets: jax.Array,  # i32[N]
  *,
  name: str,
  beta: float = 0.5,
  temperature: float = 1.0,
  vocab_chunk: int = 8192,
  project: Callable | None = None,
) -> Divergence:
  """A full-vocabulary divergence at each entry, without [N, V] arrays.

  Two passes over chunks of the vocabulary: the two logsumexps, then the terms;
  the backward pass computes each chunk of logits again. With terms f(p_v, q_v)
  and g_v = p_v df/dp_v:   d value / d logit_v = (g_v - p_v sum_u g_u) / T.

  Args:
    student, student_head, teacher, teacher_head, targets: see above.
    name: in DIVERGENCES.
    beta: of jsd, strictly between 0 and 1.
    temperature: of both models.
    vocab_chunk: vocabulary entries a chunk; V need not divide by it.
    project: einsum of two operands; by default in full precision.

  Raises:
    ValueError: an unknown name, vocabularies that differ, a bad beta,
      temperature or vocab_chunk.
  """
  if name not in DIVERGENCES:
    raise ValueError(
      f'divergence {name!r} does not exist; choose from {list(DIVERGENCES)}'
    )
  if student_head.shape[0] != teacher_head.shape[0]:
    raise ValueError(
      f'vocabularies of {student_head.shape[0]} and {teacher_head.shape[0]} '
      f'entries have no {name}: use loss={SAMPLED!r}'
    )
  if not 0 < beta < 1:
    raise ValueError(
      f'beta={beta} must lie between 0 and 1; the limits are forward_kl and '
      'reverse_kl'
    )
  if not temperature > 0 or vocab_chunk < 1:
    raise ValueError(
      f'temperature={temperature} and vocab_chunk={vocab_chunk} must be above 0'
    )
  chex.assert_equal_shape_prefix((student, teacher, targets), 1)
  scan = _Scan(
    name,
    beta,
    temperature,
    min(vocab_chunk, student_head.shape[0]),
    project or _full_precision,
  )
  return _divergence(
    scan,
    student,
    student_head,
    jax.lax.stop_gradient(teacher),
    jax.lax.stop_gradient(teacher_head),
    targets,
  )


def _full_precision(spec, a, b):
  return jnp.einsum(spec, a, b, precision=jax.lax.Precision.HIGHEST)


@dataclasses.dataclass(frozen=True)
class _Scan:
  """How the vocabulary is read; static."""

  name: str
  beta: float
  temperature: float
  chunk: int
  project: Callable

  def starts(self, head):
    """First entry of each chunk; the last reaches back to stay inside."""
    size = head.shape[0]
    return jnp.minimum(jnp.arange(0, size, self.chunk), size - self.chunk)

  def logits(self, hidden, head, i):
    """[N, C] of chunk i; about -inf where the chunk before has been."""
    start = self.starts(head)[i]
    rows = jax.lax.dynamic_slice_in_dim(head, start, self.chunk)
    logits = self.project('nd,vd->nv', hidden, rows) / self.temperature
    fresh = start + jnp.arange(self.chunk) >= i * self.chunk
    return jnp.where(fresh, logits, jnp.finfo(logits.dtype).min / 2)

  def terms(self, log_p, log_q):
    """f and g of `divergence`; 0 where the chunk before has been."""
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    f, g = DIVERGENCES[self.name](p, q, log_p, log_q, self.beta)
    fresh = log_p > jnp.finfo(log_p.dtype).min / 4
    return jnp.where(fresh, f, 0), jnp.where(fresh, g, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _divergence(scan, *args):
  return _forward(scan, *args)[0]


def _logsums(scan, pairs):
  """logsumexp [N] of each (hidden, head) over the vocabulary."""

  def step(carry, i):
    new = []
    for (peak, total), pair in zip(carry, pairs, strict=True):
      logits = scan.logits(*pair, i)
      higher = jnp.maximum(peak, logits.max(axis=1))
      weights = jnp.exp(logits - higher[:, None])
      new.append((higher, total * jnp.exp(peak - higher) + weights.sum(axis=1)))
    return new, None

  count = len(scan.starts(pairs[0][1]))
  first = [jax.eval_shape(scan.logits, *pair, 0) for pair in pairs]
  zeros = [jnp.zeros(x.shape[0], x.dtype) for x in first]
  carry = [(z + jnp.finfo(z.dtype).min / 2, z) for z in zeros]
  carry, _ = jax.lax.scan(step, carry, jnp.arange(count))
  return [peak + jnp.log(total) for peak, total in carry]


def _forward(scan, student, student_head, teacher, teacher_head, targets):
  pairs = (student, student_head), (teacher, teacher_head)
  logsums = _logsums(scan, pairs)

  def step(carry, i):
    log_p, log_q = (
      scan.logits(*pair, i) - logsum[:, None]
      for pair, logsum in zip(pairs, logsums, strict=True)
    )
    f, g = scan.terms(log_p, log_q)
    ids = scan.starts(student_head)[i] + jnp.arange(scan.chunk)
    hit = (ids == targets[:, None]) & (ids >= i * scan.chunk)
    found = jnp.where(hit, log_p, 0)
    # exp(-huge) times -huge is 0 where the chunk before has been.
    entropies = -jnp.exp(log_p) * log_p, -jnp.exp(log_q) * log_q
    parts = (f, g, found, *entropies)
    carry = [a + b.sum(axis=1) for a, b in zip(carry, parts, strict=True)]
    return carry, None

  zeros = jnp.zeros_like(logsums[0] + logsums[1])
  count = len(scan.starts(student_head))
  sums, _ = jax.lax.scan(step, [zeros] * 5, jnp.arange(count))
  value, pull, logprobs, entropy, teacher_entropy = sums
  residuals = (*pairs, logsums, pull, targets)
  return Divergence(value, logprobs, entropy, teacher_entropy), residuals


def _backward(scan, residuals, cotangent):
  (student, head), (teacher, teacher_head), logsums, total, _ = residuals
  scale = (cotangent.value / scan.temperature)[:, None]

  def step(carry, i):
    grad_student, grad_head = carry
    log_p = scan.logits(student, head, i) - logsums[0][:, None]
    log_q = scan.logits(teacher, teacher_head, i) - logsums[1][:, None]
    _, g = scan.terms(log_p, log_q)
    grad = scale * (g - jnp.exp(log_p) * total[:, None])
    start = scan.starts(head)[i]
    rows = jax.lax.dynamic_slice_in_dim(head, start, scan.chunk)
    grad_student += scan.project('nv,vd->nd', grad, rows)
    # Rows that two chunks share get zeros from the second: hence the sum.
    old = jax.lax.dynamic_slice_in_dim(grad_head, start, scan.chunk, axis=1)
    new = old + scan.project('nd,nv->dv', student, grad)
    grad_head = jax.lax.dynamic_update_slice_in_dim(
      grad_head, new, start, axis=1
    )
    return (grad_student, grad_head), None

  dtype = total.dtype
  carry = jnp.zeros(student.shape, dtype), jnp.zeros(head.T.shape, dtype)
  count = len(scan.starts(head))
  (grad_student, grad_head), _ = jax.lax.scan(step, carry, jnp.arange(count))
  return (
    grad_student.astype(student.dtype),
    grad_head.T.astype(head.dtype),
    jnp.zeros_like(teacher),
    jnp.zeros_like(teacher_head),
    None,
  )


_divergence.defvjp(_forward, _backward)
