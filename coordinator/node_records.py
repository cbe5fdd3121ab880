"""Transitions of nodes as the ledger has them: written, and read again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import sqlalchemy as sa

from . import schema
from .cells import check
from .history import Insert
from .records import storable
from .views import TransitionView

if TYPE_CHECKING:
    from .history import Change
    from .ledger import Ledger
    from .node_states import Standing, Transition

TRANSITIONS_SHOWN_MAX = 500
"""Of one node, the newest."""


@dataclass(frozen=True, slots=True)
class Moves:
    """What an event makes of a node: mostly one transition; two where the first one's state has nothing to wait for."""

    peer: str
    standing: Standing
    transitions: tuple[Transition, ...]

    @property
    def values(self) -> dict[str, object]:
        """Of the node's row."""
        standing = self.standing
        row = {"state": standing.state, "reason": storable(standing.reason), "back": standing.back}
        return row | (UNPROVED if self.anew else {})

    @property
    def anew(self) -> bool:
        """Whether a probation begins."""
        return any(made.to_state == "probation" and made.event != "returned" for made in self.transitions)

    def listed(self) -> list[Change]:
        """As the ledger takes them, without the node's row."""
        rows = [
            (
                one.peer,
                one.number,
                one.event,
                one.from_state,
                one.to_state,
                one.actor,
                storable(one.reason),
                one.wall,
                one.expires,
            )
            for one in self.transitions
        ]
        return [Insert("node_transitions", TRANSITION_COLUMNS, rows)]


PROGRESS_COLUMNS = ("warmup_returned", "warmup_failed", "benchmark_rollouts", "benchmark_tokens")
UNPROVED: dict[str, object] = dict(zip(PROGRESS_COLUMNS, (0, 0, None, None), strict=True))
TRANSITION_COLUMNS = ("peer", "number", "event", "from_state", "to_state", "actor", "reason", "wall", "expires")


def transitions_of(ledger: Ledger, peer: str) -> list[TransitionView]:
    """A node's transitions, the newest first. Raises Refused while the ledger cannot be read."""
    table = schema.node_transitions
    query = sa.select(table).where(table.c.peer == peer).order_by(table.c.number.desc())
    with ledger.reading() as connection:
        rows = connection.execute(query.limit(TRANSITIONS_SHOWN_MAX)).all()
    views = []
    with ledger.loading(table):
        for row in rows:
            check(row, table.columns)
            views.append(
                TransitionView(
                    number=row.number,
                    event=row.event,
                    from_state=row.from_state,
                    to_state=row.to_state,
                    actor=row.actor,
                    reason=row.reason,
                    wall_seconds=row.wall,
                    expires_seconds=row.expires,
                )
            )
    return views
