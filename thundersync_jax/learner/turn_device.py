"""What a turn stream keeps on the devices, and its compiled programs.

Two slabs (the student's with adjoints, the teacher's with K/V alone), one
gradient sum and the statistics; all donated from program to program. The
teacher's K/V are kept like the student's: scoring a turn then costs that turn,
where recomputing would cost the whole trajectory each time.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
from absl import logging
from jax.sharding import Mesh

from thundersync_jax import mesh as mesh_lib
from thundersync_jax.learner import distill_loss, packing, slab, turn_programs
from thundersync_jax.learner import learner as learner_lib
from thundersync_jax.models import families, transformer
from thundersync_jax.streaming.turn_pieces import Limits, Piece
from thundersync_jax.types import Batch

Tree = Any
_ON_TEACHER = ('score', 'prefill_teacher', 'packed_teacher')
_SLAB_AXES = slab.Slab(
  ('layers', None, 'kv_heads', None, None),
  ('layers', None, 'kv_heads', None, None),
  ('layers', None, 'kv_heads', None, None),
  ('layers', None, 'kv_heads', None, None),
  ('layers', None, None, None),
  (None, None, None),
)


@dataclasses.dataclass(frozen=True)
class TeacherModel:
  """A frozen model on its mesh; params stacked."""

  config: families.ModelConfig
  params: Tree
  mesh: Mesh


@dataclasses.dataclass(frozen=True)
class Shapes:
  """Shapes that programs exist for: pieces that are fed, and unwound."""

  feed: tuple[slab.Shape, ...]
  unwind: tuple[slab.Shape, ...]

  @property
  def length(self) -> int:
    """Columns of the slab."""
    return max(shape.prefix for shape in self.feed + self.unwind)


class Device:
  """See the module docstring. Driver thread only.

  Args:
    learner: lends its mesh, its model and its packed shapes.
    loss: of the loss entries.
    teacher: see TeacherModel.
    limits: rows of the slabs.
    shapes: see Shapes.
    plans: that will be asked for, beside 'close'.
    params: of the first step, for shapes and dtypes.
  """

  def __init__(
    self,
    learner: learner_lib.Learner,
    loss: distill_loss.Loss,
    teacher: TeacherModel,
    limits: Limits,
    shapes: Shapes,
    plans: Sequence[str],
    params: Tree,
  ):
    self._learner = learner
    self._loss = loss
    self._teacher = teacher
    self._rows = limits.rows
    self._plans = tuple(plans)
    self.shapes = shapes
    self._mesh = learner.mesh
    self._programs = {}
    dtype = params['embed'].dtype
    make = functools.partial(
      self._make_slab, rows=limits.rows, length=shapes.length, dtype=dtype
    )
    self._slab = self._teacher_slab = None
    if plans:
      inputs = 'forward' in plans
      self._slab = make(
        learner.config, self._mesh, adjoints=True, inputs=inputs
      )
      self._teacher_slab = make(
        teacher.config, teacher.mesh, adjoints=False, inputs=False
      )
    head = transformer.head(teacher.params)
    self._head = jax.device_put(head, mesh_lib.sharding(self._mesh))
    self._zeros = learner.arithmetic(params).zeros
    self._sink = None
    self._stats = self._put(distill_loss.Stats.zeros())

  @property
  def slab_bytes(self) -> int:
    """Of both slabs, over all devices."""
    leaves = jax.tree.leaves((self._slab, self._teacher_slab))
    return sum(leaf.nbytes for leaf in leaves)

  def feed(
    self,
    plan: str,
    shape: slab.Shape,
    pieces: Sequence[Piece],
    params: Tree,
  ) -> tuple[jax.Array, jax.Array]:
    """Scores and differentiates pieces; returns what is ready with each."""
    batch = self.fill(shape, pieces)
    hidden = self._score(shape, batch)
    teacher = distill_loss.Teacher(self._to_learner(hidden), self._head)
    name = 'ahead' if plan == 'forward' else 'local'
    args = (params, teacher, self._slab, batch, self._sum(), self._stats)
    out, done = self._run(name, shape, args)
    self._slab, self._sink, self._stats = out
    return hidden, done

  def unwind(
    self,
    plan: str,
    shape: slab.Shape,
    pieces: Sequence[Piece],
    params: Tree,
  ) -> jax.Array:
    """Pulls adjoints back through pieces; returns what is ready with it."""
    batch = self.fill(shape, pieces)
    name = 'backward' if plan == 'forward' else 'replay'
    args = (params, self._slab, batch, self._sum())
    (self._slab, self._sink), done = self._run(name, shape, args)
    return done

  def feed_prompt(
    self, shape: slab.Shape, pieces: Sequence[Piece], params: Tree
  ) -> jax.Array:
    """K/V of prompts for both models; returns what is ready with it."""
    batch = self.fill(shape, pieces)
    there = self._for_teacher(batch)
    self._teacher_slab, _ = self._run('prefill_teacher', shape, there)
    args = (params, self._slab, batch)
    self._slab, done = self._run('prefill', shape, args)
    return done

  def whole(self, batch: Batch, params: Tree) -> tuple[jax.Array, jax.Array]:
    """Scores and differentiates packed rows; returns as `feed` does."""
    shape = batch.tokens.shape, batch.targets.shape
    there = jax.device_put(batch, mesh_lib.sharding(self._teacher.mesh))
    args = (self._teacher.params, there)
    hidden, _ = self._run('packed_teacher', shape, args)
    teacher = distill_loss.Teacher(self._to_learner(hidden), self._head)
    here = self._learner.place_batch(batch)
    args = (params, teacher, here, self._sum(), self._stats)
    (self._sink, self._stats), done = self._run('packed', shape, args)
    return hidden, done

  def finish(self) -> tuple[Tree, distill_loss.Stats]:
    """Returns the sum and the statistics of a step, and starts the next."""
    total, stats = self._sum(), jax.device_get(self._stats)
    self._sink = None
    self._stats = self._put(distill_loss.Stats.zeros())
    return total, stats

  def warm_up(self, params: Tree) -> None:
    """Compiles every program by running it on padding."""
    for shape in self._learner.shapes:
      self.whole(packing.empty(shape, pad_id=0), params)
    for plan in self._plans:
      for shape in self.shapes.feed:
        self.feed(plan, shape, (), params)
      for shape in self.shapes.unwind:
        self.unwind(plan, shape, (), params)
    if self._plans:
      for shape in self.shapes.unwind:
        self.feed_prompt(shape, (), params)
        self.unwind('turn', shape, (), params)  # that of prompts
    jax.block_until_ready(self.finish()[0])

  def fill(self, shape: slab.Shape, pieces: Sequence[Piece]) -> slab.Pieces:
    """The arrays of pieces, on the host."""
    batch = slab.empty_pieces(shape, self._rows)
    for i, piece in enumerate(pieces):
      batch.rows[i] = piece.place.row
      batch.prompt_rows[i] = piece.place.prompt_row
      batch.prompt_lengths[i] = piece.place.prompt_length
      batch.starts[i] = piece.start
      batch.lengths[i] = len(piece.tokens)
      batch.tokens[i, : len(piece.tokens)] = piece.tokens
      entries = slice(0, len(piece.sources))
      batch.sources[i, entries] = piece.sources
      batch.targets[i, entries] = piece.targets
      batch.weights[i, entries] = 1
      batch.behaviour_logprobs[i, entries] = piece.behaviour_logprobs
    return batch

  # From here on private.

  def _score(self, shape, batch):
    args = self._for_teacher(batch)
    (self._teacher_slab, hidden), _ = self._run('score', shape, args)
    return hidden

  def _for_teacher(self, batch):
    there = jax.device_put(batch, mesh_lib.sharding(self._teacher.mesh))
    return self._teacher.params, self._teacher_slab, there

  def _to_learner(self, hidden):
    return jax.device_put(hidden, mesh_lib.sharding(self._mesh))

  def _put(self, tree):
    return jax.device_put(tree, mesh_lib.sharding(self._mesh))

  def _sum(self):
    return self._zeros() if self._sink is None else self._sink

  def _make_slab(self, config, mesh, *, rows, length, dtype, adjoints, inputs):
    make = functools.partial(
      slab.empty_slab,
      config,
      rows,
      length,
      dtype,
      adjoints=adjoints,
      inputs=inputs,
    )
    abstract = jax.eval_shape(make)
    names = dataclasses.fields(abstract)
    where = slab.Slab(
      **{
        field.name: mesh_lib.sharding(
          mesh,
          getattr(abstract, field.name).shape,
          getattr(_SLAB_AXES, field.name),
        )
        for field in names
        if getattr(abstract, field.name) is not None
      }
    )
    return jax.jit(make, out_shardings=where)()

  def _run(self, name, shape, args):
    """What a program returns, and a scalar that nobody donates."""
    on_teacher = name in _ON_TEACHER
    if not on_teacher and isinstance(shape, slab.Shape):
      args = tuple(
        self._put(x) if isinstance(x, slab.Pieces) else x for x in args
      )
    key = name, shape
    if key not in self._programs:
      self._programs[key] = self._compile(name, shape, args)
    return self._programs[key](*args)

  def _compile(self, name, shape, args):
    logging.info('compiling %s for %s', name, shape)
    student, teacher = self._learner.config, self._teacher.config
    size = getattr(shape, 'prefix', 0)
    programs = {
      'local': (turn_programs.local, (student, self._loss, size), (2, 4)),
      'ahead': (turn_programs.ahead, (student, self._loss, size), (2, 4)),
      'replay': (turn_programs.replay, (student, size), (1, 3)),
      'backward': (turn_programs.backward, (student, size), (1, 3)),
      'prefill': (turn_programs.prefill, (student, size), (1,)),
      'prefill_teacher': (turn_programs.prefill, (teacher, size), (1,)),
      'score': (turn_programs.score, (teacher, size), (1,)),
      'packed': (distill_loss.packed, (student, self._loss), (3,)),
      'packed_teacher': (distill_loss.packed_hidden, (teacher,), ()),
    }
    function, first, donated = programs[name]

    def marked(*args):
      out = function(*first, *args)
      leaf = jax.tree.leaves(out)[0]
      return out, leaf[(0,) * leaf.ndim]

    where = self._out_shardings(name, args)
    on_teacher = name in _ON_TEACHER
    mesh = self._teacher.mesh if on_teacher else self._mesh
    jitted = jax.jit(
      marked,
      donate_argnums=donated,
      out_shardings=(where, mesh_lib.sharding(mesh)),
    )
    return jitted.lower(*args).compile()

  def _out_shardings(self, name, args):
    """What goes round stays where it is."""
    replicated = mesh_lib.sharding(self._mesh)

    def same(x):
      return jax.tree.map(lambda leaf: leaf.sharding, x)

    there = mesh_lib.sharding(self._teacher.mesh)
    return {
      'local': lambda: (same(args[2]), same(args[4]), replicated),
      'ahead': lambda: (same(args[2]), same(args[4]), replicated),
      'replay': lambda: (same(args[1]), same(args[3])),
      'backward': lambda: (same(args[1]), same(args[3])),
      'prefill': lambda: same(args[1]),
      'prefill_teacher': lambda: same(args[1]),
      'score': lambda: (same(args[1]), there),
      'packed': lambda: (same(args[3]), replicated),
      'packed_teacher': lambda: there,
    }[name]()
