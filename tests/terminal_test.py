"""Terminal tasks: gold paths, wrong ends, and what a model may write."""

import itertools
import json

import pytest

from thundersync_jax.envs import (
  folds,
  sandbox,
  terminal,
  terminal_tasks,
  tool_calls,
)


def tasks(count, seed=0, fold='train', **args):
  return list(itertools.islice(terminal.make_tasks(seed, fold, **args), count))


@pytest.fixture(scope='module')
def env():
  try:
    made = terminal.make()
  except sandbox.SandboxError as error:
    pytest.skip(str(error))
  yield made
  made.close()


def play(env, texts):
  for text in texts:
    step = env.step(text)
    if step.done:
      return step.reward
  return None


def bash(*commands):
  return [f'```bash\n{command}\n```' for command in commands] + ['done']


def test_tasks_are_many_and_folds_apart():
  keys = {}
  for fold in folds.DIGITS:
    drawn = tasks(1500, fold=fold)
    keys[fold] = {task['key'] for task in drawn}
    assert len(keys[fold]) > 1450
    assert {task['kind'] for task in drawn} == set(terminal_tasks.KINDS)
    json.dumps(drawn)
  other = {task['key'] for task in tasks(1500, seed=1, fold='test')}
  assert not keys['train'] & (keys['test'] | keys['validation'] | other)
  assert not keys['validation'] & (keys['test'] | other)
  assert tasks(5) == tasks(5)
  assert tasks(5) != tasks(5, seed=1)


@pytest.mark.parametrize('seed', range(4))
def test_gold_paths_earn_one_and_idleness_nothing(env, seed):
  """A hundred in all: shell tools and generator must agree on the end."""
  for task in tasks(25, seed=10 + seed):
    env.reset(task)
    assert env._reward() == 0, task['key']  # before anything is done
    assert len(task['gold']) < env.max_turns
    assert play(env, env.demonstrate()) == 1, task


def test_the_wanted_state_written_by_hand_earns_one(env):
  """The grader looks at files alone, not at how they came about."""
  for task in tasks(10, seed=8):
    env.reset(task)
    for path in task['absent']:
      env._box.run_shell(f'rm {path}')
    for path, text in task['wanted'].items():
      env._box.write_file(path, text)
    assert play(env, ['done']) == 1, task


def test_other_changes_earn_nothing(env):
  for task in tasks(10, seed=9):
    kept = next(p for p in task['wanted'] if p in task['files'])
    env.reset(task)
    turns = [*env.demonstrate()][:-1]
    assert play(env, [*turns, *bash(f'echo x >> {kept}')]) == 0, task


def by_hand(kind, files, wanted, absent=()):
  return {
    'key': 'x',
    'kind': kind,
    'question': 'Do it.',
    'files': files,
    'gold': [],
    'wanted': wanted,
    'absent': list(absent),
  }


@pytest.mark.parametrize(
  ('command', 'reward'),
  [
    ('echo 3 > answer.txt', 1),
    ('echo "  3" > answer.txt', 1),
    ('printf 3 > answer.txt', 1),
    ('echo 33 > answer.txt', 0),
    ('echo 3 3 > answer.txt', 0),
    ('ln -s a.txt answer.txt', 0),
    ('mkdir answer.txt', 0),
    ('echo 3 > answer.txt; rm a.txt', 0),
    ('mkfifo answer.txt', 0),
    ('echo 3 > answer.txt; echo scratch > b.txt', 1),
  ],
)
def test_answers_by_hand(env, command, reward):
  files = {'a.txt': '3\n'}
  env.reset(by_hand('count', files, {**files, 'answer.txt': '3'}))
  assert play(env, bash(command)) == reward


def test_order_of_lines_counts(env):
  task = by_hand('sort', {}, {'out.txt': 'a b\nc\n'})
  for text, reward in (('a b\\nc', 1), ('c\\na b', 0), ('a\\nb c', 0)):
    env.reset(task)
    assert play(env, bash(f'printf "{text}" > out.txt')) == reward
  env.reset(by_hand('find', {}, {'answer.txt': 'a/b.txt'}))
  assert play(env, bash('echo ./a/b.txt > answer.txt')) == 1


def test_observations_are_short_and_tell_what_is_wrong(env):
  task = tasks(1)[0]
  opening = env.reset(task)
  assert [m['role'] for m in opening] == ['system', 'user']
  assert opening[1]['content'] == task['question']
  for text, said in (
    ('```bash\nseq 9999\n```', 'characters left out'),
    ('```python\nprint(1)\n```', 'The only tool is bash'),
    ('```\nls\n```', 'Invalid tool call: a block names no language'),
    ('hm', 'Write a command in'),
  ):
    step = env.step(text)
    assert not step.done and step.reward is None
    (message,) = step.messages
    assert message['role'] == 'tool' and said in message['content']
    assert len(message['content']) < 450
  last = env.step('```bash\nls\n```')
  assert last.done and last.reward == 0 and last.messages == ()


def test_a_model_cannot_write_its_own_verdict(env):
  """Programs left behind do not run in the grader, whatever their names."""
  env.reset(by_hand('count', {}, {'answer.txt': '3'}))
  forge = 'import builtins, os\ndef grade(): return ""\nos._exit(0)'
  names = [
    'os',
    'sitecustomize',
    'usercustomize',
    'json',
    'grader',
    'encodings',
  ]
  for name in names:
    env._box.write_file(f'{name}.py', forge)
  assert play(env, ['done']) == 0


def test_calls_in_tags_work_too():
  try:
    env = terminal.make(form='hermes')
  except sandbox.SandboxError as error:
    pytest.skip(str(error))
  task = tasks(1)[0]
  env.reset(task)
  turns = list(env.demonstrate())
  assert tool_calls.hermes(turns[0])[0].name == 'bash'
  assert play(env, turns) == 1
  env.close()


@pytest.mark.parametrize(
  ('name', 'value', 'problem'),
  [
    ('kinds', ('cook',), 'must be some of'),
    ('kinds', (), 'must be some of'),
    ('form', 'xml', 'does not exist'),
    ('max_turns', 0, 'must be above 0'),
  ],
)
def test_wrong_settings_are_refused(name, value, problem):
  with pytest.raises(ValueError, match=f'{name}=.*{problem}'):
    terminal.Settings(**{name: value})
  with pytest.raises(ValueError, match="fold='dev' does not exist"):
    next(terminal.make_tasks(0, 'dev'))
