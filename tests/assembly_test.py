"""Settings that cannot work are refused before anything is loaded."""

import importlib.util
import pathlib

import pytest

from thundersync_jax import assembly

PATH = pathlib.Path(__file__).parents[1] / 'configs' / 'quickstart.py'


def config(changes=None, arg='debug'):
  spec = importlib.util.spec_from_file_location('quickstart', PATH)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  made = module.get_config(arg)
  made.update_from_flattened_dict(changes or {})
  return made


@pytest.mark.parametrize('arg', ['', 'debug'])
def test_quickstart_passes(arg):
  made = config(arg=arg)
  assembly.check(made)
  assert len(assembly.shapes(made)) == 2  # 1 and 4 rows of one length


@pytest.mark.parametrize(
  ('name', 'value'),
  [
    ('steps', 0),
    ('rollout.prompts_per_step', 0),
    ('rollout.group_size', 0),
    ('rollout.max_turn_tokens', 0),
    ('optimizer.learning_rate', -1.0),
    ('optimizer.learning_rate', float('nan')),
    ('optimizer.clip_norm', -1.0),
    ('objective.kl_coef', -0.1),
    ('rollout.weights_dtype', 'float99'),
    ('schedule', 'asink'),
  ],
)
def test_check_names_the_setting_and_its_value(name, value):
  with pytest.raises(ValueError, match=f'{name}={value!r} '):
    assembly.check(config({name: value}))


@pytest.mark.parametrize(
  'changes',
  [
    {'learner.rows': ()},
    {'learner.rows': (0,)},
    {'learner.row_tokens': (96, 128)},  # one row_targets
    {'learner.row_tokens': (40,)},  # max_context is 48
    {'learner.row_targets': (9,)},  # max_trajectory_tokens is 10
  ],
)
def test_shapes_that_cannot_hold_every_trajectory(changes):
  with pytest.raises(ValueError, match=r'learner\.rows|learner\.row_tokens'):
    assembly.shapes(config(changes))


def test_derived_shapes_hold_a_trajectory_and_a_group():
  made = config({'learner.row_tokens': (), 'learner.row_targets': ()})
  sizes = {(s.tokens, s.targets) for s in assembly.shapes(made)}
  # max_context 48 with 10 targets; prompt 32 with 4 members of 10 tokens.
  assert sizes == {(48, 16), (72, 40)}
