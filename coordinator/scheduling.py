"""Who of the pool works: what is measured now goes to `activation.step`, what that decides is recorded, then done.

Only nodes with a price are ever sent to stand by; a pool of volunteers has nothing to decide, and nothing is recorded.
A node that stands by keeps its snapshots up to date, so it can begin at once, and is given no leases; what it holds
when it is released it may finish. A node in probation is neither activated nor counted. Over a restart of the
coordinator the loop remembers from the audit log who worked; what they are measured at, and so their terms, begin anew.

| what is given     | from                                                                                  |
|-------------------|---------------------------------------------------------------------------------------|
| mu_i              | the node's `RateMeter`                                                                |
| c_i               | `[activation.prices]`, which the operator keeps: a node cannot name its price yet     |
| a_i               | `Pool.live`: it is heard of, and does not say that it is away                         |
| mu_min            | equation 2 with the medians of T_train and T_bcast                                    |
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING

from . import capacity
from .activation import step
from .activation_records import Assignment, Candidate, Look, Need, State
from .ledger import LedgerUnavailable
from .records import add_event, last_of_each
from .run_book import ENDED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .activation_records import Action, Decision
    from .node_life import NodeLife
    from .node_records import Moves
    from .node_states import NodeEvent
    from .office import Office

log = logging.getLogger(__name__)

LOOKS_PER_PERIOD = 6
"""A loss is seen within a sixth of a period of the node's being dead."""

DECISIONS_REMEMBERED = 200
"""With all their numbers, for the operator's questions; the audit log has every one, in words."""

ACTOR = "scheduler"
ACTIVATED, RELEASED = "node activated", "node released"
ACTIONS: dict[Action, str] = {"activate": ACTIVATED, "release": RELEASED, "none": "pool unchanged"}
"""In the audit log; the first two are read again after a restart."""


class Scheduler:
    """Looks at the pool now and then."""

    def __init__(self, office: Office, life: NodeLife) -> None:
        """Raises LedgerUnavailable."""
        self._office = office
        self._life = life
        self._rules = office.config.activation.rules()
        self._state = self._recalled()
        moves = self._moves(self._state)
        self._record((), moves)
        self._life.apply(moves)
        self._next_at = float("-inf")
        self.decisions: deque[Decision] = deque(maxlen=DECISIONS_REMEMBERED)

    def _recalled(self) -> State:
        """Who worked when this coordinator ended, unmeasured: until they are measured they count for nothing."""
        office, now = self._office, self._office.clock()
        with office.ledger.reading() as connection:
            last = last_of_each(connection, ACTOR, (ACTIVATED, RELEASED))
        nodes = office.pool.nodes
        working = [peer for peer, action in last.items() if action == ACTIVATED and peer in nodes]
        return State({peer: Assignment(office.run.name, now, 0.0, nodes[peer].price) for peer in working})

    def look(self) -> None:
        """Decide, record, apply; nothing while it is too early, or while the ledger cannot be written."""
        office, now = self._office, self._office.clock()
        if now < self._next_at or office.run.state == "paused":
            return
        self._next_at = now + self._rules.period_seconds / LOOKS_PER_PERIOD
        if not any(node.price for node in office.pool.nodes.values()):
            return
        try:
            state, decisions = step(self._state, self._seen(now), now, self._rules)
            moves = self._moves(state, decisions)
            self._record(decisions, moves)
        except LedgerUnavailable as error:
            log.warning("nobody is activated or released: %s", error)
            return
        self._state = state
        self.decisions.extend(decisions)
        self._life.apply(moves)

    def _seen(self, now: float) -> Look:
        office = self._office
        live = {node.peer for node in office.pool.live(now)}
        candidates = tuple(
            Candidate(node.peer, node.meter.rate(now), node.price, node.peer in live)
            for node in office.pool.nodes.values()
            if (node.standing.back if node.state == "left" else node.state) in {"active", "standby"}
        )
        return Look(candidates, () if office.run.state in ENDED else (self._need(),))

    def _need(self) -> Need:
        office, run = self._office, self._office.config.run
        start = office.config.activation.mu_start or None
        t_train, t_bcast = office.t_train(), office.t_bcast()
        if t_train is None or t_bcast is None:
            return Need(run.name, None, mu_start=start)
        least = capacity.mu_min(kappa=run.kappa, t_train=t_train, t_bcast=t_bcast, rollouts_per_step=run.R)
        if least is not None:
            return Need(run.name, least)
        return Need(
            run.name,
            None,
            infeasible=f"no rate is enough: kappa T_train = {run.kappa * t_train:.3g} s is within T_bcast = "
            f"{t_bcast:.3g} s; raise kappa, or make the broadcast faster",
        )

    def _record(self, decisions: tuple[Decision, ...], moves: Sequence[Moves]) -> None:
        """A line of the audit log for each node, one for a reason why nothing is done; and the nodes' transitions."""
        if not decisions and not moves:
            return
        office = self._office
        with office.ledger.transaction() as connection:
            for made in decisions:
                lines = [(ACTIONS[made.action], subject, made.reason) for subject in made.chosen or (made.run,)]
                lines += [(RELEASED, peer, "it is away, and its place was given to others") for peer in made.lapsed]
                for action, subject, reason in lines:
                    add_event(
                        connection,
                        wall=office.wall(),
                        actor=ACTOR,
                        action=action,
                        subject=subject,
                        reason=f"{made.cause}: {reason}",
                    )
            self._life.record(connection, moves, kind="flow")

    def _moves(self, state: State, decisions: tuple[Decision, ...] = ()) -> list[Moves]:
        """Who begins and who stands by, for `state` to hold. Only nodes with a price stand by."""
        why = {peer: f"{made.cause}: {made.reason}" for made in decisions for peer in (*made.chosen, *made.lapsed)}
        found = []
        for node in self._office.pool.nodes.values():
            standby = bool(node.price) and node.peer not in state.assigned
            event: NodeEvent = "released" if standby else "activated"
            if node.state in {"active", "standby"} and standby != node.standby:
                reason = why.get(node.peer) or ("it is not among those that work" if standby else "it may work")
                found.append(self._life.moves(node.peer, node.standing, event, actor=ACTOR, reason=reason))
        return found
