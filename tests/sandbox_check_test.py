"""The sandbox fails closed, says what it is, and cleans up after itself."""

import contextlib
import os
import signal
import sys

import pytest
from absl import logging

from thundersync_jax.envs import sandbox, sandbox_backends, sandbox_check


@pytest.fixture(params=list(sandbox_backends.BACKENDS))
def box(request):
  try:
    made = sandbox.Sandbox(sandbox.Limits(wall_s=60), request.param)
  except sandbox.SandboxError as error:
    pytest.skip(str(error))
  with made:
    yield made


def test_a_dead_worker_is_replaced(box):
  box.write_file('kept.txt', 'kept')
  assert box.run_python('print(1)').ok
  os.killpg(box._workers[0]._process.pid, signal.SIGKILL)
  result = box.run_python('print(1)')
  assert result.stopped == 'lost' and 'files are kept' in result.output
  assert box.run_shell('cat kept.txt').output == 'kept'


def test_a_deep_or_locked_folder_is_deleted(box):
  code = 'import os\nfor _ in range(1100):\n  os.mkdir("d")\n  os.chdir("d")'
  box.run_python(code + '\nopen("x", "w")\nos.chmod(".", 0)')
  assert box.list_files() == []
  box.close()
  assert not box.host_directory.parent.exists()


@pytest.mark.parametrize('backend', ['bwrap', 'unshare'])
def test_isolation_that_is_only_claimed_is_found_out(backend, monkeypatch):
  """A bubblewrap that isolates nothing: refused, and the next one taken."""

  def pretend(place, temporary):
    config = {**sandbox_backends._with_home('rlimits', place)}
    code = (
      'import json, os, sys\n'
      f'os.chdir({str(place.work)!r})\n' + sandbox_backends._BOOT
    )
    return ['/usr/bin/env', *(f'{k}={v}' for k, v in config.items())] + [
      sys.executable,
      *('-I', '-S', '-c', code),
    ]

  monkeypatch.setitem(sandbox_backends.BACKENDS, backend, pretend)
  monkeypatch.setattr(sandbox_backends, 'draw_uid', lambda backend: None)
  monkeypatch.setattr(
    sandbox_backends, 'directory', lambda backend, place: str(place.work)
  )
  with pytest.raises(
    sandbox.SandboxError, match='claims to isolate.*files.*signals'
  ):
    sandbox.measure.__wrapped__(backend)


def test_the_choice_is_logged(monkeypatch, caplog):
  logging.use_absl_handler()
  provides = sandbox_check.EVERYTHING - {'network'}
  with caplog.at_level('INFO', logger='absl'):
    sandbox_backends.log_choice('bwrap', sandbox_check.EVERYTHING, frozenset())
    sandbox_backends.log_choice('rlimits', provides, frozenset({'network'}))
  good, bad = caplog.records
  assert 'backend bwrap, checked: files, memory' in good.getMessage()
  assert bad.levelname == 'WARNING'
  assert 'does NOT isolate network' in bad.getMessage()


def test_an_unknown_backend_lists_those_that_exist():
  with pytest.raises(ValueError, match="'docker' does not exist.*'bwrap'"):
    sandbox.Sandbox(backend='docker')


def test_the_best_backend_that_works_is_taken():
  works = []
  for name in sandbox_backends.BACKENDS:
    with contextlib.suppress(sandbox.SandboxError):
      works.append((name, sandbox.measure(name)))
  assert sandbox.choose() == works[0]
