"""Whole runs with the settings that the other driver tests leave alone."""

import driver_test
import jax
import numpy as np
import pytest

from configs import quickstart
from thundersync_jax import train_rl
from thundersync_jax.learner import gradient_stream
from thundersync_jax.models import tokenizer
from thundersync_jax.runs import compare, metrics


def column(run, name):
  return [line.get(name) for line in run.lines]


def changed(config, changes):
  """The config with dotted keys set, new ones too."""
  with config.unlocked():
    for name, value in changes.items():
      *blocks, key = name.split('.')
      block = config
      for part in blocks:
        block = block[part]
      block[key] = value
  return config


def games(schedule):
  """Turns, KL, masked truncation, sums on the host, a slow environment."""
  config = quickstart.get_config('debug')
  changes = {
    'schedule': schedule,
    'checkpoint_every_steps': 0,
    'max_failed_fraction': 0.0,  # what is cut has not failed
    'eval.prompts': 0,
    'task.family': 'toy_guess',
    'task.args': {'max_turns': 3, 'latency_s': 0.01},
    'rollout.prompts_per_step': 3,
    'rollout.temperature': 0.9,
    'rollout.max_turn_tokens': 4,
    'rollout.max_trajectory_tokens': 12,
    'rollout.max_turns': 3,
    'rollout.max_context': 120,
    'rollout.prompt_buckets': (48,),
    'estimator.name': 'rloo',
    'estimator.aggregation': 'sequence',
    'estimator.mask_truncated': True,
    'objective.kl_coef': 0.2,
    'stream.max_buckets': 4,
    'stream.max_open_groups': 2,
    'stream.sums_on': 'host',
    'learner.rows': (2,),
    'learner.row_tokens': (176,),
    'learner.row_targets': (48,),
  }
  return changed(config, changes)


@pytest.fixture
def talkative(monkeypatch):
  """A quarter of all tokens end a turn, so that some trajectories are whole."""
  ends = tokenizer.ByteTokenizer.stop_ids | set(range(64))
  monkeypatch.setattr(tokenizer.ByteTokenizer, 'stop_ids', frozenset(ends))


def test_games_stream_as_they_do_in_a_batch(talkative, tmp_path):
  """cases rows 5, 6, 10, 22: several turns, at T = 0.9."""
  sync, streamed = (
    driver_test.play(games(schedule), tmp_path / schedule)
    for schedule in ('sync', 'thundersync')
  )
  assert compare.unequal_tokens(sync.record, streamed.record) == []
  found = compare.largest_difference(streamed.params, sync.params)
  assert found.relative <= 1e-6, found
  for name in ('queue/dropped_members', 'reward/mean', 'rollout/turns'):
    np.testing.assert_allclose(column(sync, name), column(streamed, name))
  for run in (sync, streamed):
    masked = column(run, 'queue/dropped_members')
    assert all(0 < count < 12 for count in masked), masked
    assert max(column(run, 'rollout/failed')) == 0
    assert min(column(run, 'rollout/observation_tokens')) > 0
    assert max(column(run, 'rollout/truncated_fraction')) == 0
    # The learner recomputes what the sampler recorded: every ratio is 1.
    assert max(column(run, 'rollout/logprob_diff_max')) < 1e-4
    assert column(run, 'learner/kl_ref')[0] < 1e-6  # the reference itself
    assert column(run, 'learner/kl_ref')[2] > 1e-6
    assert column(run, 'host/compilations') == [0, 0, 0]
  assert max(column(streamed, 'queue/open_groups')) > 0
  assert max(column(sync, 'queue/open_groups')) == 0


def test_an_evaluation_takes_nothing_from_async_rollouts(tmp_path):
  """cases row 29: answers to trajectories in flight reach the right agent.

  Training and evaluation have prompts of the same ids, and an environment that
  is still at work when the evaluation starts.
  """
  changes = {
    'eval.prompts': 4,
    'eval.every_steps': 1,
    'task.args.latency_s': 0.03,
    'stream.max_staleness': 2,
  }
  config = changed(driver_test.tiny('async', steps=4), changes)
  run = driver_test.play(config, tmp_path / 'run')
  for step in range(4):
    drawn = range(4 * step, 4 * step + 4)
    assert run.prompt_ids(step) == [p for p in drawn for _ in range(4)]
  evaluated = [x for x in run.lines if 'eval/accuracy' in x]
  assert [line['step'] for line in evaluated] == [0, 0, 1, 2, 3]
  assert {line['eval/prompts'] for line in evaluated} == {4}


def test_masking_every_trajectory_ends_the_run_with_the_reason(tmp_path):
  """cases row 10: the random model never ends a turn by itself."""
  config = driver_test.tiny('sync')
  config.estimator.mask_truncated = True
  with pytest.raises(RuntimeError, match="16 of 16 .*{'truncated': 16}"):
    train_rl.train(config, str(tmp_path / 'run'))


def test_a_gradient_that_is_not_finite_leaves_the_run_as_it_was(
  tmp_path, monkeypatch
):
  """cases row 14: it reaches neither optimizer nor disk; the run goes on."""
  config = driver_test.tiny('sync', steps=4)
  config.checkpoint_every_steps = 1
  whole = driver_test.play(config, tmp_path / 'whole')
  finish = gradient_stream.GradientStream.finish

  def poisoned(self, step):
    gradient, stats = finish(self, step)
    if step == 2:
      gradient = gradient_stream.learner_lib.BatchGradient(
        jax.tree.map(lambda x: x * np.float32('nan'), gradient.total),
        gradient.denominator,
        gradient.policy_versions,
      )
    return gradient, stats

  path = tmp_path / 'poisoned'
  with monkeypatch.context() as patch:
    patch.setattr(gradient_stream.GradientStream, 'finish', poisoned)
    with pytest.raises(FloatingPointError, match='gradient norm nan in step 2'):
      train_rl.train(config, str(path))
  assert len(metrics.read(path / 'metrics.jsonl')) == 2
  resumed = driver_test.play(config, path)
  assert sorted(resumed.seen) == [2, 3]
  jax.tree.map(np.testing.assert_array_equal, resumed.params, whole.params)
  assert [line['step'] for line in resumed.lines] == [0, 1, 2, 3]
  for name in ('reward/mean', 'learner/grad_norm', 'learner/entropy'):
    assert column(resumed, name) == column(whole, name)


@pytest.mark.parametrize(
  'changes,message',
  [
    ({'rollout.group_size': 1}, 'group_size=1 .*needs at least 2'),
    (
      {'estimator.resample_zero_variance': True, 'objective.kl_coef': 0.1},
      'kl_coef=0.1 with estimator.resample_zero_variance=True',
    ),
    (
      {'estimator.resample_zero_variance': True, 'schedule': 'async'},
      'use sync or thundersync',
    ),
    (
      {'estimator.resample_zero_variance': True, 'estimator.name': 'reinforce'},
      'has scope .batch.',
    ),
    ({'schedule': 'async', 'stream.max_staleness': 0}, 'must be at least 1'),
  ],
)
def test_settings_that_contradict_each_other(tmp_path, changes, message):
  config = changed(driver_test.tiny('sync'), changes)
  with pytest.raises(ValueError, match=message):
    train_rl.train(config, str(tmp_path / 'run'))
  assert not (tmp_path / 'run').exists()


def test_an_unknown_setting_is_refused():
  config = quickstart.get_config('debug')
  with pytest.raises(AttributeError, match='Did you mean "group_size"'):
    config.rollout.group_sise = 8
  with pytest.raises(ValueError, match='quickstart.py:fast does not exist'):
    quickstart.get_config('fast')
