"""The engine against a slow loop: one full forward pass a token, no cache."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import slow_rollout as slow

from thundersync_jax import mesh as mesh_lib
from thundersync_jax.rollout import engine as engine_lib
from thundersync_jax.types import Sampling


@pytest.mark.parametrize('temperature', [0.0, 0.8])
def test_tokens_and_logprobs_equal_the_slow_loop(temperature):
  """cases row 5: more trajectories than slots, prompts of 1 to 7 tokens."""
  engine = slow.make_engine(sampling=Sampling(temperature))
  requests = slow.requests_of()
  played = slow.run(engine, requests)
  for request in requests:
    turns = played[request.prompt_id, request.member]
    slow.check(request, turns, temperature=temperature)
  tokens = [len(turns[0].tokens) for turns in played.values()]
  assert engine.counters.tokens == sum(tokens)
  assert engine.waiting == engine.active == engine.parked == 0


def test_three_turns_with_observations_equal_the_slow_loop():
  """cases rows 5 and 18: the ids fed to the model over parked slots."""
  engine = slow.make_engine()
  requests = slow.requests_of()
  played = slow.run(engine, requests, slow.two_answers)
  for request in requests:
    turns = played[request.prompt_id, request.member]
    assert len(turns) == 3
    slow.check(request, turns, slow.two_answers)
  reasons = {turn.finish_reason for turns in played.values() for turn in turns}
  assert reasons >= {'stop', 'length'}


def test_resume_feeds_the_observation_and_no_prompt_again():
  engine = slow.make_engine()
  requests = slow.requests_of()
  played = slow.run(engine, requests, slow.two_answers)
  prompts = {request.prompt_id: request.tokens for request in requests}
  assert engine.counters.prompt_tokens == sum(
    len(tokens) - 1 for tokens in prompts.values()
  )
  # The last sampled token goes in with its observation, unless that is empty.
  assert engine.counters.extend_tokens == sum(
    len(slow.two_answers(turn, number))
    for turns in played.values()
    for number, turn in enumerate(turns[:2], start=1)
  )


def test_order_of_arrival_and_other_rows_do_not_matter():
  """Bit for bit, as long as the cache has one length."""
  requests = slow.requests_of()
  expected = slow.run(
    slow.make_engine(**slow.ONE_BUCKET), requests, slow.two_answers
  )
  order = np.random.default_rng(0).permutation(len(requests))
  permuted = [requests[i] for i in order]
  slow.same(
    expected,
    slow.run(slow.make_engine(**slow.ONE_BUCKET), permuted, slow.two_answers),
  )
  alone = slow.run(
    slow.make_engine(**slow.ONE_BUCKET), requests[4:5], slow.two_answers
  )
  slow.same({key: expected[key] for key in alone}, alone)


def test_chunk_length_and_cache_buckets_do_not_change_tokens():
  """Sums over caches of other lengths may round otherwise, by about 1e-6."""
  requests = slow.requests_of()
  expected = slow.run(slow.make_engine(), requests, slow.two_answers)
  changes = {'chunk': 16, 'cache_buckets': (slow.CONTEXT,)}
  played = slow.run(slow.make_engine(**changes), requests, slow.two_answers)
  slow.same(expected, played, atol=1e-5)


def test_members_prompts_and_steps_sample_differently():
  """cases row 41: one prompt, so only the keys tell trajectories apart."""
  tokens = np.arange(8, 12)
  requests = [
    engine_lib.Request(prompt_id, member, 0, tokens, 12)
    for prompt_id in range(3)
    for member in range(4)
  ]
  later = [dataclasses.replace(request, step=1) for request in requests]
  engine = slow.make_engine(stop_ids=())
  texts = {
    turns[0].tokens.tobytes()
    for batch in (requests, later)
    for turns in slow.run(engine, batch).values()
  }
  assert len(texts) == 24
  assert engine.counters.prompt_tokens == 2 * (len(tokens) - 1)


@pytest.mark.parametrize('in_flight', [False, True])
def test_a_weight_update_equals_a_cold_cache(in_flight):
  """cases row 27: active, parked and waiting trajectories, new weights."""
  mesh = mesh_lib.make_mesh(jax.devices()[:1])
  engine, played = slow.make_engine(mesh=mesh), {}
  params = [slow.weights(seed) for seed in range(4)]
  requests, parked = slow.requests_of(), 0
  for request in requests:
    engine.submit(request)
  for version in (1, 2, 3):
    for _ in range(3):
      slow.advance(engine, played, slow.two_answers)
    ended = [] if in_flight else engine.harvest(block=True)
    parked += engine.parked
    slow.publish(engine, mesh, params[version], version)
    slow.reply(engine, played, slow.two_answers, ended)
  while slow.advance(engine, played, slow.two_answers):
    pass
  for request in requests:
    turns = played[request.prompt_id, request.member]
    slow.check(request, turns, slow.two_answers, params=params)
  assert (parked > 0) != in_flight
  mixed = [
    len(set(np.concatenate([turn.policy_versions for turn in turns])))
    for turns in played.values()
  ]
  assert max(mixed) > 1


def test_max_context_ends_a_turn():
  request = engine_lib.Request(0, 0, 0, np.arange(8, 12), slow.CONTEXT)
  engine = slow.make_engine(stop_ids=())
  (turn,) = slow.run(engine, [request])[0, 0]
  assert turn.finish_reason == 'context'
  assert len(request.tokens) + len(turn.tokens) == slow.CONTEXT
  before = [*request.tokens, *turn.tokens[:-1]]
  logits = slow.next_logits(slow.weights(), before)
  logprob = jax.nn.log_softmax(logits)[turn.tokens[-1]]
  assert abs(turn.logprobs[-1] - logprob) < 1e-4


def test_the_end_token_is_returned_also_when_it_pads():
  """cases row 9: a stop id of 0 is the padding of every program here."""
  bias = slow.weights()['head'].at[0].mul(3)
  params = slow.weights() | {'head': bias}
  engine = slow.make_engine(stop_ids=(0, slow.STOP), params=params)
  requests = slow.requests_of()
  played = slow.run(engine, requests)
  stops = 0
  for turns in played.values():
    ends = [token in (0, slow.STOP) for token in turns[0].tokens.tolist()]
    assert not any(ends[:-1])
    assert ends[-1] == (turns[0].finish_reason == 'stop')
    assert (turns[0].logprobs < 0).all()
    stops += int(turns[0].tokens[-1] == 0)
  assert stops


def test_the_second_device_gives_the_same_tokens():
  requests = slow.requests_of()
  engine = slow.make_engine(device=1, **slow.ONE_BUCKET)
  played = slow.run(engine, requests, slow.two_answers)
  slow.same(
    slow.run(slow.make_engine(**slow.ONE_BUCKET), requests, slow.two_answers),
    played,
  )
  cache = jax.tree.leaves(engine._device._cache)
  assert {d for x in cache for d in x.devices()} == {jax.devices()[1]}


@pytest.mark.parametrize('axes', [{'fsdp': 2}, {'fsdp': 1, 'tensor': 2}])
def test_a_sharded_mesh_gives_the_same_tokens(axes):
  mesh = mesh_lib.make_mesh(jax.devices()[:2], **axes)
  requests = slow.requests_of()
  played = slow.run(
    slow.make_engine(mesh=mesh, slots=4, **slow.ONE_BUCKET),
    requests,
    slow.two_answers,
  )
  for request in requests:
    turns = played[request.prompt_id, request.member]
    slow.check(request, turns, slow.two_answers)


def test_bf16_weights_and_cache_stay_close():
  config = dataclasses.replace(slow.CONFIG, compute_dtype='bfloat16')
  params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), slow.weights())
  engine = slow.make_engine(
    config=config, params=params, dtype='bfloat16', **slow.ONE_BUCKET
  )
  requests = slow.requests_of()
  played = slow.run(engine, requests)
  errors = []
  for request in requests:
    tokens = request.tokens.tolist()
    (turn,) = played[request.prompt_id, request.member]
    for token, logprob in zip(turn.tokens, turn.logprobs, strict=True):
      logits = slow.next_logits(slow.weights(), tokens)
      errors.append(abs(jax.nn.log_softmax(logits)[token] - logprob))
      tokens.append(int(token))
  # bf16 has 8 bits: about 1 % of logits that reach 10.
  assert 1e-4 < np.mean(errors) < 0.1


def test_top_k_and_top_p_keep_untruncated_logprobs():
  requests = slow.requests_of()
  engine = slow.make_engine(sampling=Sampling(1.0, top_k=3, top_p=0.9))
  played = slow.run(engine, requests)
  for request in requests:
    tokens = request.tokens.tolist()
    (turn,) = played[request.prompt_id, request.member]
    for token, logprob in zip(turn.tokens, turn.logprobs, strict=True):
      logits = np.asarray(slow.next_logits(slow.weights(), tokens))
      assert (logits > logits[token]).sum() < 3
      assert abs(jax.nn.log_softmax(logits)[token] - logprob) < 1e-4
      tokens.append(int(token))
