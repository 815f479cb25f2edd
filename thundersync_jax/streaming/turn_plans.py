"""Which plan a trajectory takes: a small cost model, or a flag.

With l, h, s the seconds of a token forward in the student's layers, of a loss
entry in the heads forward, and of a token in the teacher, n tokens, m loss
entries, `last` tokens of the last turn; backward costs twice forward:

            while tools run                   when it has ended
  close     0                                 (s + 3 l) n + 3 h m
  forward   (s + l) n + 3 h m                 3 l n
  turn      (s + 3 l) n + 3 h m               3 l (n - last)

What does not fit into the waits counts as well. Seconds come from measured
launches, lengths and waits from the trajectories that have ended. A wait is the
time between the ends of two turns: the tool's, the slot's and the next turn's.
"""

import dataclasses
from collections.abc import Sequence

from thundersync_jax.types import Trajectory


@dataclasses.dataclass(frozen=True)
class Costs:
  """Seconds: of a token in the student's layers and in the teacher, of a loss
  entry in both heads, all forward; and of a launch beside that."""

  layers: float
  teacher: float
  heads: float
  launch: float = 0.0

  def scaled(self, factor: float) -> 'Costs':
    """All of them, `factor` times as long."""
    values = dataclasses.asdict(self)
    return Costs(**{k: factor * v for k, v in values.items()})


@dataclasses.dataclass(frozen=True)
class Lengths:
  """Of a trajectory, or means: tokens, loss entries, turns, last turn."""

  tokens: float
  entries: float
  turns: float
  last: float


def delays(costs: Costs, lengths: Lengths, wait_s: float) -> dict[str, float]:
  """Returns plan -> seconds of learner work that tool waits do not hide.

  Args:
    costs: see Costs.
    lengths: of the whole trajectory, as expected.
    wait_s: seconds before it ends in which the learner is idle.
  """
  layers = costs.layers * lengths.tokens
  scored = costs.teacher * lengths.tokens + 3 * costs.heads * lengths.entries
  launches = costs.launch * lengths.turns
  early = {
    'close': 0.0,
    'forward': scored + layers + launches,
    'turn': scored + 3 * layers + launches,
  }
  before_last = max(lengths.tokens - lengths.last, 0.0)
  late = {
    'close': scored + 3 * layers + costs.launch,
    'forward': 3 * layers + costs.launch,
    'turn': 3 * costs.layers * before_last + costs.launch,
  }
  return {k: late[k] + max(0.0, early[k] - wait_s) for k in early}


def work_s(
  costs: Costs, kind: str, plan: str, tokens: int, entries: int
) -> float:
  """Seconds of one gradient program, scoring not included.

  Args:
    costs: see Costs.
    kind, plan: see turn_gradients.Work.
    tokens, entries: of the program's shape, padding included.
  """
  forward_only = kind == 'feed_prompt' or (kind, plan) == ('feed', 'forward')
  layers = costs.layers * tokens * (1 if forward_only else 3)
  return layers + 3 * costs.heads * entries + costs.launch


@dataclasses.dataclass
class _Mean:
  """A running mean that forgets."""

  value: float | None = None

  def add(self, x: float, rate: float = 0.05) -> None:
    self.value = (
      x if self.value is None else self.value + rate * (x - self.value)
    )


class Planner:
  """Chooses plans; learns lengths and waits as it goes. Driver thread only.

  Args:
    plan: 'auto', or the plan of all trajectories.
    costs: before anything has been measured.
    plans: that the slab has memory for, beside 'close'.
  """

  def __init__(self, plan: str, costs: Costs, plans: Sequence[str]):
    self._plan = plan
    self.costs = costs
    self._plans = ('close', *plans)
    self._means = {
      name: _Mean() for name in ('tokens', 'entries', 'turns', 'last')
    }
    self._wait, self._idle = _Mean(), _Mean()

  def choose(self, trajectory: Trajectory, ended: bool) -> str:
    """Returns the plan of a trajectory whose first turns have ended."""
    if self._plan != 'auto':
      return self._plan
    if ended:
      return 'close'  # no wait is left to fill
    lengths = self.expected(trajectory)
    wait = (self._wait.value or 0.0) * lengths.turns
    idle = 1.0 if self._idle.value is None else self._idle.value
    found = delays(self.costs, lengths, wait * idle)
    return min(self._plans, key=lambda plan: found[plan])

  def expected(self, trajectory: Trajectory) -> Lengths:
    """Means of those that have ended, or this one's as far as it is."""
    if self._means['tokens'].value is None:
      return lengths_of(trajectory)
    return Lengths(**{k: mean.value for k, mean in self._means.items()})

  def ended(self, trajectory: Trajectory) -> None:
    """Takes in the lengths of a trajectory."""
    if trajectory.num_sampled:
      lengths = dataclasses.asdict(lengths_of(trajectory))
      for name, mean in self._means.items():
        mean.add(lengths[name])

  def waited(self, seconds: float) -> None:
    """Takes in the time from the end of a turn to that of the next."""
    self._wait.add(seconds)

  def measured(self, seconds: float, expected_s: float) -> None:
    """Scales the costs by what a launch took, to what they said."""
    if expected_s > 0:
      factor = 1 + 0.1 * (seconds / expected_s - 1)
      self.costs = self.costs.scaled(max(factor, 0.5))

  def idle(self, share: float) -> None:
    """Takes in the share of a step in which the learner had no work."""
    self._idle.add(share, rate=0.5)


def lengths_of(trajectory: Trajectory) -> Lengths:
  """Lengths behind the prompt, which is fed once for all members."""
  turns = trajectory.turns
  return Lengths(
    len(trajectory.tokens),
    trajectory.num_sampled,
    len(turns),
    len(turns[-1].tokens) if turns else 0,
  )
