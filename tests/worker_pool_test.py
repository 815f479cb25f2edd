"""Environments that raise or hang cost one outcome, never a step or an exit."""

import logging as std_logging
import subprocess
import sys
import threading
import time

import pytest

from thundersync_jax.envs import base, worker_pool


class BrokenEnvironment:
  """Raises or hangs in one of its methods; used as one env of several."""

  max_turns = 1

  def __init__(self, method: str, fault: str, release: threading.Event):
    self._broken = method
    self._fault = fault
    self._release = release

  def _enter(self, method: str) -> None:
    if method != self._broken:
      return
    if self._fault == 'raise':
      raise OSError(f'disk of {method} is gone')
    if self._fault == 'exit':
      sys.exit(3)
    self._release.wait(60)

  def reset(self, task):
    self._enter('reset')
    return [{'role': 'user', 'content': task['question']}]

  def step(self, text):
    self._enter('step')
    return base.EnvStep(messages=(), reward=float(len(text)), done=True)

  def close(self):
    self._enter('close')


@pytest.fixture(name='release')
def fixture_release():
  event = threading.Event()
  yield event
  event.set()


def collect(pool, count, limit_s=20.0):
  """The outcomes of `count` calls by ticket."""
  outcomes = []
  deadline = time.monotonic() + limit_s
  while len(outcomes) < count and time.monotonic() < deadline:
    pool.wait(0.5)
    outcomes += pool.results()
  assert len(outcomes) == count
  return {outcome.ticket: outcome for outcome in outcomes}


@pytest.mark.parametrize('method', ['reset', 'step', 'close'])
@pytest.mark.parametrize('fault', ['raise', 'hang', 'exit'])
def test_a_broken_env_is_one_error_outcome(method, fault, release, caplog):
  """cases row 25: raising or hanging at reset, step and close is contained."""
  pool = worker_pool.WorkerPool(num_workers=2, timeout_s=0.5)
  broken = BrokenEnvironment(method, fault, release)
  sound = BrokenEnvironment('none', fault, release)
  arguments = {'reset': ({'question': 'q'},), 'step': ('abc',), 'close': ()}
  with caplog.at_level(std_logging.ERROR):
    for ticket, env in enumerate([sound, broken, sound, sound]):
      pool.submit(ticket, getattr(env, method), *arguments[method])
    outcomes = collect(pool, 4)
  values = {
    'reset': [{'role': 'user', 'content': 'q'}],
    'step': base.EnvStep((), 3.0, True),
    'close': None,
  }
  for ticket in (0, 2, 3):
    assert outcomes[ticket].error is None
    assert outcomes[ticket].value == values[method]
  reason = {
    'raise': f'raised OSError: disk of {method} is gone',
    'exit': 'raised SystemExit: 3',
    'hang': 'timed out after 0.5 s',
  }[fault]
  assert outcomes[1].error == f'BrokenEnvironment.{method} {reason}'
  assert outcomes[1].value is None
  assert outcomes[1].timed_out == (fault == 'hang')
  assert outcomes[1].error in caplog.text  # with its traceback where it raised
  assert ('Traceback' in caplog.text) == (fault != 'hang')
  pool.close()


def test_hung_threads_are_replaced_and_their_late_results_dropped(release):
  """cases row 25: as many hangs as threads, and the pool still works."""
  pool = worker_pool.WorkerPool(num_workers=2, timeout_s=0.3)
  for ticket in range(4):
    pool.submit(('hung', ticket), release.wait, 60)
  pool.submit('sound', lambda: 7)
  outcomes = collect(pool, 5)
  assert outcomes['sound'].value == 7
  assert all(outcomes['hung', ticket].timed_out for ticket in range(4))
  release.set()  # the hung calls now return True
  time.sleep(0.3)
  assert pool.results() == []
  assert pool.in_flight == 0
  pool.submit('after', lambda: 8)
  assert collect(pool, 1)['after'].value == 8
  pool.close()


def test_wait_learns_of_a_hang_that_starts_after_it(release):
  """The call starts while wait() is on; it must not sleep its whole limit."""
  pool = worker_pool.WorkerPool(num_workers=1, timeout_s=0.3)
  pool.submit('first', time.sleep, 0.1)
  pool.submit('hung', release.wait, 60)
  start = time.monotonic()
  assert pool.wait(30.0) and pool.results()[0].ticket == 'first'
  assert pool.wait(30.0) and pool.results()[0].timed_out
  assert time.monotonic() - start < 10
  pool.close()


def test_the_time_limit_counts_from_the_start_of_a_call():
  """Six calls of 0.2 s on one thread take 1.2 s: none is over 0.8 s."""
  pool = worker_pool.WorkerPool(num_workers=1, timeout_s=0.8)
  for ticket in range(6):
    pool.submit(ticket, time.sleep, 0.2)
  outcomes = collect(pool, 6)
  assert [outcomes[ticket].error for ticket in range(6)] == [None] * 6
  assert all(0.19 < outcome.seconds < 0.8 for outcome in outcomes.values())
  pool.close()


def test_results_never_wait_and_calls_overlap():
  pool = worker_pool.WorkerPool(num_workers=3, timeout_s=30.0)
  meet = threading.Barrier(4)  # passes only if three workers run at once
  for ticket in range(3):
    pool.submit(ticket, meet.wait, 20)
  assert pool.results() == []
  assert pool.in_flight == 3
  meet.wait(20)
  outcomes = collect(pool, 3)
  assert {outcome.error for outcome in outcomes.values()} == {None}
  pool.close()


def test_wait_returns_at_once_when_nothing_is_in_flight():
  pool = worker_pool.WorkerPool(num_workers=1, timeout_s=1.0)
  start = time.monotonic()
  assert not pool.wait(30.0)
  assert time.monotonic() - start < 5
  pool.close()


def test_wait_ends_at_its_own_limit(release):
  pool = worker_pool.WorkerPool(num_workers=1, timeout_s=30.0)
  pool.submit('slow', release.wait, 60)
  start = time.monotonic()
  assert not pool.wait(0.2)
  assert 0.15 < time.monotonic() - start < 10
  pool.close()


def test_close_does_not_wait_and_ends_the_pool(release):
  pool = worker_pool.WorkerPool(num_workers=1, timeout_s=30.0)
  pool.submit('hung', release.wait, 60)
  start = time.monotonic()
  pool.close()
  assert time.monotonic() - start < 5
  assert pool.results() == []
  with pytest.raises(RuntimeError, match="'late' submitted to a closed pool"):
    pool.submit('late', time.sleep, 0)


def test_the_process_ends_with_hung_threads():
  """cases row 25: a hang in an env's close does not keep the process alive."""
  program = (
    'import time; from thundersync_jax.envs import worker_pool\n'
    'pool = worker_pool.WorkerPool(num_workers=2, timeout_s=0.2)\n'
    'for i in range(3): pool.submit(i, time.sleep, 600)\n'
    'pool.wait(10); assert pool.results()[0].timed_out; pool.close()\n'
  )
  subprocess.run([sys.executable, '-c', program], timeout=60, check=True)


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    ({'num_workers': 0, 'timeout_s': 1.0}, 'num_workers=0 must be at least 1'),
    ({'num_workers': 1, 'timeout_s': 0.0}, r'timeout_s=0\.0 must be above 0'),
  ],
)
def test_wrong_sizes_are_refused(arguments, message):
  with pytest.raises(ValueError, match=message):
    worker_pool.WorkerPool(**arguments)
