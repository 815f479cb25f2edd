"""Parked trajectories make room: the same tokens, and slots never idle."""

import jax
import numpy as np
import pytest
import slow_rollout as slow

from thundersync_jax import mesh as mesh_lib
from thundersync_jax.rollout import eviction


class Late:
  """Answers a turn up to ten chunks later, so that others are ready."""

  def __init__(self, engine):
    self._engine = engine
    self._waiting = []  # (chunk at which it answers, turn, its number)
    self._chunks = 0
    self.played, self.most_away, self.idle = {}, 0, 0

  def run(self, requests, on_chunk=None):
    for request in requests:
      self._engine.submit(request)
    while self._engine.launch() or self._waiting:
      ready = self._engine.waiting + self._engine.active
      self.idle += ready > 0 and not self._engine.in_flight
      if on_chunk is not None:
        on_chunk(self._chunks)
      for turn in self._engine.harvest(block=True):
        turns = self.played.setdefault((turn.prompt_id, turn.member), [])
        turns.append(turn)
        late = self._chunks + 1 + 3 * ((turn.prompt_id + turn.member) % 4)
        self._waiting.append((late, turn, len(turns)))
      self._chunks += 1
      for entry in [e for e in self._waiting if e[0] <= self._chunks]:
        self._waiting.remove(entry)
        self._answer(*entry[1:])
      self.most_away = max(self.most_away, self._engine.away)
    return self.played

  def _answer(self, turn, number):
    observation = slow.two_answers(turn, number)
    if observation is None:
      self._engine.finish(turn.prompt_id, turn.member)
    else:
      self._engine.resume(
        turn.prompt_id, turn.member, observation, slow.MAX_TOKENS
      )


def expected():
  engine = slow.make_engine(slots=3, evict='never', **slow.ONE_BUCKET)
  return slow.run(engine, slow.requests_of(), slow.two_answers)


def test_moved_kv_give_the_same_tokens_bit_for_bit():
  engine = slow.make_engine(slots=3, evict='host', **slow.ONE_BUCKET)
  late = Late(engine)
  slow.same(expected(), late.run(slow.requests_of()))
  assert late.most_away > 3 and not late.idle
  counters = engine.counters
  assert counters.evictions > 3
  # Nothing was computed twice: each prompt once, each observation once.
  prompts = {r.prompt_id: len(r.tokens) - 1 for r in slow.requests_of()}
  assert counters.prompt_tokens == sum(prompts.values())
  assert counters.extend_tokens == sum(
    len(slow.two_answers(turn, number))
    for turns in late.played.values()
    for number, turn in enumerate(turns[:2], start=1)
  )
  assert engine.waiting == engine.active == engine.parked == engine.away == 0


@pytest.mark.parametrize('evict', ['recompute', 'host'])
def test_several_cache_lengths_give_the_same_to_rounding(evict):
  engine = slow.make_engine(slots=3, evict=evict)
  late = Late(engine)
  slow.same(expected(), late.run(slow.requests_of()), atol=1e-4)
  assert late.most_away > 3 and not late.idle
  fed = sum(len(t.tokens) for ts in late.played.values() for t in ts)
  again = engine.counters.extend_tokens > fed
  assert again == (evict == 'recompute')


def test_an_update_drops_moved_kv():
  """cases row 27: tokens are those of the weights of their version."""
  mesh = mesh_lib.make_mesh(jax.devices()[:1])
  engine = slow.make_engine(mesh=mesh, slots=3, evict='host')
  params, updates = [slow.weights(seed) for seed in range(3)], {6: 1, 12: 2}

  def update(chunk):
    if chunk in updates:
      version = updates[chunk]
      assert engine.away
      slow.publish(engine, mesh, params[version], version)

  requests = slow.requests_of()
  played = Late(engine).run(requests, on_chunk=update)
  for request in requests:
    turns = played[request.prompt_id, request.member]
    slow.check(request, turns, slow.two_answers, params=params)
  versions = {
    len(set(np.concatenate([t.policy_versions for t in turns])))
    for turns in played.values()
  }
  assert max(versions) > 1


def test_parked_slots_never_hold_up_a_request():
  """Every slot parked and requests waiting: the next launch decodes."""
  requests = slow.requests_of(prompts=3, members=2, max_tokens=1)
  for evict, decodes in (('host', True), ('never', False)):
    engine = slow.make_engine(slots=2, evict=evict)
    for request in requests:
      engine.submit(request)
    engine.launch()
    assert len(engine.harvest(block=True)) == 2
    assert (engine.parked, engine.active, engine.waiting) == (2, 0, 4)
    assert engine.launch() == decodes
    assert (engine.away, engine.waiting) == ((2, 2) if decodes else (0, 4))


def test_resumed_trajectories_come_before_requests_oldest_first():
  requests = slow.requests_of(prompts=4, members=1, max_tokens=1)
  more = slow.requests_of(prompts=9, members=1, max_tokens=1)[4:]
  engine = slow.make_engine(slots=1, evict='host')
  for request in requests:
    engine.submit(request)
  for _ in requests:
    engine.launch()
    engine.harvest(block=True)
  assert (engine.away, engine.parked, engine.waiting) == (3, 1, 0)
  for request in more:
    engine.submit(request)
  for prompt_id in (2, 0):  # not in the order of their age
    engine.resume(prompt_id, 0, np.ones(1, int), 1)
  order = []
  while engine.launch():
    for turn in engine.harvest(block=True):
      order.append(turn.prompt_id)
      engine.finish(turn.prompt_id, 0)
  assert order == [0, 2, 4, 5, 6, 7, 8]
  assert engine.away == 2
  for prompt_id in (1, 3):
    engine.finish(prompt_id, 0)
  assert engine.away == 0
  with pytest.raises(ValueError, match='prompt_id=1 member=0 is not here'):
    engine.finish(1, 0)


def test_evictions_compile_nothing_after_the_warm_up():
  compiled = []

  def count(event, seconds, **kwargs):
    if event == '/jax/core/compile/backend_compile_duration':
      compiled.append(event)

  engine = slow.make_engine(slots=3, evict='auto')
  assert engine.costs is None
  engine.warm_up()
  assert engine.costs.copy_bytes_per_s > 0
  assert engine.costs.extend_tokens_per_s > 0
  jax.monitoring.register_event_duration_secs_listener(count)
  try:
    for costs in ((1e30, 1.0), (1.0, 1e30)):  # moved, then recomputed
      engine.costs = eviction.Costs(*costs)
      late = Late(engine)
      late.run(slow.requests_of())
      assert late.most_away > 3
    assert not compiled
  finally:
    jax.monitoring.unregister_event_duration_listener(count)


def test_the_cheaper_way_by_hand():
  """1000 bytes at 100 a second take 10 s, as 50 tokens at 5 a second do."""
  costs = eviction.Costs(100.0, 5.0)
  assert eviction.keeps('auto', costs, 1000, 50)
  assert not eviction.keeps('auto', costs, 1000, 49)
  assert eviction.keeps('auto', None, 1000, 1)
  assert eviction.keeps('host', costs, 10**9, 1)
  assert not eviction.keeps('recompute', costs, 1, 10**9)
  with pytest.raises(ValueError, match="evict='often' does not exist"):
    slow.make_engine(evict='often')


def fork_run(evict, slots=3):
  """Two turns, then a third behind another context; what the model saw."""
  engine = slow.make_engine(slots=slots, evict=evict, **slow.ONE_BUCKET)
  contexts, played = {}, {}
  for request in slow.requests_of():
    engine.submit(request)
  while engine.launch():
    for turn in engine.harvest(block=True):
      key = turn.prompt_id, turn.member
      turns = played.setdefault(key, [])
      turns.append(turn)
      if len(turns) == 3:
        engine.finish(*key)
      elif len(turns) == 2:  # longer than the longest prompt bucket
        prompt = slow.requests_of()[3 * key[0]].tokens
        context = np.r_[prompt, np.arange(8, 20), turn.tokens]
        contexts[key] = context
        engine.fork(*key, context, slow.MAX_TOKENS)
      else:
        engine.resume(*key, np.arange(9, 12), slow.MAX_TOKENS)
  return engine, contexts, played


def test_a_fork_goes_on_behind_its_context_with_keys_of_its_own():
  """cases rows 19 and 41."""
  engine, contexts, played = fork_run('never')
  for (prompt_id, member), context in contexts.items():
    # The second row's keys are those of a member far behind the last.
    request = _Row(prompt_id, member + (1 << 20), 2, context)
    slow.check(request, [played[prompt_id, member][2]])
  # Another number of slots rounds otherwise.
  slow.same(played, fork_run('host', slots=1)[2], atol=1e-4)
  # K/V of what both begin with were kept, the last token is left to decode.
  fed = 0
  for key, context in contexts.items():
    prompt = slow.requests_of()[3 * key[0]].tokens
    first, second, _ = (turn.tokens for turn in played[key])
    before = np.r_[prompt, first, np.arange(9, 12), second]
    fed += 3 + len(context) - 1
    fed -= next(i for i, token in enumerate(context) if token != before[i])
  assert engine.counters.extend_tokens == fed


def next_turn(engine, prompt_id):
  """Decodes until that prompt's turn has ended; finishes the others."""
  while engine.launch():
    for turn in engine.harvest(block=True):
      if turn.prompt_id == prompt_id:
        return turn
      engine.finish(turn.prompt_id, turn.member)
  raise AssertionError('nothing is ready')


def test_an_evicted_trajectory_forks_as_one_in_its_slot_does():
  first, second = slow.requests_of(prompts=2, members=1, max_tokens=4)
  context, turns = np.r_[first.tokens, 9, 10, 11], []
  for away in (0, 1):
    engine = slow.make_engine(slots=1, evict='host', **slow.ONE_BUCKET)
    engine.submit(first)
    next_turn(engine, 0)
    if away:
      engine.submit(second)
      engine.launch()
    assert engine.away == away
    engine.fork(0, 0, context, slow.MAX_TOKENS)
    turns.append({(0, 0): [next_turn(engine, 0)]})
    assert engine.away == 0
    with pytest.raises(ValueError, match='context of 52 tokens.*= 51'):
      engine.fork(0, 0, np.ones(slow.CONTEXT, int), 1)
  slow.same(*turns)


class _Row:
  """What slow.check reads of a request, with a member past the limit."""

  max_tokens = slow.MAX_TOKENS

  def __init__(self, prompt_id, member, step, tokens):
    self.prompt_id, self.member, self.step = prompt_id, member, step
    self.tokens = tokens
