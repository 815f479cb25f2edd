"""Slots, chunks and environments on a simulated clock.

What rollout/engine.py and rollout/agent.py do, without tokens: a chunk ends
when its longest turn does or after `chunk` steps, a slot stays parked while its
environment answers, prompts of a group are prefilled once, and new weights drop
all K/V. One lockstep engine stands for any number of equal replicas.
"""

import collections
import dataclasses
import heapq
import itertools

import numpy as np

from thundersync_jax.runs import traces

NEVER = float('inf')


@dataclasses.dataclass(frozen=True)
class Settings:
  """Sizes of the engine and seconds of its programs.

  Attributes:
    slots: rows of the decode batch.
    chunk: decode steps between two looks at what has ended.
    decode_s: of a decode step.
    prefill_s, extend_s: of a program, beside its tokens.
    prefill_token_s, extend_token_s: of each token that it is fed.
    prefill_rows, extend_rows: prompts or slots that a program takes.
    extend_tokens: that a program feeds to a slot at most.
    workers: environments that can be at work at once.
  """

  slots: int
  chunk: int
  decode_s: float
  prefill_s: float = 0.0
  extend_s: float = 0.0
  prefill_token_s: float = 0.0
  extend_token_s: float = 0.0
  prefill_rows: int = 4
  extend_rows: int = 4
  extend_tokens: int = 1 << 30
  workers: int = 1 << 30


@dataclasses.dataclass(eq=False)
class Live:
  """A trajectory under way.

  Attributes:
    times: what it is going to do.
    step: that it is sampled for.
    member: its place in its group.
    turn: turns that have ended.
    missing: tokens without K/V behind the prompt.
    prefilled: whether the prompt has K/V.
    sampled: (policy_version, tokens) of all turns so far.
    left: it is out of the engine.
  """

  times: traces.TrajectoryTimes
  step: int
  member: int
  turn: int = 0
  missing: int = 0
  prefilled: bool = False
  sampled: list[tuple[int, int]] = dataclasses.field(default_factory=list)
  left: bool = False
  slot: int = -1

  @property
  def played(self) -> bool:
    """Every turn has ended."""
    return self.turn == len(self.times.turns)


class Busy:
  """Stretches of work in order, none overlapping another."""

  def __init__(self):
    self._stretches: list[tuple[float, float]] = []

  def add(self, start: float, end: float) -> None:
    self._stretches.append((start, end))

  def within(self, start: float, end: float) -> float:
    """Seconds of work in [start, end]; forgets what lies before."""
    kept = [(a, b) for a, b in self._stretches if b > start]
    self._stretches = kept
    return sum(max(0.0, min(b, end) - max(a, start)) for a, b in kept)


class Engine:
  """See the module docstring. Times are seconds from the start of the run."""

  def __init__(self, settings: Settings):
    self._settings = settings
    self.busy = Busy()
    self.version = 0
    self._waiting: collections.deque[Live] = collections.deque()
    self._prompts = collections.Counter()  # of those that wait
    self._prefilled: set[int] = set()
    self._lives: list[Live | None] = [None] * settings.slots
    self._active = np.zeros(settings.slots, bool)
    self._remaining = np.zeros(settings.slots, np.int64)  # of the turn
    self._counted = np.zeros(settings.slots, np.int64)  # remaining, when noted
    self._flight: np.ndarray | None = None  # slots of the chunk under way
    self._flight_steps = 0
    self._flight_end = NEVER
    self._flight_version = 0
    self._order = itertools.count()
    self._answers: list[tuple[float, int, Live]] = []  # heap, by time
    self._calls: collections.deque[Live] = collections.deque()  # no worker yet

  @property
  def decoding(self) -> bool:
    """A chunk is under way, or a slot is ready for one."""
    return self._flight is not None or bool(self._active.any())

  @property
  def chunk_end(self) -> float:
    """When the chunk under way ends; 0 if there is none."""
    return 0.0 if self._flight is None else self._flight_end

  def next_event(self) -> float:
    """When something happens by itself; NEVER if nothing does."""
    answer = self._answers[0][0] if self._answers else NEVER
    return min(self._flight_end, answer)

  def submit(self, live: Live) -> None:
    self._waiting.append(live)
    self._prompts[live.times.prompt_id] += 1

  def publish(self) -> None:
    """New weights: the chunk under way keeps the old ones, no K/V does."""
    if self._flight is None:
      self._note(np.flatnonzero(self._active), self.version)
    self.version += 1
    self._prefilled.clear()
    for live in self._lives:
      if live is not None:
        live.prefilled = False

  def harvest(self, now: float) -> tuple[list[Live], list[Live]]:
    """Takes in what has happened.

    Returns:
      Trajectories of which a turn has ended, and those whose last answer came.
    """
    ended = self._end_chunk() if self._flight_end <= now else []
    answered = []
    while self._answers and self._answers[0][0] <= now:
      live = heapq.heappop(self._answers)[-1]
      if self._calls:
        self._start_call(self._calls.popleft(), now)
      if live.played:
        self._leave(live)
        answered.append(live)
      else:
        self._resume(live)
    for live in ended:
      if live.played and live.times.leaves_early:
        self._leave(live)
      self._call(live, now)
    return ended, answered

  def launch(self, now: float, free_from: float) -> float | None:
    """Starts a chunk if none is under way and a slot is ready.

    Args:
      now: seconds.
      free_from: when the devices are free of other work.

    Returns:
      When it ends, or None.
    """
    if self._flight is not None:
      return None
    self._admit()
    if not self._active.any():
      return None
    settings, slots = self._settings, np.flatnonzero(self._active)
    start = max(now, free_from)
    steps = min(settings.chunk, int(self._remaining[slots].max()))
    end = start + self._feed(slots) + steps * settings.decode_s
    self.busy.add(start, end)
    self._flight, self._flight_steps = slots, steps
    self._flight_end, self._flight_version = end, self.version
    return end

  # Slots.

  def _admit(self) -> None:
    if not self._waiting:
      return
    for slot, live in enumerate(self._lives):
      if live is None and self._waiting:
        live = self._waiting.popleft()
        self._prompts[live.times.prompt_id] -= 1
        live.slot, self._lives[slot] = slot, live
        self._begin_turn(live)

  def _begin_turn(self, live: Live) -> None:
    count = live.times.turns[live.turn].sampled
    self._active[live.slot] = True
    self._remaining[live.slot] = self._counted[live.slot] = count

  def _resume(self, live: Live) -> None:
    live.missing += live.times.turns[live.turn - 1].observed
    self._begin_turn(live)

  def _leave(self, live: Live) -> None:
    if not live.left:
      self._lives[live.slot] = None
      live.left = True

  def _end_chunk(self) -> list[Live]:
    slots, version = self._flight, self._flight_version
    self._flight, self._flight_end = None, NEVER
    self._remaining[slots] -= np.minimum(
      self._flight_steps, self._remaining[slots]
    )
    done = slots[self._remaining[slots] == 0]
    self._note(slots if version != self.version else done, version)
    self._active[done] = False
    ended = [self._lives[slot] for slot in done]
    for live in ended:
      live.turn += 1
    return ended

  def _note(self, slots: np.ndarray, version: int) -> None:
    """Writes down with which weights the slots have sampled since last time."""
    for slot in slots:
      count = int(self._counted[slot] - self._remaining[slot])
      live = self._lives[slot]
      if count:
        live.sampled.append((version, count))
      self._counted[slot] = self._remaining[slot]

  # Programs before a chunk.

  def _feed(self, slots: np.ndarray) -> float:
    """Seconds of the prefill and extend programs that slots need."""
    lives = [self._lives[slot] for slot in slots]
    seconds = self._prefill([live for live in lives if not live.prefilled])
    missing = [live.missing for live in lives if live.missing]
    for live in lives:
      live.missing = 0
    return seconds + self._extend(missing)

  def _prefill(self, lives: list[Live]) -> float:
    settings = self._settings
    lengths = {
      live.times.prompt_id: live.times.prompt_tokens
      for live in lives
      if live.times.prompt_id not in self._prefilled
    }
    for live in lives:
      # What a weight update made of K/V is sampled and observed tokens too.
      sampled = sum(count for _, count in live.sampled)
      observed = sum(t.observed for t in live.times.turns[: live.turn])
      live.missing, live.prefilled = sampled + observed, True
    if lengths:
      spare = -len(lengths) % settings.prefill_rows
      for live in self._waiting if spare else ():
        prompt_id = live.times.prompt_id
        if prompt_id not in self._prefilled and prompt_id not in lengths:
          lengths[prompt_id] = live.times.prompt_tokens
          spare -= 1
        if not spare:
          break
    self._prefilled |= lengths.keys()
    self._prefilled = {p for p in self._prefilled if self._prompts[p]}
    programs = -(-len(lengths) // settings.prefill_rows)
    tokens = sum(lengths.values())
    return programs * settings.prefill_s + tokens * settings.prefill_token_s

  def _extend(self, missing: list[int]) -> float:
    settings, programs = self._settings, 0
    tokens, rest = sum(missing), missing
    while rest:
      programs += -(-len(rest) // settings.extend_rows)
      rest = [n - settings.extend_tokens for n in rest]
      rest = [n for n in rest if n > 0]
    return programs * settings.extend_s + tokens * settings.extend_token_s

  # Environments.

  def _call(self, live: Live, now: float) -> None:
    if len(self._answers) < self._settings.workers:
      self._start_call(live, now)
    else:
      self._calls.append(live)

  def _start_call(self, live: Live, now: float) -> None:
    end = now + live.times.turns[live.turn - 1].wait_s
    heapq.heappush(self._answers, (end, next(self._order), live))
