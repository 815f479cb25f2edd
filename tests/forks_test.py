"""Trajectories that fork into rows: their packing and their gradient."""

import dataclasses
import functools

import hypothesis
import jax
import numpy as np
import packing_test as packs
import pytest
from hypothesis import strategies as st

from thundersync_jax.learner import packing
from thundersync_jax.objectives import aggregation
from thundersync_jax.types import Item, Trajectory


def fork(rng, item, starts):
  """The item with contexts of their own before the given turns."""
  turns = list(item.trajectory.turns)
  for number, length in starts.items():
    if number < len(turns):
      context = rng.integers(0, packs.VOCAB, length)
      turns[number] = dataclasses.replace(turns[number], context=context)
  trajectory = dataclasses.replace(item.trajectory, turns=tuple(turns))
  return dataclasses.replace(item, trajectory=trajectory)


def apart(item):
  """One item a row, by the definition: contexts are prompts."""
  made, prompt, turns = [], item.trajectory.prompt_tokens, []
  for turn in item.trajectory.turns:
    if turn.context is not None:
      made.append((prompt, turns))
      prompt, turns = turn.context, []
    turns.append(dataclasses.replace(turn, context=None))
  made.append((prompt, turns))
  return [
    dataclasses.replace(
      item,
      trajectory=Trajectory(item.trajectory.prompt_id, 100 + i, 0, p, tuple(t)),
    )
    for i, (p, t) in enumerate(made)
  ]


def slow_entries(items):
  """Entries of all rows with the weight of the whole trajectory (row 43)."""
  entries = []
  for item in items:
    weight = packs.weight(item.trajectory.num_sampled)
    rows = packs.slow_entries(apart(item))
    entries += [(*entry[:2], weight, *entry[3:]) for entry in rows]
  return sorted(entries)


forks = st.dictionaries(st.integers(1, 2), st.integers(1, 9), max_size=2)
members = st.lists(
  st.tuples(st.lists(packs.lengths, min_size=1, max_size=3), forks),
  min_size=1,
  max_size=4,
)
groups = st.lists(st.tuples(st.integers(1, 6), members), min_size=1, max_size=3)
shapes = st.lists(
  st.builds(
    packing.Shape, st.integers(3, 4), st.integers(27, 50), st.integers(12, 20)
  ),
  min_size=1,
  max_size=2,
)


@hypothesis.given(groups, shapes, st.integers(0, 2**32))
@hypothesis.settings(max_examples=80, deadline=None, derandomize=True)
def test_a_trajectory_is_packed_whole_or_not_at_all(groups, shapes, seed):
  """cases rows 19 and 43: every sampled token once, behind its own context."""
  rng, items = np.random.default_rng(seed), []
  for prompt_id, (length, made) in enumerate(groups):
    prompt = rng.integers(0, packs.VOCAB, length)
    for member, (turns, starts) in enumerate(made):
      first = 100.0 * len(items) + 10 * member
      item = packs.random_item(rng, prompt_id, member, prompt, turns, first)
      items.append(fork(rng, item, starts))
  rest, batches = items, []
  while rest:
    batch, shape, taken = packing.pack(rest, shapes, packs.weight, 0)
    assert packs.entries_of([batch]) == slow_entries(taken)
    segments = batch.segment_ids > 0
    assert segments.sum(axis=1).max() <= shape.tokens
    batches.append(batch)
    held = {id(item) for item in taken}
    rest = [item for item in rest if id(item) not in held]
  assert packs.entries_of(batches) == slow_entries(items)


def test_what_does_not_fit_leaves_its_room_to_others():
  rng = np.random.default_rng(0)
  whole = packs.random_item(rng, 0, 0, np.arange(5), [(6, 0), (6, 0), (6, 0)])
  big = fork(rng, whole, {1: 9, 2: 9})
  small = packs.random_item(rng, 1, 0, np.arange(5), [(6, 0)])
  shape = packing.Shape(2, 16, 12)
  batch, _, taken = packing.pack([big, small], [shape], packs.weight, 0)
  assert taken == [small]
  assert packs.entries_of([batch]) == slow_entries([small])
  numbers = 'of 38 tokens with 18 loss entries in 3 rows fits none'
  with pytest.raises(ValueError, match=numbers):
    packing.pack([big], [shape], packs.weight, 0)


@functools.cache
def step_items():
  """A group in which two of three members fork."""
  rng = np.random.default_rng(3)
  prompt = rng.integers(0, packs.VOCAB, 5)
  turns = [(3, 2), (2, 2), (3, 0)]
  items = [
    packs.random_item(rng, 0, m, prompt, turns[: 3 - m % 2], first=4.0)
    for m in range(3)
  ]
  forked = [fork(rng, items[0], {1: 9, 2: 7}), fork(rng, items[1], {1: 6})]
  return [*forked, items[2]]


@pytest.mark.parametrize('name', aggregation.AGGREGATIONS)
def test_the_gradient_is_the_sum_over_rows(name):
  """cases row 43: packed together, and every row alone with its weights."""
  how = aggregation.AGGREGATIONS[name]
  items = step_items()
  with jax.enable_x64(True):
    got, stats = packs.gradient_of(items, 1, how, [packing.Shape(3, 48, 24)])
    want = None
    for item in items:
      count = item.trajectory.num_sampled
      for row in apart(item):
        batch, _, _ = packing.pack(
          [row], [packs.SINGLE], lambda n, count=count: how.weight(count), 0
        )
        part = sums_of(batch)
        want = part if want is None else jax.tree.map(np.add, want, part)
    total = sum(how.share(i.trajectory.num_sampled, 5.0) for i in items)
    want = jax.tree.map(lambda x: x / total, want)
  assert np.isfinite(stats).all()
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-13),
    got,
    want,
  )
  assert max(np.abs(x).max() for x in jax.tree.leaves(want)) > 1e-3


def sums_of(batch):
  """The gradient sums of one batch."""
  params, ref = packs.params_of(0), packs.params_of(1)
  sinks = {'batch': jax.tree.map(jax.numpy.zeros_like, params)}
  stats = jax.tree.map(np.float64, packs.gradients.Stats.zeros())
  sinks, _ = packs.accumulator()(params, ref, batch, sinks, stats)
  return jax.tree.map(np.asarray, sinks['batch'])


def test_forks_do_not_change_a_trajectories_share():
  """cases row 43: the weights of a trajectory add up to the same."""
  how = aggregation.AGGREGATIONS['sequence']
  forked = step_items()[0]
  turns = [
    dataclasses.replace(t, context=None) for t in forked.trajectory.turns
  ]
  plain = dataclasses.replace(forked.trajectory, turns=tuple(turns))
  assert len(forked.trajectory.rows) == 3 and len(plain.rows) == 1
  sums = [
    packing.pack(
      [Item(t)], [packing.Shape(3, 48, 24)], how.weight, 0
    )[0].weights.sum()
    for t in (forked.trajectory, plain)
  ]  # fmt: skip
  np.testing.assert_allclose(sums, how.share(plain.num_sampled, 5.0))
