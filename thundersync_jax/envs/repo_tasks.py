"""Small Python packages with one planted bug, and the tests that show it.

A template is a function in words to fill in, the lines that a bug may stand
in, and arguments to call it with. What is right comes from running the right
source, what is visible and hidden from splitting the calls.
"""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

Arguments = Callable[[random.Random], tuple[Any, ...]]


def _numbers(stream: random.Random, low: int = -9, high: int = 20) -> list[int]:
  return [stream.randint(low, high) for _ in range(stream.randint(0, 6))]


def _some(stream: random.Random) -> list[int]:
  return [stream.randint(0, 20) for _ in range(stream.randint(2, 6))]


def _words(stream: random.Random) -> list[str]:
  return [stream.choice(_THINGS) for _ in range(stream.randint(1, 6))]


@dataclasses.dataclass(frozen=True)
class Template:
  """A function and its bugs.

  Attributes:
    source: with {f} its name, {x} and {y} names of variables, {n} a number.
    bugs: pairs of a right line (without indentation) and a wrong one.
    arguments: draws the arguments of a call.
  """

  source: str
  bugs: tuple[tuple[str, str], ...]
  arguments: Arguments


TEMPLATES: dict[str, Template] = {
  'count_above': Template(
    """
def {f}({x}):
  count = 0
  for {y} in {x}:
    if {y} > {n}:
      count += 1
  return count
""",
    (
      ('if {y} > {n}:', 'if {y} >= {n}:'),
      ('if {y} > {n}:', 'if {y} < {n}:'),
      ('count = 0', 'count = 1'),
      ('count += 1', 'count += {y}'),
    ),
    lambda s: ([*_numbers(s, 0, 9), s.randint(2, 9)],),
  ),
  'total': Template(
    """
def {f}({x}):
  total = {n}
  for {y} in {x}:
    total += {y}
  return total
""",
    (
      ('total = {n}', 'total = 0'),
      ('total += {y}', 'total -= {y}'),
      ('total += {y}', 'total = {y}'),
      ('for {y} in {x}:', 'for {y} in {x}[1:]:'),
    ),
    lambda s: (_some(s),),
  ),
  'mean': Template(
    """
def {f}({x}):
  if not {x}:
    return {n}
  return sum({x}) / len({x})
""",
    (
      ('return {n}', 'return 0'),
      ('return sum({x}) / len({x})', 'return sum({x}) // len({x})'),
      ('return sum({x}) / len({x})', 'return sum({x}) / (len({x}) + 1)'),
      ('return sum({x}) / len({x})', 'return max({x}) / len({x})'),
    ),
    lambda s: (_numbers(s) if s.random() < 0.7 else [],),
  ),
  'clip': Template(
    """
def {f}({x}, {y}):
  if {x} > {y}:
    return {y}
  if {x} < -{n}:
    return -{n}
  return {x}
""",
    (
      ('if {x} > {y}:', 'if {x} < {y}:'),
      ('return -{n}', 'return {n}'),
      ('return {y}', 'return {x}'),
      ('if {x} < -{n}:', 'if {x} < {n}:'),
    ),
    lambda s: (s.randint(-30, 30), s.randint(10, 20)),
  ),
  'last': Template(
    """
def {f}({x}, {y}):
  return {x}[-{y}:]
""",
    (
      ('return {x}[-{y}:]', 'return {x}[:{y}]'),
      ('return {x}[-{y}:]', 'return {x}[{y}:]'),
      ('return {x}[-{y}:]', 'return {x}[-{y}]'),
    ),
    lambda s: (_some(s), s.randint(1, 3)),
  ),
  'every': Template(
    """
def {f}({x}):
  kept = []
  for i, {y} in enumerate({x}):
    if i % {n} == 0:
      kept.append({y})
  return kept
""",
    (
      ('if i % {n} == 0:', 'if i % {n} != 0:'),
      ('if i % {n} == 0:', 'if i % {n} == 1:'),
      ('kept.append({y})', 'kept.append(i)'),
      ('return kept', 'return kept[1:]'),
    ),
    lambda s: (_some(s) + _some(s),),
  ),
  'longest': Template(
    """
def {f}({x}):
  best = ''
  for {y} in {x}:
    if len({y}) > len(best):
      best = {y}
  return best
""",
    (
      ('if len({y}) > len(best):', 'if len({y}) >= len(best):'),
      ('if len({y}) > len(best):', 'if len({y}) < len(best):'),
      ('if len({y}) > len(best):', 'if {y} > best:'),
      ('return best', 'return len(best)'),
    ),
    lambda s: (_words(s),),
  ),
  'count_each': Template(
    """
def {f}({x}):
  counts = {{}}
  for {y} in {x}:
    counts[{y}] = counts.get({y}, 0) + 1
  return counts
""",
    (
      (
        'counts[{y}] = counts.get({y}, 0) + 1',
        'counts[{y}] = counts.get({y}, 1) + 1',
      ),
      ('counts[{y}] = counts.get({y}, 0) + 1', 'counts[{y}] = 1'),
      (
        'counts[{y}] = counts.get({y}, 0) + 1',
        'counts[{y}] = counts.get({y}, 0)',
      ),
    ),
    lambda s: (_words(s) + _words(s),),
  ),
  'join': Template(
    """
def {f}({x}):
  text = ''
  for {y} in {x}:
    text += {y}.upper() + '-'
  return text[:-1]
""",
    (
      ("text += {y}.upper() + '-'", "text += {y} + '-'"),
      ("text += {y}.upper() + '-'", 'text += {y}.upper()'),
      ("text += {y}.upper() + '-'", "text += '-' + {y}.upper()"),
      ('return text[:-1]', 'return text'),
      ('return text[:-1]', 'return text[1:]'),
    ),
    lambda s: (_words(s),),
  ),
  'multiples': Template(
    """
def {f}({x}):
  {y} = []
  for i in range(1, {x} + 1):
    {y}.append(i * {n})
  return {y}
""",
    (
      ('for i in range(1, {x} + 1):', 'for i in range(1, {x}):'),
      ('for i in range(1, {x} + 1):', 'for i in range({x} + 1):'),
      ('{y}.append(i * {n})', '{y}.append(i + {n})'),
    ),
    lambda s: (s.randint(1, 6),),
  ),
  'largest_gap': Template(
    """
def {f}({x}):
  {y} = 0
  for a, b in zip({x}, {x}[1:]):
    {y} = max({y}, abs(a - b))
  return {y}
""",
    (
      ('{y} = max({y}, abs(a - b))', '{y} = max({y}, a - b)'),
      ('{y} = max({y}, abs(a - b))', '{y} = min({y}, abs(a - b))'),
      ('{y} = max({y}, abs(a - b))', '{y} = abs(a - b)'),
      ('for a, b in zip({x}, {x}[1:]):', 'for a, b in zip({x}, {x}[2:]):'),
    ),
    lambda s: (_some(s) + _some(s),),
  ),
  'price': Template(
    """
def {f}({x}, {y}):
  price = {x} * {y}
  if {y} >= {n}:
    price -= {x}
  return price
""",
    (
      ('if {y} >= {n}:', 'if {y} > {n}:'),
      ('price = {x} * {y}', 'price = {x} + {y}'),
      ('price -= {x}', 'price -= {y}'),
      ('price -= {x}', 'price += {x}'),
    ),
    lambda s: (s.randint(5, 20), s.randint(1, 9)),
  ),
  'swap': Template(
    """
def {f}({x}):
  swapped = {{}}
  for key, {y} in {x}.items():
    swapped[{y}] = key
  return swapped
""",
    (
      ('swapped[{y}] = key', 'swapped[key] = {y}'),
      ('swapped[{y}] = key', 'swapped[key] = key'),
      ('return swapped', 'return {x}'),
    ),
    lambda s: ({w: s.randint(0, 99) for w in s.sample(_THINGS, 3)},),
  ),
  'both': Template(
    """
def {f}({x}, {y}):
  return [a for a in {x} if a in {y}]
""",
    (
      (
        'return [a for a in {x} if a in {y}]',
        'return [a for a in {x} if a not in {y}]',
      ),
      (
        'return [a for a in {x} if a in {y}]',
        'return [a for a in {y} if a in {x}]',
      ),
      ('return [a for a in {x} if a in {y}]', 'return {x} + {y}'),
    ),
    lambda s: (s.sample(range(9), 5), s.sample(range(9), 5)),
  ),
}

_VERB_NAMES = 'calc check compute find get make measure pick take tell work_out'
_THING_NAMES = (
  'apple boat book box car card cat chair coin cup desk dog door fish flower '
  'garden hat horse key lamp letter map note paper pen plant road room seat '
  'shop stone table ticket train tree'
)
_PACKAGE_NAMES = 'bank cafe farm fleet hotel library market museum office zoo'
_VERBS, _THINGS = _VERB_NAMES.split(), _THING_NAMES.split()
_PACKAGES = _PACKAGE_NAMES.split()
_ITEMS = [
  ('items', 'item'),
  ('values', 'value'),
  ('xs', 'x'),
  ('data', 'entry'),
]
_ITEMS += [('rows', 'row'), ('given', 'one'), ('parts', 'part'), ('a', 'b')]
_VISIBLE, _CALLS = 2, 7  # of each function: in the test, and in all
_RAISES = 'raises'


@dataclasses.dataclass(frozen=True)
class Drawn:
  """One task.

  Attributes:
    package, module: names; the module holds the bug.
    files: path to text at the start.
    path: of the module; line: number of the wrong line, from 1.
    wrong, right: text of that line, with its indentation.
    setup: import statement before the hidden calls.
    hidden: pairs of an expression and the repr of its value.
  """

  package: str
  module: str
  files: dict[str, str]
  path: str
  line: int
  wrong: str
  right: str
  setup: str
  hidden: list[tuple[str, str]]


def _values(source: str, calls: list[tuple[str, tuple]]) -> list[str]:
  """What calls (function, arguments) give; our own source, so harmless."""
  names, results = {}, []
  exec(source, names)
  for function, arguments in calls:
    try:
      results.append(repr(names[function](*arguments)))
    except Exception as error:
      results.append(f'{_RAISES} {type(error).__name__}')
  return results


def draw(stream: random.Random) -> Drawn | None:
  """A task, or None where the calls drawn do not show the bug."""
  package = stream.choice(_PACKAGES)
  module, *things = stream.sample(_THINGS, 3)
  module = f'{module}s'
  names = stream.sample(sorted(TEMPLATES), 2)
  right, calls, shown = '', [], []
  wrong_line = right_line = ''
  for name, thing in zip(names, things, strict=True):
    template = TEMPLATES[name]
    x, y = stream.choice(_ITEMS)
    function = f'{stream.choice(_VERBS)}_{thing}'
    words = {'f': function, 'x': x, 'y': y, 'n': stream.randint(2, 6)}
    right += template.source.format(**words).lstrip('\n') + '\n\n'
    if name == names[0]:
      pair = stream.choice(template.bugs)
      right_line, wrong_line = (line.format(**words) for line in pair)
    drawn = [(function, template.arguments(stream)) for _ in range(_CALLS)]
    shown += drawn[:_VISIBLE]
    calls += drawn[_VISIBLE:]
  right = right.rstrip() + '\n'
  first = right.index(f'  {right_line}\n') + 2
  wrong = right[:first] + wrong_line + right[first + len(right_line) :]
  expected = _values(right, shown + calls)
  found = _values(wrong, shown + calls)
  differs = [a != b for a, b in zip(expected, found, strict=True)]
  if not any(differs[: len(shown)]) or not any(differs[len(shown) :]):
    return None
  if any(value.startswith(_RAISES) for value in expected):
    return None
  line = right[:first].count('\n') + 1
  texts = [
    f'{module}.{function}({", ".join(map(repr, arguments))})'
    for function, arguments in shown + calls
  ]
  tests = f'from {package} import {module}\n\n\ndef test():\n' + ''.join(
    f'  assert {text} == {value}\n'
    for text, value in zip(texts[: len(shown)], expected, strict=False)
  )
  path = f'{package}/{module}.py'
  return Drawn(
    package=package,
    module=module,
    files={
      f'{package}/__init__.py': '',
      path: wrong,
      f'test_{module}.py': tests,
    },
    path=path,
    line=line,
    wrong=wrong.splitlines()[line - 1],
    right=right.splitlines()[line - 1],
    setup=f'from {package} import {module}',
    hidden=list(zip(texts, expected, strict=True))[len(shown) :],
  )
