"""Workdir: one config, one process, files that are whole or not there."""

import json
import multiprocessing
import os
import pathlib
import runpy
import signal
import subprocess
import sys

import ml_collections
import pytest

from thundersync_jax.runs import workdir as workdir_lib

WorkdirError = workdir_lib.WorkdirError

# Opens the workdir, forks a worker that outlives it, and waits to be killed.
HOLDER = """
import os, sys, time
import ml_collections
from thundersync_jax.runs import workdir as workdir_lib

opened = workdir_lib.open_workdir(sys.argv[1], ml_collections.ConfigDict())
if not os.fork():  # the worker speaks, so it has run what follows a fork
  sys.stdout.write(f'{os.getpid()}\\n')
  sys.stdout.flush()
time.sleep(60)
"""


def make_config(**changes):
  config = ml_collections.ConfigDict(
    {'seed': 0, 'steps': 10, 'model': {'layers': 2, 'shape': (1, 2)}, 'x': None}
  )
  config.update_from_flattened_dict(changes)
  return config


def test_the_config_is_written_and_the_same_one_resumes(tmp_path):
  path = tmp_path / 'runs' / 'first'
  with workdir_lib.open_workdir(path, make_config()) as workdir:
    assert workdir.path == path
    written = json.loads((path / 'config.json').read_text())
    assert written == {
      'seed': 0,
      'steps': 10,
      'model': {'layers': 2, 'shape': [1, 2]},
      'x': None,
    }
  before = (path / 'config.json').stat().st_mtime_ns
  workdir_lib.open_workdir(str(path), make_config()).close()
  assert (path / 'config.json').stat().st_mtime_ns == before


def test_a_relative_path_becomes_absolute(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  with workdir_lib.open_workdir('a/b', make_config()) as workdir:
    assert workdir.path == tmp_path / 'a' / 'b'


def test_another_config_is_refused_with_every_key(tmp_path):
  workdir_lib.open_workdir(tmp_path, make_config()).close()
  other = make_config(**{'model.layers': 4, 'steps': 20})
  other.extra = 'new'
  del other.x
  with pytest.raises(WorkdirError) as caught:
    workdir_lib.open_workdir(tmp_path, other)
  lines = str(caught.value).splitlines()
  assert lines[1:-1] == [
    "  extra: '(absent)' in the workdir, 'new' now",
    '  model.layers: 2 in the workdir, 4 now',
    "  x: None in the workdir, '(absent)' now",
  ]
  assert 'another --workdir' in lines[-1]
  assert json.loads((tmp_path / 'config.json').read_text())['steps'] == 10
  # The refused run let go of the lock.
  workdir_lib.open_workdir(tmp_path, make_config()).close()


def test_every_key_that_may_change_is_one_of_the_config():
  path = pathlib.Path(__file__).parents[1] / 'configs' / 'quickstart.py'
  keys = runpy.run_path(str(path))['get_config']().to_dict()
  for name in workdir_lib.MAY_CHANGE:
    block, _, key = name.rpartition('.')
    assert key in (keys[block] if block else keys), name


def test_length_and_evaluations_of_a_run_may_change(tmp_path):
  config = make_config()
  config.eval = ml_collections.ConfigDict({'every_steps': 5, 'k': 4})
  workdir_lib.open_workdir(tmp_path, config).close()
  config.steps = 30
  config.eval.every_steps, config.eval.k = 3, 2  # the block, whole
  workdir_lib.open_workdir(tmp_path, config).close()
  written = json.loads((tmp_path / 'config.json').read_text())
  assert (written['steps'], written['eval']['every_steps']) == (30, 3)
  config.evaluation = 1
  with pytest.raises(WorkdirError, match='evaluation: .*absent.* in'):
    workdir_lib.open_workdir(tmp_path, config)


def test_a_key_that_begins_like_an_allowed_one_may_not_change(tmp_path):
  config = make_config()
  config.steps_of_warmup = 1
  workdir_lib.open_workdir(tmp_path, config).close()
  config.steps_of_warmup = 2
  with pytest.raises(WorkdirError, match='steps_of_warmup: 1 in'):
    workdir_lib.open_workdir(tmp_path, config)


def test_a_value_that_json_cannot_hold_is_named(tmp_path):
  config = ml_collections.ConfigDict({'path': pathlib.Path('a')})
  with pytest.raises(TypeError, match='PosixPath'):
    workdir_lib.open_workdir(tmp_path, config)


def test_a_config_that_is_not_json_is_reported(tmp_path):
  (tmp_path / 'config.json').write_text('{"seed"')
  with pytest.raises(WorkdirError, match='config.json is not JSON'):
    workdir_lib.open_workdir(tmp_path, make_config())


def test_a_path_that_cannot_be_written_is_reported(tmp_path):
  (tmp_path / 'file').write_text('')
  for path in (tmp_path / 'file', tmp_path / 'file' / 'run', '/dev/null/run'):
    with pytest.raises(WorkdirError, match='cannot be written .*--workdir'):
      workdir_lib.open_workdir(path, make_config())


def test_a_full_disk_is_reported_and_lets_go_of_the_lock(tmp_path, monkeypatch):
  with monkeypatch.context() as patch:
    patch.setattr(os, 'fsync', lambda _: full())
    with pytest.raises(WorkdirError, match='No space left on device'):
      workdir_lib.open_workdir(tmp_path, make_config())
  assert [path.name for path in tmp_path.iterdir()] == ['lock']
  workdir_lib.open_workdir(tmp_path, make_config()).close()


def full():
  raise OSError(28, os.strerror(28))


def test_two_runs_cannot_share_a_workdir(tmp_path):
  first = workdir_lib.open_workdir(tmp_path, make_config())
  with pytest.raises(WorkdirError, match=f'in use by process {os.getpid()}'):
    workdir_lib.open_workdir(tmp_path, make_config())
  first.close()
  workdir_lib.open_workdir(tmp_path, make_config()).close()


def test_a_killed_run_lets_go_though_its_worker_lives(tmp_path):
  holder = subprocess.Popen(
    [sys.executable, '-c', HOLDER, tmp_path],
    cwd=pathlib.Path(__file__).parent.parent,
    stdout=subprocess.PIPE,
    text=True,
  )
  worker = int(holder.stdout.readline())
  empty = ml_collections.ConfigDict()
  try:
    with pytest.raises(WorkdirError, match=f'by process {holder.pid} on '):
      workdir_lib.open_workdir(tmp_path, empty)
    holder.kill()
    holder.wait()
    os.kill(worker, 0)  # it lives, and holds what it inherited
    workdir_lib.open_workdir(tmp_path, empty).close()
  finally:
    holder.kill()
    os.kill(worker, signal.SIGKILL)


def write_again_and_again(path):
  for number in range(10**9):
    workdir_lib.write_atomic(path, json.dumps([number] * 2_000))


def test_a_file_is_whole_whenever_it_is_read_or_its_writer_killed(tmp_path):
  path = tmp_path / 'file.json'
  context = multiprocessing.get_context('spawn')
  writer = context.Process(target=write_again_and_again, args=(path,))
  writer.start()
  seen = set()
  while len(seen) < 20:
    if path.exists():
      numbers = json.loads(path.read_text())
      assert len(numbers) == 2_000 and len(set(numbers)) == 1
      seen.add(numbers[0])
  writer.kill()
  writer.join()
  assert len(set(json.loads(path.read_text()))) == 1
