"""The barrier: what apply_step does with a gradient, and what it refuses."""

import jax
import numpy as np
import pytest
import random_steps
import streaming_test

from thundersync_jax.learner import gradient_stream
from thundersync_jax.learner import learner as learner_lib


def start(value):
  """A learner (sgd of rate 1), its state, and a gradient full of `value`."""
  learner, params, _ = streaming_test.make_learner('float32')
  params = jax.tree.map(np.array, params)  # the state is donated
  total = jax.tree.map(lambda x: np.full(x.shape, value, x.dtype), params)
  return learner, params, learner.place(total)


def gradient(total, denominator=4.0, versions=(0,)):
  return learner_lib.BatchGradient(total, denominator, frozenset(versions))


def test_a_step_by_hand():
  """Sums are maximised: params + total / denominator, and the norm of that."""
  learner, params, total = start(2.0)
  state = learner.init_state(params)
  new, norm = learner.apply_step(state, gradient(total))
  for old, leaf in zip(
    jax.tree.leaves(params), jax.tree.leaves(new.params), strict=True
  ):
    np.testing.assert_allclose(leaf, old + 0.5, rtol=1e-6)
  count = sum(x.size for x in jax.tree.leaves(params))
  np.testing.assert_allclose(norm, 0.5 * np.sqrt(count), rtol=1e-6)
  assert int(new.step) == 1


@pytest.mark.parametrize(
  'versions,max_staleness,strangers',
  [
    ((0, 1), 0, r'\[1\] in step 0'),  # of a later step
    ((-1, 0), 0, r'\[-1\] in step 0'),
    ((-1, 0), 1, None),
    ((-2, -1), 1, r'\[-2\] in step 0'),
    ((0, 1), 1, r'\[1\] in step 0'),
  ],
)
def test_tokens_of_other_parameters_are_refused(
  versions, max_staleness, strangers
):
  """cases rows 22, 27: on-policy means one policy_version, the step's own."""
  learner, params, total = start(0.5)
  state = learner.init_state(params)
  mixed = gradient(total, versions=versions)
  if strangers is None:
    assert int(learner.apply_step(state, mixed, max_staleness)[0].step) == 1
    return
  with pytest.raises(ValueError, match=f'policy_versions {strangers}'):
    learner.apply_step(state, mixed, max_staleness)
  # Refused before anything is donated.
  jax.tree.map(np.testing.assert_array_equal, state.params, params)


def test_an_empty_batch_is_refused():
  learner, params, total = start(0.0)
  state = learner.init_state(params)
  with pytest.raises(ValueError, match='denominator=0.0: .*no loss token'):
    learner.apply_step(state, gradient(total, denominator=0.0))


@pytest.mark.parametrize('value', [np.nan, np.inf, 3e38])
def test_a_gradient_that_is_not_finite_is_an_error(value):
  """cases row 14; the last one overflows in its norm alone."""
  learner, params, total = start(value)
  state = learner.init_state(params)
  with pytest.raises(
    FloatingPointError, match='in step 0: lower learning_rate'
  ):
    learner.apply_step(state, gradient(total))


def test_a_wrong_version_reaches_the_barrier():
  """The stream hands over the versions of every sampled token, no others."""
  learner = random_steps.CountingLearner()
  plan = streaming_test.make_plan('grpo', 'token')
  stream = gradient_stream.GradientStream(learner, plan, pad_id=0, params=None)
  rng = np.random.default_rng(0)
  step = random_steps.make_step(0, groups=1, size=1)
  late = random_steps.trajectory(
    rng, 0, 1, step[0].prompt_tokens, 0.0, version=3
  )
  step = [*step, late]
  random_steps.open_step(stream, step)
  made = random_steps.play(stream, step, rng)
  assert made.policy_versions == {0, 3}
