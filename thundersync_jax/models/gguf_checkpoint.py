"""GGUF files: configuration, weights and tokenizer of one model in one file.

Weights are dequantised to f32. The llama converter stores the rows of q and k
of every head interleaved (rotary pairs side by side); they are put back in the
order of rotate-half, [first halves, second halves]. Layout of the blocks:
ggml-common.h of llama.cpp, as the gguf package implements it.
"""

import dataclasses
import pathlib
from typing import Any

import gguf
import numpy as np

from thundersync_jax.models import (
  families,
  gguf_tokenizer,
  transformer,
  weights,
)
from thundersync_jax.models.families import ModelConfig

TENSOR_TYPES = (
  'F32',
  'F16',
  'BF16',
  'Q8_0',
  'Q4_0',
  'Q4_1',
  'Q5_0',
  'Q5_1',
  'Q4_K',
  'Q5_K',
  'Q6_K',
)
# Stored rows of these weights are interleaved by the llama converter.
_INTERLEAVED = {'llama': ('q', 'k')}
# Per-frequency divisors of Llama 3 (arXiv 2407.21783), written instead of the
# four numbers that they come from.
_ROPE_FREQS = 'rope_freqs.weight'


class _Reader(gguf.GGUFReader):
  """The package's reader on a plain array.

  It slices its memmap some 300,000 times for a vocabulary; a plain view of the
  same memory makes that several times faster.
  """

  @property
  def data(self) -> np.ndarray:
    return self._plain

  @data.setter
  def data(self, value: np.ndarray) -> None:
    self._plain = value.view(np.ndarray)


def read(
  path: str | pathlib.Path,
) -> tuple[ModelConfig, dict, gguf_tokenizer.Vocabulary]:
  """Reads a whole GGUF file.

  Returns:
    The configuration; the tree of parameters as f32 numpy arrays with the
    layers stacked; the vocabulary, for `gguf_tokenizer.write`.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: truncated or not GGUF; an architecture, tensor type or
      tokenizer that is not implemented; an unknown, missing or misshapen
      tensor.
  """
  path = pathlib.Path(path)
  reader = _open(path)
  tensors = {tensor.name: tensor for tensor in reader.tensors}
  config = _config(path, _fields(reader), tensors)
  tensors.pop(_ROPE_FREQS, None)
  wanted = weights.entries(config, 'gguf')
  found = {}
  for name, tensor in tensors.items():
    if tensor.tensor_type.name not in TENSOR_TYPES:
      raise ValueError(
        f'{path}: tensor {name!r} is of type {tensor.tensor_type.name}; '
        f'readable are {", ".join(TENSOR_TYPES)}'
      )
    shape = tuple(int(size) for size in reversed(tensor.shape))
    found[name] = weights.Found(str(path), shape)
  weights.check(config, wanted, found, path)

  def stored(name: str) -> np.ndarray:
    array = dequantize(tensors[name].data, tensors[name].tensor_type)
    if wanted[name].weight.name in _INTERLEAVED.get(config.family, ()):
      array = _halves(array, config.head_dim)
    return array

  vocabulary = gguf_tokenizer.vocabulary(path, reader.fields)
  return config, weights.assemble(config, wanted, stored), vocabulary


def dequantize(
  blocks: np.ndarray, tensor_type: gguf.GGMLQuantizationType
) -> np.ndarray:
  """f32 values of a tensor's blocks [rows, bytes of a row]."""
  if blocks.dtype != np.uint8:  # F32 and F16 are read as what they are
    return blocks.astype(np.float32)
  quant = getattr(gguf.quants, tensor_type.name)
  columns = blocks.shape[-1] // quant.type_size * quant.block_size
  values = np.empty((len(blocks), columns), np.float32)
  # The package goes through 16 rows at a time; 512 take a third of the time.
  for i in range(0, len(blocks), 512):
    values[i : i + 512] = quant.dequantize_rows(blocks[i : i + 512])
  return values


def _open(path: pathlib.Path) -> _Reader:
  if not path.is_file():
    raise FileNotFoundError(f'{path} does not exist')
  size = path.stat().st_size
  try:
    return _Reader(path)
  except (IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
    # The reader runs off the end of a short file with any of these.
    raise ValueError(
      f'{path} ({size} bytes) is truncated or no GGUF file: {error}; '
      'download it again'
    ) from error


def _fields(reader: _Reader) -> dict[str, Any]:
  """Scalar metadata; vocabularies are left to the tokenizer."""
  return {
    name: field.contents()
    for name, field in reader.fields.items()
    if not name.startswith('tokenizer.')
  }


def _halves(array: np.ndarray, head_dim: int) -> np.ndarray:
  """Undoes the interleaving of rotary pairs, row by row of each head."""
  pairs = array.reshape(-1, head_dim // 2, 2, array.shape[-1])
  return pairs.swapaxes(1, 2).reshape(array.shape)


def _config(
  path: pathlib.Path, fields: dict[str, Any], tensors: dict[str, Any]
) -> ModelConfig:
  """The metadata in the words of config.json, read as such."""
  architecture = fields.get('general.architecture')
  if architecture not in families.FAMILIES:
    raise ValueError(
      f'{path}: architecture {architecture!r} is not implemented; known: '
      f'{sorted(families.FAMILIES)}'
    )

  def field(name: str, default: Any = None) -> Any:
    value = fields.get(f'{architecture}.{name}', default)
    if value is None:
      raise ValueError(f'{path}: metadata {architecture}.{name} is missing')
    return value

  if 'token_embd.weight' not in tensors:
    raise ValueError(f'{path}: tensor token_embd.weight is missing')
  heads = field('attention.head_count')
  embed_dim = field('embedding_length')
  config = families.from_hf(
    {
      'model_type': architecture,
      'vocab_size': int(tensors['token_embd.weight'].shape[1]),
      'hidden_size': embed_dim,
      'intermediate_size': field('feed_forward_length'),
      'num_hidden_layers': field('block_count'),
      'num_attention_heads': heads,
      'num_key_value_heads': field('attention.head_count_kv', heads),
      'head_dim': field('attention.key_length', embed_dim // heads),
      'rms_norm_eps': _decimal(field('attention.layer_norm_rms_epsilon')),
      'rope_theta': _decimal(field('rope.freq_base', 10000.0)),
      'rope_scaling': _rope_scaling(field),
      'tie_word_embeddings': 'output.weight' not in tensors,
      'max_position_embeddings': field('context_length'),
    }
  )
  if _ROPE_FREQS not in tensors:
    return config
  return _with_llama3_scaling(path, config, tensors[_ROPE_FREQS].data)


def _decimal(value: float) -> float:
  """The shortest decimal with this f32 value: 1e-05, not 9.99999975e-06."""
  return float(str(np.float32(value)))


def _rope_scaling(field: Any) -> dict[str, Any] | None:
  kind = field('rope.scaling.type', 'none')
  if kind == 'none':
    return None
  return {'rope_type': kind, 'factor': _decimal(field('rope.scaling.factor'))}


def _with_llama3_scaling(
  path: pathlib.Path, config: ModelConfig, divisors: np.ndarray
) -> ModelConfig:
  """Finds the numbers behind the divisors, and makes sure of them.

  All Llama 3 models share the other numbers (RopeScaling's defaults); the
  factor is the divisor of the lowest frequency.
  """
  scaling = families.RopeScaling('llama3', float(divisors[-1]))
  scaled = dataclasses.replace(config, rope_scaling=scaling)
  plain = dataclasses.replace(config, rope_scaling=None)
  frequencies = transformer.rope_frequencies
  expected = frequencies(plain) / frequencies(scaled)
  same_size = divisors.shape == expected.shape
  if not same_size or not np.allclose(divisors, expected, rtol=1e-4):
    found = [round(divisor, 3) for divisor in divisors.tolist()]
    raise ValueError(
      f'{path}: {_ROPE_FREQS} {found} is not {scaling}; load the '
      'Hugging Face directory of this model instead'
    )
  return scaled
