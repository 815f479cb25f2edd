"""Random steps of trajectories, their arrival, and what they must add up to.

`coefficients` says, in a plain loop over scopes and trajectories, by how much
each sampled token's score enters the gradient. CountingLearner stands in for
the learner: it takes for the gradient of log pi(a) the unit vector of a, so a
gradient is a weighted count of tokens, exact and free of JAX.
"""

import dataclasses
import types

import numpy as np

from thundersync_jax.learner import gradients, packing
from thundersync_jax.streaming.accumulators import Arithmetic
from thundersync_jax.types import Trajectory, Turn

VOCAB = 37
SHAPES = (packing.Shape(1, 24, 12), packing.Shape(2, 40, 24))
CONSTANT_TOKENS = 5.0


def trajectory(rng, prompt_id, member, prompt, reward=None, **changes):
  """1 to 6 tokens and two behind; long ones have an observation inside."""
  n = rng.integers(1, 7)
  tokens = rng.integers(0, VOCAB, n + 2).astype(np.int32)
  mask = np.ones(n + 2, bool)
  if n > 3:
    mask[2:4] = False
  turn = Turn(
    tokens,
    mask,
    rng.normal(-3, 0.1, n + 2).astype(np.float32),
    np.full(n + 2, changes.pop('version', 0), np.int32),
    changes.pop('finish_reason', 'stop'),
  )
  made = Trajectory(prompt_id, member, 0, prompt, (turn,), reward)
  return dataclasses.replace(made, **changes)


def binary(rng, made):
  """Group 0 has no spread."""
  return float(rng.integers(0, 2)) if made.prompt_id else 1.0


def fraction(rng, made):
  """As real rewards: in [0, 1], and tied to what was sampled."""
  del rng
  return float(np.mean(made.tokens[made.loss_mask] < VOCAB // 2))


def make_step(seed, rewards=binary, groups=4, size=4):
  """The trajectories of a step, scored by rewards(rng, trajectory)."""
  rng = np.random.default_rng(seed)
  step = []
  for g in range(groups):
    prompt = rng.integers(0, VOCAB, rng.integers(2, 9)).astype(np.int32)
    for m in range(size):
      made = trajectory(rng, g, m, prompt)
      step.append(dataclasses.replace(made, reward=rewards(rng, made)))
  return step


def arrivals(rng, step):
  """What the queue gets, in a random order; half finish before their reward."""
  events = []
  for t in step:
    at = rng.random()
    events.append((at, t))
    if rng.random() < 0.5:
      events.append((at / 2, dataclasses.replace(t, reward=None, failure=None)))
  return [event for _, event in sorted(events, key=lambda pair: pair[0])]


def open_step(stream, step):
  prompt_ids = sorted({t.prompt_id for t in step})
  stream.queue.open(0, prompt_ids, len(step) // len(prompt_ids))


def play(stream, events, rng, params=None, ref=None):
  """Streams a step to its end; returns what `finish` hands over."""
  for event in events:
    stream.queue.put(event)
    stream.settle()
    while rng.random() < 0.7 and stream.launch(0, params, ref):
      stream.poll(block=True)
  while not stream.step_complete(0):
    stream.settle()
    assert stream.launch(0, params, ref) or stream.step_complete(0)
    stream.poll(block=True)
  return stream.finish(0)[0]


def coefficients(step, estimator, aggregation):
  """Returns [(trajectory, advantage times weight)] and the denominator."""
  scopes = {}
  for t in step:
    key = {'group': t.prompt_id, 'batch': 0}.get(
      estimator.scope, (t.prompt_id, t.member)
    )
    scopes.setdefault(key, []).append(t)
  pairs, denominator = [], 0.0
  for members in scopes.values():
    rewards = np.array([t.reward for t in members], np.float64)
    for t, a in zip(members, estimator.advantages(rewards), strict=True):
      n = int(t.loss_mask.sum())
      pairs.append((t, a * aggregation.weight(n)))
      denominator += aggregation.share(n, CONSTANT_TOKENS)
  return pairs, denominator


class CountingLearner:
  """The learner of which a gradient is a count of tokens.

  A gradient is f[2, V]: row 0 is the score's, row 1 the KL's, which is taken
  to be the count of tokens as well, for the sign to be seen.
  """

  def __init__(self, kl_coef=0.0, shapes=SHAPES, dtype=np.float64):
    self.shapes = shapes
    self.objective = gradients.Objective(kl_coef=kl_coef)
    self._dtype = dtype

  def arithmetic(self, params):
    del params

    def zeros():
      return np.zeros((2, VOCAB), self._dtype)

    def add_scaled(acc, scale, tree):
      return acc + self._dtype(scale) * tree

    def same(tree):
      return tree

    return Arithmetic(zeros, add_scaled, same, same, zeros().nbytes)

  def accumulate(self, params, ref_params, batch, sinks, stats):
    del params, ref_params
    assert (batch.tokens.shape, batch.targets.shape[1]) in {
      ((s.rows, s.tokens), s.targets) for s in self.shapes
    }
    w = batch.weights
    score = {
      'batch': w * batch.advantages,
      'score': w,
      'reward': w * batch.rewards,
    }
    kl = {'batch': -self.objective.kl_coef * w}
    done = types.SimpleNamespace(
      is_ready=lambda: True, block_until_ready=lambda: None
    )
    sums = {
      name: tree
      + np.stack(
        [self.count(batch.targets, x.get(name, 0 * w)) for x in (score, kl)]
      )
      for name, tree in sinks.items()
    }
    return sums, types.SimpleNamespace(logprob_diff_max=done)

  def count(self, targets, weights):
    counts = np.bincount(targets.ravel(), weights.ravel(), minlength=VOCAB)
    return counts.astype(self._dtype)

  def slow(self, step, estimator, aggregation):
    """The normalised gradient from the definition."""
    pairs, denominator = coefficients(step, estimator, aggregation)
    total = np.zeros((2, VOCAB))
    for t, coefficient in pairs:
      n = int(t.loss_mask.sum())
      for token in t.tokens[t.loss_mask]:
        total[0, token] += coefficient
        total[1, token] -= self.objective.kl_coef * aggregation.weight(n)
    return total / denominator
