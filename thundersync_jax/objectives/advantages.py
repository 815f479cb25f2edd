"""Advantages from rewards, on the host, in float64.

ThunderSync (arXiv 2610.05935) streams the gradient of a group that is still
open. What it may do follows from three properties of the estimator:

  scope             which rewards an advantage depends on: those of its own
                    trajectory, of its group, or of the whole batch
  affine_in_reward  A_i = alpha r_i + beta with alpha and beta of the scope, so
                    two sums are enough: G1 = sum r_i H_i, G2 = sum H_i
  equal_rewards     equal rewards of a group have equal advantages, so one sum
                    for each distinct reward is enough
"""

import dataclasses
from collections.abc import Callable

import numpy as np

GRPO_EPSILON = 1e-6


@dataclasses.dataclass(frozen=True)
class Estimator:
  """An advantage function and what it needs; see the module docstring.

  Attributes:
    advantages: f64[m] rewards of one scope -> f64[m].
    scope: 'trajectory', 'group' or 'batch'.
    affine_in_reward: two sums represent an open scope.
    equal_rewards: one sum for each distinct reward represents it.
  """

  advantages: Callable[[np.ndarray], np.ndarray]
  scope: str = 'group'
  affine_in_reward: bool = False
  equal_rewards: bool = True

  def __post_init__(self):
    if self.affine_in_reward and not self.equal_rewards:
      raise ValueError(
        'affine_in_reward=True implies equal_rewards=True: equal rewards have '
        'equal advantages alpha r + beta'
      )


def grpo(rewards: np.ndarray) -> np.ndarray:
  """(r - mean) / (std + 1e-6), population std (arXiv 2402.03300).

  Args:
    rewards: f64[G].

  Returns:
    f64[G]; exact zeros where all rewards are equal.
  """
  centred = mean_baseline(rewards)
  return centred / (np.std(rewards) + GRPO_EPSILON)


def mean_baseline(rewards: np.ndarray) -> np.ndarray:
  """r - mean: Dr. GRPO (arXiv 2503.20783), or REINFORCE over a batch.

  Args:
    rewards: f64[m].

  Returns:
    f64[m]; exact zeros where all rewards are equal, so that rounding of the
    mean never turns into a gradient.
  """
  if np.ptp(rewards) == 0:
    return np.zeros_like(rewards)
  return rewards - np.mean(rewards)


def rloo(rewards: np.ndarray) -> np.ndarray:
  """r_i - mean of the others = m/(m-1) (r_i - mean) (arXiv 2402.14740).

  Args:
    rewards: f64[m].

  Returns:
    f64[m]; 0 for a scope of one, which has no others.
  """
  m = len(rewards)
  return mean_baseline(rewards) * (m / (m - 1) if m > 1 else 0.0)


def no_baseline(rewards: np.ndarray) -> np.ndarray:
  """The reward itself, known as soon as it lands.

  Args:
    rewards: f64[m].

  Returns:
    f64[m].
  """
  return np.array(rewards)


ESTIMATORS = {
  'grpo': Estimator(grpo, 'group', affine_in_reward=True),
  'dr_grpo': Estimator(mean_baseline, 'group', affine_in_reward=True),
  'rloo': Estimator(rloo, 'group', affine_in_reward=True),
  'reinforce': Estimator(mean_baseline, 'batch', affine_in_reward=True),
  'reinforce_no_baseline': Estimator(no_baseline, 'trajectory'),
}


def affine_coefficients(
  rewards: np.ndarray, advantages: np.ndarray, rtol: float = 1e-6
) -> tuple[float, float]:
  """Returns alpha, beta with advantages = alpha rewards + beta.

  Args:
    rewards: f64[m].
    advantages: f64[m].
    rtol: largest residual, relative to the largest advantage.

  Raises:
    ValueError: no such pair exists, so two sums would give a wrong gradient.
  """
  low, high = np.argmin(rewards), np.argmax(rewards)
  spread = rewards[high] - rewards[low]
  slope = (advantages[high] - advantages[low]) / spread if spread else 0.0
  offset = advantages[low] - slope * rewards[low]
  residual = np.max(np.abs(slope * rewards + offset - advantages))
  if residual > rtol * max(np.max(np.abs(advantages)), 1e-30):
    raise ValueError(
      f'advantages {advantages} are not affine in rewards {rewards} (residual '
      f'{residual:.3g}): set affine_in_reward=False in the estimator'
    )
  return float(slope), float(offset)
