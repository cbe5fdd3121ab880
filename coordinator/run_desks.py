"""One run of a coordinator at work: its office, the desks that answer for it, and the tasks beside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .appeals import AppealDesk
from .broadcasts import BroadcastDesk
from .heartbeats import HeartbeatDesk
from .intake_desk import IntakeDesk
from .learner_desk import LearnerDesk
from .lease_desk import LeaseDesk
from .overview import Overview
from .pay_clock import PayClock
from .run_life import RunLife
from .scheduling import Scheduler
from .scoring import ScoringTask
from .statement_desk import StatementDesk
from .tokenizer_desk import TokenizerDesk

if TYPE_CHECKING:
    import trio

    from .node_life import NodeLife
    from .office import Office


@dataclass(frozen=True, slots=True)
class RunDesks:
    """See the module. Made by `open_desks`."""

    office: Office
    life: RunLife
    overview: Overview
    heartbeats: HeartbeatDesk
    broadcasts: BroadcastDesk
    leases: LeaseDesk
    tokenizer: TokenizerDesk
    intake: IntakeDesk
    statements: StatementDesk
    appeals: AppealDesk
    learner: LearnerDesk
    scoring: ScoringTask
    scheduler: Scheduler
    pay_clock: PayClock

    def start(self, nursery: trio.Nursery) -> None:
        """The tasks that run beside the desks."""
        nursery.start_soon(self.scoring.run)
        nursery.start_soon(self.leases.run)

    def tick(self) -> None:
        """Twice a second: what time alone brings about."""
        self.leases.expire()
        self.scheduler.look()
        self.pay_clock.look()
        self.heartbeats.note_installed()
        self.life.settle()


def open_desks(office: Office, node_life: NodeLife, scheduler: Scheduler) -> RunDesks:
    """Desks around what the ledger holds of a run."""
    life, broadcasts = RunLife(office), BroadcastDesk(office)
    return RunDesks(
        office=office,
        life=life,
        overview=Overview(office, life),
        heartbeats=HeartbeatDesk(office, node_life),
        broadcasts=broadcasts,
        leases=LeaseDesk(office),
        tokenizer=TokenizerDesk(office),
        intake=IntakeDesk(office),
        statements=StatementDesk(office),
        appeals=AppealDesk(office),
        learner=LearnerDesk(office, broadcasts, life.settle),
        scoring=ScoringTask(office, office.scorer, life.settle),
        scheduler=scheduler,
        pay_clock=PayClock(office),
    )
