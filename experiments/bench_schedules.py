"""Steps of one agentic workload under sync, thundersync and async, in one run.

  python experiments/bench_schedules.py --workdir=DIR
  python experiments/bench_schedules.py --workload=grader --workdir=DIR

Waits are real, the same for every schedule, and on average so long that the
rollout takes about as long as the learner. The workdir gets bench.jsonl (a line
a schedule), trace.jsonl (for experiments/simulate.py) and the timeline of a
streamed step. Exit status 1 where a timed step compiles a program, or
thundersync is less than --min_faster times as fast as sync. Two minutes.
"""

import json
import pathlib

from absl import app, flags

from thundersync_jax import mesh, schedule_bench
from thundersync_jax.runs import compare, console, measure, plots, traces

WORKLOAD = flags.DEFINE_enum(
  'workload', 'tools', list(schedule_bench.WORKLOADS), 'What a step has to do.'
)
BLOCKS = flags.DEFINE_integer('blocks', 3, 'Turns that each schedule has.')
STEPS = flags.DEFINE_integer('steps', 2, 'Timed steps of a turn.')
WORKDIR = flags.DEFINE_string('workdir', None, 'Folder for what is written.')
MINIMUM = flags.DEFINE_float('min_faster', 0.0, 'Less is a failure.')


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments {argv[1:]}')
  schedule_bench.one_core_a_device()
  mesh.force_cpu_devices(2)
  console.quiet_libraries()
  folder = pathlib.Path(WORKDIR.value)
  folder.mkdir(parents=True, exist_ok=True)
  schedule_bench.keep_compiled(folder)
  workload = schedule_bench.WORKLOADS[WORKLOAD.value]
  found = schedule_bench.race(workload, folder, BLOCKS.value, STEPS.value)
  rows = schedule_bench.rows(found)
  print(compare.table(rows))
  facts = {'workload': WORKLOAD.value} | measure.machine()
  lines = [json.dumps(measure.rounded(facts | row)) for row in rows]
  (folder / 'bench.jsonl').write_text('\n'.join(lines) + '\n')
  traces.write(schedule_bench.trace(found), folder / traces.NAME)
  for name, runner in found.items():
    plots.plot_timeline(runner.run.timeline, folder / f'timeline_{name}.png')
  compiled = any(row['compiled'] for row in rows)
  faster = {row['schedule']: row['faster'] for row in rows}['thundersync']
  return 1 if compiled or faster < MINIMUM.value else 0


if __name__ == '__main__':
  flags.mark_flag_as_required('workdir')
  app.run(main)
