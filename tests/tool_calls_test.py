"""Tool-call parsers: golden texts, and whatever a model may write."""

import json
import random
import string

import hypothesis
import pytest
from hypothesis import strategies as st

from thundersync_jax.envs import tool_calls
from thundersync_jax.envs.tool_calls import Call

NAMES = st.from_regex(r'[a-z_][a-z0-9_]{0,10}', fullmatch=True).filter(
  lambda name: name.isidentifier() and name not in KEYWORDS
)
KEYWORDS = {'and', 'as', 'if', 'in', 'is', 'or', 'not', 'for', 'def', 'del'}
KEYWORDS |= {'try', 'with', 'else', 'elif', 'from', 'pass', 'class', 'while'}
KEYWORDS |= {'async', 'await', 'break', 'raise', 'yield', 'assert', 'except'}
KEYWORDS |= {'global', 'import', 'lambda', 'return', 'finally', 'continue'}
TEXTS = st.text(
  st.characters(exclude_categories=['Cs'], exclude_characters='\0')
)
VALUES = st.recursive(
  st.none()
  | st.booleans()
  | st.integers(-(2**62), 2**62)
  | st.floats(allow_nan=False, allow_infinity=False)
  | TEXTS,
  lambda inner: (
    st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3)
  ),
  max_leaves=8,
)
CALLS = st.builds(Call, NAMES, st.dictionaries(NAMES, VALUES, max_size=3))
VALID = [
  '<tool_call>\n{"name": "ls", "arguments": {"path": ".", "n": [1, 2.5]}}\n'
  '</tool_call>',
  '<tool_call>{"name": "a", "arguments": {}}</tool_call> and '
  '<tool_call>{"name": "b", "arguments": {"x": {"y": null}}}</tool_call>',
  "[mkdir(dir_name='temp'), cd(folder='a b')]",
  'post.send(text="hi", to=[1, -2], flags={"a": True})',
  'I look:\n```bash\nls -la | wc -l\n```\nthen\n```sql\nselect 1;\n```',
  '```python\nprint("a")\n```',
]


@pytest.mark.parametrize(
  ('text', 'expected'),
  [
    ('no call', []),
    (VALID[0], [Call('ls', {'path': '.', 'n': [1, 2.5]})]),
    (VALID[1], [Call('a', {}), Call('b', {'x': {'y': None}})]),
    # The end tag is often the end of the turn.
    ('<tool_call>{"name": "a", "arguments": {}}', [Call('a', {})]),
  ],
)
def test_hermes(text, expected):
  assert tool_calls.hermes(text) == expected


@pytest.mark.parametrize(
  ('text', 'expected'),
  [
    ('no call', []),
    ('a list [1, 2] is none', []),
    (
      VALID[2],
      [Call('mkdir', {'dir_name': 'temp'}), Call('cd', {'folder': 'a b'})],
    ),
    (
      VALID[3],
      [Call('post.send', {'text': 'hi', 'to': [1, -2], 'flags': {'a': True}})],
    ),
    ('Now: [f(a=(1, 2))] done.', [Call('f', {'a': [1, 2]})]),
    ('f' + '.f' * 15_000 + '(a=1)', []),  # no name is that long
  ],
)
def test_python(text, expected):
  assert tool_calls.python(text) == expected


def test_python_arguments_by_place_need_their_names():
  parameters = {'cp': ['source', 'target']}
  made = tool_calls.python("cp('a', target='b')", parameters)
  assert made == [Call('cp', {'source': 'a', 'target': 'b'})]
  with pytest.raises(tool_calls.ToolCallError, match='of cp by name'):
    tool_calls.python("cp('a', 'b')")
  with pytest.raises(tool_calls.ToolCallError, match='once, by name'):
    tool_calls.python("cp('a', source='b')", parameters)


@pytest.mark.parametrize(
  ('text', 'expected'),
  [
    ('no call', []),
    ('an `inline` one, and ```this``` too', []),
    (
      VALID[4],
      [
        Call('bash', {'code': 'ls -la | wc -l'}),
        Call('sql', {'code': 'select 1;'}),
      ],
    ),
    ('```SH\nls', [Call('bash', {'code': 'ls'})]),
    ('```json\n{}\n```\n```py\n1\n```', [Call('python', {'code': '1'})]),
    ('```bash\n\n```', []),
  ],
)
def test_fenced(text, expected):
  assert tool_calls.fenced(text) == expected


@pytest.mark.parametrize(
  ('parser', 'text', 'problem'),
  [
    ('hermes', '<tool_call>ls</tool_call>', "'ls' is not valid JSON"),
    ('hermes', '<tool_call>[]</tool_call>', 'exactly the keys'),
    ('hermes', '<tool_call>{"name": "f"}', 'exactly the keys'),
    (
      'hermes',
      '<tool_call>{"name": 3, "arguments": {}}',
      'int is not the name',
    ),
    (
      'hermes',
      '<tool_call>{"name": "f", "arguments": []}',
      'must be an object',
    ),
    ('hermes', '<tool_call>{"name": "f", "name": "g"}', 'a key stands twice'),
    ('hermes', '<tool_call>{"name": "f", "arguments": {"a": NaN}}', 'NaN'),
    ('hermes', '<tool_call>{"name": "f", "arguments": {"a": 1e999}}', 'finite'),
    ('hermes', '<tool_call>' + '[' * 9999, 'nested too deeply'),
    (
      'hermes',
      '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}',
      'no valid text',
    ),
    ('hermes', '<tool_call>{"name":"f","arguments":{}}' * 17, '17 calls'),
    ('hermes', 'x' * 50_001, '50001 characters'),
    ('python', 'f(a=b)', 'must be a literal'),
    ('python', 'f(a=__import__("os"))', 'must be a literal'),
    ('python', 'f(a=1, a=2)', ''),
    ('python', 'f(**{"a": 1})', 'once, by name'),
    ('python', '[f(a=1), 3]', 'only calls'),
    ('python', 'f(a=1', 'not valid syntax'),
    ('python', 'f(a=' + '9' * 5000 + ')', ''),
    ('python', 'f(a=' + '9' * 50 + ')', 'too large'),
    ('python', 'f(a=1e999)', 'not finite'),
    ('python', 'f(a=-' + '-' * 30 + '1)', 'deeper than 20'),
    ('python', 'f(a=1j)', 'type complex'),
    ('python', 'f(a=b"x")', 'type bytes'),
    ('python', 'f(a={1: 2})', 'must be a string'),
    ('python', 'f(a=' + '[' * 5000 + ']' * 5000 + ')', 'not valid syntax'),
    ('python', 'f(a=' + '-' * 40_000 + '1)', ''),
    ('python', 'f(a=' + '1+' * 15_000 + '1)', ''),
    ('python', 'f(a="\0")', 'not valid syntax'),
    ('python', 'f(a="\ud800")', 'not valid syntax'),
    ('python', 'f()()', "'?' is not the name"),
    ('fenced', '```\nls\n```', 'names no language'),
    ('fenced', '```bash\nl\0s\n```', 'null character'),
    ('fenced', '```bash\n\udfff\n```', 'no valid text'),
  ],
)
def test_malformed_calls_are_told_readably(parser, text, problem):
  with pytest.raises(tool_calls.ToolCallError) as error:
    tool_calls.PARSERS[parser](text)
  observation = str(error.value)
  assert problem in observation
  assert_readable(observation)


def assert_readable(observation):
  assert observation.startswith('Invalid tool call: ')
  assert '. Write ' in observation
  assert observation.isprintable() and observation.isascii()
  assert len(observation) < 400


@pytest.mark.parametrize('form', ['hermes', 'python'])
@hypothesis.given(call=CALLS)
@hypothesis.settings(deadline=None, max_examples=100)
def test_what_is_written_is_read(form, call):
  text = f'First this.\n{tool_calls.WRITERS[form](call)}'
  assert tool_calls.PARSERS[form](text) == [call]


def test_fenced_code_is_read_as_written():
  call = Call('bash', {'code': 'for f in *; do\n  echo "$f"\ndone'})
  assert tool_calls.fenced(tool_calls.write_fenced(call)) == [call]


def mutated(text, stream):
  """The text with a few random edits, some of them huge."""
  pieces = ['\0', '\ud800', '\n', '"', "'", '{', '}', '[', ']', '(', ')', ',']
  pieces += ['NaN', '-Infinity', '1e400', '9' * 5000, '[' * 2000, '(' * 300]
  pieces += ['\\ud83d', '\\', '```', '<tool_call>', '</tool_call>', 'f(', '=']
  pieces += [
    '{"a":' * 1500,
    '-' * 3000,
    ':',
    'lambda: 0',
    '*',
    '\u202e',
    '\x1b',
  ]
  for _ in range(stream.randint(1, 5)):
    place = stream.randint(0, len(text))
    kind = stream.randint(0, 3)
    if kind == 0:
      text = text[:place] + stream.choice(pieces) + text[place:]
    elif kind == 1:
      text = text[:place] + text[place + stream.randint(1, 9) :]
    elif kind == 2:
      text = text[:place] + stream.choice(string.printable) + text[place + 1 :]
    else:
      other = stream.randint(0, len(text))
      text = (
        text[:place]
        + text[min(place, other) : max(place, other)]
        + text[other:]
      )
  return text


def test_ten_thousand_random_and_malformed_calls():
  """No parser crashes; each text gives plain calls or a readable error."""
  stream = random.Random(3)
  read = dict.fromkeys(tool_calls.PARSERS, 0)
  refused = dict.fromkeys(tool_calls.PARSERS, 0)
  for number in range(10_000):
    if number % 4:
      text = mutated(stream.choice(VALID), stream)
    else:
      characters = stream.choices('[]{}()`"\'=,:ab1<>/\n\0\ud800 ', k=60)
      text = stream.choice(['', '<tool_call>', 'f(', '```bash\n'])
      text += ''.join(characters)
    for name, parse in tool_calls.PARSERS.items():
      try:
        calls = parse(text)
      except tool_calls.ToolCallError as error:
        assert_readable(str(error))
        refused[name] += 1
        continue
      read[name] += bool(calls)
      for call in calls:
        json.dumps([call.name, call.arguments], allow_nan=False).encode()
  assert min(read.values()) > 200 and min(refused.values()) > 200


@hypothesis.given(text=st.text())
@hypothesis.settings(deadline=None, max_examples=100)
@pytest.mark.parametrize('name', tool_calls.PARSERS)
def test_any_text_is_answered(name, text):
  try:
    assert isinstance(tool_calls.PARSERS[name](text), list)
  except tool_calls.ToolCallError as error:
    assert_readable(str(error))
