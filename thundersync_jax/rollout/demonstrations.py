"""Gold paths played through their environments, as trajectories to imitate.

  reset -> text of demonstrate() -> step -> observation -> text -> ... -> reward

The tokens lie as in a rollout: the same template, the same end-of-turn token
after each text, the same observations. So a model that imitates them acts in
exactly the contexts that it will meet. Only solved ones are kept.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from absl import logging

from thundersync_jax.envs import base, prompt_sets, worker_pool
from thundersync_jax.rollout import conversation
from thundersync_jax.types import Trajectory, Turn


@dataclasses.dataclass(frozen=True)
class Recorder:
  """Makes demonstrations; its methods run in worker threads.

  Attributes:
    tokenizer: see models/tokenizer.py.
    make_environment: makes one environment for one demonstration.
    max_context: tokens that a demonstration may have, prompt included.
  """

  tokenizer: Any
  make_environment: Callable[[], base.Environment]
  max_context: int

  def play(self, prompt: prompt_sets.Prompt) -> Trajectory:
    """One gold path; behaviour_logprobs and policy versions are 0.

    Raises:
      ValueError: the environment has no gold path, or it is too long.
    """
    environment = self.make_environment()
    try:
      if not hasattr(environment, 'demonstrate'):
        raise ValueError(
          f'{type(environment).__name__} has no demonstrate(): no gold path to '
          'imitate'
        )
      return self._play(environment, prompt)
    finally:
      environment.close()

  def _play(self, environment, prompt) -> Trajectory:
    messages = environment.reset(prompt.task)
    opening = self.tokenizer.apply_chat_template(messages)
    trajectory = Trajectory(
      prompt.prompt_id, 0, 0, np.asarray(opening, np.int32), reward=0.0
    )
    for text in environment.demonstrate():
      result = environment.step(text)
      observation = ()
      if not result.done:
        observation = conversation.observation_tokens(
          self.tokenizer, result.messages, turn_ended=True
        )
      trajectory = dataclasses.replace(
        trajectory,
        turns=(*trajectory.turns, self._turn(text, observation)),
        reward=trajectory.reward + (result.reward or 0.0),
      )
      if result.done:
        break
    length = len(opening) + len(trajectory.tokens)
    if length > self.max_context:
      raise ValueError(
        f'a gold path of {length} tokens exceeds max_context='
        f'{self.max_context}: raise rollout.max_context'
      )
    return trajectory

  def _turn(self, text: str, observation) -> Turn:
    said = np.append(self.tokenizer.encode(text), end_of_turn(self.tokenizer))
    tokens = np.concatenate([said, observation]).astype(np.int32)
    return Turn(
      tokens=tokens,
      loss_mask=np.arange(len(tokens)) < len(said),
      behaviour_logprobs=np.zeros(len(tokens), np.float32),
      policy_versions=np.zeros(len(tokens), np.int32),
      finish_reason='stop',
    )


def end_of_turn(tokenizer: Any) -> int:
  """The token that the chat template puts behind what the model says.

  Raises:
    ValueError: it puts none.
  """
  exchange = [
    {'role': 'user', 'content': '.'},
    {'role': 'assistant', 'content': '.'},
  ]
  tokens = tokenizer.apply_chat_template(exchange, add_generation_prompt=False)
  ends = [int(token) for token in tokens if int(token) in tokenizer.stop_ids]
  if not ends:
    raise ValueError(
      'the chat template puts no end-of-turn token behind an answer: use '
      'another template'
    )
  return ends[-1]


def record(
  recorder: Recorder,
  prompts: Sequence[prompt_sets.Prompt],
  pool: worker_pool.WorkerPool,
  solved: float,
) -> list[Trajectory]:
  """Plays the gold path of every prompt; returns the solved ones, in order.

  Args:
    recorder: see Recorder.
    prompts: whose gold paths.
    pool: where environments run; nothing else may use it meanwhile.
    solved: reward from which a demonstration is kept.

  Raises:
    ValueError: no gold path was solved; names the first reason.
  """
  for index, prompt in enumerate(prompts):
    pool.submit(index, recorder.play, prompt)
  played: dict[int, Trajectory] = {}
  reasons = []
  while pool.in_flight or len(played) + len(reasons) < len(prompts):
    pool.wait(1.0)
    for outcome in pool.results():
      if outcome.error is not None:
        reasons.append(outcome.error)
      elif outcome.value.reward < solved:
        reasons.append(f'reward {outcome.value.reward} below {solved}')
      else:
        played[outcome.ticket] = outcome.value
  if reasons:
    logging.warning(
      '%d of %d gold paths are left out, the first: %s',
      len(reasons),
      len(prompts),
      reasons[0],
    )
  if not played:
    raise ValueError(
      f'no gold path of {len(prompts)} was solved: {reasons[:1]}'
    )
  return [trajectory for _, trajectory in sorted(played.items())]
