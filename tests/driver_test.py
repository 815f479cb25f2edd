"""Whole runs of a tiny model: schedules agree, and bad input is refused.

A run costs seconds, so each is made once and looked at by several tests.
"""

import collections
import dataclasses
import itertools
import logging as python_logging
import threading

import jax
import numpy as np
import pytest

from configs import quickstart
from thundersync_jax import assembly, envs, train_rl
from thundersync_jax.envs import base, prompt_sets, toy
from thundersync_jax.rollout import engine
from thundersync_jax.runs import compare, compilations, metrics
from thundersync_jax.runs.workdir import WorkdirError
from thundersync_jax.types import Turn

PROMPTS, MEMBERS, EPOCH = 4, 4, 6  # a step, a group, the training fold
GRANULARITIES = ('trajectory', 'group', 'batch')


def tiny(schedule, steps=3):
  config = quickstart.get_config('debug')
  with config.unlocked():
    config.schedule, config.steps = schedule, steps
    config.checkpoint_every_steps = config.eval.prompts = 0
    config.task.train_prompts = EPOCH
    config.rollout.prompts_per_step = PROMPTS
    config.rollout.group_size = MEMBERS
    config.learner.rows = (2,)
  return config


@dataclasses.dataclass
class Run:
  """A run that has ended, and all that its observer saw."""

  config: object
  path: str
  seen: dict[int, list]  # step -> trajectories
  record: compare.TokenRecord
  lines: list[dict]  # of metrics.jsonl
  params: dict

  def prompt_ids(self, step):
    return [t.prompt_id for t in self.seen[step]]


def play(config, path):
  seen, record = {}, compare.TokenRecord()

  def observe(step, trajectories):
    seen[step] = trajectories
    record(step, trajectories)

  result = train_rl.train(config, str(path), observe)
  lines = metrics.read(path / 'metrics.jsonl')
  return Run(config, str(path), seen, record, lines, result.params)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  return tmp_path_factory.mktemp('driver')


@pytest.fixture(scope='module')
def sync(folder):
  return play(tiny('sync'), folder / 'sync')


@pytest.fixture(scope='module')
def streamed(folder):
  """The runs of schedule thundersync by granularity."""
  runs = {}
  for granularity in GRANULARITIES:
    config = tiny('thundersync')
    config.stream.granularity = granularity
    runs[granularity] = play(config, folder / granularity)
  return runs


@pytest.fixture(scope='module')
def ahead(folder):
  """A run of schedule async, and the lengths that its engine handed out."""
  lengths, harvest = [], engine.Engine.harvest

  def recorded(self):
    ended = harvest(self)
    lengths.extend(len(turn.tokens) for turn in ended)
    return ended

  config = tiny('async', steps=5)
  config.stream.max_staleness = 2
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(engine.Engine, 'harvest', recorded)
    return play(config, folder / 'async'), lengths


@pytest.fixture(scope='module')
def resampled(folder):
  """Runs that replace groups whose rewards are all 0 or all 1."""
  runs = []
  for schedule in ('sync', 'thundersync'):
    config = tiny(schedule, steps=2)
    config.task.args.rule = 'any'
    config.estimator.resample_zero_variance = True
    runs.append(play(config, folder / f'resampled_{schedule}'))
  return runs


@pytest.mark.parametrize('granularity', GRANULARITIES)
def test_thundersync_is_the_synchronous_update(sync, streamed, granularity):
  """cases row 22: equal tokens by key, equal parameters after N steps."""
  run = streamed[granularity]
  assert len(run.record.tokens) == 3 * PROMPTS * MEMBERS
  assert compare.unequal_tokens(run.record, sync.record) == []
  found = compare.largest_difference(run.params, sync.params)
  assert found.relative <= 1e-6, found
  # The parameters have moved by far more than that.
  start = assembly.model(sync.config).params
  assert compare.largest_difference(start, sync.params).relative > 1e-4
  assert max(line['staleness/max_steps'] for line in run.lines) == 0


def test_gradients_stream_by_their_granularity(sync, streamed):
  launches = {
    name: sum(line['learner/launches'] for line in run.lines)
    for name, run in streamed.items()
  }
  whole = sum(line['learner/launches'] for line in sync.lines)
  assert launches['batch'] == whole <= launches['group']
  assert launches['group'] <= launches['trajectory']
  assert launches['trajectory'] > whole


def test_async_stays_within_its_staleness(ahead):
  run, _ = ahead
  for step, trajectories in run.seen.items():
    for t in trajectories:
      ages = step - t.policy_versions[t.loss_mask]
      assert ages.min() >= 0 and ages.max() <= 2
  assert max(line['staleness/max_steps'] for line in run.lines) in (1, 2)


def test_async_drops_nothing(ahead):
  """cases row 29: every prompt trains, in order; lengths are not selected."""
  run, sampled = ahead
  for step in range(5):
    drawn = range(step * PROMPTS, (step + 1) * PROMPTS)
    assert run.prompt_ids(step) == [p for p in drawn for _ in range(MEMBERS)]
  trained = [t.num_sampled for ts in run.seen.values() for t in ts]
  assert collections.Counter(trained) == collections.Counter(sampled)
  assert sum(line['rollout/tokens'] for line in run.lines) == sum(trained)


def test_off_policy_needs_behaviour_logprobs(tmp_path):
  """cases row 28: a ratio that is 1 by default is refused."""
  config = tiny('async')
  config.objective.loss = 'on_policy'
  with pytest.raises(ValueError, match='use truncated_is'):
    train_rl.train(config, str(tmp_path / 'run'))
  one = np.ones(1, np.int32)
  with pytest.raises(ValueError, match='behaviour_logprobs=None'):
    Turn(one, one > 0, None, one, 'stop')


def test_an_epoch_holds_every_prompt_once(sync):
  """cases row 12: exact multiset of an epoch; a group shares one prompt."""
  texts = collections.defaultdict(set)
  counts = collections.Counter()
  tokenizer = assembly.model(sync.config).tokenizer
  for t in itertools.chain(*sync.seen.values()):
    texts[t.prompt_id].add(tokenizer.decode(t.prompt_tokens))
    counts[t.prompt_id] += 1
  assert counts == dict.fromkeys(range(2 * EPOCH), MEMBERS)
  assert all(len(shared) == 1 for shared in texts.values())
  sizes = {'train': EPOCH, 'test': sync.config.task.test_prompts}
  args = sync.config.task.args.to_dict()
  tasks = prompt_sets.draw_folds(toy.FAMILY, sizes, sync.config.seed, args)
  words = sorted(task['question'] for task in tasks['train'])
  for epoch in range(2):
    found = [texts[epoch * EPOCH + i].copy().pop() for i in range(EPOCH)]
    named = [word for word in words for text in found if word in text]
    assert named == words


def test_resampling_draws_the_same_prompts(resampled):
  sync, streamed = resampled
  assert compare.unequal_tokens(sync.record, streamed.record) == []
  found = compare.largest_difference(streamed.params, sync.params)
  assert found.relative <= 1e-6, found
  replaced = [line['queue/resampled_groups'] for line in sync.lines]
  assert replaced == [line['queue/resampled_groups'] for line in streamed.lines]
  assert sum(replaced) > 0
  position, limit = 0, sync.config.estimator.max_resampled_prompts
  for step, extra in enumerate(replaced):
    rewards = collections.defaultdict(set)
    for t in sync.seen[step]:
      rewards[t.prompt_id].add(t.reward)
    # The prompts of a step follow those of the last without a gap.
    assert sorted(rewards) == [position + i for i in range(PROMPTS + extra)], (
      step
    )
    position += PROMPTS + extra
    flat = sum(len(values) == 1 for values in rewards.values())
    assert extra == min(flat, limit)


def test_no_two_trajectories_share_a_key(sync, streamed, ahead):
  """cases row 41: distinct keys in a run, distinct samples in a group."""
  for run in (sync, *streamed.values(), ahead[0]):
    every = list(itertools.chain(*run.seen.values()))
    keys = {(t.step, t.prompt_id, t.member) for t in every}
    assert len(keys) == len(every) == run.config.steps * PROMPTS * MEMBERS
    samples = {(t.prompt_id, tuple(t.tokens.tolist())) for t in every}
    assert len(samples) == len(every)
    # The second epoch's samples of a prompt are not those of the first.
    texts = {(tuple(t.prompt_tokens), tuple(t.tokens)) for t in every}
    assert len(texts) == len(every)


def test_no_step_compiles(sync, streamed, ahead, resampled):
  for run in (sync, *streamed.values(), ahead[0], *resampled):
    assert [line['host/compilations'] for line in run.lines] == [0] * len(
      run.lines
    ), run.path
  # The counter counts.
  before = len(compilations.names())
  jax.jit(lambda x: x * 3 + 1)(np.ones(7)).block_until_ready()
  assert len(compilations.names()) > before


@pytest.mark.parametrize(
  'block,key,exists',
  [
    (None, 'schedule', 'thundersync'),
    ('estimator', 'name', 'grpo'),
    ('estimator', 'aggregation', 'sequence'),
    ('task', 'family', 'toy_guess'),
    ('stream', 'sums_on', 'host'),
    ('stream', 'granularity', 'trajectory'),
    ('objective', 'loss', 'ppo_clip'),
    ('objective', 'kl_estimator', 'k3'),
    ('optimizer', 'schedule', 'cosine'),
  ],
)
def test_an_unknown_name_lists_what_exists(tmp_path, block, key, exists):
  # async reads each of these settings.
  config = tiny('async')
  setattr(config[block] if block else config, key, 'nope')
  with pytest.raises(ValueError, match="'nope'.*" + exists):
    train_rl.train(config, str(tmp_path / 'run'))


def test_a_workdir_of_another_config_is_refused(sync):
  config = tiny('sync')
  config.optimizer.b1 = 0.5
  with pytest.raises(WorkdirError, match='optimizer.b1: 0.9 in the workdir'):
    train_rl.train(config, sync.path)


class Faulty(toy.ToyEnvironment):
  """Does something wrong, in the order in which environments are made."""

  def __init__(self, fault, released):
    super().__init__(toy.Settings())
    self.fault = fault
    self.released = released

  def _raise(self, stage):
    if self.fault == stage:
      raise OSError(f'no {stage} today')

  def reset(self, task):
    self._raise('reset')
    return super().reset(task)

  def step(self, text):
    self._raise('step')
    if self.fault == 'hang':
      self.released.wait(60)
    result = super().step(text)
    if isinstance(self.fault, dict):
      return dataclasses.replace(result, reward=self.fault['reward'])
    return result

  def close(self):
    self._raise('close')


@pytest.fixture
def faulty(monkeypatch):
  """Registers a family whose n-th environment has the n-th fault."""
  released = threading.Event()

  def register(faults):
    # Two agents look at one environment each before the first trajectory.
    order = itertools.chain([None, None], faults)

    def make(**args):
      del args
      return Faulty(next(order), released)

    family = base.TaskFamily('faulty', toy.make_tasks, make)
    monkeypatch.setitem(envs.ENVIRONMENTS, 'faulty', family)

  yield register
  released.set()


class Messages(python_logging.Handler):
  """Keeps what is logged."""

  def __init__(self):
    super().__init__()
    self.texts = []

  def emit(self, record):
    self.texts.append(record.getMessage())


@pytest.fixture
def logged():
  handler = Messages()
  logger = python_logging.getLogger('absl')
  logger.addHandler(handler)
  yield handler.texts
  logger.removeHandler(handler)


def test_one_environment_error_does_not_end_the_step(faulty, logged, tmp_path):
  """cases rows 14, 25: the member is masked and counted, the run goes on."""
  faults = ['reset', None, 'step', None, None, 'hang', 'close']
  faulty(itertools.chain(faults, itertools.repeat(None)))
  config = tiny('thundersync', steps=2)
  config.task.family = 'faulty'
  config.rollout.env_timeout_s = 3.0
  run = play(config, tmp_path / 'run')
  assert [line['rollout/failed'] for line in run.lines] == [3, 0]
  assert [line['rollout/trajectories'] for line in run.lines] == [16, 16]
  keys = {(t.prompt_id, t.member) for t in run.seen[0]}
  every = set(itertools.product(range(PROMPTS), range(MEMBERS)))
  assert every - keys == {(0, 0), (0, 2), (1, 1)}
  for leaf in jax.tree.leaves(run.params):
    assert np.isfinite(leaf).all()
  text = '\n'.join(logged)
  assert 'member=0 is masked: Faulty.reset raised OSError: no reset' in text
  assert 'member=2 is masked: Faulty.step raised OSError: no step' in text
  assert 'member=1 is masked: Faulty.step timed out after 3 s' in text


def test_rewards_that_are_no_numbers_end_the_run(faulty, tmp_path):
  """cases rows 13, 14: the error names the environment and what it gave."""
  rewards = [float('nan'), [0.5], '1']
  faulty(itertools.cycle({'reward': reward} for reward in rewards))
  config = tiny('sync')
  config.task.family = 'faulty'
  with pytest.raises(RuntimeError, match='16 of 16 .* of step 0') as error:
    train_rl.train(config, str(tmp_path / 'run'))
  text = str(error.value)
  for problem in (
    'Faulty returned the reward nan which is not finite',
    'Faulty returned the reward [0.5] of shape (1,)',
    "Faulty returned the reward '1' of type str",
  ):
    assert problem in text
  assert metrics.read(tmp_path / 'run/metrics.jsonl') == []
