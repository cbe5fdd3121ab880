"""Held-out evaluations: when each begins, when it is over, and why it may end before its time.

| purpose  | begins when                                                    | and meanwhile                        |
|----------|----------------------------------------------------------------|--------------------------------------|
| baseline | the first snapshot is published                                | nothing else is leased               |
| interim  | a snapshot `eval_every` or more versions above the last one    | training goes on; `LeaseBook` gives  |
|          | evaluated is published, if none is under way                   | it idle nodes, and its share         |
| final    | version `steps` is published                                   | nothing else is leased               |

Each asks every held-out prompt `eval_samples` times, in order; the mean reward is avg@k. An answer counts for the
version it was leased under, whatever is published since. An interim one ends with its reason, and with the mean of what
was answered, once no node can answer any more: the pool has moved on to a newer snapshot, and nothing of it is out with
a node or waits for its reward. Nothing ever waits for that. What the learner lost by being put back is deleted: it
speaks of a policy that is gone, and the version may come again.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from .history import Delete, insert, update
from .records import record
from .run_book import EvaluationProgress

if TYPE_CHECKING:
    from .leases import Purpose
    from .office import Office

log = logging.getLogger(__name__)


class Evaluations:
    """Begins and ends them. Every method is safe to call at any time, and raises LedgerUnavailable."""

    def __init__(self, office: Office) -> None:
        self._office = office

    def begin(self, version: int, purpose: Purpose) -> None:
        """Have the held-out prompts leased under `version`."""
        office, run = self._office, self._office.run
        prompts, samples = office.prompts.task.heldout_size, office.config.run.eval_samples
        progress = EvaluationProgress(version, purpose, prompts * samples, samples=samples)
        with office.ledger.transaction() as connection:
            facts = {"purpose": purpose, "size": progress.size, "samples": samples}
            empty = {"count": 0, "mean": None, "finished": None, "reason": ""}
            record(
                connection,
                [insert("evaluations", {"run": run.name, "version": version} | facts | empty)],
                wall=office.wall(),
                actor="coordinator",
                action=f"{purpose} evaluation begun",
                subject=f"version {version}",
                kind="flow",
            )
        run.evaluations[version] = progress
        run.leases.open_evaluation(version, purpose, prompts, samples, office.config.run.eval_share)
        log.info("%s evaluation of version %d: %d prompts, %d answers each", purpose, version, prompts, samples)
        office.work.ring()

    def begin_due(self) -> None:
        """Begin an interim one when its time has come."""
        run, every = self._office.run, self._office.config.run.eval_every
        assert run.version is not None, "a snapshot is published"
        if not every or run.leases.interim is not None or run.version >= self._office.config.run.steps:
            return
        if run.version >= max(run.evaluations, default=0) + every and run.version not in run.evaluations:
            self.begin(run.version, "interim")

    def end_answered(self) -> None:
        """End those whose every prompt is answered or given up."""
        run = self._office.run
        for evaluation in (run.leases.evaluation, run.leases.interim):
            if evaluation is None:
                continue
            progress = run.evaluations[evaluation.version]
            if progress.count + evaluation.table.abandoned >= progress.size:
                self._end(progress)

    def end_unanswerable(self) -> None:
        """End an interim one that no node can go on with."""
        office, run = self._office, self._office.run
        interim = run.leases.interim
        if interim is None or run.version is None or run.version <= interim.version:
            return  # nodes are still coming to it
        now, version = office.clock(), interim.version
        if run.leases.evaluation_is_out(version) or any(
            entry.kind == "eval" and entry.version == version for entry in run.unfinished.values()
        ):
            return
        if any(node.version == version for node in office.pool.working(now)):
            return
        progress = run.evaluations[version]
        answered = f"{progress.count} of {progress.size} answered"
        self._end(progress, f"no node has version {version} any more, version {run.version} is published; {answered}")

    def end_all(self, reason: str) -> None:
        """The run is over."""
        run = self._office.run
        for progress in run.evaluations.values():
            if not progress.ended:
                self._end(progress, reason)

    def abandon_lost(self) -> None:
        """Forget those that speak of a policy that is lost, and a baseline or final one that nodes have moved past.

        One of the latter under way whose snapshot is superseded: training has not begun here, or it would not be under
        way; the learner may be further all the same, if this ledger is younger than its run.
        """
        office, run = self._office, self._office.run
        assert run.version is not None, "a snapshot is published"
        for progress in list(run.evaluations.values()):
            lost = progress.purpose != "baseline" and progress.version > run.version
            gate = progress.purpose != "interim"
            if not lost and not (gate and not progress.ended and progress.version != run.version):
                continue
            with office.ledger.transaction() as connection:
                record(
                    connection,
                    [Delete("evaluations", [(run.name, progress.version)])],
                    wall=office.wall(),
                    actor="coordinator",
                    action=f"{progress.purpose} evaluation left",
                    subject=f"version {progress.version}",
                    reason=f"version {run.version} is published",
                )
            del run.evaluations[progress.version]
            run.leases.close_evaluation(progress.version)
            log.warning("the %s evaluation of version %d is given up", progress.purpose, progress.version)
            office.work.ring()

    def _end(self, progress: EvaluationProgress, reason: str = "") -> None:
        office, run = self._office, self._office.run
        told = f"{progress.count} of {progress.size} answers, mean reward {progress.mean}"
        with office.ledger.transaction() as connection:
            values: dict[str, object] = {"count": progress.count, "mean": progress.mean}
            values |= {"finished": office.wall(), "reason": reason[:512]}
            record(
                connection,
                [update("evaluations", [run.name, progress.version], values)],
                wall=office.wall(),
                actor="coordinator",
                action=f"{progress.purpose} evaluation",
                subject=f"version {progress.version}",
                reason=f"{told}; {reason}" if reason else told,
            )
        progress.ended, progress.reason = True, reason[:512]
        run.leases.close_evaluation(progress.version)
        log.info(
            "%s evaluation of version %d: %s%s", progress.purpose, progress.version, told, reason and f"; {reason}"
        )
        office.work.ring()
