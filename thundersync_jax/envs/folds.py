"""Folds of task families, and the random streams that their tasks come from."""

import hashlib
import random
from collections.abc import Collection

# Fold -> last digits of the numbers or digests of its tasks.
DIGITS = {'train': range(8), 'validation': range(8, 9), 'test': range(9, 10)}


def check(fold: str, folds: Collection[str] = DIGITS) -> None:
  """Raises ValueError if the fold is none of `folds`."""
  if fold not in folds:
    raise ValueError(
      f'fold={fold!r} does not exist; choose one of {list(folds)}'
    )


def of_key(key: str) -> str:
  """The fold that a task of this key belongs to."""
  digit = int(hashlib.sha256(key.encode()).hexdigest()[:8], 16) % 10
  return next(fold for fold, digits in DIGITS.items() if digit in digits)


def draws(family: str, seed: int, fold: str) -> random.Random:
  """The stream of random numbers that the tasks of a fold are drawn from."""
  digest = hashlib.sha256(f'{family}/{seed}/{fold}'.encode()).digest()
  return random.Random(int.from_bytes(digest[:8], 'big'))
