"""Appeals: a node's owner does not agree, the operator answers, and both can see it (the table `appeals`).

| an appeal                             | is                                                                          |
|---------------------------------------|-----------------------------------------------------------------------------|
| with an id that its node used before  | the same one: its state is told again, its text stays what it was           |
| about a lease                         | taken if the lease was that node's, in this run                             |
| about a suspension                    | taken while the node is suspended                                           |
| while OPEN_MAX of its key are open    | declined, to be sent again: the operator reads each                         |
| answered by the operator              | upheld, with an adjustment if one is named, or refused; for good            |
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from echo2.p2p.errors import Refused
from echo2.p2p.messages import AppealReply
from echo2.p2p.postings import AMOUNT_MICROS_MAX

from . import accounts, schema
from .cells import sound
from .history import insert, update
from .records import find_lease, record, storable
from .views import AppealView

if TYPE_CHECKING:
    from echo2.p2p.messages import AppealRequest
    from echo2.p2p.postings import Unit

    from .office import Office

log = logging.getLogger(__name__)

OPEN_MAX = 8
"""Open appeals of one key: more of them are no more likely to be read."""

RETRY_SECONDS = 600.0
"""When a node with too many of them may send the next."""

VIEWED_MAX = 1000
"""Appeals shown at once, open ones first, then the newest."""

SUSPENSION = "suspension"


class AppealDesk:
    """Takes appeals from nodes, and answers to them from operators."""

    def __init__(self, office: Office) -> None:
        self._office = office

    async def appeal(self, peer: str, request: AppealRequest) -> AppealReply:
        """Put it on record, or tell what became of it. Raises Refused."""
        office, table = self._office, schema.appeals
        node = office.known_node(peer, request.run)
        mine = table.c.peer == peer
        with office.ledger.reading() as connection:
            known = connection.execute(sa.select(table).where(mine, table.c.appeal_id == request.appeal_id)).first()
            if known is not None:
                return _reply(known)
            waiting = connection.scalar(sa.select(sa.func.count()).where(mine, table.c.state == "open")) or 0
            lease = None if request.subject == SUSPENSION else find_lease(
                connection, request.run, bytes.fromhex(request.subject)
            )  # fmt: skip
        if request.subject == SUSPENSION and node.state != "suspended":
            raise Refused("not_suspended", "this node is not suspended: there is nothing to appeal against")
        if request.subject != SUSPENSION and (lease is None or lease.peer != peer):
            raise Refused("unknown_lease", f"no lease {request.subject} was given to this node in run {request.run}")
        if waiting >= OPEN_MAX:
            raise Refused("too_many_appeals", f"{waiting} appeals of this node wait for an answer", RETRY_SECONDS)
        with office.ledger.transaction() as connection:
            number = (connection.scalar(sa.select(sa.func.max(table.c.number))) or 0) + 1
            facts = {"run": request.run, "peer": peer, "appeal_id": request.appeal_id, "subject": request.subject}
            said = {"text": storable(request.text), "created": office.wall()}
            empty = {"state": "open", "answer": "", "posting": None, "resolved": None}
            record(
                connection,
                [insert("appeals", {"number": number} | facts | said | empty)],
                wall=office.wall(),
                actor=peer,
                action="appeal",
                subject=f"{number}: {request.subject}",
            )
        log.info("appeal %d of %s, about %s", number, node.name, request.subject, extra={"peer": peer})
        return AppealReply(appeal_id=request.appeal_id, state="open", answer="")

    def view(self) -> list[AppealView]:
        """Open ones first, in the order they came; then those that were answered, the newest first."""
        office, table = self._office, schema.appeals
        is_open = table.c.state == "open"
        with office.ledger.reading() as connection, office.ledger.loading(table):
            order = (table.c.number,)
            found = list(sound(connection.execute(sa.select(table).where(is_open).order_by(*order)), table))[
                :VIEWED_MAX
            ]
            rest = sa.select(table).where(~is_open).order_by(table.c.number.desc()).limit(VIEWED_MAX - len(found))
            found += sound(connection.execute(rest), table)
        return [self._shown(row) for row in found]

    def resolve(
        self, number: int, upheld: bool, *, actor: str, reason: str, amount_micros: int = 0, unit: Unit = "usd"
    ) -> AppealView:
        """Answer one, for good. `amount_micros`: an adjustment for its node, posted with it when it is upheld.

        Raises KeyError for an unknown one, Refused for one that is answered or an amount that cannot be posted.
        """
        office, table = self._office, schema.appeals
        if amount_micros and not upheld:
            raise Refused("refused_without_amount", "an appeal that is refused has no adjustment")
        if abs(amount_micros) > AMOUNT_MICROS_MAX:
            raise Refused("amount", f"an adjustment is at most {AMOUNT_MICROS_MAX} millionths")
        with office.ledger.transaction() as connection:
            row = connection.execute(sa.select(table).where(table.c.number == number)).first()
            if row is None:
                raise KeyError(number)
            if row.state != "open":
                raise Refused("answered", f"appeal {number} is {row.state} already: {row.answer}")
            posting = None
            if amount_micros:
                entry = accounts.Entry(
                    row.run,
                    row.peer,
                    "adjustment",
                    unit,
                    amount_micros,
                    0,
                    actor[:64],
                    f"appeal {number}: {reason}"[:512],
                )
                (posted,) = accounts.append(connection, [entry], wall=office.wall())
                posting = posted.id
            state = "upheld" if upheld else "refused"
            values: dict[str, Any] = {"state": state, "answer": storable(reason[:512]), "posting": posting}
            record(
                connection,
                [update("appeals", [number], values | {"resolved": office.wall()})],
                wall=office.wall(),
                actor=actor,
                action=f"appeal {state}",
                subject=f"{number}: {row.peer}",
                reason=reason,
            )
            after = connection.execute(sa.select(table).where(table.c.number == number)).one()
        log.info("appeal %d is %s by %s: %s", number, state, actor, reason, extra={"peer": row.peer})
        return self._shown(after)

    def _shown(self, row: sa.Row[Any]) -> AppealView:
        node = self._office.pool.nodes.get(row.peer)
        return AppealView(
            id=row.number,
            run=row.run,
            peer=row.peer,
            name=node.name if node is not None else "",
            subject=row.subject,
            text=row.text,
            state=row.state,
            answer=row.answer,
            posting=row.posting,
            created_seconds=row.created,
            resolved_seconds=row.resolved,
        )


def _reply(row: sa.Row[Any]) -> AppealReply:
    return AppealReply(appeal_id=row.appeal_id, state=row.state, answer=row.answer, posting=row.posting)
