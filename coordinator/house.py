"""All runs of a coordinator: an `Office` each, over one ledger and one pool of nodes.

| shared by all runs                                   | of each run                                                   |
|------------------------------------------------------|---------------------------------------------------------------|
| key, ledger, clocks, nodes and their states, tokens, | run book, leases, prompts, scorer, learner, payroll, budget,  |
| complaints, measures, balances, numbers of rows      | plans, rollouts' states, receipts' sequences, bells           |

A request names its run and goes to that office; one of a node that names another run than it is placed in is refused
(`office.moved`), but for what it still owes and is owed of that run: rollouts, receipts, statements, appeals.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from echo2.p2p.errors import Refused

from .office import hello_first, unknown_run, waits_for_the_operator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .config import CoordinatorConfig
    from .counters import Numbers
    from .ledger import Ledger
    from .office import Office
    from .pool import NodeEntry, Pool


@dataclass(slots=True)
class House:
    """`pool` has the nodes of all runs. `offices` by run, the first run of the settings first."""

    config: CoordinatorConfig
    ledger: Ledger
    clock: Callable[[], float]
    wall: Callable[[], float]
    pool: Pool
    numbers: Numbers
    offices: dict[str, Office] = field(default_factory=dict)

    @property
    def first(self) -> Office:
        """Where what belongs to no single run is done."""
        return next(iter(self.offices.values()))

    def __iter__(self) -> Iterator[Office]:
        return iter(self.offices.values())

    def office(self, run: str) -> Office:
        """The office of a run. Raises Refused for one that is not there."""
        found = self.offices.get(run)
        if found is None:
            raise unknown_run(run, self.offices)
        return found

    def of_node(self, node: NodeEntry | None) -> Office:
        """The office of the run that a node is placed in; the first for one that is in none."""
        return self.offices.get(node.run, self.first) if node is not None else self.first

    def of_learner(self, peer: str) -> Office | None:
        """The office of the run that this key is the learner of."""
        return next((office for office in self if office.config.run.learner == peer), None)

    def spent_beside(self, run: str) -> int:
        """What the nodes at work for the other runs cost together, in micro-dollars an hour."""
        return sum(office.payroll.cost_hour for office in self if office.run.name != run)

    def forget_plans(self) -> None:
        """Addresses are others than before: whoever asks next gets new plans."""
        for office in self:
            office.run.forget_plans()

    def retire(self) -> None:
        """Another house has taken over."""
        for office in self:
            office.retire()

    # who may send more than hello needs

    def stranger(self, peer: str) -> Refused | None:
        """Why `peer`, neither an admitted node nor a learner, may send only what hello needs. Changes nothing."""
        return self.not_a_node(peer) if self.of_learner(peer) is None else None

    def not_a_node(self, peer: str) -> Refused | None:
        """The same of whoever is no admitted node."""
        node = self.pool.nodes.get(peer)
        if node is None:
            return hello_first()
        if node.state == "applied":
            return waits_for_the_operator()
        return self.first.banned(node) if node.state == "banned" else None

    def not_the_learner(self, peer: str) -> Refused | None:
        """The same of whoever is no run's learner."""
        return None if self.of_learner(peer) is not None else self.not_a_learner(peer)

    def not_a_learner(self, peer: str) -> Refused:
        """What whoever is no run's learner is told."""
        refused = self.first.not_the_learner(peer)
        if refused is not None and len(self.offices) == 1:
            return refused
        return Refused("not_the_learner", f"you are the learner of none of the runs {', '.join(self.offices)}"[:512])
