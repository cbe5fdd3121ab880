"""What the postings come to, for the views: read once, then only what was posted since, by whomever.

The command line posts beside the coordinator, so it is the chain that is read on, not what this process wrote.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING

import sqlalchemy as sa

from . import schema
from .ledger import LedgerUnavailable

if TYPE_CHECKING:
    from echo2.p2p.postings import Unit

    from .ledger import Ledger

EARNED = frozenset({"credit", "relay"})


class Balances:
    """Sums in millionths."""

    def __init__(self) -> None:
        self._after = 0
        self._of: Counter[tuple[str, str]] = Counter()
        self._credits: Counter[str] = Counter()

    def catch_up(self, ledger: Ledger) -> None:
        """Add what was posted since. A ledger that cannot be read: what is shown is of before."""
        table = schema.postings
        grouped = (table.c.peer, table.c.run, table.c.unit, table.c.kind)
        sums = (sa.func.sum(table.c.amount_micros).label("amount"), sa.func.max(table.c.id).label("last"))
        query = sa.select(*grouped, *sums).where(table.c.id > self._after).group_by(*grouped)
        with suppress(LedgerUnavailable), ledger.reading() as connection:
            for row in connection.execute(query).all():
                self._of[row.peer, row.unit] += int(row.amount)
                if row.unit == "credit" and row.kind in EARNED:
                    self._credits[row.run] += int(row.amount)
                self._after = max(self._after, row.last)

    def of(self, peer: str, unit: Unit) -> int:
        """A node's balance."""
        return self._of[peer, unit]

    def credits(self, run: str) -> int:
        """What a run's nodes earned in credits."""
        return self._credits[run]
