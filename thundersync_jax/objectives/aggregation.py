"""How token terms become one number: reward-free weights, one denominator.

The batch objective is sum_i sum_t w_i A_i log pi(a_t) / denominator. Weights
are local to a trajectory, so they can stream; the denominator is known at the
barrier and divides once. So the gradient never depends on micro-batches.
"""

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Aggregation:
  """Weights of tokens, and what they are divided by.

  Attributes:
    weight: sampled tokens of a trajectory -> weight of each of its tokens.
    share: sampled tokens, constant -> what it adds to the denominator.
  """

  weight: Callable[[int], float]
  share: Callable[[int, float], float]


AGGREGATIONS = {
  # Mean over the batch's tokens (DAPO, arXiv 2503.14476).
  'token': Aggregation(lambda n: 1.0, lambda n, constant: float(n)),
  # Mean over trajectories of the mean over tokens (GRPO, arXiv 2402.03300).
  'sequence': Aggregation(lambda n: 1.0 / max(n, 1), lambda n, constant: 1.0),
  # Sum over tokens over a constant a trajectory (Dr. GRPO, arXiv 2503.20783).
  'constant': Aggregation(lambda n: 1.0, lambda n, constant: constant),
}
