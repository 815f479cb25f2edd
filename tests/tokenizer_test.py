"""Tokenizers: bytes, and Hugging Face files written from GGUF tables."""

import dataclasses
import json

import numpy as np
import pytest

from thundersync_jax.models import gguf_tokenizer, tokenizer

CHATML = (
  "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] "
  "+ '<|im_end|>\n' }}{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Refuses a conversation that the model's own template would refuse.
STRICT = (
  "{% if messages[0]['role'] != 'user' %}"
  "{{ raise_exception('user first') }}{% endif %}" + CHATML
)
SPECIALS = ('<|endoftext|>', '<|im_start|>', '<|im_end|>', '<|pad|>', '<tool>')
CHAT = [
  {'role': 'user', 'content': 'the thin 12'},
  {'role': 'assistant', 'content': 'hint é🙂'},
]


def byte_alphabet() -> list[str]:
  """GPT-2's printable stand-ins: latin-1 where printable, else from 256 on."""
  printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
  letters, spare = [], 256
  for byte in range(256):
    letters.append(chr(byte if byte in printable else spare))
    spare += byte not in printable
  return letters


def vocabulary(**changes) -> gguf_tokenizer.Vocabulary:
  """256 bytes, four merges, five specials, the last one user-defined."""
  merges = ('t h', 'th e', 'i n', '1 2')
  tokens = (*byte_alphabet(), *(m.replace(' ', '') for m in merges), *SPECIALS)
  ids = {'eos_token_id': tokens.index('<|im_end|>')}
  settings = {
    'source': 'm.gguf',
    'tokens': tokens,
    'types': (*[1] * 260, 3, 3, 3, 3, 4),
    'merges': merges,
    'pre': 'gpt-2',
    'ids': ids,
    'add_bos': False,
    'chat_template': CHATML,
  }
  return gguf_tokenizer.Vocabulary(**(settings | changes))


def built(directory, generation=None, config=None, **changes):
  """The tokenizer of a directory written from a vocabulary."""
  gguf_tokenizer.write(vocabulary(**changes), directory)
  for name, ends in (('generation_config', generation), ('config', config)):
    if ends is not None:
      text = json.dumps({'eos_token_id': ends})
      (directory / f'{name}.json').write_text(text)
  return tokenizer.load(directory)


def id_of(text: str) -> int:
  return vocabulary().tokens.index(text)


def pieces(words, text: str) -> list[str]:
  return [words.decode([i]) for i in words.encode(text)]


def test_merges_and_bytes(tmp_path):
  words = built(tmp_path)
  assert words.vocab_size == 256 + 4 + 5
  found = words.encode('the thin')
  assert found.dtype == np.int32
  wanted = ['the', 'Ġ', 'th', 'in']
  assert found.tolist() == [id_of(token) for token in wanted]
  assert words.encode('').tolist() == []


@pytest.mark.parametrize(
  'text', ['', '  a\n\n b\t', 'é🙂 the', '<|im_end|>x<tool>', '\x00\x7f']
)
def test_text_survives(text, tmp_path):
  words = built(tmp_path)
  assert words.decode(words.encode(text), skip_special=False) == text


def test_special_tokens_can_be_left_out(tmp_path):
  words = built(tmp_path)
  ids = words.encode('a<|im_end|>b<tool>')
  assert id_of('<|im_end|>') in ids
  assert words.decode(ids) == 'ab<tool>'  # user-defined tokens are text
  # A padded vocabulary can sample ids that the tokenizer does not have.
  assert words.decode([*ids, 9999]) == 'ab<tool>'


def test_chat_text_survives(tmp_path):
  words = built(tmp_path)
  ids = words.apply_chat_template(CHAT)
  assert ids.dtype == np.int32
  assert words.decode(ids, skip_special=False) == (
    '<|im_start|>user\nthe thin 12<|im_end|>\n'
    '<|im_start|>assistant\nhint é🙂<|im_end|>\n<|im_start|>assistant\n'
  )
  closed = words.apply_chat_template(CHAT, add_generation_prompt=False)
  np.testing.assert_array_equal(closed, ids[: len(closed)])
  assert len(ids) > len(closed)


@pytest.mark.parametrize(
  ('generation', 'config', 'eos', 'wanted'),
  [
    (None, None, '<|im_end|>', {'<|im_end|>'}),
    # The tokenizer ends texts, the template ends turns: both stop.
    (None, None, '<|endoftext|>', {'<|endoftext|>', '<|im_end|>'}),
    ([260, 4], None, '<|im_end|>', {'<|im_end|>', '<|endoftext|>', '\u0104'}),
    (260, None, '<|im_end|>', {'<|im_end|>', '<|endoftext|>'}),
    (None, 260, '<|im_end|>', {'<|im_end|>', '<|endoftext|>'}),
    # config.json does not count beside a generation_config.json.
    (262, 260, '<|im_end|>', {'<|im_end|>'}),
  ],
)
def test_stop_ids_are_the_union(generation, config, eos, wanted, tmp_path):
  ids = {'eos_token_id': id_of(eos), 'padding_token_id': id_of('<|pad|>')}
  words = built(tmp_path, generation, config, ids=ids)
  assert words.stop_ids == {id_of(token) for token in wanted}
  assert words.eos_text == eos
  # cases row 9: padding of its own ends nothing.
  assert words.pad_id == id_of('<|pad|>')
  assert words.pad_id not in words.stop_ids


@pytest.mark.parametrize('named', [True, False])
def test_pad_may_equal_the_end(named, tmp_path):
  """cases row 9: the end token stops and stays, whatever pads."""
  end = id_of('<|im_end|>')
  ids = {'eos_token_id': end} | ({'padding_token_id': end} if named else {})
  words = built(tmp_path, ids=ids)
  assert words.pad_id == end
  assert words.stop_ids == {end}
  chat = words.apply_chat_template(CHAT, add_generation_prompt=False)
  assert (chat == end).sum() == len(CHAT)


def test_ends_of_turn_of_the_file_stop(tmp_path):
  """A GGUF names them apart from the end of text, template or not."""
  ids = {'eos_token_id': 260, 'eot_token_id': 262}
  words = built(tmp_path, ids=ids, chat_template=None)
  assert words.stop_ids == {260, 262}


def test_a_template_may_refuse(tmp_path):
  words = built(tmp_path, chat_template=STRICT)
  with pytest.raises(ValueError, match=r"roles \['system'\]: user first"):
    words.apply_chat_template([{'role': 'system', 'content': 'x'}])
  assert words.stop_ids == {id_of('<|im_end|>')}


def test_a_template_that_refuses_the_probe_is_reported(tmp_path, caplog):
  """The stop set then comes from the other sources."""
  template = '{{ raise_exception("no assistant") }}'
  words = built(tmp_path, chat_template=template)
  assert words.stop_ids == {id_of('<|im_end|>')}
  assert 'no assistant' in caplog.text


def test_errors_of_a_directory(tmp_path):
  with pytest.raises(FileNotFoundError, match='tokenizer_config.json does no'):
    tokenizer.load(tmp_path)
  words = built(tmp_path, chat_template=None)
  with pytest.raises(ValueError, match='has no chat template'):
    words.apply_chat_template(CHAT)
  with pytest.raises(ValueError, match='names an end token; set eos_token'):
    built(tmp_path, chat_template=None, ids={})


@pytest.mark.parametrize(
  ('pre', 'text', 'wanted'),
  [
    ('gpt-2', "I'll 12345", ['I', "'ll", ' 12345']),
    ('smollm', "I'll 12345", ['I', "'ll", ' ', '1', '2', '3', '4', '5']),
    ('llama-bpe', "I'LL 12345", ['I', "'LL", ' ', '123', '45']),
    ('qwen2', "I'LL 123", ['I', "'LL", ' ', '1', '2', '3']),
    ('llama-bpe', 'a\n\n  b.\n', ['a', '\n\n', ' ', ' b', '.\n']),
    ('qwen2', '(ab)==\r\n', ['(ab', ')==\r\n']),
    ('gpt-2', 'a\n\n  b.\n', ['a', '\n\n ', ' b', '.', '\n']),
  ],
)
def test_words_are_cut_by_the_named_rule(pre, text, wanted):
  """By hand, from the published expressions."""
  rule = gguf_tokenizer.PRE_TOKENIZERS[pre].make()
  offsets = [span for _, span in rule.pre_tokenize_str(text)]
  assert [text[start:end] for start, end in offsets] == wanted


def test_qwen2_composes_letters_first(tmp_path):
  (tmp_path / 'a').mkdir()
  (tmp_path / 'b').mkdir()
  composed, split = '\u00e9', 'e\u0301'
  words = built(tmp_path / 'a', pre='qwen2')
  assert words.encode(split).tolist() == words.encode(composed).tolist()
  words = built(tmp_path / 'b', pre='llama-bpe')
  assert words.encode(split).tolist() != words.encode(composed).tolist()


def test_llama_takes_a_known_word_whole(tmp_path):
  """'hin' is a token that no merge leads to: 'h' and 'i' have none."""
  extra = vocabulary()
  tokens = (*extra.tokens, 'hin')
  for pre, wanted in (('llama-bpe', 1), ('qwen2', 2)):
    (tmp_path / pre).mkdir()
    words = built(
      tmp_path / pre, pre=pre, tokens=tokens, types=(*extra.types, 1)
    )
    assert len(words.encode('hin')) == wanted


def test_plain_text_gets_bos_in_transformers_only(tmp_path):
  """add_bos is kept in the files; our encode adds nothing."""
  ids = {'eos_token_id': 262, 'bos_token_id': 261}
  words = built(tmp_path, ids=ids, add_bos=True)
  assert words.hf('the')['input_ids'] == [261, id_of('the')]
  assert words.encode('the').tolist() == [id_of('the')]


def test_fingerprints_tell_vocabularies_apart():
  first = vocabulary()
  moved = dataclasses.replace(first, source='elsewhere.gguf')
  assert moved.fingerprint == first.fingerprint
  for change in ({'pre': 'qwen2'}, {'chat_template': None}, {'add_bos': True}):
    assert vocabulary(**change).fingerprint != first.fingerprint


def test_byte_tokenizer_by_hand():
  words = tokenizer.ByteTokenizer()
  chat = [
    {'role': 'user', 'content': 'é'},
    {'role': 'assistant', 'content': ''},
  ]
  ids = words.apply_chat_template(chat)
  assert ids.tolist() == [259, 0xC3, 0xA9, 257, 260, 257, 260]
  assert ids.dtype == np.int32
  assert words.decode(ids) == 'é'
  assert words.decode(ids, skip_special=False) == (
    '<|user|>é<|end|><|assistant|><|end|><|assistant|>'
  )
  assert words.stop_ids == {257}
  assert words.eos_text == '<|end|>'
  assert words.pad_id == 256
  # cases row 9: the same with padding by the end token.
  assert tokenizer.ByteTokenizer(pad_equals_eos=True).pad_id == 257
  assert words.decode([0xC3, 263, 65, 9999]) == '\ufffdA'
  with pytest.raises(ValueError, match="role 'robot' is none of system, user"):
    words.apply_chat_template([{'role': 'robot', 'content': ''}])


@pytest.mark.parametrize('text', ['', 'a\n b', 'é🙂\x00', '<|end|>x<|no|>'])
def test_byte_text_survives(text):
  words = tokenizer.ByteTokenizer()
  assert words.decode(words.encode(text), skip_special=False) == text
  assert words.encode(text).dtype == np.int32
