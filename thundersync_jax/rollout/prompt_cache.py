"""K/V of prompts: computed once for all members of a group, then copied.

They stay while a request with this prompt waits, or while a trajectory that
has lost its K/V does: it begins with a copy of them, too.
"""

import itertools
from collections.abc import Iterable, Iterator

import numpy as np

from thundersync_jax.rollout import device as device_lib
from thundersync_jax.rollout import slots as slots_lib


class PromptCache:
  """Prefills on the device, and which prompt is which row of them.

  Args:
    device: computes them.
    slots: says which prompts are needed.
    buckets: ascending lengths that prompts are padded to. A longer context (of
      a fork) is left to `extend`.
  """

  def __init__(
    self,
    device: device_lib.Device,
    slots: slots_lib.Slots,
    buckets: np.ndarray,
  ):
    self._device, self._slots, self._buckets = device, slots, buckets
    self._rows = {}  # prompt -> (K/V of a prefill, its row in them)

  def __len__(self) -> int:
    return len(self._rows)

  def clear(self) -> None:
    """Forgets everything: the weights have changed."""
    self._rows.clear()

  def fill(self) -> None:
    """Fills active slots without any K/V; the last token is left to decode."""
    slots, by_buffer = self._slots, {}
    new = [
      slot
      for slot in np.flatnonzero(slots.active & (slots.cached == 0))
      if 1 < len(slots.requests[slot].tokens) <= self._buckets[-1] + 1
    ]
    self._prefill({slots.requests[slot].prompt: None for slot in new})
    for slot in new:
      prompt = slots.requests[slot].prompt
      buffer, row = self._rows[prompt]
      by_buffer.setdefault(id(buffer), (buffer, []))[1].append((row, slot))
      slots.cached[slot] = len(_tokens(prompt)) - 1
    for buffer, pairs in by_buffer.values():
      self._device.insert(buffer, pairs)
    if self._rows:
      for prompt in self._rows.keys() - self._needed():
        del self._rows[prompt]

  def _needed(self) -> set[bytes]:
    """Prompts of requests, and of what has lost its K/V and will go on."""
    slots = self._slots
    stale = np.flatnonzero((slots.length > 0) & (slots.cached == 0))
    requests = [
      *slots.waiting.values(),
      *(slots.requests[slot] for slot in stale),
      *(away.request for away in slots.away.values() if not away.cached),
    ]
    return {request.prompt for request in requests}

  def _prefill(self, prompts: Iterable[bytes]):
    """Prefills distinct prompts, each in the shortest bucket that it fits."""
    rows, by_bucket = self._device.prefill_rows, {}
    for prompt in prompts:
      if prompt not in self._rows:
        by_bucket.setdefault(self._bucket(prompt), []).append(prompt)
    for bucket, batch in by_bucket.items():
      spare = -len(batch) % rows
      batch += itertools.islice(self._upcoming(bucket, batch), spare)
      for start in range(0, len(batch), rows):
        part = batch[start : start + rows]
        tokens = [_tokens(prompt)[:-1] for prompt in part]
        buffer = self._device.prefill(tokens, bucket)
        for row, prompt in enumerate(part):
          self._rows[prompt] = buffer, row

  def _bucket(self, prompt: bytes) -> int:
    length = len(_tokens(prompt)) - 1
    return int(self._buckets[np.searchsorted(self._buckets, length)])

  def _upcoming(self, bucket: int, taken: list[bytes]) -> Iterator[bytes]:
    """Distinct prompts of a bucket that wait and have no K/V yet."""
    seen = {*taken, *self._rows}
    for request in self._slots.waiting.values():
      prompt = request.prompt
      if prompt not in seen and self._bucket(prompt) == bucket:
        seen.add(prompt)
        yield prompt


def _tokens(prompt: bytes) -> np.ndarray:
  return np.frombuffer(prompt, np.int32)
