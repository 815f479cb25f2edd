"""Packed rows against a slow definition; micro-batches; pad equal to eos."""

import dataclasses
import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from thundersync_jax.learner import gradients, packing
from thundersync_jax.models import families, tokenizer, transformer
from thundersync_jax.objectives import aggregation, losses
from thundersync_jax.types import Item, Trajectory, Turn

BYTES = tokenizer.ByteTokenizer(pad_equals_eos=True)
VOCAB = BYTES.vocab_size
CONFIG = families.ModelConfig(
  family='llama',
  vocab_size=VOCAB,
  embed_dim=16,
  mlp_dim=24,
  num_layers=2,
  num_heads=2,
  num_kv_heads=1,
  head_dim=8,
)
PACKED, SINGLE = packing.Shape(2, 72, 24), packing.Shape(1, 32, 16)


def make_turn(tokens, mask, first=0.0):
  """Recorded log-probabilities are all different: -first, -first - 1, ..."""
  recorded = np.where(mask, -first - np.arange(len(tokens)), 0)
  return Turn(
    np.asarray(tokens, np.int32),
    np.asarray(mask, bool),
    recorded.astype(np.float32),
    np.zeros(len(tokens), np.int32),
    'stop',
  )


def random_item(rng, prompt_id, member, prompt, turns, first=0.0):
  """turns: (sampled, observed) lengths of each."""
  made = []
  for sampled, observed in turns:
    n = sampled + observed
    mask = np.arange(n) < sampled
    made.append(make_turn(rng.integers(0, VOCAB, n), mask, first))
    first += n
  trajectory = Trajectory(prompt_id, member, 0, prompt, tuple(made))
  return Item(trajectory, *(float(x) for x in rng.normal(size=2)))


def weight(n):
  return 1 / (n + 1)


def pack_all(items, shapes, pad_id=0, how=weight):
  """The batches that it takes, and their shapes; every item once."""
  batches, rest = [], list(items)
  while rest:
    batch, shape, taken = packing.pack(rest, shapes, how, pad_id)
    assert taken and shape in shapes
    assert batch.tokens.shape == (shape.rows, shape.tokens)
    assert batch.targets.shape == (shape.rows, shape.targets)
    batches.append(batch)
    held = {id(item) for item in taken}
    rest = [item for item in rest if id(item) not in held]
  return batches


def seen_from(batch, row, column):
  """Tokens that the mask shows to a column, which stand at 0, 1, 2, ..."""
  segments, branches = batch.segment_ids[row], batch.branch_ids[row]
  sees = [
    k
    for k in range(column + 1)
    if segments[k] == segments[column] and branches[k] in (0, branches[column])
  ]
  np.testing.assert_array_equal(batch.positions[row, sees], range(len(sees)))
  return tuple(batch.tokens[row, sees].tolist())


def entries_of(batches):
  """Every loss entry: what is seen, the target, and its numbers."""
  entries = []
  for batch in batches:
    for row, n in np.argwhere(batch.weights > 0):
      column = batch.sources[row, n]
      assert batch.segment_ids[row, column] > 0
      numbers = [
        float(getattr(batch, name)[row, n])
        for name in ('weights', 'advantages', 'rewards', 'behaviour_logprobs')
      ]
      seen = seen_from(batch, row, column)
      entries.append((seen, int(batch.targets[row, n]), *numbers))
  return sorted(entries)


def slow_entries(items):
  """The same from the definition, one token of one trajectory at a time."""
  entries = []
  for item in items:
    t = item.trajectory
    for i in np.flatnonzero(t.loss_mask):
      seen = (*t.prompt_tokens.tolist(), *t.tokens[:i].tolist())
      numbers = [weight(t.num_sampled), item.advantage, item.reward]
      entries.append(
        (seen, int(t.tokens[i]), *numbers, float(t.behaviour_logprobs[i]))
      )
  return sorted(entries)


def test_a_row_by_hand():
  """Two members, one of two turns, behind their prompt; an observation."""
  prompt = np.array([5, 6])
  one = make_turn([7, 8, 9], [True, True, False], first=1)
  two = make_turn([10, 11], [True, False], first=4)
  other = make_turn([12], [True], first=6)
  items = [
    Item(Trajectory(3, 0, 0, prompt, (one, two)), 0.5, 1.0),
    Item(Trajectory(3, 1, 0, prompt, (other,)), -0.5, 0.0),
  ]
  batch, _, taken = packing.pack(items, [packing.Shape(1, 8, 6)], weight, 99)
  assert taken == items
  expected = {
    # The last sampled token is only a target, so 10, 11 and 12 have no column.
    'tokens': [5, 6, 7, 8, 9, 99, 99, 99],
    'positions': [0, 1, 2, 3, 4, 0, 0, 0],
    'segment_ids': [1, 1, 1, 1, 1, 0, 0, 0],
    'branch_ids': [0, 0, 1, 1, 1, 0, 0, 0],
    # 7 and 12 are both predicted at the end of the prompt, 10 behind the 9.
    'sources': [1, 2, 4, 1, 0, 0],
    'targets': [7, 8, 10, 12, 0, 0],
    'weights': [1 / 4, 1 / 4, 1 / 4, 1 / 2, 0, 0],
    'advantages': [0.5, 0.5, 0.5, -0.5, 0, 0],
    'rewards': [1, 1, 1, 0, 0, 0],
    'behaviour_logprobs': [-1, -2, -4, -6, 0, 0],
  }
  for name, values in expected.items():
    np.testing.assert_array_equal(getattr(batch, name), [values], name)


lengths = st.tuples(st.integers(1, 4), st.integers(0, 3))
members = st.lists(st.lists(lengths, max_size=3), min_size=1, max_size=5)
groups = st.lists(st.tuples(st.integers(1, 6), members), min_size=1, max_size=4)
shapes = st.lists(
  st.builds(
    packing.Shape, st.integers(1, 3), st.integers(27, 60), st.integers(12, 30)
  ),
  min_size=1,
  max_size=3,
)


@hypothesis.given(groups, shapes, st.integers(0, 2**32))
@hypothesis.settings(max_examples=80, deadline=None, derandomize=True)
def test_nothing_is_lost_or_doubled(groups, shapes, seed):
  """Any lengths in any shapes: every sampled token once, with all it saw."""
  rng, items = np.random.default_rng(seed), []
  for prompt_id, (length, turns) in enumerate(groups):
    prompt = rng.integers(0, VOCAB, length)
    items += [
      random_item(rng, prompt_id, m, prompt, t, first=100.0 * len(items) + m)
      for m, t in enumerate(turns)
    ]
  order = [items[i] for i in rng.permutation(len(items))]
  batches = pack_all(order, shapes)
  assert entries_of(batches) == slow_entries(items)
  for batch in batches:
    padding = batch.segment_ids == 0
    assert not batch.tokens[padding].any()
    for name in ('advantages', 'rewards', 'behaviour_logprobs'):
      assert not getattr(batch, name)[batch.weights == 0].any()


def test_a_group_that_fits_shares_one_prompt():
  rng = np.random.default_rng(0)
  prompt = rng.integers(0, VOCAB, 10)
  items = [random_item(rng, 0, m, prompt, [(3, 0)]) for m in range(4)]
  batch, shape, taken = packing.pack(items, [SINGLE, PACKED], weight, 0)
  assert (len(taken), shape) == (4, SINGLE)
  assert (batch.segment_ids > 0).sum() == 10 + 4 * 2
  assert (batch.branch_ids > 0).sum() == 4 * 2


def test_the_cheapest_shape_that_takes_everything():
  rng = np.random.default_rng(0)
  items = [random_item(rng, i, 0, np.arange(20), [(3, 0)]) for i in range(9)]
  assert packing.pack(items[:1], [PACKED, SINGLE], weight, 0)[1] == SINGLE
  assert packing.pack(items[:3], [PACKED, SINGLE], weight, 0)[1] == PACKED
  # None takes all: the one that takes most, three times 22 tokens a row.
  _, shape, taken = packing.pack(items, [SINGLE, PACKED], weight, 0)
  assert (shape, taken) == (PACKED, items[:6])


@pytest.mark.parametrize('turns', [[(30, 0)], [(17, 0)], [(3, 25), (1, 0)]])
def test_a_trajectory_that_fits_no_shape_names_its_numbers(turns):
  item = random_item(np.random.default_rng(0), 0, 0, np.arange(9), turns)
  t = item.trajectory
  columns = 9 + int(np.flatnonzero(t.loss_mask)[-1])
  numbers = f'of {columns} tokens with {t.num_sampled} loss entries'
  with pytest.raises(ValueError, match=f'{numbers} .* raise row_tokens'):
    packing.pack([item], [SINGLE], weight, 0)


@functools.cache
def params_of(seed):
  """f64: called under jax.enable_x64."""
  params = jax.jit(transformer.init, static_argnums=0)(
    CONFIG, jax.random.key(seed)
  )
  return jax.tree.map(lambda x: x.astype('float64'), params)


@jax.jit
def entry_logprobs(params, batch):
  return gradients.entry_logprobs(CONFIG, params, batch, 1.0)[0]


def test_pad_equal_to_eos_keeps_the_end_token():
  """cases row 9: in the prompt and in the completion, padding stays out."""
  end = BYTES.pad_id
  assert end in BYTES.stop_ids
  prompt = BYTES.apply_chat_template([{'role': 'user', 'content': 'hi'}])
  assert end in prompt
  tokens = np.array([104, 105, end])
  item = Item(
    Trajectory(0, 0, 0, prompt, (make_turn(tokens, [True] * 3, first=1),)),
    advantage=1.0,
  )
  pads = {
    pad: packing.pack([item], [SINGLE], lambda n: 1.0, pad)[0]
    for pad in (end, 0)
  }
  batch, used = pads[end], len(prompt) + 2
  real = np.arange(SINGLE.tokens) < used
  np.testing.assert_array_equal(batch.segment_ids[0], real)
  assert (batch.tokens[0, ~real] == end).all() and end in batch.tokens[0, real]
  np.testing.assert_array_equal(batch.targets[0, :3], tokens)
  np.testing.assert_array_equal(batch.weights[0], np.arange(SINGLE.targets) < 3)
  ids = jnp.asarray(np.r_[prompt, tokens])[None]
  with jax.enable_x64(True):
    params = params_of(0)
    one, other = (entry_logprobs(params, b)[0, :3] for b in pads.values())
    # The model sees the end token of the prompt as any other token.
    positions = jnp.arange(ids.shape[1])[None]
    hidden = transformer.forward(
      CONFIG, params, ids, positions, 1 + 0 * ids, 0 * ids
    )
    logits = hidden[0, -4:-1] @ transformer.head(params).T
    dense = jax.nn.log_softmax(logits)[np.arange(3), tokens]
    one, other, dense = (np.asarray(x) for x in (one, other, dense))
  np.testing.assert_array_equal(one, other)
  np.testing.assert_allclose(one, dense, rtol=1e-9)


@functools.cache
def accumulator():
  objective = gradients.Objective(
    loss='ppo_clip', kl_coef=0.1, bounds=losses.Bounds(0.1, 0.3)
  )
  return jax.jit(lambda *args: gradients.accumulate(CONFIG, objective, *args))


def gradient_of(items, micro_batches, how, shapes):
  """Sums of `batch` over micro-batches, over the denominator; statistics."""
  params, ref = params_of(0), params_of(1)
  sinks = {'batch': jax.tree.map(jnp.zeros_like, params)}
  stats = jax.tree.map(np.float64, gradients.Stats.zeros())
  denominator = 0.0
  for part in np.array_split(np.arange(len(items)), micro_batches):
    chosen = [items[i] for i in part]
    denominator += sum(
      how.share(item.trajectory.num_sampled, 5.0) for item in chosen
    )
    for batch in pack_all(chosen, shapes, how=how.weight):
      sinks, stats = accumulator()(params, ref, batch, sinks, stats)
  total = jax.tree.map(lambda x: np.asarray(x) / denominator, sinks['batch'])
  numbers = stats.logprob, stats.entropy, stats.kl, stats.clipped
  means = [float(stats.logprob_diff_max), *(x.mean() for x in numbers)]
  return total, means


@pytest.mark.parametrize('name', aggregation.AGGREGATIONS)
def test_micro_batches_do_not_change_the_gradient(name):
  """cases row 11: 1, 2 and 8 of them, packed or one by one, unequal lengths."""
  rng, items = np.random.default_rng(2), []
  how = aggregation.AGGREGATIONS[name]
  for g in range(2):
    prompt = rng.integers(0, VOCAB, 4 + 3 * g)
    items += [
      random_item(rng, g, m, prompt, [(m + 1, 2), (1, 1)], first=4.0)
      for m in range(4)
    ]
  with jax.enable_x64(True):
    want, stats = gradient_of(items, 1, how, [PACKED])
    for micro_batches, shapes in (
      (1, [SINGLE]),
      (2, [PACKED]),
      (8, [PACKED]),
      (8, [SINGLE]),
    ):
      got, others = gradient_of(items, micro_batches, how, shapes)
      jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-13),
        got,
        want,
      )
      np.testing.assert_allclose(others, stats, rtol=1e-5)
  assert max(np.abs(x).max() for x in jax.tree.leaves(want)) > 1e-3


def test_a_turn_of_unequal_arrays_is_refused():
  """cases row 8: a mask can never grow apart from its tokens."""
  turn = make_turn([1, 2, 3], [True, True, False])
  for name in ('loss_mask', 'behaviour_logprobs', 'policy_versions'):
    with pytest.raises(ValueError, match='arrays of one length'):
      dataclasses.replace(turn, **{name: getattr(turn, name)[:2]})
  with pytest.raises(ValueError, match='behaviour_logprobs=None'):
    dataclasses.replace(turn, behaviour_logprobs=None)
