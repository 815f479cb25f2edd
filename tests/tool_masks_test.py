"""Golden masks of conversations with tools, one template after another."""

import numpy as np
import pytest
import templates

from thundersync_jax.learner import packing
from thundersync_jax.rollout import conversation, live
from thundersync_jax.types import EndedTurn, Item, Trajectory

LIMITS = live.Limits(100, 1000)
CALL, RESULT = '<think>add</think>call(1)', {'role': 'tool', 'content': '2'}
MORE = {'role': 'user', 'content': 'more'}
# Four turns: a thought and a call, nothing, cut off, an end.
SCRIPT = (
  (CALL + '<|end|>', (RESULT,)),
  ('<|end|>', (MORE,)),
  ('it i', (RESULT, MORE)),
  ('four<|end|>', ()),
)
# The rows of each template, by hand: prompt, sampled, not sampled, sampled, ...
_CHATML = [
  '<|start|>user\nhi<|end|>\n<|start|>assistant\n',
  CALL + '<|end|>',
  '\n<|start|>tool\n2<|end|>\n<|start|>assistant\n',
  '<|end|>',
  '\n<|start|>user\nmore<|end|>\n<|start|>assistant\n',
  'it i',
  '<|end|>\n<|start|>tool\n2<|end|>\n<|start|>user\nmore<|end|>\n'
  '<|start|>assistant\n',
  'four<|end|>',
]
_LLAMA3 = [
  '<|begin|><|head|>user<|/head|>\n\nhi<|end|><|head|>assistant<|/head|>\n\n',
  CALL + '<|end|>',
  '<|head|>ipython<|/head|>\n\n2<|end|><|head|>assistant<|/head|>\n\n',
  '<|end|>',
  '<|head|>user<|/head|>\n\nmore<|end|><|head|>assistant<|/head|>\n\n',
  'it i',
  '<|end|><|head|>ipython<|/head|>\n\n2<|end|>'
  '<|head|>user<|/head|>\n\nmore<|end|><|head|>assistant<|/head|>\n\n',
  'four<|end|>',
]
# The first question of the user after it drops the thought: there it forks.
# What comes then repeats nothing that was thought, so the row goes on.
_QWEN3 = [
  [
    '<|start|>user\nhi<|end|>\n<|start|>assistant\n',
    CALL + '<|end|>',
    '\n<|start|>user\n<result>2</result><|end|>\n<|start|>assistant\n',
    '<|end|>',
  ],
  [
    '<|start|>user\nhi<|end|>\n<|start|>assistant\ncall(1)<|end|>\n'
    '<|start|>user\n<result>2</result><|end|>\n<|start|>assistant\n<|end|>\n'
    '<|start|>user\nmore<|end|>\n<|start|>assistant\n',
    'it i',
    '<|end|>\n<|start|>user\n<result>2</result><|end|>\n'
    '<|start|>user\nmore<|end|>\n<|start|>assistant\n',
    'four<|end|>',
  ],
]
GOLDEN = {'chatml': [_CHATML], 'llama3': [_LLAMA3], 'qwen3': _QWEN3}


def play(tokenizer, script):
  """The trajectory of texts that were sampled and messages that answered."""
  appends = conversation.keeps_history(tokenizer)
  alive = live.Live(
    Trajectory(0, 0, 0, np.zeros(0, np.int32)),
    object(),
    conversation.Conversation(tokenizer, appends),
    LIMITS,
  )
  alive.open([{'role': 'user', 'content': 'hi'}])
  for number, (text, messages) in enumerate(script, start=1):
    tokens = tokenizer.encode(text)
    stopped = text.endswith('<|end|>')
    ended = EndedTurn(
      0,
      0,
      tokens,
      -np.arange(1, len(tokens) + 1, dtype=np.float32),
      np.full(len(tokens), number),
      'stop' if stopped else 'length',
    )
    said = alive.end_turn(ended)
    assert said == text.removesuffix('<|end|>')
    if number < len(script):
      what = alive.continuation(messages)
      assert not alive.stopped_by(what, 10_000)
      alive.go_on(what)
  return alive.trajectory


def by_hand(golden, turns):
  """The first `turns` turns of the golden rows."""
  rows, left = [], turns
  for row in golden:
    take = min(len(row) // 2, left)
    left -= take
    if take:
      rows.append(row[: 2 * take])
  return rows


@pytest.mark.parametrize('turns', [1, 2, 3, 4])
@pytest.mark.parametrize('name', GOLDEN)
def test_golden_masks(name, turns):
  """cases rows 8, 18, 19 and 31."""
  tokenizer = templates.load(name)
  trajectory = play(tokenizer, SCRIPT[:turns])
  golden = by_hand(GOLDEN[name], turns)
  assert len(trajectory.rows) == len(golden)
  for row, (prompt, *parts) in zip(trajectory.rows, golden, strict=True):
    assert tokenizer.decode(row.prompt_tokens, skip_special=False) == prompt
    tokens = [tokenizer.encode(part) for part in parts]
    mask = [np.full(len(t), i % 2 == 0) for i, t in enumerate(tokens)]
    np.testing.assert_array_equal(row.tokens, np.concatenate(tokens))
    np.testing.assert_array_equal(row.loss_mask, np.concatenate(mask))
    assert not row.behaviour_logprobs[~row.loss_mask].any()
    assert (row.policy_versions[~row.loss_mask] == -1).all()
  numbers = np.concatenate(
    [row.behaviour_logprobs[row.loss_mask] for row in trajectory.rows]
  )
  expected = [
    -np.arange(1, len(tokenizer.encode(text)) + 1) for text, _ in SCRIPT[:turns]
  ]
  np.testing.assert_array_equal(numbers, np.concatenate(expected))


@pytest.mark.parametrize('name', GOLDEN)
def test_packed_rows_hold_the_same(name):
  """cases row 31: loss entries are the sampled tokens, each once."""
  tokenizer = templates.load(name)
  trajectory = play(tokenizer, SCRIPT)
  batch, _, _ = packing.pack(
    [Item(trajectory)], [packing.Shape(2, 320, 64)], lambda n: 1 / n, 0
  )
  entries = batch.weights > 0
  sampled = ''.join(text for text, _ in SCRIPT)
  assert tokenizer.decode(batch.targets[entries], skip_special=False) == sampled
  np.testing.assert_allclose(batch.weights.sum(), 1.0)


def test_a_template_is_told_by_what_it_does_to_a_thought():
  """cases row 19."""
  keeps = {n: conversation.keeps_history(templates.load(n)) for n in GOLDEN}
  assert keeps == {'chatml': True, 'llama3': True, 'qwen3': False}


@pytest.mark.parametrize('name', ['chatml', 'llama3'])
def test_text_that_is_rendered_again_gives_the_same_row(name):
  """Both paths agree where nothing is rewritten."""
  tokenizer = templates.load(name)
  opening = [{'role': 'user', 'content': 'hi'}]
  paths = []
  for appends in (True, False):
    talk = conversation.Conversation(tokenizer, appends)
    made = [talk.open(opening)]
    for text, messages in SCRIPT[:3]:
      talk.say(tokenizer.encode(text))
      what = talk.hear(messages, text.endswith('<|end|>'))
      assert not what.forks
      made.append(what.tokens)
    paths.append(np.concatenate(made))
  np.testing.assert_array_equal(*paths)


class NoTemplate:
  """A base model's tokenizer."""

  def render(self, messages, add_generation_prompt=True):
    raise ValueError('m has no chat template')


def test_a_tokenizer_without_a_template_says_so_at_the_prompt():
  assert not conversation.keeps_history(NoTemplate())
  talk = conversation.Conversation(NoTemplate(), False)
  with pytest.raises(ValueError, match='no chat template'):
    talk.open([MORE])
