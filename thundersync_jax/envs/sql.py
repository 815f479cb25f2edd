"""SQL questions on generated SQLite databases, several turns a task.

The model writes one query a turn in a fenced block and reads the rows; it ends
with a line `answer: X`. Reward 1 if X equals what the gold query gives, else
0. The SQL runs in this process on a database in memory: an authorizer admits
SELECT and a list of functions, and steps, time, lengths and rows are limited.
That takes 0.1 ms a query; a call of the sandbox takes above 10 ms, and would
admit random() and the clock, with which members of a group differ.
"""

import collections
import dataclasses
import math
import random
import re
import sqlite3
import time
from collections.abc import Iterator
from typing import Any

from thundersync_jax.envs import base, folds, sql_domains, sql_questions

_MAX_STEPS = 200_000  # of SQLite's virtual machine, a query
_MAX_SECONDS = 2.0  # of a query whose single steps are slow
_STEPS_A_CALL = 1000  # of the progress handler
_LIMITS = {
  sqlite3.SQLITE_LIMIT_LENGTH: 20_000,  # bytes of a text or row
  sqlite3.SQLITE_LIMIT_SQL_LENGTH: 4000,  # bytes of a query
  sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 50,
  sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 10,
  sqlite3.SQLITE_LIMIT_COLUMN: 50,
  sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 50,
  sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}
_ACTIONS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ}
# What gives the same result each time: no random(), no clock, no files.
_NAMES = (
  'abs avg ceil coalesce concat count dense_rank first_value floor glob '
  'group_concat ifnull iif instr last_value length like lower ltrim max min '
  'nullif rank replace round row_number rtrim sign string_agg substr '
  'substring sum total trim typeof upper'
)
_FUNCTIONS = frozenset(_NAMES.split())


@dataclasses.dataclass(frozen=True)
class Settings:
  """The config block of the SQL task."""

  levels: tuple[int, ...] = (1, 2)  # of sql_questions.TEMPLATES
  domains: tuple[str, ...] = tuple(sql_domains.DOMAINS)
  max_turns: int = 3
  max_rows: int = 8  # of a result that are shown
  max_cell: int = 24  # characters of a cell that are shown
  max_answer_items: int = 4  # cells of a gold answer
  system: str = 'Query with ```sql ...```, then end with answer: X'

  def __post_init__(self):
    for name, valid in (
      ('levels', sql_questions.TEMPLATES),
      ('domains', sql_domains.DOMAINS),
    ):
      values = getattr(self, name)
      if not values or not set(values) <= set(valid):
        raise ValueError(
          f'{name}={values!r} must be one or more of {sorted(valid)}'
        )
    for name in ('max_turns', 'max_rows', 'max_cell', 'max_answer_items'):
      if getattr(self, name) < 1:
        raise ValueError(f'{name}={getattr(self, name)} must be at least 1')
    joins = any(len(_domain(name).sheets) > 1 for name in self.domains)
    if set(self.levels) == {4} and not joins:
      raise ValueError(
        f'levels={self.levels!r} asks for joins, and no domain of '
        f'{self.domains!r} has two tables; add shop, library or football'
      )


def _domain(name: str) -> sql_domains.Domain:
  return sql_domains.DOMAINS[name]


class Database:
  """A database in memory that only answers queries.

  Usable from one thread at a time, whichever it is.
  """

  def __init__(self, tables: list[sql_questions.Table]):
    self._connection = sqlite3.connect(':memory:', check_same_thread=False)
    self._connection.text_factory = _decode
    sql_questions.load(tables, self._connection)
    for limit, value in _LIMITS.items():
      self._connection.setlimit(limit, value)
    self._connection.set_authorizer(_authorize)
    self._connection.set_progress_handler(self._tick, _STEPS_A_CALL)
    self._steps = 0
    self._deadline = math.inf  # time.monotonic()

  def run(self, query: str, max_rows: int) -> list[tuple[Any, ...]]:
    """The first max_rows rows of one query.

    Raises:
      sqlite3.Error, sqlite3.Warning, ValueError: if it is refused or wrong.
    """
    self._steps = 0
    self._deadline = time.monotonic() + _MAX_SECONDS
    cursor = self._connection.cursor()
    try:
      return cursor.execute(query).fetchmany(max_rows)
    finally:
      cursor.close()

  def close(self) -> None:
    """Frees the database; a second call does nothing."""
    self._connection.close()

  def _tick(self) -> bool:
    self._steps += _STEPS_A_CALL
    late = time.monotonic() > self._deadline
    return late or self._steps > _MAX_STEPS  # true interrupts the query


def _decode(text: bytes) -> str:
  return text.decode('utf-8', 'replace')


def _authorize(action: int, first: str | None, second: str | None, *_: Any):
  del first
  if action in _ACTIONS:
    return sqlite3.SQLITE_OK
  if action == sqlite3.SQLITE_FUNCTION and second.lower() in _FUNCTIONS:
    return sqlite3.SQLITE_OK
  return sqlite3.SQLITE_DENY


def make_tasks(seed: int, fold: str, **args: Any) -> Iterator[dict[str, Any]]:
  """Endless tasks, each on a database of its own.

  The key is the database and the gold query: a paraphrase is the same problem.

  Raises:
    ValueError: if the fold does not exist.
  """
  settings = base.parse_settings(Settings, 'sql', args)
  folds.check(fold)
  stream = folds.draws('sql', seed, fold)
  while True:
    task = _draw_task(stream, fold, settings)
    if task is not None:
      yield task


def _draw_task(
  stream: random.Random, fold: str, settings: Settings
) -> dict[str, Any] | None:
  """A task; None if the drawn question has no single good answer."""
  level = stream.choice(settings.levels)
  name = stream.choice(settings.domains)
  domain = _domain(name)
  if level == 4 and len(domain.sheets) < 2:
    return None
  number = stream.randrange(2**40) * 10 + stream.choice(folds.DIGITS[fold])
  tables = sql_questions.draw_database(domain, number)
  template = stream.choice(sorted(sql_questions.TEMPLATES[level]))
  draw = sql_questions.TEMPLATES[level][template]
  question = draw(stream, domain, tables)
  answer = _gold_answer(tables, question.gold, settings.max_answer_items)
  if not answer:
    return None
  return {
    'key': f'{name}/{number}/{question.gold}',
    'template': template,
    'tables': tables,
    'question': question.text,
    'gold': question.gold,
    'answer': answer,
  }


def _gold_answer(
  tables: list[sql_questions.Table], gold: str, max_items: int
) -> list[str]:
  """The cells of the gold result; empty if it is none, or not the only one.

  'Which has the highest' has two right answers where rows tie, and SQLite
  shows one of them: asked for in the reverse order of rows, it shows another.
  """
  reverse = [table | {'rows': table['rows'][::-1]} for table in tables]
  results = []
  for order in (tables, reverse):
    database = Database(order)
    rows = database.run(gold, max_items + 1)
    database.close()
    results.append([show(cell, 100) for row in rows for cell in row])
  same = collections.Counter(results[0]) == collections.Counter(results[1])
  fits = 1 <= len(results[0]) <= max_items
  useful = not {'0', 'NULL'} & set(results[0])
  return results[0] if same and fits and useful else []


def show(cell: Any, max_cell: int) -> str:
  """A cell as the model reads it; numbers with at most two decimals."""
  if cell is None:
    return 'NULL'
  if isinstance(cell, float):
    text = f'{cell:.2f}'.rstrip('0').rstrip('.')
  else:
    text = ' '.join(str(cell).split())
  return text if len(text) <= max_cell else text[:max_cell] + '...'


def schema(tables: list[sql_questions.Table]) -> str:
  """The tables and their columns on one line."""
  return ' '.join(f'{t["name"]}({", ".join(t["columns"])})' for t in tables)


_QUERY = re.compile(r'```(?:sql\b)?(.*?)(?:```|\Z)', re.DOTALL | re.IGNORECASE)
_ANSWER = re.compile(r'answer\s*:(.*)', re.IGNORECASE)


def correct(answer: str, gold: list[str]) -> bool:
  """Whether the answer names the gold cells, in any order.

  Letters' case, quotes, a full stop and thousands commas do not matter, and
  numbers may be 0.01 off.
  """
  items = answer.split(',') if len(gold) > 1 else [answer.replace(',', '')]
  mine = sorted(map(_normal, items), key=str)
  theirs = sorted(map(_normal, gold), key=str)
  return len(mine) == len(theirs) and all(map(_equal, mine, theirs))


def _normal(text: str) -> float | str:
  text = text.strip().rstrip('.').strip(' \'"`*').casefold()
  return float(text) if re.fullmatch(r'[-+]?\d+(\.\d+)?', text) else text


def _equal(a: float | str, b: float | str) -> bool:
  if isinstance(a, float) and isinstance(b, float):
    return abs(a - b) < 0.0101
  return a == b


class SqlEnvironment:
  """One database and one question; 'tool' messages carry the rows."""

  def __init__(self, settings: Settings):
    self._settings = settings
    self.max_turns = settings.max_turns
    self._task: dict[str, Any] = {}
    self._database: Database | None = None
    self._turns = 0

  def reset(self, task: dict[str, Any]) -> list[base.Message]:
    self.close()
    self._task = task
    self._turns = 0
    self._database = Database(task['tables'])
    question = f'{schema(task["tables"])}\n{task["question"]}'
    return base.opening(question, self._settings.system, '')

  def step(self, text: str) -> base.EnvStep:
    self._turns += 1
    query, answer = _QUERY.search(text), _ANSWER.search(text)
    # Rows that the model made up behind its query decide nothing.
    if answer and (not query or answer.start() < query.start()):
      reward = float(correct(answer[1], self._task['answer']))
      return base.EnvStep(messages=(), reward=reward, done=True)
    if self._turns >= self.max_turns:
      return base.EnvStep(messages=(), reward=0.0, done=True)
    content = 'error: write ```sql ...``` or answer: X'
    if query:
      content = self._rows(query[1].strip())
    message = {'role': 'tool', 'content': content}
    return base.EnvStep(messages=(message,), reward=None, done=False)

  def demonstrate(self) -> Iterator[str]:
    """The gold query, then its answer."""
    yield f'```sql\n{self._task["gold"]}\n```'
    yield f'answer: {", ".join(self._task["answer"])}'

  def close(self) -> None:
    """Frees the database."""
    if self._database is not None:
      self._database.close()
      self._database = None

  def _rows(self, query: str) -> str:
    limit = self._settings.max_rows
    try:
      rows = self._database.run(query, limit + 1)
    except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
      if 'interrupted' in str(error):
        return 'error: the query takes too long'
      return f'error: {show(str(error), 80)}'
    lines = [
      ' | '.join(show(cell, self._settings.max_cell) for cell in row)
      for row in rows[:limit]
    ]
    lines += ['...'] if len(rows) > limit else []
    return '\n'.join(lines) or 'no rows'


def make(**args: Any) -> SqlEnvironment:
  """The environment of a config block (see Settings)."""
  return SqlEnvironment(base.parse_settings(Settings, 'sql', args))


FAMILY = base.TaskFamily('sql', make_tasks, make)
