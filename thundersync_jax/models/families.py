"""Model families: one frozen config, read from and written to Hugging Face.

All families are the same decoder (RMSNorm, rotary positions, grouped-query
attention, gated SiLU mlp). They differ in three switches: biases on q, k and v
(Qwen2, arXiv 2407.10671), norms on q and k (Qwen3, arXiv 2505.09388), and how
rotary frequencies are stretched (Llama 3, arXiv 2407.21783). A family that
needs anything else is refused by name instead of loaded wrongly.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

_COMPUTE_DTYPES = ('float32', 'bfloat16')


@dataclasses.dataclass(frozen=True)
class RopeScaling:
  """How rotary frequencies are stretched beyond the trained context.

  kind 'linear' divides every frequency by `factor` (arXiv 2306.15595); kind
  'llama3' divides only those with a wavelength above
  original_context / low_freq_factor tokens, keeps those below
  original_context / high_freq_factor, and blends in between.
  """

  kind: str
  factor: float
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0
  original_context: int = 8192

  def __post_init__(self):
    if self.kind not in ('linear', 'llama3'):
      raise ValueError(
        f'rope scaling {self.kind!r} is not implemented; known: linear, '
        'llama3; use a checkpoint without it'
      )
    if self.factor < 1.0:
      raise ValueError(f'rope scaling factor={self.factor} must be >= 1')
    if self.high_freq_factor <= self.low_freq_factor:
      raise ValueError(
        f'rope scaling high_freq_factor={self.high_freq_factor} must be '
        f'above low_freq_factor={self.low_freq_factor}'
      )


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """Shape and arithmetic of one decoder; hashable, so it can be jit-static.

  compute_dtype 'bfloat16' casts the operands of every matrix product (f32
  accumulation); the residual stream, norms, softmax and losses never leave
  f32. remat recomputes each layer in the backward pass.
  """

  family: str
  vocab_size: int
  embed_dim: int
  mlp_dim: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  rope_theta: float = 10000.0
  rope_scaling: RopeScaling | None = None
  norm_eps: float = 1e-6
  tied: bool = False
  qkv_bias: bool = False
  qk_norm: bool = False
  max_context: int = 2048
  compute_dtype: str = 'float32'
  remat: bool = False

  def __post_init__(self):
    switches(self.family)
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f'num_kv_heads={self.num_kv_heads} must divide '
        f'num_heads={self.num_heads}'
      )
    if self.head_dim % 2:
      raise ValueError(
        f'head_dim={self.head_dim} must be even: rotary positions turn pairs'
      )
    if self.compute_dtype not in _COMPUTE_DTYPES:
      raise ValueError(
        f'compute_dtype={self.compute_dtype!r} must be one of {_COMPUTE_DTYPES}'
      )


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
  """Config from the dict of a Hugging Face config.json.

  Reads both spellings of the rotary settings: rope_theta with rope_scaling
  (transformers 4) and rope_parameters (transformers 5).

  Raises:
    ValueError: unknown family, a missing key, or a setting that would need
      another architecture (sliding window, other activation, extra biases).
  """
  family = _required(hf, 'model_type')
  flags = switches(family)
  _refuse_other_architectures(hf, family)
  theta, scaling = _rope(hf)
  heads = _required(hf, 'num_attention_heads')
  embed_dim = _required(hf, 'hidden_size')
  return ModelConfig(
    family=family,
    vocab_size=_required(hf, 'vocab_size'),
    embed_dim=embed_dim,
    mlp_dim=_required(hf, 'intermediate_size'),
    num_layers=_required(hf, 'num_hidden_layers'),
    num_heads=heads,
    num_kv_heads=hf.get('num_key_value_heads') or heads,
    head_dim=hf.get('head_dim') or embed_dim // heads,
    rope_theta=theta,
    rope_scaling=scaling,
    norm_eps=hf.get('rms_norm_eps', 1e-6),
    tied=hf.get('tie_word_embeddings', False),
    max_context=_required(hf, 'max_position_embeddings'),
    **flags,
  )


def to_hf(config: ModelConfig) -> dict[str, Any]:
  """The config.json dict of `config`; from_hf reads it back unchanged.

  compute_dtype and remat say how we compute, not what the model is, and are
  not written.
  """
  rope = {'rope_type': 'default'}
  scaling = config.rope_scaling
  if scaling is not None:
    rope = {'rope_type': scaling.kind, 'factor': scaling.factor}
  if scaling is not None and scaling.kind == 'llama3':
    rope |= {
      'low_freq_factor': scaling.low_freq_factor,
      'high_freq_factor': scaling.high_freq_factor,
      'original_max_position_embeddings': scaling.original_context,
    }
  hf = {
    'architectures': [_ARCHITECTURES[config.family]],
    'model_type': config.family,
    'vocab_size': config.vocab_size,
    'hidden_size': config.embed_dim,
    'intermediate_size': config.mlp_dim,
    'num_hidden_layers': config.num_layers,
    'num_attention_heads': config.num_heads,
    'num_key_value_heads': config.num_kv_heads,
    'head_dim': config.head_dim,
    'hidden_act': 'silu',
    'rms_norm_eps': config.norm_eps,
    'rope_theta': config.rope_theta,
    'rope_scaling': rope if scaling is not None else None,
    'rope_parameters': rope | {'rope_theta': config.rope_theta},
    'tie_word_embeddings': config.tied,
    'max_position_embeddings': config.max_context,
  }
  if config.family != 'qwen2':
    hf['attention_bias'] = False
  return hf


def switches(name: str) -> dict[str, bool]:
  """What tells a family from the others, as fields of ModelConfig.

  Raises:
    ValueError: unknown family; the message lists those that exist.
  """
  if name not in FAMILIES:
    raise ValueError(
      f'model family {name!r} is not implemented; known: {sorted(FAMILIES)}'
    )
  return FAMILIES[name]


def _required(hf: Mapping[str, Any], key: str) -> Any:
  if hf.get(key) is None:
    raise ValueError(f'config.json has no {key!r}; it is needed')
  return hf[key]


def _refuse_other_architectures(hf: Mapping[str, Any], family: str) -> None:
  expected = {
    'hidden_act': 'silu',
    'attention_bias': False,
    'mlp_bias': False,
    'use_sliding_window': False,
    'partial_rotary_factor': 1.0,
  }
  rope = hf.get('rope_parameters') or {}
  for key, value in expected.items():
    found = hf.get(key, rope.get(key, value))
    if found is not None and found != value:
      raise ValueError(
        f'config.json of {family} has {key}={found!r}; only {value!r} is '
        'implemented'
      )


def _rope(hf: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
  """Base and scaling out of either spelling."""
  rope = hf.get('rope_parameters') or hf.get('rope_scaling') or {}
  theta = float(rope.get('rope_theta') or hf.get('rope_theta') or 10000.0)
  kind = rope.get('rope_type') or rope.get('type') or 'default'
  if kind == 'default':
    return theta, None
  if kind == 'linear':
    return theta, RopeScaling(kind, float(_required(rope, 'factor')))
  if kind == 'llama3':
    return theta, RopeScaling(
      kind,
      float(_required(rope, 'factor')),
      low_freq_factor=float(_required(rope, 'low_freq_factor')),
      high_freq_factor=float(_required(rope, 'high_freq_factor')),
      original_context=_required(rope, 'original_max_position_embeddings'),
    )
  return theta, RopeScaling(kind, 1.0)  # raises, and names the known kinds


# SmolLM2 is a llama.
FAMILIES = {
  'llama': {'qkv_bias': False, 'qk_norm': False},
  'qwen2': {'qkv_bias': True, 'qk_norm': False},
  'qwen3': {'qkv_bias': False, 'qk_norm': True},
}
_ARCHITECTURES = {
  'llama': 'LlamaForCausalLM',
  'qwen2': 'Qwen2ForCausalLM',
  'qwen3': 'Qwen3ForCausalLM',
}
