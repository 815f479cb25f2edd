"""Seconds of a function, and what the machine could do at best.

Wall time is what a user waits for; CPU seconds (all threads of the process)
are steadier on a machine that does something else too. Both are medians.
"""

import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

_BANDWIDTH_ROWS = 64  # reductions are split by rows over the threads
_MATMUL_S = 0.02  # products are repeated to about this long


@dataclasses.dataclass(frozen=True)
class Timing:
  """Medians of repeated runs, in seconds."""

  wall_s: float
  cpu_s: float


@dataclasses.dataclass(frozen=True)
class Stopwatch:
  """Wall and CPU seconds since `start`."""

  wall: float
  cpu: float

  @classmethod
  def start(cls) -> 'Stopwatch':
    return cls(time.perf_counter(), time.process_time())

  def read(self) -> Timing:
    """Time since the start."""
    wall, cpu = time.perf_counter(), time.process_time()
    return Timing(wall - self.wall, cpu - self.cpu)


def median(timings: Sequence[Timing]) -> Timing:
  """Median of wall and of CPU seconds, each by itself.

  Raises:
    ValueError: no timings.
  """
  if not timings:
    raise ValueError('no timings: raise --steps or --repeats above --warmup')
  return Timing(
    statistics.median(t.wall_s for t in timings),
    statistics.median(t.cpu_s for t in timings),
  )


def timed(
  function: Callable[[], Any], repeats: int, warmup: int = 1
) -> list[Timing]:
  """Times of `repeats` calls after `warmup` others; waits for JAX results."""
  for _ in range(warmup):
    jax.block_until_ready(function())
  timings = []
  for _ in range(repeats):
    watch = Stopwatch.start()
    jax.block_until_ready(function())
    timings.append(watch.read())
  return timings


def read_bandwidth(nbytes: int, repeats: int = 9) -> float:
  """Bytes per second of reading `nbytes` of f32 again and again, at best.

  The size matters: what fits the caches is read from there.
  """
  x = jnp.ones((_BANDWIDTH_ROWS, max(nbytes // (4 * _BANDWIDTH_ROWS), 1)))
  sums = jax.jit(lambda x: x.sum(axis=1))
  best = min(t.wall_s for t in timed(lambda: sums(x), repeats))
  return x.nbytes / best


def matmul_s(
  rows: int,
  inner: int,
  columns: int,
  dtype: str,
  repeats: int = 9,
) -> float:
  """Seconds of one product [rows, inner] [inner, columns], at best.

  The same weights again and again: they stay in the caches if they fit.
  """
  keys = jax.random.split(jax.random.key(0))
  x = jax.random.normal(keys[0], (rows, inner)).astype(dtype)
  w = jax.random.normal(keys[1], (inner, columns)).astype(dtype)

  def product(x, w):
    return jnp.einsum('mk,kn->mn', x, w, preferred_element_type=jnp.float32)

  @jax.jit
  def loop(x, w, count):
    def body(_, carry):
      # The barrier keeps the product in the loop.
      x = jax.lax.optimization_barrier(carry[0])
      return x, product(x, w)

    return jax.lax.fori_loop(0, count, body, (x, product(x, w)))[1]

  once = min(t.wall_s for t in timed(lambda: loop(x, w, 1), 3)) / 2
  count = max(1, int(_MATMUL_S / once))
  best = min(t.wall_s for t in timed(lambda: loop(x, w, count), repeats))
  return best / (count + 1)


@dataclasses.dataclass(frozen=True)
class Limit:
  """What a program that reads and multiplies needs at least.

  Attributes:
    nbytes: read once.
    flops: of all products.
    bytes_per_s: reading so many bytes again and again.
    flops_per_s: of the products, each alone.
  """

  nbytes: int
  flops: int
  bytes_per_s: float
  flops_per_s: float

  @property
  def seconds(self) -> float:
    """The longer of reading and multiplying."""
    return max(self.nbytes / self.bytes_per_s, self.flops / self.flops_per_s)


def product_limit(
  rows: int,
  matrices: dict[str, tuple[int, int, int]],
  *,
  dtype: str,
  more_numbers: int = 0,
  more_flops: int = 0,
) -> Limit:
  """Measures the limit of `rows` vectors times some matrices, here and now.

  Args:
    rows: vectors, multiplied at once.
    matrices: name -> (inner size, columns, how many of this size).
    dtype: of all numbers.
    more_numbers: numbers to read beside the matrices.
    more_flops: floating-point operations beside the products.
  """
  sizes = matrices.values()
  numbers = sum(inner * columns * count for inner, columns, count in sizes)
  nbytes = (numbers + more_numbers) * jnp.dtype(dtype).itemsize
  seconds = sum(
    count * matmul_s(rows, inner, columns, dtype)
    for inner, columns, count in sizes
  )
  flops = 2 * rows * numbers
  return Limit(
    nbytes, flops + more_flops, read_bandwidth(nbytes), flops / seconds
  )


def machine() -> dict[str, Any]:
  """What to write beside every figure."""
  return {
    'jax': jax.__version__,
    'platform': jax.default_backend(),
    'devices': jax.device_count(),
    'cores': len(os.sched_getaffinity(0)),
    'load': round(os.getloadavg()[0], 2),
  }


def rounded(figures: dict[str, Any], digits: int = 4) -> dict[str, Any]:
  """Floats with `digits` significant digits, for one line of JSON."""

  def leaf(value):
    return float(f'{value:.{digits}g}') if isinstance(value, float) else value

  return jax.tree.map(leaf, figures)
