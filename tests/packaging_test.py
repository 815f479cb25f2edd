"""kernels/ is installed as thundersync_jax.kernels, and needs are declared.

Wheels are built from a copy of the tree, without network and without build
isolation, and installed into bare virtual environments.
"""

import ast
import importlib.metadata
import pathlib
import re
import shutil
import subprocess
import sys
import venv
import zipfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PIP = [sys.executable, '-m', 'pip', '--disable-pip-version-check']
OFFLINE = ['--no-index', '--no-deps', '--no-build-isolation']
# pip's own front end calls this hook for an editable install (PEP 660).
EDITABLE = (
  'import sys; from setuptools import build_meta; '
  'build_meta.build_editable(sys.argv[1])'
)


def run(command: list, cwd: pathlib.Path) -> str:
  """Runs a command and returns its output; fails with all that it wrote."""
  done = subprocess.run(
    [str(part) for part in command],
    cwd=cwd,
    capture_output=True,
    text=True,
    timeout=120,
  )
  assert not done.returncode, f'{command}:\n{done.stdout}\n{done.stderr}'
  return done.stdout.strip()


@pytest.fixture(scope='module')
def tree(tmp_path_factory) -> pathlib.Path:
  """A copy of the source tree, so that no build output lands in the real."""
  copy = tmp_path_factory.mktemp('tree')
  junk = shutil.ignore_patterns('__pycache__', '*.egg-info')
  for name in ('thundersync_jax', 'kernels', 'experiments', 'configs'):
    shutil.copytree(ROOT / name, copy / name, ignore=junk)
  shutil.copytree(ROOT / 'tests', copy / 'tests', ignore=junk)
  for name in ('setup.py', 'pyproject.toml', 'LICENSE'):
    shutil.copy(ROOT / name, copy)
  return copy


@pytest.fixture(scope='module')
def wheel(tree) -> pathlib.Path:
  pytest.importorskip('setuptools', reason='setuptools builds the wheel')
  run([*PIP, 'wheel', *OFFLINE, '-w', tree / 'dist', tree], tree)
  (path,) = (tree / 'dist').glob('thundersync_jax-*.whl')
  return path


@pytest.fixture(scope='module')
def editable(tree) -> pathlib.Path:
  pytest.importorskip('setuptools', reason='setuptools builds the wheel')
  (tree / 'editable').mkdir()
  run([sys.executable, '-c', EDITABLE, tree / 'editable'], tree)
  (path,) = (tree / 'editable').glob('thundersync_jax-*.whl')
  return path


def installed(wheel_path: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
  """Installs a wheel into a bare environment; returns where kernels/ lies."""
  venv.create(folder / 'venv', with_pip=False)
  bins = folder / 'venv' / ('Scripts' if sys.platform == 'win32' else 'bin')
  python = bins / 'python'
  install = ['install', '--quiet', '--no-index', '--no-deps', wheel_path]
  run([*PIP, '--python', python, *install], folder)
  find = 'import importlib.util as u; print(u.find_spec(%r).origin)'
  origin = run([python, '-I', '-c', find % 'thundersync_jax.kernels'], folder)
  return pathlib.Path(origin).parent


def test_wheel_holds_the_package_with_kernels_and_nothing_else(tree, wheel):
  expected = set()
  for folder, name in (
    ('thundersync_jax', 'thundersync_jax'),
    ('kernels', 'thundersync_jax/kernels'),
  ):
    for path in (tree / folder).rglob('*.py'):
      inside = path.relative_to(tree / folder).as_posix()
      expected.add(f'{name}/{inside}')
  with zipfile.ZipFile(wheel) as archive:
    names = archive.namelist()
  assert {n for n in names if '.dist-info/' not in n} == expected
  assert any(n.endswith('LICENSE') for n in names)


def test_kernels_import_from_an_installed_wheel(wheel, tmp_path):
  origin = installed(wheel, tmp_path)
  assert origin.is_relative_to(tmp_path / 'venv')
  assert origin.parts[-2:] == ('thundersync_jax', 'kernels')


def test_kernels_import_from_an_editable_install(editable, tree, tmp_path):
  assert installed(editable, tmp_path) == tree / 'kernels'


def test_transformers_does_not_take_kernels_for_its_own():
  # It imports a library called kernels wherever it finds a usable one, and the
  # repository's root is on the path of `python -m pytest`.
  look = (
    'import kernels; from transformers import utils; '
    'assert not utils.is_kernels_available(), kernels.__file__; '
    'from transformers import AutoTokenizer, LlamaConfig'
  )
  run([sys.executable, '-c', look], ROOT)


def normal(name: str) -> str:
  return re.sub(r'[-_.]+', '-', name).lower()


def requirements(wheel_path: pathlib.Path) -> list[tuple[str, str, str]]:
  """Returns (distribution, version specifier, extra or '') of each need."""
  with zipfile.ZipFile(wheel_path) as archive:
    (name,) = (n for n in archive.namelist() if n.endswith('/METADATA'))
    text = archive.read(name).decode()
  found = []
  for line in re.findall(r'^Requires-Dist: (.*)$', text, re.MULTILINE):
    spec, _, marker = line.partition(';')
    extra = re.search(r'extra == [\'"]([\w-]+)', marker)
    name, bound = re.match(r'([\w.-]+)\s*(.*)', spec.strip()).groups()
    found.append((normal(name), bound, extra.group(1) if extra else ''))
  return found


def test_every_need_has_a_lower_bound_and_a_reason(wheel):
  lines = (ROOT / 'setup.py').read_text(encoding='utf-8').splitlines()
  for name, bound, _ in requirements(wheel):
    assert re.fullmatch(r'\(?>=[\d.]+\)?', bound), f'{name}: {bound!r}'
    (line,) = (x for x in lines if re.search(rf"'{name}>=", normal_line(x)))
    assert '  # ' in line, f'{name} has no reason beside it in setup.py'


def normal_line(line: str) -> str:
  head, mark, rest = line.partition('>=')
  return head.replace('_', '-').lower() + mark + rest


def test_torch_stays_out_of_the_test_extra(wheel):
  extras = {extra for name, _, extra in requirements(wheel) if name == 'torch'}
  assert extras == {'parity'}


def test_every_library_that_is_imported_is_declared(wheel):
  declared = {name for name, _, _ in requirements(wheel)}
  owners = importlib.metadata.packages_distributions()
  ours = {'configs', 'experiments', 'tests', 'thundersync_jax'}
  ours |= {path.stem for path in (ROOT / 'tests').glob('*.py')}
  missing = set()
  for path in sorted(ROOT.glob('*/**/*.py')):
    if path.relative_to(ROOT).parts[0] not in (*ours, 'kernels'):
      continue
    for top in top_modules(path) - ours - sys.stdlib_module_names:
      owned = {normal(name) for name in owners.get(top, [top])}
      if not owned & declared:
        missing.add(f'{path.relative_to(ROOT)}: {top}')
  assert not missing, '\n'.join(sorted(missing))


def top_modules(path: pathlib.Path) -> set[str]:
  """Returns the first names of all absolute imports of a file."""
  names = set()
  for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
    if isinstance(node, ast.Import):
      names |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom) and not node.level:
      names.add(node.module)
  return {name.partition('.')[0] for name in names}
