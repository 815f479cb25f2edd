"""Packed and padded rows against one sequence a row, values and gradients."""

import functools

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
BRANCHES = [random_tokens(n, seed=2 + i) for i, n in enumerate((3, 1, 3))]
OTHER = random_tokens(8, seed=9)  # a second segment in the same row
PADDING = 2


def packed_row():
  """tokens, positions, segments, branches [1, T]: both segments, padding."""
  columns = [(t, i, 1, 0) for i, t in enumerate(PROMPT)]
  for b, branch in enumerate(BRANCHES, 1):
    columns += [(t, i, 1, b) for i, t in enumerate(branch, len(PROMPT))]
  columns += [(t, i, 2, 0) for i, t in enumerate(OTHER)]
  columns += [(0, 0, 0, 0)] * PADDING
  return tuple(np.array(columns).T[:, None])


def sequences():
  """The same trajectories, each on its own with its prompt."""
  return [np.concatenate([PROMPT, b]) for b in BRANCHES] + [OTHER]


def padded_rows(length, side):
  """tokens, positions, segments, branches [4, length], padded on one side."""
  rows = []
  for tokens in sequences():
    free = length - len(tokens)
    pad = (free, 0) if side == 'left' else (0, free)
    values = (tokens, np.arange(len(tokens)), np.ones_like(tokens))
    rows.append([np.pad(x, pad) for x in values])
  tokens, positions, segments = np.array(rows).swapaxes(0, 1)
  return tokens, positions, segments, 0 * tokens


def logprob(logits, tokens):  # of every token that has one before it
  logprobs = jax.nn.log_softmax(logits[:-1])
  return logprobs[np.arange(len(tokens) - 1), tokens[1:]].sum()


def packed(params):
  """f[4]: log-probability of each trajectory, from the packed row."""
  logits = logits_of(params, *packed_row())[0]
  rows, at = [], len(PROMPT)
  for branch in BRANCHES:
    rows.append(np.r_[: len(PROMPT), at : at + len(branch)])
    at += len(branch)
  rows.append(np.r_[at : at + len(OTHER)])
  pairs = zip(rows, sequences(), strict=True)
  return jnp.stack([logprob(logits[row], tokens) for row, tokens in pairs])


def padded(side, params):
  logits = logits_of(params, *padded_rows(12, side))
  sums = []
  for row, tokens in zip(logits, sequences(), strict=True):
    n = len(tokens)
    sums.append(logprob(row[-n:] if side == 'left' else row[:n], tokens))
  return jnp.stack(sums)


def single(params):
  """No padding at all: sequences of one length share a program, not a row."""
  sums = {}
  for length in {len(tokens) for tokens in sequences()}:
    rows = [i for i, t in enumerate(sequences()) if len(t) == length]
    tokens = np.stack([sequences()[i] for i in rows])
    ones = np.ones_like(tokens)
    positions = np.arange(length) * ones
    logits = logits_of(params, tokens, positions, ones, 0 * ones)
    for i, row in zip(rows, logits, strict=True):
      sums[i] = logprob(row, sequences()[i])
  return jnp.stack([sums[i] for i in range(len(sums))])


def test_packed_and_padded_rows_agree_with_single_rows():
  """cases row 37: log-probabilities and gradients, in four layouts."""
  weights = np.array([1.0, -2.0, 0.5, 3.0])
  layouts = {
    'single': single,
    'packed': packed,
    'left': functools.partial(padded, 'left'),
    'right': functools.partial(padded, 'right'),
  }

  @functools.partial(jax.jit, static_argnums=0)
  def value_and_grad(loss, params):
    value, pull = jax.vjp(loss, params)
    return value, pull(jnp.asarray(weights))[0]

  with jax.enable_x64(True):
    params = init(CONFIG, jax.random.key(0))
    results = {
      name: value_and_grad(loss, params) for name, loss in layouts.items()
    }
  for name in ('packed', 'left', 'right'):
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-10),
      results[name],
      results['single'],
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
