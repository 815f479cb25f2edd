"""The engine's states, programs and limits: what it does around the tokens."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import slow_rollout as slow

from thundersync_jax import mesh as mesh_lib
from thundersync_jax.models import transformer
from thundersync_jax.rollout import engine as engine_lib
from thundersync_jax.rollout import sampling as programs
from thundersync_jax.runs import timeline as timeline_lib
from thundersync_jax.types import Sampling


def test_steady_state_compiles_nothing():
  """Every shape comes from a bucket, and warm_up has met all of them."""
  compiled = []

  def count(event, seconds, **kwargs):
    if event == '/jax/core/compile/backend_compile_duration':
      compiled.append(event)

  mesh = mesh_lib.make_mesh(jax.devices()[:1])
  engine = slow.make_engine(mesh=mesh)
  engine.warm_up()
  updates = [slow.weights(seed) for seed in (1, 2)]
  jax.block_until_ready(updates)
  jax.monitoring.register_event_duration_secs_listener(count)
  try:
    for step, params in enumerate(updates):
      requests = slow.requests_of(prompts=3 + 4 * step, step=step)
      slow.run(engine, requests, slow.two_answers)
      slow.run(engine, requests[:2])
      for request in requests:
        engine.submit(request)
      engine.launch()
      slow.publish(engine, mesh, params, step)
      played = {}
      while slow.advance(engine, played, slow.two_answers):
        pass
    assert not compiled
    jax.jit(lambda x: x + step)(jnp.ones(3))
    assert compiled  # the counter counts
  finally:
    jax.monitoring.unregister_event_duration_listener(count)


def test_the_cache_stays_in_place():
  """Temporary memory of decode and insert is below half of the cache."""
  config = dataclasses.replace(slow.CONFIG, head_dim=64)
  mesh = mesh_lib.make_mesh(jax.devices()[:1])
  slots = 32
  cache = programs.empty_cache(config, mesh, slots, 512, 'float32')
  decode = programs.decode_chunk.lower(
    config,
    mesh,
    transformer.unstack(transformer.init(config, jax.random.key(0))),
    cache,
    np.zeros((len(programs.ROWS), slots), np.int32),
    programs.root_key(0),
    np.zeros(1, np.int32),
    np.float32(1),
    None,
    None,
    chunk=2,
  )
  prompts = programs.empty_cache(config, mesh, 2, 8, 'float32')
  pairs = np.zeros((slots, 2), np.int32)
  insert = programs.insert.lower(mesh, cache, prompts, pairs, np.int32(0))
  for program in (decode, insert):
    memory = program.compile().memory_analysis()
    assert memory.alias_size_in_bytes >= 4 * cache[0][0].nbytes
    assert memory.temp_size_in_bytes < 2 * cache[0][0].nbytes


def test_warm_up_leaves_no_trace():
  timeline = timeline_lib.Timeline()
  engine = slow.make_engine(timeline=timeline)
  engine.warm_up(extend=False)
  assert engine.counters == slow.make_engine().counters
  requests = slow.requests_of()
  timeline.begin_step(0)
  slow.same(slow.run(engine, requests), slow.run(slow.make_engine(), requests))


def test_waiting_prompts_fill_the_rows_of_a_prefill():
  """Two slots need one prompt; the next one of its bucket comes along."""
  engine = slow.make_engine(slots=2, prefill_rows=2)
  tokens = np.arange(8, 12)
  for prompt_id in range(2):
    for member in range(2):
      engine.submit(
        engine_lib.Request(prompt_id, member, 0, tokens + prompt_id, 3)
      )
  engine.launch()
  assert engine.counters.prompt_tokens == 6
  played = {}
  while slow.advance(engine, played, slow.no_answer):
    pass
  assert engine.counters.prompt_tokens == 6
  assert len(played) == 4
  assert not engine._prompt_cache  # no K/V of prompts outlives its waiters


def test_finish_cancels_waiting_parked_and_decoding_trajectories():
  requests = slow.requests_of()
  expected = slow.run(slow.make_engine(**slow.ONE_BUCKET), requests)
  engine = slow.make_engine(**slow.ONE_BUCKET)
  for request in requests:
    engine.submit(request)
  engine.launch()
  engine.finish(3, 2)  # waiting
  engine.finish(0, 1)  # decoding, in flight
  played = {}
  while slow.advance(engine, played, slow.no_answer):
    pass
  slow.same(
    {k: v for k, v in expected.items() if k not in ((3, 2), (0, 1))}, played
  )
  assert engine.active == engine.waiting == engine.parked == 0
  with pytest.raises(ValueError, match='prompt_id=3 member=2 is not here'):
    engine.finish(3, 2)


def test_harvest_without_block_never_waits_and_launch_never_doubles():
  engine = slow.make_engine()
  assert engine.harvest() == [] and not engine.launch()
  requests = slow.requests_of()
  for request in requests:
    engine.submit(request)
  played = {}
  while engine.launch():
    assert engine.in_flight
    assert engine.launch()  # the same chunk
    while engine.in_flight:
      for turn in engine.harvest():
        played[turn.prompt_id, turn.member] = [turn]
        engine.finish(turn.prompt_id, turn.member)
  slow.same(slow.run(slow.make_engine(), requests), played)


def test_spans_follow_one_another():
  timeline = timeline_lib.Timeline()
  timeline.begin_step(0)
  slow.run(
    slow.make_engine(timeline=timeline), slow.requests_of(), slow.two_answers
  )
  spans = timeline.end_step().spans
  assert {span.name for span in spans} == {'prefill', 'extend', 'decode'}
  for one, other in zip(spans, spans[1:], strict=False):
    assert one.start <= one.end <= other.start


@pytest.mark.parametrize(
  'change, match',
  [
    ({'tokens': np.ones(52, int)}, 'prompt of 52 tokens.*max_context - 1 = 51'),
    ({'tokens': np.ones(10, int)}, 'prompt of 10 tokens.*prompt_buckets .8'),
    ({'tokens': np.ones(0, int)}, 'at least one token'),
    ({'max_tokens': 0}, 'max_tokens=0 must be at least 1'),
  ],
)
def test_a_request_that_does_not_fit_is_refused(change, match):
  engine = slow.make_engine()
  with pytest.raises(ValueError, match=f'prompt_id=0 member=0: .*{match}'):
    engine.submit(dataclasses.replace(slow.requests_of()[0], **change))
  assert engine.waiting == 0


def test_misuse_names_the_trajectory():
  engine = slow.make_engine()
  request = dataclasses.replace(slow.requests_of()[0], max_tokens=1)
  engine.submit(request)
  with pytest.raises(ValueError, match='prompt_id=0 member=0 is waiting or'):
    engine.submit(request)
  engine.launch()
  with pytest.raises(ValueError, match='member=0 has no parked slot'):
    engine.resume(0, 0, np.ones(1, int), 4)
  (turn,) = engine.harvest(block=True)
  assert engine.parked == 1
  with pytest.raises(ValueError, match='observation of 50 tokens makes 52'):
    engine.resume(0, 0, np.ones(50, int), 4)
  with pytest.raises(RuntimeError, match=r'between publish\(\) and launch'):
    engine.warm_up()
  engine.resume(0, 0, np.ones(49, int), 4)
  assert engine.launch()
  (turn,) = engine.harvest(block=True)
  assert (turn.finish_reason, len(turn.tokens)) == ('context', 1)


@pytest.mark.parametrize(
  'change, match',
  [
    ({'slots': 0}, 'slots=0 must be at least 1'),
    ({'cache_buckets': (16, 40)}, r'cache_buckets=\(16, 40\).*at least 52'),
    ({'prompt_buckets': (8, 4)}, r'prompt_buckets=\(8, 4\) must be ascending'),
    ({'prompt_buckets': ()}, 'must be ascending'),
  ],
)
def test_sizes_that_contradict_each_other_are_refused(change, match):
  with pytest.raises(ValueError, match=match):
    slow.make_engine(**change)


def test_launch_before_publish_says_so():
  engine = engine_lib.Engine(
    slow.CONFIG,
    mesh_lib.make_mesh(jax.devices()[:1]),
    slots=1,
    chunk=1,
    max_context=8,
    cache_buckets=(8,),
    prompt_buckets=(4,),
    stop_ids=(),
    seed=0,
    sampling=Sampling(),
  )
  engine.submit(engine_lib.Request(0, 0, 0, np.ones(2, int), 1))
  with pytest.raises(RuntimeError, match='publish'):
    engine.launch()
