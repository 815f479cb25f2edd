"""reasoning-gym tasks: answers, stored entries, scorers that fail or freeze."""

import ast
import hashlib
import itertools
import json
import threading
import time

import pytest
import reasoning_gym

from thundersync_jax.envs import base, reasoning, worker_pool

CHAIN_SUM = {
  'generator': 'chain_sum',
  'generator_args': {
    'min_terms': 2,
    'max_terms': 2,
    'min_digits': 1,
    'max_digits': 1,
  },
  'answer': 'last_integer',
  'exact': True,
}


def tasks(count, **args):
  return list(itertools.islice(reasoning.make_tasks(0, 'train', **args), count))


def reward_of(env, task, text):
  env.reset(task)
  step = env.step(text)
  assert step.done and step.messages == ()
  return step.reward


@pytest.mark.parametrize('score', [None, float('nan'), 'right', [1.0, 0.0]])
def test_a_generator_with_a_bad_score_is_an_error_outcome(score, monkeypatch):
  """cases rows 13 and 14: it reaches the driver by name, not as a NaN."""
  monkeypatch.setattr(
    type(reasoning_gym.create_dataset('chain_sum')),
    'score_answer',
    lambda *_: score,
  )
  env = reasoning.make(**CHAIN_SUM)
  env.reset(tasks(1, **CHAIN_SUM)[0])
  pool = worker_pool.WorkerPool(num_workers=1, timeout_s=30.0)
  pool.submit(0, env.step, '12')
  assert pool.wait(30.0)
  (outcome,) = pool.results()
  assert 'RewardError: reasoning_gym chain_sum.score_answer' in outcome.error
  pool.close()


@pytest.mark.parametrize(
  ('text', 'expected'),
  [
    ('12', '12'),
    ('3 + 9 = 12.', '12'),
    ('The answer is -7!', '-7'),
    ('7-5', '5'),
    ('7 - 5 = 2', '2'),
    ('\N{MINUS SIGN}3', '-3'),
    ('**1,234**', '1234'),
    ('1,2', '2'),
    ('12.0', '12'),
    ('12.5', ''),
    ('7, or rather 12.5', ''),
    (r'\boxed{-4}', '-4'),
    ('(3)-4', '4'),
    ('no number', ''),
    ('', ''),
  ],
)
def test_last_integer(text, expected):
  assert reasoning.last_integer(text) == expected


def test_raw_and_tag():
  assert reasoning.raw('  a b\n') == 'a b'
  text = '<answer>1</answer> or\n<answer> 2\n3 </answer> then'
  assert reasoning.tag(text) == '2\n3'
  assert reasoning.tag('<answer>1') == ''


def test_the_quickstart_task_is_one_digit_sums():
  start = 'State the final answer to the following arithmetic problem: '
  env = reasoning.make(**CHAIN_SUM)
  for task in tasks(50, **CHAIN_SUM):
    (message,) = env.reset(task)
    problem = message['content'].removeprefix(start).removesuffix(' =')
    left, sign, right = problem.split()
    answer = int(left) + int(right) * (1 if sign == '+' else -1)
    assert reward_of(env, task, f'{problem} = {answer}.') == 1.0
    assert reward_of(env, task, f'{answer + 1}') == 0.0
    assert reward_of(env, task, 'I do not know') == 0.0


def test_exact_drops_partial_scores():
  """The scorer gives len(oracle) / len(answer) where the answer holds it."""
  args = {**CHAIN_SUM, 'answer': 'raw', 'exact': False}
  task = tasks(1, **args)[0]
  text = f'It is {task["answer"]}'
  partial = len(task['answer']) / len(text)
  assert reward_of(reasoning.make(**args), task, text) == partial
  exact = reasoning.make(**{**args, 'exact': True})
  assert reward_of(exact, task, text) == 0.0
  assert reward_of(exact, task, task['answer']) == 1.0


def test_system_and_suffix_frame_the_question():
  args = {**CHAIN_SUM, 'system': 'Be brief.', 'suffix': ' Number only.'}
  task = tasks(1, **args)[0]
  assert reasoning.make(**args).reset(task) == [
    {'role': 'system', 'content': 'Be brief.'},
    {'role': 'user', 'content': task['question'] + ' Number only.'},
  ]


# Scorers that tell tuples from lists, hold numpy scalars, or have no answer.
@pytest.mark.parametrize(
  'generator', ['arc_agi', 'knights_knaves', 'codeio', 'rush_hour']
)
def test_stored_tasks_score_as_the_generator_does(generator):
  """The answer and a wrong one, against the library's own entry."""
  args = {'generator': generator}
  stored = json.loads(json.dumps(tasks(3, **args)))
  name = b'0/train/0'
  seed = int.from_bytes(hashlib.sha256(name).digest()[:4], 'big')
  dataset = reasoning_gym.create_dataset(generator, seed=seed, size=1000)
  for index, task in enumerate(stored):
    entry = dataset[index]
    for answer in (entry['answer'] or 'x', '[[1]]'):
      assert reasoning.score(generator, '{}', task, answer) == (
        dataset.score_answer(answer, entry)
      )


def test_a_composite_mixes_generators():
  parts = [
    {'name': 'chain_sum', 'weight': 1.0, 'config': {'max_terms': 2}},
    {'name': 'letter_counting', 'weight': 1.0, 'config': {}},
  ]
  args = {'generator': 'composite', 'generator_args': {'datasets': parts}}
  env = reasoning.make(**args, answer='last_integer')
  drawn = tasks(30, **args)
  sources = {
    ast.literal_eval(task['metadata'])['source_dataset'] for task in drawn
  }
  assert sources == {'chain_sum', 'letter_counting'}
  assert [reward_of(env, t, t['answer']) for t in drawn] == [1.0] * 30


@pytest.mark.parametrize(
  ('args', 'message'),
  [
    ({'generator': 'chain_summ'}, r"'chain_summ' does not exist.*'chain_sum'"),
    (
      {'generator': 'chain_sum', 'generator_args': {'terms': 2}},
      r"no arguments \['terms'\]; valid are .*'max_terms'",
    ),
    (
      {'generator': 'chain_sum', 'generator_args': {'seed': 2}},
      r"no arguments \['seed'\]",
    ),
    (
      {'generator': 'chain_sum', 'generator_args': {'min_terms': 0}},
      r"refuses \{'min_terms': 0\}: min_terms must be positive",
    ),
    ({'generator': 'chain_sum', 'answer': 'first'}, "answer='first' does not"),
    ({'generator': 'chain_sum', 'timeout_s': 0}, 'timeout_s=0 must be above 0'),
    ({}, r"missing arguments \['generator'\]"),
  ],
)
def test_wrong_reasoning_arguments_are_refused(args, message):
  with pytest.raises(ValueError, match=message):
    reasoning.make(**args)
  with pytest.raises(ValueError, match=message):
    next(reasoning.make_tasks(0, 'train', **args))


def test_a_scorer_that_raises_gives_0_and_is_counted():
  """prime_factorization raises on what is no number."""
  args = {'generator': 'prime_factorization'}
  env = reasoning.make(**args)
  task = tasks(1, **args)[0]
  source = 'reasoning_gym prime_factorization.score_answer'
  before = base.SCORING_FAILURES.counts().get(source, 0)
  assert reward_of(env, task, 'rubbish') == 0.0
  assert base.SCORING_FAILURES.counts()[source] == before + 1
  assert reward_of(env, task, task['answer']) == 1.0


def test_an_answer_that_freezes_its_scorer_gives_0_and_freezes_nothing_else():
  """The scorer evaluates 9**9**9, which never lets go of the interpreter."""
  args = {'generator': 'countdown', 'generator_args': {'max_numbers': 4}}
  env = reasoning.make(**args, timeout_s=2.0)
  task = tasks(1, **args)[0]
  assert reward_of(env, task, '1 + 1') == 0.05  # starts the child process
  rewards = []
  thread = threading.Thread(
    target=lambda: rewards.append(reward_of(env, task, '9**9**9**9 + 1'))
  )
  thread.start()
  beats = 0
  while thread.is_alive():
    beats += 1
    time.sleep(0.01)
  assert rewards == [0.0]
  assert beats > 20  # of about 200: this thread went on meanwhile
  assert reward_of(env, task, '1 + 1') == 0.05
