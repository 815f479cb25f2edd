"""What a run measures: every name, its lines on disk, its progress bar.

A step is one JSON line of metrics.jsonl ({"step": 3, "reward/mean": 0.5, ...})
and the same scalars for TensorBoard. A resumed run first cuts what the killed
run wrote from its own first step on, so every step stands there once.
"""

import difflib
import json
import math
import os
import pathlib
import sys
import time
from typing import Any, TextIO

import numpy as np
import tqdm
from absl import logging
from tensorboardX import event_file_writer
from tensorboardX.proto import event_pb2, summary_pb2

from thundersync_jax.runs import workdir as workdir_lib

# Name -> meaning [unit]. Means and counts are those of one step unless the
# line says otherwise; a name without a value in a step is left out of it.
METRICS = {
  'reward/mean': 'mean reward of the trajectories trained on [reward]',
  'reward/std': 'standard deviation of those rewards [reward]',
  'reward/group_std': 'mean over groups of the deviation inside one [reward]',
  'eval/accuracy': 'share of held-out prompts solved, greedy [0..1]',
  'eval/accuracy_before': 'eval/accuracy before the first step [0..1]',
  'eval/accuracy_after': 'eval/accuracy after the last step [0..1]',
  'eval/pass_at_k': 'share of held-out prompts solved in k samples [0..1]',
  'eval/pass_at_k_before': 'eval/pass_at_k before the first step [0..1]',
  'eval/pass_at_k_after': 'eval/pass_at_k after the last step [0..1]',
  'eval/k': 'samples a prompt of eval/pass_at_k [count]',
  'eval/prompts': 'held-out prompts evaluated [count]',
  'eval/reward': 'mean reward on the held-out prompts, greedy [reward]',
  'eval/failed': 'trajectories that failed in evaluation; reward 0 [count]',
  'eval/length_mean_tokens': 'mean sampled length in evaluation [tokens]',
  'rollout/tokens_per_s': 'sampled tokens by the time of the step [tokens/s]',
  'rollout/tokens': 'sampled tokens [tokens]',
  'rollout/prompt_tokens': 'prefilled prompt tokens [tokens]',
  'rollout/observation_tokens': 'tokens that environments answered [tokens]',
  'rollout/forks': 'rows behind rewritten history, past the first [count]',
  'rollout/trajectories': 'trajectories that ended [count]',
  'rollout/turns': 'mean turns of a trajectory [count]',
  'rollout/length_mean_tokens': 'mean sampled length [tokens]',
  'rollout/length_max_tokens': 'longest sampled length [tokens]',
  'rollout/truncated_fraction': 'share that a length limit ended [0..1]',
  'rollout/scoring_failures': 'answers that broke the scorer, reward 0 [count]',
  'rollout/failed': 'trajectories masked after a failure [count]',
  'rollout/entropy': 'mean -log-probability of sampled tokens [nats]',
  # |learner - rollout| log-probability, over the tokens trained on.
  'rollout/logprob_diff_max': 'largest difference, learner to rollout [nats]',
  'rollout/slots_used_fraction': 'share of decoded rows that were live [0..1]',
  'rollout/launches': 'device programs of the rollout engine [count]',
  'rollout/evictions': 'parked trajectories that made room [count]',
  'learner/grad_norm': 'global norm of the gradient before the clip [1]',
  'learner/tokens': 'tokens whose gradient was computed [tokens]',
  'learner/logprob': 'mean log-probability of the targets [nats]',
  'learner/entropy': 'mean entropy of the policy on those tokens [nats]',
  'learner/learning_rate': 'learning rate of the update [1]',
  'learner/clip_fraction': 'share of tokens whose ratio was cut [0..1]',
  'learner/kl_ref': 'mean KL to the reference a token [nats]',
  'distill/kl': 'mean loss a token: log-ratio or divergence [nats]',
  'distill/teacher_entropy': 'mean entropy of the teacher a token [nats]',
  'learner/launches': 'score-gradient programs [count]',
  'queue/open_groups': 'most groups open at once [count]',
  'queue/open_bytes': 'most bytes of sums of open groups at once [bytes]',
  'queue/closed_groups': 'groups closed [count]',
  'queue/zero_variance_groups': 'groups whose rewards were all equal [count]',
  'queue/resampled_groups': 'groups replaced for zero variance [count]',
  'queue/dropped_members': 'members that left their group unscored [count]',
  'staleness/mean_steps': 'mean staleness of the tokens trained on [steps]',
  'staleness/max_steps': 'largest staleness of a token trained on [steps]',
  'time/step_s': 'wall time of the step; in the summary the median [s]',
  'time/rollout_busy_s': 'time in which the rollout side worked [s]',
  'time/rollout_idle_s': 'time in which the rollout side had no work [s]',
  'time/learner_busy_s': 'time in which the learner side worked [s]',
  'time/learner_idle_s': 'time in which the learner side had no work [s]',
  'time/environment_s': 'time spent in environments, summed [s]',
  'time/barrier_s': 'time of the optimizer update [s]',
  'time/publish_s': 'time of handing the parameters to the rollout [s]',
  'time/eval_s': 'time of evaluation [s]',
  'time/total_s': 'wall time of the run up to here, resumes added up [s]',
  'host/compilations': 'programs compiled in the step [count]',
}  # fmt: skip


class Metrics:
  """Writes metrics.jsonl and TensorBoard events of one run.

  Args:
    workdir: directory of the run; the files lie in it.
    start_step: first step that this run writes. Lines of this step and later
      ones, left by a run that was killed, are cut; so is a half-written line.

  Raises:
    ValueError: a line of metrics.jsonl other than the last is broken.
  """

  def __init__(self, workdir: str | os.PathLike, start_step: int = 0):
    directory = pathlib.Path(workdir)
    self._path = directory / 'metrics.jsonl'
    self._step = start_step
    resumed = _cut(self._path, start_step)
    self._file = self._path.open('a', encoding='utf-8')
    # The writer below SummaryWriter: no thread that a full disk would hang.
    self._events = event_file_writer.EventsWriter(
      str(directory / 'events'), f'.{os.getpid()}.{start_step}'
    )
    if resumed:
      # TensorBoard drops what earlier files hold from start_step on.
      start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
      self._write_event(start_step, session_log=start)

  def write(self, step: int, values: dict[str, Any]) -> None:
    """Writes one line; it is in the file when this returns.

    Args:
      step: not smaller than the step written before.
      values: metric name -> number (Python, numpy or jax scalar).

    Raises:
      KeyError: a name that METRICS does not list.
      TypeError: a value that is not one number.
      ValueError: step goes back; or a value is NaN or infinite: the line is
        written, with null there, so that the step can be looked at.
    """
    if step < self._step:
      raise ValueError(
        f'step={step} comes after step {self._step}; to write it again, start'
        f' with Metrics(workdir, start_step={step})'
      )
    numbers = {name: _number(name, value) for name, value in values.items()}
    lost = [name for name, value in numbers.items() if not math.isfinite(value)]
    line = {n: None if n in lost else v for n, v in numbers.items()}
    self._file.write(json.dumps({'step': int(step), **line}) + '\n')
    self._file.flush()
    scalars = [
      summary_pb2.Summary.Value(tag=name, simple_value=value)
      for name, value in numbers.items()
    ]
    self._write_event(step, summary=summary_pb2.Summary(value=scalars))
    self._step = step
    if lost:
      raise ValueError(
        f'step {step}: '
        + ', '.join(f'{name}={numbers[name]}' for name in lost)
        + f' must be finite; {self._path} has the rest of the step, resume'
        ' from the last checkpoint with a smaller learning rate or clip'
      )

  def close(self) -> None:
    """Closes both files."""
    self._file.close()
    self._events.close()

  def __enter__(self) -> 'Metrics':
    return self

  def __exit__(self, *exception) -> None:
    self.close()

  def _write_event(self, step: int, **content) -> None:
    self._events.write_event(
      event_pb2.Event(wall_time=time.time(), step=int(step), **content)
    )
    self._events.flush()


def read(path: str | os.PathLike) -> list[dict[str, Any]]:
  """Returns the lines of a metrics.jsonl; a half-written last one is left out.

  Raises:
    ValueError: another line is not JSON; the message has its number.
  """
  lines = pathlib.Path(path).read_text(encoding='utf-8').splitlines()
  records = []
  for number, line in enumerate(lines, start=1):
    try:
      records.append(json.loads(line))
    except ValueError as error:
      if number == len(lines):
        logging.warning('%s: dropped half-written line %d', path, number)
        break
      raise ValueError(
        f'{path}, line {number} is not JSON ({line[:60]!r}); delete that line'
      ) from error
  return records


def write_summary(
  workdir: str | os.PathLike, summary: dict[str, Any]
) -> dict[str, Any]:
  """Writes summary.json of a finished run and returns what stands in it.

  Args:
    workdir: directory of the run.
    summary: metric names with numbers, and facts whose names have no slash
      (schedule, steps, ...) with any JSON value.

  Raises:
    KeyError: a name with a slash that METRICS does not list.
    ValueError: a number that is NaN or infinite.
  """
  facts = {
    name: _number(name, value) if '/' in name else value
    for name, value in summary.items()
  }
  text = json.dumps(facts, indent=2, allow_nan=False)
  workdir_lib.write_atomic(pathlib.Path(workdir) / 'summary.json', text + '\n')
  return facts


class ProgressBar:
  """Step, reward, tokens per second and idle shares, on standard error.

  On a terminal a tqdm bar; elsewhere one plain line at most every `every_s`
  seconds and one for the last step, so that logs stay short.
  """

  def __init__(
    self,
    steps: int,
    start_step: int = 0,
    *,
    every_s: float = 30.0,
    file: TextIO | None = None,
  ):
    self._file = file or sys.stderr
    self._steps = steps
    self._terminal = self._file.isatty()
    self._every_s = every_s
    self._next_s = time.monotonic()
    self._bar = tqdm.tqdm(
      total=steps,
      initial=start_step,
      desc='step',
      file=self._file,
      dynamic_ncols=True,
      disable=not self._terminal,
    )

  def update(self, step: int, values: dict[str, Any]) -> None:
    """Shows a finished step; values are those given to Metrics.write."""
    text = _status(values)
    if self._terminal:
      self._bar.set_postfix_str(text, refresh=False)
      self._bar.update(step + 1 - self._bar.n)
    elif time.monotonic() >= self._next_s or step + 1 >= self._steps:
      self._next_s = time.monotonic() + self._every_s
      self._file.write(f'step {step + 1}/{self._steps}, {text}\n')
      self._file.flush()

  def close(self) -> None:
    """Leaves the last state of the bar on the terminal."""
    self._bar.close()


def _status(values: dict[str, Any]) -> str:
  """The few figures of a step that one line has room for."""
  parts = []
  if 'reward/mean' in values:
    parts.append(f'reward {float(values["reward/mean"]):.3f}')
  if 'eval/accuracy' in values:
    parts.append(f'accuracy {float(values["eval/accuracy"]):.3f}')
  if 'rollout/tokens_per_s' in values:
    parts.append(f'{float(values["rollout/tokens_per_s"]):.0f} tokens/s')
  for side in ('rollout', 'learner'):
    idle_s = values.get(f'time/{side}_idle_s')
    step_s = float(values.get('time/step_s', 0.0))
    if idle_s is not None and step_s > 0:
      parts.append(f'{side} idle {float(idle_s) / step_s:.0%}')
  return ', '.join(parts)


def _number(name: str, value: Any) -> int | float:
  """A Python number of a metric that METRICS lists."""
  if name not in METRICS:
    near = difflib.get_close_matches(name, METRICS, n=3, cutoff=0.5)
    raise KeyError(
      f'metric {name!r} is not in runs/metrics.py; '
      + (f'nearest: {", ".join(near)}; ' if near else '')
      + 'take one of METRICS or add a line there'
    )
  array = np.asarray(value)
  # Kind V: bfloat16 and the other small floats, which numpy does not know.
  if array.size != 1 or array.dtype.kind not in 'biufV':
    raise TypeError(f'metric {name}={value!r} must be one number')
  kind = int if array.dtype.kind in 'biu' else float
  return kind(array.reshape(()))


def _cut(path: pathlib.Path, start_step: int) -> bool:
  """Drops lines of steps from start_step on; true if the file was there."""
  if not path.exists():
    return False
  kept = [record for record in read(path) if record['step'] < start_step]
  text = ''.join(json.dumps(record) + '\n' for record in kept)
  if text != path.read_text(encoding='utf-8'):
    workdir_lib.write_atomic(path, text)
    logging.info('%s: resumed before step %d', path, start_step)
  return True
