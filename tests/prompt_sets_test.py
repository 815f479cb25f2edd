"""Prompt sets: what is written, and the exact, resumable order of reading."""

import collections
import concurrent.futures
import itertools
import json
import pathlib
import subprocess
import sys

import pytest

from thundersync_jax import envs
from thundersync_jax.envs import base, prompt_sets, toy

SIZES = {'train': 13, 'test': 5}


def build(data_dir, *, sizes=None, seed=0, args=None, family=toy.FAMILY):
  return prompt_sets.build(
    'letters', family, sizes or SIZES, seed, args or {}, data_dir
  )


def keys(path, fold):
  """The keys of a fold in an epoch of the order of seed 0."""
  prompts = prompt_sets.PromptSet(path, fold, seed=0)
  return [prompts[i].task['key'] for i in range(len(prompts))]


@pytest.fixture(name='path', scope='module')
def fixture_path(tmp_path_factory):
  return build(tmp_path_factory.mktemp('prompts'))


def counted_family(distinct: int, endless: bool = True) -> base.TaskFamily:
  """Tasks 0, 1, 2, ... modulo `distinct`, each drawn three times in a row."""

  def make_tasks(seed, fold):
    del seed, fold
    draws = itertools.count() if endless else range(3 * distinct)
    for draw in draws:
      yield {'key': str(draw // 3 % distinct), 'draw': draw}

  return base.TaskFamily('counted', make_tasks, make=lambda: None)


def test_folds_are_disjoint_and_of_the_sizes_asked_for(path):
  train, test = keys(path, 'train'), keys(path, 'test')
  assert len(set(train)) == 13
  assert len(set(test)) == 5
  assert not set(train) & set(test)


def test_duplicates_are_dropped_in_a_fold_and_between_folds(tmp_path):
  """Each key is drawn three times; the first draw of a key is the one kept."""
  path = build(tmp_path, family=counted_family(7), sizes={'b': 4, 'a': 3})
  assert sorted(keys(path, 'a')) == ['0', '1', '2']
  assert sorted(keys(path, 'b')) == ['3', '4', '5', '6']
  prompts = prompt_sets.PromptSet(path, 'b', seed=0)
  draws = {prompts[i].task['key']: prompts[i].task['draw'] for i in range(4)}
  assert draws == {'3': 9, '4': 12, '5': 15, '6': 18}


@pytest.mark.parametrize('endless', [True, False])
def test_too_few_different_tasks_say_how_many_exist(tmp_path, endless):
  with pytest.raises(ValueError) as error:
    build(
      tmp_path,
      family=counted_family(7, endless),
      sizes={'train': 6, 'test': 2},
    )
  assert 'has only 7 different tasks, and 8 are asked for' in str(error.value)
  assert "fold 'train' got 5 of 6" in str(error.value)
  assert "lower sizes={'train': 6, 'test': 2} to 7 in all" in str(error.value)
  assert not list(tmp_path.rglob('*.array_record*'))


def test_chain_sum_gives_all_its_200_problems_and_no_more(tmp_path):
  """10 * 10 * 2 problems of two digits and a sign: counted by hand."""
  family = envs.task_family('reasoning_gym')
  digits = dict(min_terms=2, max_terms=2, min_digits=1, max_digits=1)
  args = {'generator': 'chain_sum', 'generator_args': digits}
  folds = prompt_sets.draw_folds(family, {'train': 104, 'test': 96}, 0, args)
  questions = {t['question'] for tasks in folds.values() for t in tasks}
  start = 'State the final answer to the following arithmetic problem: '
  assert questions == {
    f'{start}{a} {sign} {b} ='
    for a in range(10)
    for b in range(10)
    for sign in '+-'
  }
  with pytest.raises(ValueError, match='only 200 different tasks, and 201'):
    prompt_sets.draw_folds(family, {'train': 105, 'test': 96}, 0, args)


def test_the_held_out_fold_stays_when_the_training_fold_grows(path, tmp_path):
  larger = build(tmp_path, sizes={'train': 40, 'test': 5})
  assert keys(larger, 'test') == keys(path, 'test')


def test_a_set_is_written_once_and_every_setting_has_its_own(tmp_path):
  first = build(tmp_path)
  files = {f: f.stat().st_mtime_ns for f in pathlib.Path(first).iterdir()}
  assert build(tmp_path) == first
  assert {
    f: f.stat().st_mtime_ns for f in pathlib.Path(first).iterdir()
  } == files
  others = {
    build(tmp_path, seed=1),
    build(tmp_path, sizes={'train': 13, 'test': 6}),
    build(tmp_path, args={'word_length': 5}),
    build(tmp_path, family=envs.task_family('toy_guess')),
  }
  assert len(others | {first}) == 5
  assert keys(first, 'train') != keys(build(tmp_path, seed=1), 'train')


def test_a_changed_task_file_is_another_set(tmp_path):
  file = tmp_path / 'tasks.jsonl'
  paths = []
  for answer in ('4', '5'):
    lines = [
      json.dumps({'question': f'{n}+2?', 'answer': answer}) for n in range(3)
    ]
    file.write_text('\n'.join(lines))
    paths.append(
      build(
        tmp_path,
        family=envs.task_family('maths'),
        sizes={'train': 2, 'test': 1},
        args={'path': str(file)},
      )
    )
  assert paths[0] != paths[1]
  answers = [prompt_sets.PromptSet(p, 'train', 0)[0].task for p in paths]
  assert [task['answer'] for task in answers] == ['4', '5']


def test_builders_at_the_same_time_end_with_one_set(tmp_path):
  with concurrent.futures.ThreadPoolExecutor(4) as threads:
    paths = set(threads.map(lambda _: build(tmp_path), range(4)))
  assert len(paths) == 1
  assert len(set(keys(paths.pop(), 'train'))) == 13
  assert not [p for p in tmp_path.rglob('*') if 'incomplete' in p.name]


def test_building_says_nothing(tmp_path, capfd):
  build(tmp_path)
  assert capfd.readouterr() == ('', '')


def test_an_epoch_holds_every_task_once_and_epochs_differ_in_order(path):
  """cases row 12: the multiset of prompts of an epoch is exact."""
  prompts = prompt_sets.PromptSet(path, 'train', seed=3)
  orders = []
  for epoch in range(6):
    epoch_prompts = [prompts[epoch * 13 + i] for i in range(13)]
    assert {prompt.epoch for prompt in epoch_prompts} == {epoch}
    orders.append(tuple(prompt.task['key'] for prompt in epoch_prompts))
  for order in orders:
    assert collections.Counter(order) == collections.Counter(
      keys(path, 'train')
    )
  assert len(set(orders)) == 6
  ids = [prompts[i].prompt_id for i in range(6 * 13)]
  assert ids == list(range(6 * 13))


def test_the_order_depends_on_the_seed(path):
  orders = {
    tuple(
      prompt_sets.PromptSet(path, 'train', seed)[i].task['key']
      for i in range(13)
    )
    for seed in range(5)
  }
  assert len(orders) == 5


def test_a_new_reader_continues_where_the_old_one_was(path):
  """cases rows 1 and 2: reading depends on (seed, position) alone."""
  whole = prompt_sets.PromptSet(path, 'train', seed=9)
  uninterrupted = [whole[i] for i in range(40)]
  resumed = prompt_sets.PromptSet(path, 'train', seed=9)
  assert [resumed[i] for i in range(17, 40)] == uninterrupted[17:]
  assert [resumed[i] for i in (39, 0, 17)] == [
    uninterrupted[i] for i in (39, 0, 17)
  ]


def test_another_process_reads_the_same_order(path):
  """cases row 1: nothing in the order hangs on the state of a process."""
  program = (
    'import sys; from thundersync_jax.envs import prompt_sets\n'
    'prompts = prompt_sets.PromptSet(sys.argv[1], "train", seed=9)\n'
    'print(*[prompts[i].task["key"] for i in range(20, 40)])\n'
  )
  output = subprocess.run(
    [sys.executable, '-c', program, path],
    capture_output=True,
    check=True,
    text=True,
    timeout=120,
  ).stdout
  prompts = prompt_sets.PromptSet(path, 'train', seed=9)
  assert output.split() == [prompts[i].task['key'] for i in range(20, 40)]


@pytest.mark.parametrize('host_count', [2, 3, 13])
def test_hosts_partition_each_epoch_and_the_prompt_ids(path, host_count):
  """cases row 12, on several hosts: 13 tasks, also where it does not divide."""
  hosts = [
    prompt_sets.PromptSet(path, 'train', 5, host, host_count)
    for host in range(host_count)
  ]
  assert sum(len(host) for host in hosts) == 13
  alone = prompt_sets.PromptSet(path, 'train', 5)
  for epoch in range(3):
    read = [
      host[epoch * len(host) + i] for host in hosts for i in range(len(host))
    ]
    ids = sorted(prompt.prompt_id for prompt in read)
    assert ids == list(range(13 * epoch, 13 * (epoch + 1)))
    # A prompt_id names the same task however many hosts there are.
    for prompt in read:
      assert prompt == alone[prompt.prompt_id]


def test_the_arguments_of_a_reader_are_checked(path):
  with pytest.raises(ValueError, match=r"fold='dev' .*\['test', 'train'\]"):
    prompt_sets.PromptSet(path, 'dev', 0)
  with pytest.raises(ValueError, match=r'host_index=2 must be in 0\.\.1'):
    prompt_sets.PromptSet(path, 'train', 0, host_index=2, host_count=2)
  with pytest.raises(ValueError, match='holds 5 tasks, fewer than host_count'):
    prompt_sets.PromptSet(path, 'test', 0, host_index=0, host_count=6)
  with pytest.raises(IndexError, match='position=-1'):
    prompt_sets.PromptSet(path, 'test', 0)[-1]


def test_wrong_sizes_arguments_and_tasks_are_refused(tmp_path):
  with pytest.raises(ValueError, match='must hold at least one task a fold'):
    build(tmp_path, sizes={'train': 0})
  with pytest.raises(ValueError, match=r"unknown arguments \['words'\]"):
    build(tmp_path, args={'words': 3})
  with pytest.raises(ValueError, match=r'a ConfigDict has to_dict\(\)'):
    build(tmp_path, args={'word_length': object()})
  nameless = base.TaskFamily('nameless', lambda s, f: iter([{}]), lambda: None)
  with pytest.raises(ValueError, match="nameless made a task whose 'key'"):
    build(tmp_path, family=nameless)
