"""One agentic workload under several schedules, in one process.

The work of a step is fixed: a random model, tasks of the toy agent
(envs/toy_tools.py), waits that derive from (seed, prompt_id, member, turn). The
mean wait is chosen so that the rollout takes `balance` times as long as the
learner; the programs are those of training (train_rl.py), step by step.
Schedules take turns in blocks of a few steps, so that what disturbs the machine
meets all of them.
"""

import dataclasses
import os
import pathlib
import statistics
from typing import Any

import jax
import ml_collections
import numpy as np
from absl import logging

from thundersync_jax import assembly, defaults, replay, train_rl
from thundersync_jax.runs import critical_path, plots, traces
from thundersync_jax.types import Trajectory


@dataclasses.dataclass(frozen=True)
class Workload:
  """What a step has to do.

  Attributes:
    prompts, group: of a step.
    slots: of the engine.
    prompt_letters, answer_letters: of a task and of a tool's answer.
    turns: of every trajectory, so that each fills a row of the learner.
    turn_tokens: sampled tokens of a turn.
    sigma: of the logarithm of a wait.
    balance: rollout time over learner time that the mean wait is chosen for.
    width, layers: of the model.
  """

  prompts: int = 8
  group: int = 8
  slots: int = 16
  prompt_letters: int = 384
  answer_letters: int = 16
  turns: int = 3
  turn_tokens: int = 4
  sigma: float = 1.0
  balance: float = 1.2
  width: int = 128
  layers: int = 2


WORKLOADS = {
  # Tools with a heavy tail, 16 agents at a time. A group shares its long prompt
  # in the rollout, so that waits, not programs, make it as long as the learner.
  'tools': Workload(),
  # All agents of a step at once: no gradient can start before the quickest has
  # ended, and few are left for the tail.
  'burst': Workload(slots=64),
  # One turn and a slow grader.
  'grader': Workload(prompts=4, slots=32, turns=1, turn_tokens=16, sigma=0.5),
  # Long answers of quick tools: the learner is the limit.
  'learner': Workload(prompts=4, slots=32, answer_letters=64, balance=0.6),
  # Seconds, on any machine.
  'debug': Workload(
    prompts=2, group=3, slots=4, prompt_letters=16, width=16, layers=1
  ),
}
# Method -> name -> schedule, granularity.
METHODS = {
  'grpo': {
    'sync': ('sync', 'batch'),
    'thundersync': ('thundersync', 'trajectory'),
    'thundersync_group': ('thundersync', 'group'),
    'async': ('async', 'trajectory'),
  },
  'opd': {
    'sync': ('sync', 'batch'),
    'thundersync': ('thundersync', 'trajectory'),
    'thundersync_turn': ('thundersync', 'turn'),
    'async': ('async', 'trajectory'),
  },
}
_TEACHER = 'random:llama'
_CALIBRATION_S = 0.02  # mean wait of the first steps that measure programs
_CALIBRATION_STEPS = 3


def one_core_a_device() -> None:
  """Gives a CPU device one core; call before the first JAX program.

  So rollout and learner have each their own, as slices of a cluster have.
  """
  flag = '--xla_cpu_multi_thread_eigen=false'
  os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} {flag}'.strip()


def keep_compiled(folder: pathlib.Path) -> None:
  """Lets runs of one process share the programs that they have in common."""
  jax.config.update('jax_compilation_cache_dir', str(folder / 'compiled'))
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
  jax.config.update('jax_persistent_cache_min_entry_size_bytes', -1)


def config(workload: Workload, wait_s: float) -> ml_collections.ConfigDict:
  """The config of a run of the workload, with a mean wait in seconds."""
  c = defaults.config()
  c.steps, c.checkpoint_every_steps, c.eval.prompts = 10_000, 0, 0
  c.model.source = 'random:llama'
  c.model.new = {
    'embed_dim': workload.width,
    'mlp_dim': 3 * workload.width,
    'num_layers': workload.layers,
    'head_dim': workload.width // 4,
    'max_context': 1024,
  }
  c.task.family = 'toy_tools'
  c.task.args = {
    'prompt_letters': workload.prompt_letters,
    'answer_letters': workload.answer_letters,
    'min_turns': workload.turns,
    'max_turns': workload.turns,
  }
  c.task.train_prompts, c.task.test_prompts = 8 * workload.prompts, 1
  c.task.latency.kind = 'lognormal'
  c.task.latency.seconds, c.task.latency.sigma = wait_s, workload.sigma
  c.rollout.prompts_per_step = workload.prompts
  c.rollout.group_size = workload.group
  c.rollout.slots, c.rollout.chunk = workload.slots, workload.turn_tokens
  prompt = workload.prompt_letters + 8  # what the chat template adds
  turn = workload.turn_tokens + workload.answer_letters + 4
  sampled = workload.turns * workload.turn_tokens
  context = assembly.round_up(prompt + workload.turns * turn)
  c.rollout.max_prompt_tokens = prompt
  lengths = {assembly.round_up(turn), assembly.round_up(prompt)}
  c.rollout.prompt_buckets = tuple(sorted(lengths))
  c.rollout.cache_buckets = (context,)
  c.rollout.max_context = context
  c.rollout.max_turn_tokens = workload.turn_tokens
  c.rollout.max_trajectory_tokens = sampled
  c.rollout.evict = 'never'  # a parked agent keeps its slot
  c.rollout.extend_rows = 2  # few tools answer at the same moment
  c.rollout.env_workers = 2 * workload.prompts * workload.group
  c.stream.max_open_groups = workload.prompts
  c.learner.rows = (1,)
  c.learner.row_tokens = (context,)
  c.learner.row_targets = (sampled,)
  c.distill.max_open = workload.prompts * workload.group
  c.distill.rows = (1,)
  c.distill.feed_tokens = (assembly.round_up(turn),)
  c.distill.start_tokens = (context,)
  early = assembly.round_up((workload.turns - 1) * turn)
  unwound = {early, assembly.round_up(prompt)} - {0}  # 0: of a single turn
  c.distill.unwind_tokens = tuple(sorted(unwound))
  c.optimizer.learning_rate = 1e-7  # all schedules sample the same tokens
  return c


@dataclasses.dataclass(frozen=True)
class Measured:
  """A timed step.

  Attributes:
    times: see traces.StepTimes.
    bound: its critical path.
    staleness: mean over tokens, in steps.
    compiled: programs, which should be none.
  """

  times: traces.StepTimes
  bound: critical_path.Bound
  staleness: float
  compiled: int


class Contestant:
  """A run under one schedule, stepped by hand.

  Args:
    config: of the run.
    folder: where its prompts are; several runs may share it.
  """

  def __init__(self, config: ml_collections.ConfigDict, folder: pathlib.Path):
    assembly.check(config)
    self.config = config
    self.run = run = train_rl.set_up(config, folder)
    self._state = run.learner.init_state(run.loaded.params)
    run.agent.engine.publish(run.publish(self._state.params), 0)
    train_rl.warm_up(run, self._state)
    self.recorder = traces.Recorder(run.agent.max_turns)
    self._trained: list[Trajectory] = []
    self.measured: list[Measured] = []

  def play(self, steps: int, timed: bool = True) -> None:
    """Does some steps; those that are not timed only go on."""
    for _ in range(steps):
      step = int(self._state.step)
      self._state, values = train_rl.train_step(
        self.run, self._state, step, self._observe
      )
      record = self.run.timeline.steps()[-1]
      trained, slots = self._trained, self.config.rollout.slots
      self.recorder.add(record, trained, values, slots, timed)
      if timed:
        self.measured.append(
          Measured(
            self.recorder.steps[-1],
            critical_path.of_step(record, self._releases(trained)),
            values['staleness/mean_steps'],
            values['host/compilations'],
          )
        )

  def trace(self) -> traces.Trace:
    """What has been played so far."""
    c = self.config
    settings = {
      'slots': c.rollout.slots,
      'chunk': c.rollout.chunk,
      'extend_tokens': max(c.rollout.prompt_buckets),
      'extend_rows': c.rollout.extend_rows,
      'workers': c.rollout.env_workers,
      'max_open_groups': c.stream.max_open_groups,
      'rewards': not c.distill.teacher,
    }
    granularity = assembly.plan(c).granularity
    return self.recorder.trace(c.schedule, granularity, settings)

  def close(self) -> None:
    """Ends its threads."""
    for pool in self.run.pools:
      pool.close()

  def _observe(self, step: int, trajectories: list[Trajectory]) -> None:
    self._trained = trajectories

  def _releases(self, trajectories) -> critical_path.Releases:
    """A turn when it left the slot, a trajectory with its last turn."""
    calls = {}
    for record in self.run.timeline.steps():
      for span in record.spans:
        if span.track == 'environment':
          key = [span.args[k] for k in ('prompt_id', 'member', 'turn')]
          calls[tuple(key)] = span
    times, answered = {}, 0.0
    for t in trajectories:
      spans = [
        calls[t.prompt_id, t.member, turn + 1] for turn in range(len(t.turns))
      ]
      for turn, span in enumerate(spans):
        times[t.prompt_id, t.member, turn] = span.start
      early = len(t.turns) >= self.run.agent.max_turns
      end = spans[-1].start if early else spans[-1].end
      times[t.prompt_id, t.member] = end
      # The prompt is fed for the first of its group, and left with the last.
      fed, left = (t.prompt_id, -1, 0), (t.prompt_id, -1)
      times[fed] = min(times.get(fed, end), spans[0].start)
      times[left] = max(times.get(left, end), end)
      answered = max(answered, spans[-1].end)
    return critical_path.Releases(times, answered)


# --- The race ----------------------------------------------------------------


def race(
  workload: Workload,
  method: str,
  folder: pathlib.Path,
  blocks: int,
  steps: int,
) -> dict[str, Contestant]:
  """Plays all schedules of a method in turns.

  Args:
    workload: what a step has to do.
    method: of METHODS.
    folder: for the prompts.
    blocks: how often each schedule has its turn.
    steps: timed steps of a block, after one that is not: prompts of an
      asynchronous run that were under way have waited while others ran.
  """
  wait_s = _CALIBRATION_S

  def contestant(name):
    c = config(workload, wait_s)
    c.schedule, c.stream.granularity = METHODS[method][name]
    c.distill.teacher = _TEACHER if method == 'opd' else ''
    return Contestant(c, folder)

  for _ in range(2):  # with other waits, programs take other seconds
    runner = contestant('sync')
    runner.play(1, timed=False)
    runner.play(_CALIBRATION_STEPS)
    wait_s *= wait_for(runner.trace(), workload)
    runner.close()
  logging.info('mean wait of %s: %.3f s', method, wait_s)
  found = {name: contestant(name) for name in METHODS[method]}
  for block in range(blocks):
    for name, runner in found.items():
      runner.play(1, timed=False)
      runner.play(steps)
      took = [f'{m.times.seconds:.2f}' for m in runner.measured[-steps:]]
      logging.info(
        'block %d of %d, %s %s: %s s', block + 1, blocks, method, name, took
      )
  for runner in found.values():
    runner.close()
  return found


def rows(found: dict[str, Contestant]) -> list[dict[str, Any]]:
  """A line of figures a schedule; ratios are those of equal steps.

  step_s, faster and over_bound are medians; the quartiles of faster stand
  beside it.
  """
  base = [m.times.seconds for m in found['sync'].measured]
  lines = []
  for name, runner in found.items():
    measured = runner.measured
    seconds = np.array([m.times.seconds for m in measured])
    low, faster, high = np.percentile(base / seconds, [25, 50, 75])
    lines.append(
      {
        'schedule': name,
        'step_s': float(np.median(seconds)),
        'faster': float(faster),
        'quartiles': f'{low:.2f}-{high:.2f}',
        'rollout_idle': _mean(m.times.rollout_idle for m in measured),
        'learner_idle': _mean(m.times.learner_idle for m in measured),
        'bound_s': float(np.median([m.bound.bound_s for m in measured])),
        'over_bound': float(np.median([m.bound.ratio for m in measured])),
        'rollout_s': float(np.median([m.bound.rollout_s for m in measured])),
        'learner_s': float(np.median([m.bound.learner_s for m in measured])),
        'staleness': _mean(m.staleness for m in measured),
        'steps': len(measured),
        'compiled': sum(m.compiled for m in measured),
      }
    )
  return lines


def save(found: dict[str, Contestant], folder: pathlib.Path) -> None:
  """Writes the trace of sync, with what all took, and their last timelines.

  What programs cost each other beside one another is seen in thundersync.
  """
  measured = {
    name: [m.times.seconds for m in runner.measured]
    for name, runner in found.items()
  }
  trace = found['sync'].trace()
  contention = found['thundersync'].recorder.contention(trace.costs)
  costs = dataclasses.replace(trace.costs, contention=contention)
  trace = dataclasses.replace(trace, measured=measured, costs=costs)
  traces.write(trace, folder / traces.NAME)
  for name, runner in found.items():
    plots.plot_timeline(runner.run.timeline, folder / f'{name}.png')


def _mean(values) -> float:
  return statistics.fmean(values)


def wait_for(trace: traces.Trace, workload: Workload) -> float:
  """The mean wait with which the rollout takes balance times the learner.

  Args:
    trace: of schedule sync, with some other mean wait.
    workload: its balance.

  Returns:
    How often the waits of the trace that is.
  """

  sync = replay.schedules(trace)['sync']

  def excess(scale):
    steps = replay.play(trace, sync, scale)
    learner = [(1 - s.learner_idle) * s.seconds for s in steps]
    rollout = [s.seconds for s in steps] - np.array(learner)
    return np.median(rollout) - workload.balance * np.median(learner)

  low, high = 0.0, 1.0
  while excess(high) < 0:
    low, high = high, 2 * high
  for _ in range(12):
    middle = (low + high) / 2
    low, high = (middle, high) if excess(middle) < 0 else (low, middle)
  return high
