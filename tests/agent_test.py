"""The turn loop: the ids that the model saw, over several turns."""

import functools
import threading

import agent_play
import jax
import jax.numpy as jnp
import numpy as np

from thundersync_jax.envs import toy
from thundersync_jax.learner import gradients, packing
from thundersync_jax.models import transformer
from thundersync_jax.types import Item


class Recorded:
  """An environment and the conversation that it sees."""

  def __init__(self, environment):
    self._environment = environment
    self.max_turns = environment.max_turns
    self.conversation, self.observations = [], []
    self.closed = 0

  def reset(self, task):
    messages = self._environment.reset(task)
    self.conversation += messages
    return messages

  def step(self, text):
    self.conversation.append({'role': 'assistant', 'content': text})
    result = self._environment.step(text)
    self.conversation += result.messages
    self.observations.append(result.messages)
    return result

  def close(self):
    self.closed += 1
    self._environment.close()


@jax.jit
def dense_logprobs(params, ids):
  """log_softmax(logits / T) of every token that has one before it."""
  positions = jnp.arange(len(ids))[None]
  ones = jnp.ones_like(positions)
  hidden = transformer.forward(
    agent_play.CONFIG, params, ids[None], positions, ones, 0 * ones
  )
  logits = hidden[0] @ transformer.head(params).T
  logprobs = jax.nn.log_softmax(logits / agent_play.TEMPERATURE)
  return logprobs[jnp.arange(len(ids) - 1), ids[1:]]


@jax.jit
def packed_logprobs(params, batch):
  return gradients.entry_logprobs(
    agent_play.CONFIG, params, batch, agent_play.TEMPERATURE
  )[0]


def guess_tasks(count):
  """Tasks of a wide range, so that few are found at once."""
  stream = toy.make_guess_tasks(1, 'train', max_turns=5, max_letters=20)
  wide = (t for t in stream if ord(t['high']) - ord(t['low']) > 8)
  return [next(wide) for _ in range(count)]


@functools.cache
def games():
  """Six groups of two games on four slots, and their environments."""
  made = []

  def maker():
    settings = toy.GuessSettings(max_turns=5, latency_s=0.02)
    made.append(Recorded(toy.GuessEnvironment(settings)))
    return made[-1]

  agent, events, parked = agent_play.play(
    [maker] * 12, agent_play.limits_of(), size=2, tasks=guess_tasks(6)
  )
  assert parked and not agent.failures
  assert [env.closed for env in made] == [1] * 13
  played = [list_of[-1] for list_of in events.values()]
  turns = [len(trajectory.turns) for trajectory in played]
  assert max(turns) == 5 and sum(n >= 3 for n in turns) >= 4
  return agent, played, made[1:]


def test_recorded_logprobs_are_those_of_the_stored_ids():
  """cases rows 5, 6, 8 and 18: three and more turns, parked in between."""
  _, played, _ = games()
  for trajectory in played:
    mask, prompt = trajectory.loss_mask, trajectory.prompt_tokens
    ids = np.zeros(agent_play.CONTEXT, np.int32)
    used = np.r_[prompt, trajectory.tokens]
    ids[: len(used)] = used
    dense = np.asarray(dense_logprobs(agent_play.weights(), ids))
    dense = dense[len(prompt) - 1 : len(used) - 1]
    recorded = trajectory.behaviour_logprobs
    assert np.abs(recorded - dense)[mask].max() < 1e-4
    assert not recorded[~mask].any()
    # A fresh sample has the ratio 1 at the learner too, at this temperature.
    batch, _, _ = packing.pack(
      [Item(trajectory)],
      [packing.Shape(1, agent_play.CONTEXT, 32)],
      lambda n: 1.0,
      0,
    )
    packed = np.asarray(packed_logprobs(agent_play.weights(), batch))[
      batch.weights > 0
    ]
    np.testing.assert_allclose(packed, recorded[mask], atol=1e-4)


def test_the_mask_is_on_sampled_tokens_exactly():
  """cases rows 8 and 31: what the environment said is known, so is the rest."""
  _, played, environments = games()
  reasons = set()
  for trajectory, environment in zip(played, environments, strict=True):
    pairs = zip(trajectory.turns, environment.observations, strict=True)
    for turn, messages in pairs:
      sampled = int(turn.loss_mask.sum())
      assert turn.loss_mask[:sampled].all() and 1 <= sampled <= 6
      text, behind = turn.tokens[:sampled], turn.tokens[sampled:]
      stopped = int(text[-1]) == agent_play.END
      reasons.add(turn.finish_reason)
      assert turn.finish_reason == ('stop' if stopped else 'length')
      assert agent_play.END not in text[:-1]
      expected = []
      if messages:
        expected = agent_play.BYTES.apply_chat_template(messages).tolist()
        expected = expected if stopped else [agent_play.END, *expected]
      assert behind.tolist() == expected
      np.testing.assert_array_equal(
        turn.policy_versions, np.where(turn.loss_mask, 0, -1)
      )
    arrays = (
      trajectory.loss_mask,
      trajectory.behaviour_logprobs,
      trajectory.policy_versions,
    )
    assert {len(x) for x in arrays} == {len(trajectory.tokens)}
  assert reasons == {'stop', 'length'}


def test_tokens_are_the_templates_own_rendering():
  """cases row 18: the whole conversation, rendered once at its end."""
  _, played, environments = games()
  for trajectory, environment in zip(played, environments, strict=True):
    rendered = agent_play.BYTES.apply_chat_template(
      environment.conversation, add_generation_prompt=False
    ).tolist()
    stored = [*trajectory.prompt_tokens.tolist(), *trajectory.tokens.tolist()]
    if trajectory.turns[-1].finish_reason != 'stop':
      stored.append(agent_play.END)  # the only token that the model owed
    assert stored == rendered


def test_each_prompt_is_prefilled_once():
  agent, played, _ = games()
  prompts = {t.prompt_tokens.tobytes(): len(t.prompt_tokens) for t in played}
  counters = agent.engine.counters
  assert counters.prompt_tokens == sum(n - 1 for n in prompts.values())
  assert counters.tokens == sum(t.num_sampled for t in played)
  observed = sum((~t.loss_mask).sum() for t in played)
  assert counters.extend_tokens == observed


def test_rewards_are_those_of_the_environments():
  _, played, environments = games()
  for trajectory, environment in zip(played, environments, strict=True):
    again = toy.make_guess(max_turns=5)
    again.reset(guess_tasks(6)[trajectory.prompt_id])
    texts = [
      message['content']
      for message in environment.conversation
      if message['role'] == 'assistant'
    ]
    results = [again.step(text) for text in texts]
    assert [result.done for result in results].index(True) == len(texts) - 1
    assert trajectory.reward == results[-1].reward


def test_content_comes_before_its_reward():
  """Gradients can start while the environment grades; the slot is free."""
  maker = functools.partial(toy.make, latency_s=0.05)
  tasks = [{'key': str(i), 'question': 'ab'} for i in range(6)]
  _, events, parked = agent_play.play(
    [maker] * 6, agent_play.limits_of(), tasks=tasks
  )
  assert parked == 0
  for content, final in events.values():
    assert (content.reward, content.failure) == (None, None)
    np.testing.assert_array_equal(content.tokens, final.tokens)
    text = agent_play.BYTES.decode(final.tokens)
    assert final.reward == float(len(text) > 0)  # every letter earns


def test_ended_turns_are_there_while_the_environment_works():
  """Each turn but the last one, which advance returns, is handed out once."""
  maker = functools.partial(agent_play.Talker, turns=3, max_turns=3)
  seen = {}
  _, events, _ = agent_play.play(
    [maker] * 6, agent_play.limits_of(), on_turns=seen
  )
  assert seen.keys() == events.keys()
  for key, snapshots in seen.items():
    final = events[key][-1]
    assert [len(s.turns) for s in snapshots] == [1, 2]
    for s in snapshots:
      assert s.reward is None and s.failure is None
      n = len(s.turns) - 1
      assert s.turns[:n] == final.turns[:n]
      sampled = s.turns[n].tokens
      np.testing.assert_array_equal(
        sampled, final.turns[n].tokens[: len(sampled)]
      )
      assert s.turns[n].loss_mask.all()
      assert s.turns[n].finish_reason == final.turns[n].finish_reason


class Counted(agent_play.Talker):
  """Knows how many of its kind are between reset and their last answer."""

  lock, now, most = threading.Lock(), 0, 0

  def reset(self, task):
    with self.lock:
      Counted.now += 1
      Counted.most = max(Counted.most, Counted.now)
    return super().reset(task)

  def step(self, text):
    result = super().step(text)
    with self.lock:
      Counted.now -= result.done
    return result


def test_max_live_starts_whole_groups_and_changes_no_token():
  """Five are allowed, so two groups of two; all twelve without a limit."""
  maker = functools.partial(Counted, turns=2)
  runs, most = [], []
  for limit in (5, 0):
    Counted.most = 0
    _, events, _ = agent_play.play(
      [maker] * 12, agent_play.limits_of(), size=2, max_live=limit
    )
    runs.append(events)
    most.append(Counted.most)
    assert Counted.now == 0
  assert most[0] <= 4 < most[1] <= 12
  for key, made in runs[0].items():
    other = runs[1][key][-1]
    np.testing.assert_array_equal(made[-1].tokens, other.tokens)
    np.testing.assert_array_equal(
      made[-1].behaviour_logprobs, other.behaviour_logprobs
    )
