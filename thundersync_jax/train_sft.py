"""DRIVER of supervised warm starts: imitation of gold paths, before RL.

  gold paths (environments) -> demonstrations -> packed, masked batches
       -> sum of grad log pi over what the expert said -> optimizer step

The learner is that of reinforcement learning, with advantage 1 on every token
of the expert and 0 on prompts and observations. Which demonstrations a step
takes depends on (seed, step) alone, so a run resumes exactly.
"""

import contextlib
import dataclasses
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from absl import logging
from ml_collections import ConfigDict

from thundersync_jax import assembly, evaluate
from thundersync_jax.envs import prompt_sets, worker_pool
from thundersync_jax.learner import gradients, optimizer, packing
from thundersync_jax.learner import learner as learner_lib
from thundersync_jax.models import pretrained
from thundersync_jax.objectives import aggregation
from thundersync_jax.rollout import agent as agent_lib
from thundersync_jax.rollout import demonstrations
from thundersync_jax.runs import checkpoints, metrics, report, workdir
from thundersync_jax.types import Item, Trajectory

Tree = Any
_TOKEN_MEAN = aggregation.AGGREGATIONS['token']


@dataclasses.dataclass(frozen=True)
class Result:
  """What a run hands back.

  Attributes:
    loaded: the model with its new weights, on the host.
    summary: of the run.
    scores: of the evaluations 'before' and 'after'; empty without any.
  """

  loaded: pretrained.Pretrained
  summary: dict[str, Any]
  scores: dict[str, dict[str, Any]]


@dataclasses.dataclass
class _Run:
  """The parts of a run."""

  config: ConfigDict
  directory: pathlib.Path
  loaded: pretrained.Pretrained
  prompts: dict[str, prompt_sets.PromptSet]
  evaluator: agent_lib.Agent
  publish: Callable[[Tree], Tree]
  learner: learner_lib.Learner


def train(
  config: ConfigDict,
  path: str | os.PathLike,
  loaded: pretrained.Pretrained | None = None,
) -> Result:
  """Trains on gold paths as config.sft says, or resumes, or finds it done.

  Args:
    config: see configs/agent_sql.py.
    path: the workdir.
    loaded: the model to start from; by default that of the config.

  Raises:
    ValueError: settings that contradict each other, or no gold paths.
    WorkdirError, CheckpointError: see runs/.
  """
  assembly.check(config)
  if not config.sft.steps:
    raise ValueError('sft.steps=0: nothing to train; set it above 0')
  with workdir.open_workdir(path, config) as directory:
    block = config.rollout
    pool = worker_pool.WorkerPool(block.env_workers, block.env_timeout_s)
    try:
      loaded = loaded or assembly.model(config)
      return _train(_set_up(config, directory.path, loaded, pool))
    finally:
      pool.close()


def _set_up(config, directory, loaded, pool) -> _Run:
  rollout_mesh, learner_mesh = assembly.meshes(config)
  learner = learner_lib.Learner(
    loaded.config,
    gradients.Objective(),
    optimizer.make(_settings(config), config.sft.steps),
    learner_mesh,
    shapes=assembly.shapes(config),
  )
  return _Run(
    config,
    directory,
    loaded,
    assembly.prompts(config, directory / 'prompts'),
    assembly.agent(config, loaded, rollout_mesh, pool),
    assembly.publisher(config, loaded, rollout_mesh),
    learner,
  )


def _settings(config: ConfigDict) -> ConfigDict:
  """The optimizer block with the learning rate of the warm start."""
  settings = ConfigDict(config.optimizer.to_dict())
  for name in ('learning_rate', 'schedule', 'warmup_steps'):
    settings[name] = config.sft[name]
  return settings


def _train(run: _Run) -> Result:
  config = run.config
  # --- Resume --------------------------------------------------------------
  saved = checkpoints.Checkpoints(run.directory / 'checkpoints', 1)
  state = run.learner.init_state(run.loaded.params)
  restored = saved.restore(state)
  counters = {'scores': {}, 'seconds': 0.0, 'prompt_ids': []}
  if restored is not None:
    state, counters = restored.state, restored.counters
  first, scores = int(state.step), counters['scores']
  if first == config.sft.steps:
    logging.info('%s holds all %d steps', run.directory, first)
    return _result(run, state, scores, counters['seconds'])
  # --- Evaluate before, and play the gold paths ----------------------------
  started = time.perf_counter() - counters['seconds']
  if first == 0 and config.eval.prompts:
    scores['before'] = _evaluate(run, state)
  gold = _demonstrations(run, counters['prompt_ids'])
  kept = [trajectory.prompt_id for trajectory in gold]
  # --- Steps ---------------------------------------------------------------
  run.learner.warm_up(state, None, [('batch',)])
  with metrics.Metrics(run.directory, first) as writer:
    bar = metrics.ProgressBar(config.sft.steps, first)
    for step in range(first, config.sft.steps):
      state, values = _step(run, state, batch_of(config, gold, step))
      done = step + 1
      if done == config.sft.steps and config.eval.prompts:
        scores['after'] = _evaluate(run, state)
        values |= report.evaluation(scores['after'])
      writer.write(step, values)
      every = config.checkpoint_every_steps
      if done == config.sft.steps or (every and done % every == 0):
        seconds = time.perf_counter() - started
        counters = {'scores': scores, 'seconds': seconds, 'prompt_ids': kept}
        saved.save(done, state, counters)
      bar.update(step, values)
    bar.close()
  return _result(run, state, scores, time.perf_counter() - started)


def _demonstrations(run: _Run, kept: list[int]) -> list[Trajectory]:
  """Gold paths of the first prompts of the training fold.

  Args:
    run: its parts.
    kept: prompt_ids whose gold paths were solved before a resume; () at first.

  Raises:
    ValueError: one of `kept` is not solved now, so the run would go on
      differently.
  """
  config = run.config
  recorder = demonstrations.Recorder(
    run.loaded.tokenizer,
    assembly.environment(config),
    config.rollout.max_context,
  )
  prompts = run.prompts['train']
  count = min(config.sft.demonstrations, len(prompts))
  chosen = [prompts[i] for i in range(count)]
  if kept:
    chosen = [prompt for prompt in chosen if prompt.prompt_id in set(kept)]
  # A pool of its own: the evaluator's may still hand over answers.
  block = config.rollout
  pool = worker_pool.WorkerPool(block.env_workers, block.env_timeout_s)
  with contextlib.closing(pool):
    gold = demonstrations.record(recorder, chosen, pool, config.eval.solved)
  if kept and len(gold) < len(kept):
    raise ValueError(
      f'{len(kept) - len(gold)} of {len(kept)} gold paths that the run began '
      'with are not solved now: resume again, or choose another --workdir'
    )
  return gold


def batch_of(
  config: ConfigDict, gold: list[Trajectory], step: int
) -> list[Trajectory]:
  """The demonstrations of a step: each epoch is a permutation of its own."""
  size = config.sft.batch
  positions = range(step * size, (step + 1) * size)
  chosen = []
  for position in positions:
    epoch, place = divmod(position, len(gold))
    order = np.random.default_rng((config.seed, epoch)).permutation(len(gold))
    chosen.append(gold[order[place]])
  return chosen


def _step(run: _Run, state, batch: list[Trajectory]):
  """One optimizer step on the mean over the expert's tokens."""
  start = time.perf_counter()
  learner, tokenizer = run.learner, run.loaded.tokenizer
  total = learner.arithmetic(state.params).zeros()
  stats = gradients.Stats.zeros()
  left = [Item(trajectory, advantage=1.0) for trajectory in batch]
  launches = 0
  while left:
    packed, _, taken = packing.pack(
      left, learner.shapes, _TOKEN_MEAN.weight, tokenizer.pad_id
    )
    sums, stats = learner.accumulate(
      state.params, None, packed, {'batch': total}, stats
    )
    total, launches = sums['batch'], launches + 1
    done = {id(item) for item in taken}
    left = [item for item in left if id(item) not in done]
  tokens = sum(trajectory.num_sampled for trajectory in batch)
  gradient = learner_lib.BatchGradient(total, float(tokens), frozenset())
  state, norm = learner.apply_step(state, gradient)
  stats = jax.device_get(stats)
  return state, {
    'learner/logprob': stats.logprob.mean(),
    'learner/entropy': stats.entropy.mean(),
    'learner/tokens': tokens,
    'learner/grad_norm': norm,
    'learner/launches': launches,
    'time/step_s': time.perf_counter() - start,
  }


def _evaluate(run: _Run, state) -> dict[str, float]:
  config, step = run.config, int(state.step)
  run.evaluator.engine.publish(run.publish(state.params), step)
  return evaluate.held_out(
    run.evaluator,
    run.prompts[config.eval.fold],
    step,
    config.eval,
    assembly.sampling(config),
  )


def _result(run: _Run, state, scores, seconds: float) -> Result:
  params = jax.tree.map(np.asarray, state.params)
  facts = {
    'steps': run.config.sft.steps,
    'model': run.config.model.source,
    'time/total_s': seconds,
  }
  for when, values in scores.items():
    facts |= report.evaluation(values, f'_{when}')
  summary = metrics.write_summary(run.directory, facts)
  model = dataclasses.replace(run.loaded, params=params)
  return Result(model, summary, scores)
