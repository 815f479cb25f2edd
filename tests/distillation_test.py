"""Distillation losses against dense float64 formulas and exact expectations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from thundersync_jax.learner import distill_loss
from thundersync_jax.objectives import distillation, losses

N, D, E, V = 4, 5, 3, 11
TEMPERATURE = 0.8


@pytest.fixture(autouse=True)
def f64():
  with jax.enable_x64(True):
    yield


def arrays(seed=0):
  """student [N, D], its head [V, D], teacher [N, E], its head, targets [N]."""
  rng = np.random.default_rng(seed)
  shapes = ((N, D), (V, D), (N, E), (V, E))
  made = [jnp.asarray(rng.normal(size=shape)) for shape in shapes]
  return *made, jnp.asarray(rng.integers(0, V, N))


def dense(name, beta, student, head, teacher, teacher_head):
  """f64[N] by the textbook formula, with sums over the whole vocabulary."""
  p = jax.nn.softmax(student @ head.T / TEMPERATURE)
  q = jax.nn.softmax(teacher @ teacher_head.T / TEMPERATURE)

  def kl(a, b):
    return jnp.sum(a * jnp.log(a / b), axis=1)

  m = beta * q + (1 - beta) * p
  return {
    'reverse_kl': kl(p, q),
    'forward_kl': kl(q, p),
    'jsd': beta * kl(q, m) + (1 - beta) * kl(p, m),
  }[name]


def chunked(name, beta=0.3, chunk=4):
  return functools.partial(
    distillation.divergence,
    name=name,
    beta=beta,
    temperature=TEMPERATURE,
    vocab_chunk=chunk,
  )


@pytest.mark.parametrize('name', distillation.DIVERGENCES)
def test_divergences_equal_dense_formulas(name):
  """Values, gradients (also by finite differences) and what comes along."""
  student, head, teacher, teacher_head, targets = arrays()
  weights = jnp.asarray([1.0, 0.0, 2.5, 1.0])

  def total(of):
    return lambda s, h: jnp.sum(weights * of(s, h))

  ours = total(
    lambda s, h: chunked(name)(s, h, teacher, teacher_head, targets).value
  )
  theirs = total(lambda s, h: dense(name, 0.3, s, h, teacher, teacher_head))
  found, grads = jax.value_and_grad(ours, (0, 1))(student, head)
  want, want_grads = jax.value_and_grad(theirs, (0, 1))(student, head)
  np.testing.assert_allclose(found, want, rtol=1e-12)
  for a, b in zip(grads, want_grads, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-14)
  direction = np.random.default_rng(1).normal(size=head.shape)
  step = 1e-6 * direction
  slope = (ours(student, head + step) - ours(student, head - step)) / 2e-6
  np.testing.assert_allclose(jnp.sum(grads[1] * direction), slope, rtol=1e-7)

  all_found = chunked(name)(student, head, teacher, teacher_head, targets)
  log_p = jax.nn.log_softmax(student @ head.T / TEMPERATURE)
  log_q = jax.nn.log_softmax(teacher @ teacher_head.T / TEMPERATURE)
  np.testing.assert_allclose(all_found.logprobs, log_p[jnp.arange(N), targets])
  np.testing.assert_allclose(
    all_found.entropy, -(jnp.exp(log_p) * log_p).sum(axis=1)
  )
  np.testing.assert_allclose(
    all_found.teacher_entropy, -(jnp.exp(log_q) * log_q).sum(axis=1)
  )


def test_chunks_do_not_matter():
  *hidden, targets = arrays(1)

  def everything(chunk):
    def value(s, h):
      return chunked('jsd', chunk=chunk)(s, h, *hidden[2:], targets).value.sum()

    return value(*hidden[:2]), *jax.grad(value, (0, 1))(*hidden[:2])

  whole = everything(V)
  for chunk in (1, 3, 100):
    for a, b in zip(everything(chunk), whole, strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-15)


def test_the_limits_of_jsd():
  """jsd / beta -> KL(q || p) at beta -> 0; of 1 - beta: KL(p || q)."""
  args = arrays(2)
  small = 1e-9  # the next term is of this size
  forward = chunked('jsd', beta=small)(*args).value / small
  reverse = chunked('jsd', beta=1 - small)(*args).value / small
  want = [chunked(n)(*args).value for n in ('forward_kl', 'reverse_kl')]
  np.testing.assert_allclose([forward, reverse], want, rtol=1e-5)


def sampled_gradient(student, head, teacher, teacher_head, targets, **entry):
  """Gradient in (student, head) of what distill_loss minimises.

  One hidden state, [1, D], with all targets; entry: weights and behaviour.
  """
  loss = distill_loss.Loss(temperature=TEMPERATURE)
  n = len(targets)
  says = distill_loss.Teacher(jnp.tile(teacher, (1, n, 1)), teacher_head)
  entries = distill_loss.Entries(
    targets[None], entry['weights'][None], entry['behaviour'][None]
  )

  def minimised(s, h):
    hidden = jnp.tile(s, (1, n, 1))
    return -distill_loss.total(loss, hidden, h, says, entries)[0]

  return jax.grad(minimised, (0, 1))(student, head)


def test_sampled_gradient_has_the_full_gradient_as_its_mean():
  """cases row 33: enumerated over the vocabulary, on-policy, exactly."""
  student, head, teacher, teacher_head, _ = arrays(3)
  student, teacher = student[:1], teacher[:1]
  log_p = jax.nn.log_softmax(student @ head.T / TEMPERATURE)[0]
  mean = sampled_gradient(
    student,
    head,
    teacher,
    teacher_head,
    jnp.arange(V),
    weights=jnp.exp(log_p),
    behaviour=log_p,
  )
  want = jax.grad(
    lambda s, h: dense('reverse_kl', 0, s, h, teacher, teacher_head).sum(),
    (0, 1),
  )(student, head)
  for a, b in zip(mean, want, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-14)
  assert max(jnp.abs(x).max() for x in want) > 1e-3


def test_sampled_gradient_by_hand():
  """(log b - log q) grad log p: the advantage is detached, and not 1."""
  student, head, teacher, teacher_head, targets = arrays(4)
  target = targets[0]
  entry = {'weights': jnp.ones(1), 'behaviour': jnp.full(1, -2.0)}
  found = sampled_gradient(
    student[:1], head, teacher[:1], teacher_head, targets[:1], **entry
  )

  def log_p(s, h):
    return jax.nn.log_softmax(s @ h.T / TEMPERATURE)[0, target]

  log_q = jax.nn.log_softmax(teacher[:1] @ teacher_head.T / TEMPERATURE)
  scale = -2.0 - log_q[0, target]
  want = jax.grad(log_p, (0, 1))(student[:1], head)
  for a, b in zip(found, want, strict=True):
    np.testing.assert_allclose(a, scale * b, rtol=1e-12)
  # The trap: log p - sg(log q) has a gradient that no teacher changes.
  others = sampled_gradient(
    student[:1], head, 2 * teacher[:1], teacher_head, targets[:1], **entry
  )
  assert np.abs(others[1] - found[1]).max() > 1e-3


def test_no_gradient_reaches_teacher_or_behaviour():
  student, head, teacher, teacher_head, targets = arrays(5)
  for name in distillation.LOSSES:
    loss = distill_loss.Loss(name)

    def objective(teacher, teacher_head, behaviour, loss=loss):
      says = distill_loss.Teacher(teacher[None], teacher_head)
      entries = distill_loss.Entries(
        targets[None], jnp.ones((1, N)), behaviour[None]
      )
      return distill_loss.total(loss, student[None], head, says, entries)[0]

    grads = jax.grad(objective, (0, 1, 2))(
      teacher, teacher_head, jnp.full(N, -2.0)
    )
    assert all((g == 0).all() for g in grads), name


def test_stale_tokens_are_weighed():
  """truncated_is multiplies the sampled loss by min(p / b, cap)."""
  student, head, teacher, teacher_head, targets = arrays(6)
  says = distill_loss.Teacher(teacher[None], teacher_head)
  log_p = jax.nn.log_softmax(student @ head.T)[jnp.arange(N), targets]
  behaviour = log_p - jnp.log(jnp.asarray([0.5, 1.0, 1.5, 9.0]))
  entries = distill_loss.Entries(
    targets[None], jnp.ones((1, N)), behaviour[None]
  )

  def gradient(loss):
    return jax.jacobian(
      lambda s: distill_loss.total(loss, s[None], head, says, entries)[0]
    )(student)

  plain = gradient(distill_loss.Loss())
  stale = gradient(
    distill_loss.Loss(
      token_loss='truncated_is', bounds=losses.Bounds(is_cap=2.0)
    )
  )
  ratios = jnp.asarray([0.5, 1.0, 1.5, 2.0])[:, None]
  np.testing.assert_allclose(stale, ratios * plain, rtol=1e-12)


def test_what_cannot_be_is_refused():
  *arrays_of, targets = arrays()
  with pytest.raises(ValueError, match="choose from .*'jsd'"):
    chunked('nope')(*arrays_of, targets)
  with pytest.raises(ValueError, match="use loss='reverse_kl_sampled'"):
    fewer = arrays_of[3][:-1]
    chunked('jsd')(*arrays_of[:3], fewer, targets)
  with pytest.raises(ValueError, match='beta=1 must lie between'):
    chunked('jsd', beta=1)(*arrays_of, targets)
  with pytest.raises(ValueError, match='vocab_chunk=0 must be above 0'):
    chunked('jsd', chunk=0)(*arrays_of, targets)
