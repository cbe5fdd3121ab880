"""The chain of credits and payments, read for REST in a thread, over a connection of its own that cannot write.

A chain may be long: nothing here holds up the nodes, and only so many readings are under way at once.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

import sqlalchemy as sa
import trio

from echo2.p2p.errors import ConfigurationError, Refused

from . import accounts, schema
from .in_thread import in_thread
from .ledger import open_ledger_to_read

if TYPE_CHECKING:
    from collections.abc import Callable

    from echo2.p2p.postings import Chain, Posting

T = TypeVar("T")

READERS_MAX = 2
READERS_WAITING_MAX = 8

READ_SECONDS = 20.0
"""Within `rest_server.READ_SECONDS`: a chain that takes longer is verified on the command line."""


@dataclass(frozen=True, slots=True)
class Balance:
    """What a node's postings come to in one unit."""

    peer: str
    unit: str
    amount_micros: int
    postings: int


class Books:
    """Reads the ledger at `url`."""

    def __init__(self, url: str, password: str | None = None) -> None:
        self._url = url
        self._password = password
        self._readers = trio.CapacityLimiter(READERS_MAX)

    async def postings(self, *, peer: str | None, after: int, limit: int) -> list[Posting]:
        """Postings behind `after`, in order: of all, or of one node. Raises Refused."""
        return await self._read(
            lambda connection: list(islice(accounts.read(connection, peer=peer, after=after), limit))
        )

    async def balances(self, *, peer: str | None, after: str, limit: int) -> list[Balance]:
        """Balances of nodes whose peer id is behind `after`, or of one node: at most `limit` nodes. Raises Refused."""
        return await self._read(lambda connection: _balances(connection, peer, after, limit))

    async def verify(self) -> Chain:
        """The whole chain, from the first posting to the first that is wrong. Raises Refused."""
        return await self._read(accounts.verify)

    async def _read(self, read: Callable[[sa.Connection], T]) -> T:
        if self._readers.statistics().tasks_waiting >= READERS_WAITING_MAX:
            raise Refused("busy", "the ledger is being read by many just now", 2.0)

        def work() -> T:
            with (
                closing(open_ledger_to_read(self._url, password=self._password)) as ledger,
                ledger.reading() as connection,
                ledger.loading(schema.postings),
            ):
                return read(connection)

        with trio.move_on_after(READ_SECONDS):
            try:
                return await in_thread(work, self._readers)
            except ConfigurationError as error:
                raise Refused("ledger_unavailable", str(error), None) from error
        raise Refused(
            "busy", "that takes longer than an answer may; ask `echo2-coordinator ledger` on its machine", 30.0
        )


def _balances(connection: sa.Connection, peer: str | None, after: str, limit: int) -> list[Balance]:
    table = schema.postings
    nodes = sa.select(table.c.peer).where(table.c.peer > after).distinct().order_by(table.c.peer).limit(limit)
    if peer is not None:
        nodes = sa.select(sa.literal(peer).label("peer"))
    total, count = sa.func.sum(table.c.amount_micros), sa.func.count()
    query = (
        sa.select(table.c.peer, table.c.unit, total, count)
        .where(table.c.peer.in_(nodes))
        .group_by(table.c.peer, table.c.unit)
        .order_by(table.c.peer, table.c.unit)
    )
    return [Balance(peer, unit, int(amount), number) for peer, unit, amount, number in connection.execute(query)]
