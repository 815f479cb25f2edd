"""What the engine keeps on the devices: weights and the cache of the slots.

One method a program of sampling.py. Each pads its rows to fixed shapes, starts
the program and returns at once; `record_spans` reports when they have ended.
"""

import collections
import dataclasses

import jax
import numpy as np
from jax.sharding import Mesh

from thundersync_jax import mesh as mesh_lib
from thundersync_jax.models import families, transformer
from thundersync_jax.rollout import sampling as programs
from thundersync_jax.types import Sampling


@dataclasses.dataclass
class Counters:
  """What an engine has done since it was made; padding is not counted.

  Attributes:
    tokens: sampled tokens.
    prompt_tokens: prefilled tokens, those of a shared prompt once.
    extend_tokens: tokens fed behind a prompt: observations, and trajectories
      recomputed after an update of the weights.
    row_steps: rows times steps of decode chunks; tokens / row_steps is the
      share of the slots that were in use.
    launches: device programs.
    evictions: parked trajectories that made room for others.
  """

  tokens: int = 0
  prompt_tokens: int = 0
  extend_tokens: int = 0
  row_steps: int = 0
  launches: int = 0
  evictions: int = 0


class Device:
  """Weights, cache and programs on one mesh; see Engine for the arguments."""

  def __init__(
    self,
    config: families.ModelConfig,
    mesh: Mesh,
    *,
    slots: int,
    chunk: int,
    stop_ids: np.ndarray,  # i32[n]
    seed: int,
    dtype: str,
    prefill_rows: int,
    extend_rows: int,
    timeline=None,
  ):
    self.params: transformer.Params | None = None
    self.cache_length = 0  # 0: there is no cache
    self.counters = Counters()
    self.timeline = timeline
    self.prefill_rows = prefill_rows
    self.extend_rows = extend_rows
    self._config, self._mesh, self._dtype = config, mesh, dtype
    self._slots, self._chunk = slots, chunk
    self._stop_ids = stop_ids
    root = programs.root_key(seed)
    self._root = jax.device_put(root, mesh_lib.sharding(mesh))
    self._cache = None
    self._marks = collections.deque()  # (span, time of dispatch, array)
    self._busy_until = 0.0

  def allocate(self, length: int) -> None:
    """Makes a cache of this length, of any content."""
    if length == self.cache_length:
      return
    self._cache = None  # frees the old one first
    self._cache = programs.empty_cache(
      self._config, self._mesh, self._slots, length, self._dtype
    )
    self.cache_length = length
    self.counters.launches += 1

  def grow(self, length: int) -> None:
    """Lengthens the cache array by array, so that only one is there twice."""
    arrays, tree = jax.tree.flatten(self._cache)
    self._cache = None
    arrays.reverse()
    shapes = jax.eval_shape(
      lambda: transformer.empty_cache(
        self._config, self._slots, length, self._dtype
      )
    )
    longer = [
      programs.grow(self._mesh, arrays.pop(), leaf.shape)
      for leaf in jax.tree.leaves(shapes)
    ]
    self._cache = jax.tree.unflatten(tree, longer)
    self.cache_length = length
    self.counters.launches += len(longer)

  def prefill(
    self,
    prompts: list[np.ndarray],  # at most prefill_rows, each i32[<= length]
    length: int,
  ) -> transformer.Cache:
    """K/V of prompts, one a row."""
    tokens = _padded(prompts, (self.prefill_rows, length))
    buffer = programs.prefill(
      self._config, self._mesh, self.params, tokens, self._dtype
    )
    self.counters.prompt_tokens += sum(map(len, prompts))
    self._launched('prefill', buffer[-1][0])
    return buffer

  def insert(
    self,
    buffer: transformer.Cache,
    pairs: list[tuple[int, int]],  # row of buffer, slot
  ) -> None:
    """Copies rows of a prefill to slots."""
    self._cache = programs.insert(
      self._mesh,
      self._cache,
      buffer,
      _padded(pairs, (self._slots, 2)),
      np.int32(len(pairs)),
    )
    self.counters.launches += 1

  def read(self, slot: int, length: int) -> transformer.Cache:
    """K/V of a slot, as a prefill of one row; on their way to the host."""
    row = programs.read(
      self._config, self._mesh, self._cache, np.int32(slot), length
    )
    for leaf in jax.tree.leaves(row):
      leaf.copy_to_host_async()
    self._launched('evict', row[-1][0])
    return row

  def row_bytes(self, length: int) -> int:
    """Bytes of K/V of so many tokens."""
    shapes = jax.eval_shape(
      lambda: transformer.empty_cache(self._config, 1, length, self._dtype)
    )
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))

  def block(self) -> None:
    """Waits for the programs that change the cache."""
    jax.block_until_ready(self._cache)

  def extend(
    self,
    slots: np.ndarray,  # i[n], n <= extend_rows
    tokens: list[np.ndarray],  # n arrays i32[<= length]
    starts: np.ndarray,  # i[n]
    length: int,
  ) -> None:
    """Feeds tokens to slots from the given positions on."""
    numbers = np.full(self.extend_rows, self._slots, np.int32)
    numbers[: len(slots)] = slots
    padded_starts = np.zeros(self.extend_rows, np.int32)
    padded_starts[: len(slots)] = starts
    self._cache, mark = programs.extend(
      self._config,
      self._mesh,
      self.params,
      self._cache,
      numbers,
      _padded(tokens, (self.extend_rows, length)),
      padded_starts,
    )
    self.counters.extend_tokens += sum(map(len, tokens))
    self._launched('extend', mark)

  def decode(
    self,
    table: np.ndarray,  # i32[len(programs.ROWS), slots]
    sampling: Sampling,
  ) -> programs.Chunk:
    """Starts a chunk for all slots."""
    self._cache, chunk = programs.decode_chunk(
      self._config,
      self._mesh,
      self.params,
      self._cache,
      table,
      self._root,
      self._stop_ids,
      np.float32(sampling.temperature),
      np.int32(sampling.top_k) if sampling.top_k else None,
      np.float32(sampling.top_p) if sampling.top_p < 1 else None,
      chunk=self._chunk,
    )
    self._launched('decode', chunk.counts)
    return chunk

  def record_spans(self, block: bool) -> None:
    """Reports programs that have ended, in order; `block` waits for all.

    A program starts when the one before it has ended.
    """
    while self._marks and (block or self._marks[0][-1].is_ready()):
      name, start, array = self._marks.popleft()
      array.block_until_ready()
      end = self.timeline.now()
      self.timeline.span('rollout', name, max(start, self._busy_until), end)
      self._busy_until = end

  def _launched(self, name, array):
    self.counters.launches += 1
    if self.timeline is not None:
      self._marks.append((name, self.timeline.now(), array))


def _padded(rows, shape):  # i32[shape]
  padded = np.zeros(shape, np.int32)
  for i, row in enumerate(rows):
    padded[i, : len(row)] = row
  return padded
