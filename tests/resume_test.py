"""A run that is killed and started again equals one that was left alone."""

import pathlib
import random
import shutil
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from configs import quickstart
from thundersync_jax import assembly, train_rl
from thundersync_jax import mesh as mesh_lib
from thundersync_jax.runs import checkpoints, compare, metrics

REPOSITORY = pathlib.Path(__file__).parent.parent
STEPS, PROMPTS, MEMBERS = 8, 4, 4


def tiny(schedule):
  config = quickstart.get_config('debug')
  config.schedule, config.steps = schedule, STEPS
  config.checkpoint_every_steps, config.eval.prompts = 1, 0
  config.learner.rows = (4,)
  return config


def start(path):
  """The run of tiny('sync') from the command line."""
  command = [
    sys.executable,
    'experiments/train_rl.py',
    '--config=configs/quickstart.py:debug',
    f'--workdir={path}',
    '--config.schedule=sync',
    f'--config.steps={STEPS}',
    '--config.eval.prompts=0',
    '--config.learner.rows=(4,)',
  ]
  return subprocess.Popen(
    command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
  )


def finish(process):
  errors = process.communicate(timeout=200)[1]
  assert process.returncode == 0, errors.decode()[-3000:]


def kill(process, path, lines, delay_s):
  """Ends it without warning, delay_s after metrics.jsonl has so many lines."""
  file = path / 'metrics.jsonl'
  while not file.exists() or file.read_bytes().count(b'\n') < lines:
    assert process.poll() is None, process.stderr.read().decode()[-3000:]
    time.sleep(0.002)
  time.sleep(delay_s)
  process.kill()
  process.communicate(timeout=60)
  assert process.returncode == -9


def restored(config, path):
  """The last checkpoint of a run."""
  loaded = assembly.model(config)
  learner = assembly.learner(
    config,
    loaded,
    mesh_lib.rollout_and_learner(rollout_devices=-1, data=1, fsdp=-1, tensor=1)[
      1
    ],
  )
  state = learner.init_state(loaded.params)
  return checkpoints.Checkpoints(path / 'checkpoints').restore(state)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  return tmp_path_factory.mktemp('resume')


@pytest.fixture(scope='module')
def alone(folder):
  """The workdir of a run that nothing disturbed."""
  finish(start(folder / 'alone'))
  return folder / 'alone'


class Interrupted(Exception):
  """Ends a run from its observer."""


def interrupt_and_resume(config, path, at):
  """Two processes' worth of training; what each step trained on."""
  seen = {}

  def observe(step, trajectories):
    if step == at and step not in seen:
      seen[step] = trajectories
      raise Interrupted
    seen[step] = trajectories

  with pytest.raises(Interrupted):
    train_rl.train(config, str(path), observe)
  assert sorted(seen) == list(range(at + 1))
  return seen, train_rl.train(config, str(path), observe)


def test_killed_runs_end_bit_for_bit_the_same(alone, folder):
  """cases rows 1, 2: same state, same prompts, each step once."""
  path, moments = folder / 'killed', random.Random(time.time_ns())
  delays = [moments.uniform(0, 0.1) for _ in range(2)]
  kill(start(path), path, 2, delays[0])
  kill(start(path), path, 5, delays[1])
  finish(start(path))
  config = tiny('sync')
  a, b = restored(config, path), restored(config, alone)
  assert a.step == b.step == STEPS
  for counters in (a.counters, b.counters):
    assert counters.pop('seconds') > 0
    assert counters == {'position': STEPS * PROMPTS, 'scores': {}}
  for x, y in zip(
    jax.tree.leaves(a.state), jax.tree.leaves(b.state), strict=True
  ):
    np.testing.assert_array_equal(x, y, err_msg=f'delays {delays}')
  lines, others = (metrics.read(p / 'metrics.jsonl') for p in (path, alone))
  assert [line['step'] for line in lines] == list(range(STEPS))
  for name in ('reward/mean', 'learner/grad_norm', 'rollout/tokens'):
    assert [x[name] for x in lines] == [y[name] for y in others], name


def test_a_resumed_stream_ends_as_the_run_left_alone(alone, folder):
  """cases rows 1, 2, 22: the streamed update survives a resume as well."""
  path, config = folder / 'streamed', tiny('thundersync')
  _, result = interrupt_and_resume(config, path, at=3)
  expected = restored(tiny('sync'), alone).state.params
  found = compare.largest_difference(result.params, expected)
  assert found.relative <= 1e-6, found
  lines, others = (metrics.read(p / 'metrics.jsonl') for p in (path, alone))
  assert [line['step'] for line in lines] == list(range(STEPS))
  assert [x['reward/mean'] for x in lines] == [y['reward/mean'] for y in others]


def test_prompts_in_flight_are_issued_again(folder):
  """cases row 38: an asynchronous resume trains every prompt once."""
  config = tiny('async')
  config.stream.max_staleness = 2
  seen, _ = interrupt_and_resume(config, folder / 'async', at=3)
  assert sorted(seen) == list(range(STEPS))
  for step, trajectories in seen.items():
    drawn = range(step * PROMPTS, (step + 1) * PROMPTS)
    ids = [t.prompt_id for t in trajectories]
    assert ids == [p for p in drawn for _ in range(MEMBERS)]
    ages = [step - t.policy_versions[t.loss_mask] for t in trajectories]
    assert max(age.max() for age in ages) <= 2
    assert min(age.min() for age in ages) >= 0


def test_a_full_disk_keeps_the_earlier_checkpoint(alone, folder, monkeypatch):
  path = folder / 'full'
  shutil.copytree(alone, path)
  config = tiny('sync')
  config.steps = STEPS + 1
  usage = type(shutil.disk_usage(path))
  monkeypatch.setattr(shutil, 'disk_usage', lambda _: usage(10**9, 0, 5_000))
  with pytest.raises(checkpoints.CheckpointError, match='5,000'):
    train_rl.train(config, str(path))
  a, b = restored(config, path), restored(config, alone)
  assert a.step == STEPS and a.counters == b.counters
  for x, y in zip(
    jax.tree.leaves(a.state), jax.tree.leaves(b.state), strict=True
  ):
    np.testing.assert_array_equal(x, y)


def test_fewer_steps_than_are_done_are_refused(alone):
  config = tiny('sync')
  config.steps = STEPS - 1
  with pytest.raises(ValueError, match=f'steps={STEPS - 1}, .* step {STEPS}'):
    train_rl.train(config, str(alone))
  config.steps = STEPS  # as it was, for the other tests
  assert train_rl.train(config, str(alone)).summary['steps'] == STEPS


def test_a_run_that_never_began_does_not_claim_its_workdir(tmp_path):
  config = tiny('sync')
  config.model.source = 'random:none'
  with pytest.raises(ValueError, match='none'):
    train_rl.train(config, str(tmp_path))
  assert not (tmp_path / 'config.json').exists()
