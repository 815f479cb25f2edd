"""SQL questions: gold paths, folds, grading, and hostile queries."""

import collections
import itertools
import json

import pytest

from thundersync_jax.envs import folds, sql

LEVELS = [(1,), (2,), (3,), (4,), (1, 2), (1, 2, 3, 4)]
COUNT = 300
TABLES = [
  {
    'name': 'pets',
    'columns': ['name', 'animal', 'age'],
    'rows': [['Rex', 'dog', 3], ['Mimi', 'cat', 8], ['Toby', 'dog', 10]],
  }
]
TASK = {'key': '', 'tables': TABLES, 'question': 'How?', 'answer': ['7']}


def draw(fold, levels=(1, 2), seed=0, count=COUNT):
  tasks = sql.make_tasks(seed, fold, levels=levels)
  return list(itertools.islice(tasks, count))


def play(environment, task):
  environment.reset(task)
  for text in environment.demonstrate():
    result = environment.step(text)
  return result


def answer_to(query, **args):
  environment = sql.make(**args)
  environment.reset(TASK)
  result = environment.step(f'```sql\n{query}\n```')
  environment.close()
  assert result.reward is None and not result.done
  return result.messages[0]['content']


@pytest.mark.parametrize('levels', LEVELS, ids=str)
def test_gold_paths_win_and_no_answer_is_a_good_guess(levels):
  environment = sql.make(levels=levels)
  keys = {}
  for fold in folds.DIGITS:
    tasks = draw(fold, levels)
    keys[fold] = {task['key'] for task in tasks}
    assert all(play(environment, task).reward == 1 for task in tasks)
    answers = collections.Counter(str(task['answer']) for task in tasks)
    assert answers.most_common(1)[0][1] < 0.1 * COUNT
    for task in tasks:
      environment.reset(task)
      assert environment.step('answer: 123456').reward == 0
  environment.close()
  assert not set.intersection(*keys.values())
  assert sum(map(len, keys.values())) == len(set.union(*keys.values()))


def test_folds_of_other_seeds_share_no_database():
  def databases(fold, seed):
    return {json.dumps(task['tables']) for task in draw(fold, seed=seed)}

  train = databases('train', 0) | databases('train', 1)
  assert not train & (databases('test', 0) | databases('test', 1))


def test_tasks_are_json_and_the_same_each_time():
  tasks = draw('train', (1, 2, 3, 4), count=50)
  assert json.loads(json.dumps(tasks)) == tasks
  assert draw('train', (1, 2, 3, 4), count=50) == tasks
  assert draw('train', (1, 2, 3, 4), seed=1, count=50) != tasks


def test_the_aggregates_agree_with_python():
  """The gold query is one way to the answer; the rows are another."""
  tasks = [
    task
    for task in draw('train', (2,))
    if task['template'] in ('mean', 'extreme_value')
  ]
  functions = {'SUM': sum, 'MAX': max, 'MIN': min}
  seen = set()
  for task in tasks:
    function, column = task['gold'].split()[1].rstrip(')').split('(')
    name = task['gold'].split()[-1]
    table = next(t for t in task['tables'] if t['name'] == name)
    place = table['columns'].index(column)
    cells = [row[place] for row in table['rows']]
    mean = sum(cells) / len(cells)
    expected = functions.get(function, lambda _, mean=mean: mean)(cells)
    assert float(task['answer'][0]) == pytest.approx(expected, abs=0.006)
    seen.add(function)
  assert seen == {'SUM', 'AVG', 'MAX', 'MIN'}


def test_the_prompt_is_one_line_of_schema_and_the_question():
  environment = sql.make(system='')
  (message,) = environment.reset(TASK)
  assert message == {'role': 'user', 'content': 'pets(name, animal, age)\nHow?'}


def test_rows_and_their_limits():
  assert (
    answer_to('SELECT name, age FROM pets') == 'Rex | 3\nMimi | 8\nToby | 10'
  )
  assert answer_to('SELECT age FROM pets', max_rows=2) == '3\n8\n...'
  assert answer_to("SELECT 'abcdef'", max_cell=3) == 'abc...'
  assert answer_to('SELECT AVG(age) FROM pets WHERE age < 9') == '5.5'
  assert answer_to('SELECT 1 WHERE 0') == answer_to('') == 'no rows'
  assert answer_to('SELECT NULL') == 'NULL'


@pytest.mark.parametrize(
  'query, answer',
  [
    ('SELECT shoe FROM pets', 'error: no such column: shoe'),
    ('DROP TABLE pets', 'error: not authorized'),
    ('DELETE FROM pets', 'error: not authorized'),
    ('UPDATE pets SET age = 1', 'error: not authorized'),
    ("ATTACH DATABASE '/tmp/other' AS other", 'error: not authorized'),
    ('PRAGMA table_info(pets)', 'error: not authorized'),
    ('SELECT random()', 'error: not authorized to use function: random'),
    ("SELECT load_extension('x')", 'error: not authorized to use function'),
    ("SELECT writefile('x', 'y')", 'error: no such function: writefile'),
    ('SELECT CURRENT_TIMESTAMP', 'error: not authorized'),
    ('SELECT 1; SELECT 2', 'error: You can only execute one statement'),
    (
      'WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x+1 FROM c) '
      'SELECT COUNT(*) FROM c',
      'error: not authorized',
    ),
    (
      'SELECT COUNT(*) FROM ' + ','.join(f'pets p{i}' for i in range(20)),
      'error: the query takes too long',
    ),
    # Each step of it copies 20 kB.
    (
      f"WITH l AS (SELECT group_concat(replace('{'a' * 200}', 'a', 'bb')) t "
      'FROM pets, pets p2, pets p3) SELECT COUNT(*) FROM l, '
      + ','.join(f'pets q{i}' for i in range(12))
      + " WHERE instr(replace(upper(t), q11.name, 'C'), 'D')",
      'error: the query takes too long',
    ),
    ("SELECT '" + 'a' * 9000 + "'", 'error: '),
    ('SELECT ' + '(' * 500 + '1' + ')' * 500, 'error: '),
    ('SELECT ?', 'error: '),
    ('\0', 'error: '),
    ('SELECT \ud800', 'error: '),
    ("SELECT CAST(x'ff' AS TEXT), x'ff'", "\ufffd | b'\\xff'"),
  ],
)
def test_hostile_queries_get_a_short_answer(query, answer):
  observation = answer_to(query)
  assert observation.startswith(answer)
  assert len(observation) < 100


@pytest.mark.parametrize(
  'text, gold, same',
  [
    (' 7', ['7'], True),
    ('7.0.', ['7'], True),
    ('1,234', ['1234'], True),
    ('33.33', ['33.33'], True),
    ('33.3', ['33.33'], False),
    ("'OSLO'", ['Oslo'], True),
    ('b, A', ['a', 'b'], True),
    ('a, a', ['a', 'b'], False),
    ('a', ['a', 'b'], False),
    ('a, b, c', ['a', 'b'], False),
    ('2, 1', ['1', '2'], True),
    ('x, 1', ['1', '2'], False),
    ('', ['7'], False),
    ('nan', ['7'], False),
  ],
)
def test_answers_are_compared_without_their_dress(text, gold, same):
  assert sql.correct(text, gold) == same


def test_what_stands_first_counts():
  environment = sql.make()
  environment.reset(TASK)
  made_up = '```sql\nSELECT 1\n```\nanswer: 7'
  assert environment.step(made_up).messages[0]['content'] == '1'
  done = environment.step('Answer: 7\n```sql\nSELECT 1\n```')
  assert (done.reward, done.done) == (1.0, True)


def test_the_last_turn_ends_the_task():
  environment = sql.make(max_turns=2)
  environment.reset(TASK)
  first = environment.step('hello \0 \ud800 ```')
  assert not first.done and first.messages[0]['role'] == 'tool'
  last = environment.step('```sql\nSELECT 1\n```')
  assert (last.messages, last.reward, last.done) == ((), 0.0, True)
  environment.close()
  environment.close()


@pytest.mark.parametrize(
  'args, message',
  [
    ({'levels': (9,)}, r'levels=\(9,\)'),
    ({'levels': ()}, r'levels=\(\)'),
    ({'domains': ('zoo',)}, 'zoo'),
    ({'levels': (4,), 'domains': ('pets',)}, 'two tables'),
    ({'max_turns': 0}, 'max_turns=0'),
    ({'rows': 1}, 'unknown'),
  ],
)
def test_wrong_settings_are_refused(args, message):
  with pytest.raises(ValueError, match=message):
    sql.make(**args)


def test_an_unknown_fold_is_refused():
  with pytest.raises(ValueError, match="fold='dev' does not exist"):
    next(sql.make_tasks(0, 'dev'))
