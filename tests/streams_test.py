"""Every order of arrival streams the same gradient, in counts of tokens.

The learner is random_steps.CountingLearner, so what is tested is the host's
side: queue, scheduler, accumulators, packing, normalisation.
"""

import dataclasses

import numpy as np
import random_steps
from hypothesis import given, settings
from hypothesis import strategies as st

from thundersync_jax.learner import gradient_stream
from thundersync_jax.objectives import advantages, aggregation
from thundersync_jax.streaming import scheduler

NBYTES = 2 * random_steps.VOCAB * 8
AGGREGATIONS = aggregation.AGGREGATIONS


def sign(rewards):
  """Above or below the mean: equal rewards are equal, but nothing is affine."""
  return np.sign(rewards - rewards.mean())


ESTIMATORS = advantages.ESTIMATORS | {'sign': advantages.Estimator(sign)}


def make_stream(learner, plan):
  return gradient_stream.GradientStream(learner, plan, pad_id=0, params=None)


def make_plan(name='grpo', how='token', **changes):
  settings = {'max_buckets': 3, 'constant_tokens': random_steps.CONSTANT_TOKENS}
  return gradient_stream.Plan(
    ESTIMATORS[name], AGGREGATIONS[how], **settings | changes
  )


def break_some(rng, step, truncate):
  """Some members fail, some are cut at a limit."""
  broken = []
  for t in step:
    if rng.random() < 0.15:
      t = dataclasses.replace(t, reward=None, failure='the tool broke')
    elif truncate and rng.random() < 0.3:
      turn = dataclasses.replace(t.turns[0], finish_reason='length')
      t = dataclasses.replace(t, turns=(turn,))
    broken.append(t)
  return broken


@settings(max_examples=150, deadline=None)
@given(
  seed=st.integers(0, 2**32 - 1),
  name=st.sampled_from(sorted(ESTIMATORS)),
  how=st.sampled_from(sorted(AGGREGATIONS)),
  granularity=st.sampled_from(scheduler.GRANULARITIES),
  continuous=st.booleans(),
  mask_truncated=st.booleans(),
  kl_coef=st.sampled_from([0.0, 0.5]),
  max_open_groups=st.integers(1, 4),
  max_open_sums=st.integers(1, 8),
)
def test_streamed_gradient_is_the_definition(
  seed,
  name,
  how,
  granularity,
  continuous,
  mask_truncated,
  kl_coef,
  max_open_groups,
  max_open_sums,
):
  """cases rows 10, 14, 22: any order, any bound; failures leave no trace."""
  rng = np.random.default_rng(seed)
  rewards = random_steps.binary
  if continuous and name != 'sign':
    rewards = random_steps.fraction
  step = random_steps.make_step(seed, rewards)
  step = break_some(rng, step, mask_truncated)
  learner = random_steps.CountingLearner(kl_coef)
  plan = make_plan(
    name,
    how,
    granularity=granularity,
    mask_truncated=mask_truncated,
    max_open_groups=max_open_groups,
    max_open_bytes=max_open_sums * NBYTES,
  )
  stream = make_stream(learner, plan)
  random_steps.open_step(stream, step)
  groups = stream.queue.groups(0)
  peaks = []
  give = stream.accumulators.give

  def watched(*args):
    give(*args)
    peaks.append(
      (len(stream.accumulators.open_groups), stream.accumulators.open_bytes)
    )

  stream.accumulators.give = watched
  gradient = random_steps.play(stream, random_steps.arrivals(rng, step), rng)

  sound = [
    t
    for t in step
    if t.failure is None and not (mask_truncated and t.truncated)
  ]
  want = learner.slow(sound, plan.estimator, plan.aggregation)
  got = gradient.total / gradient.denominator
  np.testing.assert_allclose(got, want, rtol=0, atol=1e-12)
  assert sum(len(group.scored) for group in groups) == len(sound)
  assert sum(stream.queue.failures.values()) == len(step) - len(sound)
  assert all(groups <= max_open_groups for groups, _ in peaks)
  assert all(size <= plan.max_open_bytes for _, size in peaks)
  assert gradient.policy_versions == {0}
