"""Continuous batching: a FIFO of prompts, a fixed number of slots, chunks.

    engine.publish(params, policy_version)
    engine.submit(Request(...))             for each member of each group
    while work is left:
      for ended in engine.harvest():        turns of the chunk that is ready
        engine.finish(...) or, once its environment has answered, resume(...)
      engine.launch()                       refill, prefill, next chunk; no wait

harvest and launch are apart, so that slots freed in between are refilled at
once. Nothing but launch starts device programs, and only when none is running.
The host knows all tokens (slots.py); the devices hold K/V and no other state.
When more trajectories are ready than slots are free, parked ones make room:
their K/V are moved to the host, or recomputed later (eviction.py).
"""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from thundersync_jax.models import families, transformer
from thundersync_jax.rollout import device as device_lib
from thundersync_jax.rollout import eviction, prompt_cache
from thundersync_jax.rollout import sampling as programs
from thundersync_jax.rollout import slots as slots_lib
from thundersync_jax.rollout.slots import Request
from thundersync_jax.types import EndedTurn, Sampling


@dataclasses.dataclass(frozen=True)
class _Flight:
  """A chunk on the devices, and what was true when it was launched."""

  chunk: programs.Chunk
  active: np.ndarray  # bool[S]; a slot that is finished meanwhile leaves
  policy_version: int
  generation: int


class Engine:
  """The slots of one rollout mesh. Owned by the thread of the driver.

  Args:
    config: the model.
    mesh: the rollout mesh.
    slots: rows of the decode batch. Fixed, because the rounding of a row is
      independent of the other rows only while their number is fixed.
    chunk: decode steps between two harvests.
    max_context: tokens that a trajectory may reach, prompt included.
    cache_buckets: ascending lengths of the cache; the last covers max_context.
      Sums over caches of other lengths may round otherwise (by about 1e-6),
      so with one bucket a trajectory is the same bit for bit in every
      schedule, with several to rounding.
    prompt_buckets: ascending lengths that prompts are padded to, and
      observations (longer ones in pieces).
    stop_ids: tokens that end a turn.
    seed: root of the keys.
    sampling: how tokens are drawn; may be replaced at any time, for the chunks
      launched from then on.
    dtype: of the cache.
    timeline: a runs.timeline.Timeline, or None.
    prefill_rows: prompts that one prefill takes. Waiting prompts fill rows
      that would stay empty.
    extend_rows: slots that one extend takes.
    evict: one of eviction.EVICT: what becomes of the K/V of parked
      trajectories when others are ready; 'never': these wait.

  Raises:
    ValueError: a size below 1, or buckets that do not ascend to max_context.
  """

  def __init__(
    self,
    config: families.ModelConfig,
    mesh: Mesh,
    *,
    slots: int,
    chunk: int,
    max_context: int,
    cache_buckets: Sequence[int],
    prompt_buckets: Sequence[int],
    stop_ids: Sequence[int],
    seed: int,
    sampling: Sampling,
    dtype: str = 'float32',
    timeline=None,
    prefill_rows: int = 4,
    extend_rows: int = 4,
    evict: str = 'auto',
  ):
    if evict not in eviction.EVICT:
      raise ValueError(f'evict={evict!r} does not exist: {eviction.EVICT}')
    _check_sizes(slots, chunk, prefill_rows, extend_rows)
    _check_buckets('cache_buckets', cache_buckets, max_context)
    _check_buckets('prompt_buckets', prompt_buckets, 1)
    self.sampling = sampling
    self._cache_buckets = np.array(cache_buckets)
    self._prompt_buckets = np.array(prompt_buckets)
    self._slots = slots_lib.Slots(slots, max_context, stop_ids)
    self._device = device_lib.Device(
      config,
      mesh,
      slots=slots,
      chunk=chunk,
      stop_ids=np.array(sorted(stop_ids), np.int32),
      seed=seed,
      dtype=dtype,
      prefill_rows=prefill_rows,
      extend_rows=min(extend_rows, slots),
      timeline=timeline,
    )
    self._chunk = chunk
    self._policy_version = self._generation = 0
    self._prompt_cache = prompt_cache.PromptCache(
      self._device, self._slots, self._prompt_buckets
    )
    self._flight = None
    self._evict = evict
    self.costs: eviction.Costs | None = None
    self._leaving: list[slots_lib.Away] = []  # K/V on their way to the host

  @property
  def max_context(self) -> int:
    return self._slots.max_context

  @property
  def params(self) -> transformer.Params | None:
    """The weights published last."""
    return self._device.params

  @property
  def counters(self) -> device_lib.Counters:
    return self._device.counters

  @property
  def waiting(self) -> int:
    """Requests without a slot."""
    return len(self._slots.waiting)

  @property
  def away(self) -> int:
    """Trajectories that made room; they return when they are resumed."""
    return len(self._slots.away)

  @property
  def active(self) -> int:
    """Slots whose turn goes on."""
    return int(self._slots.active.sum())

  @property
  def parked(self) -> int:
    """Slots that wait for resume or finish."""
    return int((self._slots.status == slots_lib.PARKED).sum())

  @property
  def in_flight(self) -> bool:
    """Whether a chunk was launched and not yet harvested."""
    return self._flight is not None

  def publish(self, params: transformer.Params, policy_version: int) -> None:
    """Sets the weights, in decode layout, on the rollout mesh.

    The chunk in flight keeps the weights and the version that it started with.
    K/V of the old weights are dropped: trajectories that go on are recomputed
    from their tokens at the next launch that decodes them.
    """
    self._device.params, self._policy_version = params, policy_version
    self._generation += 1
    self._prompt_cache.clear()
    self._slots.drop_cached()

  def submit(self, request: Request) -> None:
    """Appends a request to those that wait for a slot, first in first out.

    Raises:
      ValueError: the prompt does not fit max_context - 1 or the last of
        prompt_buckets, or this (prompt_id, member) is here already.
    """
    longest = self._prompt_buckets[-1] + 1  # the last token is not prefilled
    if longest < len(request.tokens) < self.max_context:
      raise ValueError(
        f'{request.name}: a prompt of {len(request.tokens)} tokens exceeds the '
        f'longest of prompt_buckets ({longest - 1}, plus one): add a bucket'
      )
    self._slots.submit(request)

  def resume(
    self, prompt_id: int, member: int, tokens: np.ndarray, max_tokens: int
  ) -> None:
    """Appends an observation (i32[n], may be empty) and begins a new turn.

    Raises:
      ValueError: no turn of this trajectory is parked, or the observation
        leaves no room to sample before max_context.
    """
    self._slots.resume(prompt_id, member, tokens, max_tokens)

  def fork(
    self, prompt_id: int, member: int, tokens: np.ndarray, max_tokens: int
  ) -> None:
    """Begins a new turn behind `tokens` (i32[n]) in the place of all before.

    K/V of what both begin with are kept. The new row has keys of its own.

    Raises:
      ValueError: no turn of this trajectory is parked, or the tokens leave no
        room to sample before max_context.
    """
    self._slots.fork(prompt_id, member, tokens, max_tokens)

  def finish(self, prompt_id: int, member: int) -> None:
    """Forgets a trajectory in any state, waiting and decoding ones too.

    Raises:
      ValueError: it is not here.
    """
    slot = self._slots.finish(prompt_id, member)
    if slot is not None and self._flight is not None:
      self._flight.active[slot] = False

  def harvest(self, block: bool = False) -> list[EndedTurn]:
    """Takes in the chunk in flight if it is ready, or waits for it.

    Returns the turns that ended, in the order of their slots; these are parked
    with their K/V until resume or finish.
    """
    self._device.record_spans(block)
    flight = self._flight
    if flight is None or not (block or flight.chunk.counts.is_ready()):
      return []
    self._flight = None
    chunk = jax.device_get(flight.chunk)
    self._take_leaving()
    counts = np.where(flight.active, chunk.counts, 0)
    self._slots.record(
      chunk.tokens, chunk.logprobs, counts, flight.policy_version
    )
    if flight.generation == self._generation:
      self._slots.cached[flight.active] = self._slots.length[flight.active] - 1
    self.counters.tokens += int(counts.sum())
    self.counters.row_steps += int(chunk.steps) * self._slots.count
    ended = np.flatnonzero(flight.active & ~chunk.active)
    return [self._slots.park(slot) for slot in ended]

  def launch(self) -> bool:
    """Refills the slots and starts the next chunk, unless one is in flight.

    Returns whether a chunk is in flight. Does not wait for the devices.

    Raises:
      RuntimeError: no weights were published.
    """
    if self._flight is not None:
      return True
    moves = self._slots.admit(evict=self._evict != 'never')
    active = self._slots.active
    if not active.any():
      return False
    if self._device.params is None:
      raise RuntimeError('launch() needs publish(params, policy_version) first')
    for slot, away in moves.left:
      self._take_out(slot, away)
    self._fit_cache()
    for slot, away in moves.returned:
      if away.cached:
        self._device.insert(jax.device_get(away.kv), [(0, slot)])
    self._prompt_cache.fill()
    self._extend_slots()
    self._flight = _Flight(
      self._device.decode(self._slots.table(), self.sampling),
      active,
      self._policy_version,
      self._generation,
    )
    return True

  def warm_up(self, extend: bool = True) -> None:
    """Compiles the programs of every bucket by running them on nothing.

    Args:
      extend: whether to compile those that only later turns, and updates of
        the weights under live slots, need.

    Raises:
      RuntimeError: no weights were published, or trajectories are live.
    """
    if self._device.params is None or self._slots.length.any():
      raise RuntimeError('warm_up() goes between publish() and launch()')
    device = self._device
    kept = device.counters, device.timeline
    device.counters, device.timeline = device_lib.Counters(), None
    for length in map(int, self._cache_buckets):
      for longer in self._cache_buckets[self._cache_buckets > length]:
        device.allocate(length)
        device.grow(int(longer))
      device.allocate(length)
      for bucket in map(int, self._prompt_buckets):
        device.insert(device.prefill([], bucket), [])
        if extend:
          device.extend([], [], [], bucket)
      if extend and self._evict != 'never':
        for held in self._cache_buckets[self._cache_buckets <= length]:
          device.insert(jax.device_get(device.read(0, int(held))), [])
      chunk = device.decode(np.zeros_like(self._slots.table()), self.sampling)
      chunk.counts.block_until_ready()
    if extend and self._evict == 'auto':
      self.costs = eviction.measure(device, int(self._prompt_buckets[-1]))
    device.counters, device.timeline = kept

  def _take_out(self, slot: int, away: slots_lib.Away):
    """Saves the K/V of a slot that is left, or drops them."""
    self.counters.evictions += 1
    if not away.cached:
      return
    length = _bucket(self._cache_buckets, away.cached)
    size = self._device.row_bytes(length)
    if eviction.keeps(self._evict, self.costs, size, away.cached):
      away.kv = self._device.read(slot, length)
      self._leaving.append(away)
    else:
      away.cached = 0

  def _take_leaving(self):
    """Takes K/V off the devices; the programs that read them have ended."""
    for away in self._leaving:
      away.kv = jax.device_get(away.kv)
    self._leaving.clear()

  def _fit_cache(self):
    """Chooses the cache's length; its content moves only to a longer one."""
    slots = self._slots
    last = np.minimum(slots.length - 1 + self._chunk, slots.limit - 1)
    needed = max(last[slots.active].max(), slots.cached.max())
    length = _bucket(self._cache_buckets, needed)
    if not slots.cached.any():
      self._device.allocate(length)
    elif length > self._device.cache_length:
      self._device.grow(length)

  def _extend_slots(self):
    """Feeds what active slots lack, in pieces; each slot chooses its bucket."""
    slots, rows = self._slots, self._device.extend_rows
    while (missing := slots.missing).any():
      lacking = np.flatnonzero(missing)
      counts = np.minimum(missing[lacking], self._prompt_buckets[-1])
      buckets = np.searchsorted(self._prompt_buckets, counts)
      for bucket in np.unique(buckets):
        group, pieces = lacking[buckets == bucket], counts[buckets == bucket]
        for start in range(0, len(group), rows):
          part = group[start : start + rows]
          tokens = [
            slots.uncached(slot, count)
            for slot, count in zip(
              part, pieces[start : start + rows], strict=True
            )
          ]
          length = int(self._prompt_buckets[bucket])
          self._device.extend(part, tokens, slots.cached[part], length)
          slots.cached[part] += pieces[start : start + rows]


def _bucket(buckets: np.ndarray, length: int) -> int:
  return int(buckets[np.searchsorted(buckets, length)])


def _check_sizes(slots, chunk, prefill_rows, extend_rows):
  sizes = {
    'slots': slots,
    'chunk': chunk,
    'prefill_rows': prefill_rows,
    'extend_rows': extend_rows,
  }
  for name, size in sizes.items():
    if size < 1:
      raise ValueError(f'{name}={size} must be at least 1')


def _check_buckets(name, buckets, longest):
  if not buckets or list(buckets) != sorted(set(buckets)) or buckets[0] < 1:
    raise ValueError(f'{name}={tuple(buckets)} must be ascending lengths')
  if buckets[-1] < longest:
    raise ValueError(
      f'{name}={tuple(buckets)}: the last must be at least {longest}'
    )
