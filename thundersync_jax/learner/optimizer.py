"""Optimizer from a config block: global-norm clip, then adamw (optax)."""

import optax

SCHEDULES = ('constant', 'linear', 'cosine')


def learning_rate(settings, steps: int) -> optax.Schedule:
  """Returns step -> learning rate.

  Args:
    settings: learning_rate, schedule, warmup_steps.
    steps: of the whole run; linear and cosine reach 0 there.

  Raises:
    ValueError: unknown schedule.
  """
  peak, warmup = settings.learning_rate, settings.warmup_steps
  decay = max(steps - warmup, 1)
  after = {
    'constant': lambda: optax.constant_schedule(peak),
    'linear': lambda: optax.linear_schedule(peak, 0.0, decay),
    'cosine': lambda: optax.cosine_decay_schedule(peak, decay),
  }
  if settings.schedule not in after:
    raise ValueError(f'schedule={settings.schedule!r}: choose from {SCHEDULES}')
  main = after[settings.schedule]()
  if not warmup:
    return main
  # The first step already moves: warm-up counts from 1/warmup.
  ramp = optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1))
  return optax.join_schedules([ramp, main], [warmup])


def make(settings, steps: int) -> optax.GradientTransformation:
  """Returns clip_by_global_norm followed by adamw.

  Args:
    settings: learning_rate, schedule, warmup_steps, b1, b2, eps, weight_decay,
      clip_norm (0: no clip).
    steps: of the whole run.
  """
  clip = (
    optax.clip_by_global_norm(settings.clip_norm)
    if settings.clip_norm
    else optax.identity()
  )
  adamw = optax.adamw(
    learning_rate(settings, steps),
    b1=settings.b1,
    b2=settings.b2,
    eps=settings.eps,
    weight_decay=settings.weight_decay,
  )
  return optax.chain(clip, adamw)
