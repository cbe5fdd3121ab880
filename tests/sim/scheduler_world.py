"""A pool under the real scheduler in virtual time: heartbeats, leases, rates, departures, noise. No sleeping, no I/O.

Every two seconds: a node that is alive beats each `heartbeat_seconds` and, while it is assigned and has its snapshot,
holds leases whose slices come at random; the real `RateMeter` measures it and the real `Pool` says who is dead.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from echo2.coordinator import capacity
from echo2.coordinator.activation import step
from echo2.coordinator.activation_records import Candidate, Decision, Look, Need, Rules, State
from echo2.coordinator.pool import NodeEntry, Pool
from echo2.coordinator.selection import Offer, cheapest_cover

if TYPE_CHECKING:
    from collections.abc import Collection

SLICE = 2
TICK_SECONDS = 2
LOOK_SECONDS = 10
INSTALL_SECONDS = 20
"""From activation to the first lease: the snapshot it lacks, and one round trip."""


@dataclass
class Machine:
    """The truth about a node."""

    peer: str
    mu: float
    price: int
    phase: float = 0.0
    """When within a heartbeat's period it beats."""
    alive: bool = True
    ready_at: float = 0.0
    noise: float = 1.0
    install_seconds: float = INSTALL_SECONDS
    known_at: float = 0.0
    """Until then it is in probation: no candidate."""


@dataclass
class World:
    """`noise`: relative deviation of what is measured of a node, drawn anew each period, beside the meter's own."""

    seed: int
    nodes: int = 36
    noise: float = 0.2
    supply: float = 3.0
    """The whole pool's rate over mu_min."""
    free_share: float = 0.0
    spread: float = 0.5
    """Of the logarithm of mu."""
    benchmark_error: float = 0.1
    """How far off the rate is that is known before a node has worked."""
    install_seconds: tuple[float, float] = (INSTALL_SECONDS, INSTALL_SECONDS)
    """From activation to the first lease, least and most: a node's own."""
    probation_share: float = 0.0
    """Of the nodes: they come out of probation at a moment of the first `probation_seconds`."""
    probation_seconds: float = 3600.0
    kappa: int = 2
    t_train: float = 60.0
    t_bcast: float = 20.0
    rollouts: int = 1024
    heartbeat_seconds: float = 10.0
    rules: Rules = field(default_factory=Rules)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.now = 0.0
        need = capacity.mu_min(
            kappa=self.kappa, t_train=self.t_train, t_bcast=self.t_bcast, rollouts_per_step=self.rollouts
        )
        assert need is not None
        self.mu_min = need
        shares = [self.rng.lognormvariate(0.0, self.spread) for _ in range(self.nodes)]
        scale = self.supply * need / sum(shares)
        self.machines = {}
        self.pool = Pool(self.heartbeat_seconds)
        for index, share in enumerate(shares):
            price = 0 if self.rng.random() < self.free_share else round(self.rng.uniform(0.05, 0.8) * 1e6)
            self.join(Machine(f"node-{index:02}", share * scale, price, 2 * index % self.heartbeat_seconds))
        if self.install_seconds != (INSTALL_SECONDS, INSTALL_SECONDS):
            for machine in self.machines.values():
                machine.install_seconds = self.rng.uniform(*self.install_seconds)
        if self.probation_share:
            for peer in self.rng.sample(sorted(self.machines), round(self.probation_share * self.nodes)):
                self.machines[peer].known_at = self.rng.uniform(0.0, self.probation_seconds)
        self.state = State()
        self.decisions: list[Decision] = []
        self.true_mu: list[tuple[float, float]] = []
        self.seen_mu: list[tuple[float, float]] = []

    def join(self, machine: Machine) -> None:
        """A node that is or was in probation: its benchmark, somewhat off, is what is known of it."""
        self.machines[machine.peer] = machine
        entry = self.pool.nodes[machine.peer] = NodeEntry(machine.peer, machine.peer, "", ())
        entry.meter.believe(machine.mu * self.rng.uniform(1 - self.benchmark_error, 1 + self.benchmark_error), self.now)

    def works(self, machine: Machine) -> bool:
        """Assigned, alive and ready."""
        return machine.alive and machine.peer in self.state.assigned and self.now >= machine.ready_at

    def run(self, seconds: float) -> None:
        """Let time pass."""
        end = self.now + seconds
        while self.now < end:
            self.now += TICK_SECONDS
            for machine in self.machines.values():
                self.tick(machine)
            if self.now % self.rules.period_seconds == 0:
                for machine in self.machines.values():
                    machine.noise = min(max(self.rng.gauss(1.0, self.noise), 0.2), 1.8)
            if self.now % LOOK_SECONDS == 0:
                self.look()
            self.true_mu.append((self.now, sum(each.mu for each in self.machines.values() if self.works(each))))

    def tick(self, machine: Machine) -> None:
        """Two seconds of one node."""
        entry = self.pool.nodes[machine.peer]
        if machine.alive and (entry.seen_at is None or self.now % self.heartbeat_seconds == machine.phase):
            entry.seen_at = self.now
        working = self.works(machine)
        entry.meter.hold(working, self.now)
        if working:
            whole, part = divmod(machine.mu * TICK_SECONDS / SLICE, 1.0)
            slices = int(whole) + (self.rng.random() < part)
            if slices:
                entry.meter.accept(SLICE * slices, self.now)

    def candidates(self) -> tuple[Candidate, ...]:
        """As the coordinator would see them."""
        live = {entry.peer for entry in self.pool.live(self.now)}
        found = []
        for machine in self.machines.values():
            if self.now < machine.known_at:
                continue
            rate = self.pool.nodes[machine.peer].meter.rate(self.now)
            mu = None if rate is None else rate * machine.noise
            found.append(Candidate(machine.peer, mu, machine.price, machine.peer in live))
        return tuple(found)

    def look(self) -> None:
        """One step of the real loop."""
        look = Look(self.candidates(), (Need("run", self.mu_min),))
        before = set(self.state.assigned)
        self.state, decisions = step(self.state, look, self.now, self.rules)
        self.decisions += decisions
        for peer in set(self.state.assigned) - before:
            self.machines[peer].ready_at = self.now + self.machines[peer].install_seconds
        known = {each.peer: each for each in look.candidates}
        seen = sum(self.state.mu.get(peer, 0.0) for peer in self.state.assigned if known[peer].available)
        self.seen_mu.append((self.now, seen))

    def leave(self, share: float, *, at_least: int = 0) -> list[str]:
        """So large a part of those that work, and of those that stand by, is gone without a word; so many that work."""
        gone: list[str] = []
        for works, least in ((True, at_least), (False, 0)):
            names = sorted(peer for peer in self.machines if (peer in self.state.assigned) == works)
            gone += self.rng.sample(names, min(max(round(share * len(names)), least), len(names)))
        for peer in gone:
            self.machines[peer].alive = False
        return gone

    def changes(self) -> dict[str, list[float]]:
        """When each node's assignment changed by a decision."""
        found: dict[str, list[float]] = {}
        for decision in self.decisions:
            for peer in decision.chosen:
                found.setdefault(peer, []).append(decision.at)
        return found

    def changes_within(self, periods: float, *, without: Collection[tuple[str, float]] = ()) -> int:
        """The most changes of one node within so many periods, `without` these."""
        span = periods * self.rules.period_seconds
        kept = [[at for at in times if (peer, at) not in without] for peer, times in self.changes().items()]
        return max((sum(first <= at < first + span for at in times) for times in kept for first in times), default=0)

    def price(self) -> int:
        """What works costs an hour."""
        return sum(given.price for peer, given in self.state.assigned.items() if self.machines[peer].alive)

    def usable(self) -> list[Machine]:
        """Who could work now."""
        return [each for each in self.machines.values() if each.alive and self.now >= each.known_at]

    def optimum(self, target: float) -> int:
        """What it would cost with the truth known."""
        offers = [Offer(each.peer, each.mu, each.price) for each in self.usable()]
        return cheapest_cover(offers, target).price
