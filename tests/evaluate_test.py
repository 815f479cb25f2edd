"""Held-out accuracy and pass@k, from an agent that plays as it is told."""

import itertools
import math
import types

import numpy as np
import pytest

from thundersync_jax import evaluate
from thundersync_jax.envs import prompt_sets
from thundersync_jax.types import Sampling, Trajectory, Turn


class Scripted:
  """Rewards by prompt: a greedy one and those of the samples; None fails."""

  def __init__(self, greedy, samples):
    self.greedy, self.samples = greedy, samples
    self.engine = types.SimpleNamespace(sampling=Sampling())
    self.submitted, self._ready, self._waited = [], [], False

  @property
  def live(self):
    return len(self._ready)

  def submit(self, prompt, step, members):
    greedy = self.engine.sampling.temperature == 0
    for member in members:
      self.submitted.append((prompt.prompt_id, step, member, greedy))
      reward = (
        self.greedy[prompt.prompt_id]
        if greedy
        else self.samples[prompt.prompt_id][member]
      )
      self._ready.append((prompt.prompt_id, member, step, reward))

  def advance(self):
    if not self._waited:
      return []  # nothing has ended yet
    self._waited = False
    prompt_id, member, step, reward = self._ready.pop()
    n = prompt_id + 1
    ones = np.ones(n)
    turn = Turn(ones.astype(int), ones > 0, 0 * ones, 0 * ones, 'stop')
    content = Trajectory(prompt_id, member, step, ones, (turn,))
    failure = 'it broke' if reward is None else None
    ended = Trajectory(prompt_id, member, step, ones, (turn,), reward, failure)
    return [content, ended]

  def wait(self, timeout_s):
    self._waited = True


def prompts(count):
  return [prompt_sets.Prompt(i, 0, {'key': str(i)}) for i in range(count)]


def test_accuracy_by_hand():
  """Rewards 1, 0.5, none, 1 of 1, 2, 3, 4 tokens; a failure is not solved."""
  agent = Scripted([1.0, 0.5, None, 1.0], None)
  found = evaluate.evaluate(agent, prompts(4), step=7)
  assert found == evaluate.Evaluation(0.5, 2.5 / 4, None, 2.5, failed=1)
  assert {step for _, step, *_ in agent.submitted} == {evaluate.FIRST_STEP + 7}
  none = evaluate.evaluate(agent, prompts(4), step=7, solved=-1.0)
  assert none.accuracy == 0.75  # all but the failure
  half = evaluate.evaluate(agent, prompts(4), step=7, solved=0.5)
  assert half.accuracy == 0.75  # 1, 0.5 and 1


def brute_pass_at_k(hits, k):
  """Share of the k-subsets of the samples that hold a hit."""
  subsets = list(itertools.combinations(hits, k))
  return sum(any(subset) for subset in subsets) / len(subsets)


@pytest.mark.parametrize('k', [1, 2, 4, 5])
def test_pass_at_k_is_the_mean_over_all_choices(k):
  rewards = [[1, 0, 0, 0, 1], [0] * 5, [1] * 5, [0, 0, None, 0, 1]]
  agent = Scripted([0.0] * 4, rewards)
  sampling = Sampling(0.9)
  found = evaluate.evaluate(
    agent, prompts(4), 0, samples=5, k=k, sampling=sampling
  )
  want = np.mean([brute_pass_at_k([r == 1 for r in x], k) for x in rewards])
  assert math.isclose(found.pass_at_k, want, rel_tol=1e-12)
  assert (found.accuracy, found.failed) == (0.0, 1)
  assert agent.engine.sampling == sampling
  assert len({s for s in agent.submitted if not s[-1]}) == 20


def test_bad_settings_are_refused():
  with pytest.raises(ValueError, match='raise task.test_prompts'):
    evaluate.evaluate(Scripted([], None), [], 0)
  with pytest.raises(
    ValueError, match='pass@4 needs at least 4 samples, not 2'
  ):
    evaluate.evaluate(Scripted([0], None), prompts(1), 0, samples=2, k=4)
