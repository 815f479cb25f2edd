"""Task families, one a file, behind the protocol of base.Environment.

To add a family: write a module with a base.TaskFamily (how its tasks are drawn
and how its environment is made) and give it a line in ENVIRONMENTS.
"""

from thundersync_jax.envs import (
  base,
  bfcl,
  maths,
  reasoning,
  repo_repair,
  scienceworld,
  sql,
  terminal,
  textworld,
  toy,
  toy_tools,
)

ENVIRONMENTS: dict[str, base.TaskFamily] = {
  'bfcl': bfcl.FAMILY,
  'reasoning_gym': reasoning.FAMILY,
  'maths': maths.FAMILY,
  'scienceworld': scienceworld.FAMILY,
  'repo_repair': repo_repair.FAMILY,
  'sql': sql.FAMILY,
  'terminal': terminal.FAMILY,
  'textworld': textworld.FAMILY,
  'toy': toy.FAMILY,
  'toy_guess': toy.GUESS_FAMILY,
  'toy_tools': toy_tools.FAMILY,
}


def task_family(name: str) -> base.TaskFamily:
  """The family of that name.

  Raises:
    ValueError: if there is none; the message lists those that exist.
  """
  if name not in ENVIRONMENTS:
    raise ValueError(
      f'environment={name!r} does not exist; choose one of '
      f'{sorted(ENVIRONMENTS)}'
    )
  return ENVIRONMENTS[name]
