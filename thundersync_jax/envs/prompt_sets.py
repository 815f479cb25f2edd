"""Prompt sets: tasks written once as a versioned data set, read by position.

build() draws tasks of a family, each key once and in one fold only, and writes
a tfds ArrayRecord data set under a digest of everything that decides its
content. PromptSet reads a fold through grain: position p of host h is one task,
a function of (seed, h, p) alone, so a run resumes by remembering p.
"""

import contextlib
import dataclasses
import hashlib
import io
import json
import operator
import os
from collections.abc import Iterator
from typing import Any

import grain
import tensorflow_datasets as tfds
from absl import logging

from thundersync_jax.envs import base

# Draws without a new key after which a family counts as used up: at least
# _PATIENCE, and 20 times the keys found (misses the last key with odds e^-20).
_PATIENCE = 2000
_VERSION = '1.0.0'  # of the record format: one JSON text a task


def build(
  name: str,
  family: base.TaskFamily,
  sizes: dict[str, int],
  seed: int,
  args: dict[str, Any],
  data_dir: str | os.PathLike,
) -> str:
  """Writes the prompt set, or finds it written; returns its folder.

  Folds are filled in alphabetical order, so the held-out fold 'test' stays the
  same when 'train' grows. Processes may build at the same time.

  Args:
    name: of the data set, lower case and underscores.
    family: where tasks come from.
    sizes: tasks a fold, e.g. {'train': 1000, 'test': 100}.
    seed: of the draw.
    args: of the family, JSON-able.
    data_dir: folder that holds all prompt sets.

  Raises:
    ValueError: if the family has fewer different tasks than asked for, or a
      size, argument or task is wrong.
  """
  if not sizes or not all(size > 0 for size in sizes.values()):
    raise ValueError(f'sizes={sizes} must hold at least one task a fold')
  identity = _identity(family, sizes, seed, args)
  digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
  builder = _builder_class(f'{name}_{digest}', identity)(
    data_dir=os.fspath(data_dir), file_format='array_record'
  )
  path = os.fspath(builder.data_path)
  if not builder.data_path.exists():
    builder.folds = draw_folds(family, sizes, seed, args)
    _write(builder)
    logging.info('prompt set %s: %s written to %s', name, sizes, path)
  return path


def _identity(
  family: base.TaskFamily,
  sizes: dict[str, int],
  seed: int,
  args: dict[str, Any],
) -> str:
  """All that decides the content, as one JSON text."""
  content = [family.name, args, sizes, seed, family.fingerprint(**args)]
  try:
    return json.dumps(content, sort_keys=True)
  except TypeError as error:
    raise ValueError(
      f'{family.name}: args={args!r} and sizes={sizes!r} must be plain dicts, '
      f'lists, texts and numbers ({error}); a ConfigDict has to_dict()'
    ) from error


def _write(builder: tfds.core.DatasetBuilder) -> None:
  tfds.disable_progress_bar()
  # tfds prints, of a download too; standard output belongs to the script.
  with contextlib.redirect_stdout(io.StringIO()):
    try:
      builder.download_and_prepare(
        download_config=tfds.download.DownloadConfig(try_download_gcs=False)
      )
    except OSError:
      # Another process may have put the same content there meanwhile.
      if not builder.data_path.exists():
        raise


def _builder_class(
  versioned_name: str, identity: str
) -> type[tfds.core.DatasetBuilder]:
  """A builder class of that name: tfds takes the name from the class."""

  class Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Writes self.folds in their order, one JSON text a task."""

    name = versioned_name
    VERSION = tfds.core.Version(_VERSION)
    folds: dict[str, list[dict[str, Any]]]

    def _info(self) -> tfds.core.DatasetInfo:
      return tfds.core.DatasetInfo(
        builder=self,
        description=identity,
        features=tfds.features.FeaturesDict({'task': tfds.features.Text()}),
        disable_shuffling=True,
      )

    def _split_generators(self, dl_manager):
      del dl_manager  # nothing is downloaded
      return {fold: self._generate_examples(fold) for fold in self.folds}

    def _generate_examples(self, fold: str) -> Iterator[tuple[int, dict]]:
      for index, task in enumerate(self.folds[fold]):
        yield index, {'task': json.dumps(task)}

  return Builder


def draw_folds(
  family: base.TaskFamily,
  sizes: dict[str, int],
  seed: int,
  args: dict[str, Any],
) -> dict[str, list[dict[str, Any]]]:
  """Draws the tasks of each fold; no key comes twice, in one fold or in two.

  Raises:
    ValueError: as build.
  """
  seen: set[str] = set()
  folds: dict[str, list[dict[str, Any]]] = {}
  for fold, size in sorted(sizes.items()):
    tasks: list[dict[str, Any]] = []
    since_new = 0
    for task in family.make_tasks(seed, fold, **args):
      key = _checked_key(task, family.name)
      since_new = since_new + 1 if key in seen else 0
      if key not in seen:
        seen.add(key)
        tasks.append(task)
      if len(tasks) == size or since_new > max(_PATIENCE, 20 * len(seen)):
        break
    if len(tasks) < size:
      raise ValueError(
        f'{family.name} with {args} has only {len(seen)} different tasks, and '
        f'{sum(sizes.values())} are asked for (fold {fold!r} got {len(tasks)} '
        f'of {size}); lower sizes={sizes} to {len(seen)} in all, or widen the '
        'arguments of the family'
      )
    folds[fold] = tasks
  return folds


def _checked_key(task: dict[str, Any], family_name: str) -> str:
  key = task.get('key')
  if not isinstance(key, str):
    raise ValueError(
      f"{family_name} made a task whose 'key' is {key!r}; it must be a text "
      'that is equal for equal problems'
    )
  return key


@dataclasses.dataclass(frozen=True)
class Prompt:
  """One task at one position of the prompt stream."""

  prompt_id: int  # unique over all positions, epochs and hosts of a stream
  epoch: int
  task: dict[str, Any]


class PromptSet:
  """The endless prompt stream of one host, by position.

  Each epoch is a permutation of the fold, another one each time, dealt to the
  hosts in turn; within it every task comes once, on one host. Reading has no
  state: prompts[p] is the same before and after a resume.
  """

  def __init__(
    self,
    path: str | os.PathLike,
    fold: str,
    seed: int,
    host_index: int = 0,
    host_count: int = 1,
  ):
    """Opens the fold; reads nothing yet.

    Args:
      path: folder that build() returned.
      fold: 'train', 'test', ...
      seed: of the order, below 2 ** 32.
      host_index: this host, from 0.
      host_count: hosts that share the stream.

    Raises:
      ValueError: if the fold does not exist or is smaller than host_count.
    """
    if not 0 <= host_index < host_count:
      raise ValueError(
        f'host_index={host_index} must be in 0..{host_count - 1}, as '
        f'host_count={host_count}'
      )
    builder = tfds.builder_from_directory(os.fspath(path))
    if fold not in builder.info.splits:
      raise ValueError(
        f'fold={fold!r} does not exist in {os.fspath(path)}; choose one of '
        f'{sorted(builder.info.splits)}'
      )
    source = builder.as_data_source(fold)
    self._size = len(source)
    if self._size < host_count:
      raise ValueError(
        f'fold={fold!r} holds {self._size} tasks, fewer than '
        f'host_count={host_count}; build a larger prompt set'
      )
    order = grain.MapDataset.source(source).seed(seed).shuffle()
    shard = order[host_index::host_count]
    self._length = len(shard)
    self._host = (host_index, host_count)
    self._stream = shard.repeat().map(_read_task)

  def __len__(self) -> int:
    """Tasks of an epoch on this host."""
    return self._length

  def __getitem__(self, position: int) -> Prompt:
    """The prompt at a position from 0 on; positions never end.

    Raises:
      IndexError: on a negative position.
    """
    position = operator.index(position)
    if position < 0:
      raise IndexError(f'position={position} must be at least 0')
    epoch, in_epoch = divmod(position, self._length)
    host_index, host_count = self._host
    prompt_id = epoch * self._size + in_epoch * host_count + host_index
    return Prompt(prompt_id, epoch, self._stream[position])


def _read_task(record: dict[str, Any]) -> dict[str, Any]:
  return json.loads(record['task'])
