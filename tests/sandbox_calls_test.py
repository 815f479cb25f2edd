"""The sandbox at work: calls, databases, files, grading, and its self-check."""

import contextlib
import os
import sqlite3

import pytest

from thundersync_jax.envs import (
  sandbox,
  sandbox_backends,
  sandbox_results,
)


@pytest.fixture(params=list(sandbox_backends.BACKENDS))
def box(request):
  limits = sandbox.Limits(wall_s=60, cpu_s=1)
  try:
    made = sandbox.Sandbox(limits, request.param)
  except sandbox.SandboxError as error:
    pytest.skip(str(error))
  with made:
    yield made


def test_python_prints_and_fails_readably(box):
  assert box.run_python('print(2 + 2)').output == '4'
  assert box.run_python('x = 1').output == '(no output)'
  failed = box.run_python('def f():\n  return 1 / 0\nf()')
  assert failed.status == 1 and not failed.ok
  assert failed.output.splitlines()[0] == 'Traceback (most recent call last):'
  assert 'File "main.py", line 2, in f' in failed.output
  assert failed.output.endswith('division by zero\n[exit status 1]')
  assert 'SyntaxError' in box.run_python('def').output
  assert box.run_python('import sys; sys.exit(3)').status == 3
  assert box.run_python('raise SystemExit("no")').output.startswith('no\n')
  assert box.run_python('import os; os.kill(os.getpid(), 9)').output in (
    '[ended by SIGKILL]',
    '[exit status 1]',
  )


def test_files_last_and_python_state_does_not(box):
  files = {'pkg/a.py': 'A = 5', 'pkg/__init__.py': ''}
  code = 'from pkg.a import A\nopen("out", "w").write(str(A))\nx = 1'
  assert box.run_python(code, files).ok
  assert box.read_file('out') == '5'
  assert 'NameError' in box.run_python('print(x)').output
  poison = 'import json, builtins\njson.dumps = builtins.print = None'
  assert box.run_python(poison).ok
  assert box.run_python('import json; print(json.dumps([1]))').output == '[1]'
  assert 'out' in box.list_files() and 'pkg/a.py' in box.list_files()


def test_the_shell_runs_where_python_does(box):
  box.write_file('b/c.txt', 'one\ntwo\n')
  assert box.run_shell('wc -l < b/c.txt').output == '2'
  assert box.run_shell('pwd').output == box.directory
  assert box.run_shell('nonsense_4711').status == 127
  assert box.run_shell('echo \0').stopped == 'refused'
  assert box.run_shell('cat').output == '(no output)'  # standard input is empty


def test_long_or_strange_output_is_readable(box):
  result = box.run_python('print("a" * 5000 + "z")')
  assert len(result.output) < 2100
  assert result.output.startswith('aaa') and result.output.endswith('az')
  assert '[3001 characters left out]' in result.output
  strange = box.run_python(
    'import os; os.write(1, bytes(range(256))); print(chr(0xd800))'
  )
  assert strange.output.isprintable() or '\n' in strange.output
  strange.output.encode()


def test_shorten_keeps_both_ends():
  assert sandbox_results.shorten('abc', 3) == 'abc'
  text = sandbox_results.shorten('0123456789' * 10, 30)
  assert text.startswith('01234567890123456789\n')
  assert text.endswith('\n0123456789') and '[70 characters' in text


# SQLite.


@pytest.fixture
def database(tmp_path):
  path = tmp_path / 'x.db'
  with contextlib.closing(sqlite3.connect(path)) as made:
    made.execute('create table t(a integer, b text)')
    made.executemany(
      'insert into t values (?, ?)', [(i, f'r{i}') for i in range(60)]
    )
    made.commit()
  return path.read_bytes()


def test_queries(box, database):
  result = box.run_sqlite(database, 'select a, b, null from t where a < 2')
  assert result.output == 'a | b | null\n0 | r0 | NULL\n1 | r1 | NULL'
  assert result.value['rows'] == [[0, 'r0', None], [1, 'r1', None]]
  everything = box.run_sqlite(database, 'select a from t')
  assert everything.value['more'] and len(everything.value['rows']) == 50
  assert everything.output.endswith('... more than 50 rows')
  none = box.run_sqlite(database, 'select a from t where a < 0;')
  assert none.output == 'a\n(no rows)'
  wrong = box.run_sqlite(database, 'select c from t')
  assert wrong.output == 'error: no such column: c\n[exit status 1]'


def test_writing_a_database(box):
  script = "create table t(a); insert into t values (';'); select * from t;"
  assert box.run_sqlite('new.db', script, write=True).output == 'a\n;'
  assert box.run_sqlite('new.db', 'select a from t').output == 'a\n;'
  assert 'unable to open' in box.run_sqlite('missing.db', 'select 1').output


@pytest.mark.parametrize(
  ('sql', 'answer'),
  [
    ('insert into t values (1, 2)', 'readonly database'),
    ('drop table t', 'readonly database'),
    ('pragma query_only=0; delete from t', 'not authorized'),
    ('pragma writable_schema=1', 'not authorized'),
    ("attach 'other.db' as o", 'not authorized'),
    ("select load_extension('/lib/x.so')", 'not authorized'),
    ('select zeroblob(1000000000)', 'too big'),
    ("select replace(hex(zeroblob(99999)), '0', 'xxxx')", 'too big'),
    ('select group_concat(hex(randomblob(99999))) from t', 'too big'),
    (
      'with recursive c(x) as (select 1 union all select x+1 from c) '
      'select count(*) from c',
      'processor time',
    ),
    ('select ' + '(' * 5000 + '1' + ')' * 5000, 'error: '),
    ('select \0', 'error: '),
    ('', '(no output)'),
    ('-- nothing', '(no output)'),
  ],
)
def test_attacks_in_sql(box, database, sql, answer):
  result = box.run_sqlite(database, sql)
  assert answer in result.output
  count = box.run_sqlite('.database', 'select count(*) from t')
  assert count.value['rows'] == [[60]]
  assert box.list_files() == ['.database']


def test_a_broken_database_and_a_path_outside(box):
  assert (
    'error: '
    in box.run_sqlite(b'not a database' * 99, 'select 1 from t').output
  )
  assert box.run_sqlite('../x.db', 'select 1').stopped == 'refused'
  box.run_shell('ln -s /etc/passwd y.db')
  assert 'error: ' in box.run_sqlite('y.db', 'select * from t').output


# Files from outside.


def test_links_and_pipes_are_not_followed(box, tmp_path):
  secret = tmp_path / 'secret'
  secret.write_text('my secret')
  work = box.host_directory
  (work / 'link').symlink_to(secret)
  (work / 'folder').symlink_to(tmp_path)
  os.link(secret, work / 'second_name') if os.stat(tmp_path).st_dev == os.stat(
    work
  ).st_dev else None
  os.mkfifo(work / 'pipe')
  for path in ('link', 'folder/secret', 'second_name', 'pipe', '.', 'folder'):
    with pytest.raises(sandbox.FileError):
      box.read_file(path)
  with pytest.raises(sandbox.FileError, match='not a folder'):
    box.write_file('folder/new', 'x')
  assert not (tmp_path / 'new').exists()
  box.write_file('link', 'mine')  # replaces the link, not its target
  assert secret.read_text() == 'my secret' and box.read_file('link') == 'mine'
  with sandbox.Sandbox(box.limits, box.backend) as other:
    other.copy_from(box)
    assert other.list_files() == ['link']


@pytest.mark.parametrize(
  'path', ['', '/etc/passwd', '../x', 'a/../../x', 'a\0b', '\ud800', 'x' * 999]
)
def test_paths_outside_are_refused(box, path):
  with pytest.raises(sandbox.FileError):
    box.read_file(path)
  with pytest.raises(sandbox.FileError):
    box.write_file(path, 'x')


def test_large_files_are_refused(box):
  box.run_shell('head -c 17000000 /dev/zero > big')
  size = os.stat(box.host_directory / 'big').st_size
  assert size == box.limits.file_bytes
  os.truncate(box.host_directory / 'big', size + 1)
  with pytest.raises(sandbox.FileError, match='over the limit'):
    box.read_file('big')
  with pytest.raises(sandbox.FileError, match='over the limit'):
    box.write_file('big', b'x' * (size + 1))


# Grading.

FORGERS = {
  'exit': 'import sys\nsys.exit(0)',
  'hard exit': 'import os\nos._exit(0)',
  'exit later': 'import atexit, os\natexit.register(os._exit, 0)',
  'printed': 'print([["value", "3"]])',
  'written': """
import os
for number in range(1, 100):
  try:
    os.write(number, b'[["value", "3"], ["value", "7"]]')
  except OSError:
    pass
os._exit(0)
""",
  'patched': """
import builtins
builtins.repr = lambda value: '3'
builtins.eval = lambda *a: 3
def add(a, b):
  return 3
""",
  'equal to all': """
class Any(int):
  def __eq__(self, other):
    return True
  def __repr__(self):
    return '3'
def add(a, b):
  return Any(3)
""",
  'seeks what is expected': """
import gc, inspect
def add(a, b):
  for thing in gc.get_objects():
    if isinstance(thing, (list, tuple)) and 7 in thing:
      return 7
  return 3
""",
}


@pytest.mark.parametrize('forger', FORGERS)
def test_hidden_values_cannot_be_forged(box, forger):
  """A solution that knows one answer of two gets no more than that one."""
  box.write_file('sums.py', FORGERS[forger])
  box.write_file('conftest.py', 'raise SystemExit(0)')
  box.write_file('sitecustomize.py', 'raise SystemExit(0)')
  result = box.call_functions(
    'import sums', ['sums.add(1, 2)', 'sums.add(3, 4)']
  )
  expected = [['value', '3'], ['value', '7']]
  if forger == 'written':  # the pipe is its own: so must the values be
    assert result.value in (None, expected)
  else:
    assert result.value != expected


def test_an_honest_solution_gives_its_values(box):
  box.write_file('sums.py', 'def add(a, b):\n  return a + b')
  calls = ['sums.add(1, 2)', 'sums.add("a", 1)', 'sums.add([1], [2])']
  result = box.call_functions('import sums', calls)
  assert result.value == [
    ['value', '3'],
    ['error', 'TypeError'],
    ['value', '[1, 2]'],
  ]


def test_a_grader_is_out_of_reach_of_what_it_runs(box):
  """The model's program looks for the grader's memory, pipe and files."""
  box.write_file(
    'solve.py',
    """
import os, signal, sys
for number in range(3, 100):
  try:
    os.write(number, b'{"passed": true}')
  except OSError:
    pass
parent = os.getppid()
for name in ('mem', 'fd/3', 'fd/4'):
  try:
    open(f'/proc/{parent}/{name}', 'rb+', buffering=0).write(b'true')
  except OSError:
    pass
for folder, _, names in os.walk('/work'):
  for name in names:
    if 'grade' in open(os.path.join(folder, name)).read():
      open('found', 'w').write(name)
print('41')
""",
  )
  grader = """
import os, subprocess, sys
def grade():
  run = subprocess.run([sys.executable, 'solve.py'], capture_output=True)
  return {'passed': run.stdout == b'42\\n', 'found': os.path.exists('found')}
"""
  result = box.grade(grader)
  assert result.value['passed'] is False
  if box.backend != 'rlimits':
    assert result.value == {'passed': False, 'found': True}  # solve.py alone
  honest = 'print(42)'
  box.write_file('solve.py', honest)
  assert box.grade(grader).value['passed'] is True


def test_a_grader_that_is_killed_gives_no_verdict(box):
  box.write_file('solve.py', 'import os\nos.kill(os.getppid(), 9)')
  grader = """
import subprocess, sys
def grade():
  subprocess.run([sys.executable, 'solve.py'])
  return 'passed'
"""
  assert box.grade(grader).value in (None, 'passed')
  need_signals = box.backend != 'rlimits'
  assert not need_signals or box.grade(grader).value is None


def test_a_pool_starts_ahead(box):
  pool = sandbox.Pool(box.limits, box.backend, ahead=1)
  first = pool.take()
  spare = pool._spare[0]
  second = pool.take()
  assert second is spare and first is not second
  first.write_file('a', 'x')
  assert second.list_files() == []
  for made in (first, second):
    made.close()
  left = pool._spare[0]
  pool.close()
  assert not left.host_directory.exists()
  with pytest.raises(sandbox.SandboxError, match='closed'):
    left.run_python('1')


@pytest.mark.parametrize(
  ('name', 'value'), [('wall_s', 0), ('processes', 2), ('memory_bytes', 99)]
)
def test_limits_that_cannot_work_are_refused(name, value):
  with pytest.raises(ValueError, match=f'{name}={value} must be'):
    sandbox.Limits(**{name: value})
