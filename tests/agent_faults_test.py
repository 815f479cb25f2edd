"""The turn loop at its limits, and with environments that go wrong."""

import dataclasses
import functools
import re
import threading

import agent_play
import pytest

from thundersync_jax.envs import base


def test_max_turn_tokens_ends_a_turn_alone():
  """cases row 23."""
  maker = functools.partial(agent_play.Talker, turns=3)
  made = agent_play.one(
    maker, agent_play.limits_of(turn=5), end=agent_play.NEVER
  )
  assert agent_play.shape_of(made) == [(5, 'length')] * 3
  assert made.reward == 0.75


def test_max_trajectory_tokens_ends_the_trajectory():
  """cases row 23: in the midst of the third turn."""
  made = agent_play.one(
    agent_play.Talker,
    agent_play.limits_of(turn=5, trajectory=12),
    end=agent_play.NEVER,
  )
  assert agent_play.shape_of(made) == [
    (5, 'length'),
    (5, 'length'),
    (2, 'trajectory'),
  ]
  assert made.reward == 0.75 and made.truncated
  # Turns that end by themselves, until nothing is left.
  made = agent_play.one(
    agent_play.Talker,
    agent_play.limits_of(turn=5, trajectory=3),
    end=agent_play.AT_ONCE,
  )
  assert agent_play.shape_of(made) == [
    (1, 'stop'),
    (1, 'stop'),
    (1, 'trajectory'),
  ]


def test_max_context_ends_the_trajectory():
  """cases row 23: prompt 4, observations of 9 or 8, prompt included in 40."""
  made = agent_play.one(
    agent_play.Talker,
    agent_play.limits_of(turn=12),
    end=agent_play.NEVER,
    context=40,
  )
  assert agent_play.shape_of(made) == [(12, 'length'), (12, 'length')]
  assert len(made.tokens) == 12 + 9 + 12  # 9 more leave nothing to sample
  made = agent_play.one(
    agent_play.Talker,
    agent_play.limits_of(turn=20),
    end=agent_play.NEVER,
    context=40,
  )
  assert agent_play.shape_of(made) == [(20, 'length'), (7, 'context')]
  assert len(made.prompt_tokens) + len(made.tokens) == 40
  made = agent_play.one(
    agent_play.Talker,
    agent_play.limits_of(),
    end=agent_play.AT_ONCE,
    context=40,
  )
  assert agent_play.shape_of(made) == [(1, 'stop')] * 3 + [(1, 'context')]
  assert made.failure is None and made.reward == 1.0


def test_max_turns_ends_the_trajectory():
  """cases row 23: the model's own limit, and the environment's."""
  made = agent_play.one(
    agent_play.Talker, agent_play.limits_of(turns=2), end=agent_play.AT_ONCE
  )
  assert agent_play.shape_of(made) == [(1, 'stop'), (1, 'turns')]
  made = agent_play.one(
    functools.partial(agent_play.Talker, max_turns=3),
    agent_play.limits_of(),
    end=agent_play.NEVER,
  )
  assert agent_play.shape_of(made) == [(6, 'length')] * 3
  made = agent_play.one(
    functools.partial(agent_play.Talker, turns=2),
    agent_play.limits_of(),
    end=agent_play.AT_ONCE,
  )
  assert agent_play.shape_of(made) == [(1, 'stop')] * 2 and not made.truncated


class Faulty(agent_play.Talker):
  """Raises or hangs in one method."""

  def __init__(self, method, fault):
    super().__init__(turns=1)
    self._method, self._fault = method, fault

  def _enter(self, method):
    if method == self._method:
      self._fault()

  def reset(self, task):
    self._enter('reset')
    return super().reset(task)

  def step(self, text):
    self._enter('step')
    return super().step(text)

  def close(self):
    self._enter('close')


def break_disk():
  raise OSError('the disk is gone')


def test_a_fault_costs_its_own_trajectory():
  """cases row 25: raising and hanging at reset, step and close."""
  release = threading.Event()
  hang = functools.partial(release.wait, 30)
  faults = [
    (method, fault)
    for method in ('reset', 'step', 'close')
    for fault in (break_disk, hang)
  ]
  sound = functools.partial(agent_play.Talker, turns=1)
  makers = [sound]
  for method, fault in faults:
    makers += [functools.partial(Faulty, method, fault), sound]
  makers += [sound]
  try:
    agent, events, _ = agent_play.play(
      makers, agent_play.limits_of(), size=2, timeout_s=0.5
    )
  finally:
    release.set()
  # Environments are made in the order of the trajectories.
  ends = [made[-1] for made in events.values()]
  reasons = {'raise': 'raised OSError: the disk is gone', 'hang': 'timed out'}
  assert sum(end.failure is not None for end in ends) == 4
  for number, (method, fault) in enumerate(faults):
    end = ends[1 + 2 * number]
    reason = reasons['raise' if fault is break_disk else 'hang']
    if method == 'close':  # it was scored before
      assert (end.failure, end.reward) == (None, 0.25)
      (counted,) = [r for r in agent.failures if f'close {reason}' in r]
      assert counted.startswith('close: ') and agent.failures[counted] == 1
    else:
      assert f'Faulty.{method} {reason}' in end.failure
      assert end.reward is None and agent.failures[end.failure] == 1
  assert sum(agent.failures.values()) == 6
  assert all(end.reward == 0.25 for end in ends if end.failure is None)


class Says(agent_play.Talker):
  """Resets or steps to a given value."""

  def __init__(self, messages=None, step=None):
    super().__init__(turns=1)
    self._messages, self._step = messages, step

  def reset(self, task):
    return self._messages or super().reset(task)

  def step(self, text):
    return self._step or super().step(text)


def scored(reward):
  return base.EnvStep((), reward, True)


def lazy():
  yield {'role': 'user', 'content': 'q'}
  raise OSError('in the thread of the driver')


def test_what_an_environment_hands_over_may_be_anything():
  """cases row 13: no number, no step, no messages; the others go on."""
  robot = ({'role': 'robot', 'content': ''},)
  faults = [
    (Says(step=scored(None)), 'RewardError: Says returned the reward None'),
    (Says(step=scored(float('nan'))), 'RewardError: .* is not finite'),
    (Says(step=scored('0.5')), "RewardError: .* '0.5' of type str"),
    (Says(step=scored([1.0])), r'RewardError: .* shape \(1,\)'),
    (Says(step=scored(10**400)), 'RewardError: .* is not finite'),
    (Says(step=(1.0, True)), 'Says.step: TypeError: returned tuple'),
    (Says(step=base.EnvStep(robot, 0.0, False)), "role 'robot' is none of"),
    (Says(step=base.EnvStep(None, 0.0, False)), 'Says.step: TypeError'),
    (
      Says(step=base.EnvStep(lazy(), 0.0, False)),
      'Says.step: TypeError: .* gen',
    ),
    (Says(messages=robot), "Says.reset: ValueError: role 'robot'"),
    (Says(messages=5), 'Says.reset: TypeError'),
    (Says(messages=lazy()), 'Says.reset: TypeError: .* generator'),
    (Says(messages=[{'role': 'user'}]), 'Says.reset: KeyError'),
    (Says(), None),
  ]
  makers = [functools.partial(lambda env: env, env) for env, _ in faults]
  agent, events, _ = agent_play.play(makers, agent_play.limits_of())
  assert sum(agent.failures.values()) == len(faults) - 1
  for made, (_, reason) in zip(events.values(), faults, strict=True):
    if reason is None:
      assert (made[-1].failure, made[-1].reward) == (None, 0.25)
    else:
      assert re.search(reason, made[-1].failure) and made[-1].reward is None


def test_members_with_another_prompt_than_the_first_fail():
  """cases row 12: a group shares one prompt."""
  makers = [
    functools.partial(agent_play.Talker, question, turns=1)
    for question in 'aabaaa'
  ]
  _, events, _ = agent_play.play(makers, agent_play.limits_of(), size=3)
  failures = {key: made[-1].failure for key, made in events.items()}
  assert failures.pop((0, 2)) == (
    'Talker.reset gave members of one group different prompts'
  )
  assert set(failures.values()) == {None}


def test_a_prompt_that_is_too_long_fails_with_the_numbers():
  makers = [
    functools.partial(agent_play.Talker, 'x' * n, turns=1)
    for n in (189, 60, 46, 1)
  ]
  _, events, _ = agent_play.play(makers, agent_play.limits_of())
  failures = [made[-1].failure for made in events.values()]
  assert 'a prompt of 192 tokens leaves no room' in failures[0]
  assert 'a prompt of 63 tokens exceeds the longest of prompt' in failures[1]
  assert failures[2:] == [None, None]


def test_limits_must_leave_something():
  """cases row 23."""
  for name in ('max_turn_tokens', 'max_trajectory_tokens', 'max_rows'):
    limits = agent_play.limits_of()
    with pytest.raises(ValueError, match=f'{name}=0 must be at least 1'):
      dataclasses.replace(limits, **{name: 0})


class Wrong(agent_play.Talker):
  """A prompt of no messages, where its group has one."""

  def reset(self, task):
    return []


def test_one_wrong_prompt_does_not_cost_its_group():
  """cases rows 12 and 25: the prompt of the most members is the group's."""
  makers = [Wrong, *[functools.partial(agent_play.Talker, turns=1)] * 3]
  _, events, _ = agent_play.play(makers, agent_play.limits_of(), size=4)
  failures = [made[-1].failure for made in events.values()]
  assert 'different prompts' in failures[0] and failures[1:] == [None] * 3
