"""How short a streamed step could have been, from what it recorded.

Work i is released at r_i and takes the learner p_i. Whatever the order, a
learner that never idles while work waits is done at

  max over i of  r_i + sum over j with r_j >= r_i of p_j

and no learner is done before. The barrier and the publication come after.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from thundersync_jax.runs import timeline as timeline_lib

Key = tuple[int, ...]  # prompt_id, member and, for a turn, its number


@dataclasses.dataclass(frozen=True)
class Bound:
  """The bound of a step and what it is made of, in seconds.

  Attributes:
    step_s: as measured.
    bound_s: the least that it could have been: makespan, barrier and publish.
    rollout_s: until the last work was released.
    learner_s: all gradients.
  """

  step_s: float
  bound_s: float
  rollout_s: float
  learner_s: float

  @property
  def ratio(self) -> float:
    return self.step_s / self.bound_s


def makespan(
  released: Sequence[float],  # f64[n], seconds
  seconds: Sequence[float],  # f64[n]
) -> float:
  """When a learner that never waits without need has done everything.

  Args:
    released: from when on each piece of work may start.
    seconds: that it takes.

  Returns:
    Seconds on the clock of `released`; 0 without any work.
  """
  order = np.argsort(np.asarray(released, float), kind='stable')
  starts = np.asarray(released, float)[order]
  rest = np.cumsum(np.asarray(seconds, float)[order][::-1])[::-1]
  return float(np.max(starts + rest, initial=0.0))


def of_step(
  record: timeline_lib.StepSpans, released: dict[Key, float]
) -> Bound:
  """The bound of a complete step.

  Args:
    record: its spans; those of gradients carry the `keys` of their items.
    released: key -> when its gradient became possible, on the timeline's clock.

  Raises:
    ValueError: the step is not complete, or a gradient is of unknown work.
  """
  if record.end is None:
    raise ValueError(f'step {record.step} goes on: it has no length to bound')
  took: dict[Key, float] = {}
  after = 0.0
  for span in record.spans:
    if span.name in ('barrier', 'publish'):
      after += span.end - span.start
    if span.name != 'gradient':
      continue
    keys = [tuple(key) for key in span.args['keys']]
    for key in keys:
      if key not in released:
        raise ValueError(f'step {record.step}: no release of {key} is known')
      share = (span.end - span.start) / len(keys)
      took[key] = took.get(key, 0.0) + share
  starts = [released[key] - record.start for key in took]
  done = makespan(starts, list(took.values()))
  # Work without a gradient (no spread) has to end all the same.
  last = max(released.values(), default=record.start) - record.start
  return Bound(
    record.end - record.start,
    max(done, last) + after,
    last,
    sum(took.values()),
  )
