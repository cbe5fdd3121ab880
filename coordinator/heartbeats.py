"""Heartbeats: the sign of life of a node, and the signed word on which version is current (DESIGN section 6).

A reply is held until it has news for the node, at most `hold_seconds`; so a new snapshot is known everywhere within one
way's latency, at the price of one open request a node. Also here: T_bcast, and the ends of leases of dead nodes.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from echo2.p2p.errors import Refused
from echo2.p2p.identity import open_signed
from echo2.p2p.messages import HeartbeatBody, HeartbeatReply, PoolNotice

from .capacity import installed_quorum
from .history import update
from .ledger import LedgerUnavailable
from .office import WAIT_SECONDS_MAX
from .records import record

if TYPE_CHECKING:
    from echo2.p2p.messages import Heartbeat

    from .office import Office
    from .pool import NodeEntry

log = logging.getLogger(__name__)

SAME_NEWS_SECONDS = 1.0
"""A node that still lacks what it was told of is told again, but not more often: it is downloading, not deaf."""

REPLY_SECONDS_MAX = 5.0
"""A lease reply may still be on its way for so long when the node says that it holds nothing."""


TWO_PROCESSES = "two processes use this node's key: the later one goes on, the earlier one is told to stop"


class HeartbeatDesk:
    """Answers heartbeats."""

    def __init__(self, office: Office) -> None:
        self._office = office

    async def heartbeat(self, peer: str, heartbeat: Heartbeat) -> HeartbeatReply:
        """Note the sign of life, hold the reply until there is news.

        Raises Refused; BadSignature for one that its sender did not sign.
        """
        office = self._office
        body = open_signed(heartbeat.body, peer, "heartbeat", HeartbeatBody)
        node = office.known_node(peer, body.run)
        self._accept(node, body)
        self._free_forgotten_leases(node, body)
        self.note_installed()
        await self._hold(node, body)
        if body.session != node.session:
            raise _ended()
        node.seen_at = office.clock()  # it has kept the stream open all the while
        reply = self._notice(node, body)
        node.told, node.told_at = self._news(node), office.clock()
        return HeartbeatReply(notice=office.identity.sign("notice", reply))

    def note_installed(self) -> None:
        """T_bcast ends when ceil(q N) of the live working nodes can generate with the newest snapshot."""
        office, current = self._office, self._office.run.current
        if current is None or current.broadcast_seconds is not None or current.published_at is None:
            return
        now = office.clock()
        live = list(office.pool.working(now))
        have = sum(node.manifest_hash == current.manifest_hash for node in live)
        if not live:
            current.published_at = now  # an empty pool is no slow broadcast: the clock starts with its first node
        if not live or have < installed_quorum(len(live)):
            return
        seconds = now - current.published_at
        key = office.run.name, current.manifest.epoch, current.manifest.version
        try:
            with office.ledger.transaction() as connection:
                record(
                    connection,
                    [update("manifests", key, {"broadcast_seconds": seconds})],
                    wall=office.wall(),
                    actor="coordinator",
                    action="broadcast done",
                    subject=f"version {current.manifest.version}",
                    kind="flow",
                )
        except LedgerUnavailable:
            return  # nobody waits for it; the next heartbeat tries again
        current.broadcast_seconds = seconds
        office.run.measure()
        office.work.ring()

    def _accept(self, node: NodeEntry, body: HeartbeatBody) -> None:
        if body.session != node.session:
            if body.session in node.ended_sessions:
                if node.last_reason != TWO_PROCESSES:
                    log.warning("%s: %s", node.name, TWO_PROCESSES, extra={"peer": node.peer})
                node.last_reason = TWO_PROCESSES
                raise _ended()
            if node.session is not None:
                node.ended_sessions.append(node.session)
                self._release(node, "it was started anew")
                self._office.news.ring()  # the one before it may hold a heartbeat: it is to learn that it is not alone
            node.session, node.told, node.idle_since = body.session, None, None
        elif body.sequence <= node.sequence:
            # Signed by its sender all the same, and without effect. An honest node gives a held heartbeat up for its
            # next one, on another stream: which of the two is read first is the network's choice.
            raise Refused("heartbeat_old", f"heartbeat {node.sequence} of this session is here already", 0.0)
        node.sequence = body.sequence
        node.says = body.state
        node.epoch, node.version, node.manifest_hash = body.epoch, body.version, body.manifest_hash
        node.tokens_per_second = body.tokens_per_second
        late = [peer for peer in body.late if peer in self._office.pool.nodes]
        self._office.lateness.said(node.peer, late, (body.epoch, body.version or 0), self._office.clock())

    def _free_forgotten_leases(self, node: NodeEntry, body: HeartbeatBody) -> None:
        """Leases whose reply never arrived: the node says twice that it holds and spools nothing."""
        now = self._office.clock()
        if body.leases_held or body.rollouts_spooled:
            node.idle_since = None
            return
        if node.idle_since is not None:
            before = min(node.idle_since, now - REPLY_SECONDS_MAX)
            self._release(node, "it never got them", granted_before=before)
        node.idle_since = now

    def _release(self, node: NodeEntry, why: str, granted_before: float = float("inf")) -> None:
        office = self._office
        released = office.run.leases.release_peer(node.peer, granted_before)
        office.note_ended(released, f"released: {why}")
        if released:
            log.info("%d leases of %s are anyone's again: %s", len(released), node.name, why)
            office.note_holding(node.peer)
            office.work.ring()

    async def _hold(self, node: NodeEntry, body: HeartbeatBody) -> None:
        office = self._office
        deadline = office.clock() + min(body.hold_seconds, office.config.heartbeat_seconds, WAIT_SECONDS_MAX)
        while body.session == node.session and body.sequence == node.sequence:
            now = office.clock()
            wanted = self._speak_at(node, body, now)
            if now >= min(wanted, deadline):
                return
            await office.news.wait(min(wanted, deadline) - now)

    def _speak_at(self, node: NodeEntry, body: HeartbeatBody, now: float) -> float:
        """When the reply has news: at once, or a while after the same was said; inf when there is none."""
        if self._news(node) != node.told:
            return now
        current = self._office.run.current
        if current is not None and body.manifest_hash != current.manifest_hash:
            return node.told_at + SAME_NEWS_SECONDS
        return float("inf")

    def _news(self, node: NodeEntry) -> tuple[object, ...]:
        run = self._office.run
        return run.current.manifest_hash if run.current else None, run.state, node.state

    def _notice(self, node: NodeEntry, body: HeartbeatBody) -> PoolNotice:
        run = self._office.run
        current = run.current
        return PoolNotice(
            run=run.name,
            run_state=run.state,
            peer=node.peer,
            session=body.session,
            sequence=body.sequence,
            epoch=current.manifest.epoch if current else 0,
            version=current.manifest.version if current else None,
            manifest_hash=current.manifest_hash if current else None,
            node_state=node.state,
            coordinator_time_seconds=self._office.wall(),
        )


def _ended() -> Refused:
    return Refused("session_ended", "another process has gone on with this key since; stop one of the two")
