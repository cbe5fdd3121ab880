"""Held rollouts get their reward, in the order they came, and are admitted under a rising sequence."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import trio

from echo2.tasks.scorer import ScoreItem, ScorerUnavailable

from .ledger import LedgerUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from echo2.tasks.scorer import Scorer
    from echo2.tasks.task import Score

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
        office = self._office
        while True:
            batch = self._next_batch()
            if not batch:
                await office.arrivals.wait(IDLE_SECONDS)
                continue
            try:
                scores = await self._scorer.score(self._items(batch))
                self._record(batch, scores)
            except (ScorerUnavailable, LedgerUnavailable) as error:
                office.scorer_trouble = str(error)
                log.warning("rollouts wait for their reward: %s", error)
                await trio.sleep(RETRY_SECONDS)
                continue
            office.scorer_trouble = ""
            self._settled()

    def _next_batch(self) -> list[RolloutEntry]:
        """The oldest held rollouts; they stay in the queue until their reward is durable."""
        held = self._office.run.held
        while held and held[0].state != "held":  # scored, or withdrawn while it waited
            held.popleft()
        return [entry for entry, _ in zip(held, range(BATCH_ROLLOUTS), strict=False) if entry.state == "held"]

    def _items(self, batch: Sequence[RolloutEntry]) -> list[ScoreItem]:
        prompts = self._office.prompts
        responses = prompts.decode([entry.tokens for entry in batch])
        items = []
        for entry, response in zip(batch, responses, strict=True):
            prompt = prompts.prompt(entry.kind, entry.ordinal)
            items.append(ScoreItem(self._office.config.run.task, prompt.split, prompt.index, response))
        return items

    def _record(self, batch: Sequence[RolloutEntry], scores: Sequence[Score]) -> None:
        office = self._office
        run = office.run
        changes = office.changes()
        sequence = run.next_sequence
        evaluated: list[tuple[int, float]] = []
        for entry, score in zip(batch, scores, strict=True):
            if entry.state != "held":  # withdrawn while it was scored
                continue
            if entry.kind == "eval":
                changes.finish(entry, "evaluated", score.reason[:512], reward=score.reward)
                evaluated.append((entry.version, score.reward))
            else:
                changes.admit(entry, score.reward, score.reason[:512], sequence)
                sequence += 1
        with office.ledger.transaction() as connection:
            changes.write(connection, wall=office.wall())
        changes.apply()
        for version, reward in evaluated:
            progress = run.evaluations.get(version)
            if progress is not None:
                progress.count += 1
                progress.total += reward
        office.admissions.ring()
