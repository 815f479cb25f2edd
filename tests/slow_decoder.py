"""The decoder once more in f64 numpy, by plain loops: one row, no cache.

Shares nothing with the package but the names of the parameters.
"""

import math

import jax
import numpy as np


def rms_norm(x, scale, eps):
  return np.array([v / math.sqrt(sum(v * v) / len(v) + eps) * scale for v in x])


def frequency(config, pair):
  frequency = 1 / config.rope_theta ** (2 * pair / config.head_dim)
  scaling = config.rope_scaling
  if scaling is None:
    return frequency
  if scaling.kind == 'linear':
    return frequency / scaling.factor
  wavelength = 2 * math.pi / frequency
  longest = scaling.original_context / scaling.low_freq_factor
  shortest = scaling.original_context / scaling.high_freq_factor
  if wavelength > longest:
    return frequency / scaling.factor
  if wavelength < shortest:
    return frequency
  smooth = scaling.original_context / wavelength - scaling.low_freq_factor
  smooth /= scaling.high_freq_factor - scaling.low_freq_factor
  return (1 - smooth) * frequency / scaling.factor + smooth * frequency


def rotate(config, vector, position):
  half = config.head_dim // 2
  out = np.empty_like(vector)
  for i in range(half):
    angle = position * frequency(config, i)
    turned = complex(vector[i], vector[i + half]) * complex(
      math.cos(angle), math.sin(angle)
    )
    out[i], out[i + half] = turned.real, turned.imag
  return out


def project(config, layer, name, x):  # [T, heads, H]
  heads = np.einsum('td,dnh->tnh', x, layer[name])
  if config.qkv_bias:
    heads = heads + layer[name + '_bias']
  if name == 'v':
    return heads
  for t, head in np.ndindex(heads.shape[:2]):
    vector = heads[t, head]
    if config.qk_norm:
      scale = layer[name + '_norm']
      vector = rms_norm([vector], scale, config.norm_eps)[0]
    heads[t, head] = rotate(config, vector, t)
  return heads


def attention(q, k, v):
  out = np.zeros_like(q)
  group = q.shape[1] // k.shape[1]
  for t, n in np.ndindex(q.shape[:2]):
    scores = k[: t + 1, n // group] @ q[t, n] / math.sqrt(q.shape[2])
    weights = np.exp(scores - scores.max())
    out[t, n] = weights @ v[: t + 1, n // group] / weights.sum()
  return out


def logits_of(config, params, tokens):  # [T] -> [T, V]
  params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
  x = params['embed'][tokens]
  for i in range(config.num_layers):
    layer = {name: stacked[i] for name, stacked in params['layers'].items()}
    h = rms_norm(x, layer['attn_norm'], config.norm_eps)
    q, k, v = (project(config, layer, name, h) for name in 'qkv')
    x = x + np.einsum('tnh,nhd->td', attention(q, k, v), layer['o'])
    h = rms_norm(x, layer['mlp_norm'], config.norm_eps)
    gate = h @ layer['gate']
    x = x + (gate / (1 + np.exp(-gate)) * (h @ layer['up'])) @ layer['down']
  x = rms_norm(x, params['final_norm'], config.norm_eps)
  return x @ params['embed' if config.tied else 'head'].T
