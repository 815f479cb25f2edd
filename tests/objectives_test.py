"""Advantages, aggregation, losses and schedules: hand numbers and slopes."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from thundersync_jax.learner import gradients, optimizer, packing
from thundersync_jax.models import families, transformer
from thundersync_jax.objectives import advantages, aggregation, losses
from thundersync_jax.types import Item, Trajectory, Turn

BOUNDS = losses.Bounds(clip_low=0.2, clip_high=0.28, is_cap=1.4)


def by_name(name, rewards):
  return advantages.ESTIMATORS[name].advantages(np.array(rewards, np.float64))


@pytest.mark.parametrize(
  ('name', 'expected'),
  [
    ('grpo', [-1.5, -0.5, 0.5, 1.5] / (np.sqrt(1.25) + 1e-6)),
    ('dr_grpo', [-1.5, -0.5, 0.5, 1.5]),
    ('rloo', [1 - 3.0, 2 - 8 / 3, 3 - 7 / 3, 4 - 2.0]),
    ('reinforce', [-1.5, -0.5, 0.5, 1.5]),
    ('reinforce_no_baseline', [1, 2, 3, 4]),
  ],
)
def test_advantages_by_hand(name, expected):
  np.testing.assert_allclose(by_name(name, [1, 2, 3, 4]), expected, rtol=1e-12)


@pytest.mark.parametrize('name', ['grpo', 'dr_grpo', 'rloo', 'reinforce'])
@pytest.mark.parametrize('rewards', [[0.1] * 3, [1e9 / 3] * 7, [-0.7], [0.0]])
def test_equal_rewards_have_advantages_of_exactly_zero(name, rewards):
  """Also where the mean rounds: 0.1 three times; and a group of one."""
  np.testing.assert_array_equal(by_name(name, rewards), np.zeros(len(rewards)))


@pytest.mark.parametrize('name', advantages.ESTIMATORS)
def test_an_estimator_has_the_properties_that_it_claims(name):
  rng = np.random.default_rng(0)
  rewards = rng.choice(rng.normal(size=4), 8)
  before, result = rewards.copy(), by_name(name, rewards)
  np.testing.assert_array_equal(rewards, before)
  assert advantages.ESTIMATORS[name].equal_rewards
  for reward in np.unique(rewards):
    assert np.unique(result[rewards == reward]).size == 1
  if advantages.ESTIMATORS[name].affine_in_reward:
    slope, offset = advantages.affine_coefficients(rewards, result)
    np.testing.assert_allclose(slope * rewards + offset, result, atol=1e-12)
  else:
    assert advantages.ESTIMATORS[name].scope == 'trajectory'


def test_affine_coefficients_by_hand():
  rewards = np.array([0.0, 1.0, 4.0])
  assert advantages.affine_coefficients(rewards, 2 * rewards - 3) == (2, -3)
  assert advantages.affine_coefficients(np.ones(2), np.zeros(2)) == (0, 0)


@pytest.mark.parametrize(
  ('rewards', 'result'),
  [([0, 1, 2], [0, 1, 4]), ([1, 1], [0, 1]), ([0, 1, 0.5], [-1, 1, 1e-3])],
)
def test_what_is_not_affine_is_refused(rewards, result):
  with pytest.raises(ValueError, match='set affine_in_reward=False'):
    advantages.affine_coefficients(np.array(rewards), np.array(result))


def test_affine_without_equal_rewards_is_a_contradiction():
  with pytest.raises(ValueError, match='implies equal_rewards=True'):
    advantages.Estimator(
      advantages.grpo, affine_in_reward=True, equal_rewards=False
    )


@pytest.mark.parametrize(
  ('how', 'weights', 'denominator'),
  [
    ('token', [1, 1, 1], 4 + 1 + 0),
    ('sequence', [1 / 4, 1, 1], 3),
    ('constant', [1, 1, 1], 3 * 16.0),
  ],
)
def test_aggregations_by_hand(how, weights, denominator):
  """Trajectories of 4, 1 and 0 sampled tokens; 16 is the constant."""
  chosen = aggregation.AGGREGATIONS[how]
  assert [chosen.weight(n) for n in (4, 1, 0)] == weights
  assert sum(chosen.share(n, 16.0) for n in (4, 1, 0)) == denominator


def slope(function, x, h=1e-6):
  """Central differences of an elementwise function."""
  return (np.asarray(function(x + h)) - np.asarray(function(x - h))) / (2 * h)


def gradient(function, x):
  return jax.grad(lambda y: function(y).sum())(x)


# ratio, advantage, value, whether the gradient passes
CLIP_CASES = np.array(
  [
    (1.00, 2.0, 2.00, True),
    (1.25, 2.0, 2.50, True),  # below 1 + clip_high, above 1 + clip_low
    (1.50, 2.0, 2.56, False),
    (0.50, 2.0, 1.00, True),  # a good token that became rare comes back
    (0.90, -2.0, -1.80, True),
    (0.50, -2.0, -1.60, False),
    (1.50, -2.0, -3.00, True),
    (0.75, 0.0, 0.00, True),
  ]
)


def test_ppo_clip_by_hand_and_by_finite_differences():
  """Clip-higher: 0.2 below and 0.28 above."""
  ratio, advantage, value, passes = CLIP_CASES.T
  with jax.enable_x64(True):
    behaviour = jnp.linspace(-3, -1, len(ratio))
    logprobs = behaviour + np.log(ratio)
    run = functools.partial(
      losses.ppo_clip,
      behaviour_logprobs=behaviour,
      advantages=jnp.asarray(advantage),
      bounds=BOUNDS,
    )
    slopes = gradient(run, logprobs)
    np.testing.assert_allclose(run(logprobs), value, rtol=1e-12)
    np.testing.assert_allclose(slopes, slope(run, logprobs), atol=1e-8)
    np.testing.assert_allclose(slopes, passes * ratio * advantage, atol=1e-12)
    removed = losses.clipped_mask(
      'ppo_clip', logprobs, behaviour, jnp.asarray(advantage), BOUNDS
    )
  np.testing.assert_array_equal(removed, passes == 0)


def test_truncated_is_by_hand():
  """The gradient is min(r, 1.4) A: the score gradient, weighted."""
  ratio = np.array([0.5, 1.0, 1.3, 1.5, 9.0])
  advantage = np.array([1.0, -2.0, 3.0, -1.0, 2.0])
  with jax.enable_x64(True):
    behaviour = jnp.linspace(-3, -1, len(ratio))
    logprobs = behaviour + np.log(ratio)
    slopes = gradient(
      lambda x: losses.truncated_is(x, behaviour, advantage, BOUNDS), logprobs
    )
    cut = losses.clipped_mask(
      'truncated_is', logprobs, behaviour, advantage, BOUNDS
    )
  np.testing.assert_allclose(slopes, [0.5, -2.0, 3.9, -1.4, 2.8], rtol=1e-12)
  np.testing.assert_array_equal(cut, [False, False, False, True, True])


@pytest.mark.parametrize('name', losses.LOSSES)
def test_at_ratio_one_every_loss_has_the_gradient_of_on_policy(name):
  rng = np.random.default_rng(1)
  logprobs, advantage = jnp.asarray(rng.normal(size=(2, 9)), jnp.float32)
  slopes = gradient(
    lambda x: losses.LOSSES[name](x, logprobs, advantage, BOUNDS), logprobs
  )
  np.testing.assert_allclose(slopes, advantage, rtol=1e-6)


@pytest.mark.parametrize('name', losses.KL_ESTIMATORS)
def test_kl_estimators_by_hand_and_by_finite_differences(name):
  run = losses.KL_ESTIMATORS[name]
  with jax.enable_x64(True):
    ref = jnp.full(5, -2.0)
    above = jnp.array([-1.0, -1e-5, 0.0, 1e-5, 2.0])  # log pi - log ref
    d = -above
    expected = {'k2': d**2 / 2, 'k3': jnp.exp(d) - d - 1}[name]
    values = np.asarray(run(ref + above, ref))
    slopes = np.asarray(gradient(lambda x: run(x, ref), ref + above))
    differences = slope(lambda x: run(x, ref), ref + above)
  np.testing.assert_allclose(values, expected, rtol=1e-4)
  np.testing.assert_allclose(slopes, differences, atol=1e-8)
  np.testing.assert_array_equal(np.sign(slopes), [-1, -1, 0, 1, 1])
  assert values[2] == 0 and (np.delete(values, 2) > 0).all()


def test_small_differences_keep_their_digits_in_f32():
  """exp(d) - d - 1 would round to 0 or to a negative number."""
  difference = jnp.array([1e-3, -1e-3], jnp.float32)
  value = losses.kl_k3(-difference, jnp.zeros(2))
  np.testing.assert_allclose(value, [5.0017e-7, 4.9983e-7], rtol=2e-3)


CONFIG = families.ModelConfig(
  family='llama',
  vocab_size=19,
  embed_dim=16,
  mlp_dim=24,
  num_layers=2,
  num_heads=2,
  num_kv_heads=1,
  head_dim=8,
)
TEMPERATURE = 0.7


def one_batch():
  """One trajectory of two turns, packed, and its ids and sampled places."""
  prompt, tokens = np.arange(3), np.array([4, 9, 2, 11, 5, 4])
  mask = np.array([1, 1, 0, 0, 1, 1], bool)
  turn = Turn(tokens, mask, np.full(6, -2.5), np.zeros(6), 'stop')
  made = Trajectory(0, 0, 0, prompt, (turn,))
  batch, _, _ = packing.pack(
    [Item(made, advantage=1.5)], [packing.Shape(1, 12, 6)], lambda n: 1.0, 0
  )
  return batch, np.r_[prompt, tokens], 3 + np.flatnonzero(mask)


def dense_logprobs(params, ids, places):
  """log_softmax(logits / T) from the definition, [len(places)]."""
  ones = jnp.ones((1, len(ids)), jnp.int32)
  hidden = transformer.forward(
    CONFIG, params, ids[None], jnp.arange(len(ids))[None], ones, 0 * ones
  )
  logits = hidden[0] @ transformer.head(params).T
  return jax.nn.log_softmax(logits / TEMPERATURE)[places - 1, ids[places]]


def params_of(seed):
  params = jax.jit(transformer.init, static_argnums=0)(
    CONFIG, jax.random.key(seed)
  )
  return jax.tree.map(lambda x: x.astype('float64'), params)


def moved(params, direction, h):
  return jax.tree.map(lambda x, d: x + h * d, params, direction)


def test_learner_logprobs_are_those_at_the_temperature():
  """cases row 6: values and gradient, by finite differences of the dense."""
  batch, ids, places = one_batch()
  with jax.enable_x64(True):
    params, direction = params_of(0), params_of(1)

    @jax.jit
    def run(params):
      both = gradients.entry_logprobs(CONFIG, params, batch, TEMPERATURE)
      return both[0][0, : len(places)].astype('float64')

    dense = jax.jit(lambda p: dense_logprobs(p, jnp.asarray(ids), places))
    np.testing.assert_allclose(run(params), dense(params), rtol=1e-10)
    pull = jax.jit(jax.jacrev(run))(params)
    got = sum(
      jnp.tensordot(a, b, b.ndim)
      for a, b in zip(
        jax.tree.leaves(pull), jax.tree.leaves(direction), strict=True
      )
    )
    ends = [
      np.asarray(dense(moved(params, direction, h))) for h in (1e-5, -1e-5)
    ]
  np.testing.assert_allclose(
    got, (ends[0] - ends[1]) / 2e-5, rtol=1e-6, atol=1e-8
  )


def test_kl_is_to_the_reference_at_the_same_temperature():
  """cases row 6: the reference's side."""
  batch, ids, places = one_batch()
  objective = gradients.Objective(kl_coef=0.5, temperature=TEMPERATURE)
  with jax.enable_x64(True):
    params, ref = params_of(0), params_of(1)
    sums, stats = jax.jit(
      lambda *p: gradients.batch_sums(CONFIG, objective, *p, batch)
    )(params, ref)
    mine, other = (
      np.asarray(dense_logprobs(p, jnp.asarray(ids), places))
      for p in (params, ref)
    )
  kl = np.exp(other - mine) - (other - mine) - 1
  np.testing.assert_allclose(
    sums['batch'], (1.5 * mine - 0.5 * kl).sum(), rtol=1e-6
  )
  np.testing.assert_allclose(stats.kl.mean(), kl.mean(), rtol=1e-5)
  np.testing.assert_allclose(
    stats.logprob_diff_max, np.abs(mine + 2.5).max(), rtol=1e-5
  )


@pytest.mark.parametrize(
  'fault',
  [{'loss': 'vanilla'}, {'kl_estimator': 'k9'}, {'temperature': 0.0}],
)
def test_objectives_that_cannot_be_are_refused(fault):
  with pytest.raises(ValueError, match='choose from|must be above 0'):
    gradients.Objective(**fault)


def settings(**changes):
  values = {
    'learning_rate': 0.8,
    'schedule': 'constant',
    'warmup_steps': 0,
    'b1': 0.9,
    'b2': 0.99,
    'eps': 1e-8,
    'weight_decay': 0.0,
    'clip_norm': 0.0,
  }
  return types.SimpleNamespace(**values | changes)


@pytest.mark.parametrize(
  ('schedule', 'warmup', 'expected'),
  [
    ('constant', 0, [0.8] * 9),
    ('constant', 4, [0.2, 0.4, 0.6, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8]),
    ('linear', 0, [0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0]),
    ('linear', 4, [0.2, 0.4, 0.6, 0.8, 0.8, 0.6, 0.4, 0.2, 0.0]),
    ('linear', 1, 0.8 * np.array([1, 1, *np.arange(6, -1, -1) / 7])),
    ('cosine', 0, 0.4 * (1 + np.cos(np.pi * np.arange(9) / 8))),
    (
      'cosine',
      4,
      [
        0.2,
        0.4,
        0.6,
        *0.4 * (1 + np.cos(np.pi * np.array([0, 0, 1, 2, 3, 4]) / 4)),
      ],
    ),
  ],
)
def test_schedules_by_hand(schedule, warmup, expected):
  """Eight steps; the ninth rate is where the schedule arrives."""
  chosen = settings(schedule=schedule, warmup_steps=warmup)
  rate = optimizer.learning_rate(chosen, steps=8)
  rates = [rate(step) for step in range(9)]
  np.testing.assert_allclose(rates, expected, atol=1e-6)


def test_an_unknown_schedule_is_refused():
  with pytest.raises(ValueError, match="'sine': choose from"):
    optimizer.learning_rate(settings(schedule='sine'), 8)


@pytest.mark.parametrize(
  ('clip_norm', 'seen'), [(0.0, [3.0, 4.0]), (1.0, [0.6, 0.8]), (9, [3, 4])]
)
def test_gradients_are_clipped_by_their_global_norm(clip_norm, seen):
  """Two leaves of norm 5 together; adamw by hand, from the clipped ones."""
  chosen = settings(clip_norm=clip_norm, weight_decay=0.1, eps=1.0)
  transform = optimizer.make(chosen, 8)
  params = {'a': jnp.array([2.0]), 'b': jnp.array([-2.0])}
  grads = {'a': jnp.array([3.0]), 'b': jnp.array([4.0])}
  updates, _ = transform.update(grads, transform.init(params), params)
  new = optax.apply_updates(params, updates)
  for name, g in zip('ab', seen, strict=True):
    p = float(params[name][0])
    # The first step's moments are g and g^2 after their bias correction.
    expected = p - 0.8 * (g / (abs(g) + 1.0) + 0.1 * p)
    np.testing.assert_allclose(new[name], expected, rtol=1e-5)
