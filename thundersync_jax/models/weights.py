"""Every weight of the decoder, one row each: its shape here and in files.

Checkpoint files store a matrix as [out, in], this project as [in..., out...],
so that q, for one, is [D, N, H] here and [N*H, D] in a file. Reading a weight
is one transpose and one reshape; writing is the same backwards.
Letters: V vocab, D embed, F mlp, N query heads, K kv heads, H head_dim.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from thundersync_jax.models.families import ModelConfig


@dataclasses.dataclass(frozen=True)
class Weight:
  """One row of the table.

  Attributes:
    name: key in the tree of parameters.
    dims: letters of the shape here, without the leading layer axis.
    stored: letters of the shape in files, one group an axis.
    hf: name in safetensors files; {} is the layer.
    gguf: name in GGUF files; {} is the layer.
    needs: field of ModelConfig that must be true; '' when always there.
  """

  name: str
  dims: str
  stored: str
  hf: str
  gguf: str
  needs: str = ''

  @property
  def per_layer(self) -> bool:
    return '{}' in self.hf


# Llama, Qwen2 and Qwen3 share their names and differ in the flags only.
# fmt: off
_HF = 'model.layers.{}.'
_GG = 'blk.{}.'
WEIGHTS = (
  Weight('embed', 'VD', 'V,D', 'model.embed_tokens.weight',
         'token_embd.weight'),
  Weight('final_norm', 'D', 'D', 'model.norm.weight', 'output_norm.weight'),
  Weight('head', 'VD', 'V,D', 'lm_head.weight', 'output.weight', 'untied'),
  Weight('attn_norm', 'D', 'D', _HF + 'input_layernorm.weight',
         _GG + 'attn_norm.weight'),
  Weight('q', 'DNH', 'NH,D', _HF + 'self_attn.q_proj.weight',
         _GG + 'attn_q.weight'),
  Weight('k', 'DKH', 'KH,D', _HF + 'self_attn.k_proj.weight',
         _GG + 'attn_k.weight'),
  Weight('v', 'DKH', 'KH,D', _HF + 'self_attn.v_proj.weight',
         _GG + 'attn_v.weight'),
  Weight('o', 'NHD', 'D,NH', _HF + 'self_attn.o_proj.weight',
         _GG + 'attn_output.weight'),
  Weight('q_bias', 'NH', 'NH', _HF + 'self_attn.q_proj.bias',
         _GG + 'attn_q.bias', 'qkv_bias'),
  Weight('k_bias', 'KH', 'KH', _HF + 'self_attn.k_proj.bias',
         _GG + 'attn_k.bias', 'qkv_bias'),
  Weight('v_bias', 'KH', 'KH', _HF + 'self_attn.v_proj.bias',
         _GG + 'attn_v.bias', 'qkv_bias'),
  Weight('q_norm', 'H', 'H', _HF + 'self_attn.q_norm.weight',
         _GG + 'attn_q_norm.weight', 'qk_norm'),
  Weight('k_norm', 'H', 'H', _HF + 'self_attn.k_norm.weight',
         _GG + 'attn_k_norm.weight', 'qk_norm'),
  Weight('mlp_norm', 'D', 'D', _HF + 'post_attention_layernorm.weight',
         _GG + 'ffn_norm.weight'),
  Weight('gate', 'DF', 'F,D', _HF + 'mlp.gate_proj.weight',
         _GG + 'ffn_gate.weight'),
  Weight('up', 'DF', 'F,D', _HF + 'mlp.up_proj.weight',
         _GG + 'ffn_up.weight'),
  Weight('down', 'FD', 'D,F', _HF + 'mlp.down_proj.weight',
         _GG + 'ffn_down.weight'),
)
# fmt: on


@dataclasses.dataclass(frozen=True)
class Entry:
  """One tensor of a file: its row in the table and its layer (or None)."""

  weight: Weight
  layer: int | None


@dataclasses.dataclass(frozen=True)
class Found:
  """What a file's header says of one tensor."""

  file: str
  shape: tuple[int, ...]


def _sizes(config: ModelConfig) -> dict[str, int]:
  return {
    'V': config.vocab_size,
    'D': config.embed_dim,
    'F': config.mlp_dim,
    'N': config.num_heads,
    'K': config.num_kv_heads,
    'H': config.head_dim,
  }


def rows(config: ModelConfig) -> tuple[Weight, ...]:
  """The rows of the table that a model of this configuration has."""
  flags = {
    '': True,
    'untied': not config.tied,
    'qkv_bias': config.qkv_bias,
    'qk_norm': config.qk_norm,
  }
  return tuple(weight for weight in WEIGHTS if flags[weight.needs])


def shape(config: ModelConfig, weight: Weight) -> tuple[int, ...]:
  """Shape of a weight in the tree, without the layer axis."""
  sizes = _sizes(config)
  return tuple(sizes[letter] for letter in weight.dims)


def stored_shape(config: ModelConfig, weight: Weight) -> tuple[int, ...]:
  """Shape of a weight in a file."""
  sizes = _sizes(config)
  return tuple(
    math.prod(sizes[letter] for letter in group)
    for group in weight.stored.split(',')
  )


def from_stored(
  config: ModelConfig, weight: Weight, array: np.ndarray
) -> np.ndarray:
  """A file's tensor in the shape of the tree."""
  if weight.stored.replace(',', '') != weight.dims:
    array = array.T
  return array.reshape(shape(config, weight))


def to_stored(
  config: ModelConfig, weight: Weight, array: np.ndarray
) -> np.ndarray:
  """A weight of the tree in the shape of a file (contiguous)."""
  target = stored_shape(config, weight)
  if weight.stored.replace(',', '') != weight.dims:
    return np.ascontiguousarray(array.reshape(target[::-1]).T)
  return np.ascontiguousarray(array.reshape(target))


def entries(config: ModelConfig, names: str) -> dict[str, Entry]:
  """Every tensor that a file must hold, by its name there.

  Args:
    config: the model.
    names: 'hf' or 'gguf', the column of the table.
  """
  result = {}
  for weight in rows(config):
    pattern = getattr(weight, names)
    if weight.per_layer:
      for layer in range(config.num_layers):
        result[pattern.format(layer)] = Entry(weight, layer)
    else:
      result[pattern] = Entry(weight, None)
  return result


def check(
  config: ModelConfig,
  wanted: Mapping[str, Entry],
  found: Mapping[str, Found],
  source: Any,
) -> None:
  """Compares headers with the configuration before any data is read.

  Raises:
    ValueError: a tensor is unknown, missing or of another shape; the message
      names the file, the tensor and both shapes.
  """
  described = f'a {config.family} model of {config.num_layers} layers'
  for name, header in found.items():
    if name not in wanted:
      raise ValueError(
        f'{header.file}: unknown tensor {name!r} of shape {header.shape}; '
        f'{described} with tied={config.tied}, qkv_bias={config.qkv_bias}, '
        f'qk_norm={config.qk_norm} has none of that name'
      )
    weight = wanted[name].weight
    expected = stored_shape(config, weight)
    if header.shape != expected:
      raise ValueError(
        f'{header.file}: tensor {name!r} has shape {header.shape}, but the '
        f'configuration needs {expected} ({weight.stored})'
      )
  missing = [name for name in wanted if name not in found]
  if missing:
    expected = stored_shape(config, wanted[missing[0]].weight)
    raise ValueError(
      f'{source}: tensor {missing[0]!r} of shape {expected} is missing '
      f'({len(missing)} of {len(wanted)} are); {described} needs it'
    )


def assemble(
  config: ModelConfig,
  wanted: Mapping[str, Entry],
  read: Callable[[str], np.ndarray],
) -> dict:
  """Reads every tensor into the tree of parameters, layers stacked.

  Args:
    config: the model.
    wanted: the tensors by their names in the file.
    read: gives a tensor in its stored shape, in any float type.

  Returns:
    Tree of f32 numpy arrays; leaves under 'layers' lead with [L, ...].
  """
  layers = {
    weight.name: np.empty(
      (config.num_layers, *shape(config, weight)), np.float32
    )
    for weight in rows(config)
    if weight.per_layer
  }
  params = {'layers': layers}
  for name, entry in wanted.items():
    array = from_stored(config, entry.weight, read(name))
    if entry.layer is None:
      params[entry.weight.name] = np.ascontiguousarray(array, np.float32)
    else:
      layers[entry.weight.name][entry.layer] = array
  return params
