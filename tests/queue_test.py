"""Queue, accumulators and scheduler, one rule at a time, in token counts."""

import dataclasses

import numpy as np
import pytest
import random_steps

from thundersync_jax.learner import gradient_stream, packing
from thundersync_jax.objectives import advantages, aggregation
from thundersync_jax.streaming import queue

NBYTES = 2 * random_steps.VOCAB * 8
GRPO = advantages.ESTIMATORS['grpo']


def best_of_group(rewards):
  """As in pass@k training: only the best members count; not affine."""
  return (rewards == rewards.max()) - (rewards == rewards.max()).mean()


BEST = advantages.Estimator(best_of_group)


def make_stream(estimator=GRPO, learner=None, **changes):
  settings = {'max_open_groups': 4, 'max_in_flight': 1000}
  plan = gradient_stream.Plan(
    estimator, aggregation.AGGREGATIONS['token'], **settings | changes
  )
  learner = learner or random_steps.CountingLearner()
  return gradient_stream.GradientStream(learner, plan, pad_id=0, params=None)


def members(rewards, prompt_id=0, **changes):
  """The scored members of one group."""
  rng = np.random.default_rng(prompt_id)
  prompt = np.arange(1, 4, dtype=np.int32)
  return [
    random_steps.trajectory(rng, prompt_id, m, prompt, reward, **changes)
    for m, reward in enumerate(rewards)
  ]


def content(trajectory):
  return dataclasses.replace(trajectory, reward=None)


def put(stream, *trajectories):
  for trajectory in trajectories:
    stream.queue.put(trajectory)
  return stream.settle()


def launch_all(stream):
  """Launches what may start; returns how many launches that took."""
  count = stream.launches
  while stream.launch(0, None, None):
    pass
  return stream.launches - count


def finish(stream):
  gradient = stream.finish(0)[0]
  return gradient.total / gradient.denominator


def check(stream, step, estimator=GRPO):
  learner = random_steps.CountingLearner()
  want = learner.slow(step, estimator, aggregation.AGGREGATIONS['token'])
  np.testing.assert_allclose(finish(stream), want, atol=1e-12)


# --- Release classes ---------------------------------------------------------


def test_final_comes_before_known_before_content():
  stream = make_stream()
  stream.queue.open(0, [0, 1], 3)
  first, second = members([0.0, 1.0, 1.0], 0), members([1.0, 0.0, 1.0], 1)
  put(stream, content(second[2]), second[0], *first)
  order = []
  while (work := stream.scheduler.next(0)) is not None:
    order.append((work.release, work.group, len(work.items)))
    sinks = dict.fromkeys(work.sinks)
    for sink in sinks:
      if work.group is not None:
        tree = stream.accumulators.take(work.group, sink)
        stream.accumulators.give(work.group, sink, tree)
    stream.scheduler.launched(work, list(work.items))
  assert order == [('final', None, 3), ('known', 1, 1), ('content', 1, 1)]


@pytest.mark.parametrize(
  'granularity,starts',
  [('trajectory', [1, 1, 1]), ('group', [0, 1, 1]), ('batch', [0, 0, 2])],
)
def test_when_a_gradient_may_start(granularity, starts):
  """Starts after: one member; its group; all groups (which fill two rows)."""
  shapes = (packing.Shape(1, 14, 9),)
  learner = random_steps.CountingLearner(shapes=shapes)
  stream = make_stream(learner=learner, granularity=granularity)
  stream.queue.open(0, [0, 1], 2)
  (a, b), (c, d) = members([0.0, 1.0], 0), members([1.0, 0.0], 1)
  seen = []
  for arriving in ([a], [b], [c, d]):
    put(stream, *arriving)
    seen.append(min(launch_all(stream), 2))
  assert [bool(count) for count in seen] == [bool(count) for count in starts]
  check(stream, [a, b, c, d])


def test_batch_order_does_not_depend_on_arrival():
  """So a synchronous run is the same bit for bit when it is run again."""
  orders = []
  for seed in range(5):
    stream = make_stream(granularity='batch')
    stream.queue.open(0, [0, 1], 4)
    step = members([0.1, 0.7, 0.4, 0.3], 0) + members([0.2, 0.9, 0.6, 0.8], 1)
    put(stream, *np.random.default_rng(seed).permutation(np.array(step)))
    work = stream.scheduler.next(0)
    keys = [queue.member_key(item.trajectory) for item in work.items]
    orders.append((keys, [item.advantage for item in work.items]))
  assert all(order == orders[0] for order in orders)


def test_a_group_without_spread_is_not_launched():
  stream = make_stream()
  stream.queue.open(0, [0, 1], 2)
  equal, spread = members([0.3, 0.3], 0), members([0.0, 1.0], 1)
  put(stream, *equal, *spread)
  assert launch_all(stream) == 1
  assert stream.scheduler.launches == {'final': 2, 'known': 0, 'content': 0}
  assert [g.zero_variance for g in stream.queue.groups(0)] == [True, False]
  check(stream, equal + spread)


def test_dropped_groups_leave_the_denominator():
  stream = make_stream(drop_zero_variance=True)
  stream.queue.open(0, [0, 1], 2)
  equal, spread = members([0.3, 0.3], 0), members([0.0, 1.0], 1)
  put(stream, *equal, *spread)
  launch_all(stream)
  check(stream, spread)


def test_a_step_without_any_spread_has_a_gradient_of_zero():
  stream = make_stream(drop_zero_variance=True)
  stream.queue.open(0, [0], 2)
  put(stream, *members([0.3, 0.3]))
  assert not finish(stream).any()


# --- Bounds: work waits, it is never dropped ---------------------------------


def test_at_the_bound_of_groups_work_waits_for_its_group():
  stream = make_stream(max_open_groups=1)
  stream.queue.open(0, [0, 1], 2)
  (a, b), (c, d) = members([0.0, 1.0], 0), members([1.0, 0.0], 1)
  put(stream, a, c)
  launch_all(stream)
  assert stream.accumulators.open_groups == [0]
  put(stream, b)
  launch_all(stream)  # group 0 has closed: there is room for group 1
  assert stream.accumulators.open_groups == [1]
  put(stream, d)
  launch_all(stream)
  assert stream.scheduler.launches == {'final': 2, 'known': 2, 'content': 0}
  assert stream.accumulators.peak_groups == 1
  check(stream, [a, b, c, d])
  assert stream.accumulators.peak_groups == 0  # of the next step


def test_at_the_bound_of_bytes_content_waits():
  stream = make_stream(max_open_bytes=2 * NBYTES)
  stream.queue.open(0, [0], 4)
  step = members([0.0, 1.0, 1.0, 0.0])
  put(stream, *map(content, step))
  launch_all(stream)
  assert stream.scheduler.launches['content'] == 2
  assert stream.accumulators.peak_bytes == 2 * NBYTES
  put(stream, *step)
  launch_all(stream)
  assert stream.accumulators.peak_bytes == 2 * NBYTES
  check(stream, step)


def test_without_any_room_everything_is_final():
  stream = make_stream(max_open_bytes=NBYTES - 1)
  stream.queue.open(0, [0], 3)
  step = members([0.0, 1.0, 1.0])
  for trajectory in step:
    put(stream, content(trajectory))
    put(stream, trajectory)
    launch_all(stream)
  assert stream.scheduler.launches == {'final': 3, 'known': 0, 'content': 0}
  check(stream, step)


# --- Buckets and affine sums -------------------------------------------------


def test_buckets_turn_affine_at_max_buckets():
  stream = make_stream(max_buckets=2)
  stream.queue.open(0, [0], 5)
  step = members([0.0, 1.0, 0.0, 0.5, 0.25])
  sums = []
  for trajectory in step[:4]:
    put(stream, trajectory)
    launch_all(stream)
    sums.append(stream.accumulators.open_bytes // NBYTES)
  assert sums == [1, 2, 2, 2]
  assert stream.accumulators.known_sinks(0, 0.25) == ('sum', 'reward_sum')
  put(stream, step[4])
  launch_all(stream)
  check(stream, step)


def test_not_affine_streams_exactly_by_buckets():
  stream = make_stream(BEST, max_buckets=2)
  stream.queue.open(0, [0], 4)
  step = members([0.0, 1.0, 1.0, 0.0])
  for trajectory in step:
    put(stream, content(trajectory))
    launch_all(stream)
    put(stream, trajectory)
    launch_all(stream)
  assert stream.scheduler.launches['content'] == 4
  check(stream, step, BEST)


@pytest.mark.parametrize('known', [True, False])
@pytest.mark.parametrize('estimator,affine_sums', [(BEST, True), (GRPO, False)])
def test_too_many_rewards_without_affine_sums_is_an_error(
  estimator, affine_sums, known
):
  stream = make_stream(estimator, max_buckets=2, affine_sums=affine_sums)
  stream.queue.open(0, [0], 4)
  with pytest.raises(ValueError, match='group 0 .*max_buckets=2.*granularity'):
    for trajectory in members([0.0, 1.0, 0.5, 0.0]):
      if not known:
        put(stream, content(trajectory))
        launch_all(stream)
      put(stream, trajectory)
      launch_all(stream)


def test_neither_affine_nor_equal_cannot_stream_by_trajectory():
  ranks = advantages.Estimator(lambda r: r, equal_rewards=False)
  with pytest.raises(ValueError, match='granularity=group'):
    make_stream(ranks)
  assert make_stream(ranks, granularity='group')


def test_affine_sums_are_centred():
  """Rewards far from 0 cost no digits: (r - c) H, not the difference of two.

  Uncentred sums of rewards about 1000 in f32 have an error of 1e-4 here.
  """
  learner = random_steps.CountingLearner(dtype=np.float32)
  stream = make_stream(learner=learner, max_buckets=2, granularity='trajectory')
  stream.queue.open(0, [0], 8)
  rng = np.random.default_rng(0)
  step = members((1000 + rng.random(8)).tolist())
  put(stream, *step[:7])
  launch_all(stream)
  put(stream, step[7])
  launch_all(stream)
  want = learner.slow(step, GRPO, aggregation.AGGREGATIONS['token'])
  error = np.linalg.norm(finish(stream) - want) / np.linalg.norm(want)
  assert error < 5e-7


# --- Members that leave ------------------------------------------------------


def test_a_failed_member_leaves_its_group_and_is_counted():
  """cases rows 13, 14: its content sum is dropped, the others go on."""
  stream = make_stream()
  stream.queue.open(0, [0], 3)
  a, b, c = members([0.0, 1.0, 1.0])
  put(stream, content(b), a)
  launch_all(stream)
  assert stream.accumulators.open_bytes == 2 * NBYTES
  broken = dataclasses.replace(b, reward=None, failure='the tool broke')
  assert put(stream, broken) == []
  assert stream.accumulators.open_bytes == NBYTES
  assert [g.key for g in put(stream, c)] == [0]
  launch_all(stream)
  assert stream.queue.failures == {'the tool broke': 1}
  assert stream.queue.groups(0)[0].failures == {(0, 1): 'the tool broke'}
  check(stream, [a, c])


def test_a_group_that_fails_whole_closes():
  stream = make_stream()
  stream.queue.open(0, [0, 1], 2)
  bad = [dataclasses.replace(t, failure='x') for t in members([None, None], 0)]
  good = members([0.0, 1.0], 1)
  put(stream, *bad, *good)
  launch_all(stream)
  assert stream.step_complete(0)
  check(stream, good)


def test_a_truncated_member_is_masked_once():
  """cases row 10: when its environment is done, so nothing comes too late."""
  stream = make_stream(mask_truncated=True)
  stream.queue.open(0, [0], 2)
  cut = members([0.0], finish_reason='length')[0]
  put(stream, content(cut))
  group = stream.queue.groups(0)[0]
  assert not group.failures and launch_all(stream) == 0
  put(stream, cut)
  assert group.failures == {(0, 0): 'truncated'}
  assert stream.queue.failures == {'truncated': 1}


def test_a_trajectory_without_a_token_is_masked():
  stream = make_stream()
  stream.queue.open(0, [0], 2)
  empty = dataclasses.replace(members([1.0])[0], turns=())
  put(stream, empty)
  assert stream.queue.groups(0)[0].failures == {(0, 0): 'nothing sampled'}


def test_an_advantage_that_is_not_finite_never_gets_on():
  """cases row 14."""
  broken = advantages.Estimator(lambda r: r / 0.0)
  stream = make_stream(broken, granularity='group')
  stream.queue.open(0, [0], 2)
  with np.errstate(all='ignore'), pytest.raises(FloatingPointError, match='0'):
    put(stream, *members([0.0, 1.0]))


# --- Misuse ------------------------------------------------------------------


def test_an_open_group_refuses_the_barrier():
  stream = make_stream()
  stream.queue.open(0, [0], 2)
  a, b = members([0.0, 1.0])
  put(stream, a)
  launch_all(stream)
  with pytest.raises(ValueError, match='group 0 of step 0 is not finished'):
    stream.finish(0)
  with pytest.raises(ValueError, match=r'groups \[0\] are open'):
    stream.accumulators.finish()
  put(stream, b)  # closed, but b is not launched
  with pytest.raises(ValueError, match='group 0 of step 0 is not finished'):
    stream.finish(0)


def test_misuse_has_a_message():
  stream = make_stream()
  stream.queue.open(0, [0], 1)
  with pytest.raises(ValueError, match='group 0 is open already'):
    stream.queue.open(0, [0], 1)
  only = members([0.5])[0]
  put(stream, only)
  with pytest.raises(ValueError, match='came to a closed group'):
    put(stream, only)
  with pytest.raises(ValueError, match="granularity='token'"):
    make_stream(granularity='token')
  with pytest.raises(ValueError, match='max_buckets=1'):
    make_stream(max_buckets=1)


def test_groups_of_each_scope():
  names = {'trajectory': 4, 'group': 2, 'batch': 1}
  for scope, count in names.items():
    arriving = queue.TrajectoryQueue(scope)
    arriving.open(5, [0, 1], 2)
    sizes = [group.size for group in arriving.groups(5)]
    assert len(sizes) == count and sum(sizes) == 4
    assert len(arriving.open_groups()) == count and not arriving.groups(4)
