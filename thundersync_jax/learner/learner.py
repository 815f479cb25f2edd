"""The learner's compiled programs: accumulate, and the step at the barrier.

  accumulate   see gradients.py
  apply_step   params <- optax(-sum / denominator), once, at the barrier

Every program is compiled ahead for its shape and sinks, so that a steady run
cannot recompile.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging
from jax.sharding import Mesh

from thundersync_jax import mesh as mesh_lib
from thundersync_jax.learner import gradients, packing
from thundersync_jax.models import families, transformer
from thundersync_jax.streaming.accumulators import Arithmetic
from thundersync_jax.types import Batch

Tree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LearnerState:
  """Master parameters (f32, stacked), optimizer state, steps taken (i32)."""

  params: Tree
  opt_state: Tree
  step: jax.Array


@dataclasses.dataclass(frozen=True)
class BatchGradient:
  """What the barrier hands to apply_step.

  Attributes:
    total: sum over the step's loss entries.
    denominator: see objectives/aggregation.py.
    policy_versions: of every token in it.
  """

  total: Tree
  denominator: float
  policy_versions: frozenset[int]


def apply_gradient(
  optimizer: optax.GradientTransformation,
  state: LearnerState,
  total: Tree,
  denominator: jax.Array,
) -> tuple[LearnerState, jax.Array]:
  """One optimizer step; returns the new state and the norm before the clip."""
  gradient = jax.tree.map(lambda g: -g / denominator, total)
  updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
  params = optax.apply_updates(state.params, updates)
  norm = optax.global_norm(gradient)
  return LearnerState(params, opt_state, state.step + 1), norm


class Learner:
  """Compiled programs of one model and objective on one mesh.

  Args:
    config: the model.
    objective: what is maximised.
    optimizer: see optimizer.py.
    mesh: the learner's devices.
    shapes: of packed batches.
    sums_on_host: keep the sums of open groups in host memory.
  """

  def __init__(
    self,
    config: families.ModelConfig,
    objective: gradients.Objective,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    shapes: tuple[packing.Shape, ...],
    sums_on_host: bool = False,
  ):
    self.config = config
    self.objective = objective
    self.shapes = shapes
    self._optimizer = optimizer
    self.mesh = mesh
    self._sums_on_host = sums_on_host
    self._programs = {}
    self._zero_makers = {}
    abstract = jax.eval_shape(
      functools.partial(transformer.init, config), jax.random.key(0)
    )
    self._shardings = mesh_lib.tree_shardings(
      mesh, abstract, transformer.logical_axes(config)
    )
    self._replicated = mesh_lib.sharding(mesh)
    self._add_scaled = jax.jit(
      lambda acc, scale, tree: jax.tree.map(
        lambda a, x: a + scale.astype(x.dtype) * x, acc, tree
      ),
      donate_argnums=0,
    )
    self._apply = None  # compiled for the first state

  def init_state(self, params: Tree) -> LearnerState:
    """Places parameters on the mesh and makes an optimizer state for them."""
    params = self.place(params)
    opt_state = jax.jit(self._optimizer.init)(params)
    step = jax.device_put(np.int32(0), self._replicated)
    # What optax makes from nothing (counters) lands on one device.
    opt_state = jax.tree.map(self._on_mesh, opt_state)
    return LearnerState(params, opt_state, step)

  def place(self, params: Tree) -> Tree:
    """Copies a parameter tree to the mesh."""
    return jax.device_put(params, self._shardings)

  def arithmetic(self, params: Tree) -> Arithmetic:
    """What the accumulators need."""
    cpu = jax.local_devices(backend='cpu')[0]
    zeros = self._zeros(params)
    on_host = self._sums_on_host
    return Arithmetic(
      zeros=zeros,
      add_scaled=lambda acc, scale, tree: self._add_scaled(
        acc, np.asarray(scale), tree
      ),
      park=lambda t: jax.device_put(t, cpu) if on_host else t,
      unpark=lambda t: jax.device_put(t, self._shardings) if on_host else t,
      nbytes=sum(leaf.nbytes for leaf in jax.tree.leaves(params)),
    )

  def accumulate(
    self,
    params: Tree,
    ref_params: Tree | None,
    batch: Batch,
    sinks: Mapping[str, Tree],
    stats: gradients.Stats,
  ) -> tuple[dict[str, Tree], gradients.Stats]:
    """Runs `accumulate` for a batch of one of the shapes; sinks are donated."""
    args = self._args(params, ref_params, batch, sinks, stats)
    return self._find(args)(*args)

  def warm_up(
    self,
    state: LearnerState,
    ref_params: Tree | None,
    kinds: list[tuple[str, ...]],
  ) -> None:
    """Compiles every shape for every tuple of sinks, and the step."""
    params = state.params
    zeros = self._zeros(params)
    self._compile_apply(state, zeros())
    for shape in self.shapes:
      empty = packing.empty(shape, pad_id=0)
      for names in kinds:
        sinks = {name: zeros() for name in names}
        args = self._args(
          params, ref_params, empty, sinks, gradients.Stats.zeros()
        )
        self._find(args)
    self._add_scaled(zeros(), np.asarray(1.0), zeros())

  def apply_step(
    self, state: LearnerState, gradient: BatchGradient, max_staleness: int = 0
  ) -> tuple[LearnerState, float]:
    """One optimizer step at the barrier; the state is donated.

    Returns:
      The new state and the gradient norm before the clip.

    Raises:
      ValueError: tokens of other parameters than max_staleness allows, or an
        empty batch.
      FloatingPointError: the gradient is not finite.
    """
    step = int(state.step)
    allowed = range(step - max_staleness, step + 1)
    strangers = [v for v in gradient.policy_versions if v not in allowed]
    if strangers:
      raise ValueError(
        f'policy_versions {sorted(strangers)} in step {step}: only '
        f'{allowed.start} to {step} are allowed (max_staleness={max_staleness})'
      )
    if gradient.denominator <= 0:
      raise ValueError(
        f'denominator={gradient.denominator}: the batch has no loss token'
      )
    denominator = self._put(np.asarray(gradient.denominator))
    if self._apply is None:
      self._compile_apply(state, gradient.total)
    new, norm = self._apply(state, gradient.total, denominator)
    norm = float(norm)
    if not np.isfinite(norm):
      raise FloatingPointError(
        f'gradient norm {norm} in step {step}: lower learning_rate, or look at '
        'rewards and log-probabilities of the step; nothing was saved'
      )
    return new, norm

  def place_batch(self, batch: Batch) -> Batch:
    """Copies a packed batch to the mesh, rows sharded."""
    names = ('rows', None)

    def where(x):
      return mesh_lib.sharding(self.mesh, x.shape, names)

    return jax.device_put(batch, jax.tree.map(where, batch))

  def _put(self, tree: Tree) -> Tree:
    return jax.device_put(tree, self._replicated)

  def _on_mesh(self, leaf: jax.Array) -> jax.Array:
    on_mesh = leaf.sharding.device_set == self._replicated.device_set
    return leaf if on_mesh else jax.device_put(leaf, self._replicated)

  def _zeros(self, like: Tree):
    """Returns a function that makes trees of zeros; keeps no array alive."""
    leaves, tree = jax.tree.flatten(like)
    kinds = tuple((x.shape, x.dtype) for x in leaves)

    def make():
      return jax.tree.unflatten(tree, [jnp.zeros(*kind) for kind in kinds])

    if kinds not in self._zero_makers:
      jitted = jax.jit(make, out_shardings=self._shardings)
      self._zero_makers[kinds] = jitted
    return self._zero_makers[kinds]

  def _args(self, params, ref_params, batch, sinks, stats):
    placed = self.place_batch(batch), dict(sinks), self._put(stats)
    return (params, ref_params, *placed)

  def _find(self, args):
    batch, sinks = args[2:4]
    key = (batch.tokens.shape, batch.targets.shape, tuple(sorted(sinks)))
    if key not in self._programs:
      self._programs[key] = self._compile(args)
    return self._programs[key]

  def _compile_apply(self, state, total):
    where = jax.tree.map(lambda x: x.sharding, state)
    jitted = jax.jit(
      functools.partial(apply_gradient, self._optimizer),
      donate_argnums=0,
      # The state's own: else the second step would compile again.
      out_shardings=(where, self._replicated),
    )
    one = self._put(np.asarray(1.0))
    self._apply = jitted.lower(state, total, one).compile()

  def _compile(self, args):
    logging.info('compiling accumulate for %s', args[2].tokens.shape)
    function = functools.partial(
      gradients.accumulate, self.config, self.objective
    )
    out = ({name: self._shardings for name in args[3]}, self._replicated)
    jitted = jax.jit(function, donate_argnums=(3,), out_shardings=out)
    return jitted.lower(*args).compile()
