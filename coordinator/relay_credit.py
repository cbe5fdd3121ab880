"""Credit for snapshots passed on: planned transfers that their receivers acknowledged, signed (DESIGN section 8).

| what is claimed                           | counts                                                                 |
|-------------------------------------------|------------------------------------------------------------------------|
| by a receiver, of a manifest and a relay  | once, for good: the row (manifest, receiver, relay) is the record      |
| of a transfer that no plan the receiver   | nothing; so what is claimed of the root, of strangers, of itself, of   |
| was told foresaw                          | snapshots it was given no plan of                                      |
| more bytes than those plans foresaw       | what they foresaw                                                      |
| more in all than the snapshot is long     | up to its length, however many plans the receiver was told             |

A plan of the kind star has every byte come from the root: nothing to credit. What was foreseen is in memory only: of a
download whose plan was told before the coordinator was started anew nothing is credited. Two nodes of one owner may
claim transfers between them that never were; the plan, which neither of them makes, bounds what that can bring.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import sqlalchemy as sa

from echo2.p2p.plan import chunks_on

from . import accounts, pricing, schema
from .history import Insert
from .ledger import LedgerUnavailable
from .records import record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from echo2.p2p.messages import BroadcastPlan, Manifest, PlanEdge, PlanEntry, Relayed

    from .office import Office

log = logging.getLogger(__name__)

SNAPSHOTS_FORESEEN = 4
"""The newest ones and their bases: a node says what it got until it has the next one."""


@dataclass(slots=True)
class _Snapshot:
    """What is foreseen of one snapshot: `plan` now, `told` of it and of those before it, by receiver and relay."""

    manifest: Manifest
    root: str
    plan: dict[str, PlanEntry] = field(default_factory=dict)
    told: dict[str, dict[str, int]] = field(default_factory=dict)
    credited: dict[str, dict[str, int]] = field(default_factory=dict)


class RelayBook:
    """What plans foresaw, and what of it was credited. The ledger has the latter for good."""

    def __init__(self) -> None:
        self._snapshots: OrderedDict[bytes, _Snapshot] = OrderedDict()
        self._totals: dict[str, pricing.Credits] = {}
        self._loaded = False

    def planned(self, manifest: Manifest, plan: BroadcastPlan) -> None:
        """This is the plan that is told from now on."""
        known = self._snapshots.pop(plan.manifest_hash, None)
        known = self._snapshots[plan.manifest_hash] = known or _Snapshot(manifest, plan.root.peer)
        known.plan = {} if plan.kind == "star" else {entry.node.peer: entry for entry in plan.entries}
        while len(self._snapshots) > SNAPSHOTS_FORESEEN:
            self._snapshots.popitem(last=False)

    def told(self, manifest_hash: bytes, peer: str) -> None:
        """`peer` is told the plan."""
        known = self._snapshots.get(manifest_hash)
        entry = known.plan.get(peer) if known is not None else None
        if known is None or entry is None:
            return
        foreseen: dict[str, int] = {}
        for edge in entry.edges:
            if edge.source not in {known.root, peer}:
                foreseen[edge.source] = foreseen.get(edge.source, 0) + bytes_on(edge, known.manifest)
        before = known.told.setdefault(peer, {})
        for source, length in foreseen.items():
            before[source] = max(length, before.get(source, 0))

    def credit(self, office: Office, receiver: str, relayed: Sequence[Relayed]) -> None:
        """Credit what a receiver acknowledges and was not credited yet. A ledger that is away: it is said again."""
        wanted = [each for each in relayed if self._may_count(receiver, each)]
        if not wanted:
            return
        try:
            with office.ledger.transaction() as connection:
                counted, totals = self._post(connection, office, receiver, wanted)
        except LedgerUnavailable as error:
            log.info("relayed bytes are credited later: %s", error)
            return
        self._totals |= totals
        for (manifest_hash, relay), length in counted.items():
            self._snapshots[manifest_hash].credited.setdefault(receiver, {})[relay] = length

    def _may_count(self, receiver: str, each: Relayed) -> bool:
        known = self._snapshots.get(each.manifest_hash)
        if known is None or each.source not in known.told.get(receiver, {}):
            return False
        return each.source not in known.credited.get(receiver, {})

    def _post(
        self, connection: sa.Connection, office: Office, receiver: str, wanted: Sequence[Relayed]
    ) -> tuple[dict[tuple[bytes, str], int], dict[str, pricing.Credits]]:
        """(what is counted now or was before, by manifest and relay; the relays' totals after it)."""
        run, wall = office.run.name, office.wall()
        if not self._loaded:
            self._load(connection, run)
        counted: dict[tuple[bytes, str], int] = {}
        totals: dict[str, pricing.Credits] = {}
        entries: list[accounts.Entry] = []
        rows: list[tuple[bytes, str, str, int]] = []
        for each in wanted:
            known, key = self._snapshots[each.manifest_hash], (each.manifest_hash, each.source)
            if key in counted:
                continue
            before = self._on_record(connection, each.manifest_hash, receiver)
            before |= {relay: length for (of, relay), length in counted.items() if of == each.manifest_hash}
            if each.source in before:
                counted[key] = before[each.source]
                continue
            left = known.manifest.length_bytes - sum(before.values())
            length = max(0, min(each.length_bytes, known.told[receiver][each.source], left))
            counted[key] = length
            rows.append((each.manifest_hash, receiver, each.source, length))
            mine = totals.get(each.source) or self._totals.get(each.source) or pricing.Credits(each.source, run)
            totals[each.source], entry = pricing.credit_relayed(mine, office.payroll.rates, length)
            if entry is not None:
                earned = (entry.kind, entry.unit, entry.amount_micros, entry.quantity)
                entries.append(accounts.Entry(run, each.source, *earned, "coordinator", entry.reason))
        if rows:
            change = Insert("relays", ("manifest_hash", "receiver", "relay", "bytes"), rows, {"run": run})
            facts = {"actor": receiver, "action": "relays acknowledged", "subject": run}
            record(connection, [change], wall=wall, kind="flow", **facts)
            accounts.append(connection, entries, wall=wall)
        return counted, totals

    def _on_record(self, connection: sa.Connection, manifest_hash: bytes, receiver: str) -> dict[str, int]:
        table = schema.relays
        query = sa.select(table.c.relay, table.c.bytes)
        mine = query.where(table.c.manifest_hash == manifest_hash, table.c.receiver == receiver)
        return {row.relay: row.bytes for row in connection.execute(mine)}

    def _load(self, connection: sa.Connection, run: str) -> None:
        """The relays' totals: an entry is what is due for all bytes, less what was entered."""
        table, posted = schema.relays, schema.postings
        sums = sa.select(table.c.relay, sa.func.sum(table.c.bytes).label("total"))
        for row in connection.execute(sums.where(table.c.run == run).group_by(table.c.relay)):
            self._totals[row.relay] = pricing.Credits(row.relay, run, relayed_bytes=int(row.total))
        entered = sa.select(posted.c.peer, sa.func.sum(posted.c.amount_micros).label("total"))
        mine = entered.where(posted.c.run == run, posted.c.kind == "relay", posted.c.unit == "credit")
        for row in connection.execute(mine.group_by(posted.c.peer)):
            before = self._totals.get(row.peer) or pricing.Credits(row.peer, run)
            self._totals[row.peer] = replace(before, relayed_entered=int(row.total))
        self._loaded = True


def bytes_on(edge: PlanEdge, manifest: Manifest) -> int:
    """How many bytes travel one edge; the last chunk of a snapshot may be shorter."""
    chunks = chunks_on(edge)
    last = (manifest.length_bytes - 1) // manifest.chunk_bytes
    short = (last + 1) * manifest.chunk_bytes - manifest.length_bytes if last in chunks else 0
    return len(chunks) * manifest.chunk_bytes - short
