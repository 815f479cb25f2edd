"""Warm starts: demonstrations lie as rollouts do, and imitation learns them."""

import dataclasses

import jax
import numpy as np
import pytest

from configs import quickstart
from thundersync_jax import assembly, train_rl, train_sft
from thundersync_jax.envs import prompt_sets, toy, worker_pool
from thundersync_jax.models import tokenizer
from thundersync_jax.rollout import demonstrations
from thundersync_jax.runs import metrics

BYTES = tokenizer.ByteTokenizer()
(END,) = BYTES.stop_ids
TASK = {'key': 'afc', 'low': 'a', 'high': 'f', 'secret': 'd'}
PROMPT = prompt_sets.Prompt(7, 0, TASK)


def recorder(make=toy.make_guess, max_context=512):
  return demonstrations.Recorder(BYTES, make, max_context)


def tiny(steps=12):
  config = quickstart.get_config('debug')
  with config.unlocked():
    config.task.family = 'toy_guess'
    config.task.args = {'max_turns': 3, 'max_letters': 6}
    config.rollout.max_turns = 3
    config.rollout.max_turn_tokens = 4
    config.rollout.max_trajectory_tokens = 12
    config.rollout.max_context = 128
    config.learner.rows = (4,)
    config.learner.row_tokens, config.learner.row_targets = (160,), (64,)
    config.sft.steps, config.sft.batch = steps, 8
    config.sft.demonstrations = 24
    config.sft.learning_rate = 1e-2
    config.checkpoint_every_steps = 5
    config.steps = 2
  return config


def test_a_demonstration_is_the_conversation_of_the_template():
  """Guesses of a to f for d: c, e, d; only they and their ends have loss."""
  trajectory = recorder().play(PROMPT)
  messages = [
    {'role': 'user', 'content': 'Guess my letter from a to f.'},
    {'role': 'assistant', 'content': 'c'},
    {'role': 'user', 'content': 'higher'},
    {'role': 'assistant', 'content': 'e'},
    {'role': 'user', 'content': 'lower'},
    {'role': 'assistant', 'content': 'd'},
  ]
  whole = BYTES.apply_chat_template(messages, add_generation_prompt=False)
  tokens = np.concatenate([trajectory.prompt_tokens, trajectory.tokens])
  np.testing.assert_array_equal(tokens, whole)
  said = trajectory.tokens[trajectory.loss_mask]
  expected = [ord('c'), END, ord('e'), END, ord('d'), END]
  np.testing.assert_array_equal(said, expected)
  assert trajectory.reward == 1.0 and len(trajectory.turns) == 3


class Hopeless(toy.GuessEnvironment):
  def demonstrate(self):
    yield from 'aaaa'


class Silent:
  max_turns = 1

  def close(self):
    """Holds nothing."""


@pytest.mark.parametrize(
  'make,max_context,message',
  [
    (Silent, 512, 'Silent has no demonstrate'),
    (lambda: Hopeless(toy.GuessSettings()), 512, 'reward 0.2 below 1.0'),
    (toy.make_guess, 40, 'exceeds max_context=40'),
  ],
)
def test_gold_paths_that_do_not_solve_say_why(make, max_context, message):
  pool = worker_pool.WorkerPool(2, 10.0)
  try:
    with pytest.raises(ValueError, match=message):
      demonstrations.record(recorder(make, max_context), [PROMPT], pool, 1.0)
  finally:
    pool.close()


def test_an_epoch_takes_each_demonstration_once():
  config = tiny()
  gold = [
    dataclasses.replace(recorder().play(PROMPT), prompt_id=i) for i in range(12)
  ]
  config.sft.batch = 8
  drawn = [train_sft.batch_of(config, gold, step) for step in range(3)]
  ids = [t.prompt_id for batch in drawn for t in batch]
  assert sorted(ids[:12]) == sorted(ids[12:]) == list(range(12))
  assert ids[:12] != ids[12:]


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
  path = tmp_path_factory.mktemp('sft') / 'run'
  return train_sft.train(tiny(), path), path


def test_imitation_learns_the_gold_paths(trained):
  result, path = trained
  lines = metrics.read(path / 'metrics.jsonl')
  first, last = (lines[i]['learner/logprob'] for i in (0, -1))
  assert first < -5 and last > -2.5  # half the tokens are the end of a turn
  assert {'eval/accuracy_before', 'eval/accuracy_after'} <= {*result.summary}


def test_a_resumed_run_ends_with_the_same_weights(trained, tmp_path):
  whole, _ = trained
  config = tiny()
  config.eval.prompts = 0  # may change
  path = tmp_path / 'run'

  class Stop(Exception):
    pass

  def stop(run, state, batch):
    if int(state.step) == 7:
      raise Stop
    return step(run, state, batch)

  step = train_sft._step
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(train_sft, '_step', stop)
    with pytest.raises(Stop):
      train_sft.train(config, path)
  resumed = train_sft.train(config, path)
  for one, other in zip(
    jax.tree.leaves(whole.loaded.params),
    jax.tree.leaves(resumed.loaded.params),
    strict=True,
  ):
    np.testing.assert_array_equal(one, other)
  assert [line['step'] for line in metrics.read(path / 'metrics.jsonl')] == [
    *range(config.sft.steps)
  ]


def test_rl_starts_from_the_warm_start(trained, tmp_path):
  """One command: the RL run trains, or finds, its warm start in DIR/sft."""
  config = tiny()
  result = train_rl.train(config, str(tmp_path / 'run'))
  warm, facts = trained[0].summary, result.summary
  before = facts['eval/accuracy_before']
  assert before == facts['warm_start']['eval/accuracy_after']
  assert before == warm['eval/accuracy_after']


def test_settings_are_checked():
  config = tiny()
  config.sft.batch = 0
  with pytest.raises(ValueError, match='sft.batch=0 must be at least 1'):
    assembly.check(config)
  config = tiny(steps=0)
  with pytest.raises(ValueError, match='sft.steps=0'):
    train_sft.train(config, 'unused')
