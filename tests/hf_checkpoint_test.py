"""Hugging Face directories: round trips, shards, bad files, atomic export."""

import dataclasses
import errno
import functools
import json

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from thundersync_jax.models import families, hf_checkpoint, transformer
from thundersync_jax.models.families import ModelConfig

CONFIG = ModelConfig(
  family='llama',
  vocab_size=12,
  embed_dim=8,
  mlp_dim=20,
  num_layers=3,
  num_heads=4,
  num_kv_heads=2,
  head_dim=6,
  tied=True,
  max_context=64,
)
CONFIGS = {
  'llama': CONFIG,
  'llama_untied': dataclasses.replace(CONFIG, tied=False),
  'qwen2': dataclasses.replace(CONFIG, family='qwen2', qkv_bias=True),
  'qwen3': dataclasses.replace(CONFIG, family='qwen3', qk_norm=True),
}


@functools.cache
def params_of(config: ModelConfig) -> dict:
  """Random f32 numpy arrays of the shapes that the model itself has."""
  random = np.random.default_rng(0)
  shapes = jax.eval_shape(lambda: transformer.init(config, jax.random.key(0)))
  return jax.tree.map(
    lambda x: random.standard_normal(x.shape, np.float32), shapes
  )


@pytest.fixture
def saved(tmp_path):
  """A directory, and its tensors for changing them."""
  hf_checkpoint.export(tmp_path / 'm', CONFIG, params_of(CONFIG))
  tensors = safetensors.numpy.load_file(tmp_path / 'm' / 'model.safetensors')
  return tmp_path / 'm', tensors


def save(directory, tensors) -> None:
  safetensors.numpy.save_file(tensors, directory / 'model.safetensors')


@pytest.mark.parametrize('name', CONFIGS)
@pytest.mark.parametrize('shard_bytes', [10**9, 2000])
def test_export_then_load_changes_nothing(name, shard_bytes, tmp_path):
  config, params = CONFIGS[name], params_of(CONFIGS[name])
  target = tmp_path / 'new' / 'model'
  hf_checkpoint.export(target, config, params, shard_bytes=shard_bytes)
  found, tree = hf_checkpoint.load(target)
  assert found == config
  jax.tree.map(np.testing.assert_array_equal, tree, params)
  assert all(x.dtype == np.float32 for x in jax.tree.leaves(tree))
  files = sorted(p.name for p in target.glob('*.safetensors'))
  if shard_bytes == 2000:
    assert len(files) > 2
    assert files[0] == f'model-00001-of-{len(files):05}.safetensors'
    sizes = [(target / f).stat().st_size for f in files]
    assert max(sizes) < 2000 + 3000  # a header is below 3000 bytes here
  else:
    assert files == ['model.safetensors']


def test_a_projection_is_stored_row_by_output():
  """q[d, n, h] of layer 1 is row n * H + h, column d of its tensor."""
  row = hf_checkpoint.weights.entries(CONFIG, 'hf')
  entry = row['model.layers.1.self_attn.q_proj.weight']
  q = params_of(CONFIG)['layers']['q'][entry.layer]
  stored = hf_checkpoint.weights.to_stored(CONFIG, entry.weight, q)
  assert stored.shape == (24, 8)
  for d, n, h in ((0, 0, 0), (3, 2, 5), (7, 3, 1)):
    assert stored[n * 6 + h, d] == q[d, n, h]
  # o[n, h, d] is row d, column n * H + h.
  entry = row['model.layers.1.self_attn.o_proj.weight']
  o = params_of(CONFIG)['layers']['o'][entry.layer]
  stored = hf_checkpoint.weights.to_stored(CONFIG, entry.weight, o)
  assert stored.shape == (8, 24)
  assert stored[5, 2 * 6 + 4] == o[2, 4, 5]


def test_bfloat16_keeps_what_bfloat16_holds(tmp_path):
  params = params_of(CONFIG)
  target = tmp_path / 'm'
  hf_checkpoint.export(target, CONFIG, params, dtype='bfloat16')
  _, tree = hf_checkpoint.load(target)
  jax.tree.map(
    lambda new, old: np.testing.assert_array_equal(
      new, old.astype(ml_dtypes.bfloat16).astype(np.float32)
    ),
    tree,
    params,
  )
  config = json.loads((target / 'config.json').read_text())
  assert config['torch_dtype'] == 'bfloat16'


@pytest.mark.parametrize('dtype', [np.float16, np.float64, ml_dtypes.bfloat16])
def test_every_float_type_is_read_as_f32(dtype, saved):
  directory, tensors = saved
  save(directory, {name: x.astype(dtype) for name, x in tensors.items()})
  _, params = hf_checkpoint.load(directory)
  wanted = tensors['model.layers.2.mlp.down_proj.weight'].astype(dtype)
  down = params['layers']['down'][2]
  np.testing.assert_array_equal(down, wanted.T.astype(np.float32))


def test_derived_tensors_are_left_out(saved):
  """Old files hold rotary frequencies, and a copy of a tied embedding."""
  directory, tensors = saved
  extra = {
    'model.layers.0.self_attn.rotary_emb.inv_freq': np.ones(3, np.float32),
    'lm_head.weight': tensors['model.embed_tokens.weight'].copy(),
  }
  save(directory, tensors | extra)
  _, params = hf_checkpoint.load(directory)
  assert 'head' not in params
  save(directory, tensors | {'lm_head.weight': extra['lm_head.weight'] + 1})
  with pytest.raises(ValueError, match='lm_head.weight differs from model.em'):
    hf_checkpoint.load(directory)


UP = 'model.layers.1.mlp.up_proj.weight'


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({UP: None}, rf'tensor {UP!r} of shape \(20, 8\) is missing \(1 of 29'),
    ({UP: (8, 20)}, rf'{UP!r} has shape \(8, 20\).*needs \(20, 8\)'),
    ({'score.weight': (2, 8)}, r"unknown tensor 'score.weight' of shape \(2,"),
    (
      {'model.layers.3.mlp.up_proj.weight': (20, 8)},
      r'llama model of 3 layers',
    ),
  ],
)
def test_wrong_tensors_are_named(change, message, saved):
  """Bad input: file, tensor, found and expected shape stand in the error."""
  directory, tensors = saved
  for name, shape in change.items():
    if shape is None:
      del tensors[name]
    else:
      tensors[name] = np.zeros(shape, np.float32)
  save(directory, tensors)
  with pytest.raises(ValueError, match=message) as error:
    hf_checkpoint.load(directory)
  assert str(directory) in str(error.value)


def test_quantised_tensors_are_refused(saved):
  directory, tensors = saved
  save(directory, tensors | {UP: np.zeros((20, 8), np.int8)})
  with pytest.raises(ValueError, match=f'{UP!r} is of type I8; readable are'):
    hf_checkpoint.load(directory)


@pytest.mark.parametrize('kept', [0, 4, 100, 0.5, -1])
def test_a_truncated_file_is_refused(kept, saved):
  """Bad input: the header, half the data, or a single byte is missing."""
  directory, _ = saved
  path = directory / 'model.safetensors'
  data = path.read_bytes()
  size = int(kept * len(data)) if kept == 0.5 else kept % (len(data) + 1)
  size = size - 1 if kept == -1 else size
  path.write_bytes(data[:size])
  with pytest.raises(ValueError, match=rf'model.safetensors \({size} bytes'):
    hf_checkpoint.load(directory)


def test_a_missing_shard_is_named(tmp_path):
  target = tmp_path / 'm'
  hf_checkpoint.export(target, CONFIG, params_of(CONFIG), shard_bytes=2000)
  shard = sorted(target.glob('model-*'))[1]
  shard.unlink()
  with pytest.raises(FileNotFoundError, match=f'{shard.name} does not exist'):
    hf_checkpoint.load(target)


@pytest.mark.parametrize(
  ('file', 'text', 'error', 'message'),
  [
    ('config.json', None, FileNotFoundError, 'config.json does not exist'),
    ('config.json', '{"model_', ValueError, 'config.json is not JSON'),
    ('config.json', '[]', ValueError, 'config.json holds a list'),
    ('config.json', '{"model_type": "gpt2"}', ValueError, "'gpt2'.*'llama'"),
    ('model.safetensors', None, FileNotFoundError, 'holds neither model.safe'),
    ('model.safetensors.index.json', '{}', ValueError, 'has no weight_map'),
  ],
)
def test_bad_directories(file, text, error, message, saved):
  directory, _ = saved
  if text is None:
    (directory / file).unlink()
  else:
    (directory / file).write_text(text)
  with pytest.raises(error, match=message):
    hf_checkpoint.load(directory)


def test_a_failed_export_leaves_nothing(tmp_path):
  """Bad input: parameters of another model, no tokenizer, unknown dtype."""
  params = params_of(CONFIG)
  with pytest.raises(ValueError, match="'head' .12, 8. is missing"):
    hf_checkpoint.export(tmp_path / 'm', CONFIGS['llama_untied'], params)
  wider = dataclasses.replace(CONFIG, mlp_dim=21)
  with pytest.raises(ValueError, match=r"'gate' has shape \(3, 8, 20\)"):
    hf_checkpoint.export(tmp_path / 'm', wider, params)
  with pytest.raises(FileNotFoundError, match='tokenizer.json does not exist'):
    hf_checkpoint.export(tmp_path / 'm', CONFIG, params, tmp_path)
  with pytest.raises(ValueError, match="dtype='int8' must be one of"):
    hf_checkpoint.export(tmp_path / 'm', CONFIG, params, dtype='int8')
  assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
  """Bad input: the second shard finds no room."""
  write, calls = safetensors.numpy.save_file, []

  def save_file(*args, **kwargs):
    calls.append(args[1])
    if len(calls) == 2:
      raise OSError(errno.ENOSPC, 'No space left on device')
    write(*args, **kwargs)

  monkeypatch.setattr(safetensors.numpy, 'save_file', save_file)
  with pytest.raises(OSError, match='No space left'):
    hf_checkpoint.export(
      tmp_path / 'm', CONFIG, params_of(CONFIG), shard_bytes=2000
    )
  assert list(tmp_path.iterdir()) == []


def test_an_export_replaces_nothing(saved):
  directory, tensors = saved
  with pytest.raises(FileExistsError, match='exists already'):
    hf_checkpoint.export(directory, CONFIG, params_of(CONFIG))
  kept = safetensors.numpy.load_file(directory / 'model.safetensors')
  np.testing.assert_array_equal(kept[UP], tensors[UP])


def test_transformers_reads_the_exported_config(saved):
  """transformers' config class, which needs no torch, finds every number."""
  import transformers

  directory, _ = saved
  theirs = transformers.AutoConfig.from_pretrained(directory)
  assert families.from_hf(theirs.to_dict()) == CONFIG
  assert theirs.eos_token_id is None
