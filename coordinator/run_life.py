"""The life of a run, and the reason it waits.

| state    | becomes  | when                                                                                  |
|----------|----------|---------------------------------------------------------------------------------------|
| ready    | running  | the first snapshot is published; the baseline evaluation begins under it               |
| running  | running  | version `steps` is published: the final evaluation begins under it                     |
| running  | finished | the final evaluation is complete and the learner has reported all it consumed          |
|          |          | (evaluations between the two: `evaluations`)                                           |
| running  | paused   | an operator says so: no new leases; what is out is still taken, scored and trained on  |
| paused   | running  | an operator says so (ready, if nothing was published)                                  |
| any      | stopped  | an operator says so, for good: no new leases, and the learner is told                  |

A run that is finished withdraws what is left. One that is stopped withdraws at once what the learner was never given;
what it was given it decides itself, because it may be training on it: it ends its step, checkpoints, and reports. A
learner that is silent for too long has had its say. So every rollout has one terminal state, and it is the true one.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from echo2.p2p.errors import Refused

from .evaluations import Evaluations
from .history import update
from .ledger import LedgerUnavailable
from .run_book import ENDED

if TYPE_CHECKING:
    from .office import Office
    from .run_book import RunLifeState

log = logging.getLogger(__name__)

LAST_REPORT_SECONDS_MAX = 120.0
"""How long a run whose final evaluation is complete waits for the learner's last report: it is sent at once, and a
learner that died is back by then. What it never reported is withdrawn."""

LEARNER_SILENT_SECONDS_MAX = 120.0
"""How long a stopped run waits without a word of the learner's, which speaks at least every half minute, before what it
was given is withdrawn. One that is heard of may take as long as its step and its checkpoint need."""


LEARNER_STATES = frozenset({"joining", "restoring", "training", "publishing", "finished", "stopped"})
"""What a learner reports of itself when it waits for nothing."""


class RunLife:
    """Moves the run on. `settle` is safe to call at any time."""

    def __init__(self, office: Office) -> None:
        self._office = office
        self._evaluations = Evaluations(office)
        self._complete_since: float | None = None
        self._stopped_since: float | None = None

    def settle(self) -> None:
        """Begin and end evaluations, and the run. A ledger that cannot be written: the next call tries again."""
        try:
            self._settle()
        except LedgerUnavailable as error:
            log.warning("the run waits: %s", error)

    def change(self, state: RunLifeState, *, actor: str, reason: str) -> None:
        """What an operator asked for, recorded. Raises Refused when the run is over or it makes no sense."""
        run = self._office.run
        if run.state in ENDED:
            raise Refused("run_over", f"the run is {run.state}; that cannot be changed")
        if state == "running" and run.state != "paused":
            raise Refused("not_paused", f"the run is {run.state}, not paused")
        if state == "running" and run.current is None:
            state = "ready"
        self._enter(state, actor=actor, reason=reason)
        self.settle()

    def waiting(self) -> str:
        """Why the run does not move, or what it waits for; empty while leases flow."""
        office, run = self._office, self._office.run
        if run.state in ENDED:
            left = len(run.unfinished)
            return f"the learner's word on the {left} rollouts it was given" if left else ""
        if run.state == "paused":
            return f"paused: {run.reason}"
        if run.current is None:
            heard = "" if run.learner_seen_at is not None else "; the learner has not been heard of"
            return f"no snapshot published yet{heard}"
        if run.learner_refused:
            return run.learner_refused
        if run.lost:
            return f"the learner, which was put back, to publish version {run.leases.learner_version}"
        unaffordable = office.payroll.waiting(office.config.run.lease_seconds)
        if unaffordable and not any(not node.price for node in office.pool.working(office.clock())):
            return unaffordable
        nobody = office.pool.nobody(office.clock())
        nodes = f"; {nobody}" if nobody else ""
        evaluation = run.leases.evaluation
        if evaluation is not None:
            progress = run.evaluations[evaluation.version]
            return f"{evaluation.purpose} evaluation: {progress.count} of {progress.size}{nodes}"
        if run.current.manifest.version >= office.config.run.steps:
            return "the learner's last report"
        if nobody:
            return nobody
        if max(run.leases.learner_version, run.current.manifest.version) >= office.config.run.steps:
            return f"the learner to publish version {office.config.run.steps}"
        book, depth = run.leases, office.pacing_depth()
        if not book.train.open and book.reserved >= book.reserved_max(run.current.manifest.version, depth):
            return book.pacing_reason(run.current.manifest.version, depth) + self._learner_trouble()
        return ""

    def _learner_trouble(self) -> str:
        """What keeps the learner, in its own words, when it is neither at work nor waiting for rollouts."""
        status = self._office.run.learner_status
        usual = not status or status in LEARNER_STATES or status.startswith("rollouts:")
        return "" if usual else f"; the learner waits for {status}"

    def _settle(self) -> None:
        office, run = self._office, self._office.run
        if run.state == "stopped" and run.unfinished:
            self._wind_up()
        if run.state != "running" or run.current is None or run.lost:
            return
        evaluations = self._evaluations
        known = len(run.evaluations)
        evaluations.abandon_lost()
        if len(run.evaluations) < known:
            self._complete_since = None
        version, steps = run.current.manifest.version, office.config.run.steps
        if not run.evaluations:
            evaluations.begin(version, "baseline")
        evaluations.end_answered()
        evaluations.end_unanswerable()
        if run.leases.evaluation is not None:
            return
        if version < steps:
            evaluations.begin_due()
            return
        if version not in run.evaluations:
            evaluations.begin(version, "final")
            evaluations.end_answered()
        if run.leases.evaluation is None:
            self._finish()

    def _finish(self) -> None:
        office, run = self._office, self._office.run
        if self._complete_since is None:
            self._complete_since = office.clock()
        reported = sum(metrics.rollouts for metrics in run.steps.values())
        if not self._all_reported(reported):
            if office.clock() - self._complete_since < LAST_REPORT_SECONDS_MAX:
                return
            log.warning("%d rollouts reported consumed, the steps' sum is %d", run.leases.consumed, reported)
        self._enter("finished", actor="coordinator", reason="all steps are trained and evaluated")

    def _wind_up(self) -> None:
        """A stopped run waits for what the learner says of the rollouts it was given, while it is heard of."""
        office, run = self._office, self._office.run
        if self._stopped_since is None:
            self._stopped_since = office.clock()
        heard = max(self._stopped_since, run.learner_seen_at or self._stopped_since)
        if office.clock() - heard < LEARNER_SILENT_SECONDS_MAX:
            return
        log.warning("the learner is silent: the %d rollouts it was given are withdrawn", len(run.unfinished))
        changes = office.changes()
        for entry in list(run.unfinished.values()):
            changes.finish(entry, "withdrawn", "the run is stopped, and the learner did not say what became of this")
        with office.ledger.transaction() as connection:
            changes.write(connection, wall=office.wall(), actor="coordinator", action="run wound up")
        changes.apply()

    def _all_reported(self, consumed_in_steps: int) -> bool:
        run, steps = self._office.run, self._office.config.run.steps
        return (
            run.leases.learner_version >= steps
            and steps - 1 in run.steps  # they come in order; a ledger that was put back may lack earlier ones
            and run.leases.consumed >= consumed_in_steps
        )

    def _enter(self, state: RunLifeState, *, actor: str, reason: str) -> None:
        office, run = self._office, self._office.run
        changes = office.changes()
        if state in ENDED:
            for entry in list(run.unfinished.values()):
                if state == "finished" or not run.was_delivered(entry):
                    changes.finish(entry, "withdrawn", f"the run is {state}")
        with office.ledger.transaction() as connection:
            changes.record(
                connection,
                update("runs", [run.name], {"state": state, "reason": reason[:512]}),
                wall=office.wall(),
                actor=actor,
                action=f"run {state}",
                subject=run.name,
                reason=reason,
            )
        changes.apply()
        run.state, run.reason = state, reason
        if state in ENDED:
            self._evaluations.end_all(f"the run is {state}")
        log.info("the run is %s: %s", state, reason)
        for bell in (office.news, office.work, office.admissions):
            bell.ring()
