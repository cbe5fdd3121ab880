"""Builds the views of the pool and its nodes from memory, over all runs. Nothing here changes anything."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from . import capacity
from .money import MICRO
from .overview import counts_view
from .pricing import PICO_PER_MICRO
from .views import NodeView, PoolView

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .house import House
    from .office import Office
    from .pool import NodeEntry

PICO = MICRO * PICO_PER_MICRO

EXPLAINED = frozenset({"applied", "draining", "suspended", "banned"})
"""States that are why a node gets no leases."""

ALWAYS_COUNTED = frozenset({"suspended", "banned", "left"})
"""States in which nobody expects to hear of a node: it is not dead."""


class PoolOverview:
    """The read-only side of what all runs share."""

    def __init__(self, house: House) -> None:
        self._house = house

    def pool(self, addresses: tuple[str, ...], confinement: tuple[str, ...]) -> PoolView:
        """The pool as a whole. `confinement`: the layers that hold around the scorers.

        Of several runs, rates are the sums; durations are each run's own.
        """
        house, now = self._house, self._house.clock()
        first, one = house.first, len(house.offices) == 1
        health = Counter(self._standing(node, now) for node in house.pool.nodes.values())
        refused: Counter[str] = Counter()
        for office in house:
            refused.update(office.tally.refused)
        needed = [office.mu_min() for office in house if one or office.run.state == "running"]
        known = [least for least in needed if least is not None]
        least = sum(known) if known and len(known) == len(needed) else None
        return PoolView(
            coordinator=first.identity.peer_id,
            addresses=addresses,
            nodes_healthy=health["healthy"],
            nodes_late=health["late"],
            nodes_dead=health["dead"],
            nodes_suspended=health["suspended"],
            nodes_standby=health["standby"],
            nodes_applied=health["applied"],
            nodes_probation=health["probation"],
            nodes_draining=health["draining"],
            nodes_banned=health["banned"],
            nodes_left=health["left"],
            mu_pool=house.pool.mu(now),
            mu_min=least,
            mu_target=capacity.mu_target(least, house.config.activation.gamma),
            t_bcast_seconds=first.t_bcast() if one else None,
            t_train_seconds=first.t_train() if one else None,
            refused=dict(refused),
            protocol_errors=first.complaints.total,
            scorer_confinement=confinement,
            trouble="; ".join(filter(None, [house.ledger.trouble, *(office.scorer_trouble for office in house)])),
        )

    def nodes(self) -> list[NodeView]:
        """Every node ever admitted, in the order of admission."""
        now = self._house.clock()
        self._house.first.balances.catch_up(self._house.ledger)
        return [self._node(node, now) for node in self._house.pool.nodes.values()]

    def nodes_of(self, office: Office) -> list[NodeView]:
        """Those that are in a run or have delivered to it, with the rollouts of that run alone."""
        now, did = self._house.clock(), office.tally.by_peer
        office.balances.catch_up(self._house.ledger)
        nodes = [node for node in self._house.pool.nodes.values() if office.pool.has(node) or node.peer in did]
        return [self._node(node, now, [office]) for node in nodes]

    def node(self, peer: str) -> NodeView:
        """One of them. Raises KeyError."""
        return self._node(self._house.pool.nodes[peer], self._house.clock())

    def _standing(self, node: NodeEntry, now: float) -> str:
        """What a node is counted as: it is one of these."""
        if node.state in ALWAYS_COUNTED:
            return node.state
        health = node.health(now, self._house.pool.heartbeat_seconds)
        return health if node.state == "active" or health == "dead" else node.state

    def _node(self, node: NodeEntry, now: float, of: Iterable[Office] = ()) -> NodeView:
        """`of`: whose rollouts are counted; none: of all runs."""
        house, office = self._house, self._house.of_node(node)
        counts: Counter[str] = Counter()
        for each in of or house:
            counts.update(each.tally.by_peer.get(node.peer, {}))
        train = counts_view(counts)
        held = [lease for each in house for lease in each.run.leases.held_by(node.peer)]
        version = office.run.version
        errors, _ = office.complaints.of(node.peer)
        proved = office.proved(node.peer, node.addresses)
        engaged = office.payroll.of(node.peer)
        resting = f"resting {node.rest_until - now:.0f} s: " if now < node.rest_until else ""
        proving, measured = node.state == "probation", node.probation.benchmark
        return NodeView(
            peer=node.peer,
            name=node.name,
            run=node.run,
            software=node.software,
            addresses=proved,
            reachable=bool(proved),
            state=node.state,
            state_reason=node.state_reason,
            state_since=node.standing.since,
            state_expires=node.standing.expires,
            state_by=node.standing.actor,
            warmup_returned=node.probation.returned if proving else 0,
            warmup_failed=node.probation.failed if proving else 0,
            warmup_leases=office.config.admission.warmup_leases if proving else 0,
            benchmark_rollouts_per_second=None if measured is None else measured.rollouts_per_second,
            benchmark_tokens_per_second=None if measured is None else measured.tokens_per_second,
            leases_judged=len(node.window),
            leases_unanswered=node.window.lost,
            health=node.health(now, office.pool.heartbeat_seconds),
            last_seen_seconds=None if node.seen_at is None else now - node.seen_at,
            node_says=node.says,
            epoch=node.epoch,
            version=node.version,
            version_lag=None if version is None or node.version is None else max(0, version - node.version),
            price_hour=(node.price if engaged is None else engaged.account.price) / MICRO,
            rho_dollars=None if engaged is None or engaged.account.rho is None else engaged.account.rho / PICO,
            balance_dollars=office.balances.of(node.peer, "usd") / MICRO,
            balance_credits=office.balances.of(node.peer, "credit") / MICRO,
            standby=node.standby,
            mu=node.meter.rate(now),
            tokens_per_second=node.tokens_per_second,
            leases_held=len(held),
            samples_held=sum(lease.span.count for lease in held),
            accepted=train.held + train.admitted + train.consumed + train.stale + train.withdrawn,
            rejected=train.rejected,
            evaluated=counts["eval evaluated"],
            rollouts=train,
            protocol_errors=errors,
            reason=resting + (node.state_reason if node.state in EXPLAINED else node.last_reason),
        )
