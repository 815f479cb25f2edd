"""Times whole GRPO steps of schedule `sync`: rollout, update and both.

  python experiments/bench_learner.py
  python experiments/bench_learner.py --compute_dtype=bfloat16
  python experiments/bench_learner.py --noshared_prompts

Weights, prompts and rewards are those of synthetic.py: every trajectory has
--tokens tokens and its reward is the share of them in the lower half of the
vocabulary. Medians over --steps after --warmup. Exit status 1 where a timed
step compiles, or fewer than --min_steps_per_s were done.
"""

import dataclasses
import json

from absl import app, flags

from thundersync_jax import mesh, synthetic
from thundersync_jax.runs import console, measure

DTYPES = ['float32', 'bfloat16']
SHAPE = [
  flags.DEFINE_integer(field.name, field.default, field.metadata['help'])
  for field in dataclasses.fields(synthetic.Shape)
]
COMPUTE = flags.DEFINE_enum('compute_dtype', 'float32', DTYPES, 'Of products.')
WEIGHTS = flags.DEFINE_enum(
  'weights_dtype', 'float32', DTYPES, 'Of decode weights and cache.'
)
SHARED = flags.DEFINE_bool('shared_prompts', True, 'One row a group.')
CHUNK = flags.DEFINE_integer('chunk', 16, 'Decode steps between harvests.')
STEPS = flags.DEFINE_integer('steps', 8, 'Steps timed.')
WARMUP = flags.DEFINE_integer('warmup', 2, 'Steps before; the first compiles.')
MINIMUM = flags.DEFINE_float('min_steps_per_s', 0.0, 'Fewer is a failure.')
CPU_DEVICES = flags.DEFINE_integer('cpu_devices', 2, 'Devices of a CPU.')


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments {argv[1:]}')
  mesh.force_cpu_devices(CPU_DEVICES.value)
  console.quiet_libraries()
  trainer = synthetic.Trainer(
    synthetic.Shape(*(flag.value for flag in SHAPE)),
    compute_dtype=COMPUTE.value,
    weights_dtype=WEIGHTS.value,
    chunk=CHUNK.value,
    shared=SHARED.value,
  )
  figures = synthetic.measure_steps(trainer, WARMUP.value, STEPS.value)
  figures |= {f.name: f.value for f in (COMPUTE, WEIGHTS, SHARED)}
  print(json.dumps(measure.rounded(figures | measure.machine())))
  slow = figures['steps_per_s'] < MINIMUM.value
  return 1 if figures['compiled'] or slow else 0


if __name__ == '__main__':
  app.run(main)
