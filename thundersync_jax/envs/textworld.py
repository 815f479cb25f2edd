"""TextWorld-Express: eight text games, an action a turn.

Needs the package textworld-express and Java (default-jre-headless). Games and
their arguments: cookingworld, twc, coin, mapreader, arithmetic, sorting,
simonsays, peckingorder (arXiv 2208.01174). Observations are shortened to what
decides: 'kitchen. coin. east: corridor' and the actions that are possible.
"""

import dataclasses
import functools
import hashlib
import importlib
import itertools
import json
import pathlib
import re
from collections.abc import Iterator
from typing import Any

from thundersync_jax.envs import base, folds, java

# Fold -> name in the package, and its method that lists the fold's seeds.
FOLDS = {
  'train': ('train', 'getSeedsTrain'),
  'validation': ('dev', 'getSeedsDev'),
  'test': ('test', 'getSeedsTest'),
}
GAMES = (
  'cookingworld',
  'twc',
  'coin',
  'mapreader',
  'arithmetic',
  'sorting',
  'simonsays',
  'peckingorder',
)
# Games whose gold paths look for things, and how actions that do so begin.
_EXPLORED = frozenset({'cookingworld', 'twc', 'coin', 'mapreader'})
_EXPLORING = ('move', 'open', 'close', 'look', 'inventory', 'task', 'read')
# Actions that tell nothing new where each observation is complete.
_IDLE = frozenset({'look around', 'inventory', 'task'})
_MAX_ACTION = 100  # characters of the model's text that the game gets
_FRESH_SEEDS = range(100_000, 2**31)  # for training; the folds' own are below


@dataclasses.dataclass(frozen=True)
class Settings:
  """The config block of TextWorld-Express."""

  game: str = 'coin'
  game_args: dict[str, int] = dataclasses.field(default_factory=dict)
  max_turns: int = 8
  reward: str = 'score'  # at the end, in 0..1; or 'success': 1 if solved
  observation: str = 'compact'  # or 'full': the text of the game
  actions: bool = True  # whether the possible actions are listed
  max_actions: int = 20  # that are listed
  hidden_actions: tuple[str, ...] = ()  # beginnings of those not listed
  processes: int = 1  # Java processes that all environments share

  def __post_init__(self):
    for name, valid in (
      ('game', GAMES),
      ('reward', ('score', 'success')),
      ('observation', tuple(OBSERVATIONS)),
    ):
      if getattr(self, name) not in valid:
        raise ValueError(
          f'{name}={getattr(self, name)!r} does not exist; choose one of '
          f'{sorted(valid)}'
        )
    for name in ('max_turns', 'max_actions', 'processes'):
      if getattr(self, name) < 1:
        raise ValueError(f'{name}={getattr(self, name)} must be at least 1')

  @property
  def params(self) -> str:
    """The arguments as the game reads them."""
    return ','.join(f'{k}={int(v)}' for k, v in sorted(self.game_args.items()))


@functools.cache
def simulators(processes: int) -> java.Simulators:
  """The simulators that all environments share.

  Raises:
    ImportError: if the package is missing.
  """
  try:
    constants = importlib.import_module('textworld_express.constants')
  except ImportError as error:
    raise ImportError(
      'the games need the package textworld-express: pip install '
      "'thundersync_jax[agents]'"
    ) from error
  return java.Simulators(
    constants.JAR_PATH,
    str(pathlib.Path(constants.JAR_PATH).parent),
    'textworldexpress.runtime.PythonInterface',
    processes,
  )


def _load(simulator: java.Simulator, game: str, params: str) -> None:
  if simulator.loaded == (game, params):
    return
  simulator.loaded = None
  if message := simulator.call('load', game, params):
    raise ValueError(f'game={game!r} refuses game_args {params!r}: {message}')
  simulator.loaded = (game, params)


def _start(simulator: java.Simulator, seed: int, fold: str, gold: bool):
  return json.loads(simulator.call('generateNewGameJSON', seed, fold, gold))


def make_tasks(seed: int, fold: str, **args: Any) -> Iterator[dict[str, Any]]:
  """The fold's 1000 seeds in an order of (seed, fold); training goes on.

  Two games have the same key if they show and hide the same (see _content).

  Raises:
    ValueError: if the fold does not exist, or the game refuses an argument.
  """
  settings = base.parse_settings(Settings, 'textworld', args)
  folds.check(fold, FOLDS)
  pool = simulators(settings.processes)
  simulator = pool.lease()
  try:
    _load(simulator, settings.game, settings.params)
    for game_seed in _seeds(simulator, seed, fold):
      yield _task(simulator, settings, game_seed, FOLDS[fold][0])
  finally:
    pool.give_back(simulator)


def _seeds(simulator: java.Simulator, seed: int, fold: str) -> Iterator[int]:
  stream = folds.draws('textworld', seed, fold)
  seeds = sorted(simulator.call(FOLDS[fold][1]))
  stream.shuffle(seeds)
  if fold != 'train':
    return iter(seeds)
  fresh = (stream.choice(_FRESH_SEEDS) for _ in itertools.count())
  return itertools.chain(seeds, fresh)


def _task(
  simulator: java.Simulator, settings: Settings, seed: int, fold: str
) -> dict[str, Any]:
  first = _start(simulator, seed, fold, True)
  gold = list(simulator.call('getGoldActionSequence'))
  content = _content(simulator, settings.game, first, gold)
  digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
  return {
    'key': f'{settings.game}/{digest}',
    'game': settings.game,
    'params': settings.params,
    'fold': fold,
    'seed': seed,
    'description': ' '.join(simulator.call('getTaskDescription').split()),
    'gold': [action for action in gold if action not in _IDLE],
  }


def _content(
  simulator: java.Simulator, game: str, first: dict[str, Any], gold: list[str]
) -> list[Any]:
  """What makes the game the problem that it is, without its seed.

  Gold paths of games with rooms explore at random: what counts of them is what
  they do (not how they get there), and the place where they end.
  """
  properties = json.loads(simulator.call('getGenerationPropertiesJSON'))
  hidden = {k: v for k, v in properties.items() if k not in ('seed', 'gameSet')}
  description = simulator.call('getTaskDescription')
  actions = sorted(first['validActions'])
  shown = [sorted(hidden.items()), description, first['observation'], actions]
  if game not in _EXPLORED:
    return [*shown, gold]
  state, place = first, ''
  for action in gold:
    place = state['look'].partition('.')[0]
    state = json.loads(simulator.call('stepJSON', action))
  done = {action for action in gold if not action.startswith(_EXPLORING)}
  return [*shown, sorted(done), place]


_SEEN = re.compile(
  r'(?:In (?:one|another) part of the room you see|There is also|You also see)'
  r' (.*?)\.(?= |$)'
)
_EXIT = re.compile(r'[Tt]o the (North|South|East|West) you see (.*?)\.(?= |$)')
_EMPTY = re.compile(r', that (?:has nothing on it|is empty)')
_ARTICLE = re.compile(r'\b(?:an?|some|the) ')


def compact(text: str, actions: list[str]) -> str:
  """The observation without phrases, and without idle scenery.

  'You are in the kitchen. In one part of the room you see a stove. There is
  also a coin. To the West you see the pantry.' is 'kitchen. coin. west:
  pantry' if no action has to do with the stove.
  """
  text = ' '.join(text.split())
  if text.startswith('The map reads:'):
    roads = re.findall(r'The ([\w -]+) connects to the ([\w ,-]+)\.', text)
    return 'map: ' + '; '.join(f'{a} - {b}' for a, b in roads)
  place = re.match(r'You are in the (.*?)\.', text)
  if not place:
    return text
  things = []
  for thing in _SEEN.findall(text):
    name = _ARTICLE.sub('', _EMPTY.sub('', thing))
    name = name.replace(' that is closed', ' (closed)')
    name, has, content = name.partition(' that has ')
    content = content.removesuffix(' on it').replace(', and ', ', ')
    content = content.replace(' and ', ', ')
    if has:
      things.append(f'{name} ({content})')
    elif any(name.removesuffix(' (closed)') in action for action in actions):
      things.append(name)
  exits = [
    f'{way.lower()}: {_ARTICLE.sub("", target)}'
    for way, target in _EXIT.findall(text)
  ]
  parts = [place[1], ', '.join(things), ', '.join(exits)]
  return '. '.join(part for part in parts if part)


def full(text: str, actions: list[str]) -> str:
  """The observation as the game gives it."""
  del actions
  return text.strip()


OBSERVATIONS = {'compact': compact, 'full': full}

# Game -> the words of its description that matter, and how they are put.
_GOALS = {
  'coin': ('.*', 'Find and take the coin.'),
  'mapreader': (
    r'.*located in the (.*), and put it into the box found in the (.*?)\..*',
    r'Take the coin in the \1 to the box in the \2.',
  ),
  'arithmetic': (
    '.*',
    'Read the math problem, take the item whose number solves it, put it in '
    'the box.',
  ),
  'sorting': ('.*', 'Put the objects in the box, smallest quantity first.'),
  'simonsays': ('.*', 'Do what Simon says.'),
  'peckingorder': ('.*', 'Read the instructions book and follow it, again.'),
  'twc': ('.*', 'Put the objects where they belong.'),
  'cookingworld': ('.*', 'Read the cookbook, make the meal and eat it.'),
}


def goal(game: str, description: str) -> str:
  """The description in few words."""
  pattern, words = _GOALS[game]
  return re.sub(f'^{pattern}$', words, description)


class TextWorldEnvironment:
  """One game; the first line of the model's text is the action."""

  def __init__(self, settings: Settings):
    self._settings = settings
    self.max_turns = settings.max_turns
    self._pool = simulators(settings.processes)
    self._simulator: java.Simulator | None = None
    self._gold: list[str] = []
    self._turns = 0

  def reset(self, task: dict[str, Any]) -> list[base.Message]:
    self.close()
    self._simulator = self._pool.lease()
    _load(self._simulator, task['game'], task['params'])
    state = _start(self._simulator, task['seed'], task['fold'], False)
    self._gold = task['gold']
    self._turns = 0
    description = task['description']
    if self._settings.observation == 'compact':
      description = goal(task['game'], description)
    content = f'{description}\n{self._show(state)}'
    return [{'role': 'user', 'content': content}]

  def step(self, text: str) -> base.EnvStep:
    self._turns += 1
    action = java.plain_action(text, _MAX_ACTION).lower()
    state = json.loads(self._simulator.call('stepJSON', action))
    success, failure = state['tasksuccess'], state['taskfailure']
    if success or failure or self._turns >= self.max_turns:
      score = min(max(float(state['score']), 0.0), 1.0)
      reward = score if self._settings.reward == 'score' else float(success)
      return base.EnvStep(messages=(), reward=reward, done=True)
    message = {'role': 'user', 'content': self._show(state)}
    return base.EnvStep(messages=(message,), reward=None, done=False)

  def demonstrate(self) -> Iterator[str]:
    """The gold path of the game, without looking around."""
    yield from self._gold

  def close(self) -> None:
    """Gives the simulator back."""
    if self._simulator is not None:
      self._pool.give_back(self._simulator)
      self._simulator = None

  def _show(self, state: dict[str, Any]) -> str:
    hidden = self._settings.hidden_actions
    valid = sorted(set(state['validActions']) - _IDLE)
    actions = [
      action for action in valid if not action.startswith(tuple(hidden))
    ]
    show = OBSERVATIONS[self._settings.observation]
    text = show(state['observation'], actions)
    if not self._settings.actions:
      return text
    listed = ', '.join(actions[: self._settings.max_actions])
    return f'{text}\nactions: {listed}'.strip()


def make(**args: Any) -> TextWorldEnvironment:
  """The environment of a config block (see Settings)."""
  settings = base.parse_settings(Settings, 'textworld', args)
  return TextWorldEnvironment(settings)


FAMILY = base.TaskFamily('textworld', make_tasks, make)
