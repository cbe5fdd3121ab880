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

from . import sessions
from .capacity import installed_quorum
from .history import update
from .ledger import LedgerUnavailable
from .node_states import SERVING
from .office import WAIT_SECONDS_MAX, moved
from .records import record

if TYPE_CHECKING:
    from echo2.p2p.messages import Heartbeat

    from .node_life import NodeLife
    from .office import Office
    from .pool import NodeEntry
    from .run_book import Published

log = logging.getLogger(__name__)

SAME_NEWS_SECONDS = 1.0
"""A node that still lacks what it was told of is told again, but not more often: it is downloading, not deaf."""

REPLY_SECONDS_MAX = 5.0
"""A lease reply may still be on its way for so long when the node says that it holds nothing."""


GOODBYE = "stopped"
"""What a node says of itself when it stops in order: it is not dead, it has left."""


class HeartbeatDesk:
    """Answers heartbeats."""

    def __init__(self, office: Office, life: NodeLife) -> None:
        self._office = office
        self._life = life

    async def heartbeat(self, peer: str, heartbeat: Heartbeat) -> HeartbeatReply:
        """Note the sign of life, hold the reply until there is news.

        Raises Refused; BadSignature for one that its sender did not sign.
        """
        office = self._office
        body = open_signed(heartbeat.body, peer, "heartbeat", HeartbeatBody)
        node = office.check_placed(peer, body.run)
        changed = self._accept(node, body)
        if body.state == GOODBYE:
            self._life.goodbye(node)
            return HeartbeatReply(notice=office.identity.sign("notice", self._notice(node, body)))
        self._free_forgotten_leases(node, body)
        if changed:  # else it is not what a broadcast waits for; and the timer looks as well
            self.note_installed()
        await self._hold(node, body)
        if body.session != node.session:
            raise Refused("session_ended", sessions.ENDED)
        if not office.pool.has(node):
            raise moved(node.run)
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
        live = office.pool.counted(now)
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
        office.measures.broadcasts.observe(seconds)
        office.run.measure()
        office.work.ring()

    def _accept(self, node: NodeEntry, body: HeartbeatBody) -> bool:
        """Whether it has another snapshot than before."""
        office, now = self._office, self._office.clock()
        self._claim(node, body.session, now)
        if body.sequence <= node.sequence:
            # Signed by its sender all the same, and without effect. An honest node gives a held heartbeat up for its
            # next one, on another stream: which of the two is read first is the network's choice.
            raise Refused("heartbeat_old", f"heartbeat {node.sequence} of this session is here already", 0.0)
        node.seen_at = now
        node.sequence = body.sequence
        self._office.measures.heartbeats_received += 1
        node.says = body.state
        changed = node.manifest_hash != body.manifest_hash
        if changed:
            node.installed_at = now
        node.fetching = body.fetching
        node.epoch, node.version, node.manifest_hash = body.epoch, body.version, body.manifest_hash
        node.tokens_per_second = body.tokens_per_second
        late = [peer for peer in body.late if peer in office.pool.nodes]
        office.lateness.said(node.peer, late, (body.epoch, body.version or 0), now)
        office.relays.credit(office, node.peer, body.relayed)
        return changed

    def _claim(self, node: NodeEntry, session: bytes, now: float) -> None:
        """The session is the live one from now on. Raises Refused."""
        try:
            anew = sessions.check(node, session, None, now, self._office.config.heartbeat_seconds)
        except Refused as refused:
            if refused.code == "identity_live":
                self._life.rival_refused(node)
            raise
        if anew:
            self._life.adopt(node, session, None)

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

    def _release(self, node: NodeEntry, why: str, granted_before: float) -> None:
        office = self._office
        released = office.run.leases.release_peer(node.peer, granted_before)
        office.note_ended(released, f"released: {why}", "gone")
        if released:
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
        current = self._current(node)
        if current is not None and body.manifest_hash != current.manifest_hash:
            return node.told_at + SAME_NEWS_SECONDS
        return float("inf")

    def _news(self, node: NodeEntry) -> tuple[object, ...]:
        current = self._current(node)
        warned = bool(sessions.warning(node, self._office.clock()))
        return current.manifest_hash if current else None, self._office.run.state, node.standing, warned

    def _current(self, node: NodeEntry) -> Published | None:
        """The newest snapshot, for a node that may have it."""
        return self._office.run.current if node.state in SERVING else None

    def _notice(self, node: NodeEntry, body: HeartbeatBody) -> PoolNotice:
        office, run = self._office, self._office.run
        current = self._current(node)
        expires = node.standing.expires
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
            coordinator_time_seconds=office.wall(),
            node_reason=node.state_reason[:512],
            node_expires_seconds=None if expires is None else min(max(expires - office.wall(), 0.0), 1e9),
            warmup_returned=node.probation.returned if node.state == "probation" else 0,
            warmup_leases=office.config.admission.warmup_leases if node.state == "probation" else 0,
            warning=sessions.warning(node, office.clock()),
        )
