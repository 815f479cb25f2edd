"""A run among environments that hang, die, answer late or return garbage."""

import collections
import random
import threading
import time

import pytest

from configs import quickstart
from thundersync_jax import envs, train_rl
from thundersync_jax.envs import base, toy
from thundersync_jax.rollout import agent as agent_lib
from thundersync_jax.runs import metrics

STEPS, PROMPTS, MEMBERS = 2, 4, 4
TIMEOUT_S = 4.0
NONSENSE = {
  'reset': (5, [{'role': 'robot', 'content': 'x'}], [None], []),
  'step': (
    None,
    base.EnvStep((), float('nan'), True),
    base.EnvStep(({'role': 'user'},), None, False),
    base.EnvStep(7, None, False),
  ),
  'close': ('what?',),
}


class Chaos(toy.GuessEnvironment):
  """One fault in ten calls of each kind, at reset, step and close."""

  release = threading.Event()
  lock = threading.Lock()
  # A stream a method: which of its calls fail doesn't depend on their order.
  rng = {m: random.Random(f'{m} 29') for m in NONSENSE}
  faults = collections.Counter()  # (method, fault) -> calls

  def _enter(self, method):
    """Returns nonsense to answer, or None."""
    with self.lock:
      kinds = ('hang', 'die', 'late', 'garbage', *[None] * 6)
      fault = self.rng[method].choice(kinds)
      nonsense = self.rng[method].choice(NONSENSE[method])
      self.faults[method, fault] += 1
    if fault == 'hang':
      self.release.wait(600)
    elif fault == 'die':
      raise ConnectionResetError('the sandbox died')
    elif fault == 'late':
      time.sleep(0.05)
    return (nonsense,) if fault == 'garbage' else ()

  def reset(self, task):
    made = super().reset(task)
    return next(iter(self._enter('reset')), made)

  def step(self, text):
    made = super().step(text)
    return next(iter(self._enter('step')), made)

  def close(self):
    return next(iter(self._enter('close')), None)


def config_of():
  c = quickstart.get_config('debug')
  with c.unlocked():
    c.steps, c.checkpoint_every_steps, c.eval.prompts = STEPS, 0, 0
    c.max_failed_fraction = 1.0
    c.task.family, c.task.args = 'chaos', {'max_turns': 3}
    c.task.train_prompts = 8
    c.rollout.prompts_per_step, c.rollout.group_size = PROMPTS, MEMBERS
    c.rollout.env_workers, c.rollout.env_timeout_s = 4, TIMEOUT_S
    c.rollout.max_turns, c.rollout.max_turn_tokens = 3, 6
    c.rollout.max_trajectory_tokens = 18
    c.rollout.max_prompt_tokens, c.rollout.prompt_buckets = 40, (40,)
    c.rollout.max_context, c.rollout.cache_buckets = 136, (136,)
    c.learner.rows, c.learner.row_tokens = (2,), (136,)
    c.learner.row_targets = (36,)
  return c


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  """The lines of metrics, trajectories by step, and failures by reason."""
  path, seen, agents = tmp_path_factory.mktemp('chaos'), {}, []
  make = agent_lib.Agent.__init__

  def init(self, *args, **kwargs):
    make(self, *args, **kwargs)
    agents.append(self)

  def observe(step, trajectories):
    seen[step] = trajectories
    if step == STEPS - 1:  # what was closed is counted before the run ends
      while agents[0]._pool.in_flight:
        assert not agents[0].advance()
        agents[0].wait(0.1)

  family = base.TaskFamily(
    'chaos',
    toy.make_guess_tasks,
    lambda **args: Chaos(base.parse_settings(toy.GuessSettings, 'chaos', args)),
  )
  with pytest.MonkeyPatch.context() as patch:
    patch.setitem(envs.ENVIRONMENTS, 'chaos', family)
    patch.setattr(agent_lib.Agent, '__init__', init)
    try:
      train_rl.train(config_of(), str(path), observe)
    finally:
      Chaos.release.set()
  lines = metrics.read(path / 'metrics.jsonl')
  return lines, seen, agents[0].failures


def count(failures, *parts):
  return sum(
    n for reason, n in failures.items() if all(part in reason for part in parts)
  )


def test_every_step_completes_and_counts(run):
  """cases row 25: every trajectory is scored, or left its group and counted."""
  lines, seen, failures = run
  assert [line['step'] for line in lines] == list(range(STEPS))
  for line in lines:
    assert line['rollout/trajectories'] == PROMPTS * MEMBERS
    scored = len(seen[line['step']])
    assert 0 < scored < PROMPTS * MEMBERS
    assert line['rollout/failed'] == PROMPTS * MEMBERS - scored
  masked = sum(line['rollout/failed'] for line in lines)
  assert masked == failures.total() - count(failures, 'close: ')


@pytest.mark.parametrize('method', ['reset', 'step'])
def test_faults_are_counted_by_reason(run, method):
  """cases row 25: each fault masks one trajectory, and its reason is kept."""
  _, _, failures = run
  faults = Chaos.faults
  assert min(faults[method, kind] for kind in ('hang', 'die', 'garbage')) > 0
  died = count(failures, f'Chaos.{method} raised ConnectionResetError')
  assert died == faults[method, 'die']
  hung = count(failures, f'Chaos.{method} timed out')
  assert hung == faults[method, 'hang']
  # The rest of what masks: garbage, and nothing else.
  every = count(failures, f'Chaos.{method}')
  assert every - died - hung == faults[method, 'garbage']


def test_closes_that_hang_free_their_workers(run):
  """cases row 25: the run went on after more calls hung than it has workers."""
  _, _, failures = run
  hung = Chaos.faults['close', 'hang']
  assert hung and Chaos.faults['close', 'die']
  hangs = sum(n for (_, fault), n in Chaos.faults.items() if fault == 'hang')
  assert hangs > 4
  assert 0 < count(failures, 'close: ', 'timed out') <= hung
  assert count(failures, 'close: ', 'died') <= Chaos.faults['close', 'die']
