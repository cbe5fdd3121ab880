"""Which run each node works for: `placing.place` decides from what is seen now, here it is made durable and done.

| when              | what                                                                                            |
|-------------------|-------------------------------------------------------------------------------------------------|
| at hello          | a node goes to the run that its join string or token names; else it stays in its run while that |
|                   | is open; else it goes to the open run that lacks most                                           |
| each LOOK_SECONDS | nodes of runs that are not open any more are given to those that are; and one node of an open   |
|                   | run moves towards the shares, if that was so at the look before as well                         |

A run is open while its learner is there to train and nobody has paused it: `_share`. Every move is a line of the audit
log with its numbers, in the transaction that moves the node: a node that is paid leaves its account in the old run, and
stands by in the new one until that run's scheduler calls it. What is measured of it begins anew, for rates of two runs
cannot be compared; what it still owes the old run it delivers there. It learns of the move by the refusal of its next
heartbeat or request for leases, which sends it to say hello.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from typing import TYPE_CHECKING, Any

from .capacity import RateMeter
from .history import update
from .ledger import LedgerUnavailable
from .placing import Placed, Share, place
from .records import record
from .run_book import ENDED
from .scheduler_memory import told_decisions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import sqlalchemy as sa

    from .house import House
    from .node_life import NodeLife
    from .node_records import Moves
    from .office import Office
    from .payroll import Settlement
    from .pool import NodeEntry

log = logging.getLogger(__name__)

LOOK_SECONDS = 30.0
"""Between two looks. A move costs its node a download: shares may take minutes to come about."""

LEARNER_SILENT_SECONDS = 300.0
"""A run whose learner has not been heard of for so long has no use for nodes: it restarts in less, or is gone."""

MOVES_REMEMBERED = 200

ACTOR, ACTION = "placement", "node placed"


class Placement:
    """Owns `NodeEntry.run`."""

    def __init__(self, house: House, life: NodeLife) -> None:
        """Raises LedgerUnavailable."""
        self._house = house
        self._life = life
        self._started = house.clock()
        self._next_at = self._started + LOOK_SECONDS
        self._meant: dict[str, str] = {}
        """What the last look would have moved between open runs."""
        self._moved: deque[dict[str, Any]] = deque(maxlen=MOVES_REMEMBERED)
        self._before: list[dict[str, Any]] = []
        if self.several:
            with house.ledger.reading() as connection:
                self._before = told_decisions(connection, ACTOR, {ACTION: "place"}, "*")

    @property
    def several(self) -> bool:
        """Whether there is anything to decide."""
        return len(self._house.offices) > 1

    def told(self) -> list[dict[str, Any]]:
        """The last moves, the newest first; those before this process in words alone."""
        return [*reversed(self._moved), *self._before][:MOVES_REMEMBERED]

    def choose(self, peer: str, run: str, wanted: str | None) -> tuple[str, str]:
        """The run for a node that says hello and was in `run` (empty: none), and why."""
        house = self._house
        if wanted is not None:
            return wanted, "its join string names this run"
        if not self.several:
            return house.first.run.name, "there is one run"
        shares = self._shares()
        if any(share.run == run and share.open for share in shares):
            return run, "it was in this run before"
        nodes = [each for each in self._nodes() if each.peer != peer]
        found = place([*nodes, Placed(peer, run)], shares).get(peer, run or house.first.run.name)
        return found, f"of the open runs this lacks most; {_numbers(nodes, shares)}"

    def look(self) -> None:
        """Decide, record, move; nothing while it is too early. A ledger that takes nothing now: at the next look."""
        house, now = self._house, self._house.clock()
        if now < self._next_at or not self.several:
            return
        self._next_at = now + LOOK_SECONDS
        nodes, shares = self._nodes(), self._shares()
        opened = {share.run for share in shares if share.open}
        moves = place(nodes, shares)
        between = {peer: to for peer, to in moves.items() if house.pool.nodes[peer].run in opened}
        pairs = {house.pool.nodes[peer].run: to for peer, to in between.items()}
        if pairs != self._meant:  # a node that joined or left a moment ago is no reason to move another
            moves = {peer: to for peer, to in moves.items() if peer not in between}
        self._meant = pairs
        numbers = _numbers(nodes, shares)
        why = {peer: self._cause(house.pool.nodes[peer].run, peer in between) for peer in moves}
        try:
            self.move({peer: (to, f"{why[peer]}; {numbers}") for peer, to in moves.items()})
        except LedgerUnavailable as error:
            log.warning("no node is moved to another run: %s", error)

    def move(self, moves: Mapping[str, tuple[str, str]]) -> None:
        """Nodes to runs, each with the reason: durably, then in memory. Raises LedgerUnavailable."""
        house, wall = self._house, self._house.wall()
        nodes = {peer: house.pool.nodes[peer] for peer in moves}
        if not moves:
            return
        paid = self._accounts(nodes, wall)
        stand_by = [self._stands_by(node, moves[peer][0]) for peer, node in nodes.items() if _is_paid(node)]
        with house.ledger.transaction() as connection:
            for peer, (to, why) in moves.items():
                record_placed(connection, peer, nodes[peer].run, to, why, wall)
            for office, pay in paid:
                facts = {"actor": ACTOR, "action": "accounts", "subject": office.run.name}
                record(connection, pay.changes(wall), wall=wall, kind="flow", **facts)
                pay.post(connection, wall)
            self._life.record(connection, stand_by, kind="flow")
        for _, pay in paid:
            pay.apply()
        for peer, (to, why) in moves.items():
            self._follow(nodes[peer], to, why)
        self._life.apply(stand_by)

    def note(self, peer: str, before: str, to: str, why: str) -> None:
        """A move is on record, and is shown among the decisions."""
        said = f"from {before}: {why}" if before else why
        self._moved.append(
            {
                "wall_seconds": self._house.wall(), "run": to, "action": "place", "cause": f"to {to}", "reason": said,
                "chosen": [peer],
            }
        )  # fmt: skip

    def _follow(self, node: NodeEntry, to: str, why: str) -> None:
        """Memory follows: in the new run nothing is known or measured of the node yet."""
        house, before = self._house, node.run
        log.info("%s works for %s now, not %s: %s", node.name, to, before or "any run", why, extra={"peer": node.peer})
        self.note(node.peer, before, to, why)
        begin_anew(node, to, house.clock())
        for name in (before, to):
            office = house.offices.get(name)
            if office is not None:
                office.run.forget_plans()
                for bell in (office.news, office.work):
                    bell.ring()

    def _accounts(self, nodes: Mapping[str, NodeEntry], wall: float) -> list[tuple[Office, Settlement]]:
        """What the nodes' runs pay them ends, but for what is out."""
        found = []
        for office in self._house:
            numbers = [office.payroll.by_peer[peer] for peer in nodes if peer in office.payroll.by_peer]
            if numbers:
                pay = office.settlement()
                for number in numbers:
                    one = office.payroll.engaged[number]
                    rate = nodes[one.account.peer].meter.rate(self._house.clock())
                    if one.account.rho is None and rate:  # it is measured anew where it goes
                        pay.measured(number, rate)
                    pay.release(number, wall)
                found.append((office, pay))
        return found

    def _stands_by(self, node: NodeEntry, to: str) -> Moves:
        why = f"it works for the run {to} now, and is called when that makes too little without it"
        return self._life.moves(node.peer, node.standing, "released", actor="scheduler", reason=why)

    def _nodes(self) -> list[Placed]:
        house = self._house
        return [Placed(node.peer, node.run, node.wanted) for node in house.pool.live(house.clock())]

    def _shares(self) -> list[Share]:
        return [self._share(office) for office in self._house]

    def _share(self, office: Office) -> Share:
        """Open: it runs and its learner is there, or, before its first snapshot, has been heard of."""
        run, now = office.run, self._house.clock()
        heard = run.learner_seen_at
        if run.state == "running" and not run.learner_refused:
            opened = now - max(heard if heard is not None else self._started, self._started) <= LEARNER_SILENT_SECONDS
        else:
            opened = run.state == "ready" and heard is not None and now - heard <= LEARNER_SILENT_SECONDS
        return Share(run.name, office.config.run.weight, open=opened, over=run.state in ENDED)

    def _cause(self, run: str, between: bool) -> str:
        if between:
            return "shares"
        office = self._house.offices.get(run)
        if office is None:
            return "it was in no run"
        state = office.run.state
        return f"{run} is {state}" if state in ENDED or state == "paused" else f"the learner of {run} is away"


def record_placed(connection: sa.Connection, peer: str, before: str, to: str, why: str, wall: float) -> None:
    """The line of the audit log, with the change of the node's row."""
    said = f"from {before}: {why}" if before else why
    record(
        connection,
        [update("nodes", [peer], {"run": to})],
        wall=wall,
        actor=ACTOR,
        action=ACTION,
        subject=peer,
        reason=f"to {to}: {said}",
    )


def begin_anew(node: NodeEntry, run: str, now: float) -> None:
    """The node is of this run, of which it has no snapshot and in which nothing was measured of it."""
    node.run, node.placed_at = run, now
    node.meter = RateMeter()
    node.epoch = node.version = node.manifest_hash = node.installed_at = node.fetching = None
    node.told = node.idle_since = None


def _is_paid(node: NodeEntry) -> bool:
    return bool(node.price) and node.state == "active"


def _numbers(nodes: Sequence[Placed], shares: Sequence[Share]) -> str:
    """What was decided by, in words: nodes, weights and shares."""
    held = Counter(node.run for node in nodes)
    weights = sum(share.weight for share in shares if share.open)
    each = [
        f"{share.run} has {held[share.run]} of weight {share.weight:g}, share {len(nodes) * share.weight / weights:.2f}"
        if share.open
        else f"{share.run} has {held[share.run]} and is not open"
        for share in shares
    ]
    return f"{len(nodes)} live nodes: {', '.join(each)}"
