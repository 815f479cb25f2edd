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
    rollout_s: until the last environment was done.
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


@dataclasses.dataclass(frozen=True)
class Releases:
  """When the work of a step became possible, on the timeline's clock.

  Attributes:
    times: key -> seconds: of a trajectory (prompt_id, member), of a turn
      (prompt_id, member, turn from 0); of what members share, member is -1.
    answered: when the last environment was done.
  """

  times: dict[Key, float]
  answered: float


def of_step(record: timeline_lib.StepSpans, releases: Releases) -> Bound:
  """The bound of a complete step.

  Args:
    record: its spans; those of gradients say what they are of.
    releases: of all its work.

  Raises:
    ValueError: the step is not complete, or a gradient is of unknown work.
  """
  if record.end is None:
    raise ValueError(f'step {record.step} goes on: it has no length to bound')
  starts, took, after = [], [], 0.0
  for span in record.spans:
    seconds = span.end - span.start
    if span.name in ('barrier', 'publish'):
      after += seconds
    if span.track != 'learner' or span.name not in ('gradient', 'score'):
      continue
    found = keys(span)
    for key in found:
      if key not in releases.times:
        raise ValueError(f'step {record.step}: no release of {key} is known')
      starts.append(max(releases.times[key] - record.start, 0.0))
      took.append(seconds / len(found))
  last = max(releases.answered - record.start, 0.0)
  return Bound(
    record.end - record.start,
    # Rewards that no gradient waits for have to come all the same.
    max(makespan(starts, took), last) + after,
    last,
    sum(took),
  )


def keys(span: timeline_lib.Span) -> list[Key]:
  """The work behind a gradient span: trajectories, or pieces of turns."""
  args = span.args
  if 'keys' in args:
    return [tuple(key) for key in args['keys']]
  pieces = zip(args['prompt_id'], args['member'], args['turn'], strict=True)
  # What goes back through a trajectory waits for all of it.
  fed = args['work'] in ('feed', 'feed_prompt')
  return [piece if fed else piece[:2] for piece in pieces]
