"""What a node is owed, signed, in pages: it keeps them, and checks them without us."""

from __future__ import annotations

from typing import TYPE_CHECKING

from echo2.p2p.messages import StatementReply

from . import accounts

if TYPE_CHECKING:
    from echo2.p2p.messages import StatementRequest

    from .office import Office


class StatementDesk:
    """Answers asks for statements."""

    def __init__(self, office: Office) -> None:
        self._office = office

    async def statement(self, peer: str, request: StatementRequest) -> StatementReply:
        """The node's postings behind those it has, over all runs. Raises Refused."""
        office = self._office
        office.known_node(peer, request.run)
        with office.ledger.reading() as connection:
            postings, more = accounts.page(connection, peer, after=request.after)
            head = accounts.newest(connection)
        said = accounts.said(peer, request.after, postings, head, wall=office.wall())
        return StatementReply(statement=office.identity.sign("statement", said), more=more)
