"""Episodes at the coordinator: leased with their opening, played again, and thrown out where a node lies."""

from __future__ import annotations

import hashlib
import random

import pytest
import trio

from echo2.coordinator.simulated_model import STOP, simulated_text
from echo2.p2p.codec import pack_logprobs, pack_tokens, unpack_tokens
from echo2.p2p.errors import Refused
from echo2.p2p.messages import RolloutRecord, Slice, TokenizerReply, TokenizerRequest
from echo2.tasks.episode import Episode, EpisodeRules
from echo2.tasks.race import LOST_REWARD, Race
from echo2.tasks.sandbox import environment_seed
from echo2.tasks.scorer import InlineScorer, PlayItem
from echo2.tasks.scorer_wire import failed_play
from echo2.tasks.token_text import TokenText

TOKENS_MAX, TURN_TOKENS_MAX = 40, 5


@pytest.fixture
def game(autojump_clock, world):
    """A run of the race to a number, in symbols."""
    world.task = Race(heldout_size=2)
    world.rng = random.Random(4)
    world.text = simulated_text()
    world.run_settings = {"tokens_max": TOKENS_MAX, "turn_tokens_max": TURN_TOKENS_MAX}
    return world


def rules_of(lease):
    return EpisodeRules(
        tokens_max=lease.sampling.tokens_max,
        turns_max=lease.sandbox.turns_max,
        turn_tokens_max=lease.sandbox.turn_tokens_max,
        stop_ids=lease.sampling.stop_ids,
    )


def play(lease, sample, *, seed=None, say=None):
    """One honest episode: each turn adds 1 + (sample + turn) % 3, or says what `say` makes of the total."""
    text = simulated_text()
    episode = Episode(rules_of(lease), text)
    game = Race().sandbox()
    said = game.reset(environment_seed(seed or lease.seed))
    reward = 0.0
    while episode.finish is None:
        before, step = said.text.rstrip("=").split("+")
        total = int(before) + int(step)
        turn = len(episode.actions)
        words = str(total + 1 + (sample + turn) % 3) if say is None else say(total, turn)
        action = episode.said([*text.encode_plain(words), STOP][: episode.room])
        said = game.truncate() if action is None else game.step(action)
        reward += said.reward
        if action is not None:
            episode.answered(said.text, done=said.done)
    return episode, reward


def record(sample, episode, reward, **changes):
    drawn = [True] * len(episode.tokens)
    start = 0
    for number, length in enumerate(episode.spans):
        drawn[start : start + length] = [number % 2 == 0] * length
        start += length
    fields = {
        "sample": sample,
        "tokens": pack_tokens(episode.tokens),
        "logprobs": pack_logprobs([-0.5 if each else 0.0 for each in drawn]),
        "finish": episode.finish,
        "spans": episode.spans,
        "reward": reward,
    }
    return RolloutRecord(**fields | changes)


def honest(lease, **how):
    """The slice of a lease, played by the rules of the node."""
    samples = range(lease.sample_first, lease.sample_first + lease.sample_count)
    rollouts = tuple(record(sample, *play(lease, sample, **how)) for sample in samples)
    return Slice(lease_id=lease.lease_id, manifest_hash=lease.manifest_hash, rollouts=rollouts)


async def begun(world, node, learner):
    """The baseline evaluation is behind us; the learner's fetch and the node's leases are for training."""
    await learner.hello()
    await learner.publish()
    await node.join()
    for _ in range(4):
        leases = (await node.lease()).leases
        if leases and leases[0].kind == "train":
            return leases
        await node.submit(*map(honest, leases))
        await trio.sleep(1)
    raise AssertionError("the baseline evaluation does not end")


@pytest.mark.slow_on_postgresql
async def test_a_lease_has_the_opening_and_what_turns_need(game):
    """The prompt is the environment's first word under H(seed, "env"); all samples of a group share it."""
    async with game.serving(), game.node(3) as node, game.learner() as learner:
        leases = await begun(game, node, learner)
        for lease in leases:
            opening = Race().sandbox().reset(environment_seed(lease.seed)).text
            assert unpack_tokens(lease.prompt_tokens).tolist() == simulated_text().encode(opening)
            assert (lease.sandbox.task, lease.sandbox.options_json) == ("race", "{}")
            assert (lease.sandbox.turns_max, lease.sandbox.turn_tokens_max) == (5, TURN_TOKENS_MAX)
        assert len({lease.prompt_tokens for lease in leases if lease.ordinal == 0}) == 1


@pytest.mark.slow_on_postgresql
async def test_each_turn_is_begun_as_the_task_says(game):
    """The prompt ends with it, and so does what is put in behind every answer."""
    game.task.prefill = "1+"
    async with game.serving(), game.node(3) as node, game.learner() as learner:
        await learner.hello()
        await learner.publish()
        await node.join()
        (lease, *_) = (await node.lease()).leases
        begun_with = simulated_text().encode("1+")
        assert unpack_tokens(lease.prompt_tokens).tolist()[-2:] == begun_with
        assert unpack_tokens(lease.sandbox.turn_suffix_tokens).tolist() == begun_with


async def test_an_honest_episode_is_admitted_with_our_reward_spans_and_details(game):
    """And the evaluation's table has the means of the details."""
    async with game.serving(), game.node(3) as node, game.learner() as learner:
        leases = await begun(game, node, learner)
        sent = {lease.lease_id: honest(lease) for lease in leases}
        assert {ack.state for ack in await node.submit(*sent.values())} == {"held"}
        reply = await learner.fetch(wait=5.0)
        assert len(reply.rollouts) == sum(lease.sample_count for lease in leases)
        for rollout in reply.rollouts:
            (mine,) = [r for r in sent[rollout.lease_id].rollouts if r.sample == rollout.sample]
            assert (rollout.tokens, rollout.spans, rollout.reward) == (mine.tokens, mine.spans, mine.reward)
            assert {detail.name for detail in rollout.details} == {"wins", "rules_broken", "turns"}
        assert any(rollout.spans for rollout in reply.rollouts), "some game took more than one turn"
        (baseline,) = game.run.evaluations
        assert baseline.complete
        assert set(baseline.details) == {"wins", "rules_broken", "turns"}


@pytest.mark.slow_on_postgresql
async def test_where_the_context_is_short_the_lease_says_how_long_and_the_replay_knows(game):
    """The opening takes 5 of 14 tokens: 9 are left, and an episode cut off there is an honest one."""
    short = simulated_text().card.model_copy(update={"context_tokens": 14})
    game.text = TokenText(short, simulated_text().tokenizer_json)
    async with game.serving(), game.node(3) as node, game.learner() as learner:
        leases = await begun(game, node, learner)
        assert {lease.sampling.tokens_max for lease in leases} == {9}
        await node.submit(*map(honest, leases))
        reply = await learner.fetch(wait=5.0)
        assert len(reply.rollouts) == sum(lease.sample_count for lease in leases)
        assert any(rollout.finish == "length" for rollout in reply.rollouts)


def other_reward(lease, sample):
    episode, reward = play(lease, sample)
    return record(sample, episode, 1.0 if reward != 1.0 else LOST_REWARD)


def other_answer(lease, sample):
    """A later question of another game: easier ones could be picked so."""
    episode, reward = play(lease, sample, say=lambda total, _turn: str(total + 1))
    if not episode.spans:
        return None
    place = episode.spans[0]
    episode.tokens[place] = (episode.tokens[place] + 1) % 10
    return record(sample, episode, reward)


def dropped_turn(lease, sample):
    """The last turn left out: it was a losing one."""
    episode, _ = play(lease, sample, say=lambda total, turn: str(total + 1) if turn == 0 else "0")
    if not episode.spans:
        return None
    spans = episode.spans[:-2]
    tokens = episode.tokens[: sum(spans)]
    shorter = Episode(rules_of(lease), simulated_text())
    shorter.tokens, shorter.finish = tokens, "stop"
    shorter._spans = list(spans)
    return record(sample, shorter, LOST_REWARD)


def extra_turn(lease, sample):
    """The game goes on after its end, where the policy does better."""
    episode, _ = play(lease, sample, say=lambda total, turn: "0")
    longer = Episode(rules_of(lease), simulated_text())
    question = simulated_text().encode_plain("20+1=")
    turn = [*simulated_text().encode_plain("22"), STOP]
    longer.tokens, longer.finish = [*episode.tokens, *question, *turn], "stop"
    longer._spans = [len(episode.tokens), len(question), len(turn)]
    return record(sample, longer, 1.0)


@pytest.mark.slow_on_postgresql
@pytest.mark.parametrize(
    ("lie", "code"),
    [(other_reward, "reward"), (other_answer, "replay"), (dropped_turn, "replay"), (extra_turn, "replay")],
)
async def test_a_lie_costs_the_whole_slice_and_its_slots_are_leased_again(game, lie, code):
    """One false rollout among honest ones: receipts say rejected with the code, the learner never sees them."""
    async with game.serving(), game.node(3) as node, game.node(4) as other, game.learner() as learner:
        leases = await begun(game, node, learner)
        (lease, *_) = [each for each in leases if lie(each, each.sample_first + each.sample_count - 1)]
        samples = range(lease.sample_first, lease.sample_first + lease.sample_count)
        rollouts = [record(sample, *play(lease, sample)) for sample in samples]
        rollouts[-1] = lie(lease, samples[-1])
        before = len(await node.receipts())
        piece = Slice(lease_id=lease.lease_id, manifest_hash=lease.manifest_hash, rollouts=tuple(rollouts))
        assert [ack.state for ack in await node.submit(piece)] == ["held"]
        await trio.sleep(1)
        receipts = (await node.receipts())[before:]
        assert [receipt.state for receipt in receipts] == ["rejected"] * len(samples)
        assert all(receipt.reason.startswith(code) for receipt in receipts)
        assert (await learner.fetch()).rollouts == ()
        await other.join()
        again = (await other.lease()).leases
        assert (lease.ordinal, lease.sample_first) in {(each.ordinal, each.sample_first) for each in again}
        assert {each.seed for each in again if each.ordinal == lease.ordinal} == {lease.seed}


@pytest.mark.slow_on_postgresql
@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"reward": None}, "spans"),
        ({"spans": (1,)}, "spans"),
        ({"tokens": pack_tokens([1]), "logprobs": pack_logprobs([-1.0]), "spans": ()}, "spans"),
    ],
)
async def test_what_is_no_episode_is_refused_at_the_door(game, changes, code):
    """Before anything is played."""
    async with game.serving(), game.node(3) as node, game.learner() as learner:
        (lease, *_) = await begun(game, node, learner)
        samples = range(lease.sample_first, lease.sample_first + lease.sample_count)
        rollouts = tuple(record(sample, *play(lease, sample)).model_copy(update=changes) for sample in samples)
        piece = Slice(lease_id=lease.lease_id, manifest_hash=lease.manifest_hash, rollouts=rollouts)
        (ack,) = await node.submit(piece)
        assert ack.state == "rejected"
        assert ack.reason.startswith(code)


@pytest.mark.slow_on_postgresql
async def test_an_inserted_token_with_a_logprob_is_refused(game):
    """Nobody drew it."""
    async with game.serving(), game.node(3) as node, game.learner() as learner:
        for lease in await begun(game, node, learner):
            samples = range(lease.sample_first, lease.sample_first + lease.sample_count)
            rollouts = [record(sample, *play(lease, sample)) for sample in samples]
            if not any(rollout.spans for rollout in rollouts):
                continue
            rollouts = [
                each.model_copy(update={"logprobs": pack_logprobs([-0.5] * (len(each.tokens) // 4))})
                for each in rollouts
            ]
            piece = Slice(lease_id=lease.lease_id, manifest_hash=lease.manifest_hash, rollouts=tuple(rollouts))
            (ack,) = await node.submit(piece)
            assert ack.reason.startswith("logprobs")
            return
    raise AssertionError("no game of more than one turn")


async def test_spans_have_no_place_in_a_task_of_one_turn(autojump_clock, world, tools):
    """Nor has a reward of the node's own."""
    async with world.serving(), world.node(3) as node, world.learner() as learner:
        await learner.hello()
        await learner.publish()
        await node.join()
        (lease, *_) = (await node.lease()).leases
        piece = tools.answer(lease)
        false = tuple(each.model_copy(update={"reward": 1.0}) for each in piece.rollouts)
        (ack,) = await node.submit(piece.model_copy(update={"rollouts": false}))
        assert ack.reason.startswith("spans")


class Failing(InlineScorer):
    """Plays nothing beyond an opening."""

    async def play(self, items):
        played = await super().play(items)
        return [
            failed_play("the scorer took longer than 2 s", play.observations[:1]) if item.actions else play
            for item, play in zip(items, played, strict=True)
        ]


@pytest.mark.slow_on_postgresql
async def test_where_our_environment_fails_the_reward_is_0_with_the_reason(game):
    """As with every scorer: a slow machine of ours is no fault of the node's."""
    game.scorer = Failing({"race": game.task})
    async with game.serving(), game.node(3) as node, game.learner() as learner:
        leases = await begun(game, node, learner)
        await node.submit(honest(leases[0]))
        reply = await learner.fetch(wait=5.0)
        assert [rollout.reward for rollout in reply.rollouts] == [0.0, 0.0]


class Down(InlineScorer):
    """Its worker does not start, at first."""

    down = True

    async def play(self, items):
        from echo2.tasks.scorer import ScorerUnavailable

        if self.down:
            raise ScorerUnavailable("no worker")
        return await super().play(items)


@pytest.mark.slow_on_postgresql
async def test_without_a_worker_no_lease_goes_out_and_the_node_is_told_why(game):
    """And it gets one when the worker is back."""
    game.scorer = Down({"race": game.task})
    async with game.serving(), game.node(3) as node, game.learner() as learner:
        await learner.hello()
        await learner.publish()
        await node.join()
        with pytest.raises(Refused, match="no worker") as caught:
            await node.lease()
        assert caught.value.code == "scorer_unavailable"
        game.scorer.down = False
        assert (await node.lease()).leases


@pytest.mark.slow_on_postgresql
async def test_a_restart_forgets_no_span_claim_or_detail(game):
    """What was held is judged after the restart, what was admitted goes to the learner whole."""
    game.scorer = Down({"race": game.task})
    game.scorer.down = False
    async with game.serving(), game.node(3) as node, game.learner() as learner:
        leases = await begun(game, node, learner)
        sent = [honest(lease) for lease in leases]
        await node.submit(sent[0])
        await trio.sleep(1)
        game.scorer.down = True
        with pytest.raises(Refused):  # the openings are at hand, but nothing is held without them
            await node.ask("tokenizer", TokenizerRequest(run="other", offset=0), TokenizerReply)
        await node.submit(sent[1])
    game.scorer.down = False
    async with game.serving(), game.learner() as learner:
        reply = await learner.fetch(wait=5.0)
        await trio.sleep(3)
        more = await learner.fetch(wait=5.0)
        rollouts = [*reply.rollouts, *more.rollouts]
        expected = {(each.lease_id, r.sample): r for each in sent[:2] for r in each.rollouts}
        assert {(r.lease_id, r.sample) for r in rollouts} == set(expected)
        for rollout in rollouts:
            mine = expected[rollout.lease_id, rollout.sample]
            assert (rollout.spans, rollout.reward) == (mine.spans, mine.reward)
            assert len(rollout.details) == 3
        (baseline,) = game.run.evaluations
        assert baseline.details["turns"] > 0


@pytest.mark.slow_on_postgresql
async def test_a_node_gets_the_tokenizer_in_pieces(game):
    """Its bytes hash to what the descriptor names; a stranger gets nothing."""
    async with game.serving(), game.node(3) as node, game.node(4) as stranger, game.learner() as learner:
        await begun(game, node, learner)
        reply = await node.ask("tokenizer", TokenizerRequest(run="r1", offset=0), TokenizerReply)
        assert hashlib.sha256(reply.data).hexdigest() == simulated_text().card.tokenizer_sha256
        assert len(reply.data) == reply.length_bytes
        rest = await node.ask("tokenizer", TokenizerRequest(run="r1", offset=reply.length_bytes), TokenizerReply)
        assert rest.data == b""
        with pytest.raises(Refused, match="does not know you"):
            await stranger.ask("tokenizer", TokenizerRequest(run="r1", offset=0), TokenizerReply)


async def test_no_tokenizer_goes_out_in_a_run_of_one_turn(autojump_clock, world):
    """Nodes do not need it."""
    async with world.serving(), world.node(3) as node:
        await node.hello(world.token())
        with pytest.raises(Refused, match="need no tokenizer"):
            await node.ask("tokenizer", TokenizerRequest(run="r1", offset=0), TokenizerReply)


@pytest.mark.slow_on_postgresql
async def test_the_environment_of_a_group_does_not_depend_on_who_asks(game):
    """A reissue has the same seed and so the same opening; another group has another."""
    async with game.serving(), game.node(3) as node, game.learner() as learner:
        leases = await begun(game, node, learner)
        (play_,) = await InlineScorer().play([PlayItem("race", environment_seed(leases[0].seed))])
        assert simulated_text().encode(play_.observations[0]) == unpack_tokens(leases[0].prompt_tokens).tolist()
