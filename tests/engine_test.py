"""The engine against a slow loop: one full forward pass a token, no cache."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from thundersync_jax import mesh as mesh_lib
from thundersync_jax.models import families, transformer
from thundersync_jax.rollout import engine as engine_lib
from thundersync_jax.rollout import sampling as programs
from thundersync_jax.runs import timeline as timeline_lib
from thundersync_jax.types import Sampling

VOCAB = 31
STOP = 7
CONTEXT = 52
ONE_BUCKET = {'cache_buckets': (CONTEXT,), 'prompt_buckets': (8,)}
MAX_TOKENS = 10
CONFIG = families.ModelConfig(
  family='llama',
  vocab_size=VOCAB,
  embed_dim=16,
  mlp_dim=24,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
)


@functools.cache
def weights(seed=0):
  """Random parameters with a wide spread of logits, in decode layout."""
  params = transformer.init(CONFIG, jax.random.key(seed))
  return transformer.unstack(params | {'head': params['head'] * 2})


def make_engine(device=0, mesh=None, config=CONFIG, params=None, **changes):
  mesh = mesh or mesh_lib.make_mesh(jax.devices()[device : device + 1])
  settings = {
    'slots': 5,
    'chunk': 3,
    'max_context': CONTEXT,
    'cache_buckets': (16, CONTEXT),
    'prompt_buckets': (4, 8),
    'stop_ids': (STOP,),
    'seed': 11,
    'sampling': Sampling(),
    'prefill_rows': 2,
    'extend_rows': 2,
  }
  engine = engine_lib.Engine(config, mesh, **settings | changes)
  publish(engine, mesh, params or weights(), 0)
  return engine


def publish(engine, mesh, params, policy_version):
  placed = jax.device_put(params, mesh_lib.sharding(mesh))
  engine.publish(placed, policy_version)


def requests_of(prompts=4, members=3, max_tokens=MAX_TOKENS, step=2):
  """Prompts of 1, 4, 7, 2, 5, 8, ... tokens."""
  rng = np.random.default_rng(5)
  return [
    engine_lib.Request(prompt_id, member, step, tokens, max_tokens)
    for prompt_id in range(prompts)
    for tokens in [rng.integers(8, VOCAB, 1 + 3 * prompt_id % 8)]
    for member in range(members)
  ]


def no_answer(turn, number):
  return None


def two_answers(turn, number):
  """Observations of 0 to 10 tokens: more than the longest bucket takes."""
  if number == 3:
    return None
  return np.arange(8, VOCAB)[: 5 * (number + turn.member - 1)][:10]


def harvest(engine, played, answer):
  for turn in engine.harvest(block=True):
    turns = played.setdefault((turn.prompt_id, turn.member), [])
    turns.append(turn)
    observation = answer(turn, len(turns))
    if observation is None:
      engine.finish(turn.prompt_id, turn.member)
    else:
      engine.resume(turn.prompt_id, turn.member, observation, MAX_TOKENS)


def advance(engine, played, answer):
  """One harvest and launch; returns whether a chunk is in flight."""
  harvest(engine, played, answer)
  return engine.launch()


def run(engine, requests, answer=no_answer):
  """Turns of every trajectory by (prompt_id, member)."""
  played = {}
  for request in requests:
    engine.submit(request)
  while advance(engine, played, answer):
    pass
  return played


@jax.jit
def next_logits(params, tokens, count):
  """f32[V] after the first `count` of the tokens, by a full forward pass."""
  positions = jnp.arange(CONTEXT)[None]
  ids = (positions < count).astype(jnp.int32)
  hidden = transformer.forward(
    CONFIG, params, tokens[None], positions, ids, ids
  )
  return transformer.head(params) @ hidden[0, count - 1]


def slow_token(params, tokens, request, temperature):
  """The next token and its log-probability, from the definition."""
  padded = np.zeros(CONTEXT, np.int32)
  padded[: len(tokens)] = tokens
  scaled = next_logits(params, padded, len(tokens)) / (temperature or 1)
  key = programs.root_key(11)
  path = request.step, request.prompt_id, request.member, len(tokens)
  for number in path:
    key = jax.random.fold_in(key, number)
  noise = jax.random.gumbel(key, (VOCAB,)) * (temperature > 0)
  token = int(jnp.argmax(scaled + noise))
  return token, float(jax.nn.log_softmax(scaled)[token])


def check(request, turns, answer=no_answer, temperature=1.0, params=None):
  """Compares turns with the slow loop; row 5 asks for 1e-4 in f32.

  params: a list of parameters by policy_version.
  """
  params = params or [weights()]
  tokens, limit = list(request.tokens), request.max_tokens
  for number, turn in enumerate(turns, start=1):
    for i, token in enumerate(turn.tokens):
      version = turn.policy_versions[i]
      expected = slow_token(params[version], tokens, request, temperature)
      assert token == expected[0]
      assert abs(turn.logprobs[i] - expected[1]) < 1e-4
      assert token != STOP or i == len(turn.tokens) - 1
      tokens.append(int(token))
    if tokens[-1] == STOP:
      assert turn.finish_reason == 'stop'
    elif len(turn.tokens) == limit:
      assert turn.finish_reason == 'length'
    else:
      assert (turn.finish_reason, len(tokens)) == ('context', CONTEXT)
    observation = answer(turn, number)
    tokens += [] if observation is None else observation.tolist()
    limit = MAX_TOKENS


def same(a, b, atol=0.0):
  """Token for token and, by default, bit for bit."""
  assert a.keys() == b.keys()
  for key, turns in a.items():
    assert len(turns) == len(b[key])
    for one, other in zip(turns, b[key], strict=True):
      np.testing.assert_array_equal(one.tokens, other.tokens)
      np.testing.assert_allclose(one.logprobs, other.logprobs, 0, atol)
      assert one.finish_reason == other.finish_reason


@pytest.mark.parametrize('temperature', [0.0, 0.8])
def test_tokens_and_logprobs_equal_the_slow_loop(temperature):
  """cases row 5: more trajectories than slots, prompts of 1 to 7 tokens."""
  engine = make_engine(sampling=Sampling(temperature))
  requests = requests_of()
  played = run(engine, requests)
  for request in requests:
    turns = played[request.prompt_id, request.member]
    check(request, turns, temperature=temperature)
  tokens = [len(turns[0].tokens) for turns in played.values()]
  assert engine.counters.tokens == sum(tokens)
  assert engine.waiting == engine.active == engine.parked == 0


def test_three_turns_with_observations_equal_the_slow_loop():
  """cases rows 5 and 18: the ids fed to the model over parked slots."""
  engine = make_engine()
  requests = requests_of()
  played = run(engine, requests, two_answers)
  for request in requests:
    turns = played[request.prompt_id, request.member]
    assert len(turns) == 3
    check(request, turns, two_answers)
  reasons = {turn.finish_reason for turns in played.values() for turn in turns}
  assert reasons >= {'stop', 'length'}


def test_resume_feeds_the_observation_and_no_prompt_again():
  engine = make_engine()
  requests = requests_of()
  played = run(engine, requests, two_answers)
  prompts = {request.prompt_id: request.tokens for request in requests}
  assert engine.counters.prompt_tokens == sum(
    len(tokens) - 1 for tokens in prompts.values()
  )
  # The last sampled token goes in with its observation, unless that is empty.
  assert engine.counters.extend_tokens == sum(
    len(two_answers(turn, number))
    for turns in played.values()
    for number, turn in enumerate(turns[:2], start=1)
  )


def test_order_of_arrival_and_other_rows_do_not_matter():
  """Bit for bit, as long as the cache has one length."""
  requests = requests_of()
  expected = run(make_engine(**ONE_BUCKET), requests, two_answers)
  order = np.random.default_rng(0).permutation(len(requests))
  permuted = [requests[i] for i in order]
  same(expected, run(make_engine(**ONE_BUCKET), permuted, two_answers))
  alone = run(make_engine(**ONE_BUCKET), requests[4:5], two_answers)
  same({key: expected[key] for key in alone}, alone)


def test_chunk_length_and_cache_buckets_do_not_change_tokens():
  """Sums over caches of other lengths round otherwise, by about 1e-6."""
  requests = requests_of()
  expected = run(make_engine(), requests, two_answers)
  for changes in (
    {'chunk': 1, 'cache_buckets': (CONTEXT,)},
    {'chunk': 16, 'cache_buckets': (24, 64)},
  ):
    played = run(make_engine(**changes), requests, two_answers)
    same(expected, played, atol=1e-5)


def test_members_prompts_and_steps_sample_differently():
  """cases row 41: one prompt, so only the keys tell trajectories apart."""
  tokens = np.arange(8, 12)
  requests = [
    engine_lib.Request(prompt_id, member, 0, tokens, 12)
    for prompt_id in range(3)
    for member in range(4)
  ]
  later = [dataclasses.replace(request, step=1) for request in requests]
  engine = make_engine(stop_ids=())
  texts = {
    turns[0].tokens.tobytes()
    for batch in (requests, later)
    for turns in run(engine, batch).values()
  }
  assert len(texts) == 24
  assert engine.counters.prompt_tokens == 2 * (len(tokens) - 1)


@pytest.mark.parametrize('in_flight', [False, True])
def test_a_weight_update_equals_a_cold_cache(in_flight):
  """cases row 27: active, parked and waiting trajectories, new weights."""
  mesh = mesh_lib.make_mesh(jax.devices()[:1])
  engine, requests, played = make_engine(mesh=mesh), requests_of(), {}
  params = [weights(seed) for seed in range(4)]
  for request in requests:
    engine.submit(request)
  for version in (1, 2, 3):
    for _ in range(3):
      advance(engine, played, two_answers)
    if not in_flight:
      harvest(engine, played, two_answers)
    publish(engine, mesh, params[version], version)
  while advance(engine, played, two_answers):
    pass
  for request in requests:
    turns = played[request.prompt_id, request.member]
    check(request, turns, two_answers, params=params)
  mixed = [
    len(set(np.concatenate([turn.policy_versions for turn in turns])))
    for turns in played.values()
  ]
  assert max(mixed) > 1


def test_steady_state_compiles_nothing():
  """Every shape comes from a bucket, and warm_up has met all of them."""
  compiled = []

  def count(event, seconds, **kwargs):
    if event == '/jax/core/compile/backend_compile_duration':
      compiled.append(event)

  mesh = mesh_lib.make_mesh(jax.devices()[:1])
  engine = make_engine(mesh=mesh)
  engine.warm_up()
  updates = [jax.device_put(weights(seed), jax.devices()[0]) for seed in (1, 2)]
  jax.block_until_ready(updates)
  jax.monitoring.register_event_duration_secs_listener(count)
  try:
    for step, params in enumerate(updates):
      requests = requests_of(prompts=3 + 4 * step, step=step)
      run(engine, requests, two_answers)
      run(engine, requests[:2])
      for request in requests:
        engine.submit(request)
      engine.launch()
      publish(engine, mesh, params, step)
      played = {}
      while advance(engine, played, two_answers):
        pass
    assert not compiled
    jax.jit(lambda x: x + step)(jnp.ones(3))
    assert compiled  # the counter counts
  finally:
    jax.monitoring.unregister_event_duration_listener(count)


def test_the_cache_stays_in_place():
  """Temporary memory of decode and insert is below that of one cache array."""
  mesh = mesh_lib.make_mesh(jax.devices()[:1])
  slots, length = 32, 512
  cache = programs.empty_cache(CONFIG, mesh, slots, length, 'float32')
  decode = programs.decode_chunk.lower(
    CONFIG,
    mesh,
    weights(),
    cache,
    np.zeros((len(programs.ROWS), slots), np.int32),
    programs.root_key(0),
    np.zeros(1, np.int32),
    np.float32(1),
    np.int32(0),
    np.float32(1),
    chunk=2,
    truncate=False,
  )
  prompts = programs.empty_cache(CONFIG, mesh, 2, 8, 'float32')
  pairs = np.zeros((slots, 2), np.int32)
  insert = programs.insert.lower(mesh, cache, prompts, pairs, np.int32(0))
  for program in (decode, insert):
    memory = program.compile().memory_analysis()
    assert memory.alias_size_in_bytes >= 4 * cache[0][0].nbytes
    assert memory.temp_size_in_bytes < cache[0][0].nbytes


def test_warm_up_leaves_no_trace():
  timeline = timeline_lib.Timeline()
  engine = make_engine(timeline=timeline)
  engine.warm_up(extend=False)
  assert engine.counters == make_engine().counters
  requests = requests_of()
  timeline.begin_step(0)
  same(run(engine, requests), run(make_engine(), requests))


def test_max_context_ends_a_turn():
  request = engine_lib.Request(0, 0, 0, np.arange(8, 12), CONTEXT)
  engine = make_engine(stop_ids=())
  (turn,) = run(engine, [request])[0, 0]
  assert turn.finish_reason == 'context'
  assert len(request.tokens) + len(turn.tokens) == CONTEXT
  padded = np.concatenate([request.tokens, turn.tokens]).astype(np.int32)
  logits = next_logits(weights(), padded, CONTEXT - 1)
  logprob = jax.nn.log_softmax(logits)[turn.tokens[-1]]
  assert abs(turn.logprobs[-1] - logprob) < 1e-4


def test_the_end_token_is_returned_also_when_it_pads():
  """cases row 9: a stop id of 0 is the padding of every program here."""
  bias = weights()['head'].at[0].mul(3)
  params = weights() | {'head': bias}
  engine = make_engine(stop_ids=(0, STOP), params=params)
  requests = requests_of()
  played = run(engine, requests)
  stops = 0
  for turns in played.values():
    ends = [token in (0, STOP) for token in turns[0].tokens.tolist()]
    assert not any(ends[:-1])
    assert ends[-1] == (turns[0].finish_reason == 'stop')
    assert (turns[0].logprobs < 0).all()
    stops += int(turns[0].tokens[-1] == 0)
  assert stops


def test_waiting_prompts_fill_the_rows_of_a_prefill():
  """Two slots need one prompt; the next one of its bucket comes along."""
  engine = make_engine(slots=2, prefill_rows=2)
  tokens = np.arange(8, 12)
  for prompt_id in range(2):
    for member in range(2):
      engine.submit(
        engine_lib.Request(prompt_id, member, 0, tokens + prompt_id, 3)
      )
  engine.launch()
  assert engine.counters.prompt_tokens == 6
  played = {}
  while advance(engine, played, no_answer):
    pass
  assert engine.counters.prompt_tokens == 6
  assert len(played) == 4


def test_finish_cancels_waiting_parked_and_decoding_trajectories():
  requests = requests_of()
  expected = run(make_engine(**ONE_BUCKET), requests)
  engine = make_engine(**ONE_BUCKET)
  for request in requests:
    engine.submit(request)
  engine.launch()
  engine.finish(3, 2)  # waiting
  engine.finish(0, 1)  # decoding, in flight
  played = {}
  while advance(engine, played, no_answer):
    pass
  same({k: v for k, v in expected.items() if k not in ((3, 2), (0, 1))}, played)
  assert engine.active == engine.waiting == engine.parked == 0
  with pytest.raises(ValueError, match='prompt_id=3 member=2 is not here'):
    engine.finish(3, 2)


def test_harvest_without_block_never_waits_and_launch_never_doubles():
  engine = make_engine()
  assert engine.harvest() == [] and not engine.launch()
  requests = requests_of()
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
  same(run(make_engine(), requests), played)


def test_the_second_device_gives_the_same_tokens():
  requests = requests_of()
  engine = make_engine(device=1, **ONE_BUCKET)
  played = run(engine, requests, two_answers)
  same(run(make_engine(**ONE_BUCKET), requests, two_answers), played)
  cache = jax.tree.leaves(engine._device._cache)
  assert {d for x in cache for d in x.devices()} == {jax.devices()[1]}


@pytest.mark.parametrize('axes', [{'fsdp': 2}, {'fsdp': 1, 'tensor': 2}])
def test_a_sharded_mesh_gives_the_same_tokens(axes):
  mesh = mesh_lib.make_mesh(jax.devices()[:2], **axes)
  requests = requests_of()
  played = run(
    make_engine(mesh=mesh, slots=4, **ONE_BUCKET), requests, two_answers
  )
  for request in requests:
    turns = played[request.prompt_id, request.member]
    check(request, turns, two_answers)


def test_bf16_weights_and_cache_stay_close():
  config = dataclasses.replace(CONFIG, compute_dtype='bfloat16')
  params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), weights())
  engine = make_engine(
    config=config, params=params, dtype='bfloat16', **ONE_BUCKET
  )
  requests = requests_of()
  played = run(engine, requests, two_answers)
  errors = []
  for request in requests:
    tokens = list(request.tokens)
    for turn in played[request.prompt_id, request.member]:
      for token, logprob in zip(turn.tokens, turn.logprobs, strict=True):
        padded = np.zeros(CONTEXT, np.int32)
        padded[: len(tokens)] = tokens
        logits = next_logits(weights(), padded, len(tokens))
        errors.append(abs(jax.nn.log_softmax(logits)[token] - logprob))
        tokens.append(token)
      break  # a resumed turn has an observation between
  # bf16 has 8 bits: about 1 % of logits that reach 10.
  assert 1e-4 < np.mean(errors) < 0.1


def test_top_k_and_top_p_keep_untruncated_logprobs():
  requests = requests_of()
  engine = make_engine(sampling=Sampling(1.0, top_k=3, top_p=0.9))
  played = run(engine, requests)
  for request in requests:
    tokens = request.tokens.tolist()
    turn = played[request.prompt_id, request.member][0]
    for token, logprob in zip(turn.tokens, turn.logprobs, strict=True):
      padded = np.zeros(CONTEXT, np.int32)
      padded[: len(tokens)] = tokens
      logits = np.asarray(next_logits(weights(), padded, len(tokens)))
      assert (logits > logits[token]).sum() < 3
      assert abs(jax.nn.log_softmax(logits)[token] - logprob) < 1e-4
      tokens.append(int(token))


def test_spans_follow_one_another():
  timeline = timeline_lib.Timeline()
  timeline.begin_step(0)
  run(make_engine(timeline=timeline), requests_of(), two_answers)
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
  engine = make_engine()
  with pytest.raises(ValueError, match=f'prompt_id=0 member=0: .*{match}'):
    engine.submit(dataclasses.replace(requests_of()[0], **change))
  assert engine.waiting == 0


def test_misuse_names_the_trajectory():
  engine = make_engine()
  request = dataclasses.replace(requests_of()[0], max_tokens=1)
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
    make_engine(**change)


def test_launch_before_publish_says_so():
  engine = engine_lib.Engine(
    CONFIG,
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
