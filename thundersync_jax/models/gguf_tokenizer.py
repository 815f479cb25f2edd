"""The tokenizer inside a GGUF file, written as Hugging Face files.

A GGUF stores the tables of a byte-level BPE (tokens, merges) and the name of
the rule that cuts text into words before merging (`tokenizer.ggml.pre`). The
rules are the public regular expressions of the models' own tokenizer.json.
"""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import tokenizers
from tokenizers import (
  decoders,
  models,
  normalizers,
  pre_tokenizers,
  processors,
)

# Part of the fingerprint: raise it when `write` writes something else.
_FORMAT = 1
# tokenizer.ggml.token_type: llama.cpp's llama_token_type.
_CONTROL, _USER_DEFINED = 3, 4
_SPECIAL = {
  'bos_token': 'bos_token_id',
  'eos_token': 'eos_token_id',
  'unk_token': 'unknown_token_id',
  'pad_token': 'padding_token_id',
}
_ENDS = ('eos_token_id', 'eot_token_id', 'eom_token_id')


@dataclasses.dataclass(frozen=True)
class Vocabulary:
  """What a GGUF file says of its tokenizer.

  Attributes:
    source: the file, for messages.
    tokens: text of each id, in the byte alphabet of GPT-2.
    types: llama_token_type of each id.
    merges: 'left right', best first.
    pre: name of the rule that cuts text into words.
    ids: token ids by their GGUF names (bos_token_id, ...), where present.
    add_bos: whether plain text gets the bos token in front.
    chat_template: jinja text, or None.
  """

  source: str
  tokens: tuple[str, ...]
  types: tuple[int, ...]
  merges: tuple[str, ...]
  pre: str
  ids: Mapping[str, int]
  add_bos: bool
  chat_template: str | None

  @property
  def fingerprint(self) -> str:
    """Names the files that `write` makes of this; 16 hexadecimal digits."""
    content = dataclasses.replace(self, source=f'format {_FORMAT}')
    text = json.dumps(dataclasses.asdict(content), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def vocabulary(path: pathlib.Path, fields: Mapping[str, Any]) -> Vocabulary:
  """Takes the tokenizer out of the metadata of a GGUF reader.

  Raises:
    ValueError: no tokenizer inside, or one that is not byte-level BPE or cuts
      words by a rule that is not in PRE_TOKENIZERS.
  """

  def get(name: str, default: Any = None) -> Any:
    field = fields.get(f'tokenizer.{name}')
    return default if field is None else field.contents()

  model, pre = get('ggml.model'), get('ggml.pre', 'default')
  if model != 'gpt2':
    raise ValueError(
      f'{path}: tokenizer model {model!r} is not implemented; known: gpt2 '
      '(byte-level BPE); load the Hugging Face directory of this model instead'
    )
  if pre not in PRE_TOKENIZERS:
    raise ValueError(
      f'{path}: pre-tokenizer {pre!r} is not implemented; known: '
      f'{sorted(PRE_TOKENIZERS)}'
    )
  names = {*_SPECIAL.values(), *_ENDS}
  ids = {name: get(f'ggml.{name}') for name in sorted(names)}
  tokens = tuple(get('ggml.tokens', ()))
  return Vocabulary(
    source=str(path),
    tokens=tokens,
    types=tuple(get('ggml.token_type', [1] * len(tokens))),
    merges=tuple(get('ggml.merges', ())),
    pre=pre,
    ids={name: value for name, value in ids.items() if value is not None},
    # llama.cpp adds it for this rule where the file does not say.
    add_bos=bool(get('ggml.add_bos_token', pre == 'llama-bpe')),
    chat_template=get('chat_template'),
  )


def write(vocab: Vocabulary, directory: pathlib.Path) -> None:
  """Writes tokenizer.json and tokenizer_config.json, which transformers loads.

  generation_config.json is written too where the file names ends of a turn
  besides the end of text, so that they reach the stop set.
  """
  tokenizer = _bpe(vocab)
  for marked, special in ((_CONTROL, True), (_USER_DEFINED, False)):
    added = [
      tokenizers.AddedToken(token, special=special, normalized=False)
      for token, kind in zip(vocab.tokens, vocab.types, strict=True)
      if kind == marked
    ]
    add = tokenizer.add_special_tokens if special else tokenizer.add_tokens
    add(added)
  tokenizer.save(str(directory / 'tokenizer.json'))
  named = {
    key: vocab.tokens[vocab.ids[name]]
    for key, name in _SPECIAL.items()
    if name in vocab.ids
  }
  settings = named | {
    'tokenizer_class': 'PreTrainedTokenizerFast',
    'clean_up_tokenization_spaces': False,
    'chat_template': vocab.chat_template,
  }
  _write(directory / 'tokenizer_config.json', settings)
  ends = sorted({vocab.ids[name] for name in _ENDS if name in vocab.ids})
  if len(ends) > 1:
    _write(directory / 'generation_config.json', {'eos_token_id': ends})


def _bpe(vocab: Vocabulary) -> tokenizers.Tokenizer:
  rule = PRE_TOKENIZERS[vocab.pre]
  tokenizer = tokenizers.Tokenizer(
    models.BPE(
      vocab={token: i for i, token in enumerate(vocab.tokens)},
      merges=[tuple(merge.split(' ')) for merge in vocab.merges],
      ignore_merges=rule.ignore_merges,
    )
  )
  if rule.nfc:
    tokenizer.normalizer = normalizers.NFC()
  tokenizer.pre_tokenizer = rule.make()
  tokenizer.decoder = decoders.ByteLevel()
  if vocab.add_bos:
    bos = vocab.ids['bos_token_id']
    token = vocab.tokens[bos]
    tokenizer.post_processor = processors.TemplateProcessing(
      single=f'{token} $A',
      pair=f'{token} $A {token} $B',
      special_tokens=[(token, bos)],
    )
  return tokenizer


def _write(path: pathlib.Path, value: dict[str, Any]) -> None:
  path.write_text(json.dumps(value, indent=2) + '\n', encoding='utf-8')


@dataclasses.dataclass(frozen=True)
class _Rule:
  """How text is cut into words.

  Attributes:
    make: builds the pre-tokenizer.
    nfc: text is brought to Unicode NFC first.
    ignore_merges: a word that is a token is taken whole.
  """

  make: Callable[[], pre_tokenizers.PreTokenizer]
  nfc: bool = False
  ignore_merges: bool = False


def _byte_level() -> pre_tokenizers.PreTokenizer:
  """GPT-2's own expression, built into tokenizers."""
  return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _digits() -> pre_tokenizers.PreTokenizer:
  return pre_tokenizers.Sequence(
    [pre_tokenizers.Digits(individual_digits=True), _byte_level()]
  )


def _split(digits: str) -> pre_tokenizers.PreTokenizer:
  """The expression of cl100k with runs of `digits` digits."""
  expression = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    + digits
    + r'| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
  )
  return pre_tokenizers.Sequence(
    [
      pre_tokenizers.Split(tokenizers.Regex(expression), 'isolated'),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
  )


PRE_TOKENIZERS = {
  'gpt-2': _Rule(_byte_level),
  'smollm': _Rule(_digits),
  'llama-bpe': _Rule(lambda: _split('{1,3}'), ignore_merges=True),
  'qwen2': _Rule(lambda: _split(''), nfc=True),
}
