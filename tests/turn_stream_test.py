"""Whole runs with a teacher: schedules agree, turns stream, no compilation."""

import dataclasses

import numpy as np
import pytest

from configs import quickstart
from thundersync_jax import assembly, streams, train_rl
from thundersync_jax.models import pretrained
from thundersync_jax.runs import compare, metrics

PROMPTS, MEMBERS, STEPS = 3, 3, 2


def tiny(schedule, granularity='turn', plan='turn'):
  config = quickstart.get_config('debug')
  with config.unlocked():
    config.schedule, config.steps = schedule, STEPS
    config.stream.granularity = granularity
    config.checkpoint_every_steps = config.eval.prompts = 0
    config.task.family = 'toy_guess'
    config.task.args = {'max_turns': 3, 'latency_s': 0.02}
    config.task.train_prompts = 6
    config.rollout.prompts_per_step = PROMPTS
    config.rollout.group_size = MEMBERS
    config.rollout.max_prompt_tokens = 64
    config.rollout.prompt_buckets = (64,)
    config.rollout.max_turns = 3
    config.rollout.max_turn_tokens = 4
    config.rollout.max_trajectory_tokens = 12
    config.rollout.max_context = 160
    config.rollout.slots = 5
    config.learner.rows = (2,)
    config.learner.row_tokens = (192,)
    config.learner.row_targets = (36,)
    config.distill.teacher = 'random:qwen3'
    config.distill.plan = plan
    config.distill.max_open = 6
    config.distill.rows = (2,)
    config.distill.feed_tokens = (32,)
    config.distill.unwind_tokens = (64,)
    config.distill.start_tokens = (160,)
  return config


@dataclasses.dataclass
class Run:
  """A run that has ended."""

  record: compare.TokenRecord
  lines: list[dict]
  params: dict
  stream: object


def play(config, path):
  record, made = compare.TokenRecord(), []
  original = streams.make

  def remembered(*args):
    made.append(original(*args))
    return made[-1]

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(streams, 'make', remembered)
    result = train_rl.train(config, str(path), record)
  lines = metrics.read(path / 'metrics.jsonl')
  return Run(record, lines, result.params, made[0])


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  return tmp_path_factory.mktemp('distilled')


@pytest.fixture(scope='module')
def sync(folder):
  return play(tiny('sync'), folder / 'sync')


def test_thundersync_is_the_synchronous_update(sync, folder):
  """Equal tokens, equal parameters, turns fed while others play."""
  run = play(tiny('thundersync'), folder / 'turn')
  assert len(run.record.tokens) == STEPS * PROMPTS * MEMBERS
  assert compare.unequal_tokens(run.record, sync.record) == []
  found = compare.largest_difference(run.params, sync.params)
  assert found.relative <= 1e-6, found
  start = assembly.model(tiny('sync')).params
  assert compare.largest_difference(start, sync.params).relative > 1e-4
  assert run.stream.ledger.plans['turn'] > 0
  assert set(sync.stream.ledger.plans) == {'close'}
  for line, other in zip(run.lines, sync.lines, strict=True):
    assert line['host/compilations'] == other['host/compilations'] == 0
    np.testing.assert_allclose(line['distill/kl'], other['distill/kl'], 1e-4)
    assert line['distill/teacher_entropy'] > 0
    assert line['rollout/logprob_diff_max'] < 1e-4
    assert line['learner/tokens'] == line['rollout/tokens']


def test_async_stays_within_its_staleness(folder):
  config = tiny('async', plan='forward')
  config.distill.teacher_on = 'rollout'
  config.distill.loss = 'jsd'
  run = play(config, folder / 'async')
  assert max(line['staleness/max_steps'] for line in run.lines) <= 1
  assert [line['host/compilations'] for line in run.lines] == [0] * STEPS
  assert run.stream.ledger.plans['forward'] > 0
  assert all(line['distill/kl'] > 0 for line in run.lines)


def test_contradictions_are_refused():
  config = tiny('thundersync')
  config.distill.teacher = ''
  with pytest.raises(ValueError, match='turn needs distill.teacher'):
    streams.check(config)
  for changes, problem in (
    ({'stream.granularity': 'group'}, "'group' with distill.teacher"),
    ({'objective.kl_coef': 0.1}, 'kl_coef=0.1 with distill.teacher'),
    ({'estimator.aggregation': 'sequence'}, 'use token'),
    ({'distill.plan': 'nope'}, "'nope' does not exist.*'auto'"),
    ({'distill.loss': 'nope'}, "'nope' does not exist.*'jsd'"),
  ):
    config = tiny('thundersync')
    config.update_from_flattened_dict(changes)
    with pytest.raises(ValueError, match=problem):
      streams.check(config)


def test_teachers_of_another_tokenizer_are_refused():
  student = pretrained.load('random:llama')

  class Other:
    vocab_size = student.tokenizer.vocab_size

    def decode(self, ids, skip_special=True):
      text = student.tokenizer.decode(ids, skip_special)
      return 'x' if ids == [70] else text

  teacher = dataclasses.replace(student, tokenizer=Other())
  streams.same_tokens(student, student, 'same')
  with pytest.raises(ValueError, match="token 70 is 'x' to distill.teacher=t"):
    streams.same_tokens(student, teacher, 't')
  Other.vocab_size = 7
  with pytest.raises(ValueError, match='t has 7 tokens, the student'):
    streams.same_tokens(student, teacher, 't')
