"""What every desk of the coordinator shares: configuration, key, ledger, clocks, the pool, the run, and bells."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from echo2.p2p.errors import Refused
from echo2.p2p.log_lines import shorts, tell
from echo2.p2p.words import time_left

from . import capacity
from .balances import Balances
from .lateness import Lateness
from .ledger import Ledger, LedgerUnavailable, RetiredLedger
from .measures import Measures
from .payroll import Payroll, Settlement
from .pool import Complaints, NodeEntry, Pool, Tally
from .records import ended_leases, record
from .relay_credit import RelayBook
from .run_book import Changes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from echo2.p2p.errors import ProtocolError
    from echo2.p2p.identity import Identity
    from echo2.tasks.scorer import Scorer

    from .config import CoordinatorConfig
    from .leases import Kind, LeaseEntry
    from .probation import Fault
    from .prompts import PromptBook
    from .run_book import RunBook

log = logging.getLogger(__name__)

WAIT_SECONDS_MAX = 30.0
"""Longest that a request is held, whatever the asker allows: within every time-out on the way."""

WAIT_SECONDS_MIN = 0.001
"""Shortest wait: "until the deadline" may come out as 1e-16 s, and a loop that waits so long stands still in time."""

APPLIED_RETRY_SECONDS = 60.0
"""When a node that waits for the operator may ask again for what it does not get."""


class Bell:
    """Wakes every task that waits when something changed. A wait is bounded and may wake for nothing."""

    def __init__(self) -> None:
        self._event = trio.Event()
        self._retired = False

    def ring(self) -> None:
        """Wake those who wait now."""
        event, self._event = self._event, trio.Event()
        event.set()

    async def wait(self, seconds: float) -> None:
        """Until the next ring, at most so long. Raises Refused once nothing can come of it any more."""
        with trio.move_on_after(max(seconds, WAIT_SECONDS_MIN)):
            await self._event.wait()
        if self._retired:
            raise Refused("begun_anew", "the coordinator has begun anew from its ledger; ask again", 0.0)

    def retire(self) -> None:
        """Wake them with that."""
        self._retired = True
        self.ring()


@dataclass(slots=True)
class Office:
    """The shared state. Only the trio task that holds the thread changes it, never across an await."""

    config: CoordinatorConfig
    identity: Identity
    ledger: Ledger
    clock: Callable[[], float]
    wall: Callable[[], float]
    entropy: Callable[[int], bytes]
    prompts: PromptBook
    pool: Pool
    run: RunBook
    tally: Tally
    scorer: Scorer
    payroll: Payroll
    complaints: Complaints = field(default_factory=Complaints)
    measures: Measures = field(default_factory=Measures)
    """What is counted for `GET /metrics`; one for as long as the process lives."""
    lateness: Lateness = field(default_factory=Lateness)
    balances: Balances = field(default_factory=Balances)
    relays: RelayBook = field(default_factory=RelayBook)
    news: Bell = field(default_factory=Bell)
    """The pool's version, the run's state or a node's state changed."""
    work: Bell = field(default_factory=Bell)
    """There may be something to lease."""
    arrivals: Bell = field(default_factory=Bell)
    """A rollout is held."""
    admissions: Bell = field(default_factory=Bell)
    """A rollout is admitted, or is to be withdrawn."""
    scorer_trouble: str = ""
    ended: dict[bytes, str] = field(default_factory=dict)
    """Leases that were given up and are not on record as such, with the reason. At most as many as are out."""
    runs: Collection[str] = ()
    """The names of all runs of this coordinator, as they are now; none: there is this one alone."""
    spent_elsewhere: Callable[[], int] = lambda: 0
    """What the nodes at work for other runs cost together, in micro-dollars an hour."""
    proved: Callable[[str, tuple[str, ...]], tuple[str, ...]] = lambda _peer, claimed: claimed
    """Of the addresses that a peer claims, those at which it was found: no others are told to anyone."""

    def retire(self) -> None:
        """Another office has taken over. Whoever is still at work in this one must change nothing any more."""
        self.ledger = RetiredLedger()
        for bell in (self.news, self.work, self.arrivals, self.admissions):
            bell.retire()

    async def open_prompts(self, keys: Iterable[tuple[Kind, int]]) -> None:
        """Have these prompts at hand, where they are an environment's openings. Raises Refused."""
        if self.prompts.sandbox is not None:
            await self.prompts.open(keys, self.scorer)

    def complain(self, peer: str, error: ProtocolError) -> None:
        """Count a peer's protocol error."""
        self.complaints.add(peer, f"{type(error).__name__}: {error}"[:256])
        if peer in self.pool.nodes:
            self.pool.nodes[peer].last_reason = f"{type(error).__name__}: {error}"[:256]

    def changes(self) -> Changes:
        """An empty set of changes to the run."""
        return Changes(self.run, self.pool, self.tally, self.settlement())

    def settlement(self) -> Settlement:
        """An empty set of changes to what is owed."""
        self.payroll.expire(self.clock())
        return Settlement(self.payroll, self.clock())

    def placed_node(self, peer: str, run: str) -> NodeEntry:
        """A known node that works for this run. Raises Refused; one that was moved is to say hello again."""
        node = self.check_placed(peer, run)
        node.seen_at = self.clock()
        return node

    def check_placed(self, peer: str, run: str) -> NodeEntry:
        """The same, without taking its request for a sign of life."""
        node = self.check_known(peer, run)
        if not self.pool.has(node):
            raise moved(node.run)
        return node

    def known_node(self, peer: str, run: str) -> NodeEntry:
        """The asker, a node of this run that has said hello; it is alive. Raises Refused."""
        node = self.check_known(peer, run)
        node.seen_at = self.clock()
        return node

    def check_known(self, peer: str, run: str) -> NodeEntry:
        """The same, without taking its request for a sign of life."""
        self.check_run(run)
        node = self.pool.nodes.get(peer)
        if node is None or node.state == "left":
            raise hello_first()
        if node.state == "banned":
            raise self.banned(node)
        return node

    def banned(self, node: NodeEntry) -> Refused:
        """What a banned node is told."""
        until, left = "", node.standing.expires
        if left is not None:
            until = f" for {time_left(left - self.wall())} more"
        return Refused("banned", f"the operator has banned this node{until}: {node.state_reason}"[:512])

    def known_learner(self, peer: str, run: str) -> None:
        """The asker is the run's learner. Raises Refused."""
        self.check_run(run)
        refused = self.not_the_learner(peer)
        if refused is not None:
            raise refused
        self.run.learner_seen_at = self.clock()

    def not_the_learner(self, peer: str) -> Refused | None:
        """The same of whoever is not the run's learner."""
        if peer == self.config.run.learner:
            return None
        return Refused("not_the_learner", f"the learner of {self.run.name} is {self.config.run.learner}, not you")

    def check_run(self, run: str) -> None:
        """Raise Refused unless it is this run."""
        if run == self.run.name:
            return
        if run in self.runs:
            raise moved(self.run.name)
        raise unknown_run(run, self.runs or (self.run.name,))

    def note_holding(self, peer: str) -> None:
        """After any change of a node's leases: its rate counts the time in which it holds one."""
        node = self.pool.nodes.get(peer)
        if node is not None and self.pool.has(node):  # what one that was moved still owes us is no time of its new run
            held = self.run.leases.held_by(peer)
            node.meter.hold(any(lease.granted_at >= node.placed_at for lease in held), self.clock())

    def note_ended(self, leases: Iterable[LeaseEntry], why: str, fault: Fault) -> None:
        """Leases that were given up, to be put on record (`record_ended`)."""
        now = self.clock()
        by_peer: dict[str, list[bytes]] = {}
        for lease in leases:
            self.ended[lease.lease_id] = why
            self.measures.lease_ended(why)
            by_peer.setdefault(lease.peer, []).append(lease.lease_id)
            node = self.pool.nodes.get(lease.peer)
            if node is None:
                continue
            if node.state == "probation":
                node.probation = node.probation.lost(lease.lease_id, fault)
                node.unrecorded = True
            node.window.note_lost(lease.lease_id, fault, now)
        for peer, ended in by_peer.items():
            kind = why.partition(":")[0]
            name = self.pool.nodes[peer].name if peer in self.pool.nodes else peer
            told = f"{len(ended)} leases of {name}: {why}"
            tell(log, logging.INFO, f"leases_{kind}", "%s", told, peer=peer, leases=shorts(ended))

    def record_ended(self) -> None:
        """Put them on record. Nobody waits for it: a ledger that takes nothing now has them at the next call."""
        if not self.ended:
            return
        with suppress(LedgerUnavailable):
            with self.ledger.transaction() as connection:
                change = ended_leases(self.ended)
                facts = {"actor": "coordinator", "action": "leases ended", "subject": self.run.name}
                record(connection, [change], wall=self.wall(), kind="flow", **facts)
            self.ended = {}

    # estimates (DESIGN section 7)

    def t_train(self) -> float | None:
        """Median of recent steps, in seconds."""
        return self.run.t_train

    def t_bcast(self) -> float | None:
        """Median of recent broadcasts, in seconds."""
        return self.run.t_bcast

    def mu_min(self) -> float | None:
        """Equation 2; None while it is unmeasured, or when no rate is enough."""
        run, t_train, t_bcast = self.config.run, self.t_train(), self.t_bcast()
        if t_train is None or t_bcast is None:
            return None
        return capacity.mu_min(kappa=run.kappa, t_train=t_train, t_bcast=t_bcast, rollouts_per_step=run.R)

    def staleness_estimate(self) -> int | None:
        """Delta; None while T_train, T_bcast or mu_pool is unmeasured."""
        t_train, t_bcast = self.t_train(), self.t_bcast()
        if t_train is None or t_bcast is None:
            return None
        return capacity.staleness_estimate(
            kappa=self.config.run.kappa,
            t_train=t_train,
            t_bcast=t_bcast,
            lease_seconds=capacity.lease_seconds_max(t_train),
            rollouts_per_step=self.config.run.R,
            mu_pool=self.pool.mu(self.clock()),
        )

    def pacing_depth(self) -> int:
        """min(S, Delta)."""
        run = self.config.run
        return capacity.pacing_depth(staleness_max=run.S, kappa=run.kappa, estimate=self.staleness_estimate())


def hello_first() -> Refused:
    """What a key is told that nothing is known of."""
    return Refused("hello_first", "this coordinator does not know you yet; say hello with a join token", 0.0)


def moved(run: str) -> Refused:
    """What a node is told that asks for another run than it is placed in: its next hello says where it works."""
    return Refused(
        "moved", f"this node works for the run {run} now; say hello again" if run else "say hello again", 0.0
    )


def unknown_run(run: str, runs: Collection[str]) -> Refused:
    """What whoever names a run is told that is not there."""
    served = f"run {next(iter(runs))}" if len(runs) == 1 else f"runs {', '.join(runs)}"
    return Refused("unknown_run", f"this coordinator serves the {served}, not {run}"[:512])


def waits_for_the_operator() -> Refused:
    """What a node that has applied is told when it asks for more than to wait."""
    return Refused("applied", "the operator has yet to admit this node; it waits", APPLIED_RETRY_SECONDS)
