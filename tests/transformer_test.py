"""The decoder against a slow numpy decoder, and its forms against each other.

Forms: packed rows, padded rows, a K/V cache filled in pieces; stacked layers
and one dict a layer; f32, f64 and bf16 operands; with and without remat.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import slow_decoder

from thundersync_jax.models import families, transformer

LLAMA = families.ModelConfig(
  family='llama',
  vocab_size=61,
  embed_dim=16,
  mlp_dim=24,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
)
CONFIGS = {
  'llama3_scaled': dataclasses.replace(
    LLAMA,
    rope_theta=5000.0,
    rope_scaling=families.RopeScaling('llama3', 4.0, 1.0, 4.0, 64),
  ),
  'llama_linear_tied': dataclasses.replace(
    LLAMA, rope_scaling=families.RopeScaling('linear', 3.0), tied=True
  ),
  'qwen2': dataclasses.replace(
    LLAMA, family='qwen2', qkv_bias=True, tied=True, num_kv_heads=1
  ),
  'qwen3': dataclasses.replace(
    LLAMA, family='qwen3', qk_norm=True, rope_theta=1e6, norm_eps=1e-5
  ),
}


def random_params(config, dtype=np.float32):
  """Parameters with no ones and no zeros, so that none can be left out."""
  rng = np.random.default_rng(0)
  shapes = jax.eval_shape(
    functools.partial(transformer.init, config), jax.random.key(0)
  )
  return jax.tree_util.tree_map_with_path(
    lambda path, x: rng.normal('norm' in path[-1].key, 0.3, x.shape).astype(
      dtype
    ),
    shapes,
  )


def random_tokens(*shape, seed=0):
  return np.random.default_rng(seed).integers(0, LLAMA.vocab_size, shape)


@functools.partial(jax.jit, static_argnums=0)
def forward_logits(config, params, tokens, positions, segments, branches):
  hidden = transformer.forward(
    config, params, tokens, positions, segments, branches
  )
  head = transformer.head(params)
  return jnp.einsum('btd,vd->btv', hidden, head, precision='highest')


def plain_logits(config, params, tokens):  # [B, T, V]
  """One sequence a row, no padding."""
  ones = jnp.ones_like(tokens)
  positions = jnp.arange(tokens.shape[1]) * ones
  return forward_logits(config, params, tokens, positions, ones, 0 * ones)


extend = jax.jit(transformer.extend, static_argnums=0)


@pytest.mark.parametrize('name', CONFIGS)
def test_forward_agrees_with_a_slow_decoder(name):
  config = CONFIGS[name]
  with jax.enable_x64(True):
    params = random_params(config, np.float64)
    tokens = random_tokens(2, 30)
    logits = plain_logits(config, params, tokens)
    assert logits.dtype == jnp.float64
  for row in range(2):
    expected = slow_decoder.logits_of(config, params, tokens[row])
    np.testing.assert_allclose(logits[row], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize('name', CONFIGS)
def test_logical_axes_name_every_dimension(name):
  config = CONFIGS[name]
  sizes = {
    'vocab': config.vocab_size,
    'embed': config.embed_dim,
    'layers': config.num_layers,
    'heads': config.num_heads,
    'kv_heads': config.num_kv_heads,
    'head_dim': config.head_dim,
    'mlp': config.mlp_dim,
  }
  params = jax.eval_shape(
    functools.partial(transformer.init, config), jax.random.key(0)
  )
  shapes = jax.tree.map(
    lambda names: tuple(sizes[name] for name in names),
    transformer.logical_axes(config),
    is_leaf=lambda x: isinstance(x, tuple),
  )
  assert shapes == jax.tree.map(lambda x: x.shape, params)
  assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(params))


# --- a cache, filled in pieces ----------------------------------------------

LAYOUTS = {'stacked': lambda params: params, 'decode': transformer.unstack}


@pytest.mark.parametrize('layout', LAYOUTS)
def test_extend_in_pieces_agrees_with_forward(layout):
  """Prefill of 5, then 3, then one by one; two rows with different starts."""
  config = CONFIGS['qwen3']
  with jax.enable_x64(True):
    params = random_params(config, np.float64)
    laid_out = LAYOUTS[layout](params)
    tokens = random_tokens(2, 12)
    expected = plain_logits(config, params, tokens)
    cache = transformer.empty_cache(config, 2, 16, jnp.float64)
    pieces, at = [], 0
    for size in (5, 3, 1, 1, 1, 1):
      hidden, cache = extend(
        config, laid_out, cache, tokens[:, at : at + size], np.full(2, at)
      )
      pieces.append(hidden)
      at += size
    logits = jnp.concatenate(pieces, axis=1) @ transformer.head(params).T
    keys, values = cache[0]
    assert keys.shape == (2, config.num_kv_heads, config.head_dim, 16)
    assert values.shape == (2, config.num_kv_heads, 16, config.head_dim)
  np.testing.assert_allclose(logits, expected, rtol=1e-9, atol=1e-9)


def test_rows_of_a_cache_start_where_they_are_told():
  """Row 0 goes on at 4, row 1 at 2; a row at the end is left as it is."""
  config = CONFIGS['llama3_scaled']
  params = transformer.unstack(random_params(config))
  tokens = random_tokens(3, 6)
  cache = transformer.empty_cache(config, 3, 6, jnp.float32)
  whole, full = extend(config, params, cache, tokens, np.zeros(3, int))
  _, cache = extend(config, params, cache, tokens[:, :4], np.zeros(3, int))
  starts = np.array([4, 2, 6])
  later = np.stack([tokens[0, 4:], tokens[1, 2:4], tokens[2, :2]])
  hidden, new = extend(config, params, cache, later, starts)
  np.testing.assert_allclose(hidden[0], whole[0, 4:], rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(hidden[1], whole[1, 2:4], rtol=1e-4, atol=1e-5)
  assert np.isfinite(hidden).all()
  for (k, v), (old_k, old_v), (full_k, _) in zip(new, cache, full, strict=True):
    np.testing.assert_array_equal(k[2], old_k[2])
    np.testing.assert_array_equal(v[2], old_v[2])
    np.testing.assert_allclose(k[0], full_k[0], rtol=1e-4, atol=1e-5)


def test_positions_past_the_end_are_dropped():
  config = CONFIGS['qwen2']
  params = random_params(config)
  tokens = random_tokens(1, 5)
  cache = transformer.empty_cache(config, 1, 3, jnp.float32)
  hidden, short = extend(config, params, cache, tokens, np.zeros(1, int))
  expected, exact = extend(
    config, params, cache, tokens[:, :3], np.zeros(1, int)
  )
  np.testing.assert_allclose(hidden[:, :3], expected, rtol=1e-4, atol=1e-5)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
    short,
    exact,
  )


def test_both_layouts_give_one_forward_and_go_over_into_each_other():
  config = CONFIGS['qwen2']
  params = random_params(config)
  listed = transformer.unstack(params)
  assert len(listed['layers']) == config.num_layers
  jax.tree.map(np.testing.assert_array_equal, transformer.stack(listed), params)
  tokens = random_tokens(2, 7)
  np.testing.assert_allclose(
    plain_logits(config, listed, tokens),
    plain_logits(config, params, tokens),
    rtol=1e-4,
    atol=1e-5,
  )


# --- arithmetic --------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=0)
def loss_and_grad(config, params, tokens):
  def loss(params):
    logprobs = jax.nn.log_softmax(plain_logits(config, params, tokens))
    return jnp.take_along_axis(
      logprobs[:, :-1], tokens[:, 1:, None], axis=-1
    ).sum()

  return jax.value_and_grad(loss)(params)


def flat(tree):
  return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


def matmuls(jaxpr):
  """Operand dtypes of every dot_general, those of inner jaxprs included."""
  found = []
  for eqn in jaxpr.eqns:
    if eqn.primitive.name == 'dot_general':
      found.append({str(x.aval.dtype) for x in eqn.invars})
    for value in eqn.params.values():
      for inner in value if isinstance(value, (tuple, list)) else [value]:
        inner = getattr(inner, 'jaxpr', inner)
        if hasattr(inner, 'eqns'):
          found += matmuls(inner)
  return found


def test_f64_stays_f64_and_gradients_equal_finite_differences():
  config = CONFIGS['qwen3']
  with jax.enable_x64(True):
    params = random_params(config, np.float64)
    tokens = random_tokens(2, 9)
    _, grad = loss_and_grad(config, params, tokens)
    rng = np.random.default_rng(1)
    step = jax.tree.map(lambda x: 1e-6 * rng.normal(size=x.shape), params)
    up, down = (
      loss_and_grad(
        config, jax.tree.map(lambda p, d, s=s: p + s * d, params, step), tokens
      )[0]
      for s in (1, -1)
    )
    assert {x.dtype for x in jax.tree.leaves(grad)} == {np.dtype('float64')}
    cache = transformer.empty_cache(config, 2, 9, jnp.float64)
    hidden, _ = extend(config, params, cache, tokens, np.zeros(2, int))
    assert hidden.dtype == jnp.float64
  numeric = (float(up) - float(down)) / 2
  np.testing.assert_allclose(numeric, flat(grad) @ flat(step), rtol=1e-7)


@pytest.mark.parametrize('layout', LAYOUTS)
def test_remat_recomputes_each_layer_and_changes_no_gradient(layout):
  config = CONFIGS['llama_linear_tied']
  remat = dataclasses.replace(config, remat=True)
  params = LAYOUTS[layout](random_params(config))
  tokens = random_tokens(2, 9)
  results = [loss_and_grad(c, params, tokens) for c in (config, remat)]
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
    *results,
  )
  traced = jax.make_jaxpr(loss_and_grad, static_argnums=0)
  counts = [
    len(matmuls(traced(c, params, tokens).jaxpr)) for c in (config, remat)
  ]
  # Seven products with weights and two of attention, but not the very last.
  layers = 1 if layout == 'stacked' else config.num_layers
  assert counts[1] - counts[0] >= 8 * layers


def test_bf16_casts_all_operands_and_keeps_the_gradient():
  """Those of the backward products too; parameters and gradients stay f32."""
  config = LLAMA
  bf16 = dataclasses.replace(config, compute_dtype='bfloat16')
  params = random_params(config)
  tokens = random_tokens(4, 16)

  def grad(config, params):
    def loss(params):
      ones = np.ones_like(tokens)
      positions = np.arange(16) * ones
      hidden = transformer.forward(
        config, params, tokens, positions, ones, 0 * ones
      )
      return (jnp.square(hidden).mean(axis=(0, 1)) * jnp.arange(16.0)).sum()

    return jax.grad(loss)(params)

  traced = jax.make_jaxpr(grad, static_argnums=0)
  for c, dtype in ((bf16, 'bfloat16'), (config, 'float32')):
    assert all(x == {dtype} for x in matmuls(traced(c, params).jaxpr))
  run = jax.jit(grad, static_argnums=0)
  exact, rounded = flat(run(config, params)), flat(run(bf16, params))
  cosine = exact @ rounded / np.linalg.norm(exact) / np.linalg.norm(rounded)
  assert rounded.dtype == np.float32
  assert cosine > 0.999
  assert np.abs(exact - rounded).max() > 0


@pytest.mark.parametrize('layout', LAYOUTS)
def test_bf16_weights_are_used_as_they_are(layout):
  """Weights cast once beforehand give what casting at every use gives."""
  config = dataclasses.replace(LLAMA, compute_dtype='bfloat16')
  params = LAYOUTS[layout](random_params(config))
  norms = ('attn_norm', 'mlp_norm', 'final_norm', 'embed')
  cast = jax.tree_util.tree_map_with_path(
    lambda path, x: x if path[-1].key in norms else x.astype(jnp.bfloat16),
    params,
  )
  tokens = random_tokens(2, 6)
  cache = transformer.empty_cache(config, 2, 8, jnp.bfloat16)
  starts = np.zeros(2, int)
  expected, _ = extend(config, params, cache, tokens, starts)
  hidden, cache = extend(config, cast, cache, tokens, starts)
  np.testing.assert_array_equal(hidden, expected)
  assert hidden.dtype == jnp.float32
  assert cache[0][0].dtype == jnp.bfloat16


def test_bf16_sampling_and_training_see_the_same_numbers():
  """cases row 5: decoding rounds where the training forward rounds."""
  config = dataclasses.replace(LLAMA, compute_dtype='bfloat16')
  params = random_params(config)
  tokens = random_tokens(2, 20)
  ones = np.ones_like(tokens)
  trained = jax.jit(transformer.forward, static_argnums=0)(
    config, params, tokens, np.arange(20) * ones, ones, 0 * ones
  )
  cache = transformer.empty_cache(config, 2, 20, jnp.bfloat16)
  decoded = []
  for t in range(20):
    hidden, cache = extend(
      config, params, cache, tokens[:, t : t + 1], np.full(2, t)
    )
    decoded.append(hidden)
  difference = np.abs(np.concatenate(decoded, axis=1) - trained)
  assert np.median(difference) < 1e-5
  assert difference.max() < 0.05
