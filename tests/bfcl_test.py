"""BFCL multi-turn: gold paths, the benchmark's checks, and hostile calls."""

import importlib
import re

import pytest

pytest.importorskip('bfcl_eval')
pytest.importorskip('mpmath')

from thundersync_jax.envs import bfcl, bfcl_services, folds  # noqa: E402

TASK = {'key': 'multi_turn_base_0', 'category': 'base'}
MATHS = {'key': 'multi_turn_base_60', 'category': 'base'}
LS = '{"current_directory_content": ["document", "archive"]}'


def play(environment, task):
  environment.reset(task)
  for text in environment.demonstrate():
    result = environment.step(text)
  return result


def said(result):
  assert not result.done
  return result.messages[0]['content']


@pytest.mark.parametrize('category', bfcl.CATEGORIES)
def test_gold_paths_win_and_silence_does_not(category):
  args = {'category': category, 'max_turns': 40}
  environment = bfcl.make(**args)
  keys = []
  for fold in folds.DIGITS:
    for task in list(bfcl.make_tasks(0, fold, **args))[:40]:
      keys.append(task['key'])
      assert play(environment, task).reward == 1
      environment.reset(task)
      result = environment.step('Done.')
      while not result.done:
        result = environment.step('Done.')
      assert result.reward == 0
  assert len(set(keys)) == len(keys)
  environment.close()
  environment.close()


def test_variants_of_a_scenario_share_their_fold():
  def numbers(fold, category):
    tasks = bfcl.make_tasks(0, fold, category=category)
    return {task['key'].rsplit('_', 1)[1] for task in tasks}

  test = numbers('test', 'base') | numbers('test', 'miss_func')
  assert not test & (numbers('train', 'miss_param') | numbers('train', 'base'))


def test_our_grade_is_the_benchmarks():
  """Each request's calls less one: the benchmark's checker decides the same."""
  name = 'bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker'
  checker = importlib.import_module(name)
  environment = bfcl.make(max_turns=99, max_request_turns=40)
  for number, entry in enumerate(bfcl_services.entries('base').values()):
    gold = entry['ground_truth']
    turn = number % len(gold)
    calls = [list(request) for request in gold]
    calls[turn] = calls[turn][:-1]
    environment.reset({'key': entry['id'], 'category': 'base'})
    for request in calls:
      for call in request:
        environment.step(f'[{call}]')
      result = environment.step('Done.')
      if result.done:
        break
    steps = [[request] if request else [] for request in calls]
    theirs = checker.multi_turn_checker(
      steps, gold, entry, 'multi_turn_base', f'test_{number}'
    )
    assert result.reward == theirs['valid']


def test_the_prompt_lists_signatures():
  environment = bfcl.make()
  system, user = environment.reset(TASK)
  assert system['role'] == 'system'
  functions, question = user['content'].splitlines()
  assert 'cd(folder)' in functions and 'ls(a?)' in functions
  assert 'cp(' not in functions  # excluded
  assert question.startswith("Move 'final_report.pdf'")
  needed = bfcl.make(functions='needed').reset(TASK)[1]['content']
  assert len(needed) < 0.5 * len(user['content'])


def test_missing_functions_come_later():
  task = {'key': 'multi_turn_miss_func_0', 'category': 'miss_func'}
  environment = bfcl.make(category='miss_func')
  assert 'sort(' not in environment.reset(task)[1]['content']
  texts = environment.demonstrate()
  replies = [environment.step(next(texts)) for _ in range(4)]
  assert said(replies[-1]).startswith('Upon identifying')
  assert said(environment.step("[sort('final_report.pdf')]")).startswith(
    'error: there is no function'
  )
  # It called a function where it had to say that it cannot.
  assert environment.step('Done.').reward == 0
  environment.reset(task)
  texts = environment.demonstrate()
  replies = [environment.step(next(texts)) for _ in range(5)]
  assert said(replies[-1]) == (
    'New functions: sort(file_name). What about now?'
  )


def test_a_share_of_the_requests_is_a_reward():
  environment = bfcl.make(reward='requests')
  environment.reset(TASK)
  texts = environment.demonstrate()
  for _ in range(4):
    environment.step(next(texts))
  environment.step('Done.')
  assert environment.step('Done.').reward == 0.5


@pytest.mark.parametrize(
  'text, answer',
  [
    ('[ls()]', LS),
    ('\0 [ls()]', LS),
    ('Sure: [GorillaFileSystem.ls(a=True)] .', LS),
    ('ls()', LS),
    ('[ls(', 'Invalid tool call: '),
    ('[ls(a=open("x"))]', 'Invalid tool call: '),
    ('[ls(*[1])]', 'Invalid tool call: '),
    ('[ls(**{"a": 1})]', 'Invalid tool call: '),
    ('[ls(a=1e400)]', 'Invalid tool call: '),
    ('[ls(' + '[' * 9000 + ')]', 'Invalid tool call: '),
    ('[' + 'ls(),' * 65 + ']', 'Invalid tool call: '),
    ('[__init__()]', 'error: there is no function __init__'),
    ('[_load_scenario(scenario={})]', 'error: there is no function'),
    ('[cd(b=1)]', 'Error during execution: '),
    ("[cd(folder='\ud800')]", 'Invalid tool call: '),
    ("[cd(folder=['a'])]", 'Error during execution: '),
  ],
)
def test_garbage_gets_an_answer(text, answer):
  environment = bfcl.make()
  environment.reset(TASK)
  assert said(environment.step(text)).startswith(answer)


def test_results_are_cut():
  environment = bfcl.make(max_result=10, max_results=25)
  environment.reset(TASK)
  one = LS[:10] + '...'
  assert said(environment.step('[ls()]')) == one
  assert said(environment.step('[ls(), ls()]')) == f'{one}\n{one}'[:25] + '...'


def test_the_calculator_keeps_its_precision_to_itself():
  mpmath = importlib.import_module('mpmath')
  entry = {'id': 'x', 'involved_classes': ['MathAPI'], 'initial_config': {}}
  services = bfcl_services.Services(entry)
  before = mpmath.mp.dps
  (result,) = services.run(['logarithm(8, 2, precision=40)'])
  assert float(re.findall(r'\d\.\d+', result)[0]) == 3
  assert mpmath.mp.dps == before
  for call in (
    'power(base=10, exponent=1000000000)',
    'power(9, -1e9)',
    'square_root(2, 1000000)',
  ):
    assert 'above the limit 1000' in services.run([call])[0]


def test_a_doubling_tree_ends_the_task():
  entry = bfcl_services.entries('base')['multi_turn_base_0']
  services = bfcl_services.Services(entry)
  assert not services.too_large
  services.instances['GorillaFileSystem'].bomb = [[i] for i in range(30_000)]
  assert services.too_large


def test_too_many_turns_fail():
  environment = bfcl.make(max_request_turns=2)
  environment.reset(TASK)
  assert said(environment.step('[ls()]')) == LS
  last = environment.step('[ls()]')
  assert (last.done, last.reward) == (True, 0.0)


def test_wrong_settings_are_refused():
  with pytest.raises(ValueError, match="category='all'"):
    bfcl.make(category='all')
  with pytest.raises(ValueError, match='max_turns=0'):
    bfcl.make(max_turns=0)
  with pytest.raises(ValueError, match="fold='dev'"):
    next(bfcl.make_tasks(0, 'dev'))
