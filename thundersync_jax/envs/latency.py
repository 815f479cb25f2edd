"""Delays as remote sandboxes have them, reproduced with real waiting.

  delay = trace(rng of (seed, prompt_id, member, turn))

so every schedule waits the same, whatever the order of arrival. A trace draws
seconds: constant, log-normal (exp(mu + sigma n), n standard normal; a mean m
gives mu = log m - sigma^2 / 2, a median m gives log m), or what was measured.
"""

import dataclasses
import math
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from thundersync_jax.envs import base

Trace = Callable[[np.random.Generator], float]  # seconds, at least 0


def constant(seconds: float) -> Trace:
  """Always the same delay."""
  _check_seconds('seconds', seconds)
  return lambda rng: seconds


def lognormal(
  *, sigma: float, mean: float | None = None, median: float | None = None
) -> Trace:
  """A log-normal delay, given by its mean or its median in seconds.

  Args:
    sigma: standard deviation of the delay's logarithm.

  Raises:
    ValueError: both or neither are given, or one is not positive.
  """
  if (mean is None) == (median is None):
    raise ValueError(f'mean={mean}, median={median}: give one of them')
  centre = median if mean is None else mean
  if not 0 < centre < math.inf or not 0 <= sigma < math.inf:
    raise ValueError(
      f'a log-normal of {centre} seconds with sigma={sigma} does not exist: '
      'seconds must be above 0 and sigma at least 0'
    )
  mu = math.log(centre) - (0 if mean is None else sigma**2 / 2)
  return lambda rng: rng.lognormal(mu, sigma)


def empirical(seconds: Sequence[float]) -> Trace:
  """Draws measured delays, with replacement."""
  measured = np.asarray(seconds, float)
  if measured.ndim != 1 or not len(measured):
    raise ValueError(f'an empirical trace needs delays, got {seconds!r}')
  for value in measured:
    _check_seconds('a measured delay', value)
  return lambda rng: float(rng.choice(measured))


def read(path: str | pathlib.Path) -> Trace:
  """The empirical trace of a text file with one delay in seconds a line."""
  return empirical(np.loadtxt(path, ndmin=1))


def draw(
  trace: Trace, seed: int, prompt_id: int, member: int, turn: int
) -> float:
  """The delay of one turn in seconds; turn 0 is reset, the first step 1."""
  return float(trace(np.random.default_rng([seed, prompt_id, member, turn])))


class Delayed:
  """Any environment, answering late. Everything else is the environment's.

  Args:
    environment: what answers.
    trace: of the delays.
    key: (seed, prompt_id, member).
    on_reset: whether reset is late too.
  """

  def __init__(
    self,
    environment: base.Environment,
    trace: Trace,
    key: tuple[int, int, int],
    on_reset: bool = False,
  ):
    self.wrapped = environment
    self._trace, self._key, self._on_reset = trace, key, on_reset
    self._turn = 0

  def __getattr__(self, name: str) -> Any:
    return getattr(self.wrapped, name)

  def reset(self, task: dict[str, Any]) -> list[base.Message]:
    self._turn = 0
    if self._on_reset:
      self._sleep()
    return self.wrapped.reset(task)

  def step(self, text: str) -> base.EnvStep:
    self._turn += 1
    self._sleep()
    return self.wrapped.step(text)

  def _sleep(self) -> None:
    time.sleep(draw(self._trace, *self._key, self._turn))


@dataclasses.dataclass(frozen=True)
class Settings:
  """The config block task.latency.

  Attributes:
    kind: 'none', 'constant', 'lognormal' or 'empirical'.
    seconds: of a constant; the mean of a log-normal.
    sigma: of a log-normal.
    median: whether `seconds` is the log-normal's median instead.
    samples: measured delays in seconds.
    file: of measured delays, one a line, in the place of samples.
    scale: multiplies every delay, to play a slow trace in less time.
    max_seconds: cuts the delays off, before scale; 0: never.
    on_reset: whether reset is late too.
  """

  kind: str = 'none'
  seconds: float = 0.0
  sigma: float = 0.0
  median: bool = False
  samples: Sequence[float] = ()
  file: str = ''
  scale: float = 1.0
  max_seconds: float = 0.0
  on_reset: bool = False

  def __post_init__(self):
    if self.kind not in KINDS:
      raise ValueError(
        f'task.latency.kind={self.kind!r} does not exist: {sorted(KINDS)}'
      )
    _check_seconds('task.latency.scale', self.scale)
    _check_seconds('task.latency.max_seconds', self.max_seconds)
    if self.kind == 'empirical' and bool(self.file) == bool(len(self.samples)):
      raise ValueError(
        f'task.latency.file={self.file!r} with {len(self.samples)} samples: '
        'an empirical trace needs one of the two'
      )


@dataclasses.dataclass(frozen=True)
class Latency:
  """Makes the environments of a run late."""

  trace: Trace
  seed: int
  on_reset: bool = False

  def wrap(
    self, environment: base.Environment, prompt_id: int, member: int
  ) -> Delayed:
    """The environment of one trajectory with its own delays."""
    key = (self.seed, prompt_id, member)
    return Delayed(environment, self.trace, key, self.on_reset)


def make(seed: int, **args: Any) -> Latency | None:
  """The latency of a config block (see Settings), None for kind 'none'."""
  settings = base.parse_settings(Settings, 'task.latency', args)
  trace = KINDS[settings.kind](settings)
  if trace is None:
    return None
  longest = settings.max_seconds or math.inf

  def bounded(rng):
    return settings.scale * min(trace(rng), longest)

  return Latency(bounded, seed, settings.on_reset)


def _lognormal_of(settings: Settings) -> Trace:
  name = 'median' if settings.median else 'mean'
  return lognormal(sigma=settings.sigma, **{name: settings.seconds})


def _empirical_of(settings: Settings) -> Trace:
  if settings.file:
    return read(settings.file)
  return empirical(settings.samples)


def _check_seconds(name: str, seconds: float) -> None:
  if not 0 <= seconds < math.inf:
    raise ValueError(f'{name}={seconds} must be a finite number from 0 on')


KINDS = {
  'none': lambda settings: None,
  'constant': lambda settings: constant(settings.seconds),
  'lognormal': _lognormal_of,
  'empirical': _empirical_of,
}
