"""Logits of tiny models of every family against transformers on torch.

The reference is committed (make_reference_logits.py made it); where torch is
installed the comparison also runs live, and through an export.
"""

import functools
import json

import jax
import jax.numpy as jnp
import make_reference_logits as reference
import numpy as np
import pytest
import safetensors.numpy

from thundersync_jax.models import hf_checkpoint, transformer

# Two f32 implementations differ in the order of their sums only.
TOLERANCE = 5e-4


@functools.cache
def stored() -> dict[str, np.ndarray]:
  with np.load(reference.PATH) as file:
    return dict(file)


def write_checkpoint(name: str, directory) -> None:
  """The directory that transformers would have saved of a tiny model."""
  data = stored()
  (directory / 'config.json').write_text(data[f'{name}/config'].item())
  shapes = json.loads(data[f'{name}/shapes'].item())
  safetensors.numpy.save_file(
    {key: reference.draw(key, tuple(shape)) for key, shape in shapes.items()},
    directory / 'model.safetensors',
  )


def logits(config, params, tokens: np.ndarray) -> np.ndarray:
  """f32[B, T, V] of rows without padding."""

  @jax.jit
  def run(params, tokens):
    ones = jnp.ones_like(tokens)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden = transformer.forward(
      config, params, tokens, positions, ones, 0 * ones
    )
    return jnp.einsum('btd,vd->btv', hidden, transformer.head(params))

  return np.asarray(run(params, jnp.asarray(tokens)))


@pytest.mark.parametrize('name', reference.TINY)
def test_logits_equal_the_committed_ones(name, tmp_path, record_property):
  write_checkpoint(name, tmp_path)
  config, params = hf_checkpoint.load(tmp_path)
  found = logits(config, params, reference.tokens())
  difference = np.abs(found - stored()[f'{name}/logits']).max()
  record_property('max_difference', float(difference))
  assert difference < TOLERANCE


def test_the_reference_tells_the_models_apart():
  """Scaling, tying and family each move logits by far more than TOLERANCE."""
  values = [stored()[f'{name}/logits'] for name in reference.TINY]
  for i, first in enumerate(values):
    for second in values[:i]:
      assert np.abs(first - second).max() > 100 * TOLERANCE


@pytest.mark.parametrize('name', reference.TINY)
def test_the_reference_is_what_transformers_computes_now(name):
  pytest.importorskip('torch')
  now = reference.tiny(name)
  np.testing.assert_allclose(
    now[f'{name}/logits'], stored()[f'{name}/logits'], atol=1e-5
  )


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('name', reference.TINY)
def test_transformers_loads_an_export(name, dtype, tmp_path, record_property):
  """Load, export in shards, reload in transformers: the same logits."""
  torch = pytest.importorskip('torch')
  import transformers

  (tmp_path / 'in').mkdir()
  write_checkpoint(name, tmp_path / 'in')
  config, params = hf_checkpoint.load(tmp_path / 'in')
  hf_checkpoint.export(
    tmp_path / 'out', config, params, dtype=dtype, shard_bytes=20_000
  )
  assert len(list((tmp_path / 'out').glob('model-*.safetensors'))) > 1
  model, report = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path / 'out', dtype=torch.float32, output_loading_info=True
  )
  assert not any(report.values()), report
  tokens = reference.tokens()
  with torch.no_grad():
    theirs = model(torch.from_numpy(tokens).long()).logits.numpy()
  config, params = hf_checkpoint.load(tmp_path / 'out')
  difference = np.abs(logits(config, params, tokens) - theirs).max()
  record_property('max_difference', float(difference))
  assert difference < TOLERANCE
