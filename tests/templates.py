"""Tokenizers of one token a byte, with chat templates of several styles.

Bytes are tokens 0 to 255, 256 is padding and 257 ends a turn, as in
tokenizer.ByteTokenizer, so the tiny model of agent_play.py can speak them.
"""

import functools
import pathlib
import tempfile

import tokenizer_test

from thundersync_jax.models import gguf_tokenizer, tokenizer

_ASSISTANT = (
  "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
_LAST = (
  '{% set last = namespace(user=-1) %}{% for m in messages %}'
  "{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}"
  '{% endfor %}'
)
_OLD = "m.role == 'assistant' and loop.index0 < last.user"

# One line a message, as ChatML has it.
CHATML = (
  "{% for m in messages %}{{ '<|start|>' + m.role + '\n' + m.content }}"
  "{{ '<|end|>\n' }}{% endfor %}" + _ASSISTANT
)
# Headers, a begin token, trimmed text; tools have another name (Llama 3).
LLAMA3 = (
  "{{ '<|begin|>' }}{% for m in messages %}"
  "{% set role = 'ipython' if m.role == 'tool' else m.role %}"
  "{{ '<|head|>' + role + '<|/head|>\n\n' + m.content | trim + '<|end|>' }}"
  '{% endfor %}{% if add_generation_prompt %}'
  "{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}"
)
# Thinking before the last user message is dropped; tools are users (Qwen 3).
QWEN3 = (
  _LAST + '{% for m in messages %}'
  "{% set role = 'user' if m.role == 'tool' else m.role %}"
  '{% set text = m.content %}'
  '{% if ' + _OLD + " %}{% set text = text.split('</think>')[-1] %}{% endif %}"
  "{% if m.role == 'tool' %}{% set text = '<result>' + text + '</result>' %}"
  "{% endif %}{{ '<|start|>' + role + '\n' + text + '<|end|>\n' }}"
  '{% endfor %}' + _ASSISTANT
)
# Old answers keep their first letter only: longer ones fork.
FORGETFUL = QWEN3.replace("text.split('</think>')[-1]", 'text[:1]')
TEMPLATES = {
  'chatml': CHATML,
  'llama3': LLAMA3,
  'qwen3': QWEN3,
  'forgetful': FORGETFUL,
}
_SPECIAL = (
  '<|pad|>',
  '<|end|>',
  '<|start|>',
  '<|begin|>',
  '<|head|>',
  '<|/head|>',
)


@functools.cache
def load(name: str) -> tokenizer.Tokenizer:
  """The tokenizer with one of TEMPLATES."""
  tokens = (*tokenizer_test.byte_alphabet(), *_SPECIAL)
  vocabulary = gguf_tokenizer.Vocabulary(
    source='m.gguf',
    tokens=tokens,
    types=(*[1] * 256, *[3] * len(_SPECIAL)),
    merges=(),
    pre='gpt-2',
    ids={'eos_token_id': 257, 'padding_token_id': 256},
    add_bos=False,
    chat_template=TEMPLATES[name],
  )
  with tempfile.TemporaryDirectory() as directory:
    path = pathlib.Path(directory)
    gguf_tokenizer.write(vocabulary, path)
    return tokenizer.load(path)
