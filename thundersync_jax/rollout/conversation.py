"""What stands before the next turn: an observation, or a context of its own.

  the template keeps what was said    tokens so far + the new messages' tokens
  it rewrites (drops old thinking)    whole text again; where it begins with the
                                      text so far, + the tokens of the rest,
                                      else a fork: a new row of tokens

Sampled ids are stored and never tokenised again within their row, so the ids
that are learned from are those that the model was fed.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

Message = dict[str, str]

_ASKED = {'role': 'user', 'content': '.'}
_SAID = {'role': 'assistant', 'content': '.'}


@dataclasses.dataclass(frozen=True)
class Continuation:
  """What the model reads before its next turn.

  Attributes:
    tokens: i32[n].
    forks: they stand in the place of all tokens so far, not behind them.
  """

  tokens: np.ndarray
  forks: bool


class Conversation:
  """The messages of one trajectory, and the text of its present row.

  Args:
    tokenizer: see models/tokenizer.py.
    appends: what keeps_history says of its template.
  """

  def __init__(self, tokenizer: Any, appends: bool):
    self._tokenizer, self._appends = tokenizer, appends
    self._messages: list[Message] = []
    self._text = ''

  def open(self, messages: Sequence[Message]) -> np.ndarray:
    """The prompt, i32[n].

    Raises:
      ValueError: the template refuses the messages.
    """
    self._messages = list(messages)
    self._text = self._tokenizer.render(self._messages)
    return self._tokenizer.encode(self._text)

  def say(self, tokens: np.ndarray) -> str:
    """Takes a sampled turn, i32[n]; returns its text without special tokens."""
    text = self._tokenizer.decode(tokens)
    self._messages.append({'role': 'assistant', 'content': text})
    self._text += self._tokenizer.decode(tokens, skip_special=False)
    return text

  def hear(self, messages: Sequence[Message], turn_ended: bool) -> Continuation:
    """Takes the environment's messages.

    Args:
      messages: of the environment.
      turn_ended: the model sampled its end-of-turn token.

    Raises:
      ValueError: the template refuses the messages.
    """
    self._messages += messages
    tokens = None
    if self._appends:
      tokens = _appended(self._tokenizer, messages, turn_ended)
    if tokens is not None:
      self._text += self._tokenizer.decode(tokens, skip_special=False)
      return Continuation(tokens, forks=False)
    text, before = self._tokenizer.render(self._messages), self._text
    self._text = text
    forks = not text.startswith(before)
    rest = text if forks else text[len(before) :]
    return Continuation(self._tokenizer.encode(rest), forks)


def keeps_history(tokenizer: Any) -> bool:
  """Whether the chat template leaves what was said as it was, thinking too."""
  try:
    opened = tokenizer.render([_ASKED])
    for said in (_SAID['content'], '<think>.</think>.'):
      answer = {'role': 'assistant', 'content': said}
      later = tokenizer.render([_ASKED, answer, _ASKED])
      if not later.startswith(opened + said):
        return False
  except ValueError:
    return False  # each trajectory will say why
  return True


def observation_tokens(
  tokenizer: Any, messages: Sequence[Message], turn_ended: bool
) -> np.ndarray:
  """Tokens that open the next turn after what the model has said.

  The new messages are rendered behind a fixed exchange, of which everything up
  to its end-of-turn token is cut off; the tokens so far stay as they are.

  Args:
    tokenizer: see models/tokenizer.py.
    messages: of the environment.
    turn_ended: the model sampled its end-of-turn token; else it is added here.

  Returns:
    i32[n].

  Raises:
    ValueError: the template changes what stands before new messages, or puts
      no end-of-turn token behind an answer.
  """
  tokens = _appended(tokenizer, messages, turn_ended)
  if tokens is None:
    raise ValueError(
      'the chat template rewrites earlier messages or ends no answer with an '
      'end-of-turn token, so a turn cannot be appended: use another template'
    )
  return tokens


def _appended(tokenizer, messages, turn_ended) -> np.ndarray | None:
  exchange = [_ASKED, _SAID]
  before = tokenizer.apply_chat_template(exchange, add_generation_prompt=False)
  after = tokenizer.apply_chat_template([*exchange, *messages])
  ends = [i for i, t in enumerate(before) if int(t) in tokenizer.stop_ids]
  kept = ends[-1] + 1 if ends else 0
  if not ends or not np.array_equal(before[:kept], after[:kept]):
    return None
  return np.asarray(after[kept if turn_ended else kept - 1 :], np.int32)
