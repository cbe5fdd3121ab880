"""Time passing, as far as it is money: what became due by it is posted, spent accounts are closed."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from .ledger import LedgerUnavailable
from .payroll import SAVE_SECONDS
from .records import record

if TYPE_CHECKING:
    from .office import Office

log = logging.getLogger(__name__)


class PayClock:
    """Looked at twice a second; writes each SAVE_SECONDS, and nothing where no node is paid."""

    def __init__(self, office: Office) -> None:
        self._office = office
        self._next_at = office.clock() + SAVE_SECONDS

    def look(self) -> None:
        """Count time at work, and put it on record when that is due. A ledger that takes nothing now: next time."""
        office, now = self._office, self._office.clock()
        office.payroll.tick(now)
        if now < self._next_at:
            return
        self._next_at = now + SAVE_SECONDS
        if not office.payroll.engaged:
            return
        pay, wall = office.settlement(), office.wall()
        pay.pass_time()
        try:
            with office.ledger.transaction() as connection:
                facts = {"actor": "coordinator", "action": "time at work", "subject": office.run.name}
                record(connection, pay.changes(wall), wall=wall, kind="flow", **facts)
                pay.post(connection, wall)
        except LedgerUnavailable as error:
            log.warning("pay by time is posted later: %s", error)
            return
        pay.apply()
