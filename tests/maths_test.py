"""Mathematics graded by math-verify, and the child processes that do it."""

import itertools
import json
import signal
import subprocess
import sys
import time

import pytest

from thundersync_jax.envs import base, isolated, maths, worker_pool


def tasks(count, fold='train', **args):
  return list(itertools.islice(maths.make_tasks(0, fold, **args), count))


def reward_of(env, task, text):
  env.reset(task)
  step = env.step(text)
  assert step.done and step.messages == ()
  return step.reward


@pytest.mark.parametrize(
  ('gold', 'text', 'right'),
  [
    ('12', 'so 3 + 9 = 12', True),
    ('12', r'\boxed{12}', True),
    ('12', 'the answer is 13', False),
    (r'\frac{1}{2}', r'It is $0.5$.', True),
    ('1/2', r'\boxed{\frac{2}{4}}', True),
    ('1,234', '1234', True),
    (r'x^2 + 2x + 1', r'$(x+1)^2$', True),
    ('12', '', False),
    ('12', r'\boxed{', False),
  ],
)
def test_maths_rewards(gold, text, right):
  env = maths.make()
  assert reward_of(env, {'question': 'q', 'answer': gold}, text) == right


def test_a_tower_of_powers_is_wrong_and_ends_in_time():
  """sympy works on 9^(9^9) without letting go of the interpreter."""
  env = maths.make(timeout_s=2.0)
  before = base.SCORING_FAILURES.counts().get('maths math_verify', 0)
  task = {'question': 'q', 'answer': '12'}
  assert reward_of(env, task, '12') == 1.0
  assert reward_of(env, task, r'\boxed{9^{9^{9}}}') == 0.0
  assert base.SCORING_FAILURES.counts()['maths math_verify'] == before + 1
  assert reward_of(env, task, '12') == 1.0


def test_maths_grades_in_several_worker_threads():
  """Its own time limits need signals, which threads do not have."""
  pool = worker_pool.WorkerPool(num_workers=4, timeout_s=120.0)
  for ticket in range(8):
    env = maths.make()
    env.reset({'question': 'q', 'answer': str(ticket % 2)})
    pool.submit(ticket, env.step, 'It is 1.')
  rewards = {}
  while len(rewards) < 8:
    assert pool.wait(120.0)
    rewards |= {o.ticket: o.value.reward for o in pool.results()}
  assert rewards == {ticket: float(ticket % 2) for ticket in range(8)}
  pool.close()


def test_maths_tasks_come_from_a_file_a_list_or_a_generator(tmp_path):
  items = [{'question': f'{n}+1?', 'answer': str(n + 1)} for n in range(5)]
  file = tmp_path / 'sums.jsonl'
  file.write_text('\n\n'.join(json.dumps(item) for item in items) + '\n')
  for args in ({'path': str(file)}, {'items': items}):
    drawn = tasks(100, **args)
    assert sorted(t['question'] for t in drawn) == [
      item['question'] for item in items
    ]
    assert all(int(t['question'][0]) + 1 == int(t['answer']) for t in drawn)
    assert drawn == tasks(100, fold='test', **args)
  generated = tasks(3)  # GSM-Symbolic
  env = maths.make()
  for task in generated:
    (message,) = env.reset(task)
    assert message['content'].endswith(r'Put the final answer in \boxed{}.')
    text = rf'Therefore \boxed{{{task["answer"]}}}.'
    assert reward_of(env, task, text) == 1.0


@pytest.mark.parametrize(
  ('line', 'message'),
  [
    ('{"question": "q", "answer": ', r'line 2: .* is not JSON: Expecting'),
    ('{"question": "q"}', r'line 2: answer=None must be text'),
    ('{"question": "q", "answer": 3}', r'line 2: answer=3 must be text'),
    ('["q", "a"]', r'line 2: question=None must be text'),
    ('{"question": " ", "answer": "3"}', r"line 2: question=' ' must be text"),
    (
      '{"question": "q", "answer": "???"}',
      r"line 2: answer='\?\?\?' does not parse as mathematics",
    ),
  ],
)
def test_a_bad_line_of_a_task_file_is_named(tmp_path, line, message):
  file = tmp_path / 'tasks.jsonl'
  file.write_text(f'{{"question": "q", "answer": "3"}}\n{line}\n')
  with pytest.raises(ValueError, match=message):
    tasks(9, path=str(file))


def test_maths_sources_exclude_each_other():
  items = [{'question': 'q', 'answer': '1'}]
  with pytest.raises(ValueError, match="path='x' and 1 items exclude"):
    maths.make(path='x', items=items)


def test_a_child_survives_what_it_calls():
  """It raises, exits, reads its input and prints; then it is asked again."""
  children = isolated.Children(max_children=1)

  def call(target, *args):
    return children.call(target, *args, timeout_s=20.0)

  with pytest.raises(isolated.IsolatedError, match='ZeroDivisionError'):
    call('builtins:eval', '1/0')
  assert call('builtins:eval', '__import__("sys").stdin.read()') == ''
  assert call('builtins:print', 'to nobody') is None
  pid = call('os:getpid')
  with pytest.raises(isolated.IsolatedError, match='SystemExit'):
    call('sys:exit', 3)
  assert call('os:getpid') == pid
  with pytest.raises(isolated.IsolatedError, match='ended with status 4'):
    call('os:_exit', 4)
  assert call('os:getpid') != pid
  with pytest.raises(isolated.IsolatedError, match=r'no reply within 0\.3 s'):
    children.call('time:sleep', 60, timeout_s=0.3)
  assert call('builtins:len', 'x' * 300_000) == 300_000  # beyond a pipe's size


def test_a_missing_package_is_named():
  children = isolated.Children(imports=('no_such_package',))
  with pytest.raises(isolated.StartError, match='install the package') as error:
    children.call('os:getpid', timeout_s=5.0)
  assert 'no_such_package' in str(error.value)


def test_a_child_ends_with_a_killed_parent():
  """Busy in a computation that nothing interrupts: its own limit ends it."""
  program = (
    'import threading, time; from thundersync_jax.envs import isolated\n'
    'c = isolated.Children()\n'
    'print(c.call("os:getpid", timeout_s=20.0), flush=True)\n'
    'c.call("builtins:eval", "9**9**9**9", timeout_s=1.0)\n'
  )
  parent = subprocess.Popen(
    [sys.executable, '-c', program], stdout=subprocess.PIPE, text=True
  )
  child = int(parent.stdout.readline())
  time.sleep(0.3)  # the computation has begun
  parent.send_signal(signal.SIGKILL)
  parent.wait()
  parent.stdout.close()
  deadline = time.monotonic() + 60
  while is_running(child):
    assert time.monotonic() < deadline
    time.sleep(0.1)


def is_running(pid):
  """Whether the process exists and is no zombie."""
  try:
    with open(f'/proc/{pid}/stat') as stat:
      return stat.read().rpartition(')')[2].split()[0] != 'Z'
  except FileNotFoundError:
    return False
