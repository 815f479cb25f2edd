"""The data and the eight simulated services of BFCL, from bfcl-eval.

Its checks, data and services are importable without the dependencies of the
package, so it is installed alone: `pip install --no-deps bfcl-eval`; the
calculator needs mpmath. Calls are looked up by name, nothing is evaluated.
"""

import copy
import decimal
import functools
import importlib
import json
import pathlib
import threading
from typing import Any

from thundersync_jax.envs import tool_calls

_CHECKER = 'bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker'
_BACKENDS = 'bfcl_eval.constants.executable_backend_config'
_MAX_NODES = 20_000  # objects that the services may hold; cp can double them
_MAX_PRECISION = 1000  # of the calculator's digits and exponents
# The calculator sets the precision of the whole process.
_MATHS = threading.Lock()


def _package(module: str) -> Any:
  try:
    return importlib.import_module(module)
  except ImportError as error:
    raise ImportError(
      f'BFCL needs the package bfcl-eval ({error}): pip install --no-deps '
      'bfcl-eval mpmath'
    ) from error


def _data() -> pathlib.Path:
  return pathlib.Path(_package(_CHECKER).__file__).parents[2] / 'data'


@functools.cache
def entries(category: str) -> dict[str, dict[str, Any]]:
  """The category's tasks by id, with their ground truth."""
  name = f'BFCL_v4_multi_turn_{category}.json'
  found = {entry['id']: entry for entry in _lines(_data() / name)}
  for answer in _lines(_data() / 'possible_answer' / name):
    found[answer['id']]['ground_truth'] = answer['ground_truth']
  return found


def _lines(path: pathlib.Path) -> list[dict[str, Any]]:
  with path.open(encoding='utf-8') as file:
    return [json.loads(line) for line in file if line.strip()]


@functools.cache
def _docs(class_name: str) -> list[dict[str, Any]]:
  files = _package(_BACKENDS).MULTI_TURN_FUNC_DOC_FILE_MAPPING
  return _lines(_data() / 'multi_turn_func_doc' / files[class_name])


def _parameters(class_name: str) -> dict[str, list[str]]:
  """Function name -> the names of its parameters, in order."""
  return {
    doc['name']: list(doc['parameters']['properties'])
    for doc in _docs(class_name)
  }


def signatures(class_name: str) -> dict[str, str]:
  """Function name -> how it is called, as in `ls(a?)`."""
  found = {}
  for doc in _docs(class_name):
    needed = doc['parameters'].get('required', [])
    names = [
      name if name in needed else f'{name}?'
      for name in doc['parameters']['properties']
    ]
    found[doc['name']] = f'{doc["name"]}({", ".join(names)})'
  return found


class Services:
  """The simulated services of a task, and the calls of their methods."""

  def __init__(self, entry: dict[str, Any]):
    config = _package(_BACKENDS)
    long_context = 'long_context' in entry['id']
    self.instances: dict[str, Any] = {}
    # Names of the parameters of each function, in order.
    self.parameters: dict[str, list[str]] = {}
    self._owners: dict[str, str] = {}  # method -> class
    for name in entry['involved_classes']:
      module = _package(config.CLASS_FILE_PATH_MAPPING[name])
      instance = getattr(module, name)()
      if name not in config.STATELESS_CLASSES:
        scenario = copy.deepcopy(entry['initial_config'].get(name, {}))
        instance._load_scenario(scenario, long_context=long_context)
      self.instances[name] = instance
      public = (m for m in dir(instance) if not m.startswith('_'))
      methods = [m for m in public if callable(getattr(instance, m))]
      self._owners.update(dict.fromkeys(methods, name))
      self.parameters |= _parameters(name)

  def call(self, call: tool_calls.Call) -> str:
    """The result as the benchmark writes it; errors are results too."""
    name = call.name.rpartition('.')[2]
    if name not in self._owners:
      return f'Error during execution: there is no function {name}'
    owner = self._owners[name]
    method = getattr(self.instances[owner], name)
    try:
      if owner == 'MathAPI':
        return _written(_calculate(method, call.arguments))
      return _written(method(**call.arguments))
    except Exception as error:  # whatever the arguments made of it
      return f'Error during execution: {error}'

  def run(self, texts: list[str]) -> list[str]:
    """The results of the benchmark's own calls."""
    calls = [tool_calls.python(text, self.parameters)[0] for text in texts]
    return [self.call(call) for call in calls]

  @property
  def too_large(self) -> bool:
    """Whether more than _MAX_NODES objects hang on the services."""
    seen: set[int] = set()
    waiting = list(self.instances.values())
    while waiting and len(seen) <= _MAX_NODES:
      item = waiting.pop()
      if id(item) in seen or isinstance(item, (str, int, float, bool)):
        continue
      seen.add(id(item))
      if isinstance(item, dict):
        waiting += item.values()
      elif isinstance(item, (list, tuple, set)):
        waiting += item
      elif hasattr(item, '__dict__'):
        waiting += vars(item).values()
    return len(seen) > _MAX_NODES


def _calculate(method: Any, arguments: dict[str, Any]) -> Any:
  """The call, with precision that is small and ours alone."""
  for size in (arguments.get('precision'), arguments.get('exponent')):
    if isinstance(size, (int, float)) and abs(size) > _MAX_PRECISION:
      raise ValueError(f'{size} is above the limit {_MAX_PRECISION}')
  mp = importlib.import_module('mpmath').mp
  with _MATHS, decimal.localcontext():
    digits = mp.dps
    try:
      return method(**arguments)
    finally:
      mp.dps = digits


def _written(result: Any) -> str:
  if isinstance(result, str):
    return result
  if isinstance(result, dict):
    try:
      return json.dumps(result)
    except (TypeError, ValueError):
      return str(result)
  return str(result)


def same_state(mine: Services, gold: Services) -> bool:
  """The benchmark's check of state."""
  check = _package(_CHECKER).state_checker
  return check(mine.instances, gold.instances)['valid']


def results_hold(mine: list[str], gold: list[str]) -> bool:
  """The benchmark's check of results: all of gold are among mine."""
  return _package(_CHECKER).response_checker(mine, gold, 0)['valid']
