"""Times rollouts of random prompts, beside the limits of the machine.

  python experiments/bench_rollout.py
  python experiments/bench_rollout.py --model=smollm2-135m-instruct \
    --slots=1,16,64

Every trajectory has --tokens tokens. With --slots=a,b as many trajectories as
slots are played, else those of a step. `reached` is the share of the decode
tokens per second that memory bandwidth and matrix products would allow. Exit
status 1 where a rollout is not complete or a timed one compiles.
"""

import dataclasses
import json

from absl import app, flags

from thundersync_jax import mesh, synthetic
from thundersync_jax.runs import console, measure

SHAPE = [
  flags.DEFINE_integer(field.name, field.default, field.metadata['help'])
  for field in dataclasses.fields(synthetic.Shape)
]
MODEL = flags.DEFINE_string('model', None, 'Model source; else random.')
DTYPE = flags.DEFINE_enum(
  'dtype', 'float32', ['float32', 'bfloat16'], 'Weights, cache and products.'
)
SLOTS = flags.DEFINE_list('slots', [], 'Rows of the decode batch, each timed.')
CHUNK = flags.DEFINE_integer('chunk', 16, 'Decode steps between harvests.')
REPEATS = flags.DEFINE_integer('repeats', 5, 'Rollouts timed, a number a slot.')


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments {argv[1:]}')
  mesh.force_cpu_devices(1)
  console.quiet_libraries()
  shape = synthetic.Shape(*(flag.value for flag in SHAPE))
  model = synthetic.load(shape, MODEL.value, DTYPE.value)
  runs = []
  for slots in SLOTS.value or [shape.prompts * shape.group]:
    runs.append(
      synthetic.measure_rollout(
        *model,
        shape.for_slots(int(slots)),
        slots=int(slots),
        chunk=CHUNK.value,
        repeats=REPEATS.value,
      )
    )
  figures = {'model': MODEL.value, 'dtype': DTYPE.value, 'runs': runs}
  print(json.dumps(measure.rounded(figures | measure.machine())))
  return 0 if all(r['complete'] and not r['compiled'] for r in runs) else 1


if __name__ == '__main__':
  app.run(main)
