"""What the README shows works as it stands there."""

import itertools
import pathlib
import re

from thundersync_jax.envs import prompt_sets
from thundersync_jax.models import tokenizer
from thundersync_jax.rollout import demonstrations

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / 'README.md').read_text(encoding='utf-8')


def test_the_environment_of_the_readme_can_be_played():
  """In under 40 lines, with folds, a tool and a gold path."""
  (code,) = (
    block
    for block in re.findall(r'```python\n(.*?)```', README, re.DOTALL)
    if 'TaskFamily' in block
  )
  assert len(code.splitlines()) < 40
  names = {}
  exec(code, names)
  family = names['FAMILY']
  folds = prompt_sets.draw_folds(family, {'test': 5, 'train': 20}, 0, {})
  recorder = demonstrations.Recorder(
    tokenizer.ByteTokenizer(), family.make, max_context=512
  )
  tasks = itertools.chain(*folds.values())
  for prompt_id, task in enumerate(tasks):
    played = recorder.play(prompt_sets.Prompt(prompt_id, 0, task))
    assert played.reward == 1.0 and len(played.turns) == 2
  wrong = family.make()
  wrong.reset(task)
  assert wrong.step('calculate').reward == 0.0


def test_every_file_that_the_readme_names_exists():
  named = re.findall(
    r'`((?:thundersync_jax|configs|experiments|kernels|tests)/[\w./]*)`', README
  )
  named += re.findall(r'(?:configs|experiments)/\w+\.py', README)
  assert len(named) > 10
  missing = [name for name in named if not (ROOT / name).exists()]
  assert not missing
