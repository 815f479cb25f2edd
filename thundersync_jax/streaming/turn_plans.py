"""Which plan a trajectory takes: a small cost model, or a flag.

With l, h, s the seconds of a token forward in the student's layers, of a loss
entry in the heads forward, and of a token in the teacher, n tokens behind a
prompt of p that g members share, m loss entries, `last` tokens of the last
turn; backward costs twice forward:

            while tools run                       when it has ended
  close     0                                     (s + 3 l) (n + p) + 3 h m
  forward   (s + l) (n + p/g) + 3 h m             3 l (n + p/g)
  turn      (s + l) p/g + (s + 3 l) n + 3 h m     3 l (n + p/g - last)

The last to end delays the step by what it leaves for its end. What a plan costs
more than `close` delays the step by as much a trajectory, as far as the learner
has no time to spare. Seconds come from measured launches, lengths and times
from the steps before.
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
  """Of a trajectory, or means: tokens behind the prompt, loss entries, turns,
  last turn, prompt."""

  tokens: float
  entries: float
  turns: float
  last: float
  prompt: float = 0.0


@dataclasses.dataclass(frozen=True)
class Step:
  """What a step leaves: trajectories, members of a group, and the learner's
  spare seconds a trajectory when all of them close whole."""

  trajectories: int = 1
  members: int = 1
  spare_s: float = 0.0


def whole_s(costs: Costs, lengths: Lengths) -> float:
  """Seconds of a trajectory that closes whole, its prompt included."""
  layers = costs.teacher + 3 * costs.layers
  tokens = lengths.tokens + lengths.prompt
  return layers * tokens + 3 * costs.heads * lengths.entries + costs.launch


def delays(
  whole: Costs, pieces: Costs, lengths: Lengths, step: Step
) -> dict[str, float]:
  """Returns plan -> seconds by which it delays a step.

  Args:
    whole: costs of trajectories that close whole.
    pieces: costs of pieces of turns.
    lengths: of the whole trajectory, as expected.
    step: see Step.
  """
  prompt = lengths.prompt / step.members
  tokens = lengths.tokens + prompt
  heads = 3 * pieces.heads * lengths.entries
  launches = pieces.launch * (lengths.turns + 1 / step.members)
  fed = (pieces.teacher + pieces.layers) * tokens + heads + launches
  late = {
    'close': whole_s(whole, lengths),
    'forward': 3 * pieces.layers * tokens + pieces.launch,
    'turn': 3 * pieces.layers * (tokens - lengths.last) + pieces.launch,
  }
  early = {
    'close': 0.0,
    'forward': fed,
    'turn': fed + 2 * pieces.layers * lengths.tokens,
  }
  more = {plan: early[plan] + late[plan] - late['close'] for plan in late}
  return {
    plan: late[plan] + step.trajectories * max(0.0, more[plan] - step.spare_s)
    for plan in late
  }


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

  def add(self, x: float) -> None:
    self.value = (
      x if self.value is None else self.value + 0.05 * (x - self.value)
    )


class Planner:
  """Chooses plans; learns speed and lengths as it goes. Driver thread only.

  Args:
    plan: 'auto', or the plan of all trajectories.
    costs: before anything has been measured.
    plans: that the slab has memory for, beside 'close'.
  """

  def __init__(self, plan: str, costs: Costs, plans: Sequence[str]):
    self._plan = plan
    self.whole = self.pieces = costs
    self._pieces_measured = False
    self._plans = ('close', *plans)
    names = [field.name for field in dataclasses.fields(Lengths)]
    self._means = {name: _Mean() for name in names}
    self._step: Step | None = None  # the one before

  def choose(self, trajectory: Trajectory, ended: bool) -> str:
    """Returns the plan of a trajectory whose first turns have ended."""
    if self._plan != 'auto':
      return self._plan
    if ended or self._step is None:
      return 'close'  # no time to fill is left, or known
    lengths = self._mean_lengths() or lengths_of(trajectory)
    found = delays(self.whole, self.pieces, lengths, self._step)
    return min(self._plans, key=lambda plan: found[plan])

  def ended(self, trajectory: Trajectory) -> None:
    """Takes in the lengths of a trajectory."""
    if trajectory.num_sampled:
      lengths = dataclasses.asdict(lengths_of(trajectory))
      for name, mean in self._means.items():
        mean.add(lengths[name])

  def stepped(
    self, trajectories: int, members: int, first_s: float, rollout_s: float
  ) -> None:
    """Takes in a step.

    Args:
      trajectories: of the step.
      members: of a group.
      first_s: seconds from its start until the first trajectory ended.
      rollout_s: until the last one did.
    """
    lengths = self._mean_lengths()
    if lengths is None:
      return
    close = whole_s(self.whole, lengths)
    # Work that closes whole can start with the first that ends.
    spare = max(rollout_s / trajectories - close, first_s / trajectories)
    self._step = Step(trajectories, members, spare)

  def measured(self, whole: bool, seconds: float, expected_s: float) -> None:
    """Scales costs by what a launch took, to what they said."""
    if expected_s > 0:
      ratio = min(max(seconds / expected_s, 0.1), 10.0)
      factor = 1 + 0.1 * (ratio - 1)
      if whole:
        self.whole = self.whole.scaled(factor)
      # As far as nothing else is known, the machine is as fast for pieces.
      if not whole or not self._pieces_measured:
        self.pieces = self.pieces.scaled(factor)
      self._pieces_measured |= not whole

  def _mean_lengths(self) -> Lengths | None:
    """Means of the trajectories that have ended; None before the first."""
    means = {name: mean.value for name, mean in self._means.items()}
    return None if means['tokens'] is None else Lengths(**means)


def lengths_of(trajectory: Trajectory) -> Lengths:
  """Lengths of a trajectory, observations included."""
  turns = trajectory.turns
  return Lengths(
    len(trajectory.tokens),
    trajectory.num_sampled,
    len(turns),
    len(turns[-1].tokens) if turns else 0,
    len(trajectory.prompt_tokens),
  )
