"""Configs of model families: read, written, and refused by name."""

import dataclasses

import pytest

from thundersync_jax.models import families

# config.json of SmolLM2-135M-Instruct, as far as it describes the model.
SMOLLM2 = {
  'model_type': 'llama',
  'attention_bias': False,
  'hidden_act': 'silu',
  'hidden_size': 576,
  'intermediate_size': 1536,
  'max_position_embeddings': 8192,
  'mlp_bias': False,
  'num_attention_heads': 9,
  'num_hidden_layers': 30,
  'num_key_value_heads': 3,
  'rms_norm_eps': 1e-05,
  'rope_scaling': None,
  'rope_theta': 100000,
  'tie_word_embeddings': True,
  'vocab_size': 49152,
}
LLAMA3_ROPE = {
  'rope_type': 'llama3',
  'factor': 32.0,
  'low_freq_factor': 1.0,
  'high_freq_factor': 4.0,
  'original_max_position_embeddings': 8192,
}


def test_smollm2_is_a_llama():
  assert families.from_hf(SMOLLM2) == families.ModelConfig(
    family='llama',
    vocab_size=49152,
    embed_dim=576,
    mlp_dim=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rope_theta=100000.0,
    norm_eps=1e-5,
    tied=True,
    max_context=8192,
  )


def test_both_spellings_of_rope_are_read():
  old = SMOLLM2 | {'rope_scaling': LLAMA3_ROPE}
  new = {k: v for k, v in SMOLLM2.items() if not k.startswith('rope')}
  new['rope_parameters'] = LLAMA3_ROPE | {'rope_theta': 100000}
  assert families.from_hf(old) == families.from_hf(new)
  assert families.from_hf(old).rope_scaling == families.RopeScaling(
    'llama3', 32.0, 1.0, 4.0, 8192
  )
  oldest = SMOLLM2 | {'rope_scaling': {'type': 'linear', 'factor': 2.0}}
  scaling = families.from_hf(oldest).rope_scaling
  assert scaling == families.RopeScaling('linear', 2.0)


@pytest.mark.parametrize('family', sorted(families.FAMILIES))
@pytest.mark.parametrize('kind', [None, 'linear', 'llama3'])
def test_what_is_written_is_read_back(family, kind):
  scaling = kind and families.RopeScaling(kind, 8.0)
  config = dataclasses.replace(
    families.from_hf(SMOLLM2 | {'model_type': family}), rope_scaling=scaling
  )
  assert families.from_hf(families.to_hf(config)) == config
  assert config.qkv_bias == (family == 'qwen2')
  assert config.qk_norm == (family == 'qwen3')


@pytest.mark.parametrize(
  'change, message',
  [
    ({'model_type': 'mamba'}, r"'mamba'.*'llama', 'qwen2', 'qwen3'"),
    ({'hidden_size': None}, "no 'hidden_size'"),
    ({'hidden_act': 'gelu'}, "hidden_act='gelu'"),
    ({'attention_bias': True}, 'attention_bias=True'),
    ({'use_sliding_window': True}, 'use_sliding_window=True'),
    ({'rope_parameters': {'partial_rotary_factor': 0.5}}, 'factor=0.5'),
    ({'num_key_value_heads': 2}, 'num_kv_heads=2 must divide num_heads=9'),
    ({'head_dim': 3}, 'head_dim=3 must be even'),
    ({'rope_scaling': {'type': 'dynamic', 'factor': 2.0}}, "'dynamic'.*linear"),
    ({'rope_scaling': {'rope_type': 'llama3'}}, "no 'factor'"),
    ({'rope_scaling': {'type': 'linear', 'factor': 0.5}}, 'factor=0.5'),
  ],
)
def test_what_is_not_implemented_is_refused_by_name(change, message):
  with pytest.raises(ValueError, match=message):
    families.from_hf(SMOLLM2 | change)


def test_unknown_compute_dtype_is_refused():
  config = families.from_hf(SMOLLM2)
  with pytest.raises(ValueError, match="'float16' must be one of"):
    dataclasses.replace(config, compute_dtype='float16')
