"""GGUF files written here: every block type, the llama row order, bad files.

Blocks are decoded a second time by loops over bytes, after the layouts of
ggml-common.h; the rows of q and k are interleaved by llama.cpp's own formula.
"""

import dataclasses
import struct

import gguf
import numpy as np
import pytest

from thundersync_jax.models import gguf_checkpoint, weights
from thundersync_jax.models.families import ModelConfig, RopeScaling

BYTES = {'Q8_0': 34, 'Q4_0': 18, 'Q4_1': 20, 'Q5_0': 22, 'Q5_1': 24}
K_BYTES = {'Q4_K': 144, 'Q5_K': 176, 'Q6_K': 210}
CONFIG = ModelConfig(
  family='llama',
  vocab_size=6,
  embed_dim=256,
  mlp_dim=32,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  rope_theta=10000.0,
  norm_eps=1e-5,
  tied=True,
  max_context=64,
)
CONFIGS = {
  'llama': CONFIG,
  'llama_untied': dataclasses.replace(CONFIG, tied=False),
  'llama_linear': dataclasses.replace(
    CONFIG, rope_scaling=RopeScaling('linear', 4.0)
  ),
  'llama_llama3': dataclasses.replace(
    CONFIG, rope_theta=500000.0, rope_scaling=RopeScaling('llama3', 32.0)
  ),
  'qwen2': dataclasses.replace(CONFIG, family='qwen2', qkv_bias=True),
  'qwen3': dataclasses.replace(CONFIG, family='qwen3', qk_norm=True),
}


def half(data: bytes) -> float:
  return struct.unpack('<e', data)[0]


def slow_32(name: str, block: bytes) -> list[float]:
  """The 32 values of one block of a simple type."""
  scale, rest = half(block[:2]), block[2:]
  if name == 'Q8_0':
    return [scale * q for q in struct.unpack('<32b', rest)]
  low = 0.0
  if name.endswith('_1'):
    low, rest = half(rest[:2]), rest[2:]
  high = 0
  if name.startswith('Q5'):
    high, rest = int.from_bytes(rest[:4], 'little'), rest[4:]
  quants = [b & 15 for b in rest] + [b >> 4 for b in rest]
  quants = [q + 16 * (high >> i & 1) for i, q in enumerate(quants)]
  zero = {'Q4_0': 8, 'Q5_0': 16}.get(name, 0)
  return [scale * (q - zero) + low for q in quants]


def slow_256(name: str, block: bytes) -> list[float]:
  """The 256 values of one block of a K type."""
  if name == 'Q6_K':
    return slow_q6(block)
  scale, low = half(block[:2]), half(block[2:4])
  packed, rest = block[4:16], block[16:]
  high = rest[:32] if name == 'Q5_K' else bytes(32)
  quants = rest[32:] if name == 'Q5_K' else rest
  values = []
  for j in range(8):
    if j < 4:
      s, m = packed[j] & 63, packed[j + 4] & 63
    else:
      s = (packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4
      m = packed[j + 4] >> 4 | (packed[j] >> 6) << 4
    for i in range(32):
      q = quants[32 * (j // 2) + i] >> 4 * (j % 2) & 15
      q += 16 * (high[i] >> j & 1)
      values.append(scale * s * q - low * m)
  return values


def slow_q6(block: bytes) -> list[float]:
  low, high, scales = block[:128], block[128:192], block[192:208]
  scales, scale = struct.unpack('<16b', scales), half(block[208:])
  values = [0.0] * 256
  for n in range(2):
    for i in range(32):
      for part in range(4):
        q = low[64 * n + 32 * (part % 2) + i] >> 4 * (part // 2) & 15
        q |= (high[32 * n + i] >> 2 * part & 3) << 4
        s = scales[8 * n + 2 * part + i // 16]
        values[128 * n + 32 * part + i] = scale * s * (q - 32)
  return values


def random_blocks(name: str, rows: int) -> np.ndarray:
  """u8[rows, bytes of 256 values]: random but for the scales, which are f16."""
  random = np.random.default_rng(len(name))
  size, count = (K_BYTES[name], 1) if name in K_BYTES else (BYTES[name], 8)
  blocks = random.integers(0, 256, (rows, count, size), np.uint8)
  scales = random.standard_normal((rows, count, 2)).astype(np.float16)
  if name == 'Q6_K':
    blocks[..., -2:] = scales[..., :1].view(np.uint8)
  else:
    blocks[..., :4] = scales.view(np.uint8)
  return blocks.reshape(rows, -1)


def random_params(config: ModelConfig) -> dict:
  random = np.random.default_rng(0)
  layers, params = {}, {}
  for weight in weights.rows(config):
    shape = weights.shape(config, weight)
    leading = (config.num_layers,) if weight.per_layer else ()
    tree = layers if weight.per_layer else params
    tree[weight.name] = random.standard_normal(leading + shape, np.float32)
  return params | {'layers': layers}


def interleave(array: np.ndarray, heads: int) -> np.ndarray:
  """What llama.cpp's converter does to the rows of q and k."""
  shape = (heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
  return array.reshape(shape).swapaxes(1, 2).reshape(array.shape)


def tensors(config: ModelConfig, params: dict) -> dict[str, np.ndarray]:
  """Every tensor of a file as the converter stores it."""
  result = {}
  for name, entry in weights.entries(config, 'gguf').items():
    leaf = entry.weight.name
    array = params.get(leaf)
    if array is None:
      array = params['layers'][leaf][entry.layer]
    array = weights.to_stored(config, entry.weight, array)
    if config.family == 'llama' and leaf in ('q', 'k'):
      heads = config.num_heads if leaf == 'q' else config.num_kv_heads
      array = interleave(array, heads)
    result[name] = array
  return result


def write(path, config: ModelConfig, arrays: dict, **changes) -> None:
  """Writes a GGUF file; a tensor is an array or a pair (blocks, type)."""
  writer = gguf.GGUFWriter(path, changes.get('arch', config.family))
  writer.add_context_length(config.max_context)
  writer.add_embedding_length(config.embed_dim)
  writer.add_feed_forward_length(config.mlp_dim)
  writer.add_block_count(config.num_layers)
  writer.add_head_count(config.num_heads)
  writer.add_head_count_kv(config.num_kv_heads)
  writer.add_key_length(config.head_dim)
  writer.add_layer_norm_rms_eps(config.norm_eps)
  writer.add_rope_freq_base(config.rope_theta)
  if config.rope_scaling and config.rope_scaling.kind == 'linear':
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(config.rope_scaling.factor)
  writer.add_tokenizer_model(changes.get('tokenizer', 'gpt2'))
  writer.add_tokenizer_pre(changes.get('pre', 'smollm'))
  writer.add_token_list(['a', 'b', 'c', 'ab', 'abc', '<|end|>'])
  writer.add_token_types([1, 1, 1, 1, 1, 3])
  writer.add_token_merges(['a b', 'ab c'])
  writer.add_eos_token_id(5)
  for name, array in arrays.items():
    array, kind = array if isinstance(array, tuple) else (array, None)
    writer.add_tensor(name, array, raw_dtype=kind)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()


def assert_trees_equal(found: dict, wanted: dict) -> None:
  assert found.keys() == wanted.keys()
  for name, value in wanted.items():
    if isinstance(value, dict):
      assert_trees_equal(found[name], value)
    else:
      assert found[name].dtype == np.float32
      np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.parametrize('name', CONFIGS)
def test_every_family_is_read_as_written(name, tmp_path):
  config = CONFIGS[name]
  params = random_params(config)
  arrays = tensors(config, params)
  if name == 'llama_llama3':
    # By hand, wavelengths 6.3, 167, 4442.9 and 118143 of 8192 positions: the
    # third turns 1.843849 times, between 1 and 4, so 0.281283 of it is kept.
    blend = 1 / (0.281283 + (1 - 0.281283) / 32)
    divisors = np.array([1, 1, blend, 32], np.float32)
    arrays['rope_freqs.weight'] = divisors
  write(tmp_path / 'm.gguf', config, arrays)
  found, tree, vocabulary = gguf_checkpoint.read(tmp_path / 'm.gguf')
  assert found == config
  assert_trees_equal(tree, params)
  assert vocabulary.tokens[vocabulary.ids['eos_token_id']] == '<|end|>'


@pytest.mark.parametrize('name', [*BYTES, *K_BYTES])
def test_blocks_equal_a_loop_over_their_bytes(name, tmp_path):
  blocks = random_blocks(name, CONFIG.vocab_size)
  kind = gguf.GGMLQuantizationType[name]
  arrays = tensors(CONFIG, random_params(CONFIG))
  arrays['token_embd.weight'] = (blocks, kind)
  write(tmp_path / 'm.gguf', CONFIG, arrays)
  _, params, _ = gguf_checkpoint.read(tmp_path / 'm.gguf')
  slow, size = (
    (slow_256, K_BYTES[name]) if name in K_BYTES else (slow_32, BYTES[name])
  )
  wanted = [
    sum((slow(name, row[i : i + size]) for i in range(0, len(row), size)), [])
    for row in (bytes(row) for row in blocks)
  ]
  # The products of three factors are rounded once or twice in f32.
  np.testing.assert_allclose(params['embed'], wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
  ('name', 'bits'),
  [('F16', 11), ('BF16', 8), ('Q8_0', 7), ('Q5_1', 5), ('Q4_1', 4)],
)
def test_rounding_of_a_round_trip_is_that_of_its_bits(name, bits, tmp_path):
  """A value returns to half a unit of the type's last bit.

  Floats lose bits of each value; blocks of 32 share the step of their range.
  """
  arrays = tensors(CONFIG, random_params(CONFIG))
  original = arrays['token_embd.weight']
  kind = gguf.GGMLQuantizationType[name]
  arrays['token_embd.weight'] = (gguf.quants.quantize(original, kind), kind)
  write(tmp_path / 'm.gguf', CONFIG, arrays)
  _, params, _ = gguf_checkpoint.read(tmp_path / 'm.gguf')
  error = np.abs(params['embed'] - original)
  if name in ('F16', 'BF16'):
    assert (error <= np.abs(original) * 2.0**-bits + 1e-7).all()
    return
  blocks = original.reshape(-1, 32)
  width = np.ptp(blocks, axis=1) if name != 'Q8_0' else np.abs(blocks).max(1)
  step = width / (2**bits - 1)
  # The f16 scale and offset of a block add a thousandth each.
  bound = 0.5 * step + 2e-3 * np.abs(blocks).max(1)
  assert (error.reshape(-1, 32) <= bound[:, None]).all()
  assert error.max() > 1e-4


def test_quantised_q_and_k_are_put_back_in_order(tmp_path):
  """Rows are reordered after dequantising: the same as without a type."""
  params = random_params(CONFIG)
  arrays = tensors(CONFIG, params)
  kind = gguf.GGMLQuantizationType.Q8_0
  for name in list(arrays):
    if 'attn_q.' in name or 'attn_k.' in name:
      arrays[name] = (gguf.quants.quantize(arrays[name], kind), kind)
  write(tmp_path / 'm.gguf', CONFIG, arrays)
  _, found, _ = gguf_checkpoint.read(tmp_path / 'm.gguf')
  for name in ('q', 'k'):
    error = found['layers'][name] - params['layers'][name]
    assert 0 < np.abs(error).max() < 0.03


def bad_file(case: str, path) -> None:
  """Writes a file with one fault."""
  arrays, config, changes = tensors(CONFIG, random_params(CONFIG)), CONFIG, {}
  if case == 'missing tensor':
    del arrays['blk.1.ffn_up.weight']
  elif case == 'unknown tensor':
    arrays['blk.0.attn_sinks.weight'] = np.zeros(4, np.float32)
  elif case == 'bias of another family':
    arrays['blk.0.attn_q.bias'] = np.zeros(32, np.float32)
  elif case == 'shape':
    arrays['blk.1.ffn_up.weight'] = np.zeros((30, 256), np.float32)
  elif case == 'tensor type':
    blocks = np.zeros((6, 84), np.uint8)
    kind = gguf.GGMLQuantizationType.Q2_K
    arrays['token_embd.weight'] = (blocks, kind)
  elif case == 'rope':
    arrays['rope_freqs.weight'] = np.array([1, 2, 3, 32], np.float32)
  else:
    key, _, value = case.partition('=')
    changes = {key: value}
  write(path, config, arrays, **changes)


@pytest.mark.parametrize(
  ('case', 'message'),
  [
    ('missing tensor', r"'blk.1.ffn_up.weight' of shape \(32, 256\) is miss"),
    ('unknown tensor', r"unknown tensor 'blk.0.attn_sinks.weight'"),
    ('bias of another family', r"unknown tensor 'blk.0.attn_q.bias'"),
    ('shape', r"'blk.1.ffn_up.weight' has shape \(30, 256\).*\(32, 256\)"),
    ('tensor type', r"'token_embd.weight' is of type Q2_K; readable are F32"),
    ('rope', r'rope_freqs.weight \[1.0, 2.0, 3.0, 32.0\] is not'),
    ('arch=gemma3', r"architecture 'gemma3' is not implemented; known: \['ll"),
    ('tokenizer=llama', r"tokenizer model 'llama' is not implemented"),
    ('pre=tekken', r"pre-tokenizer 'tekken' is not implemented; known: \['gpt"),
  ],
)
def test_a_bad_file_is_refused(case, message, tmp_path):
  """Bad input: each error names the file, the fault and what is known."""
  bad_file(case, tmp_path / 'm.gguf')
  with pytest.raises(ValueError, match=message) as error:
    gguf_checkpoint.read(tmp_path / 'm.gguf')
  assert 'm.gguf' in str(error.value)


@pytest.mark.parametrize('kept', [0.0, 0.001, 0.01, 0.03, 0.1, 0.5, 0.999])
def test_a_truncated_file_is_refused(kept, tmp_path):
  """Bad input: cut in the header, the vocabulary or the weights."""
  path = tmp_path / 'm.gguf'
  write(path, CONFIG, tensors(CONFIG, random_params(CONFIG)))
  size = int(kept * path.stat().st_size)
  path.write_bytes(path.read_bytes()[:size])
  with pytest.raises(ValueError, match=rf'm.gguf \({size} bytes\) is trunc'):
    gguf_checkpoint.read(path)


def test_an_unknown_type_number_is_refused(tmp_path):
  path = tmp_path / 'm.gguf'
  write(path, CONFIG, tensors(CONFIG, random_params(CONFIG)))
  data = path.read_bytes()
  name = b'output_norm.weight'
  at = data.index(name) + len(name) + 4 + 8  # one dimension and its size
  path.write_bytes(data[:at] + struct.pack('<I', 999) + data[at + 4 :])
  with pytest.raises(ValueError, match='999'):
    gguf_checkpoint.read(path)


def test_no_file():
  with pytest.raises(FileNotFoundError, match='nowhere.gguf does not exist'):
    gguf_checkpoint.read('nowhere.gguf')
