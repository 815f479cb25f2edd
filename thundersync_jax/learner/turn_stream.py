"""The distillation gradient of a step, from turns as they end.

The interface is that of GradientStream; what a group barrier is there, does
not exist here, since no reward enters:

  queue.put, turn_ended -> settle -> launch, launch, ... -> finish

A trajectory contributes the turns that ended, also when its environment failed
later: they are sampled on-policy and scored. The sum is divided once, by the
number of sampled tokens of the step.
"""

import collections
import dataclasses
import queue as queue_module
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from thundersync_jax.learner import distill_loss, packing, slab
from thundersync_jax.learner import learner as learner_lib
from thundersync_jax.learner.turn_device import Device
from thundersync_jax.streaming import accumulators, turn_gradients, turn_plans
from thundersync_jax.streaming import queue as queue_lib
from thundersync_jax.streaming.turn_pieces import Limits, Piece
from thundersync_jax.types import Item, Trajectory

Tree = Any
GRANULARITIES = ('turn', 'trajectory', 'batch')


class TurnQueue(queue_lib.TrajectoryQueue):
  """Groups of one, for metrics; remembers what came, failures included."""

  def __init__(self):
    super().__init__('trajectory')
    self.opened: list[tuple[int, Sequence[int], int]] = []
    self._arrived = queue_module.SimpleQueue()

  def put(self, trajectory: Trajectory) -> None:
    """See TrajectoryQueue."""
    self._arrived.put(trajectory)
    super().put(trajectory)

  def open(self, step: int, prompt_ids: list[int], group_size: int) -> None:
    """See TrajectoryQueue."""
    self.opened.append((step, prompt_ids, group_size))
    super().open(step, prompt_ids, group_size)

  def arrivals(self) -> list[Trajectory]:
    """What was put since the last call."""
    found = []
    while not self._arrived.empty():
      found.append(self._arrived.get())
    return found


@dataclasses.dataclass(frozen=True)
class _Flight:
  """A program on its way."""

  track: str
  name: str
  start: float
  marker: Any
  expected_s: float  # by the cost model; 0 is not known
  args: dict[str, Any]


class TurnStream:
  """See the module docstring. Driver thread only, but for queue.put.

  Args:
    learner: its packed shapes serve whole trajectories.
    device: slabs and programs.
    limits: see streaming/turn_pieces.py.
    planner: chooses the plan of a trajectory.
    granularity: 'turn', 'trajectory' (plan 'close' for all) or 'batch' (the
      same, when every trajectory of the step has ended).
    pad_id: fills unused columns of packed rows.
    score_track: of the timeline, where the teacher works.
    timeline: records spans, may be None.
    max_in_flight: launches that may wait on the device.
  """

  def __init__(
    self,
    learner: learner_lib.Learner,
    device: Device,
    limits: Limits,
    planner: turn_plans.Planner,
    *,
    granularity: str,
    pad_id: int,
    score_track: str = 'learner',
    timeline=None,
    max_in_flight: int = 2,
  ):
    if granularity not in GRANULARITIES:
      raise ValueError(
        f'granularity={granularity!r} does not exist for distillation: choose '
        f'from {GRANULARITIES}'
      )
    self._learner = learner
    self._device = device
    self._planner = planner
    self._pad_id = pad_id
    self._score_track = score_track
    self._timeline = timeline
    self._max_in_flight = max_in_flight
    self.queue = TurnQueue()
    by_turn = granularity == 'turn'
    self.ledger = turn_gradients.Ledger(
      limits,
      planner.choose if by_turn else lambda trajectory, ended: 'close',
      whole_steps=granularity == 'batch',
    )
    self._flying: dict[str, collections.deque[_Flight]] = {}
    self._last_end = collections.defaultdict(float)
    self._step_start: float | None = None
    # Step -> trajectory -> when it ended.
    self._ends = collections.defaultdict(dict)
    self.launches = 0
    self._peak_open = 0

  @property
  def peaks(self) -> accumulators.Peaks:
    """Trajectories in the slab at once, and what the slabs take."""
    return accumulators.Peaks(self._peak_open, self._device.slab_bytes)

  def sink_kinds(self) -> list[tuple[str, ...]]:
    """None: the device has programs of its own."""
    return []

  def turn_ended(self, trajectory: Trajectory) -> None:
    """Takes a snapshot whose last turn has ended; more may follow."""
    self._open_groups()
    self.ledger.turn_ended(trajectory)

  def settle(self) -> list[queue_lib.Group]:
    """Takes in what has arrived; returns the groups that closed."""
    self._open_groups()
    for trajectory in self.queue.arrivals():
      self.ledger.ended(trajectory)
      # One that a limit ended comes again with its reward.
      if trajectory.reward is not None or trajectory.failure is not None:
        self._planner.ended(trajectory)
      ends = self._ends[trajectory.step]
      ends.setdefault(queue_lib.member_key(trajectory), time.perf_counter())
    return self.queue.drain()

  def launch(self, step: int, params: Tree, ref_params: Tree | None) -> bool:
    """Launches the best work of the step, if there is any and room for it."""
    del ref_params
    if self.poll() >= self._max_in_flight:
      return False
    work = self.ledger.next(step)
    if work is None:
      return False
    run = self._launch_whole if work.items else self._launch_pieces
    self.ledger.launched(work, run(work, params))
    self.launches += 1
    self._peak_open = max(self._peak_open, self.ledger.open_rows)
    return True

  def poll(self, block: bool = False) -> int:
    """Notes programs that have ended; returns how many gradients have not."""
    for track, flights in self._flying.items():
      while flights and (block or flights[0].marker.is_ready()):
        self._landed(track, flights.popleft())
    flights = self._flying.get('learner', ())
    return sum(flight.name == 'gradient' for flight in flights)

  def step_complete(self, step: int) -> bool:
    """Every trajectory of the step is closed, and all its work launched."""
    closed = all(group.closed for group in self.queue.groups(step))
    return closed and self.ledger.complete(step)

  def finish(
    self, step: int
  ) -> tuple[learner_lib.BatchGradient, distill_loss.Stats]:
    """The barrier: returns the step's gradient, and forgets the step."""
    trajectories = self.ledger.retire(step)
    for group in self.queue.groups(step):
      group.launched.update(group.members)
    self.queue.retire(step)
    versions = frozenset(
      int(v)
      for t in trajectories
      for v in np.unique(t.policy_versions[t.loss_mask])
    )
    total, stats = self._device.finish()
    count = float(sum(t.num_sampled for t in trajectories))
    self._peak_open = 0
    self._note_step(step, trajectories)
    return learner_lib.BatchGradient(total, count, versions), stats

  # From here on private.

  def _note_step(self, step, trajectories):
    """Tells the planner how long the step's rollout took."""
    ends = self._ends.pop(step, {}).values()
    if ends and self._step_start is not None:
      members = collections.Counter(t.prompt_id for t in trajectories)
      first, last = (
        max(0.0, end - self._step_start) for end in (min(ends), max(ends))
      )
      self._planner.stepped(len(ends), max(members.values()), first, last)
    self._step_start = None  # until the next step opens

  def _open_groups(self):
    if self.queue.opened and self._step_start is None:
      self._step_start = time.perf_counter()
    for step, prompt_ids, size in self.queue.opened:
      self.ledger.open(step, prompt_ids, size)
    self.queue.opened.clear()

  def _launch_whole(self, work, params) -> list[Item]:
    batch, shape, items = packing.pack(
      work.items, self._learner.shapes, lambda n: 1.0, self._pad_id
    )
    start = time.perf_counter()
    keys = [queue_lib.member_key(item.trajectory) for item in items]
    args = {'plan': 'close', 'keys': keys, 'trajectories': len(items)}
    args |= {'sinks': 1} | dataclasses.asdict(shape)
    scored, done = self._device.whole(batch, params)
    size = batch.tokens.size, batch.targets.size
    self._fly(start, args, self._expected_s(work, *size), done, scored)
    return items

  def _launch_pieces(self, work, params) -> list[Piece]:
    shapes = self._device.shapes
    shapes = shapes.feed if work.kind == 'feed' else shapes.unwind
    shape, pieces = fit(work.pieces, shapes)
    start = time.perf_counter()
    args = {
      'plan': work.plan,
      'work': work.kind,
      'prompt_id': [piece.key[0] for piece in pieces],
      'member': [piece.key[1] for piece in pieces],
      'turn': [piece.turn for piece in pieces],
      'tokens': sum(len(piece.tokens) for piece in pieces),
    }
    size = shape.rows * shape.tokens, shape.rows * shape.targets
    expected = self._expected_s(work, *size)
    if work.kind == 'feed':
      scored, done = self._device.feed(work.plan, shape, pieces, params)
      self._fly(start, args, expected, done, scored)
    elif work.kind == 'feed_prompt':
      done = self._device.feed_prompt(shape, pieces, params)
      self._fly(start, args, expected, done)
    else:
      done = self._device.unwind(work.plan, shape, pieces, params)
      self._fly(start, args, expected, done)
    return pieces

  def _expected_s(self, work, tokens, entries):
    costs = self._planner.whole if work.items else self._planner.pieces
    return turn_plans.work_s(costs, work.kind, work.plan, tokens, entries)

  def _fly(self, start, args, expected_s, done, scored=None):
    launched = [('learner', 'gradient', done, expected_s)]
    if scored is not None:
      launched.insert(0, (self._score_track, 'score', scored, 0.0))
    for track, name, marker, expected in launched:
      flight = _Flight(track, name, start, marker, expected, args)
      self._flying.setdefault(track, collections.deque()).append(flight)

  def _landed(self, track, flight):
    flight.marker.block_until_ready()
    now = time.perf_counter()
    start = min(max(flight.start, self._last_end[track]), now)
    self._last_end[track] = now
    if flight.expected_s:
      whole = flight.args['plan'] == 'close'
      self._planner.measured(whole, now - start, flight.expected_s)
    if self._timeline is not None:
      self._timeline.span(track, flight.name, start, now, **flight.args)


def fit(
  pieces: Sequence[Piece], shapes: Sequence[slab.Shape]
) -> tuple[slab.Shape, list[Piece]]:
  """Returns the shape that costs least a piece, and what it takes.

  The first piece is always taken.

  Raises:
    ValueError: it fits no shape.
  """
  best = None
  for shape in shapes:
    inside = [piece for piece in pieces if _fits(piece, shape)]
    if not inside or inside[0] is not pieces[0]:
      continue
    inside = inside[: shape.rows]
    # A column of K/V costs less than a token, which passes whole layers.
    cost = shape.rows * (shape.tokens + shape.prefix / 8) / len(inside)
    if best is None or cost < best[0]:
      best = cost, shape, inside
  if best is None:
    first = pieces[0]
    raise ValueError(
      f'a piece of {len(first.tokens)} tokens at {first.start} fits none of '
      f'the shapes {list(shapes)}: raise distill.start_tokens'
    )
  return best[1:]


def _fits(piece: Piece, shape: slab.Shape) -> bool:
  return (
    len(piece.tokens) <= shape.tokens
    and piece.start + shape.tokens <= shape.prefix
    and len(piece.sources) <= shape.targets
  )
