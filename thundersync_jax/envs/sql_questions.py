"""Questions on small generated databases, each with its gold query.

A template fills a question and a query from a drawn database; levels go
from a look-up (1) over aggregates (2) and filtered or ordered ones (3) to
joins (4). A database belongs to one fold: its number modulo 10 says which.
"""

import dataclasses
import random
import sqlite3
from collections.abc import Callable
from typing import Any

from thundersync_jax.envs.sql_domains import Domain, Sheet

Cell = int | str
Table = dict[str, Any]  # {'name', 'columns': [name], 'rows': [[cell]]}

# Of the four values of a column: uneven, so that no count is a good guess.
_SHARES = (7, 3, 1, 1)


@dataclasses.dataclass(frozen=True)
class Question:
  """A question in words and the query that answers it."""

  text: str
  gold: str


Draw = Callable[[random.Random, Domain, list[Table]], Question]


def draw_database(domain: Domain, number: int) -> list[Table]:
  """The tables of a database: 8 to 20 rows each, the same for a number."""
  stream = random.Random(number)
  tables = []
  names: list[str] = []  # of the rows of the table that is linked to
  for sheet in reversed(domain.sheets):
    table = _draw_table(stream, sheet, domain.link, names)
    names = [row[0] for row in table['rows']]
    tables.insert(0, table)
  return tables


def _draw_table(
  stream: random.Random, sheet: Sheet, link: str, names: list[str]
) -> Table:
  size = stream.randint(8, 20)
  columns = []
  for index, column in enumerate(sheet.columns):
    if index == 0:
      words = column.words or range(1, column.high + 1)
      cells = stream.sample(words, size)
    elif column.name == link:
      cells = stream.choices(stream.sample(names, 5), k=size)
    elif column.words:
      cells = stream.choices(stream.sample(column.words, 4), _SHARES, k=size)
    else:
      cells = stream.choices(range(column.low, column.high + 1), k=size)
    columns.append(cells)
  return {
    'name': sheet.name,
    'columns': [column.name for column in sheet.columns],
    'rows': [list(row) for row in zip(*columns, strict=True)],
  }


def load(tables: list[Table], connection: sqlite3.Connection) -> None:
  """Creates the tables in an empty database."""
  for table in tables:
    columns = ', '.join(table['columns'])
    places = ', '.join('?' * len(table['columns']))
    connection.execute(f'CREATE TABLE {table["name"]} ({columns})')
    connection.executemany(
      f'INSERT INTO {table["name"]} VALUES ({places})', table['rows']
    )
  connection.commit()


def literal(cell: Cell) -> str:
  """The cell in SQL."""
  return str(cell) if isinstance(cell, int) else f"'{cell}'"


def _cell(stream: random.Random, table: Table, column: str) -> Cell:
  return stream.choice(table['rows'])[table['columns'].index(column)]


def _filter(stream: random.Random, sheet: Sheet, table: Table):
  """A condition in words and in SQL, true for at least one row."""
  column = stream.choice(sheet.groups)
  value = _cell(stream, table, column.name)
  words = stream.choice(column.where).format(value)
  return words, f'{column.name} = {literal(value)}'


def _one(stream: random.Random, domain: Domain, tables: list[Table]):
  index = stream.randrange(len(tables))
  return domain.sheets[index], tables[index]


def _lookup(stream, domain, tables) -> Question:
  sheet, table = _one(stream, domain, tables)
  column = stream.choice(sheet.columns[1:])
  key = sheet.columns[0].name
  value = _cell(stream, table, key)
  row = value if isinstance(value, str) else f'{sheet.singular} {value}'
  text = stream.choice(
    (
      'What is the {} of {}?',
      'Give the {} of {}.',
      'Find the {} of {}.',
    )
  ).format(column.spoken, row)
  return Question(
    text,
    f'SELECT {column.name} FROM {table["name"]} WHERE {key} = {literal(value)}',
  )


def _count(stream, domain, tables) -> Question:
  sheet, table = _one(stream, domain, tables)
  words, condition = _filter(stream, sheet, table)
  start = stream.choice(('How many {} {}?', 'Count the {} that {}.'))
  return Question(
    start.format(table['name'], words),
    f'SELECT COUNT(*) FROM {table["name"]} WHERE {condition}',
  )


def _compare(stream, domain, tables) -> Question:
  sheet, table = _one(stream, domain, tables)
  column = stream.choice(sheet.numbers)
  value = _cell(stream, table, column.name)
  words, sign = stream.choice((('above', '>'), ('below', '<')))
  start = stream.choice(
    ('How many {} have {} {} {}?', 'Count the {} with {} {} {}.')
  )
  return Question(
    start.format(table['name'], column.spoken, words, value),
    f'SELECT COUNT(*) FROM {table["name"]} WHERE {column.name} {sign} {value}',
  )


_AGGREGATES = {
  'SUM': ('total', 'sum of'),
  'AVG': ('average', 'mean'),
  'MAX': ('highest', 'largest'),
  'MIN': ('lowest', 'smallest'),
}


def _aggregate(functions: tuple[str, ...]) -> Draw:
  def draw(stream, domain, tables) -> Question:
    sheet, table = _one(stream, domain, tables)
    column = stream.choice(sheet.numbers)
    function = stream.choice(functions)
    words = stream.choice(_AGGREGATES[function])
    start = stream.choice(
      ('What is the {} {} of the {}?', 'Give the {} {} of {}.')
    )
    return Question(
      start.format(words, column.spoken, table['name']),
      f'SELECT {function}({column.name}) FROM {table["name"]}',
    )

  return draw


def _aggregate_where(stream, domain, tables) -> Question:
  sheet, table = _one(stream, domain, tables)
  column = stream.choice(sheet.numbers)
  function = stream.choice(sorted(_AGGREGATES))
  adjective = stream.choice(_AGGREGATES[function])
  words, condition = _filter(stream, sheet, table)
  return Question(
    f'What is the {adjective} {column.spoken} of {table["name"]} that {words}?',
    f'SELECT {function}({column.name}) FROM {table["name"]} WHERE {condition}',
  )


def _extreme(stream, domain, tables) -> Question:
  sheet, table = _one(stream, domain, tables)
  column = stream.choice(sheet.numbers)
  words, order = stream.choice((('highest', ' DESC'), ('lowest', '')))
  count = stream.choice((1, 1, 2))
  start = (
    f'Which {sheet.singular} has'
    if count == 1
    else f'Which {count} {table["name"]} have'
  )
  return Question(
    f'{start} the {words} {column.spoken}?',
    f'SELECT {sheet.columns[0].name} FROM {table["name"]} '
    f'ORDER BY {column.name}{order} LIMIT {count}',
  )


def _list(stream, domain, tables) -> Question:
  sheet, table = _one(stream, domain, tables)
  words, condition = _filter(stream, sheet, table)
  start = stream.choice(('Which {} {}?', 'List the {} that {}.'))
  return Question(
    start.format(table['name'], words),
    f'SELECT {sheet.columns[0].name} FROM {table["name"]} WHERE {condition}',
  )


def _joined(domain: Domain, tables: list[Table]) -> str:
  first, second = (table['name'] for table in tables)
  key = domain.sheets[1].columns[0].name
  return f'{first} JOIN {second} ON {domain.link} = {second}.{key}'


def _join_lookup(stream, domain, tables) -> Question:
  events, (sheet, _) = domain.sheets[0], _second(domain, tables)
  column = stream.choice(sheet.columns[1:])
  value = _cell(stream, tables[0], 'id')
  return Question(
    f'What is the {column.spoken} of the {sheet.singular} of '
    f'{events.singular} {value}?',
    f'SELECT {column.name} FROM {_joined(domain, tables)} WHERE id = {value}',
  )


def _join_aggregate(stream, domain, tables) -> Question:
  sheet, table = _second(domain, tables)
  words, condition = _filter(stream, sheet, table)
  column = domain.sheets[0].numbers[0]
  function = stream.choice(('SUM', 'AVG', 'MAX'))
  adjective = stream.choice(_AGGREGATES[function])
  return Question(
    f'What is the {adjective} {column.spoken} of {tables[0]["name"]} of '
    f'{table["name"]} that {words}?',
    f'SELECT {function}({column.name}) FROM {_joined(domain, tables)} '
    f'WHERE {condition}',
  )


def _second(domain: Domain, tables: list[Table]) -> tuple[Sheet, Table]:
  return domain.sheets[1], tables[1]


# Level -> template name -> how it is drawn.
TEMPLATES: dict[int, dict[str, Draw]] = {
  1: {'lookup': _lookup},
  2: {
    'count': _count,
    'compare': _compare,
    'mean': _aggregate(('SUM', 'AVG')),
    'extreme_value': _aggregate(('MAX', 'MIN')),
  },
  3: {'filtered': _aggregate_where, 'extreme_row': _extreme, 'list': _list},
  4: {'join_lookup': _join_lookup, 'join_aggregate': _join_aggregate},
}
