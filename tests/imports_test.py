"""The rooms of the repository: who imports whom, and how long files are.

Imports are read from the syntax trees, so that one inside a function counts
too. `faults` is itself tested on sources that break each rule.
"""

import ast
import fnmatch
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOP_LEVEL = {
  'LICENSE',
  'README.md',
  'configs',
  'experiments',
  'kernels',
  'pyproject.toml',
  'setup.py',
  'tests',
  'thundersync_jax',
}
PACKAGE = 'thundersync_jax'
ARRAYS = frozenset({'chex', 'jax', 'numpy'})
# The last four hold what drivers and benchmarks share.
DRIVERS = frozenset(
  {
    'evaluate',
    'train_es',
    'train_rl',
    'train_sft',
    'assembly',
    'defaults',
    'synthetic',
    'streams',
    'replay',
    'schedule_bench',
  }
)
PURE = frozenset({'objectives', 'streaming.accumulators', 'learner.packing'})
# What a pure file may not mention: it works on arrays, wherever they are.
DEVICE_NAMES = frozenset(
  {'Mesh', 'NamedSharding', 'device_put', 'jit', 'pjit', 'shard_map'}
)
# Room -> what it may import of the package beside itself; None is anything.
# A file of its own name comes before the room that it stands in.
OURS = {
  'kernels': set(),
  'types': set(),
  'mesh': set(),
  'objectives': {'types'},
  'streaming': {'types', 'objectives', 'runs.traces'},  # to simulate them
  'streaming.accumulators': {'types', 'objectives'},
  'learner.packing': {'types'},
  'envs': {'types'},
  'models': {'mesh', 'kernels'},
  'runs': {'types', 'mesh'},
  'rollout': {'types', 'mesh', 'kernels', 'models', 'envs', 'objectives'},
  'learner': {
    'types',
    'mesh',
    'kernels',
    'models',
    'objectives',
    'streaming',
  },
  'evolution': {
    'types',
    'mesh',
    'kernels',
    'models',
    'objectives',
    'streaming.accumulators',
  },
  **dict.fromkeys(DRIVERS),
}
# Room -> the only other libraries that it may import.
LIBRARIES = {
  'kernels': frozenset({'jax'}),
  **dict.fromkeys(['types', 'mesh', *PURE], ARRAYS),
}


def sources(*folders: str) -> dict[str, str]:
  """Returns {path relative to the root: text} of the folders' Python files."""
  return {
    str(path.relative_to(ROOT)): path.read_text(encoding='utf-8')
    for folder in folders
    for path in sorted((ROOT / folder).rglob('*.py'))
  }


def module_name(path: str) -> str:
  """Returns the dotted name inside the package, '' for its own __init__."""
  parts = pathlib.PurePosixPath(path).with_suffix('').parts
  parts = parts[1:] if parts[0] == PACKAGE else parts
  return '.'.join(part for part in parts if part != '__init__')


def within(module: str, rooms) -> str | None:
  """Returns the longest of `rooms` that holds `module`, or None."""
  held = [r for r in rooms if module == r or module.startswith(r + '.')]
  return max(held, key=len, default=None)


def imported(tree: ast.AST) -> list[str]:
  """Returns the dotted names that a tree imports, `from a import b` as a.b."""
  names = []
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      names += [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      base = '.' * node.level + (node.module or '')
      names += [f'{base}.{alias.name}' for alias in node.names]
  return names


def faults(path: str, text: str) -> list[str]:
  """Returns what is wrong with the imports and names of one package file."""
  tree, module = ast.parse(text), module_name(path)
  room = within(module, OURS)
  if module and room is None:
    return [f'{path}: no rule for its room; add one to OURS']
  found = []
  for name in imported(tree):
    top = name.partition('.')[0]
    if top == PACKAGE:
      found += _ours(path, room, name.partition('.')[2])
    elif top in ('', 'configs', 'experiments', 'kernels', 'tests'):
      found.append(f'{path}: the package may not import {name}')
    elif top not in LIBRARIES.get(room, {top}) | sys.stdlib_module_names:
      found.append(f'{path}: {room} may not import {name}')
  if within(module, PURE):
    found += _pure(path, tree)
  return found


def _ours(path: str, room: str | None, name: str) -> list[str]:
  """Returns the fault, if any, of importing `name` of the package."""
  allowed = OURS.get(room, set())
  home = room.partition('.')[0] if room else ''
  if allowed is None or within(name, allowed):
    return []
  # A pure file keeps to the pure part of its room, any other to its room.
  if within(name, [room] if room in PURE else [home]):
    return []
  return [f'{path}: {room or "__init__"} may not import {PACKAGE}.{name}']


def _pure(path: str, tree: ast.AST) -> list[str]:
  used = [n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)]
  used += [n.id for n in ast.walk(tree) if isinstance(n, ast.Name)]
  used += [name.rpartition('.')[2] for name in imported(tree)]
  return [
    f'{path}: a pure file names {name}'
    for name in sorted(DEVICE_NAMES.intersection(used))
  ]


def prints(path: str, text: str) -> list[str]:
  """Returns the lines of a file that call print."""
  return [
    f'{path}:{node.lineno}: print; use absl.logging'
    for node in ast.walk(ast.parse(text))
    if isinstance(node, ast.Call)
    and isinstance(node.func, ast.Name)
    and node.func.id == 'print'
  ]


def test_imports_run_one_way():
  found = []
  for path, text in sources(PACKAGE, 'kernels').items():
    found += faults(path, text)
  assert not found, '\n'.join(found)


@pytest.mark.parametrize(
  ('path', 'text'),
  [
    ('kernels/flash/api.py', f'from {PACKAGE} import types'),
    ('kernels/flash/api.py', 'import numpy as np'),
    (f'{PACKAGE}/types.py', 'import optax'),
    (f'{PACKAGE}/mesh.py', f'from {PACKAGE} import types'),
    (f'{PACKAGE}/objectives/losses.py', f'from {PACKAGE}.models import heads'),
    (f'{PACKAGE}/objectives/losses.py', 'import jax\n\nf = jax.jit(abs)'),
    (f'{PACKAGE}/objectives/losses.py', 'from jax.sharding import Mesh'),
    (f'{PACKAGE}/streaming/queue.py', f'import {PACKAGE}.learner.packing'),
    (
      f'{PACKAGE}/streaming/accumulators.py',
      f'from {PACKAGE}.streaming import queue',
    ),
    (
      f'{PACKAGE}/learner/packing.py',
      f'from {PACKAGE}.learner import learner',
    ),
    (f'{PACKAGE}/models/heads.py', f'from {PACKAGE}.rollout import engine'),
    (f'{PACKAGE}/envs/sums.py', f'from {PACKAGE} import train_rl'),
    (f'{PACKAGE}/learner/learner.py', f'from {PACKAGE}.rollout import engine'),
    (f'{PACKAGE}/train_rl.py', 'from configs import quickstart'),
    (f'{PACKAGE}/train_rl.py', 'def f():\n  from experiments import sweep'),
    (f'{PACKAGE}/train_rl.py', 'import kernels.flash'),
    (f'{PACKAGE}/rollout/engine.py', 'from . import sampling'),
    (f'{PACKAGE}/__init__.py', f'from {PACKAGE} import train_rl'),
    (f'{PACKAGE}/cellar/wine.py', ''),
  ],
)
def test_a_wrong_import_is_found(path, text):
  assert len(faults(path, text)) == 1


@pytest.mark.parametrize(
  ('path', 'text'),
  [
    ('kernels/flash/api.py', f'from {PACKAGE}.kernels.flash import reference'),
    ('kernels/flash/api.py', 'import functools\n\nimport jax.numpy as jnp'),
    (f'{PACKAGE}/models/heads.py', f'from {PACKAGE}.kernels.flash import api'),
    (f'{PACKAGE}/streaming/scheduler.py', f'from {PACKAGE}.streaming import q'),
    (f'{PACKAGE}/objectives/losses.py', f'from {PACKAGE}.objectives import x'),
    (f'{PACKAGE}/learner/learner.py', f'from {PACKAGE}.learner import packing'),
    (f'{PACKAGE}/train_rl.py', f'from {PACKAGE} import evaluate'),
    (f'{PACKAGE}/envs/sums.py', 'import reasoning_gym'),
  ],
)
def test_a_right_import_is_not(path, text):
  assert not faults(path, text)


def test_configs_and_experiments_keep_to_their_side():
  found = []
  for path, text in sources('configs', 'experiments').items():
    # An experiment may read a config; nothing imports an experiment or a test.
    barred = {'experiments', 'kernels', 'tests'}
    if path.startswith('configs/'):
      barred.add(PACKAGE)
    found += [
      f'{path}: imports {name}'
      for name in imported(ast.parse(text))
      if name.partition('.')[0] in barred and name != f'{PACKAGE}.defaults'
    ]
  assert not found, '\n'.join(found)


def test_nothing_prints_outside_experiments():
  assert prints('x.py', 'a = 1\nprint(a)') == [
    'x.py:2: print; use absl.logging'
  ]
  found = []
  for path, text in sources(PACKAGE, 'kernels', 'configs', 'tests').items():
    found += prints(path, text)
  assert not found, '\n'.join(found)


def test_visible_top_level_is_the_agreed_one():
  ignored = (ROOT / '.gitignore').read_text(encoding='utf-8').split()
  patterns = ['.*', *(line.strip('/') for line in ignored)]
  visible = {
    path.name
    for path in ROOT.iterdir()
    if not any(fnmatch.fnmatch(path.name, pattern) for pattern in patterns)
  }
  assert visible == TOP_LEVEL


def test_files_stay_short():
  limits = {'experiments': 60, 'configs': 400, 'tests': 400, PACKAGE: 400}
  long = [
    f'{path}: {count} lines, limit {limit}'
    for folder, limit in limits.items()
    for path, text in sources(folder).items()
    if (count := len(text.splitlines())) > limit
  ]
  long += [
    f'{path.name}: {count} lines, limit 60'
    for path in (ROOT / 'experiments').glob('*.sh')
    if (count := len(path.read_text(encoding='utf-8').splitlines())) > 60
  ]
  assert not long, '\n'.join(long)
