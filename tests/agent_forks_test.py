"""Trajectories that fork while they are played: rows, keys and limits."""

import functools

import agent_play
import agent_test
import numpy as np
import templates

from thundersync_jax.learner import packing
from thundersync_jax.rollout import engine as engine_lib
from thundersync_jax.types import Item

CONTEXT = agent_play.CONTEXT


class Fed(engine_lib.Engine):
  """An engine that writes down which ids each trajectory was fed, by row."""

  def __init__(self, *args, **kwargs):
    super().__init__(*args, **kwargs)
    self.rows = {}  # key -> [[ids of a row]]

  def submit(self, request):
    super().submit(request)
    self.rows[request.key] = [list(request.tokens)]

  def resume(self, prompt_id, member, tokens, max_tokens):
    super().resume(prompt_id, member, tokens, max_tokens)
    self.rows[prompt_id, member][-1] += list(tokens)

  def fork(self, prompt_id, member, tokens, max_tokens):
    super().fork(prompt_id, member, tokens, max_tokens)
    self.rows[prompt_id, member].append(list(tokens))

  def harvest(self, block=False):
    ended = super().harvest(block)
    for turn in ended:
      self.rows[turn.prompt_id, turn.member][-1] += list(turn.tokens)
    return ended


class Helper(agent_play.Talker):
  """Answers as a tool and as a user in turn."""

  def step(self, text):
    result = super().step(text)
    role = 'user' if self._count % 2 else 'tool'
    messages = tuple({**m, 'role': role} for m in result.messages)
    return type(result)(messages, result.reward, result.done)


@functools.cache
def played(name='forgetful', max_rows=9, count=6):
  """Trajectories of five turns under a template that forgets."""
  agent, events, _ = agent_play.play(
    [functools.partial(Helper, answer='go', turns=5)] * count,
    agent_play.limits_of(max_rows=max_rows),
    tokenizer=templates.load(name),
    engine_class=Fed,
  )
  assert not agent.failures
  return agent, [made[-1] for made in events.values()]


def test_learner_ids_are_the_ids_that_the_model_was_fed():
  """cases rows 18 and 19: five turns with tools, several rows."""
  agent, trajectories = played()
  rows = [len(t.rows) for t in trajectories]
  assert max(rows) > 2 and {len(t.turns) for t in trajectories} == {5}
  for trajectory in trajectories:
    fed = agent.engine.rows[trajectory.prompt_id, trajectory.member]
    batch, _, _ = packing.pack(
      [Item(trajectory)], [packing.Shape(5, CONTEXT, 64)], lambda n: 1.0, 0
    )
    learned = [
      row[segments == i].tolist()
      for row, segments in zip(batch.tokens, batch.segment_ids, strict=True)
      for i in range(1, 1 + segments.max())
    ]
    # The last sampled token of a row is a target only.
    assert sorted(learned) == sorted([int(i) for i in ids[:-1]] for ids in fed)
    numbers = agent_test.packed_logprobs(agent_play.weights(), batch)
    there = batch.weights > 0
    recorded = batch.behaviour_logprobs[there]
    assert np.abs(np.asarray(numbers)[there] - recorded).max() < 1e-4
    assert there.sum() == trajectory.num_sampled


def test_the_limit_of_rows_ends_a_trajectory():
  """cases rows 19 and 23: a finish reason of its own, never a crash."""
  _, free = played()
  _, bound = played(max_rows=1)
  for one, other in zip(free, bound, strict=True):
    assert len(other.rows) == 1 and other.failure is None
    turns = len(other.turns)
    assert turns == len(one.rows[0].turns)
    np.testing.assert_array_equal(
      other.turns[-1].tokens, one.turns[turns - 1].tokens
    )
    if len(one.rows) > 1:
      sampled_end = one.turns[turns - 1].finish_reason
      ends = {'stop': 'rows', 'length': 'length'}
      assert other.turns[-1].finish_reason == ends[sampled_end]
      assert other.truncated and other.reward == 0.25 * turns
  reasons = {t.turns[-1].finish_reason for t in bound}
  assert 'rows' in reasons


def test_a_context_that_is_too_long_ends_it_too():
  """cases row 23: the prompt, all turns and a long answer exceed 96."""
  _, events, _ = agent_play.play(
    [functools.partial(Helper, answer='o' * 30, turns=5)] * 2,
    agent_play.limits_of(max_rows=9),
    tokenizer=templates.load('forgetful'),
    context=96,
  )
  for made in events.values():
    assert made[-1].failure is None and made[-1].reward > 0
    assert made[-1].turns[-1].finish_reason in ('context', 'length')
    for row in made[-1].rows:
      assert len(row.prompt_tokens) + len(row.tokens) <= 96
