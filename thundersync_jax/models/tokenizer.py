"""Text to tokens and back: Hugging Face tokenizers and a tiny byte one.

Both classes have one interface: encode, decode, apply_chat_template,
vocab_size, pad_id, stop_ids (every token that ends a turn) and eos_text.
Tokens are stored when sampled and never derived from text again, so padding
is never recognised by its id: pad may equal an end token.
"""

import dataclasses
import os
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jinja2
import numpy as np
from absl import logging

from thundersync_jax.models import hf_checkpoint

_PROBE = 'probe of the template'


@dataclasses.dataclass(frozen=True)
class Tokenizer:
  """A Hugging Face tokenizer, made by `load`.

  Attributes:
    hf: the transformers object, backed by the tokenizers library.
    stop_ids: tokens that end a turn; the sampled one belongs to the turn.
    pad_id: fills rows behind their end.
    eos_text: text of the end token, '' where there is none.
  """

  hf: Any
  stop_ids: frozenset[int]
  pad_id: int
  eos_text: str

  @property
  def vocab_size(self) -> int:
    """Number of tokens; the model's vocabulary may be padded beyond it."""
    return len(self.hf)

  def encode(self, text: str) -> np.ndarray:
    """i32[n]; nothing is put in front or behind."""
    # The backend itself: transformers would set its truncation on every call,
    # which worker threads must not do at the same time.
    backend = self.hf.backend_tokenizer
    ids = backend.encode(text, add_special_tokens=False).ids
    return np.asarray(ids, np.int32)

  def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
    """Text of the tokens; ids beyond vocab_size have none."""
    known = [int(i) for i in ids if 0 <= i < self.vocab_size]
    return self.hf.backend_tokenizer.decode(
      known, skip_special_tokens=skip_special
    )

  def apply_chat_template(
    self,
    messages: Sequence[Mapping[str, str]],
    add_generation_prompt: bool = True,
  ) -> np.ndarray:
    """i32[n] of a conversation; see render."""
    return self.encode(self.render(messages, add_generation_prompt))

  def render(
    self,
    messages: Sequence[Mapping[str, str]],
    add_generation_prompt: bool = True,
  ) -> str:
    """The text of a conversation, as the model was trained on it.

    Args:
      messages: dicts with 'role' and 'content'.
      add_generation_prompt: open the assistant's turn at the end.

    Raises:
      ValueError: the tokenizer has no template, or the template refuses the
        messages.
    """
    if self.hf.chat_template is None:
      raise ValueError(
        f'{self.hf.name_or_path} has no chat template: use plain prompts or '
        'an instruction-tuned model'
      )
    try:
      return _render(self.hf, messages, add_generation_prompt)
    except jinja2.TemplateError as error:
      roles = [message['role'] for message in messages]
      raise ValueError(
        f'the chat template of {self.hf.name_or_path} refuses messages with '
        f'the roles {roles}: {error}'
      ) from error


def load(directory: str | pathlib.Path) -> Tokenizer:
  """The tokenizer of a Hugging Face directory, without torch or network.

  Raises:
    FileNotFoundError: the directory holds no tokenizer.
    ValueError: it has no fast (tokenizers) version, or nothing ends a turn.
  """
  directory = pathlib.Path(directory)
  if not (directory / 'tokenizer_config.json').is_file():
    raise FileNotFoundError(
      f'{directory}/tokenizer_config.json does not exist; export the tokenizer '
      "with the model, or copy its files from the model's source"
    )
  # Imported here: it takes seconds, which runs on bytes need not spend.
  os.environ.setdefault('TRANSFORMERS_NO_ADVISORY_WARNINGS', '1')
  import transformers

  hf = transformers.AutoTokenizer.from_pretrained(
    str(directory), local_files_only=True
  )
  if not hf.is_fast:
    raise ValueError(
      f'{directory}: {type(hf).__name__} has no fast version; convert it to '
      'tokenizer.json'
    )
  stops = _stop_ids(hf, directory)
  if not stops:
    raise ValueError(
      f'{directory}: neither generation_config.json, tokenizer nor chat '
      'template names an end token; set eos_token in tokenizer_config.json'
    )
  pad = hf.pad_token_id if hf.pad_token_id is not None else hf.eos_token_id
  return Tokenizer(
    hf=hf,
    stop_ids=stops,
    pad_id=min(stops) if pad is None else pad,
    eos_text=hf.eos_token or '',
  )


def _render(
  hf: Any, messages: Sequence[Mapping[str, str]], generation: bool
) -> str:
  return hf.apply_chat_template(
    [dict(message) for message in messages],
    add_generation_prompt=generation,
    tokenize=False,
  )


def _stop_ids(hf: Any, directory: pathlib.Path) -> frozenset[int]:
  """End ids of generation_config.json, tokenizer and chat template.

  config.json counts where there is no generation_config.json. A padding token
  ends nothing, unless it is the end token as well.
  """
  stops = {hf.eos_token_id, _template_end(hf)}
  for name in ('generation_config.json', 'config.json'):
    if (directory / name).is_file():
      ends = hf_checkpoint.read_json(directory / name).get('eos_token_id')
      stops |= set(ends) if isinstance(ends, list) else {ends}
      break
  return frozenset(int(stop) for stop in stops if stop is not None)


def _template_end(hf: Any) -> int | None:
  """The special token that the template puts behind an assistant message."""
  if hf.chat_template is None:
    return None
  conversation = [
    {'role': 'user', 'content': 'question'},
    {'role': 'assistant', 'content': _PROBE},
  ]
  try:
    text = _render(hf, conversation, generation=False)
  except jinja2.TemplateError as error:
    logging.warning('no end of turn taken from the chat template: %s', error)
    return None
  tail = text.rpartition(_PROBE)[2] if _PROBE in text else ''
  special = {i for i, t in hf.added_tokens_decoder.items() if t.special}
  ids = hf.backend_tokenizer.encode(tail, add_special_tokens=False).ids
  return next((i for i in ids if i in special), None)


_ROLES = ('system', 'user', 'assistant', 'tool')
_BYTE_SPECIALS = ('<|pad|>', '<|end|>', *(f'<|{role}|>' for role in _ROLES))
_BYTE_IDS = {text: 256 + i for i, text in enumerate(_BYTE_SPECIALS)}


@dataclasses.dataclass(frozen=True)
class ByteTokenizer:
  """Bytes are tokens 0 to 255; then pad, end and one token a role.

  A message is <|role|>, its bytes, <|end|>. Ids up to 263 are reserved, so
  that the vocabulary divides by 8.

  Attributes:
    pad_equals_eos: pad with <|end|>, as many published models do.
  """

  pad_equals_eos: bool = False

  vocab_size = 264
  stop_ids = frozenset({_BYTE_IDS['<|end|>']})
  eos_text = '<|end|>'

  @property
  def pad_id(self) -> int:
    return _BYTE_IDS['<|end|>' if self.pad_equals_eos else '<|pad|>']

  def encode(self, text: str) -> np.ndarray:
    """i32[n] of UTF-8 bytes; the text of a special token is that token."""
    ids = []
    for part in re.split(r'(<\|\w+\|>)', text):
      ids += [_BYTE_IDS[part]] if part in _BYTE_IDS else part.encode()
    return np.asarray(ids, np.int32)

  def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
    """Text of the tokens; broken UTF-8 becomes U+FFFD, reserved ids nothing."""
    parts = [b'' if skip_special else t.encode() for t in _BYTE_SPECIALS]
    parts = [bytes([i]) for i in range(256)] + parts
    known = [parts[i] for i in ids if 0 <= i < len(parts)]
    return b''.join(known).decode(errors='replace')

  def apply_chat_template(
    self,
    messages: Sequence[Mapping[str, str]],
    add_generation_prompt: bool = True,
  ) -> np.ndarray:
    """i32[n] of a conversation; see render."""
    return self.encode(self.render(messages, add_generation_prompt))

  def render(
    self,
    messages: Sequence[Mapping[str, str]],
    add_generation_prompt: bool = True,
  ) -> str:
    """The text of a conversation.

    Raises:
      ValueError: a role that the template does not know.
    """
    text = ''
    for message in messages:
      if message['role'] not in _ROLES:
        raise ValueError(
          f'role {message["role"]!r} is none of {", ".join(_ROLES)}'
        )
      text += f'<|{message["role"]}|>{message["content"]}<|end|>'
    return text + '<|assistant|>' * add_generation_prompt
