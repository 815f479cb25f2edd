"""Rewards, the table of families, and the toy tasks, by hand."""

import itertools
import json

import jax.numpy as jnp
import numpy as np
import pytest

from thundersync_jax import envs
from thundersync_jax.envs import base, toy

CHAIN_SUM = {'generator': 'chain_sum', 'generator_args': {'max_terms': 2}}


def tasks(name, count, seed=0, fold='train', **args):
  family = envs.task_family(name)
  return list(itertools.islice(family.make_tasks(seed, fold, **args), count))


def reward_of(env, task, text):
  env.reset(task)
  step = env.step(text)
  assert step.done and step.messages == ()
  return step.reward


@pytest.mark.parametrize(
  ('value', 'expected'),
  [
    (1, 1.0),
    (-0.5, -0.5),
    (True, 1.0),
    (np.bool_(False), 0.0),
    (np.float32(0.25), 0.25),
    (np.int64(3), 3.0),
    (np.array(2.0), 2.0),
    (jnp.asarray(0.5, jnp.bfloat16), 0.5),
  ],
)
def test_numbers_are_rewards(value, expected):
  reward = base.checked_reward(value, 'env')
  assert type(reward) is float and reward == expected


@pytest.mark.parametrize(
  ('value', 'problem'),
  [
    (None, 'None of type NoneType'),
    (float('nan'), 'nan which is not finite'),
    (np.float32('inf'), 'inf.* which is not finite'),
    (-1e39, 'which is not finite in float32'),
    ('0.5', "'0.5' of type str"),
    (np.str_('1'), 'of shape'),
    (1j, 'of type complex'),
    ([0.5], r'\[0.5\] of shape \(1,\) where one number'),
    ([0.0, 1.0], r'of shape \(2,\) where one number'),
    (np.zeros(3), r'of shape \(3,\) where one number'),
    (jnp.ones([1]), r'of shape \(1,\) where one number'),
    ({'reward': 1.0}, 'of shape'),
  ],
)
def test_what_is_no_number_is_refused_by_name(value, problem):
  """cases rows 13 and 14: the error names the function, value and fix."""
  with pytest.raises(base.RewardError, match=problem) as error:
    base.checked_reward(value, 'MyEnv.grade')
  assert str(error.value).startswith('MyEnv.grade returned the reward ')
  assert 'return one finite float for each trajectory' in str(error.value)


def test_an_unknown_family_lists_those_that_exist():
  with pytest.raises(ValueError, match="'mathz' does not exist.*'toy_guess'"):
    envs.task_family('mathz')


@pytest.mark.parametrize('name', sorted(envs.ENVIRONMENTS))
def test_families_refuse_unknown_arguments(name):
  family = envs.task_family(name)
  assert family.name == name
  with pytest.raises(
    ValueError, match=rf"{name}: unknown arguments \['sise'\]"
  ):
    family.make(sise=1)
  with pytest.raises(
    ValueError, match=rf"{name}: unknown arguments \['sise'\]"
  ):
    next(family.make_tasks(0, 'train', sise=1))


@pytest.mark.parametrize(
  ('name', 'args'),
  [
    ('reasoning_gym', CHAIN_SUM),
    ('maths', {}),
    ('toy', {}),
    ('toy_guess', {}),
  ],
)
def test_tasks_are_json_and_derive_from_seed_and_fold(name, args):
  first = tasks(name, 20, **args)
  assert json.loads(json.dumps(first)) == first
  assert all(isinstance(task['key'], str) for task in first)
  assert tasks(name, 20, **args) == first
  assert tasks(name, 20, seed=1, **args) != first
  assert tasks(name, 20, fold='test', **args) != first
  messages = envs.task_family(name).make(**args).reset(first[0])
  assert messages[-1]['role'] == 'user' and messages[-1]['content']


def test_toy_rewards_by_hand():
  task = {'key': 'k', 'question': 'k'}
  env = toy.make(targets='ab')
  assert reward_of(env, task, 'abcd') == 0.5
  assert reward_of(env, task, 'xyzb') == 0.25
  assert reward_of(env, task, '') == 0.0
  env = toy.make(targets='ab', rule='any')
  assert [reward_of(env, task, text) for text in ('xb', 'xy', '')] == [1, 0, 0]


def test_random_bytes_get_toy_rewards_with_spread():
  """What a random byte model writes: the chance of one value is tiny."""
  rng = np.random.default_rng(0)
  env = toy.make()
  texts = [rng.bytes(16).decode('utf-8', 'replace') for _ in range(64)]
  rewards = [reward_of(env, {'question': 'k'}, text) for text in texts]
  assert np.std(rewards) > 0.05
  assert 0 < np.mean(rewards) < 0.5


def test_the_guessing_game_by_hand():
  env = toy.make_guess(max_turns=3)
  task = {'key': 'ckh', 'low': 'c', 'high': 'k', 'secret': 'h'}
  assert env.max_turns == 3

  def play(*texts):
    env.reset(task)
    return [env.step(text) for text in texts]

  answers = [
    s.messages[0]['content'] for s in play('d!', '? A k') if s.messages
  ]
  assert answers == ['higher', 'lower']
  assert play('x')[0].messages[0]['content'] == 'Name a letter from c to k.'
  *early, last = play('e', 'K', 'H')
  assert [step.reward for step in early] == [None, None]
  assert not any(step.done for step in early)
  assert (last.reward, last.done, last.messages) == (1.0, True, ())
  assert play('h')[-1].done
  # Best guess f, 2 of 8 letters away: 0.5 * (1 - 2 / 8).
  assert play('c', 'f', 'k')[-1].reward == 0.375
  assert play('-', '-', '-')[-1].reward == 0.0


def test_binary_search_wins_every_guessing_game():
  """Ten letters need at most four guesses: the answers are right."""
  env = toy.make_guess(max_turns=4, max_letters=10)
  for task in tasks('toy_guess', 200):
    env.reset(task)
    low, high = ord(task['low']), ord(task['high'])
    for _ in range(4):
      middle = (low + high) // 2
      step = env.step(chr(middle))
      if step.done:
        break
      if step.messages[0]['content'] == 'higher':
        low = middle + 1
      else:
        high = middle - 1
    assert step.reward == 1.0


def test_there_are_as_many_guessing_games_as_the_docstring_says():
  """Widths 2 and 3 of the alphabet: 2 * 25 + 3 * 24 = 122."""
  drawn = tasks('toy_guess', 4000, max_letters=3)
  assert len({task['key'] for task in drawn}) == 122


@pytest.mark.parametrize(
  ('make', 'args', 'message'),
  [
    (toy.make, {'targets': ''}, 'must hold at least one character'),
    (toy.make, {'rule': 'all'}, r"rule='all' .* \['any', 'fraction'\]"),
    (toy.make, {'word_length': 0}, 'word_length=0 must be at least 1'),
    (toy.make_guess, {'max_turns': 0}, 'max_turns=0 must be at least 1'),
    (toy.make_guess, {'max_letters': 27}, r'max_letters=27 must be in 2\.\.26'),
  ],
)
def test_wrong_toy_arguments_are_refused(make, args, message):
  with pytest.raises(ValueError, match=message):
    make(**args)
