"""What becomes of the K/V of a parked trajectory that makes room for another.

  moved       bytes there and back / copy_bytes_per_s
  recomputed  tokens / extend_tokens_per_s

whichever takes less; both rates are measured by the engine's warm_up. Moved K/V
give the same tokens bit for bit, recomputed ones to rounding.
"""

import dataclasses
import time

import jax

from thundersync_jax.rollout import device as device_lib

EVICT = ('auto', 'host', 'recompute', 'never')


@dataclasses.dataclass(frozen=True)
class Costs:
  """Rates of one machine and model.

  Attributes:
    copy_bytes_per_s: K/V of a slot to host memory and back again.
    extend_tokens_per_s: tokens that are fed to slots.
  """

  copy_bytes_per_s: float
  extend_tokens_per_s: float


def keeps(evict: str, costs: Costs | None, size: int, tokens: int) -> bool:
  """Whether K/V are moved to the host, rather than recomputed.

  Args:
    evict: one of EVICT, but 'never'.
    costs: None if they were not measured; 'auto' moves then.
    size: bytes that would be moved.
    tokens: what would be recomputed.
  """
  if evict != 'auto' or costs is None:
    return evict != 'recompute'
  moved_s = size / costs.copy_bytes_per_s
  return moved_s <= tokens / costs.extend_tokens_per_s


def measure(device: device_lib.Device, bucket: int) -> Costs:
  """Times a copy of a whole slot there and back, and an extend of `bucket`.

  The programs are compiled and the cache may be overwritten.
  """
  copies, extends, length = [], [], device.cache_length
  for _ in range(3):
    device.block()
    start = time.perf_counter()
    device.insert(jax.device_get(device.read(0, length)), [(0, 0)])
    device.block()
    middle = time.perf_counter()
    device.extend([], [], [], bucket)
    device.block()
    copies.append(middle - start)
    extends.append(time.perf_counter() - middle)
  return Costs(
    device.row_bytes(length) / min(copies),
    bucket * device.extend_rows / min(extends),
  )
