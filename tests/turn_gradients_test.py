"""Turn-streamed distillation gradients equal whole-trajectory ones.

Leaf by leaf: below 1e-12 in f64, against a dense loop over trajectories; below
1e-6 in f32, against packed rows, where both round. Trajectories have 1 to 6
turns, arrive in random orders, and share prompts.
"""

import dataclasses

import jax
import numpy as np
import pytest
import turn_steps

from thundersync_jax.learner import distill_loss, turn_device
from thundersync_jax.types import Trajectory

SAMPLED = distill_loss.Loss()
CASES = {
  'sampled, llama': ('llama', SAMPLED, False),
  # With biases too, and an untied head.
  'reverse KL, qwen3, remat': (
    'qwen3',
    distill_loss.Loss('reverse_kl', temperature=0.7),
    True,
  ),
}


def in_f64(name):
  family, loss, remat = CASES[name]
  return turn_steps.parts(family, loss, 'float64', remat=remat)


@pytest.mark.parametrize('name', CASES)
def test_every_plan_is_exact_f64(name):
  """Against jax.grad of the dense loss; every plan was really taken."""
  with jax.enable_x64(True):
    made, step = in_f64(name), turn_steps.make_step(1)
    assert {len(t.turns) for t in step} == {1, 2, 3, 4, 5, 6}
    want = turn_steps.slow_gradient(made, step)
    for seed, plan in enumerate(('close', 'forward', 'turn', 'turn')):
      got, stats, stream = turn_steps.play(made, step, plan, seed)
      assert stream.ledger.plans[plan] >= 5, stream.ledger.plans
      assert turn_steps.leaf_errors(got, want).max() < 1e-12, (plan, seed)
      assert stats.kl.weight == sum(t.num_sampled for t in step)


def test_whole_steps_are_exact_f64():
  with jax.enable_x64(True):
    made, step = in_f64('sampled, llama'), turn_steps.make_step(2)
    want = turn_steps.slow_gradient(made, step)
    for granularity in ('trajectory', 'batch'):
      got, _, stream = turn_steps.play(made, step, 'turn', 0, granularity)
      assert set(stream.ledger.plans) == {'close'}
      assert turn_steps.leaf_errors(got, want).max() < 1e-12


@pytest.mark.parametrize('plan', ['forward', 'turn'])
def test_adjoints_are_needed(monkeypatch, plan):
  """Without what later turns ask of earlier ones the gradient is wrong."""
  with jax.enable_x64(True):
    made, step = in_f64('sampled, llama'), turn_steps.make_step(1)
    want = turn_steps.slow_gradient(made, step)
    monkeypatch.setattr(
      turn_device.Device, 'unwind', lambda self, *args: jax.numpy.zeros(())
    )
    got, _, _ = turn_steps.play(made, step, plan, 0)
    assert turn_steps.leaf_errors(got, want).max() > 0.01
    # The adjoints that nobody took must not reach the next test.
    made.device._slab = jax.tree.map(lambda x: 0 * x, made.device._slab)


def with_weights(made, dtype):
  """Weights of std 0.02, as models start with; see streaming_test.py."""
  drawn = turn_steps.weights(made.config, 7, std=0.02)
  params = jax.tree.map(lambda x: jax.numpy.asarray(x, dtype), drawn)
  return dataclasses.replace(made, params=made.learner.place(params))


def test_plans_agree_f32():
  """Streamed against packed; neither is further from f64 than the other."""
  step = turn_steps.make_step(1)
  with jax.enable_x64(True):
    made = with_weights(in_f64('sampled, llama'), 'float64')
    truth = turn_steps.slow_gradient(made, step)
  made = turn_steps.parts('llama', SAMPLED, 'float32')
  made = with_weights(made, 'float32')
  whole, _, _ = turn_steps.play(made, step, 'close', 0, 'batch')
  rounding = turn_steps.leaf_errors(whole, truth).max()
  for plan in ('forward', 'turn'):
    got, _, _ = turn_steps.play(made, step, plan, 1)
    assert turn_steps.leaf_errors(got, whole).max() < 1e-6, plan
    error = turn_steps.leaf_errors(got, truth).max()
    assert error < 1.5 * rounding + 1e-7, (plan, error, rounding)


def test_failures_and_forks_f64():
  """Ended turns of a failed trajectory count; so do rows behind a fork."""
  with jax.enable_x64(True):
    made, step = in_f64('sampled, llama'), turn_steps.make_step(3)
    rng = np.random.default_rng(0)
    forked = list(step[5].turns)
    forked[3] = dataclasses.replace(
      forked[3], context=rng.integers(0, turn_steps.VOCAB, 7).astype(np.int32)
    )
    step[5] = dataclasses.replace(step[5], turns=tuple(forked))
    step[4] = dataclasses.replace(step[4], reward=None, failure='it hung')
    step[7] = Trajectory(2, 1, 0, np.zeros(0, np.int32), failure='no reset')
    assert len(step[5].rows) == 2
    want = turn_steps.slow_gradient(made, step)
    for plan in ('close', 'forward', 'turn'):
      got, _, _ = turn_steps.play(made, step, plan, 4)
      assert turn_steps.leaf_errors(got, want).max() < 1e-12, plan
    got, _, _ = turn_steps.play(made, step, 'close', 4, 'batch')
    assert turn_steps.leaf_errors(got, want).max() < 1e-12
