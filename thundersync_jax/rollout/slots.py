"""The host's side of the engine: who waits, who has a slot, every token.

One number a slot says how much of its K/V on the devices is right: `cached`.
It is 0 for a new trajectory, falls short by the observation for a resumed one,
and falls back to 0 when the weights change. A slot may decode when it is
`length - 1`: the last token is always left to the next chunk. So prefill,
continuation and recomputation are one path. Numpy only, nothing a slot in jax.
"""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from thundersync_jax.rollout import sampling
from thundersync_jax.types import EndedTurn

FREE, ACTIVE, PARKED = range(3)


@dataclasses.dataclass(frozen=True)
class Request:
  """One trajectory to start.

  Attributes:
    prompt_id: the draw of a prompt, unique in a run, from 0.
    member: index within the group, from 0.
    step: the optimizer step that it is sampled for, from 0.
    tokens: i32[p], the prompt, at least one token.
    max_tokens: limit of the first turn.
  """

  prompt_id: int
  member: int
  step: int
  tokens: np.ndarray
  max_tokens: int

  def __post_init__(self):
    if len(self.tokens) < 1:
      raise ValueError(f'{self.name}: a prompt needs at least one token')
    _check_max_tokens(self.name, self.max_tokens)

  @property
  def name(self) -> str:
    return f'prompt_id={self.prompt_id} member={self.member}'

  @functools.cached_property
  def prompt(self) -> bytes:
    """i32 tokens as a key: trajectories of equal prompts share its K/V."""
    return np.asarray(self.tokens, np.int32).tobytes()


class Slots:
  """Trajectories of the engine: waiting ones in order, live ones in slots.

  Args:
    count: number of slots.
    max_context: tokens that a trajectory may reach, prompt included.
    stop_ids: tokens that end a turn.

  Attributes:
    waiting: (prompt_id, member) -> Request, oldest first.
    requests: the request of each slot, None for a free one.
    status: i32[S], FREE, ACTIVE (decoding) or PARKED (its turn has ended).
    length: i32[S], tokens of the trajectory so far; 0 in a free slot.
    cached: i32[S], how many of them have K/V of the present weights.
    turn_end: i32[S], length that the turn may reach by its max_tokens.
  """

  def __init__(self, count: int, max_context: int, stop_ids: Sequence[int]):
    self.count = count
    self.max_context = max_context
    self.waiting: dict[tuple[int, int], Request] = {}
    self.requests: list[Request | None] = [None] * count
    self.status = np.full(count, FREE, np.int32)
    self.length = np.zeros(count, np.int32)
    self.cached = np.zeros(count, np.int32)
    self.turn_end = np.zeros(count, np.int32)
    self._turn_start = np.zeros(count, np.int32)
    self._identity = np.zeros((3, count), np.int32)
    self._slot_of: dict[tuple[int, int], int] = {}
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
    key = request.prompt_id, request.member
    if key in self.waiting or key in self._slot_of:
      raise ValueError(f'{request.name} is waiting or live: finish it first')
    if len(request.tokens) > self.max_context - 1:
      raise ValueError(
        f'{request.name}: a prompt of {len(request.tokens)} tokens leaves no '
        f'room to sample; at most max_context - 1 = {self.max_context - 1} '
        'fit: raise max_context or drop the prompt'
      )
    self.waiting[key] = request

  def admit(self) -> None:
    """Gives the free slots to the oldest requests."""
    free = np.flatnonzero(self.status == FREE)
    for slot in free[: len(self.waiting)]:
      key = next(iter(self.waiting))
      request = self.waiting.pop(key)
      self._slot_of[key] = int(slot)
      self.requests[slot] = request
      self._identity[:, slot] = request.step, *key
      self.cached[slot] = self.length[slot] = 0
      self._append(slot, request.tokens, request.max_tokens)

  def resume(
    self, prompt_id: int, member: int, tokens: np.ndarray, max_tokens: int
  ) -> None:
    """Begins the next turn of a parked slot; see Engine.resume."""
    slot = self._slot_of.get((prompt_id, member))
    name = f'prompt_id={prompt_id} member={member}'
    if slot is None or self.status[slot] != PARKED:
      raise ValueError(f'{name} has no parked slot to resume')
    _check_max_tokens(name, max_tokens)
    total = int(self.length[slot]) + len(tokens)
    if total > self.max_context - 1:
      raise ValueError(
        f'{name}: an observation of {len(tokens)} tokens makes {total}, but '
        f'at most max_context - 1 = {self.max_context - 1} leave room to '
        'sample: finish it, or raise max_context'
      )
    self._append(slot, tokens, max_tokens)

  def finish(self, prompt_id: int, member: int) -> int | None:
    """Forgets a trajectory; returns the slot that this frees, if any."""
    key = prompt_id, member
    if self.waiting.pop(key, None) is not None:
      return None
    if key not in self._slot_of:
      raise ValueError(f'prompt_id={prompt_id} member={member} is not here')
    slot = self._slot_of.pop(key)
    self.requests[slot] = None
    self.status[slot] = FREE
    self.length[slot] = self.cached[slot] = 0
    return slot

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
