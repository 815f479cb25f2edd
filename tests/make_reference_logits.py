"""Writes data/reference_logits.npz: what transformers on torch computes.

  pip install -e '.[test,parity]' accelerate
  python tests/make_reference_logits.py

Models of every family are tiny and random; their weights are drawn again from
their names wherever the file is read (`draw`), so only config.json, names,
shapes and logits are stored. SmolLM2 goes through transformers' own reader of
GGUF files; some of its logits are stored. One minute on two cores.
"""

import json
import pathlib
import zlib

import numpy as np

PATH = pathlib.Path(__file__).parent / 'data' / 'reference_logits.npz'
SMOLLM2 = 'smollm2-135m-instruct'
MESSAGES = (
  {'role': 'user', 'content': 'What is 3 + 4?'},
  {'role': 'assistant', 'content': '7'},
  {'role': 'user', 'content': 'And twice that? 🙂'},
)
TOP, STRIDE = 16, 512
_BASE = {
  'vocab_size': 64,
  'hidden_size': 32,
  'intermediate_size': 48,
  'num_hidden_layers': 2,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'max_position_embeddings': 64,
  'rms_norm_eps': 1e-5,
}
# Of the wavelengths 6, 63, 628, 6283 llama3 keeps, blends, divides, divides.
_LLAMA3 = {
  'rope_type': 'llama3',
  'rope_theta': 10000.0,
  'factor': 8.0,
  'low_freq_factor': 1.0,
  'high_freq_factor': 4.0,
  'original_max_position_embeddings': 128,
}
_LINEAR = {'rope_type': 'linear', 'rope_theta': 10000.0, 'factor': 4.0}
TINY = {
  'llama': {'model_type': 'llama', 'tie_word_embeddings': True},
  'llama_untied': {'model_type': 'llama', 'tie_word_embeddings': False},
  'llama_llama3': {'model_type': 'llama', 'rope_parameters': _LLAMA3},
  'llama_linear': {'model_type': 'llama', 'rope_parameters': _LINEAR},
  'qwen2': {'model_type': 'qwen2', 'tie_word_embeddings': True},
  'qwen3': {'model_type': 'qwen3', 'head_dim': 24, 'rms_norm_eps': 1e-6},
}


def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
  """f32 weight of a name, the same on every platform and numpy."""
  random = np.random.RandomState(zlib.crc32(name.encode()))
  noise = random.standard_normal(shape)
  if 'norm' in name:
    return (1 + 0.2 * noise).astype(np.float32)
  return (noise / np.sqrt(shape[-1])).astype(np.float32)


def tokens() -> np.ndarray:
  """i32[2, 16] rows of the tiny models."""
  return np.random.RandomState(0).randint(0, 64, (2, 16)).astype(np.int32)


def tiny(name: str) -> dict[str, np.ndarray]:
  """Config, tensor shapes and logits of a tiny model in transformers."""
  import torch
  import transformers

  config = transformers.AutoConfig.for_model(**(_BASE | TINY[name]))
  model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
  stored = dict(model.state_dict())
  if config.tie_word_embeddings:
    stored.pop('lm_head.weight')
  shapes = {key: tuple(value.shape) for key, value in stored.items()}
  with torch.no_grad():
    for key, value in stored.items():
      value.copy_(torch.from_numpy(draw(key, shapes[key])))
    logits = model(torch.from_numpy(tokens()).long()).logits.numpy()
  return {
    f'{name}/config': np.array(config.to_json_string()),
    f'{name}/shapes': np.array(json.dumps(shapes)),
    f'{name}/logits': logits,
  }


def smollm2() -> dict[str, np.ndarray]:
  """Some logits of SmolLM2, its tokenizer and reader being transformers'."""
  import torch
  import transformers

  from thundersync_jax.models import pretrained

  path = pretrained.fetch(SMOLLM2, pretrained.cache_directory())
  words = transformers.AutoTokenizer.from_pretrained(
    str(path.parent), gguf_file=path.name
  )
  model = transformers.AutoModelForCausalLM.from_pretrained(
    str(path.parent), gguf_file=path.name, dtype=torch.float32
  ).eval()
  ids = words.apply_chat_template(list(MESSAGES), add_generation_prompt=True)
  ids = np.asarray(ids['input_ids'], np.int32)
  with torch.no_grad():
    logits = model(torch.from_numpy(ids[None]).long()).logits[0].numpy()
  top = np.argsort(-logits, axis=-1)[:, :TOP].astype(np.int32)
  return {
    'smollm2/tokens': ids,
    'smollm2/top_ids': top,
    'smollm2/top_logits': np.take_along_axis(logits, top, axis=-1),
    'smollm2/strided': logits[:, ::STRIDE],
  }


def main() -> None:
  reference = smollm2()
  for name in TINY:
    reference |= tiny(name)
  PATH.parent.mkdir(exist_ok=True)
  np.savez_compressed(PATH, **reference)


if __name__ == '__main__':
  main()
