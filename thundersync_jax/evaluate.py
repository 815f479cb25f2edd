"""Held-out accuracy: greedy, and pass@k from samples.

pass@k = 1 - C(n - c, k) / C(n, k) for c solved of n samples (arXiv 2107.03374).
"""

import dataclasses
import math
import time
from collections.abc import Sequence

import numpy as np
from absl import logging

from thundersync_jax.envs import prompt_sets
from thundersync_jax.rollout import agent as agent_lib
from thundersync_jax.types import Sampling, Trajectory

# Steps of evaluations begin here, so that they share no key with training.
FIRST_STEP = 1 << 30


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """What one evaluation found.

  Attributes:
    accuracy: share of prompts solved greedily (reward at least `solved`).
    reward: mean greedy reward.
    pass_at_k: share of prompts solved in k samples; None without samples.
    length: mean sampled tokens of the greedy trajectories.
    failed: trajectories that an environment failed to score; they count as 0.
  """

  accuracy: float
  reward: float
  pass_at_k: float | None
  length: float
  failed: int


def play(
  agent: agent_lib.Agent,
  prompts: Sequence[prompt_sets.Prompt],
  members: int,
  step: int,
) -> list[Trajectory]:
  """Plays every prompt to its end; returns scored and failed trajectories."""
  for prompt in prompts:
    agent.submit(prompt, step, range(members))
  played = []
  while agent.live:
    events = agent.advance()
    played += [t for t in events if t.reward is not None or t.failure]
    if not events:
      agent.wait(0.001)
  # In a fixed order, so that means do not depend on who ended first.
  return sorted(played, key=lambda t: (t.prompt_id, t.member))


def is_solved(trajectory: Trajectory, solved: float) -> bool:
  """Whether it has at least this reward; a failure never is."""
  return trajectory.reward is not None and trajectory.reward >= solved


def evaluate(
  agent: agent_lib.Agent,
  prompts: Sequence[prompt_sets.Prompt],
  step: int,
  *,
  samples: int = 0,
  k: int = 1,
  sampling: Sampling | None = None,
  solved: float = 1.0,
) -> Evaluation:
  """Evaluates the weights that the agent's engine holds.

  Args:
    agent: with an engine that is idle.
    prompts: held-out prompts.
    step: optimizer step, part of the keys.
    samples: trajectories a prompt for pass@k; 0 leaves it out.
    k: of pass@k.
    sampling: for pass@k.
    solved: reward from which a trajectory counts as solved.

  Raises:
    ValueError: fewer samples than k, or no prompts.
  """
  if not prompts:
    raise ValueError('no prompts to evaluate on: raise task.test_prompts')
  if samples and not 1 <= k <= samples:
    raise ValueError(f'pass@{k} needs at least {k} samples, not {samples}')
  agent.engine.sampling = Sampling(temperature=0.0)
  greedy = play(agent, prompts, 1, FIRST_STEP + step)
  rewards = [t.reward or 0.0 for t in greedy]
  failed = sum(t.failure is not None for t in greedy)
  rate = None
  if samples:
    agent.engine.sampling = sampling
    sampled = play(agent, prompts, samples, FIRST_STEP + step)
    failed += sum(t.failure is not None for t in sampled)
    rate = pass_at_k(sampled, samples, k, solved)
  return Evaluation(
    accuracy=float(np.mean([is_solved(t, solved) for t in greedy])),
    reward=float(np.mean(rewards)),
    pass_at_k=rate,
    length=float(np.mean([t.num_sampled for t in greedy])),
    failed=failed,
  )


def held_out(
  agent: agent_lib.Agent,
  prompts: prompt_sets.PromptSet,
  step: int,
  block,
  sampling: Sampling,
) -> dict[str, float]:
  """Evaluates as the `eval` block of a config says; returns its scores."""
  count = min(block.prompts, len(prompts))
  start = time.perf_counter()
  result = evaluate(
    agent,
    [prompts[i] for i in range(count)],
    step,
    samples=block.samples,
    k=block.k,
    sampling=sampling,
    solved=block.solved,
  )
  logging.info('step %d: held-out accuracy %.3f', step, result.accuracy)
  seconds = time.perf_counter() - start
  scores = {'fold': block.fold, 'prompts': count, 'k': block.k}
  scores['seconds'] = seconds
  return dataclasses.asdict(result) | scores


def pass_at_k(
  trajectories: Sequence[Trajectory], samples: int, k: int, solved: float
) -> float:
  """Mean over prompts of the unbiased estimate; failures are not solved."""
  counts: dict[int, int] = {}
  for t in trajectories:
    hits = counts.get(t.prompt_id, 0) + is_solved(t, solved)
    counts[t.prompt_id] = hits
  total = math.comb(samples, k)
  misses = [math.comb(samples - c, k) / total for c in counts.values()]
  return 1.0 - float(np.mean(misses))
