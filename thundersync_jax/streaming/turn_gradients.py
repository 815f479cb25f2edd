"""Which pieces of open trajectories may be differentiated, and in what order.

Plans of a trajectory (arXiv 2610.05935), all with the same gradient:

  close    whole, in packed rows, when it has ended
  forward  its turns forward while tools run, backward when it has ended
  turn     its turns forward and backward while tools run; what later turns ask
           of earlier ones is replayed when it has ended, latest first

Going back is called unwinding. The prompt of a group is fed once, and unwound
once when no member is left. Trajectories that find no free row of the slab,
and what comes behind a fork, take `close`. Host side only.
"""

import collections
import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from thundersync_jax.streaming import queue as queue_lib
from thundersync_jax.streaming import turn_pieces
from thundersync_jax.streaming.turn_pieces import Key, Limits, Piece, Place
from thundersync_jax.types import Item, Trajectory

PLANS = ('close', 'forward', 'turn')


@dataclasses.dataclass(frozen=True)
class Work:
  """What one launch may take: pieces of different rows, or whole items.

  Attributes:
    kind: 'unwind', 'unwind_prompt', 'feed_prompt', 'feed' or 'close'.
    plan: of the trajectories.
    pieces: as many as wait, oldest first.
    items: instead of them, for 'close'.
  """

  kind: str
  plan: str
  pieces: tuple[Piece, ...] = ()
  items: tuple[Item, ...] = ()


@dataclasses.dataclass
class _Prompt:
  """The prompt of a group: its row is fed first and unwound last.

  unwound is the position above which it is done, None while it is in use.
  """

  prompt_id: int
  left: int  # members that may still ask something of it
  row: int | None = None
  tokens: np.ndarray | None = None  # without the last one
  fed: int = 0
  unwound: int | None = None

  @property
  def ready(self) -> bool:
    return self.row is None or self.fed == len(self.tokens)

  def piece(self, start: int, end: int) -> Piece:
    place = Place(self.row, self.row, 0)
    key = (self.prompt_id, -1)
    return turn_pieces.bare(key, self.tokens, place, max(start, 0), end)


@dataclasses.dataclass
class _Member:
  """A trajectory, as far as it has come.

  unwound is the position above which its first row is done; None before.
  """

  trajectory: Trajectory
  prompt: _Prompt
  ended: bool = False
  done: bool = False  # nothing of it waits any more
  plan: str | None = None  # None: not begun
  place: Place | None = None  # of its first row, while that is in the slab
  streamed: int = 0  # 1 once its first row has been there
  fed: int = 0
  last_start: int = 0  # of the piece that was fed last
  unwound: int | None = None
  holds_prompt: bool = True

  @property
  def key(self) -> Key:
    return queue_lib.member_key(self.trajectory)

  @property
  def row(self):
    return self.trajectory.rows[0]

  @property
  def all_fed(self) -> bool:
    return self.fed >= turn_pieces.stop(self.row)


class Ledger:
  """The open trajectories of all steps. Driver thread only.

  Args:
    limits: see turn_pieces.py.
    choose: (trajectory, whether it has ended) -> plan.
    whole_steps: start nothing before every trajectory of a step has ended, and
      then in one fixed order (schedule sync).
  """

  def __init__(
    self,
    limits: Limits,
    choose: Callable[[Trajectory, bool], str],
    whole_steps: bool = False,
  ):
    self._limits = limits
    self._choose = choose
    self._whole_steps = whole_steps
    self._free = list(range(limits.max_open))
    self._free_prompts = list(range(limits.max_open, limits.rows - 1))
    self._prompts: dict[int, dict[int, _Prompt]] = {}  # step -> prompt_id
    self._members: dict[int, dict[Key, _Member]] = {}
    self._expected = collections.Counter()  # step -> trajectories
    self.plans = collections.Counter()  # plan -> trajectories, since the start

  @property
  def open_rows(self) -> int:
    """Trajectories that have a row of the slab."""
    return self._limits.max_open - len(self._free)

  # What happens to trajectories.

  def open(self, step: int, prompt_ids: Sequence[int], size: int) -> None:
    """Declares groups of a step."""
    prompts = self._prompts.setdefault(step, {})
    prompts.update({p: _Prompt(p, size) for p in prompt_ids})
    self._members.setdefault(step, {})
    self._expected[step] += len(prompt_ids) * size

  def turn_ended(self, trajectory: Trajectory) -> None:
    """Takes a snapshot whose last turn has ended."""
    member = self._member(trajectory)
    if not member.ended:
      member.trajectory = trajectory

  def ended(self, trajectory: Trajectory) -> None:
    """Takes a trajectory to which no turn will be added, sound or not."""
    member = self._member(trajectory)
    if member.ended:
      return  # finished before, its reward is here now
    member.trajectory, member.ended = trajectory, True
    if not trajectory.num_sampled:
      self._finish(member)

  # What may be launched.

  def next(self, step: int) -> Work | None:
    """Returns the best work of a step, or None when nothing may start.

    First what frees rows, then what fills waits, then whole trajectories.
    """
    members = [m for m in self._members[step].values() if not m.done]
    if self._whole_steps:
      if not self._all_ended(step):
        return None
      members.sort(key=lambda m: m.key)
    for member in members:
      self._begin(member)
    prompts = list(self._prompts[step].values())
    streamed = [m for m in members if m.place is not None]
    return (
      self._unwind(streamed)
      or self._unwind_prompts(prompts)
      or self._feed_prompts(prompts)
      or self._feed(streamed)
      or self._close(members)
    )

  def launched(self, work: Work, taken: Sequence[Piece | Item]) -> None:
    """Marks what a launch has taken of the work."""
    for one in taken:
      if work.kind == 'close':
        self._finish(self._member(one.trajectory))
      elif one.key[1] < 0:
        self._prompt_launched(work, one)
      else:
        self._piece_launched(work, one)

  def complete(self, step: int) -> bool:
    """Everything of the step has ended and has been launched."""
    return (
      self._all_ended(step)
      and all(m.done for m in self._members[step].values())
      and all(p.row is None for p in self._prompts[step].values())
    )

  def retire(self, step: int) -> list[Trajectory]:
    """Forgets a complete step; returns the trajectories of its gradient.

    Raises:
      ValueError: something of the step is open.
    """
    if not self.complete(step):
      raise ValueError(f'step {step} still has open trajectories')
    del self._prompts[step], self._expected[step]
    members = self._members.pop(step)
    return [m.trajectory for _, m in sorted(members.items())]

  def _member(self, trajectory: Trajectory) -> _Member:
    key = queue_lib.member_key(trajectory)
    members = self._members[trajectory.step]
    if key not in members:
      prompt = self._prompts[trajectory.step][trajectory.prompt_id]
      members[key] = _Member(trajectory, prompt)
    return members[key]

  def _all_ended(self, step: int) -> bool:
    ended = sum(m.ended for m in self._members[step].values())
    return ended == self._expected[step]

  # Rows of the slab.

  def _begin(self, member: _Member) -> None:
    """Decides the plan of a trajectory with something to differentiate."""
    trajectory = member.trajectory
    if member.plan is not None or not trajectory.num_sampled:
      return
    member.plan = 'close'
    if len(trajectory.rows) == 1:
      member.plan = self._choose(trajectory, member.ended)
    if member.plan != 'close' and not self._take_rows(member):
      member.plan = 'close'
    self.plans[member.plan] += 1

  def _take_rows(self, member: _Member) -> bool:
    """Finds rows for a trajectory and its prompt, or says no."""
    prompt, known = member.prompt, member.row.prompt_tokens[:-1]
    if not self._free:
      return False
    if prompt.row is None and len(known):
      if not self._free_prompts:
        return False
      prompt.row, prompt.tokens = self._free_prompts.pop(0), known
    row = self._free.pop(0)
    shared = row if prompt.row is None else prompt.row
    member.place = Place(row, shared, len(known))
    member.streamed = 1
    member.fed = member.last_start = len(known)
    return True

  def _leave_slab(self, member: _Member) -> None:
    """Nothing of the trajectory's first row waits any more."""
    self._free.append(member.place.row)
    member.place = None
    self._leave_prompt(member)
    if member.ended and len(member.trajectory.rows) == 1:
      self._finish(member)

  def _finish(self, member: _Member) -> None:
    member.done = True
    self._leave_prompt(member)

  def _leave_prompt(self, member: _Member) -> None:
    prompt = member.prompt
    prompt.left -= member.holds_prompt
    member.holds_prompt = False
    if not prompt.left and prompt.row is not None and prompt.unwound is None:
      prompt.unwound = prompt.fed

  # Kinds of work.

  def _feed(self, streamed: list[_Member]) -> Work | None:
    """The next piece of each trajectory that has one."""
    found = {}
    for member in streamed:
      if member.all_fed or not member.prompt.ready:
        continue
      end = turn_pieces.cut(member.row, member.fed, self._limits)
      piece = turn_pieces.fed(
        member.key, member.row, member.place, member.fed, end
      )
      found.setdefault(member.plan, []).append(piece)
    return _of_oldest('feed', found)

  def _unwind(self, streamed: list[_Member]) -> Work | None:
    """The highest piece of each trajectory that has ended and is fed."""
    found = {}
    for member in streamed:
      # A fork ends the first row, whatever comes behind it.
      over = member.ended or len(member.trajectory.rows) > 1
      if not over or not member.all_fed:
        continue
      if member.unwound is None:
        whole = member.plan == 'forward'
        member.unwound = member.fed if whole else member.last_start
      first = len(member.row.prompt_tokens) - 1
      if member.unwound <= first:
        self._leave_slab(member)
        continue
      start = max(first, member.unwound - self._limits.unwind_tokens)
      ids = np.concatenate([member.row.prompt_tokens, member.row.tokens])
      piece = turn_pieces.bare(
        member.key, ids, member.place, start, member.unwound
      )
      found.setdefault(member.plan, []).append(piece)
    return _of_oldest('unwind', found)

  def _feed_prompts(self, prompts: list[_Prompt]) -> Work | None:
    size = self._limits.unwind_tokens
    pieces = [p.piece(p.fed, p.fed + size) for p in prompts if not p.ready]
    return Work('feed_prompt', '', tuple(pieces)) if pieces else None

  def _unwind_prompts(self, prompts: list[_Prompt]) -> Work | None:
    size = self._limits.unwind_tokens
    pieces = [
      p.piece(p.unwound - size, p.unwound) for p in prompts if p.unwound
    ]
    return Work('unwind_prompt', '', tuple(pieces)) if pieces else None

  def _close(self, members: list[_Member]) -> Work | None:
    """Whole trajectories that have ended, or what is behind their fork."""
    items = []
    for member in members:
      if member.ended and member.place is None and not member.done:
        rest = turn_pieces.behind_fork(member.trajectory, member.streamed)
        items.append(Item(rest))
    return Work('close', 'close', items=tuple(items)) if items else None

  def _piece_launched(self, work: Work, piece: Piece) -> None:
    member = next(
      m[piece.key] for m in self._members.values() if piece.key in m
    )
    if work.kind == 'feed':
      member.fed, member.last_start = piece.stop, piece.start
    else:
      member.unwound = piece.start

  def _prompt_launched(self, work: Work, piece: Piece) -> None:
    wanted = piece.key[0]
    prompt = next(p[wanted] for p in self._prompts.values() if wanted in p)
    if work.kind == 'feed_prompt':
      prompt.fed = piece.stop
      return
    prompt.unwound = piece.start
    if not piece.start:
      self._free_prompts.append(prompt.row)
      prompt.row = None


def _of_oldest(kind: str, found: dict[str, list[Piece]]) -> Work | None:
  """Work of the plan of the oldest trajectory that has any."""
  for plan, pieces in found.items():
    return Work(kind, plan, tuple(pieces))
  return None
