"""One mesh for both sides: decode comes first, and the update is the same."""

import pytest

from configs import quickstart
from thundersync_jax import assembly, train_rl
from thundersync_jax.learner import gradient_stream
from thundersync_jax.rollout import engine
from thundersync_jax.runs import compare


def tiny(schedule, rollout_devices):
  """Groups of a game whose environments take their time."""
  config = quickstart.get_config('debug')
  with config.unlocked():
    config.schedule, config.steps = schedule, 2
    config.mesh.rollout_devices = rollout_devices
    config.task.family = 'toy_guess'
    config.task.args = {'max_turns': 3}
    config.task.latency.kind = 'lognormal'
    config.task.latency.seconds, config.task.latency.sigma = 0.05, 1.0
    config.rollout.max_turns = 3
    config.rollout.max_turn_tokens = 6
    config.rollout.max_trajectory_tokens = 18
    config.rollout.max_context = 128
    config.rollout.slots = 16
    config.learner.rows = (1, 4)
    config.learner.row_tokens, config.learner.row_targets = (128,), (48,)
    config.checkpoint_every_steps = config.eval.prompts = 0
  return config


def play(config, path):
  record = compare.TokenRecord()
  result = train_rl.train(config, str(path), record)
  return record, result.params


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
  """Runs on one mesh, and what the engine did at each gradient's start."""
  decoding, launched = [], []
  launch = gradient_stream.GradientStream.launch
  make = engine.Engine.__init__

  def watch(self, *args, **kwargs):
    make(self, *args, **kwargs)
    engines.append(self)

  def noted(self, *args):
    before = [e.in_flight for e in engines]
    started = launch(self, *args)
    if started:
      decoding.append(any(before))
      launched.append(len(self._flying))
    return started

  found = {}
  for schedule in ('sync', 'thundersync'):
    engines = []
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(engine.Engine, '__init__', watch)
      patch.setattr(gradient_stream.GradientStream, 'launch', noted)
      path = tmp_path_factory.mktemp('colocated') / schedule
      found[schedule] = play(tiny(schedule, 0), path)
  return found, decoding, launched


def test_gradients_start_only_while_no_chunk_runs(runs):
  _, decoding, launched = runs
  assert launched and not any(decoding)
  assert max(launched) == 1  # the next chunk waits for one at most


def test_the_update_is_the_synchronous_one(runs):
  found, *_ = runs
  (sync, expected), (streamed, params) = found['sync'], found['thundersync']
  assert compare.unequal_tokens(sync, streamed) == []
  assert compare.largest_difference(params, expected).relative <= 1e-6


def test_two_slices_may_overlap():
  assert assembly.share_mesh(tiny('thundersync', 0))
  assert not assembly.share_mesh(tiny('thundersync', -1))
  assert assembly.plan(tiny('thundersync', -1)).max_in_flight == 2
