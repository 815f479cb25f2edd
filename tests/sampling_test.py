"""Sampling programs against sorted, looped and statistical references."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from thundersync_jax.rollout import sampling

_sample = jax.jit(sampling.sample)
_truncate = jax.jit(sampling._truncate)


def keys_of(count, root=0):
  zeros = jnp.zeros(count, jnp.int32)
  return sampling.slot_keys(
    sampling.root_key(root), zeros, jnp.arange(count), zeros
  )


def draw(logits, keys, temperature=1.0, top_k=None, top_p=None):
  tokens, logprobs = _sample(
    jnp.asarray(logits, jnp.float32),
    keys,
    jnp.float32(temperature),
    top_k,
    top_p,
  )
  return np.asarray(tokens), np.asarray(logprobs)


def log_softmax(logits):
  logits = np.asarray(logits, np.float64)
  shifted = logits - logits.max(axis=-1, keepdims=True)
  return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def allowed_by_sort(logits, top_k, top_p):
  """Tokens that top_k, then top_p, leave; ties with the last one stay."""
  logits = np.asarray(logits, np.float64)
  order = np.argsort(-logits, kind='stable')
  allowed = logits >= logits[order[min(top_k or 10**6, len(logits)) - 1]]
  probs = np.where(allowed, np.exp(log_softmax(logits)), 0)
  mass = np.cumsum(probs[order]) / probs.sum()
  if top_p:
    allowed &= logits >= logits[order[np.searchsorted(mass, top_p - 1e-9)]]
  return allowed


@pytest.mark.parametrize('size', [1, 7, 1000])
def test_gumbel_is_that_of_jax_bit_for_bit(size):
  keys = keys_of(5)
  expected = jax.vmap(lambda key: jax.random.gumbel(key, (size,)))(keys)
  np.testing.assert_array_equal(sampling.gumbel(keys, size), expected)


def test_keys_are_folded_in_the_documented_order_and_never_repeat():
  """cases row 41: no two trajectories of a run share a key."""
  steps, prompts, members = np.meshgrid(*[np.arange(6)] * 3)
  triples = np.stack([steps.ravel(), prompts.ravel(), members.ravel()])
  root = sampling.root_key(3)
  keys = sampling.slot_keys(root, *map(jnp.asarray, triples))
  assert len(np.unique(jax.random.key_data(keys), axis=0)) == 6**3
  for i in (0, 17, 101):
    key = root
    for number in triples[:, i]:
      key = jax.random.fold_in(key, int(number))
    assert jax.random.key_data(key).tolist() == (
      jax.random.key_data(keys[i]).tolist()
    )


def test_a_token_is_the_argmax_of_perturbed_logits():
  logits = np.random.default_rng(0).normal(size=(16, 33)).astype(np.float32)
  keys = keys_of(16)
  tokens, logprobs = draw(logits, keys, temperature=0.7)
  for row in range(16):
    noise = np.asarray(jax.random.gumbel(keys[row], (33,)))
    assert tokens[row] == np.argmax(logits[row] / np.float32(0.7) + noise)
    expected = log_softmax(logits[row] / 0.7)[tokens[row]]
    assert abs(logprobs[row] - expected) < 1e-5


def test_temperature_reaches_the_recorded_logprobs():
  """cases row 6: the ratio of a fresh sample is 1 at temperature != 1."""
  logits = np.random.default_rng(1).normal(size=(8, 50)) * 3
  for temperature in (0.3, 1.0, 2.5):
    tokens, logprobs = draw(logits, keys_of(8), temperature)
    recomputed = log_softmax(logits / temperature)[np.arange(8), tokens]
    np.testing.assert_allclose(np.exp(recomputed - logprobs), 1, atol=1e-5)


def test_temperature_0_is_greedy_with_logprobs_at_temperature_1():
  logits = np.random.default_rng(2).normal(size=(8, 50)) * 3
  tokens, logprobs = draw(logits, keys_of(8), temperature=0)
  np.testing.assert_array_equal(tokens, logits.argmax(axis=1))
  expected = log_softmax(logits).max(axis=1)
  np.testing.assert_allclose(logprobs, expected, atol=1e-5)


def test_greedy_takes_the_first_of_equal_logits():
  logits = [[1, 3, 3, 0], [2, 2, 2, 2], [-1, -1, -5, 0]]
  tokens, _ = draw(logits, keys_of(3), temperature=0)
  assert tokens.tolist() == [1, 0, 3]


def test_logits_that_are_not_finite_still_give_a_token_and_a_nan_logprob():
  tokens, logprobs = draw(np.full((1, 4), np.nan), keys_of(1))
  assert 0 <= tokens[0] < 4
  assert np.isnan(logprobs[0])


@pytest.mark.parametrize(
  'top_k, top_p',
  [(1, None), (3, None), (40, None), (99, None)]
  + [(None, 0.05), (None, 0.5), (None, 0.95)]
  + [(5, 0.6), (2, 0.999), (12, 0.3)],
)
def test_truncation_equals_a_sort(top_k, top_p):
  rng = np.random.default_rng(3)
  logits = (rng.normal(size=(6, 40)) * 2).astype(np.float32)
  logits[3] = rng.integers(-2, 3, 40)  # many ties
  logits[4] = 1.5  # nothing but ties
  logits[5, 7:] = -np.inf
  kept = _truncate(jnp.asarray(logits), top_k, top_p)
  for row in range(6):
    expected = allowed_by_sort(logits[row], top_k, top_p)
    expected &= np.isfinite(logits[row])
    np.testing.assert_array_equal(np.isfinite(kept[row]), expected)


def test_top_p_keeps_the_smallest_set_with_that_mass():
  logits = np.log([[0.4, 0.3, 0.2, 0.1]])
  for top_p, size in ((0.39, 1), (0.41, 2), (0.69, 2), (0.71, 3), (0.91, 4)):
    kept = _truncate(jnp.asarray(logits, jnp.float32), None, top_p)
    assert np.isfinite(kept).sum() == size


def test_truncated_samples_keep_untruncated_logprobs():
  logits = np.random.default_rng(4).normal(size=(64, 20))
  tokens, logprobs = draw(logits, keys_of(64), top_k=2)
  best = np.argsort(-logits, axis=1)[:, :2]
  assert (tokens[:, None] == best).any(axis=1).all()
  assert (tokens == best[:, 1]).any()
  expected = log_softmax(logits)[np.arange(64), tokens]
  np.testing.assert_allclose(logprobs, expected, atol=1e-5)


@pytest.mark.parametrize('temperature', [0.5, 1.0])
def test_frequencies_follow_the_softmax(temperature):
  """Chi-square with 7 degrees of freedom: 24.3 is its 0.999 quantile."""
  count = 20000
  logits = np.array([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5, 1.5])
  tokens, _ = draw(
    np.tile(logits, (count, 1)), keys_of(count, root=1), temperature
  )
  expected = count * np.exp(log_softmax(logits / temperature))
  observed = np.bincount(tokens, minlength=8)
  assert ((observed - expected) ** 2 / expected).sum() < 24.3
