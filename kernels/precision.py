"""The one place that decides in which precision a matrix product runs.

'float32' keeps f32 operands really f32 (TPUs and GPUs otherwise round them);
f64 operands stay f64. 'bfloat16' casts both operands and accumulates in f32,
and does the same to both transposed products of the backward pass: with an
f32 cotangent they would run as f32 products, where most of the time goes.

The backward products are written out, the gradient of b as a^T times cotangent:
XLA transposes its left operand on CPU, and would compute a cotangent that comes
from elementwise work a second time, column by column.
"""

import functools

import jax
import jax.numpy as jnp


def einsum(
  spec: str,  # two operands; each index of one is in the other or the output
  a: jax.Array,
  b: jax.Array,
  *,
  compute_dtype: str,  # 'float32' or 'bfloat16'
) -> jax.Array:  # f32, or f64 when an operand is and compute_dtype is float32
  """jnp.einsum of two operands with operands cast as the module says.

  Raises:
    ValueError: an unknown compute_dtype.
  """
  if compute_dtype not in ('float32', 'bfloat16'):
    raise ValueError(
      f'compute_dtype={compute_dtype!r} must be float32 or bfloat16'
    )
  return _einsum(spec, compute_dtype, a, b)


def rounded(x: jax.Array, *, compute_dtype: str) -> jax.Array:
  """x with the values that `einsum` would read, in f32 or wider.

  For products written out by hand. A pair of casts would not do: XLA may drop
  it as excess precision.
  """
  wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
  if compute_dtype != 'bfloat16' or x.dtype == jnp.bfloat16:
    return wide
  return jax.lax.reduce_precision(wide, exponent_bits=8, mantissa_bits=7)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _einsum(
  spec: str, compute_dtype: str, a: jax.Array, b: jax.Array
) -> jax.Array:
  if compute_dtype == 'bfloat16':
    return jnp.einsum(
      spec,
      a.astype(jnp.bfloat16),
      b.astype(jnp.bfloat16),
      preferred_element_type=jnp.float32,
    )
  dtype = functools.reduce(jnp.promote_types, (a.dtype, b.dtype, jnp.float32))
  return jnp.einsum(
    spec,
    a.astype(dtype),
    b.astype(dtype),
    precision=jax.lax.Precision.HIGHEST,
  )


def _einsum_fwd(spec, compute_dtype, a, b):
  # b is kept as it came: a weight is alive anyway, its cast would be a copy.
  return _einsum(spec, compute_dtype, a, b), (a, b)


def _einsum_bwd(spec, compute_dtype, residuals, cotangent):
  a, b = residuals
  operands, out = spec.split('->')
  left, right = operands.split(',')
  grad_a = _einsum(f'{out},{right}->{left}', compute_dtype, cotangent, b)
  grad_b = _einsum(f'{left},{out}->{right}', compute_dtype, a, cotangent)
  return grad_a.astype(a.dtype), grad_b.astype(b.dtype)


_einsum.defvjp(_einsum_fwd, _einsum_bwd)
