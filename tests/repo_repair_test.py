"""Repository repair: gold paths, cheats, tools, and what a model may write."""

import itertools
import json
import random

import pytest

from thundersync_jax.envs import (
  folds,
  repo_repair,
  repo_tasks,
  sandbox,
  tool_calls,
)


def tasks(count, seed=0, fold='train', **args):
  stream = repo_repair.make_tasks(seed, fold, **args)
  return list(itertools.islice(stream, count))


@pytest.fixture(scope='module')
def env():
  try:
    made = repo_repair.make()
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


def say(env, text):
  step = env.step(text)
  assert not step.done and step.reward is None
  return step.messages[0]['content']


def write(name, **arguments):
  return tool_calls.write_python(tool_calls.Call(name, arguments))


def test_tasks_are_many_and_folds_apart():
  keys = {}
  for fold in folds.DIGITS:
    count = 3000 if fold == 'train' else 500
    drawn = tasks(count, fold=fold)
    keys[fold] = {task['key'] for task in drawn}
    assert len(keys[fold]) > 0.98 * count
    json.dumps(drawn)
  assert not keys['train'] & (keys['test'] | keys['validation'])
  assert not keys['validation'] & keys['test']
  assert tasks(5) == tasks(5) != tasks(5, seed=1)


def test_every_bug_of_every_template_can_be_drawn():
  wanted = {
    (name, wrong)
    for name, template in repo_tasks.TEMPLATES.items()
    for _, wrong in template.bugs
  }
  stream, found = random.Random(0), set()
  for _ in range(3000):
    drawn = repo_tasks.draw(stream)
    if drawn is not None:
      found.add(drawn.wrong.strip())
  assert len(found) > len(wanted)  # the same bug under other names
  for name, template in repo_tasks.TEMPLATES.items():
    words = {'f': 'f', 'x': 'xs', 'y': 'x', 'n': 3}
    for right, wrong in template.bugs:
      source = template.source.format(**words)
      line = f'  {right.format(**words)}\n'
      assert source.count(line) >= 1, (name, right)
      compile(
        source.replace(line, f'  {wrong.format(**words)}\n'), name, 'exec'
      )


def test_the_planted_line_is_the_only_difference():
  for task in tasks(200, seed=2):
    lines = task['files'][task['path']].splitlines()
    assert lines[task['line'] - 1] == task['wrong'] != task['right']
    lines[task['line'] - 1] = task['right']
    right, names = '\n'.join(lines), {}
    exec(right, names)
    module = type('Module', (), names)
    for expression, value in task['hidden']:
      scope = {task['module']: module}
      function = expression.partition('(')[0].partition('.')[2]
      scope['f'] = names[function]
      called = f'f({expression.partition("(")[2]}'
      assert repr(eval(called, scope)) == value


@pytest.mark.parametrize('seed', range(4))
def test_gold_paths_earn_one_and_idleness_nothing(env, seed):
  for task in tasks(25, seed=10 + seed):
    env.reset(task)
    assert env._reward() == 0, task['key']  # before anything is done
    assert play(env, env.demonstrate()) == 1, task['key']


def test_a_gold_path_reads_as_it_should(env):
  task = tasks(1)[0]
  opening = env.reset(task)
  assert [m['role'] for m in opening] == ['system', 'user']
  assert task['package'] in opening[1]['content']
  turns = list(env.demonstrate())
  assert turns[0] == '[test()]' and turns[-1] == 'done'
  failed = say(env, turns[0])
  assert failed.startswith(f'FAILED test_{task["module"]}.py: ')
  assert '\nit gave ' in failed or '\nit raised ' in failed
  listed = say(env, turns[1])
  assert f'{task["line"]} {task["wrong"]}' in listed.splitlines()
  assert say(env, turns[2]).startswith('replaced')
  assert say(env, turns[3]) == 'all tests passed'


def test_a_small_edit_within_a_second_is_seen(env):
  """Of equal length and time stamp: stale bytecode would hide it."""
  task = tasks(1)[0]
  env.reset(task)
  path = task['path']
  for value in range(4):
    say(env, write('edit', path=path, start=1, end=1, text=f'X = {value}'))
    result = env._box.run_python(
      f'from {task["package"]} import {task["module"]} as m\nprint(m.X)'
    )
    if 'SyntaxError' not in result.output and 'Indent' not in result.output:
      assert result.output == str(value)


@pytest.mark.parametrize(
  ('text', 'said'),
  [
    ('hm', 'Call a tool, e.g. [list()], or say done.'),
    ('[list()]', '{package}/__init__.py\n{path}\ntest_{module}.py'),
    ("[read(path='no.py')]", 'no.py: no such file'),
    ("[read('{package}/__init__.py')]", '(empty)'),
    ("[read(path='/etc/passwd')]", 'give a path below the working directory'),
    ("[read(path='../x')]", 'give a path below the working directory'),
    ('[read(path=3)]', 'path must be of type str'),
    ('[read()]', 'read needs path'),
    ('[list(path="a")]', 'list needs no arguments'),
    ('[fly()]', 'There is no tool fly; there are list, read'),
    ("[replace('{path}', 'nowhere', 'x')]", 'old stands there 0 times'),
    ("[replace('{path}', '', 'x')]", 'old stands there 0 times'),
    ("[edit('{path}', 0, 1, 'x')]", 'lines from 1 to'),
    ("[edit('{path}', 1, True, 'x')]", 'end must be of type int'),
    ('[read(path=open("x"))]', 'Invalid tool call'),
    ('[list(), list(), list(), list(), list()]', 'only the first 4 calls'),
  ],
)
def test_answers_of_tools(env, text, said):
  task = tasks(1)[0]
  env.reset(task)
  names = {name: task[name] for name in ('package', 'path', 'module')}
  for name, value in names.items():
    text = text.replace(f'{{{name}}}', value)
  answer = say(env, text)
  assert said.format(**names) in answer
  assert len(answer) < 1200


def test_turns_run_out(env):
  env.reset(tasks(1)[0])
  steps = [env.step('[list()]') for _ in range(env.max_turns)]
  assert [s.done for s in steps] == [False] * (env.max_turns - 1) + [True]
  assert steps[-1].reward == 0 and steps[-1].messages == ()


CHEATS = {
  'exit': 'import sys\nsys.exit(0)\n',
  'hard exit': 'import os\nos._exit(0)\n',
  'equal to all': """
class Any:
  def __eq__(self, other):
    return True
  def __repr__(self):
    return '1'
def __getattr__(name):
  return lambda *args: Any()
""",
  'repr': 'import builtins\nbuiltins.repr = lambda x: "1"\n',
  'pipe': """
import json, os
os.write(3, json.dumps([['value', '1']] * 10).encode())
os._exit(0)
""",
}


@pytest.mark.parametrize('cheat', CHEATS)
def test_cheats_earn_nothing(env, cheat):
  task = tasks(1)[0]
  for path in (task['path'], f'{task["package"]}/__init__.py'):
    env.reset(task)
    env._box.write_file(path, CHEATS[cheat])
    assert play(env, ['done']) == 0


def test_changing_the_visible_test_earns_nothing(env):
  task = tasks(1)[0]
  env.reset(task)
  path = f'test_{task["module"]}.py'
  env._box.write_file(path, 'def test():\n  assert True\n')
  assert say(env, '[test()]') == 'all tests passed'
  env._box.write_file('conftest.py', 'raise SystemExit(0)')
  env._box.write_file('sitecustomize.py', 'raise SystemExit(0)')
  assert play(env, ['done']) == 0


def test_an_endless_loop_is_told(env):
  try:
    quick = repo_repair.make(wall_s=1.0)
  except sandbox.SandboxError as error:
    pytest.skip(str(error))
  task = tasks(1)[0]
  quick.reset(task)
  quick._box.write_file(task['path'], 'while True:\n  pass\n')
  assert 'ran longer than 1 s' in say(quick, '[test()]')
  assert play(quick, ['done']) == 0
  quick.close()


def test_calls_in_tags_work_too():
  try:
    env = repo_repair.make(form='hermes')
  except sandbox.SandboxError as error:
    pytest.skip(str(error))
  env.reset(tasks(1)[0])
  turns = list(env.demonstrate())
  assert turns[0].startswith('<tool_call>')
  assert play(env, turns) == 1
  env.close()


def test_wrong_settings_are_refused():
  with pytest.raises(ValueError, match="form='fenced' does not exist"):
    repo_repair.Settings(form='fenced')
  with pytest.raises(ValueError, match='max_turns=0 must be above 0'):
    repo_repair.Settings(max_turns=0)
  with pytest.raises(ValueError, match="fold='dev' does not exist"):
    next(repo_repair.make_tasks(0, 'dev'))
