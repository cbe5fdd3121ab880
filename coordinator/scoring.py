"""Held rollouts get their reward, in the order they came, and are admitted under a rising sequence."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import trio

from echo2.p2p.errors import Refused
from echo2.tasks.scorer import ScoreItem, ScorerUnavailable

from .replay import Judged, judge
from .rhythm import Rhythm

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from echo2.tasks.scorer import Scorer

    from .office import Office
    from .records import RolloutEntry

log = logging.getLogger(__name__)

BATCH_ROLLOUTS = 256
"""One call of the scorer and one transaction: enough that neither's overhead shows."""

IDLE_SECONDS = 30.0
"""The longest the scoring task sleeps without looking; the bell wakes it."""

RETRY_SECONDS = 2.0


class ScoringTask:
    """Runs beside the desks. `settled` is told after each batch."""

    def __init__(self, office: Office, scorer: Scorer, settled: Callable[[], None]) -> None:
        self._office = office
        self._scorer = scorer
        self._settled = settled

    async def run(self) -> None:
        """Score for ever. Trouble is waited out with its reason on show; nothing is lost meanwhile."""
        office, rhythm = self._office, Rhythm(self._office.clock)
        while True:
            while pause := rhythm.pause:  # noqa: ASYNC110 - what arrives meanwhile shares the next commit
                await trio.sleep(pause)
            batch = self._next_batch()
            if not batch:
                await office.arrivals.wait(IDLE_SECONDS)
                continue
            try:
                judged = await self._judge(batch)
                began = office.clock()
                self._record(batch, judged)
                rhythm.made(began)
            except (ScorerUnavailable, Refused) as error:
                office.scorer_trouble = str(error)
                log.warning("rollouts wait for their reward: %s", error)
                await trio.sleep(RETRY_SECONDS)
                continue
            office.scorer_trouble = ""
            self._settled()

    def _next_batch(self) -> list[RolloutEntry]:
        """The oldest held rollouts, whole slices of them; they stay in the queue until their reward is durable."""
        held = self._office.run.held
        while held and held[0].state != "held":  # scored, or withdrawn while it waited
            held.popleft()
        batch: list[RolloutEntry] = []
        for count, entry in enumerate(held):
            if count >= BATCH_ROLLOUTS and batch and entry.lease_id != batch[-1].lease_id:
                break
            if entry.state == "held":
                batch.append(entry)
        return batch

    async def _judge(self, batch: Sequence[RolloutEntry]) -> list[Judged]:
        """What each is worth. Of a sandbox, one false rollout rejects those of its whole slice."""
        prompts, run = self._office.prompts, self._office.config.run
        if prompts.sandbox is None:
            scores = await self._scorer.score(self._items(batch))
            return [Judged(score.reward, score.reason) for score in scores]
        await self._office.open_prompts((entry.kind, entry.ordinal) for entry in batch)
        judged = await judge(batch, prompts, self._scorer, run)
        false = {entry.lease_id: verdict for entry, verdict in zip(batch, judged, strict=True) if verdict.rejected}
        return [false.get(entry.lease_id, verdict) for entry, verdict in zip(batch, judged, strict=True)]

    def _items(self, batch: Sequence[RolloutEntry]) -> list[ScoreItem]:
        prompts = self._office.prompts
        responses = prompts.decode([entry.tokens for entry in batch])
        items = []
        for entry, response in zip(batch, responses, strict=True):
            prompt = prompts.prompt(entry.kind, entry.ordinal)
            items.append(ScoreItem(prompts.spec, prompt.split, prompt.index, response))
        return items

    def _record(self, batch: Sequence[RolloutEntry], judged: Sequence[Judged]) -> None:
        office = self._office
        run = office.run
        changes = office.changes()
        sequence = run.next_sequence
        evaluated: list[tuple[int, Judged]] = []
        false: dict[bytes, tuple[str, str]] = {}
        for entry, verdict in zip(batch, judged, strict=True):
            if entry.state != "held":  # withdrawn while it was scored
                continue
            if verdict.rejected:
                changes.finish(entry, "rejected", verdict.rejected[:512])
                false[entry.lease_id] = entry.peer, verdict.rejected[:512]
            elif entry.kind == "eval":
                details = verdict.details
                changes.finish(entry, "evaluated", verdict.reason[:512], reward=verdict.reward, details=details)
                evaluated.append((entry.version, verdict))
            else:
                changes.admit(entry, verdict.reward, verdict.reason[:512], sequence, verdict.details)
                sequence += 1
        with office.ledger.transaction() as connection:
            changes.write(connection, wall=office.wall(), actor="coordinator", action="rollouts scored")
        changes.apply()
        for version, verdict in evaluated:
            progress = run.evaluations.get(version)
            if progress is not None:
                progress.count += 1
                progress.total += verdict.reward
                progress.add(verdict.details)
        for peer, reason in false.values():
            node = office.pool.nodes[peer]
            node.last_reason = reason
            node.slice_rejected(office.clock())
        if false:
            office.work.ring()  # their slots are open again
        office.admissions.ring()
