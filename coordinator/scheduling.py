"""Who of the pool works: what is measured now goes to `activation.step`, what that decides is recorded, then done.

Only nodes with a price are ever sent to stand by; a pool of volunteers has nothing to decide, and nothing is recorded.
A node that stands by keeps its snapshots up to date, so it can begin at once, and is given no leases; what it holds
when it is released it may finish. Each activation of a paid node has an account (`payroll`), opened and released in the
transaction that records the decision: over a restart of the coordinator the accounts say who works, at which price and
mu. Which free nodes worked, whose mind was changed lately and the last decisions, in words, are remembered from the
audit log (`scheduler_memory`). A node in probation is neither activated nor
counted.

| what is given     | from                                                                                  |
|-------------------|---------------------------------------------------------------------------------------|
| mu_i              | the node's `RateMeter`                                                                |
| c_i               | what its last hello asks, and what `[activation.prices]` says of that; once it is     |
|                   | activated, what that was then: another price is for its next activation               |
| a_i               | `Pool.live`: it is heard of, and does not say that it is away                         |
| mu_min            | equation 2 with the medians of T_train and T_bcast                                    |
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from . import capacity
from .activation import step
from .activation_records import Assignment, Candidate, Look, Need, State
from .ledger import LedgerUnavailable
from .records import add_event, record
from .run_book import ENDED
from .scheduler_memory import last_changes, told_decisions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .activation_records import Action, Decision, Rules
    from .node_life import NodeLife
    from .node_records import Moves
    from .node_states import NodeEvent
    from .office import Office
    from .payroll import Settlement

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
        self._before: list[dict[str, Any]] = []
        self._state = self._recalled()
        moves = self._moves(self._state)
        pay = office.settlement()
        self._record((), moves, self._state, pay)
        pay.apply()
        self._life.apply(moves)
        self._next_at = float("-inf")
        self.decisions: deque[Decision] = deque(maxlen=DECISIONS_REMEMBERED)

    def _recalled(self) -> State:
        """Who worked when this coordinator ended: paid nodes on their terms, free ones until they are measured anew."""
        office, now, wall = self._office, self._office.clock(), self._office.wall()
        run = office.run.name
        nodes = {node.peer: node for node in office.pool.members()}
        mine = {*nodes, run} if len(office.runs) > 1 else None
        with office.ledger.reading() as connection:
            last = last_changes(connection, ACTOR, (ACTIVATED, RELEASED))
            words = {word: kind for kind, word in ACTIONS.items()}
            self._before = told_decisions(connection, ACTOR, words, run, mine)
        working = [peer for peer, (action, _) in last.items() if action == ACTIVATED and peer in nodes]
        free = {peer: Assignment(run, now, 0.0, 0) for peer in working if not nodes[peer].price}
        engaged = [office.payroll.engaged[number] for number in office.payroll.by_peer.values()]
        paid = {one.account.peer: Assignment(run, now, one.mu or 0.0, one.account.price) for one in engaged}
        ago = {peer: max(wall - at, 0.0) for peer, (_, at) in last.items() if peer in nodes and nodes[peer].price}
        hold = self._rules.hold_periods * self._rules.period_seconds
        changed = {peer: now - seconds for peer, seconds in ago.items() if seconds < hold}
        return State(free | paid, changed=changed)

    def told(self) -> list[dict[str, Any]]:
        """The last decisions, the newest first; those of processes before this one in words alone."""
        ahead = self._office.wall() - self._office.clock()
        mine = [{"wall_seconds": made.at + ahead, **made.as_json()} for made in reversed(self.decisions)]
        return [*mine, *self._before][:DECISIONS_REMEMBERED]

    def look(self) -> None:
        """Decide, record, apply; nothing while it is too early, or while the ledger cannot be written."""
        office, now = self._office, self._office.clock()
        if now < self._next_at or office.run.state == "paused":
            return
        self._next_at = now + self._rules.period_seconds / LOOKS_PER_PERIOD
        if not any(node.price or node.standby for node in office.pool.members()) and not office.payroll.by_peer:
            return
        pay = office.settlement()
        try:
            state, decisions = step(self._still_meant(), self._seen(now), now, self._rules_now())
            moves = self._moves(state, decisions)
            self._record(decisions, moves, state, pay)
        except LedgerUnavailable as error:
            log.warning("nobody is activated or released: %s", error)
            return
        pay.apply()
        self._state = state
        self.decisions.extend(decisions)
        self._life.apply(moves)

    def _still_meant(self) -> State:
        """Without nodes that have turned from volunteers to paid ones, or back, since they were activated, and without
        those that were moved to another run."""
        pool, assigned = self._office.pool, self._state.assigned
        nodes = pool.nodes
        turned = {
            peer
            for peer, given in assigned.items()
            if peer in nodes and (bool(given.price) != bool(nodes[peer].price) or not pool.has(nodes[peer]))
        }
        if not turned:
            return self._state
        return replace(self._state, assigned={peer: given for peer, given in assigned.items() if peer not in turned})

    def _rules_now(self) -> Rules:
        """The spending ceiling is that of all runs: this one has what the others leave."""
        if self._rules.spend_ceiling is None:
            return self._rules
        return replace(self._rules, spend_ceiling=max(self._rules.spend_ceiling - self._office.spent_elsewhere(), 0))

    def _seen(self, now: float) -> Look:
        office = self._office
        live = {node.peer for node in office.pool.live(now)}
        candidates = tuple(
            Candidate(node.peer, node.meter.rate(now), node.price, node.peer in live)
            for node in office.pool.members()
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

    def _book(self, state: State, pay: Settlement) -> bool:
        """The accounts that follow from who works now; whether any changes."""
        payroll, wall = self._office.payroll, self._office.wall()
        paid = {peer: given for peer, given in state.assigned.items() if given.price}
        changed = False
        for peer, number in payroll.by_peer.items():
            one, given = payroll.engaged[number], paid.get(peer)
            again = given is not None and given.price == one.account.price
            if given is not None and again and one.account.rho is None and given.mu:
                pay.measured(number, given.mu)
                changed = True
            elif not again:
                pay.release(number, wall)
                changed = True
        for peer, given in paid.items():
            known = payroll.of(peer)
            if known is None or known.account.price != given.price:
                pay.open(peer, given.price, given.mu or None)
                changed = True
        return changed

    def _record(self, decisions: tuple[Decision, ...], moves: Sequence[Moves], state: State, pay: Settlement) -> None:
        """A line of the audit log for each node, one for a reason why nothing is done; transitions and accounts."""
        changed = self._book(state, pay)
        if not decisions and not moves and not changed:
            return
        office, wall = self._office, self._office.wall()
        with office.ledger.transaction() as connection:
            if changed:
                facts = {"actor": ACTOR, "action": "accounts", "subject": office.run.name}
                record(connection, pay.changes(wall), wall=wall, kind="flow", **facts)
                pay.post(connection, wall)
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
        for node in self._office.pool.members():
            standby = bool(node.price) and node.peer not in state.assigned
            event: NodeEvent = "released" if standby else "activated"
            if node.state in {"active", "standby"} and standby != node.standby:
                reason = why.get(node.peer) or ("it is not among those that work" if standby else "it may work")
                found.append(self._life.moves(node.peer, node.standing, event, actor=ACTOR, reason=reason))
        return found
