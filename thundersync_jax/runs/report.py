"""From what a step left behind to the numbers of metrics.py."""

import dataclasses
import pathlib
import statistics
from typing import Any

import numpy as np

from thundersync_jax.runs import metrics

# What the summary takes over all steps of a run.
_MEDIANS = (
  'time/step_s',
  'time/rollout_idle_s',
  'time/learner_idle_s',
  'rollout/tokens_per_s',
)
_LARGEST = (
  'staleness/max_steps',
  'rollout/logprob_diff_max',
  'queue/open_groups',
  'queue/open_bytes',
)


@dataclasses.dataclass(frozen=True)
class Counts:
  """Counters that grow over a run, at one moment.

  Attributes:
    engine: dict of rollout.device.Counters.
    launches: gradient programs.
    compiled: programs compiled.
    scoring_failures: answers on which the scorer itself failed; reward 0.
  """

  engine: dict[str, int]
  launches: int
  compiled: int
  scoring_failures: int

  def since(self, before: 'Counts') -> 'Counts':
    """What was added after `before`."""
    engine = {k: v - before.engine[k] for k, v in self.engine.items()}
    return Counts(
      engine,
      self.launches - before.launches,
      self.compiled - before.compiled,
      self.scoring_failures - before.scoring_failures,
    )


def trajectories(groups, step: int) -> dict[str, float]:
  """Rewards, lengths, failures and staleness of a step's groups."""
  scored = [t for group in groups for t in group.scored]
  failures = [r for group in groups for r in group.failures.values()]
  values = {
    'rollout/trajectories': len(scored) + len(failures),
    'rollout/failed': sum(reason != 'truncated' for reason in failures),
    'queue/dropped_members': len(failures),
    'queue/closed_groups': len(groups),
    'queue/zero_variance_groups': sum(g.zero_variance for g in groups),
  }
  if not scored:
    return values
  rewards = np.array([t.reward for t in scored])
  lengths = np.array([t.num_sampled for t in scored])
  masks = [t.loss_mask for t in scored]
  versions = np.concatenate(
    [t.policy_versions[m] for t, m in zip(scored, masks, strict=True)]
  )
  logprobs = np.concatenate(
    [t.behaviour_logprobs[m] for t, m in zip(scored, masks, strict=True)]
  )
  spreads = [np.std([t.reward for t in g.scored]) for g in groups if g.scored]
  return values | {
    'reward/mean': rewards.mean(),
    'reward/std': rewards.std(),
    'reward/group_std': np.mean(spreads),
    'rollout/turns': np.mean([len(t.turns) for t in scored]),
    'rollout/length_mean_tokens': lengths.mean(),
    'rollout/length_max_tokens': lengths.max(),
    'rollout/truncated_fraction': np.mean([t.truncated for t in scored]),
    'rollout/entropy': -logprobs.mean(),
    'rollout/observation_tokens': sum((~m).sum() for m in masks),
    'rollout/forks': sum(len(t.rows) - 1 for t in scored),
    'staleness/mean_steps': step - versions.mean(),
    'staleness/max_steps': step - versions.min(),
  }


def work(timeline, spans, counts: Counts) -> dict[str, float]:
  """Time and device work of a step, from its spans and counters."""
  start, end = spans.start, spans.end
  took = {'barrier': 0.0, 'publish': 0.0, 'tool': 0.0, 'grading': 0.0}
  for span in spans.spans:
    if span.name in took:
      took[span.name] += span.end - span.start
  engine = counts.engine
  values = {
    'time/step_s': end - start,
    'time/barrier_s': took['barrier'],
    'time/publish_s': took['publish'],
    'time/environment_s': took['tool'] + took['grading'],
    'rollout/tokens': engine['tokens'],
    'rollout/tokens_per_s': engine['tokens'] / (end - start),
    'rollout/prompt_tokens': engine['prompt_tokens'],
    'rollout/launches': engine['launches'],
    'rollout/evictions': engine['evictions'],
    'learner/launches': counts.launches,
    'host/compilations': counts.compiled,
    'rollout/scoring_failures': counts.scoring_failures,
  }
  if engine['row_steps']:
    used = engine['tokens'] / engine['row_steps']
    values['rollout/slots_used_fraction'] = used
  for track in ('rollout', 'learner'):
    busy = timeline.busy_s(track, start, end)
    values[f'time/{track}_busy_s'] = busy
    values[f'time/{track}_idle_s'] = end - start - busy
  return values


def learner(stats) -> dict[str, float]:
  """Statistics of the loss entries of a step."""
  return {
    'rollout/logprob_diff_max': float(stats.logprob_diff_max),
    'learner/tokens': float(stats.entropy.weight),
    'learner/logprob': stats.logprob.mean(),
    'learner/entropy': stats.entropy.mean(),
    'learner/kl_ref': stats.kl.mean(),
    'learner/clip_fraction': stats.clipped.mean(),
  }


def distillation(stats) -> dict[str, float]:
  """Statistics of the loss entries of a step with a teacher."""
  return {
    'rollout/logprob_diff_max': float(stats.logprob_diff_max),
    'learner/tokens': float(stats.entropy.weight),
    'learner/entropy': stats.entropy.mean(),
    'distill/kl': stats.kl.mean(),
    'distill/teacher_entropy': stats.teacher_entropy.mean(),
  }


def evaluation(scores: dict[str, Any], suffix: str = '') -> dict[str, float]:
  """Metrics of an evaluation; suffix '_before' or '_after' for the summary."""
  values = {f'eval/accuracy{suffix}': scores['accuracy']}
  if scores['pass_at_k'] is not None:
    values[f'eval/pass_at_k{suffix}'] = scores['pass_at_k']
  if suffix:
    return values
  return values | {
    'eval/reward': scores['reward'],
    'eval/failed': scores['failed'],
    'eval/length_mean_tokens': scores['length'],
    'eval/prompts': scores['prompts'],
    'eval/k': scores['k'],
    'time/eval_s': scores['seconds'],
  }


def summary(
  workdir: pathlib.Path,
  config,
  facts: dict[str, Any],
  scores: dict[str, Any],
  total_s: float,
) -> dict[str, Any]:
  """Writes summary.json from metrics.jsonl and returns it.

  Args:
    workdir: of the run.
    config: of the run.
    facts: to stand in it beside those of the config.
    scores: of the evaluations 'before' and 'after'.
    total_s: wall time.
  """
  lines = metrics.read(workdir / 'metrics.jsonl')
  steps = [line for line in lines if 'time/step_s' in line]
  facts = {
    'schedule': config.schedule,
    'steps': config.steps,
    'model': config.model.source,
    'time/total_s': total_s,
    **facts,
  }
  for when in ('before', 'after'):
    if when in scores:
      facts |= evaluation(scores[when], f'_{when}')
  if steps:
    for name in _MEDIANS:
      facts[name] = statistics.median(line[name] for line in steps)
    for name in _LARGEST:
      facts[name] = max(line.get(name, 0) for line in steps)
    facts['reward/mean'] = steps[-1].get('reward/mean', 0.0)
  return metrics.write_summary(workdir, facts)
