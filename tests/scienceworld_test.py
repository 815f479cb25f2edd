"""ScienceWorld: gold paths, folds, and short observations."""

import json
import shutil

import pytest

pytest.importorskip('scienceworld')
if shutil.which('java') is None:
  pytest.skip('needs Java', allow_module_level=True)

from thundersync_jax.envs import scienceworld  # noqa: E402

TASKS = ('find-non-living-thing', 'lifespan-longest-lived')
ARGS = {'tasks': TASKS, 'max_turns': 40}


def test_compact_observations():
  kitchen = (
    'This room is called the kitchen. In it, you see: \n\tthe agent\n\ta '
    'substance called air\n\ta chair. On the chair is: nothing.\n\ta counter. '
    'On the counter is: a bowl (containing a red apple), a drawer.\n\ta '
    'cupboard. The cupboard door is closed. \n\ta glass jar (containing a '
    'substance called water)\n\ta jug (containing nothing)\n\ta stove, which '
    'is turned off. \nYou also see:\n\tA door to the outside (that is open)\n'
  )
  assert scienceworld.compact(kitchen) == (
    'kitchen: chair, counter. On the counter is: a bowl (containing a red '
    'apple), a drawer, cupboard (closed), glass jar (containing water), jug, '
    'stove (off). exits: outside (open)'
  )
  assert scienceworld.compact('You move to the hallway.') == (
    'You move to the hallway'
  )


def test_gold_paths_win_and_every_text_gets_an_answer():
  environment = scienceworld.make(**ARGS)
  tasks = list(scienceworld.make_tasks(0, 'train', **ARGS))
  assert json.loads(json.dumps(tasks)) == tasks
  for name in TASKS:
    task = next(task for task in tasks if task['task'] == name)
    first = environment.reset(task)
    said = [environment.reset(task)]
    for text in environment.demonstrate():
      said.append(environment.step(text))
    assert said[0] == first
    assert (said[-1].reward, said[-1].done) == (1.0, True)
  environment.reset(task)
  for text in ('', 'dance', '\0 \ud800 é', 'reset task', 'x' * 9999, '\n\n>'):
    result = environment.step(text)
    assert not result.done and len(result.messages[0]['content']) < 100
  environment.close()
  environment.close()


def test_the_folds_share_no_variation():
  folds = [
    {task['key'] for task in scienceworld.make_tasks(0, fold, **ARGS)}
    for fold in scienceworld.FOLDS
  ]
  assert sum(map(len, folds)) == len(set.union(*folds)) > 300


def test_focusing_on_the_wrong_thing_ends_the_task():
  environment = scienceworld.make(**ARGS, reward='success')
  tasks = scienceworld.make_tasks(0, 'train', **ARGS)
  task = next(task for task in tasks if task['task'] == TASKS[1])
  environment.reset(task)
  result = environment.step('focus on agent')
  assert (result.done, result.reward) == (True, 0.0)
  environment.close()


def test_wrong_settings_are_refused():
  with pytest.raises(ValueError, match="'fly'.*do not exist"):
    scienceworld.make(tasks=('fly',))
  with pytest.raises(ValueError, match="fold='dev'"):
    next(scienceworld.make_tasks(0, 'dev'))
  with pytest.raises(ValueError, match='must be a list'):
    scienceworld.make(tasks='boil')
