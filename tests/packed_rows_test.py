"""Packed and padded rows against one sequence a row, values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np

from thundersync_jax.models import families, transformer

CONFIG = families.ModelConfig(
  family='qwen3',
  vocab_size=61,
  embed_dim=16,
  mlp_dim=24,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  rope_scaling=families.RopeScaling('llama3', 4.0, 1.0, 4.0, 64),
  qk_norm=True,
)


def random_tokens(count, seed):
  return np.random.default_rng(seed).integers(0, CONFIG.vocab_size, count)


init = jax.jit(transformer.init, static_argnums=0)


def logits_of(params, tokens, positions, segments, branches):  # [B, T, V]
  hidden = transformer.forward(
    CONFIG, params, tokens, positions, segments, branches
  )
  return jnp.einsum('btd,vd->btv', hidden, transformer.head(params))


PROMPT = random_tokens(5, seed=1)
BRANCHES = [random_tokens(3, seed=2 + i) for i in range(3)]
OTHER = random_tokens(8, seed=9)  # a second segment in the same row
PADDING = 2
# The same trajectories, each on its own with its prompt.
SEQUENCES = np.stack([np.concatenate([PROMPT, b]) for b in BRANCHES] + [OTHER])
COUNT, LENGTH = SEQUENCES.shape


def packed_row():
  """tokens, positions, segments, branches [1, T]: both segments, padding."""
  columns = [(t, i, 1, 0) for i, t in enumerate(PROMPT)]
  for b, branch in enumerate(BRANCHES, 1):
    columns += [(t, i, 1, b) for i, t in enumerate(branch, len(PROMPT))]
  columns += [(t, i, 2, 0) for i, t in enumerate(OTHER)]
  columns += [(0, 0, 0, 0)] * PADDING
  return tuple(np.array(columns).T[:, None])


def padded_rows(before, after):
  """tokens, positions, segments, branches: one trajectory a row, padded."""
  pad = ((0, 0), (before, after))
  ones = np.ones_like(SEQUENCES)
  positions = np.arange(LENGTH) * ones
  tokens, positions, segments = (
    np.pad(x, pad) for x in (SEQUENCES, positions, ones)
  )
  return tokens, positions, segments, 0 * tokens


def places_in_packed_row():  # [COUNT, LENGTH]
  prompt = np.arange(len(PROMPT))
  starts = len(PROMPT) + 3 * np.arange(3)[:, None]
  members = [np.r_[prompt, row] for row in starts + np.arange(3)]
  return np.stack([*members, len(PROMPT) + 9 + np.arange(LENGTH)])


def logprobs_of(params, rows, places):
  """f[COUNT]: of every token that has one before it, summed a trajectory.

  places: row and column of each token of each trajectory.
  """
  logits = jax.nn.log_softmax(logits_of(params, *rows)[places])
  targets = SEQUENCES[:, 1:, None]
  return jnp.take_along_axis(logits[:, :-1], targets, axis=-1).sum((1, 2))


def test_packed_and_padded_rows_agree_with_single_rows():
  """cases row 37: log-probabilities in four layouts, gradients when packed."""
  weights = np.array([1.0, -2.0, 0.5, 3.0])
  own_row = np.arange(COUNT)[:, None]
  columns = np.arange(LENGTH)

  def value(*layout):
    return jax.jit(lambda params: logprobs_of(params, *layout))

  def value_and_grad(*layout):
    def run(params):
      sums, pull = jax.vjp(lambda p: logprobs_of(p, *layout), params)
      return sums, pull(jnp.asarray(weights))[0]

    return jax.jit(run)

  with jax.enable_x64(True):
    params = init(CONFIG, jax.random.key(0))
    single = value_and_grad(padded_rows(0, 0), (own_row, columns))(params)
    packed = value_and_grad(packed_row(), (0, places_in_packed_row()))(params)
    left = value(padded_rows(4, 0), (own_row, columns + 4))(params)
    right = value(padded_rows(0, 4), (own_row, columns))(params)
  for padded in (left, right):
    np.testing.assert_allclose(padded, single[0], rtol=1e-10)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-10),
    packed,
    single,
  )


def test_members_of_a_packed_row_never_see_each_other():
  """cases row 37: another token in one branch changes that branch alone."""
  params = init(CONFIG, jax.random.key(0))
  tokens, *others = packed_row()
  at = len(PROMPT)  # the first token of branch 1
  changed = tokens.copy()
  changed[0, at] = (changed[0, at] + 1) % CONFIG.vocab_size
  run = jax.jit(logits_of)
  before, after = (
    np.asarray(run(params, t, *others)) for t in (tokens, changed)
  )
  moved = np.flatnonzero(np.abs(after - before)[0].max(axis=-1))
  np.testing.assert_array_equal(moved, at + np.arange(len(BRANCHES[0])))
  assert np.isfinite(before).all()
