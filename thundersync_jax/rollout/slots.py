"""The host's side of the engine: who waits, who has a slot, every token.

  request -> waiting -> slot (ACTIVE <-> PARKED) -> finish
                          | ^
             park, evict  v |  resumed: before new requests, oldest first
                          away

One number a slot says how much of its K/V on the devices is right: `cached`.
It is 0 for a new trajectory, falls short by the observation for a resumed one,
and falls back to 0 when the weights change. A slot may decode when it is
`length - 1`: the last token is always left to the next chunk. So prefill,
continuation and recomputation are one path. Numpy only, nothing a slot in jax.
A trajectory that is away keeps its tokens here, and its K/V where they were
moved, if they were (see engine.py).
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from thundersync_jax.rollout import sampling
from thundersync_jax.types import EndedTurn

FREE, ACTIVE, PARKED = range(3)
Key = tuple[int, int]  # prompt_id, member
_MEMBERS, _ROWS = 1 << 20, 1 << 11


@dataclasses.dataclass(frozen=True)
class Request:
  """One trajectory to start.

  Attributes:
    prompt_id: the draw of a prompt, unique in a run, from 0.
    member: index within the group, from 0.
    step: the optimizer step that it is sampled for, from 0.
    tokens: i32[p], the prompt, at least one token.
    max_tokens: limit of the first turn.
    row: 0, and from 1 on where the trajectory has forked.
  """

  prompt_id: int
  member: int
  step: int
  tokens: np.ndarray
  max_tokens: int
  row: int = 0

  def __post_init__(self):
    if len(self.tokens) < 1:
      raise ValueError(f'{self.name}: a prompt needs at least one token')
    for name, count in (('member', _MEMBERS), ('row', _ROWS)):
      if not 0 <= getattr(self, name) < count:
        raise ValueError(
          f'{self.name}: {name}={getattr(self, name)} must lie in [0, {count})'
        )
    _check_max_tokens(self.name, self.max_tokens)

  @property
  def name(self) -> str:
    return f'prompt_id={self.prompt_id} member={self.member}'

  @property
  def key(self) -> Key:
    return self.prompt_id, self.member

  @property
  def identity(self) -> tuple[int, int, int]:
    """What keys derive from: rows of a trajectory are members of their own."""
    return self.step, self.prompt_id, self.member + _MEMBERS * self.row

  @functools.cached_property
  def prompt(self) -> bytes:
    """i32 tokens as a key: trajectories of equal prompts share its K/V."""
    return np.asarray(self.tokens, np.int32).tobytes()


@dataclasses.dataclass
class Away:
  """A trajectory whose turn has ended and that has left its slot.

  Attributes:
    request: as in Slots.requests.
    tokens: i32[n], all of them so far.
    cached: tokens of which `kv` holds K/V, 0 if they are to be recomputed.
    kv: where the engine keeps K/V, None if it does not.
    turn_end: as in Slots, once it is resumed.
    ready: resumed, so that it wants a slot.
  """

  request: Request
  tokens: np.ndarray
  cached: int
  kv: Any = None
  turn_end: int = 0
  ready: bool = False

  def append(self, tokens: np.ndarray, max_tokens: int) -> None:
    """Begins the next turn."""
    self.tokens = np.r_[self.tokens, tokens].astype(np.int32)
    self.turn_end = len(self.tokens) + max_tokens
    self.ready = True


@dataclasses.dataclass(frozen=True)
class Moves:
  """Who changes places at a launch, with the slots."""

  left: list[tuple[int, Away]]
  returned: list[tuple[int, Away]]


class Slots:
  """Trajectories of the engine: waiting, in slots, or away.

  Args:
    count: number of slots.
    max_context: tokens that a trajectory may reach, prompt included.
    stop_ids: tokens that end a turn.

  Attributes:
    waiting: (prompt_id, member) -> Request, oldest first.
    away: the same -> Away.
    requests: the request of each slot, None for a free one.
    status: i32[S], FREE, ACTIVE (decoding) or PARKED (its turn has ended).
    length: i32[S], tokens of the trajectory so far; 0 in a free slot.
    cached: i32[S], how many of them have K/V of the present weights.
    turn_end: i32[S], length that the turn may reach by its max_tokens.
  """

  def __init__(self, count: int, max_context: int, stop_ids: Sequence[int]):
    self.count = count
    self.max_context = max_context
    self.waiting: dict[Key, Request] = {}
    self.away: dict[Key, Away] = {}
    self.requests: list[Request | None] = [None] * count
    self.status = np.full(count, FREE, np.int32)
    self.length = np.zeros(count, np.int32)
    self.cached = np.zeros(count, np.int32)
    self.turn_end = np.zeros(count, np.int32)
    self._turn_start = np.zeros(count, np.int32)
    self._identity = np.zeros((3, count), np.int32)
    self._slot_of: dict[Key, int] = {}
    self._age: dict[Key, int] = {}  # of those with a slot or away: a number
    self._admitted = 0
    self._stop_ids = frozenset(int(token) for token in stop_ids)
    self._tokens = np.zeros((count, max_context), np.int32)
    self._logprobs = np.zeros((count, max_context), np.float32)
    self._versions = np.zeros((count, max_context), np.int32)

  @property
  def active(self) -> np.ndarray:  # bool[S]
    return self.status == ACTIVE

  @property
  def limit(self) -> np.ndarray:  # i32[S], length at which the turn ends
    return np.minimum(self.turn_end, self.max_context)

  @property
  def missing(self) -> np.ndarray:  # i32[S], tokens without K/V
    return np.where(self.active, self.length - 1 - self.cached, 0)

  def submit(self, request: Request) -> None:
    """Appends a request to the waiting ones; see Engine.submit."""
    key = request.key
    if key in self.waiting or key in self._age:
      raise ValueError(f'{request.name} is waiting or live: finish it first')
    if len(request.tokens) > self.max_context - 1:
      raise ValueError(
        f'{request.name}: a prompt of {len(request.tokens)} tokens leaves no '
        f'room to sample; at most max_context - 1 = {self.max_context - 1} '
        'fit: raise max_context or drop the prompt'
      )
    self.waiting[key] = request

  def admit(self, evict: bool = False) -> Moves:
    """Gives slots to whom is ready: resumed ones oldest first, then requests.

    Args:
      evict: parked trajectories make room, the youngest first.
    """
    ready = [key for key, away in self.away.items() if away.ready]
    ready = sorted(ready, key=self._age.get)
    free = np.flatnonzero(self.status == FREE).tolist()
    left = []
    if evict:
      parked = np.flatnonzero(self.status == PARKED).tolist()
      parked.sort(key=lambda slot: -self._age[self.requests[slot].key])
      short = max(len(ready) + len(self.waiting) - len(free), 0)
      left = [(slot, self._leave(slot)) for slot in parked[:short]]
    free = sorted([*free, *(slot for slot, _ in left)])
    returned = [
      (slot, self._return(slot, key))
      for slot, key in zip(free, ready, strict=False)
    ]
    for slot in free[len(returned) :][: len(self.waiting)]:
      request = self.waiting.pop(next(iter(self.waiting)))
      self._age[request.key] = self._admitted
      self._admitted += 1
      self._enter(slot, request)
      self._append(slot, request.tokens, request.max_tokens)
    return Moves(left, returned)

  def resume(
    self, prompt_id: int, member: int, tokens: np.ndarray, max_tokens: int
  ) -> None:
    """Begins the next turn of a parked trajectory; see Engine.resume."""
    name = self._check_parked(prompt_id, member, max_tokens)
    away = self.away.get((prompt_id, member))
    slot = self._slot_of.get((prompt_id, member))
    length = len(away.tokens) if away else int(self.length[slot])
    total = length + len(tokens)
    if total > self.max_context - 1:
      raise ValueError(
        f'{name}: an observation of {len(tokens)} tokens makes {total}, but '
        f'at most max_context - 1 = {self.max_context - 1} leave room to '
        'sample: finish it, or raise max_context'
      )
    if away:
      away.append(tokens, max_tokens)
    else:
      self._append(slot, tokens, max_tokens)

  def fork(
    self, prompt_id: int, member: int, tokens: np.ndarray, max_tokens: int
  ) -> None:
    """Begins the next turn of a parked one behind other tokens; see Engine."""
    name = self._check_parked(prompt_id, member, max_tokens)
    if not 0 < len(tokens) < self.max_context:
      raise ValueError(
        f'{name}: a context of {len(tokens)} tokens must have 1 to max_context '
        f'- 1 = {self.max_context - 1}: finish it, or raise max_context'
      )
    away = self.away.get((prompt_id, member))
    slot = self._slot_of.get((prompt_id, member))
    old = away.request if away else self.requests[slot]
    new = dataclasses.replace(old, tokens=tokens, row=old.row + 1)
    before = away.tokens if away else self._tokens[slot, : self.length[slot]]
    cached = away.cached if away else self.cached[slot]
    # What both begin with keeps its K/V; the last token is left to decode.
    kept = min(_common(before, tokens), int(cached), len(tokens) - 1)
    if away:
      away.request, away.cached, away.tokens = new, kept, tokens[:0]
      away.append(tokens, max_tokens)
    else:
      self._enter(slot, new)
      self._append(slot, tokens, max_tokens)
      self.cached[slot] = kept

  def finish(self, prompt_id: int, member: int) -> int | None:
    """Forgets a trajectory; returns the slot that this frees, if any."""
    key = prompt_id, member
    if self.waiting.pop(key, None) is not None:
      return None
    if key not in self._age:
      raise ValueError(f'prompt_id={prompt_id} member={member} is not here')
    del self._age[key]
    if self.away.pop(key, None) is not None:
      return None
    slot = self._slot_of[key]
    self._free(slot)
    return slot

  def drop_cached(self) -> None:
    """Forgets all K/V: they are of old weights."""
    self.cached[:] = 0
    for away in self.away.values():
      away.cached, away.kv = 0, None

  def record(
    self,
    tokens: np.ndarray,  # i32[S, chunk]
    logprobs: np.ndarray,  # f32[S, chunk]
    counts: np.ndarray,  # i32[S], 0 where the slot was not decoded
    policy_version: int,
  ) -> None:
    """Appends what a chunk sampled."""
    rows, columns = np.nonzero(np.arange(tokens.shape[1]) < counts[:, None])
    places = self.length[rows] + columns
    self._tokens[rows, places] = tokens[rows, columns]
    self._logprobs[rows, places] = logprobs[rows, columns]
    self._versions[rows, places] = policy_version
    self.length += counts

  def park(self, slot: int) -> EndedTurn:
    """Ends a slot's turn and returns its sampled part."""
    self.status[slot] = PARKED
    start, end = self._turn_start[slot], self.length[slot]
    if int(self._tokens[slot, end - 1]) in self._stop_ids:
      reason = 'stop'
    else:
      reason = 'length' if end == self.turn_end[slot] else 'context'
    request = self.requests[slot]
    return EndedTurn(
      prompt_id=request.prompt_id,
      member=request.member,
      tokens=self._tokens[slot, start:end].copy(),
      logprobs=self._logprobs[slot, start:end].copy(),
      policy_versions=self._versions[slot, start:end].copy(),
      finish_reason=reason,
    )

  def table(self) -> np.ndarray:  # i32[len(sampling.ROWS), S]
    """What a decode chunk needs to know."""
    step, prompt_id, member = self._identity
    position = np.maximum(self.length - 1, 0)
    rows = {
      'token': self._tokens[np.arange(self.count), position],
      'position': position,
      'limit': self.limit,
      'active': self.active,
      'step': step,
      'prompt_id': prompt_id,
      'member': member,
    }
    return np.stack([rows[name] for name in sampling.ROWS]).astype(np.int32)

  def uncached(self, slot: int, count: int) -> np.ndarray:
    """Returns the first `count` tokens of a slot that lack K/V."""
    start = self.cached[slot]
    return self._tokens[slot, start : start + count]

  def _check_parked(self, prompt_id, member, max_tokens) -> str:
    key = prompt_id, member
    name = f'prompt_id={prompt_id} member={member}'
    away, slot = self.away.get(key), self._slot_of.get(key)
    parked = slot is not None and self.status[slot] == PARKED
    if not parked and (away is None or away.ready):
      raise ValueError(f'{name} has no parked slot to resume')
    _check_max_tokens(name, max_tokens)
    return name

  def _enter(self, slot, request):
    self._slot_of[request.key] = int(slot)
    self.requests[slot] = request
    self._identity[:, slot] = request.identity
    self.cached[slot] = self.length[slot] = 0

  def _free(self, slot):
    del self._slot_of[self.requests[slot].key]
    self.requests[slot] = None
    self.status[slot] = FREE
    self.length[slot] = self.cached[slot] = 0

  def _leave(self, slot) -> Away:
    request, end = self.requests[slot], self.length[slot]
    away = Away(
      request,
      self._tokens[slot, :end].copy(),
      int(self.cached[slot]),
    )
    self._free(slot)
    self.away[request.key] = away
    return away

  def _return(self, slot, key) -> Away:
    away = self.away.pop(key)
    self._enter(slot, away.request)
    self._append(slot, away.tokens, away.turn_end - len(away.tokens))
    self.cached[slot] = away.cached
    return away

  def _append(self, slot, tokens, max_tokens):
    start = self.length[slot]
    end = start + len(tokens)
    self._tokens[slot, start:end] = tokens
    self.length[slot] = self._turn_start[slot] = end
    self.turn_end[slot] = end + max_tokens
    self.status[slot] = ACTIVE


def _check_max_tokens(name, max_tokens):
  if max_tokens < 1:
    raise ValueError(f'{name}: max_tokens={max_tokens} must be at least 1')


def _common(one, other) -> int:
  """How many tokens both begin with."""
  length = min(len(one), len(other))
  different = np.flatnonzero(one[:length] != other[:length])
  return int(different[0]) if len(different) else length
