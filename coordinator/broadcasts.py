"""Plans and tickets for the newest snapshot and its base: who sends what to whom, signed (DESIGN section 8)."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from echo2.p2p.errors import Refused
from echo2.p2p.messages import NODES_MAX, ManifestReply, PeerAddress, Ticket
from echo2.p2p.plan import build_plan

from .node_states import SERVING

if TYPE_CHECKING:
    from collections.abc import Container

    from echo2.p2p.messages import ManifestRequest, Signed

    from .office import Office
    from .pool import NodeEntry
    from .run_book import Published

log = logging.getLogger(__name__)


class BroadcastDesk:
    """Answers nodes that ask for a snapshot."""

    def __init__(self, office: Office) -> None:
        self._office = office

    async def manifest(self, peer: str, request: ManifestRequest) -> ManifestReply:
        """The manifest, the plan as it is now with the asker in it, and its ticket. Raises Refused."""
        office = self._office
        node = office.placed_node(peer, request.run)
        if node.state not in SERVING:
            raise Refused(node.state, f"{node.state}: {node.state_reason}"[:512], office.config.heartbeat_seconds)
        current = office.run.current
        if current is None:
            raise Refused("no_snapshot", "no snapshot published yet", office.config.heartbeat_seconds)
        wanted = current
        if request.manifest_hash == current.manifest.base_hash:  # what the newest, an adapter, is worth nothing without
            wanted = office.run.manifests[request.manifest_hash]
        elif request.manifest_hash != current.manifest_hash:
            raise Refused("superseded", f"version {current.manifest.version} is the newest; ask for that", 0.0)
        if peer not in wanted.roster and len(wanted.roster) < NODES_MAX:
            wanted.plan = None  # made anew, to hold the late joiner; one without it takes everything from the root
        plan = self.plan(wanted)
        office.relays.told(wanted.manifest_hash, peer)
        ticket = Ticket(run=office.run.name, manifest_hash=wanted.manifest_hash, peer=peer)
        return ManifestReply(
            manifest=wanted.signed,
            plan=plan,
            ticket=office.identity.sign("ticket", ticket),
        )

    def plan(self, published: Published) -> Signed:
        """The signed plan over the live active nodes; kept until the roster or a proved address changes."""
        office = self._office
        if published.plan is None:
            nodes = sorted(office.pool.live(office.clock()), key=lambda node: node.peer)[:NODES_MAX]
            late = office.lateness.late(office.clock())
            for node in nodes:
                if node.peer in late:
                    node.last_reason = "others waited for it in vain: it relays nothing for a while"
                    log.info("%s is a leaf of version %d: %s", node.name, published.manifest.version, node.last_reason)
            plan = build_plan(
                office.config.run.broadcast,
                manifest=published.manifest,
                manifest_hash=published.manifest_hash,
                root=PeerAddress(peer=office.config.run.learner, addresses=office.run.learner_addresses),
                nodes=[
                    PeerAddress(
                        peer=node.peer,
                        addresses=self._relays_at(node, late),
                    )
                    for node in nodes
                ],
            )
            office.relays.planned(published.manifest, plan)
            if published is office.run.current:  # what nodes say of each other is said of that one
                office.lateness.planned(plan)
            published.plan = office.identity.sign("plan", plan)
            published.plan_kind = plan.kind
            published.roster = frozenset(node.peer for node in nodes)
        return published.plan

    def _relays_at(self, node: NodeEntry, late: Container[str]) -> tuple[str, ...]:
        """Where others may be sent to a node; nowhere while it has yet to show that it can be relied on."""
        if node.peer in late or node.state == "probation":
            return ()
        return self._office.proved(node.peer, node.addresses)
