"""The cost model of plans, by hand, and the ledger's rows, without a device."""

import dataclasses

import numpy as np
import pytest

from thundersync_jax.streaming import turn_gradients, turn_pieces, turn_plans
from thundersync_jax.types import Trajectory, Turn

COSTS = turn_plans.Costs(layers=1.0, teacher=2.0, heads=0.5)
LENGTHS = turn_plans.Lengths(tokens=100, entries=40, turns=4, last=25)


@pytest.mark.parametrize(
  ('spare', 'best'), [(0, 'close'), (100, 'forward'), (225, 'turn')]
)
def test_the_more_time_there_is_the_more_is_done_early(spare, best):
  """close 200 + 60 + 300; forward 300 late, 360 early; turn 225, 560."""
  step = turn_plans.Step(trajectories=10, spare_s=spare)
  found = turn_plans.delays(COSTS, COSTS, LENGTHS, step)
  assert found == {
    'close': 560.0,
    'forward': 300.0 + 10 * max(0, 100 - spare),
    'turn': 225.0 + 10 * max(0, 225 - spare),
  }
  assert min(found, key=found.get) == best


def test_members_share_the_prompt_of_their_pieces():
  """A prompt of 80 of 8 members: whole 80 x 5; pieces 10 x 3 and 10 x 3."""
  lengths = dataclasses.replace(LENGTHS, prompt=80)
  step = turn_plans.Step(trajectories=1, members=8)
  found = turn_plans.delays(COSTS, COSTS, lengths, step)
  assert found == {'close': 960.0, 'forward': 330.0, 'turn': 255.0}
  slow = COSTS.scaled(2.0)
  found = turn_plans.delays(COSTS, slow, lengths, step)
  assert found['close'] == 960.0
  assert found['turn'] == 2 * 255 + (2 * (255 + 590) - 960)


def test_a_planner_learns_times_and_speed():
  planner = turn_plans.Planner('auto', COSTS, ('forward', 'turn'))
  made = trajectory(0, 0, turns=4)
  assert planner.choose(made, ended=False) == 'close'  # no time is known
  planner.ended(made)
  planner.stepped(8, 8, first_s=0.0, rollout_s=8000.0)
  assert planner.choose(made, ended=False) == 'turn'
  assert planner.choose(made, ended=True) == 'close'
  planner.stepped(8, 8, first_s=0.0, rollout_s=10.0)  # the learner is the limit
  planner.pieces = COSTS.scaled(10.0)
  assert planner.choose(made, ended=False) == 'close'
  planner.measured(False, 1.0, 1.0)
  for _ in range(200):
    planner.measured(True, 2.0 * planner.whole.layers, planner.whole.layers)
    assert planner.whole.layers > COSTS.layers
  assert planner.pieces == COSTS.scaled(10.0)
  fresh = turn_plans.Planner('auto', COSTS, ('turn',))
  fresh.measured(True, 2.0, 1.0)  # no piece is measured: as fast as the rest
  assert fresh.pieces == fresh.whole == COSTS.scaled(1.1)
  fixed = turn_plans.Planner('forward', COSTS, ('forward',))
  assert fixed.choose(made, ended=True) == 'forward'


def trajectory(prompt_id, member, turns):
  mask = np.array([True, True, False])
  turn = Turn(
    np.arange(3, dtype=np.int32),
    mask,
    np.where(mask, -1.0, 0.0).astype(np.float32),
    np.zeros(3, np.int32),
    'stop',
  )
  prompt = np.arange(5, dtype=np.int32)
  return Trajectory(prompt_id, member, 0, prompt, (turn,) * turns, 1.0)


def drain(ledger):
  """Launches all that may start; returns (kind, plan, keys) of each."""
  seen = []
  while work := ledger.next(0):
    ledger.launched(work, work.pieces or work.items)
    keys = [piece.key for piece in work.pieces]
    keys += [(i.trajectory.prompt_id, i.trajectory.member) for i in work.items]
    seen.append((work.kind, work.plan, keys))
  return seen


def test_a_ledger_by_hand():
  """One row: the second member closes whole; the prompt goes once, last."""
  limits = turn_pieces.Limits(1, 1, 8, 8, 16)
  ledger = turn_gradients.Ledger(limits, lambda trajectory, ended: 'turn')
  ledger.open(0, [7], 2)
  ledger.turn_ended(trajectory(7, 0, turns=1))
  ledger.turn_ended(trajectory(7, 1, turns=1))
  assert drain(ledger) == [
    ('feed_prompt', '', [(7, -1)]),
    ('feed', 'turn', [(7, 0)]),
  ]
  ledger.turn_ended(trajectory(7, 0, turns=2))
  assert drain(ledger) == [('feed', 'turn', [(7, 0)])]
  ledger.ended(trajectory(7, 0, turns=2))
  assert drain(ledger) == [('unwind', 'turn', [(7, 0)])]
  assert ledger.open_rows == 0 and not ledger.complete(0)
  with pytest.raises(ValueError, match='step 0 still has open'):
    ledger.retire(0)
  ledger.ended(trajectory(7, 1, turns=3))
  assert drain(ledger) == [
    ('close', 'close', [(7, 1)]),
    ('unwind_prompt', '', [(7, -1)]),
  ]
  assert ledger.complete(0)
  assert [len(t.turns) for t in ledger.retire(0)] == [2, 3]
  assert ledger.plans == {'turn': 1, 'close': 1}


def test_pieces_feed_every_position_once():
  """[4, ...) in order; a sampled token is predicted by the one before it."""
  limits = turn_pieces.Limits(1, 1, 4, 2, 16)
  row = trajectory(0, 0, turns=3).rows[0]
  ids = np.concatenate([row.prompt_tokens, row.tokens])
  place, start, sources = turn_pieces.Place(0, 1, 4), 4, []
  while start < turn_pieces.stop(row):
    end = turn_pieces.cut(row, start, limits)
    piece = turn_pieces.fed((0, 0), row, place, start, end)
    assert 0 < len(piece.tokens) <= 4 and len(piece.sources) <= 2
    np.testing.assert_array_equal(piece.tokens, ids[start:end])
    np.testing.assert_array_equal(piece.targets, ids[start + piece.sources + 1])
    sources += list(start + piece.sources)
    start = piece.stop
  assert sources == [4, 5, 7, 8, 10, 11]  # before 5, 6, 8, 9, 11, 12
  assert start == 12
