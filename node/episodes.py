"""Rollouts of several turns: the engine draws a turn, the sandbox answers it, the engine goes on.

All samples in hand advance together, one turn at a time: the first turn of a slice shares its prompt, a later one is an
order of one sample whose prompt is everything so far. The sandbox runs in this node's own confined scorer process, and
only sandboxes of the installed release are run: no code comes over the network, nor is a file named by a lease opened.
What must come out is defined by `tasks.episode`, with which the coordinator plays every episode again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from echo2.p2p.codec import pack_logprobs, pack_tokens, unpack_logprobs, unpack_tokens
from echo2.p2p.messages import RolloutRecord
from echo2.tasks.catalog import SANDBOXES, make_task
from echo2.tasks.episode import Episode, EpisodeRules
from echo2.tasks.sandbox import environment_seed
from echo2.tasks.scorer import PlayItem, ScorerUnavailable
from echo2.tasks.task import TaskSpec

from .engine import EngineFailed, OrderRefused, SliceOrder, SliceResult

if TYPE_CHECKING:
    from collections.abc import Sequence

    from echo2.p2p.messages import Lease
    from echo2.tasks.episode import Text
    from echo2.tasks.scorer import Play, Scorer

    from .engine import Engine

ORDERS_BYTES_MAX = 8 << 20
"""Histories in one call of the engine: a quarter of what its request may hold."""

PLAY_ATTEMPTS = 2
"""A busy machine may be too slow once. A sandbox that fails again fails for the coordinator too: reward 0."""


@dataclass(slots=True)
class _Player:
    """One sample under way."""

    lease: Lease
    sample: int
    spec: TaskSpec
    seed: bytes
    episode: Episode
    logprobs: list[float] = field(default_factory=list)
    reward: float = 0.0

    def order(self) -> SliceOrder:
        """Its next turn."""
        lease, episode = self.lease, self.episode
        return SliceOrder(
            seed=lease.seed,
            sample_first=self.sample,
            sample_count=1,
            prompt_tokens=lease.prompt_tokens + pack_tokens(episode.tokens),
            sampling=lease.sampling.model_copy(update={"tokens_max": episode.room}),
            drawn=episode.drawn_count,
        )

    def item(self, *, truncated: bool) -> PlayItem:
        return PlayItem(self.spec, self.seed, tuple(self.episode.actions), truncated)

    def record(self) -> RolloutRecord:
        episode = self.episode
        assert episode.finish is not None, "the episode is over"
        return RolloutRecord(
            sample=self.sample,
            tokens=pack_tokens(episode.tokens),
            logprobs=pack_logprobs(self.logprobs),
            finish=episode.finish,
            spans=episode.spans,
            reward=self.reward,
        )


async def play_slices(leases: Sequence[Lease], engine: Engine, scorer: Scorer, text: Text) -> list[SliceResult]:
    """One result a lease, each with a `sandbox`; the same leases give the same tokens, up to numerics.

    Raises OrderRefused for a sandbox that this release has not, and what the engine raises.
    """
    tables = [_players(lease, text) for lease in leases]
    drawn = await _draw(engine, [_first(players) for players in tables])
    waiting = [player for players in tables for player in players]
    records = [record for result in drawn for record in result.rollouts]
    while True:
        acted = [player for player, record in zip(waiting, records, strict=True) if _said(player, record)]
        plays = await _play(scorer, [player.item(truncated=False) for player in acted])
        for player, play in zip(acted, plays, strict=True):
            _answered(player, play)
        cut = [player for player in waiting if player.episode.truncated]
        for player, play in zip(cut, await _play(scorer, [player.item(truncated=True) for player in cut]), strict=True):
            player.reward = play.reward
        waiting = [player for player in waiting if player.episode.finish is None]
        if not waiting:
            return [SliceResult(tuple(player.record() for player in players)) for players in tables]
        drawn = await _draw(engine, [player.order() for player in waiting])
        records = [record for result in drawn for record in result.rollouts]


def _players(lease: Lease, text: Text) -> list[_Player]:
    sandboxed = lease.sandbox
    assert sandboxed is not None, "a lease of several turns"
    if sandboxed.task not in SANDBOXES:
        raise OrderRefused(f"this release has no sandbox {sandboxed.task!r}; install the one the coordinator runs")
    try:
        spec = TaskSpec.from_json(sandboxed.task, sandboxed.options_json)
        make_task(spec)
    except ValueError as error:
        raise OrderRefused(str(error)) from error
    rules = EpisodeRules(
        tokens_max=lease.sampling.tokens_max,
        turns_max=sandboxed.turns_max,
        turn_tokens_max=sandboxed.turn_tokens_max,
        stop_ids=lease.sampling.stop_ids,
        turn_prefix=tuple(unpack_tokens(sandboxed.turn_prefix_tokens).tolist()),
        turn_suffix=tuple(unpack_tokens(sandboxed.turn_suffix_tokens).tolist()),
    )
    seed = environment_seed(lease.seed)
    samples = range(lease.sample_first, lease.sample_first + lease.sample_count)
    return [_Player(lease, sample, spec, seed, Episode(rules, text)) for sample in samples]


def _first(players: Sequence[_Player]) -> SliceOrder:
    """The first turn of a whole slice: one order, so that the prompt is read once."""
    lease = players[0].lease
    return SliceOrder(
        seed=lease.seed,
        sample_first=lease.sample_first,
        sample_count=lease.sample_count,
        prompt_tokens=lease.prompt_tokens,
        sampling=lease.sampling.model_copy(update={"tokens_max": players[0].episode.room}),
    )


async def _draw(engine: Engine, orders: Sequence[SliceOrder]) -> list[SliceResult]:
    """As `Engine.generate`, in calls of bounded size."""
    results: list[SliceResult] = []
    first = size = 0
    for number, order in enumerate(orders):
        if number > first and size + len(order.prompt_tokens) > ORDERS_BYTES_MAX:
            results += await engine.generate(orders[first:number])
            first, size = number, 0
        size += len(order.prompt_tokens)
    results += await engine.generate(orders[first:])
    return results


def _said(player: _Player, record: RolloutRecord) -> bool:
    """Take in a turn; whether it is an action."""
    player.logprobs += unpack_logprobs(record.logprobs).tolist()
    try:
        return player.episode.said(unpack_tokens(record.tokens).tolist()) is not None
    except ValueError as error:
        raise EngineFailed(f"the engine drew what is no turn: {error}") from error


def _answered(player: _Player, play: Play) -> None:
    """Take in the sandbox's answer. One that fails ends the episode, as `tasks.scorer_wire.Play` says."""
    observation = "" if play.done else play.observations[-1]
    player.logprobs += [0.0] * len(player.episode.answered(observation, done=play.done))
    player.reward = play.reward


async def _play(scorer: Scorer, items: Sequence[PlayItem]) -> list[Play]:
    """What became of each; a failure is tried again."""
    try:
        plays = await scorer.play(items) if items else []
        for _ in range(PLAY_ATTEMPTS - 1):
            failed = [place for place, play in enumerate(plays) if play.reason]
            if failed:
                again = await scorer.play([items[place] for place in failed])
                for place, play in zip(failed, again, strict=True):
                    plays[place] = play
    except ScorerUnavailable as error:
        raise EngineFailed(f"the sandbox's process does not start: {error}") from error
    return plays
