"""Steps of one agentic workload under sync, thundersync and async, in one run.

  python experiments/bench_schedules.py --workdir=DIR [--workload=grader]

Waits are real, the same for every schedule, and on average so long that the
rollout takes about as long as the learner. The workdir gets bench.jsonl (a line
a schedule), and a folder a method with the trace of sync, for simulate.py, and
timelines. Exit status 1 where a timed step compiles a program, or thundersync
is less than --min_faster times as fast as sync. Five minutes on two cores.
"""

import json
import pathlib

from absl import app, flags

from thundersync_jax import mesh, schedule_bench
from thundersync_jax.runs import compare, console, measure

WORKLOAD = flags.DEFINE_enum(
  'workload', 'tools', list(schedule_bench.WORKLOADS), 'What a step has to do.'
)
METHODS = flags.DEFINE_list(
  'methods', list(schedule_bench.METHODS), 'With rewards, with a teacher.'
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
  root, lines = pathlib.Path(WORKDIR.value), []
  schedule_bench.keep_compiled(root)
  workload = schedule_bench.WORKLOADS[WORKLOAD.value]
  for method in METHODS.value:
    folder = root / method
    folder.mkdir(parents=True, exist_ok=True)
    found = schedule_bench.race(
      workload, method, folder, BLOCKS.value, STEPS.value
    )
    facts = {'workload': WORKLOAD.value, 'method': method}
    rows = [facts | row for row in schedule_bench.rows(found)]
    print(compare.table(rows), end='\n\n')
    lines += [measure.rounded(row | measure.machine()) for row in rows]
    schedule_bench.save(found, folder)
  (root / 'bench.jsonl').write_text('\n'.join(map(json.dumps, lines)) + '\n')
  faster = [r['faster'] for r in lines if r['schedule'] == 'thundersync']
  compiled = any(row['compiled'] for row in lines)
  return 1 if compiled or min(faster) < MINIMUM.value else 0


if __name__ == '__main__':
  flags.mark_flag_as_required('workdir')
  app.run(main)
