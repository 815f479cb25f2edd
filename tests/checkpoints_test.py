"""Checkpoints: round trips, kills, full disks, other trees."""

import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from thundersync_jax.runs import checkpoints as checkpoints_lib

CheckpointError = checkpoints_lib.CheckpointError

# Saves step 0, 1, 2, ... until it is killed; the leaves hold the step.
SAVE_LOOP = """
import sys
import jax.numpy as jnp
from thundersync_jax.runs import checkpoints as checkpoints_lib

checkpoints = checkpoints_lib.Checkpoints(sys.argv[1], keep=2)
step = checkpoints.latest_step()
step = 0 if step is None else step + 1
while True:
  state = {'a': jnp.full((300, 100), step), 'b': jnp.full((7,), step + 0.5)}
  checkpoints.save(step, state, {'next_prompt': 3 * step})
  sys.stdout.write(f'{step}\\n')
  sys.stdout.flush()
  step += 1
"""

# Saves step 0, then step 1 where the disk has no room left for it; where the
# system says so beforehand, {lie} makes it say something else.
FULL_DISK = """
import resource, shutil, sys
import jax
from thundersync_jax.runs import checkpoints as checkpoints_lib

directory, limit = sys.argv[1], int(sys.argv[2])
small = {'a': jax.numpy.arange(5.0)}
large = {'a': jax.random.normal(jax.random.key(0), (1_000_000,))}
checkpoints = checkpoints_lib.Checkpoints(directory)
checkpoints.save(0, small, {'n': 1})
usage = type(shutil.disk_usage('/'))
shutil.disk_usage = lambda path: usage(2**40, 0, 2**40)
if limit:
  resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
  checkpoints.save(1, large, {'n': 2})
except checkpoints_lib.CheckpointError as error:
  sys.stdout.write(f'{error}\\n')
restored = checkpoints.restore(small)
assert restored.step == 0 and restored.counters == {'n': 1}
assert (restored.state['a'] == small['a']).all()
checkpoints.save(2, small, {'n': 3})
assert checkpoints.latest_step() == 2
"""


def make_state(seed=0):
  """Parameters and optimizer state after one update, of several dtypes."""
  keys = jax.random.split(jax.random.key(seed), 3)
  params = {
    'embed': jax.random.normal(keys[0], (5, 4)),
    'layers': [
      {'gate': jax.random.normal(keys[1], (4, 3)).astype(jnp.bfloat16)},
      {'gate': jax.random.normal(keys[2], (4, 3)).astype(jnp.bfloat16)},
    ],
    'scale': jnp.float32(seed),
  }
  optimizer = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(optax.linear_schedule(1e-3, 0.0, 10)),
  )
  grads = jax.tree.map(jnp.ones_like, params)
  _, opt_state = optimizer.update(grads, optimizer.init(params), params)
  return {'params': params, 'opt_state': opt_state, 'reference': None}


def assert_equal(actual, expected):
  assert jax.tree.structure(actual) == jax.tree.structure(expected)
  dtypes = [jax.tree.map(lambda x: x.dtype, t) for t in (actual, expected)]
  assert dtypes[0] == dtypes[1]
  jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_optimizer_state_comes_back_whole(tmp_path):
  state = make_state()
  counters = {'next_prompt': 12, 'epochs': [1, 2], 'rate': 0.1, 'none': None}
  checkpoints_lib.Checkpoints(tmp_path).save(7, state, counters)
  like = jax.eval_shape(make_state)
  restored = checkpoints_lib.Checkpoints(tmp_path).restore(like)
  assert restored.step == 7
  assert restored.counters == counters
  assert_equal(restored.state, state)
  adam = restored.state['opt_state'][1][0]
  assert isinstance(adam, optax.ScaleByAdamState)
  assert int(adam.count) == 1


def test_restored_arrays_can_be_donated(tmp_path):
  state = {'a': jnp.arange(6.0)}
  checkpoints = checkpoints_lib.Checkpoints(tmp_path)
  checkpoints.save(0, state, {})
  restored = checkpoints.restore(state).state
  doubled = jax.jit(lambda x: 2 * x, donate_argnums=0)(restored['a'])
  np.testing.assert_array_equal(doubled, 2 * np.arange(6.0))


def test_an_empty_directory_restores_nothing(tmp_path):
  checkpoints = checkpoints_lib.Checkpoints(tmp_path / 'new' / 'folder')
  assert checkpoints.latest_step() is None
  assert checkpoints.restore({'a': jnp.zeros(2)}) is None


def test_keeps_the_newest_and_restores_any_of_them(tmp_path):
  checkpoints = checkpoints_lib.Checkpoints(tmp_path, keep=2)
  for step in (3, 9, 10, 200):
    checkpoints.save(step, {'a': jnp.full((2,), step)}, {'step': step})
  assert checkpoints.steps() == [10, 200]
  assert sorted(p.name for p in tmp_path.iterdir()) == ['10', '200']
  for step, expected in ((None, 200), (10, 10)):
    restored = checkpoints.restore({'a': jnp.zeros(2, jnp.int32)}, step)
    assert restored.step == expected
    assert restored.counters == {'step': expected}
    np.testing.assert_array_equal(restored.state['a'], [expected, expected])
  with pytest.raises(CheckpointError, match=r'/9 does not exist.*\[10, 200\]'):
    checkpoints.restore({'a': jnp.zeros(2, jnp.int32)}, step=9)


def test_a_saved_step_is_not_overwritten(tmp_path):
  checkpoints = checkpoints_lib.Checkpoints(tmp_path)
  checkpoints.save(1, {'a': jnp.zeros(2)}, {})
  with pytest.raises(CheckpointError, match='/1 exists already'):
    checkpoints.save(1, {'a': jnp.ones(2)}, {})
  np.testing.assert_array_equal(
    checkpoints.restore({'a': jnp.zeros(2)}).state['a'], [0, 0]
  )


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (
      lambda s: s['params'].update(embed=jnp.zeros((6, 4))),
      r'params/embed: float32\[5,4\] in the checkpoint, float32\[6,4\] asked',
    ),
    (
      lambda s: s['params'].update(scale=jnp.int32(0)),
      r'params/scale: float32\[\] in the checkpoint, int32\[\] asked',
    ),
    (
      lambda s: s['params'].update(head=jnp.zeros(3)),
      r'params/head: absent in the checkpoint, float32\[3\] asked',
    ),
    (
      lambda s: s['params']['layers'].pop(),
      r'params/layers/1/gate: bfloat16\[4,3\] in the checkpoint, absent asked',
    ),
  ],
)
def test_another_tree_is_refused_by_name(tmp_path, change, message):
  checkpoints = checkpoints_lib.Checkpoints(tmp_path)
  checkpoints.save(4, make_state(), {})
  other = make_state()
  change(other)
  with pytest.raises(CheckpointError, match=message):
    checkpoints.restore(other)


@pytest.mark.parametrize('counters', [{'a': (1, 2)}, {3: 'x'}, {'a': {1}}])
def test_counters_that_json_would_change_are_refused(tmp_path, counters):
  checkpoints = checkpoints_lib.Checkpoints(tmp_path)
  with pytest.raises(TypeError):
    checkpoints.save(0, {'a': jnp.zeros(2)}, counters)
  assert checkpoints.latest_step() is None


def test_a_leaf_that_is_no_array_is_named(tmp_path):
  with pytest.raises(TypeError, match='a/1=0.5'):
    checkpoints_lib.Checkpoints(tmp_path).save(
      0, {'a': [jnp.zeros(2), 0.5]}, {}
    )


def test_sharded_arrays_go_to_the_sharding_asked(tmp_path):
  mesh = jax.make_mesh((2,), ('fsdp',), devices=jax.devices()[:2])
  rows = jax.sharding.NamedSharding(mesh, P('fsdp', None))
  columns = jax.sharding.NamedSharding(mesh, P(None, 'fsdp'))
  one = jax.sharding.SingleDeviceSharding(jax.devices()[1])
  values = np.arange(24.0, dtype=np.float32).reshape(4, 6)
  checkpoints = checkpoints_lib.Checkpoints(tmp_path)
  checkpoints.save(0, {'a': jax.device_put(values, rows)}, {})
  for sharding, shard in ((rows, (2, 6)), (columns, (4, 3)), (one, (4, 6))):
    like = {'a': jax.ShapeDtypeStruct((4, 6), jnp.float32, sharding=sharding)}
    restored = checkpoints.restore(like).state['a']
    assert restored.sharding == sharding
    assert restored.addressable_shards[0].data.shape == shard
    np.testing.assert_array_equal(np.asarray(restored), values)


def run(code, *arguments):
  return subprocess.Popen(
    [sys.executable, '-c', code, *map(str, arguments)],
    cwd=pathlib.Path(__file__).parent.parent,
    stdout=subprocess.PIPE,
    text=True,
  )


def test_kill_at_any_moment_leaves_the_last_complete_checkpoint(tmp_path):
  rng = random.Random(0)
  like = {'a': jnp.zeros((300, 100), jnp.int32), 'b': jnp.zeros(7)}
  for _ in range(3):
    process = run(SAVE_LOOP, tmp_path)
    first = process.stdout.readline()
    time.sleep(rng.uniform(0.0, 0.3))
    process.send_signal(signal.SIGKILL)
    last = int((first + process.communicate()[0]).split()[-1])
    checkpoints = checkpoints_lib.Checkpoints(tmp_path)
    # A step that was reported is complete; one more may be.
    assert checkpoints.latest_step() in (last, last + 1)
    for kept in checkpoints.steps():
      restored = checkpoints.restore(like, kept)
      assert restored.counters == {'next_prompt': 3 * kept}
      assert (np.asarray(restored.state['a']) == kept).all()
      assert (np.asarray(restored.state['b']) == kept + 0.5).all()
    assert all(path.name.isdecimal() for path in tmp_path.iterdir())


def test_half_saved_and_half_removed_checkpoints_do_not_count(tmp_path):
  checkpoints = checkpoints_lib.Checkpoints(tmp_path)
  state = {'a': jnp.arange(3.0)}
  for step in (1, 2):
    checkpoints.save(step, state, {})
  shutil.copytree(tmp_path / '2', tmp_path / '3.orbax-checkpoint-tmp')
  (tmp_path / '1').rename(tmp_path / '1.deleted')
  (tmp_path / 'notes').mkdir()
  assert checkpoints.steps() == [2]
  assert checkpoints_lib.Checkpoints(tmp_path).latest_step() == 2
  assert sorted(p.name for p in tmp_path.iterdir()) == ['2', 'notes']


@pytest.mark.parametrize('pattern', ['state/**/d/*', 'leaves/*'])
def test_damaged_files_are_reported_with_the_other_steps(tmp_path, pattern):
  checkpoints = checkpoints_lib.Checkpoints(tmp_path)
  state = {'a': jnp.arange(1000.0)}
  for step in (1, 2):
    checkpoints.save(step, state, {})
  for path in (tmp_path / '2').glob(pattern):
    os.truncate(path, path.stat().st_size // 2)
  with pytest.raises(CheckpointError, match=r'/2 cannot be read.*\[1, 2\]'):
    checkpoints.restore(state)
  assert checkpoints.restore(state, step=1).step == 1


def test_a_disk_without_room_is_refused_before_writing(tmp_path, monkeypatch):
  checkpoints = checkpoints_lib.Checkpoints(tmp_path)
  checkpoints.save(0, {'a': jnp.zeros(4)}, {'n': 1})
  usage = type(shutil.disk_usage(tmp_path))
  monkeypatch.setattr(shutil, 'disk_usage', lambda _: usage(10**9, 0, 5_000))
  monkeypatch.setattr(
    checkpoints._checkpointer, 'save', lambda *_, **__: pytest.fail('wrote')
  )
  # 2^20 float32 and 1 MiB of indices.
  with pytest.raises(CheckpointError, match='needs 5,242,880 bytes, and 5,000'):
    checkpoints.save(1, {'a': jnp.zeros(1 << 20)}, {'n': 2})
  assert checkpoints.restore({'a': jnp.zeros(4)}).counters == {'n': 1}


def test_a_write_that_fails_leaves_the_earlier_checkpoints(tmp_path):
  process = run(FULL_DISK, tmp_path / 'run', 200_000)
  message = process.communicate()[0]
  assert process.returncode == 0
  assert f'{tmp_path}/run/1 could not be saved' in message
  assert 'It needs 5,048,576 bytes' in message
  assert 'File too large' in message
  assert sorted(os.listdir(tmp_path / 'run')) == ['0', '2']


@pytest.mark.skipif(
  not shutil.which('unshare')
  or subprocess.run(
    ['unshare', '-rm', 'mount', '-t', 'tmpfs', 'none', '/mnt'],
    stderr=subprocess.DEVNULL,
  ).returncode,
  reason='this user cannot mount a small file system',
)
def test_a_disk_that_fills_up_leaves_the_earlier_checkpoints(tmp_path):
  mount = 'mount -t tmpfs -o size=2m none "$1" && "$2" -c "$3" "$1" 0; ls "$1"'
  process = subprocess.run(
    ['unshare', '-rm', 'sh', '-c', mount, '-', tmp_path]
    + [sys.executable, FULL_DISK],
    cwd=pathlib.Path(__file__).parent.parent,
    stdout=subprocess.PIPE,
    text=True,
  )
  assert 'could not be saved' in process.stdout
  assert 'No space left on device' in process.stdout
  assert process.stdout.split()[-2:] == ['0', '2']
