"""The life of nodes: every change of state goes through `node_states.step`, is made durable, then takes effect.

| takes effect       | what follows                                                                               |
|--------------------|--------------------------------------------------------------------------------------------|
| suspended, banned  | what it holds is anyone's; if somebody distrusts it, its unconsumed rollouts are withdrawn |
| banned             | its hellos are answered with the reason, then its connections are refused for a while      |
| left               | what it holds is anyone's                                                                  |
| probation, anew    | it is measured again, and what it did before is not held against it                        |
| any                | plans are made anew, and whoever waits for news or work looks again                        |

`look` finds, a few times a second, whose time is over: suspensions and bans by their expiry, probations by their
verdict, unreliable nodes by their window, drained ones that are not heard of any more.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from . import sessions
from .history import Update, update
from .ledger import LedgerUnavailable
from .node_records import PROGRESS_COLUMNS, Moves
from .node_states import TABLE, WITHDRAWING, overdue, step
from .probation import Probation
from .records import add_event, record

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import sqlalchemy as sa

    from echo2.p2p.transport import Transport

    from .history import Change
    from .house import House
    from .node_states import NodeEvent, Standing, Transition
    from .pool import NodeEntry
    from .records import EventKind
    from .run_book import Changes, RunBook

log = logging.getLogger(__name__)

ACTOR = "coordinator"

TOLD_SECONDS = 2.0
"""Between the answer that tells a banned peer why and the end of its connections: the answer must have left."""

REFUSED_SECONDS = 30.0
REFUSED_SECONDS_MAX = 480.0
"""For how long a banned peer's connections are refused after it was told why; twice as long each time it comes back. A
node that its owner starts again is told within that; one that hammers costs us a handshake, and no answer."""

DAILY: frozenset[NodeEvent] = frozenset({"goodbye", "returned", "activated", "released"})
"""Too frequent for the audit log; the node's own list has them."""


class NodeLife:
    """See the module."""

    def __init__(self, house: House, transport: Transport) -> None:
        self._house = house
        self._transport = transport
        self._rules = house.config.admission.warmup
        self._refuse_at: dict[str, float] = {}
        self._refused: dict[str, int] = {}
        self._said = ""

    # deciding

    def moves(
        self,
        peer: str,
        standing: Standing,
        event: NodeEvent,
        *,
        actor: str,
        reason: str,
        expires_seconds: float | None = None,
        price: int | None = None,
    ) -> Moves:
        """What `event` would make of a node; `price`: of one not in the pool yet. Raises Refused. Changes nothing."""
        wall = self._house.wall()
        expires = None if expires_seconds is None else wall + expires_seconds
        standing, made = step(standing, event, peer=peer, actor=actor, reason=reason, wall=wall, expires=expires)
        found = [made]
        if standing.state == "probation" and not self._rules.leases and event != "returned":
            verdict = Probation().verdict(self._rules)
            assert verdict is not None, "nothing is asked for"
            standing, made = step(standing, "passed", peer=peer, actor=ACTOR, reason=verdict.reason, wall=wall)
            found.append(made)
        if price is None:
            price = self._house.pool.nodes[peer].price
        if price and standing.state == "active" and made.event in {"passed", "restored"}:
            why = "it has a price: it is called when the pool makes too little without it"
            standing, made = step(standing, "released", peer=peer, actor="scheduler", reason=why, wall=wall)
            found.append(made)
        return Moves(peer, standing, tuple(found))

    # changing

    def change(
        self, peer: str, event: NodeEvent, *, actor: str, reason: str, expires_seconds: float | None = None
    ) -> None:
        """One node, durably. Raises KeyError for an unknown node, Refused for what the table does not have."""
        house, node = self._house, self._house.pool.nodes[peer]
        moves = self.moves(peer, node.standing, event, actor=actor, reason=reason, expires_seconds=expires_seconds)
        withdrawn: list[Changes] = []
        asked: list[tuple[RunBook, bytes, int]] = []
        for office in house if event in WITHDRAWING else ():
            changes = office.changes()
            for (lease_id, sample), entry in office.run.unfinished.items():
                if entry.peer != peer:
                    continue
                if office.run.was_delivered(entry):
                    asked.append((office.run, lease_id, sample))  # the learner may be training on it: it decides
                else:
                    why = f"its node was {moves.standing.state}: {reason}"[:512]
                    changes.finish(entry, "withdrawn", why, suspended=True)
            if changes:
                withdrawn.append(changes)
        kind: EventKind = "flow" if event in DAILY else "audit"
        with house.ledger.transaction() as connection:
            self.record(connection, [moves], withdrawn, kind=kind)
        for changes in withdrawn:
            changes.apply()
        for run, lease_id, sample in asked:
            run.withdraw[lease_id, sample] = False
        self.apply([moves])

    def record(
        self, connection: sa.Connection, moves: Sequence[Moves], changes: Sequence[Changes] = (), *, kind: EventKind
    ) -> None:
        """Put moves of known nodes on record, with what else changes by them in the runs."""
        first, *others = changes or [self._house.first.changes()]
        for one in moves:
            for made in one.transitions[:-1]:  # each has its line, the last one brings the changes
                self._line(connection, made, [], self._house.first.changes(), kind)
            rows = [update("nodes", [one.peer], one.values), *one.listed()]
            made = one.transitions[-1]
            self._line(connection, made, rows, first, kind)
            for each in others:
                each.write(connection, wall=made.wall, actor=made.actor, action=f"node {made.to_state}")
            first, others = self._house.first.changes(), []

    def _line(
        self, connection: sa.Connection, made: Transition, rows: Sequence[Change], changes: Changes, kind: EventKind
    ) -> None:
        changes.record(
            connection,
            *rows,
            wall=made.wall,
            actor=made.actor,
            action=f"node {made.to_state}",
            subject=made.peer,
            reason=made.reason,
            kind=kind,
        )

    def apply(self, moves: Iterable[Moves]) -> None:
        """They are durable: memory, leases, connections and bells follow."""
        house = self._house
        changed = False
        for one in moves:
            node = house.pool.nodes.get(one.peer)
            if node is None:
                continue
            changed = True
            self._say(node, one)
            node.standing = one.standing
            if one.anew:
                node.probation, node.unrecorded = Probation(), False
            for made in one.transitions:
                self._follow(node, made)
            house.of_node(node).run.forget_plans()
        for office in house if changed else ():
            for bell in (office.news, office.work, office.admissions):
                bell.ring()

    def _say(self, node: NodeEntry, moves: Moves) -> None:
        words = {"restored": "was restored", "unbanned": "was unbanned", "returned": "is back", "drained": "is drained"}
        for made in moves.transitions:
            level = logging.WARNING if made.to_state in {"suspended", "banned"} else logging.INFO
            was = words.get(made.event, f"was {made.to_state}" if level == logging.WARNING else f"is {made.to_state}")
            if made.event not in {"joined", "applied"} and made.event not in DAILY:
                log.log(level, "%s %s by %s: %s", node.name, was, made.actor, made.reason, extra={"peer": node.peer})

    def _follow(self, node: NodeEntry, made: Transition) -> None:
        if made.to_state in {"suspended", "banned", "left"}:
            self._release(node, made)
        if made.from_state == "suspended":
            node.window.clear()
        if made.event == "restored":
            node.slice_accepted()
        if made.to_state == "banned":
            self.refuse_soon(node.peer)
        elif made.from_state == "banned":
            self._refuse_at.pop(node.peer, None)
            self._refused.pop(node.peer, None)
            self._transport.lift_ban(node.peer)

    def _release(self, node: NodeEntry, made: Transition) -> None:
        left = made.to_state == "left"
        was = "has left" if left else f"was {made.to_state}"
        for office in self._house:
            released = office.run.leases.release_peer(node.peer)
            office.note_ended(released, f"released: its node {was}", "gone" if left else "none")
            office.note_holding(node.peer)

    # the wire's side of a ban

    def refuse_soon(self, peer: str) -> None:
        """A banned peer is being told why; after that its connections end and are refused for a while."""
        self._refuse_at.setdefault(peer, self._house.clock() + TOLD_SECONDS)

    def _refuse(self, now: float) -> None:
        for peer, at in list(self._refuse_at.items()):
            if now < at:
                continue
            del self._refuse_at[peer]
            node = self._house.pool.nodes.get(peer)
            if node is None or node.state != "banned":
                continue
            times = self._refused[peer] = self._refused.get(peer, 0) + 1
            seconds = min(REFUSED_SECONDS * 2.0 ** min(times - 1, 10), REFUSED_SECONDS_MAX)
            if node.standing.expires is not None:
                seconds = min(seconds, max(node.standing.expires - self._house.wall(), 0.0))
            self._transport.ban(peer, f"banned: {node.state_reason}", seconds)

    # which process it is

    def adopt(self, node: NodeEntry, session: bytes, home: bytes | None) -> None:
        """Another process than before goes on with the node's key: what the one before held is anyone's."""
        for office in self._house if node.session is not None else ():
            released = office.run.leases.release_peer(node.peer)
            office.note_ended(released, "released: it was started anew", "gone")
            if released:
                log.info("%d leases of %s are anyone's again: it was started anew", len(released), node.name)
                office.note_holding(node.peer)
                office.work.ring()
            office.news.ring()  # the process before it may hold a heartbeat: it is to learn that it is over
        sessions.adopt(node, session, home)

    def rival_refused(self, node: NodeEntry) -> None:
        """A second process with the key of a live one was turned away: the live one's owner and the operator hear."""
        house = self._house
        host = self._transport.remote(node.peer)
        if not sessions.rival(node, host, house.clock()):
            return
        log.warning("%s: %s", node.name, node.rival, extra={"peer": node.peer})
        house.of_node(node).news.ring()
        with suppress(LedgerUnavailable), house.ledger.transaction() as connection:
            add_event(
                connection,
                wall=house.wall(),
                actor=ACTOR,
                action="second process refused",
                subject=node.peer,
                reason=node.rival,
            )

    # as time goes by

    def goodbye(self, node: NodeEntry) -> None:
        """Its process has said that it stops. Raises Refused while the ledger cannot be written."""
        if (node.state, "goodbye") in TABLE:
            self.change(node.peer, "goodbye", actor=node.peer, reason="it said goodbye")
        sessions.end(node)
        node.seen_at = None

    def look(self) -> None:
        """Whose time is over. A ledger that takes nothing now is tried again at the next look."""
        house, now, wall = self._house, self._house.clock(), self._house.wall()
        self._refuse(now)
        try:
            for node in list(house.pool.nodes.values()):
                self._look_at(node, now, wall)
            self._record_progress()
            self._said = ""
        except LedgerUnavailable as error:
            if str(error) != self._said:
                log.warning("no node changes its state: %s", error)
            self._said = str(error)

    def _look_at(self, node: NodeEntry, now: float, wall: float) -> None:
        limits = self._house.config.admission
        if overdue(node.standing, wall):
            what = "suspension" if node.state == "suspended" else "ban"
            self.change(node.peer, "lapsed", actor=ACTOR, reason=f"its {what} is over")
        elif node.state == "probation":
            verdict = node.probation.verdict(self._rules)
            if verdict is not None and verdict.passed:
                self.change(node.peer, "passed", actor=ACTOR, reason=verdict.reason)
            elif verdict is not None:
                self._suspend(node, "failed", f"probation: {verdict.reason}")
        elif (node.state, "unreliable") in TABLE:
            why = node.window.verdict(limits.expired_share_max)
            if why:
                self._suspend(node, "unreliable", why)
            elif node.state == "draining" and self._gone(node, now):
                self.change(node.peer, "gone", actor=ACTOR, reason="it was drained, and is not heard of any more")

    def _gone(self, node: NodeEntry, now: float) -> bool:
        """Dead by our own hearing: a coordinator that has just started has not listened long enough."""
        return node.seen_at is not None and node.health(now, self._house.pool.heartbeat_seconds) == "dead"

    def _suspend(self, node: NodeEntry, event: NodeEvent, why: str) -> None:
        self.change(
            node.peer, event, actor=ACTOR, reason=why, expires_seconds=self._house.config.admission.suspension_seconds
        )

    def _record_progress(self) -> None:
        """How far probations are: at most half a second of it is lost with the process."""
        house = self._house
        nodes = [node for node in house.pool.nodes.values() if node.unrecorded]
        if not nodes:
            return
        rows = [
            (
                node.peer,
                node.probation.returned,
                node.probation.failed,
                None if node.probation.benchmark is None else node.probation.benchmark.rollouts_per_second,
                None if node.probation.benchmark is None else node.probation.benchmark.tokens_per_second,
            )
            for node in nodes
        ]
        with house.ledger.transaction() as connection:
            record(
                connection,
                [Update("nodes", PROGRESS_COLUMNS, rows)],
                wall=house.wall(),
                actor=ACTOR,
                action="probation",
                subject=f"{len(rows)} nodes",
                kind="flow",
            )
        for node in nodes:
            node.unrecorded = False
