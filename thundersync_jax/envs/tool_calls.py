"""Tool calls in the text of a model: small parsers with one result type.

  hermes   <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>
  python   [f(a=1), g(b='x')] or f(a=1), literals only (BFCL)
  fenced   ```bash ... ```, also python and sql; the call is named after it

A parser returns the calls in their order, an empty list where the text holds
none, and raises ToolCallError where it holds a malformed one. The error's text
is the observation for the model. Arguments are plain JSON values.
"""

import ast
import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_MAX_TEXT = 50_000  # characters that are looked at
_MAX_CALLS = 16
_MAX_DEPTH = 20  # of lists and dicts inside each other
_MAX_INTEGER = 1 << 63  # beyond it tools and JSON readers disagree
_NAME = re.compile(r'[A-Za-z_][\w.-]{0,63}', re.ASCII)


@dataclasses.dataclass(frozen=True)
class Call:
  """One call of a tool; arguments hold JSON values by parameter name."""

  name: str
  arguments: dict[str, Any]


class ToolCallError(ValueError):
  """A malformed call; the text tells the model what is wrong with it."""

  def __init__(self, problem: str, example: str):
    super().__init__(f'Invalid tool call: {problem}. Write {example}')


def _shown(value: Any) -> str:
  """A short, printable form of whatever the model wrote."""
  text = ascii(value) if isinstance(value, str) else type(value).__name__
  return text if len(text) <= 60 else f'{text[:57]}...'


class _ValueError(Exception):
  """What is wrong with a value."""


def _plain(value: Any, depth: int = 0) -> Any:
  """The value, if JSON can hold it and every tool can take it.

  Raises:
    _ValueError: says why not.
  """
  if depth > _MAX_DEPTH:
    raise _ValueError(f'values are nested deeper than {_MAX_DEPTH} levels')
  if isinstance(value, dict):
    return {
      _text_key(key): _plain(item, depth + 1) for key, item in value.items()
    }
  if isinstance(value, (list, tuple)):
    return [_plain(item, depth + 1) for item in value]
  if isinstance(value, str):
    return _valid_text(value)
  if value is None or isinstance(value, bool):
    return value
  if isinstance(value, int) and abs(value) < _MAX_INTEGER:
    return value
  if isinstance(value, float) and math.isfinite(value):
    return value
  if isinstance(value, (int, float)):
    raise _ValueError('a number is too large or not finite')
  raise _ValueError(f'a value of type {type(value).__name__} is not allowed')


def _text_key(key: Any) -> str:
  if not isinstance(key, str):
    raise _ValueError(f'the key {_shown(key)} must be a string')
  return _valid_text(key)


def _valid_text(text: str) -> str:
  if '\0' in text:
    raise _ValueError('it holds a null character')
  try:
    text.encode()
  except UnicodeEncodeError:
    raise _ValueError('it holds characters that are no valid text') from None
  return text


def _make(name: Any, arguments: Any, example: str) -> Call:
  """A checked call.

  Raises:
    ToolCallError: on a wrong name or argument.
  """
  if not isinstance(name, str) or not _NAME.fullmatch(name):
    raise ToolCallError(f'{_shown(name)} is not the name of a tool', example)
  if not isinstance(arguments, dict):
    raise ToolCallError(f'the arguments of {name} must be an object', example)
  try:
    return Call(name, _plain(arguments))
  except _ValueError as error:
    raise ToolCallError(f'in {name}: {error}', example) from None


def _limited(text: str, example: str) -> str:
  if len(text) > _MAX_TEXT:
    raise ToolCallError(
      f'the text has {len(text)} characters, over {_MAX_TEXT}', example
    )
  return text


def _few(calls: list[Call], example: str) -> list[Call]:
  if len(calls) > _MAX_CALLS:
    raise ToolCallError(f'{len(calls)} calls, over {_MAX_CALLS}', example)
  return calls


_OPEN, _CLOSE = '<tool_call>', '</tool_call>'
_HERMES = f'{_OPEN}{{"name": "tool", "arguments": {{"key": "value"}}}}{_CLOSE}'


def _no_constant(name: str) -> float:
  raise ValueError(f'{name} is no JSON value')


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  made = dict(pairs)
  if len(made) < len(pairs):
    raise ValueError('a key stands twice')
  return made


def hermes(text: str) -> list[Call]:
  """Calls in <tool_call> tags; the last tag may lack its end.

  Raises:
    ToolCallError: if a tag does not hold a JSON object of name and arguments.
  """
  calls = []
  for part in _limited(text, _HERMES).split(_OPEN)[1:]:
    body = part.partition(_CLOSE)[0].strip()
    try:
      made = json.loads(
        body, parse_constant=_no_constant, object_pairs_hook=_object
      )
    except RecursionError:
      raise ToolCallError('the JSON is nested too deeply', _HERMES) from None
    except ValueError as error:
      reason = getattr(error, 'msg', None) or str(error)
      raise ToolCallError(
        f'{_shown(body)} is not valid JSON ({_printable(reason)})', _HERMES
      ) from None
    if not isinstance(made, dict) or set(made) != {'name', 'arguments'}:
      raise ToolCallError(
        'it needs exactly the keys "name" and "arguments"', _HERMES
      )
    calls.append(_make(made['name'], made['arguments'], _HERMES))
  return _few(calls, _HERMES)


def _printable(text: str) -> str:
  return ''.join(c for c in text if c.isprintable() and c.isascii())[:80]


_PYTHON = "[tool(key='value')] with literal values"
_CALL_START = re.compile(r'\[?\s*(?<![\w.])[A-Za-z_][\w.]{0,63}\(', re.ASCII)


def python(
  text: str, parameters: Mapping[str, Sequence[str]] | None = None
) -> list[Call]:
  """Calls in Python's syntax, one or a list of them, text around allowed.

  Args:
    text: what the model wrote.
    parameters: names of the parameters of each tool, in order; without them
      arguments must be given by name.

  Raises:
    ToolCallError: if it is no list of calls with literal arguments.
  """
  found = _CALL_START.search(_limited(text, _PYTHON))
  if not found:
    return []
  closing = ']' if found[0].startswith('[') else ')'
  end = text.rfind(closing, found.start()) + 1
  source = text[found.start() : end or len(text)]
  try:
    body = ast.parse(source, mode='eval').body
  except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
    reason = _printable(getattr(error, 'msg', None) or type(error).__name__)
    raise ToolCallError(
      f'{_shown(source)} is not valid syntax ({reason})', _PYTHON
    ) from None
  nodes = body.elts if isinstance(body, ast.List) else [body]
  return _few([_python_call(node, parameters or {}) for node in nodes], _PYTHON)


def _python_call(
  node: ast.expr, parameters: Mapping[str, Sequence[str]]
) -> Call:
  if not isinstance(node, ast.Call):
    raise ToolCallError('only calls may stand in the list', _PYTHON)
  name = _dotted(node.func)
  names = list(parameters.get(name, ()))
  if len(node.args) > len(names):
    raise ToolCallError(
      f'give the arguments of {_printable(name)} by name', _PYTHON
    )
  pairs = list(zip(names, node.args, strict=False))
  pairs += [(keyword.arg, keyword.value) for keyword in node.keywords]
  if None in dict(pairs) or len(dict(pairs)) < len(pairs):
    raise ToolCallError(f'each argument of {name} once, by name', _PYTHON)
  try:
    arguments = {key: _literal(value) for key, value in pairs}
  except _ValueError as error:
    raise ToolCallError(f'in {_printable(name)}: {error}', _PYTHON) from None
  return _make(name, arguments, _PYTHON)


def _dotted(node: ast.expr) -> str:
  parts = []
  while isinstance(node, ast.Attribute):
    parts.append(node.attr)
    node = node.value
  parts.append(node.id if isinstance(node, ast.Name) else '?')
  return '.'.join(reversed(parts))


def _literal(node: ast.expr, depth: int = 0) -> Any:
  """The value of a literal; a tuple becomes a list, as JSON has none."""
  if depth > _MAX_DEPTH:
    raise _ValueError(f'values are nested deeper than {_MAX_DEPTH} levels')
  if isinstance(node, ast.Constant):
    return node.value
  if isinstance(node, (ast.List, ast.Tuple)):
    return [_literal(item, depth + 1) for item in node.elts]
  if isinstance(node, ast.Dict) and None not in node.keys:
    keys = [_text_key(_literal(key, depth + 1)) for key in node.keys]
    values = [_literal(value, depth + 1) for value in node.values]
    return dict(zip(keys, values, strict=True))
  if isinstance(node, ast.UnaryOp) and isinstance(
    node.op, (ast.USub, ast.UAdd)
  ):
    number = _literal(node.operand, depth + 1)
    if isinstance(number, (int, float)) and not isinstance(number, bool):
      return -number if isinstance(node.op, ast.USub) else number
  raise _ValueError('every argument must be a literal value')


_FENCE = '```'
_FENCED = f'{_FENCE}bash, the code on lines of its own, then {_FENCE}'
LANGUAGES = {
  'bash': 'bash',
  'sh': 'bash',
  'shell': 'bash',
  'python': 'python',
  'py': 'python',
  'sql': 'sql',
}


def fenced(text: str) -> list[Call]:
  """Fenced blocks of code as calls bash, python or sql of {'code': ...}.

  Blocks of other languages are text. The last fence may lack its end.

  Raises:
    ToolCallError: if a block names no language, or its code is no valid text.
  """
  calls, language, block = [], None, []
  for line in [*_limited(text, _FENCED).split('\n'), None]:
    is_fence = line is None or line.strip().startswith(_FENCE)
    if language is None:
      if is_fence and line is not None:
        language, block = line.strip()[len(_FENCE) :].strip().lower(), []
        if not language:
          raise ToolCallError('a block names no language', _FENCED)
        if _FENCE in language:  # ```code``` in one line is text
          language = None
    elif is_fence:
      if language in LANGUAGES and any(part.strip() for part in block):
        arguments = {'code': '\n'.join(block)}
        calls.append(_make(LANGUAGES[language], arguments, _FENCED))
      language = None
    else:
      block.append(line)
  return _few(calls, _FENCED)


def write_hermes(call: Call) -> str:
  """The text that `hermes` reads as the call."""
  made = {'name': call.name, 'arguments': call.arguments}
  return f'{_OPEN}\n{json.dumps(made)}\n{_CLOSE}'


def write_python(call: Call) -> str:
  """The text that `python` reads as the call."""
  pairs = (f'{key}={value!r}' for key, value in call.arguments.items())
  return f'[{call.name}({", ".join(pairs)})]'


def write_fenced(call: Call) -> str:
  """The text that `fenced` reads as the call."""
  return f'{_FENCE}{call.name}\n{call.arguments["code"]}\n{_FENCE}'


PARSERS: dict[str, Callable[[str], list[Call]]] = {
  'hermes': hermes,
  'python': python,
  'fenced': fenced,
}
WRITERS: dict[str, Callable[[Call], str]] = {
  'hermes': write_hermes,
  'python': write_python,
  'fenced': write_fenced,
}
