"""Episodes on a node: turns drawn by the engine, answered by the sandbox, and put together as the coordinator will."""

from __future__ import annotations

import numpy as np
import pytest

from echo2.coordinator.simulated_model import STOP, race_turn, simulated_text
from echo2.node import episodes
from echo2.node.engine import EngineFailed, OrderRefused
from echo2.node.episodes import play_slices
from echo2.node.fake_engine import FakeEngine
from echo2.p2p.codec import pack_tokens, unpack_logprobs, unpack_tokens
from echo2.p2p.messages import Lease, Sampling, Sandboxed
from echo2.tasks.episode import Claim, EpisodeRules, actions_of, fault, replay
from echo2.tasks.race import Race
from echo2.tasks.sandbox import environment_seed
from echo2.tasks.scorer import InlineScorer, PlayItem, ScorerUnavailable
from echo2.tasks.scorer_wire import failed_play

HASH = bytes(32)


def lease(number, *, first=0, count=4, tokens_max=40, turn_tokens_max=5, task="race", options="{}"):
    seed = bytes([number]) * 32
    opening = Race().sandbox().reset(environment_seed(seed)).text
    return Lease(
        lease_id=bytes([number]) * 16,
        kind="train",
        ordinal=number,
        sample_first=first,
        sample_count=count,
        seed=seed,
        manifest_hash=HASH,
        version=0,
        prompt_tokens=pack_tokens(simulated_text().encode(opening)),
        sampling=Sampling(temperature=1.0, tokens_max=tokens_max, stop_ids=(STOP,)),
        duration_seconds=60.0,
        sandbox=Sandboxed(task=task, options_json=options, turns_max=5, turn_tokens_max=turn_tokens_max),
    )


def rules(one):
    return EpisodeRules(
        tokens_max=one.sampling.tokens_max,
        turns_max=one.sandbox.turns_max,
        turn_tokens_max=one.sandbox.turn_tokens_max,
        stop_ids=(STOP,),
    )


class Recording(FakeEngine):
    """Plays the race by the rules, and keeps what was ordered."""

    def __init__(self):
        super().__init__(rollout_seconds=0.0, tokens=self.turn)
        self.loaded = HASH
        self.calls = []

    @staticmethod
    def turn(order, sample):
        return race_turn(order.seed, sample, order.drawn, order.prompt_tokens, order.sampling.tokens_max)

    async def generate(self, slices):
        self.calls.append(list(slices))
        return await super().generate(slices)


async def judged(one, rollout):
    """As the coordinator will: (replayed episode or why not, the environment's word)."""
    claim = Claim(tuple(unpack_tokens(rollout.tokens).tolist()), rollout.spans, rollout.finish)
    found = fault(claim, rules(one))
    if found:
        return found, None
    actions = tuple(actions_of(claim, rules(one), simulated_text()))
    (play,) = await InlineScorer().play(
        [PlayItem("race", environment_seed(one.seed), actions, claim.finish == "length")]
    )
    answers = play.observations[1 : 1 + len(actions)]
    done = play.done and len(play.observations) == 1 + len(actions)
    return replay(claim, rules(one), simulated_text(), answers, done=done), play


async def test_what_a_node_plays_replays_to_the_token():
    """Thirty-two episodes of four groups: inserted tokens, spans, end and reward are what the coordinator finds."""
    leases = [lease(number, count=8) for number in range(4)]
    results = await play_slices(leases, Recording(), InlineScorer(), simulated_text())
    turns = set()
    for one, result in zip(leases, results, strict=True):
        assert [rollout.sample for rollout in result.rollouts] == list(range(8))
        for rollout in result.rollouts:
            again, play = await judged(one, rollout)
            assert not isinstance(again, str), again
            assert rollout.reward == play.reward
            turns.add(len(again.actions))
    assert len(turns) > 2, "games of several lengths"


async def test_logprobs_are_of_drawn_tokens_and_0_for_inserted_ones():
    """One number a token."""
    (result,) = await play_slices([lease(1, count=8)], Recording(), InlineScorer(), simulated_text())
    assert any(rollout.spans for rollout in result.rollouts)
    for rollout in result.rollouts:
        spans = rollout.spans or (len(rollout.tokens) // 4,)
        drawn = np.repeat(np.arange(len(spans)) % 2 == 0, spans)
        assert unpack_logprobs(rollout.logprobs).tolist() == np.where(drawn, -1.0, 0.0).tolist()


async def test_samples_advance_together_and_the_first_turn_shares_its_prompt():
    """One call a turn: at first an order a slice, then an order a sample, its history behind the prompt, t going on."""
    engine = Recording()
    leases = [lease(1), lease(2, first=4, count=2)]
    results = await play_slices(leases, engine, InlineScorer(), simulated_text())
    first, second = engine.calls[:2]
    assert [(order.sample_first, order.sample_count, order.drawn) for order in first] == [(0, 4, 0), (4, 2, 0)]
    assert all(order.sample_count == 1 for order in second)
    by_key = {(one.seed, r.sample): r for one, result in zip(leases, results, strict=True) for r in result.rollouts}
    for order in second:
        rollout = by_key[order.seed, order.sample_first]
        prompt = next(one.prompt_tokens for one in leases if one.seed == order.seed)
        assert order.prompt_tokens == prompt + rollout.tokens[: 4 * sum(rollout.spans[:2])]
        assert order.drawn == rollout.spans[0]


async def test_the_same_leases_give_the_same_episodes_however_they_are_cut():
    """Samples of a group in two slices, or in one."""
    whole = await play_slices([lease(1, count=6)], Recording(), InlineScorer(), simulated_text())
    parts = await play_slices(
        [lease(1, count=2), lease(1, first=2, count=4)], Recording(), InlineScorer(), simulated_text()
    )
    assert list(whole[0].rollouts) == [rollout for part in parts for rollout in part.rollouts]


@pytest.mark.parametrize(("tokens_max", "turn_tokens_max"), [(1, 5), (3, 5), (8, 5), (9, 5), (40, 2), (40, 3)])
async def test_tight_bounds_end_episodes_as_the_rules_say(tokens_max, turn_tokens_max):
    """Cut turns and answers that do not fit: still the coordinator agrees."""
    one = lease(3, count=8, tokens_max=tokens_max, turn_tokens_max=turn_tokens_max)
    (result,) = await play_slices([one], Recording(), InlineScorer(), simulated_text())
    for rollout in result.rollouts:
        again, play = await judged(one, rollout)
        assert not isinstance(again, str), again
        if play.done:
            assert rollout.reward == play.reward


async def test_long_histories_go_to_the_engine_in_several_calls(monkeypatch):
    """A call holds a bounded number of bytes; the results are the same."""
    expected = await play_slices([lease(1), lease(2)], Recording(), InlineScorer(), simulated_text())
    monkeypatch.setattr(episodes, "ORDERS_BYTES_MAX", 60)
    engine = Recording()
    assert await play_slices([lease(1), lease(2)], engine, InlineScorer(), simulated_text()) == expected
    assert max(len(call) for call in engine.calls) <= 2


@pytest.mark.parametrize(
    ("task", "options", "why"),
    [
        ("file", '{"path":"/etc/passwd"}', "no sandbox 'file'"),
        ("arithmetic", "{}", "no sandbox 'arithmetic'"),
        ("chess", "{}", "install the one"),
        ("race", '{"target":1000}', "target"),
        ("race", "[1]", "options"),
    ],
)
async def test_a_node_plays_only_sandboxes_of_its_own_release(task, options, why):
    """Nothing that a lease names is opened or run but those; the lease is refused, not the node."""
    with pytest.raises(OrderRefused, match=why):
        await play_slices([lease(1, task=task, options=options)], Recording(), InlineScorer(), simulated_text())


class Flaky(InlineScorer):
    """Fails so often, then plays."""

    def __init__(self, failures):
        super().__init__()
        self.failures = failures

    async def play(self, items):
        plays = await super().play(items)
        if self.failures and items[0].actions:
            self.failures -= 1
            return [failed_play("the scorer took longer than 2 s", play.observations[:1]) for play in plays]
        return plays


async def test_a_sandbox_that_fails_once_is_asked_again():
    """A busy machine is no reason to lose an episode."""
    expected = await play_slices([lease(1)], Recording(), InlineScorer(), simulated_text())
    assert await play_slices([lease(1)], Recording(), Flaky(1), simulated_text()) == expected


async def test_a_sandbox_that_fails_for_good_ends_the_episode_with_nothing():
    """As it will at the coordinator."""
    (result,) = await play_slices([lease(1)], Recording(), Flaky(10**6), simulated_text())
    assert [(rollout.reward, rollout.spans) for rollout in result.rollouts] == [(0.0, ())] * 4


async def test_a_process_that_does_not_start_is_the_engines_failure():
    """The leases wait: nothing was said of any response."""

    class Gone(InlineScorer):
        async def play(self, items):
            raise ScorerUnavailable("no worker")

    with pytest.raises(EngineFailed, match="no worker"):
        await play_slices([lease(1)], Recording(), Gone(), simulated_text())


async def test_an_engine_that_draws_no_turn_is_a_failed_engine():
    """A stop token in mid-turn would be refused at the coordinator: it is found here."""
    engine = FakeEngine(rollout_seconds=0.0, tokens=lambda *_: [STOP, 1, STOP])
    engine.loaded = HASH
    with pytest.raises(EngineFailed, match="no turn"):
        await play_slices([lease(1)], engine, InlineScorer(), simulated_text())
