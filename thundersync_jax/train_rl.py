"""DRIVER of reinforcement learning: read this file first.

  prompts -> agent (engine, environments) -> queue -> gradient stream -> barrier

The loop of `_stream_step` is all there is to a schedule:

  sync         gradients start when every rollout of the step has ended
  thundersync  gradients start as trajectories end; the same update
  async        as above, while rollouts of up to max_staleness later steps run
               under older parameters

One thread launches all device programs. Environments run in worker threads,
which only hand over results. Checkpoints are written at the barrier.
"""

import collections
import dataclasses
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from absl import logging
from jax.sharding import Mesh
from ml_collections import ConfigDict

from thundersync_jax import assembly, evaluate, streams, train_sft
from thundersync_jax.envs import base as envs_base
from thundersync_jax.envs import prompt_sets, worker_pool
from thundersync_jax.learner import learner as learner_lib
from thundersync_jax.learner import optimizer
from thundersync_jax.models import hf_checkpoint, pretrained
from thundersync_jax.rollout import agent as agent_lib
from thundersync_jax.runs import (
  checkpoints,
  compilations,
  metrics,
  plots,
  report,
  timeline,
  workdir,
)
from thundersync_jax.types import Trajectory

Tree = Any
# Called at each barrier with the step and the trajectories of its gradient.
Observer = Callable[[int, list[Trajectory]], None]


@dataclasses.dataclass
class Run:
  """The parts of a run, and the little that changes beside parameters."""

  config: ConfigDict
  loaded: pretrained.Pretrained
  meshes: tuple[Mesh, Mesh]
  prompts: dict[str, prompt_sets.PromptSet]
  pools: list[worker_pool.WorkerPool]
  timeline: timeline.Timeline
  agent: agent_lib.Agent
  evaluator: agent_lib.Agent
  learner: learner_lib.Learner
  publish: Callable[[Tree], Tree]
  warm_start: dict[str, Any]  # summary of train_sft, if there was one
  scores: dict[str, dict[str, Any]]  # of its evaluation
  stream: streams.Stream | None = None
  ref_params: Tree | None = None
  admitted: int = 0  # steps whose prompts have been submitted
  position: int = 0  # prompts drawn from the training fold
  # Step -> position before its first prompt: where a resume starts again.
  frontier: dict[int, int] = dataclasses.field(default_factory=dict)
  resampled: collections.Counter = dataclasses.field(
    default_factory=collections.Counter
  )


@dataclasses.dataclass(frozen=True)
class Result:
  """What a finished run hands back beside its workdir."""

  summary: dict[str, Any]
  params: Tree


def train(
  config: ConfigDict, path: str, observer: Observer | None = None
) -> Result:
  """Trains from config, or resumes what the workdir holds.

  Args:
    config: see configs/quickstart.py.
    path: the workdir.
    observer: see Observer.

  Raises:
    ValueError: settings that contradict each other.
    WorkdirError, CheckpointError: see runs/.
    RuntimeError: too many trajectories of a step failed.
  """
  assembly.check(config)
  streams.check(config)
  with workdir.open_workdir(path, config) as directory:
    try:
      run = set_up(config, directory.path)
    except BaseException:
      if not (directory.path / 'metrics.jsonl').exists():
        (directory.path / 'config.json').unlink()  # there is no run to protect
      raise
    try:
      return _train(run, directory.path, observer)
    finally:
      for pool in run.pools:
        pool.close()


def set_up(config: ConfigDict, directory: pathlib.Path) -> Run:
  """Makes the parts of a run; nothing is compiled or trained yet."""
  # --- Devices -------------------------------------------------------------
  meshes = assembly.meshes(config)
  # --- Model and prompts ---------------------------------------------------
  loaded = assembly.model(config)
  prompts = assembly.prompts(config, directory / 'prompts')
  warm_start, scores = {}, {}
  if config.sft.steps:
    warm = train_sft.train(config, directory / 'sft', loaded)
    loaded, warm_start = warm.loaded, warm.summary
    after = warm.scores.get('after')
    if after and after['fold'] == config.eval.fold:
      scores['before'] = after
  # --- Rollout -------------------------------------------------------------
  block = config.rollout
  # Trajectories of the training may be under way during an evaluation, so each
  # agent has a pool whose answers are all its own.
  pools = [
    worker_pool.WorkerPool(block.env_workers, block.env_timeout_s)
    for _ in range(2)
  ]
  clock = timeline.Timeline(config.schedule)
  agent = assembly.agent(config, loaded, meshes[0], pools[0], clock)
  evaluator = assembly.agent(config, loaded, meshes[0], pools[1])
  # --- Learner -------------------------------------------------------------
  learner = assembly.learner(config, loaded, meshes[1])
  publish = assembly.publisher(config, loaded, meshes[0])
  return Run(
    config,
    loaded,
    meshes,
    prompts,
    pools,
    clock,
    agent,
    evaluator,
    learner,
    publish,
    warm_start=warm_start,
    scores=scores,
  )


def _train(
  run: Run, directory: pathlib.Path, observer: Observer | None
) -> Result:
  config = run.config
  # --- Resume --------------------------------------------------------------
  saved = checkpoints.Checkpoints(
    directory / 'checkpoints', config.keep_checkpoints
  )
  state, counters = restore(run, saved)
  first = int(state.step)
  if first > config.steps:
    raise ValueError(
      f'steps={config.steps}, but {directory} holds step {first}: raise steps, '
      'or choose another --workdir'
    )
  started = time.perf_counter() - counters.get('seconds', 0.0)
  run.position, run.admitted = counters['position'], first
  if config.objective.kl_coef:
    run.ref_params = run.learner.place(run.loaded.params)
  run.loaded = dataclasses.replace(run.loaded, params=None)  # host memory
  # --- Warm up: every program a step needs, compiled before the first ------
  weights = run.publish(state.params)
  run.agent.engine.publish(weights, first)
  run.evaluator.engine.publish(weights, first)
  warm_up(run, state)
  # --- Evaluate before -----------------------------------------------------
  scores = counters.get('scores', run.scores)
  if first == 0 and config.eval.prompts and not scores:
    scores['before'] = evaluate_weights(run, 0)
  # --- Steps ---------------------------------------------------------------
  with metrics.Metrics(directory, first) as writer:
    if first == 0 and scores:
      writer.write(0, report.evaluation(scores['before']))
    bar = metrics.ProgressBar(config.steps, first)
    for step in range(first, config.steps):
      state, values = train_step(run, state, step, observer)
      done = step + 1
      if config.eval.prompts and (
        done == config.steps
        or (config.eval.every_steps and done % config.eval.every_steps == 0)
      ):
        with run.timeline.measure('host', 'evaluate'):
          scores['after'] = evaluate_weights(run, done)
        values |= report.evaluation(scores['after'])
      every = config.checkpoint_every_steps
      # The line first: a resume cuts what no checkpoint stands behind.
      writer.write(step, values)
      if (every and done % every == 0) or done == config.steps:
        seconds = time.perf_counter() - started
        _save(run, saved, state, {'scores': scores, 'seconds': seconds})
      bar.update(step, values)
    bar.close()
  # --- Report --------------------------------------------------------------
  total_s = time.perf_counter() - started
  granularity = assembly.plan(config).granularity
  facts = {'granularity': granularity, 'warm_start': run.warm_start}
  summary = report.summary(directory, config, facts, scores, total_s)
  if run.timeline.steps():
    run.timeline.save(directory / 'timeline.json')
    plots.plot_timeline(run.timeline, directory / 'timeline.png')
  plots.plot_curve(directory)
  if config.export_dir:
    _export(run, state, config.export_dir)
  return Result(summary, state.params)


def train_step(run: Run, state, step: int, observer: Observer | None):
  """One optimizer step: stream its gradient, apply it, publish."""
  clock = run.timeline
  clock.begin_step(step)
  before = _counts(run)
  _stream_step(run, state.params, step)
  # --- Barrier: no group of this step is open ------------------------------
  groups = run.stream.queue.groups(step)
  peaks = run.stream.peaks
  trajectories = [t for group in groups for t in group.scored]
  _check_failures(run, step, groups)
  with clock.measure('learner', 'barrier'):
    gradient, stats = run.stream.finish(step)
    state, grad_norm = run.learner.apply_step(
      state, gradient, assembly.max_staleness(run.config)
    )
  with clock.measure('host', 'publish'):
    run.agent.engine.publish(run.publish(state.params), step + 1)
  spans = clock.end_step()
  if observer is not None:
    observer(step, trajectories)
  values = report.trajectories(groups, step)
  values |= report.work(clock, spans, _counts(run).since(before))
  distilled = bool(run.config.distill.teacher)
  values |= (report.distillation if distilled else report.learner)(stats)
  rate = optimizer.learning_rate(run.config.optimizer, run.config.steps)
  return state, values | {
    'learner/grad_norm': grad_norm,
    'learner/learning_rate': float(rate(step)),
    'queue/open_groups': peaks.groups,
    'queue/open_bytes': peaks.nbytes,
    'queue/resampled_groups': run.resampled.pop(step, 0),
  }


def _counts(run: Run) -> report.Counts:
  engine = dataclasses.asdict(run.agent.engine.counters)
  compiled = len(compilations.names())
  failures = sum(envs_base.SCORING_FAILURES.counts().values())
  return report.Counts(engine, run.stream.launches, compiled, failures)


def _stream_step(run: Run, params: Tree, step: int) -> None:
  """Rolls out and accumulates until the step's gradient is complete."""
  ahead = assembly.max_staleness(run.config)
  stream, agent = run.stream, run.agent
  while run.admitted <= min(step + ahead, run.config.steps - 1):
    _admit_step(run)
  while True:
    events = agent.advance()
    for trajectory in agent.ended_turns():
      stream.turn_ended(trajectory)
    for trajectory in events:
      stream.queue.put(trajectory)
    for group in stream.settle():
      _resample(run, group)
    launched = _may_learn(run) and stream.launch(step, params, run.ref_params)
    if stream.step_complete(step):
      break
    if not (events or launched):
      agent.wait(0.001)
  stream.poll(block=True)


def _may_learn(run: Run) -> bool:
  """On a shared mesh decode chunks come first; gradients fill the waits."""
  rollout_mesh, learner_mesh = run.meshes
  return rollout_mesh != learner_mesh or not run.agent.engine.in_flight


def _admit_step(run: Run) -> None:
  """Submits the prompts of the next step."""
  run.frontier[run.admitted] = run.position
  _admit(run, run.admitted, run.config.rollout.prompts_per_step)
  run.admitted += 1


def _admit(run: Run, step: int, count: int) -> None:
  """Draws prompts and submits them; their groups are opened together."""
  positions = range(run.position, run.position + count)
  prompts = [run.prompts['train'][i] for i in positions]
  run.position = positions.stop
  size = run.config.rollout.group_size
  run.stream.queue.open(step, [p.prompt_id for p in prompts], size)
  for prompt in prompts:
    run.agent.submit(prompt, step, range(size))


def _resample(run: Run, group) -> None:
  """Replaces a group without spread by the next prompt (DAPO, 2503.14476).

  How many prompts a step draws depends on rewards alone, so every schedule and
  order of arrival draws the same.
  """
  block = run.config.estimator
  drawn = run.resampled[group.step]
  if (
    block.resample_zero_variance
    and group.zero_variance
    and drawn < block.max_resampled_prompts
  ):
    run.resampled[group.step] += 1
    _admit(run, group.step, 1)


def _check_failures(run: Run, step: int, groups) -> None:
  """Raises when so many trajectories failed that the cause is the setting."""
  failures = collections.Counter(
    reason for group in groups for reason in group.failures.values()
  )
  total = sum(group.size for group in groups)
  limit = run.config.max_failed_fraction
  scored = total - failures.total()
  if not scored or failures.total() - failures['truncated'] > limit * total:
    raise RuntimeError(
      f'{failures.total()} of {total} trajectories of step {step} left their '
      f'groups (max_failed_fraction={limit}): {dict(failures.most_common(3))}; '
      'mend what they name, or raise the limit'
    )


def warm_up(run: Run, state) -> None:
  """Compiles ahead, so that no step of the run compiles."""
  ahead = assembly.max_staleness(run.config)
  run.stream = streams.make(
    run.config, run.loaded, run.learner, run.meshes, state.params, run.timeline
  )
  logging.info('compiling the rollout')
  extend = run.agent.max_turns > 1 or ahead > 0
  run.agent.engine.warm_up(extend=extend)
  logging.info('compiling %d learner shapes', len(run.learner.shapes))
  kinds = run.stream.sink_kinds()
  run.learner.warm_up(state, run.ref_params, kinds)


def evaluate_weights(run: Run, step: int) -> dict[str, float]:
  """Evaluates the weights that the rollout has now."""
  config = run.config
  run.evaluator.engine.publish(run.agent.engine.params, step)
  return evaluate.held_out(
    run.evaluator,
    run.prompts[config.eval.fold],
    step,
    config.eval,
    assembly.sampling(config),
  )


def restore(run: Run, saved: checkpoints.Checkpoints):
  """The state to start from, and its counters."""
  state = run.learner.init_state(run.loaded.params)
  restored = saved.restore(state)
  if restored is None:
    return state, {'position': 0}
  logging.info('resuming after step %d', restored.step)
  return restored.state, restored.counters


def _save(run: Run, saved, state, counters: dict[str, Any]) -> None:
  """Saves at the barrier; prompts in flight will be issued again."""
  done = int(state.step)
  if saved.latest_step() == done:
    return
  position = run.frontier.get(done, run.position)
  with run.timeline.measure('host', 'checkpoint'):
    saved.save(done, state, counters | {'position': position})
  run.frontier = {s: p for s, p in run.frontier.items() if s >= done}


def _export(run: Run, state, path: str) -> None:
  params = jax.tree.map(np.asarray, state.params)
  tokenizer = run.loaded.directory
  hf_checkpoint.export(path, run.loaded.config, params, tokenizer)
