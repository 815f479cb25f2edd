"""Hugging Face directories: config.json and safetensors, in and out.

Headers are compared with the configuration before any data is read, so that a
wrong file costs no time and its error names the file, the tensor and both
shapes. torch is not needed; transformers loads what is exported.
"""

import json
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from thundersync_jax.models import families, new_directory, weights
from thundersync_jax.models.families import ModelConfig

SINGLE = 'model.safetensors'
INDEX = 'model.safetensors.index.json'
TOKENIZER_FILES = (
  'tokenizer.json',
  'tokenizer_config.json',
  'special_tokens_map.json',
  'added_tokens.json',
  'chat_template.jinja',
  'tokenizer.model',
  'vocab.json',
  'merges.txt',
)
_READABLE = ('F64', 'F32', 'F16', 'BF16')
_DTYPES = {'float32': np.float32, 'bfloat16': ml_dtypes.bfloat16}


def load(directory: str | pathlib.Path) -> tuple[ModelConfig, dict]:
  """Reads config.json and all weights, whole or in shards.

  Returns:
    The configuration, and the tree of parameters as f32 numpy arrays with the
    layers stacked (the caller places them on its mesh).

  Raises:
    FileNotFoundError: config.json, the weights or a shard is not there.
    ValueError: a file is truncated, or a tensor is unknown, missing, of
      another shape or of a type that holds no plain floats.
  """
  directory = pathlib.Path(directory)
  config = families.from_hf(read_json(directory / 'config.json'))
  wanted = weights.entries(config, 'hf')
  found = {}
  for path in _shards(directory):
    found.update(_header(path))
  _drop_derived(directory, config, found)
  weights.check(config, wanted, found, directory)
  handles = {
    file: safetensors.safe_open(file, 'np')
    for file in {header.file for header in found.values()}
  }
  return config, weights.assemble(
    config, wanted, lambda name: handles[found[name].file].get_tensor(name)
  )


def export(
  directory: str | pathlib.Path,
  config: ModelConfig,
  params: dict,
  tokenizer_dir: str | pathlib.Path | None = None,
  dtype: str = 'float32',
  shard_bytes: int = 5_000_000_000,
) -> None:
  """Writes a directory that transformers (and `load`) reads.

  The directory appears whole or not at all. generation_config.json and the
  tokenizer come from `tokenizer_dir`.

  Args:
    directory: must not exist, or be empty.
    config: the model.
    params: its tree of parameters, layers stacked.
    tokenizer_dir: Hugging Face tokenizer files to copy; None: weights only.
    dtype: 'float32' or 'bfloat16'; the type of the stored weights.
    shard_bytes: largest size of one weight file.

  Raises:
    FileExistsError: `directory` exists and holds files.
    ValueError: a parameter is missing or of another shape; unknown dtype.
  """
  if dtype not in _DTYPES:
    raise ValueError(f'dtype={dtype!r} must be one of {sorted(_DTYPES)}')
  with new_directory.create(pathlib.Path(directory)) as target:
    shards = list(_write_shards(target, config, params, dtype, shard_bytes))
    _name_shards(target, shards)
    ends = _copy_tokenizer(target, tokenizer_dir)
    # Absent ids would become the defaults of transformers' own config class.
    ids = {'bos_token_id': None, 'eos_token_id': None, 'pad_token_id': None}
    _write_json(
      target / 'config.json',
      families.to_hf(config) | {'torch_dtype': dtype} | ids | ends,
    )
    if not (target / 'generation_config.json').exists():
      _write_json(target / 'generation_config.json', ends)


def read_json(path: pathlib.Path) -> dict[str, Any]:
  """A JSON object from a file.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: it holds no JSON object; the message names the file.
  """
  if not path.is_file():
    raise FileNotFoundError(
      f'{path} does not exist; a Hugging Face directory needs it'
    )
  try:
    value = json.loads(path.read_text(encoding='utf-8'))
  except ValueError as error:
    raise ValueError(f'{path} is not JSON (truncated?): {error}') from error
  if not isinstance(value, dict):
    raise ValueError(f'{path} holds a {type(value).__name__}, not an object')
  return value


def _shards(directory: pathlib.Path) -> list[pathlib.Path]:
  """The weight files of a directory, each of which exists."""
  if (directory / INDEX).is_file():
    weight_map = read_json(directory / INDEX).get('weight_map')
    if not weight_map:
      raise ValueError(f'{directory / INDEX} has no weight_map')
    paths = [directory / name for name in sorted(set(weight_map.values()))]
    for path in paths:
      if not path.is_file():
        raise FileNotFoundError(
          f'{path} does not exist, but {INDEX} names it; '
          f'{sum(not p.is_file() for p in paths)} of {len(paths)} shards are '
          'missing: download them again'
        )
    return paths
  if not (directory / SINGLE).is_file():
    raise FileNotFoundError(
      f'{directory} holds neither {SINGLE} nor {INDEX}; other formats (.bin, '
      '.pth) must be converted to safetensors first'
    )
  return [directory / SINGLE]


def _header(path: pathlib.Path) -> dict[str, weights.Found]:
  """What a file says that it holds; checks its size and types."""
  found = {}
  try:
    with safetensors.safe_open(path, 'np') as handle:
      for name in handle.keys():  # noqa: SIM118 (not a dict)
        part = handle.get_slice(name)
        if part.get_dtype() not in _READABLE:
          raise ValueError(
            f'{path}: tensor {name!r} is of type {part.get_dtype()}; '
            f'readable are {", ".join(_READABLE)}: take the unquantised model'
          )
        found[name] = weights.Found(str(path), tuple(part.get_shape()))
  except safetensors.SafetensorError as error:
    raise ValueError(
      f'{path} ({path.stat().st_size} bytes) is truncated or no safetensors '
      f'file: {error}; download it again'
    ) from error
  return found


def _drop_derived(
  directory: pathlib.Path, config: ModelConfig, found: dict
) -> None:
  """Leaves out tensors that the configuration determines.

  Old checkpoints store rotary frequencies; some tied ones a copy of embed.
  """
  for name in [n for n in found if n.endswith('rotary_emb.inv_freq')]:
    del found[name]
  if not config.tied or 'lm_head.weight' not in found:
    return
  head, embed = found.pop('lm_head.weight'), 'model.embed_tokens.weight'
  with safetensors.safe_open(head.file, 'np') as handle:
    copy = handle.get_tensor('lm_head.weight')
  if embed in found:
    with safetensors.safe_open(found[embed].file, 'np') as handle:
      original = handle.get_tensor(embed)
    if not np.array_equal(copy, original):
      raise ValueError(
        f'{head.file}: lm_head.weight differs from {embed}, but config.json '
        f'of {directory} says tie_word_embeddings; set it to false'
      )


def _write_shards(
  target: pathlib.Path,
  config: ModelConfig,
  params: dict,
  dtype: str,
  shard_bytes: int,
) -> Iterator[dict[str, int]]:
  """Writes shard-N.safetensors; yields {tensor name: bytes} of each."""
  tensors, size, number = {}, 0, 0
  for name, array in _stored(config, params, _DTYPES[dtype]):
    if tensors and size + array.nbytes > shard_bytes:
      yield _write_shard(target, number, tensors)
      tensors, size, number = {}, 0, number + 1
    tensors[name] = array
    size += array.nbytes
  yield _write_shard(target, number, tensors)


def _write_shard(
  target: pathlib.Path, number: int, tensors: dict[str, np.ndarray]
) -> dict[str, int]:
  safetensors.numpy.save_file(
    tensors, target / f'shard-{number}', metadata={'format': 'pt'}
  )
  return {name: array.nbytes for name, array in tensors.items()}


def _stored(
  config: ModelConfig, params: dict, dtype: type
) -> Iterator[tuple[str, np.ndarray]]:
  """Every tensor under its Hugging Face name, layer by layer."""
  arrays = {}
  for weight in weights.rows(config):
    tree = params['layers'] if weight.per_layer else params
    leading = (config.num_layers,) if weight.per_layer else ()
    expected = (*leading, *weights.shape(config, weight))
    if weight.name not in tree:
      raise ValueError(f'parameter {weight.name!r} {expected} is missing')
    if tree[weight.name].shape != expected:
      raise ValueError(
        f'parameter {weight.name!r} has shape {tree[weight.name].shape}, the '
        f'configuration needs {expected}'
      )
    arrays[weight.name] = np.asarray(tree[weight.name])
  for name, entry in weights.entries(config, 'hf').items():
    array = arrays[entry.weight.name]
    array = array if entry.layer is None else array[entry.layer]
    yield name, weights.to_stored(config, entry.weight, array.astype(dtype))


def _name_shards(target: pathlib.Path, shards: list[dict[str, int]]) -> None:
  """Gives the shards their final names and writes their index."""
  if len(shards) == 1:
    (target / 'shard-0').rename(target / SINGLE)
    return
  weight_map = {}
  for number, sizes in enumerate(shards):
    name = f'model-{number + 1:05}-of-{len(shards):05}.safetensors'
    (target / f'shard-{number}').rename(target / name)
    weight_map |= dict.fromkeys(sizes, name)
  total = sum(sum(sizes.values()) for sizes in shards)
  _write_json(
    target / INDEX,
    {'metadata': {'total_size': total}, 'weight_map': weight_map},
  )


def _copy_tokenizer(
  target: pathlib.Path, source: str | pathlib.Path | None
) -> dict[str, Any]:
  """Copies the tokenizer; returns the ids of its begin, end and padding."""
  if source is None:
    return {}
  source = pathlib.Path(source)
  copied = [name for name in TOKENIZER_FILES if (source / name).is_file()]
  if 'tokenizer.json' not in copied:
    raise FileNotFoundError(
      f'{source}/tokenizer.json does not exist; name a directory with a '
      'tokenizer, or none'
    )
  for name in [*copied, 'generation_config.json']:
    if (source / name).is_file():
      shutil.copyfile(source / name, target / name)
  return special_ids(source)


def special_ids(directory: pathlib.Path) -> dict[str, int]:
  """bos, eos and pad ids of a tokenizer directory, those that it names."""
  settings = read_json(directory / 'tokenizer_config.json')
  added = read_json(directory / 'tokenizer.json').get('added_tokens', [])
  ids = {token['content']: token['id'] for token in added}
  found = {}
  for kind in ('bos', 'eos', 'pad'):
    token = settings.get(f'{kind}_token')
    token = token.get('content') if isinstance(token, dict) else token
    if token in ids:
      found[f'{kind}_token_id'] = ids[token]
  return found


def _write_json(path: pathlib.Path, value: dict[str, Any]) -> None:
  path.write_text(json.dumps(value, indent=2) + '\n', encoding='utf-8')
