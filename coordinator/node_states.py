"""What a node is to this coordinator, as a table of transitions. Pure.

Health (healthy, late, dead) is beside it and says only when the node was last heard of. A node that a row does not name
stays what it is: the event is refused, in words.

| event      | by          | from                                  | to        | when                                 |
|------------|-------------|---------------------------------------|-----------|--------------------------------------|
| applied    | the node    | new                                   | applied   | mode `hand`, hello without a token   |
| joined     | the node    | new                                   | probation | mode `open`, or a valid token        |
| admitted   | operator    | applied                               | probation | `admit`                              |
| passed     | coordinator | probation                             | active    | measured, and its warm-up came back  |
| failed     | coordinator | probation                             | suspended | too slow, or its warm-up did not     |
| unreliable | coordinator | standby, active, draining             | suspended | more than 5 % of its leases expired  |
| activated  | scheduler   | standby                               | active    | its rate is needed                   |
| released   | scheduler   | active                                | standby   | it is not                            |
| drained    | operator    | probation, standby, active            | draining  | `drain`: no new leases               |
| goodbye    | the node    | probation, standby, active, draining  | left      | a clean stop                         |
| gone       | coordinator | draining                              | left      | not heard of any more                |
| returned   | the node    | left                                  | back      | hello                                |
| suspended  | operator    | probation, standby, active, draining, | suspended | `suspend`, or another reason, expiry |
|            |             | left, suspended                       |           |                                      |
| restored   | operator    | suspended, draining                   | active    | `restore`: the operator vouches      |
| banned     | operator    | every state but new                   | banned    | `ban`, or another reason, expiry     |
| unbanned   | operator    | banned                                | probation | `unban`                              |
| lapsed     | coordinator | suspended, banned                     | probation | its expiry, by our clock             |

`back` is what it was before it left: probation, standby, active or draining. A drained node stays drained until the
operator restores it: neither a restart nor a bad line undoes the operator's word.

| state     | leases | snapshots, plans | counts in mu_min, quorum | relays | may say hello | its rollouts are taken |
|-----------|--------|------------------|--------------------------|--------|---------------|------------------------|
| applied   | no     | no               | no                       | no     | yes           | no                     |
| probation | few    | yes              | no                       | no     | yes           | yes                    |
| standby   | no     | yes              | no                       | yes    | yes           | yes                    |
| active    | yes    | yes              | yes                      | yes    | yes           | yes                    |
| draining  | no     | no               | no                       | no     | yes           | yes                    |
| suspended | no     | no               | no                       | no     | yes           | no                     |
| banned    | no     | no               | no                       | no     | is told why   | no                     |
| left      | no     | no               | no                       | no     | yes           | after hello            |
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from echo2.p2p.errors import Refused

NodeState = Literal["applied", "probation", "standby", "active", "draining", "suspended", "banned", "left"]
From = Literal["new"] | NodeState
"""`new`: this coordinator does not know the key."""

NodeEvent = (
    Literal["applied", "joined", "admitted", "passed", "failed", "unreliable", "activated", "released", "drained"]
    | Literal["goodbye", "gone", "returned", "suspended", "restored", "banned", "unbanned", "lapsed"]
)

STATES: tuple[NodeState, ...] = get_args(NodeState)
EVENTS: tuple[NodeEvent, ...] = tuple(event for part in get_args(NodeEvent) for event in get_args(part))

REASON_CHARACTERS_MAX = 512
"""Kept of a reason; as much as a notice carries to the node's owner."""

SERVING: frozenset[NodeState] = frozenset({"probation", "standby", "active"})
"""States in which a node has snapshots and is part of plans."""

EXPIRING: frozenset[NodeState] = frozenset({"suspended", "banned"})
"""States that may end by themselves."""

DELIVERING: frozenset[NodeState] = SERVING | {"draining"}
"""States in which rollouts are taken."""

WITHDRAWING: frozenset[NodeEvent] = frozenset({"suspended", "banned"})
"""Somebody distrusts what the node has made: what of it is not trained on yet is withdrawn. A slow or absent node has
done honest work."""


class _Back:
    """A target: what the node was before it left."""


BACK = _Back()

_ALL = STATES
_PRESENT: tuple[NodeState, ...] = ("probation", "standby", "active")

ROWS: tuple[tuple[NodeEvent, tuple[From, ...], NodeState | _Back], ...] = (
    ("applied", ("new",), "applied"),
    ("joined", ("new",), "probation"),
    ("admitted", ("applied",), "probation"),
    ("passed", ("probation",), "active"),
    ("failed", ("probation",), "suspended"),
    ("unreliable", ("standby", "active", "draining"), "suspended"),
    ("activated", ("standby",), "active"),
    ("released", ("active",), "standby"),
    ("drained", _PRESENT, "draining"),
    ("goodbye", (*_PRESENT, "draining"), "left"),
    ("gone", ("draining",), "left"),
    ("returned", ("left",), BACK),
    ("suspended", (*_PRESENT, "draining", "left", "suspended"), "suspended"),
    ("restored", ("suspended", "draining"), "active"),
    ("banned", _ALL, "banned"),
    ("unbanned", ("banned",), "probation"),
    ("lapsed", ("suspended", "banned"), "probation"),
)

TABLE: dict[tuple[From, NodeEvent], NodeState | _Back] = {
    (before, event): after for event, befores, after in ROWS for before in befores
}

_WORDS: dict[NodeEvent, str] = {
    "admitted": "admitted",
    "drained": "drained",
    "suspended": "suspended",
    "restored": "restored",
    "banned": "banned",
    "unbanned": "unbanned",
}
"""What an operator asks for, as a participle."""

_INSTEAD: dict[tuple[From, NodeEvent], str] = {
    ("applied", "suspended"): "; it is given nothing yet: ban it, or leave it waiting",
    ("applied", "drained"): "; it is given nothing yet",
    ("banned", "suspended"): "; unban it first",
    ("banned", "restored"): "; unban it",
    ("banned", "drained"): "; it is given nothing",
    ("suspended", "drained"): "; it is given nothing",
    ("suspended", "unbanned"): "; restore it",
    ("left", "drained"): "; it is not here",
}


@dataclass(frozen=True, slots=True)
class Standing:
    """A node's state with all that belongs to it. `back`: what one that left was before. Times are Unix seconds."""

    state: From
    back: NodeState = "active"
    event: NodeEvent | None = None
    """By which it came into the state; None where the ledger is older than the record of it."""
    actor: str = ""
    reason: str = ""
    since: float | None = None
    expires: float | None = None
    number: int = 0
    """Transitions so far."""


@dataclass(frozen=True, slots=True)
class Transition:
    """What happened to one node, as it is recorded. `wall` and `expires` are Unix seconds of the coordinator."""

    peer: str
    number: int
    event: NodeEvent
    from_state: From
    to_state: NodeState
    actor: str
    reason: str
    wall: float
    expires: float | None


NEW = Standing("new")


def legal(state: From, event: NodeEvent) -> bool:
    """Whether the table has it."""
    return (state, event) in TABLE


def step(
    standing: Standing,
    event: NodeEvent,
    *,
    peer: str,
    actor: str,
    reason: str,
    wall: float,
    expires: float | None = None,
) -> tuple[Standing, Transition]:
    """The table, once. Raises Refused, in words: `node_state` for what it does not have; and for a missing reason or
    an expiry that is over.

    An expiry is kept where the new state can end by itself.
    """
    target = TABLE.get((standing.state, event))
    if target is None:
        instead = _INSTEAD.get((standing.state, event), "")
        raise Refused("node_state", f"a node that is {standing.state} cannot be {_WORDS.get(event, event)}{instead}")
    if not reason.strip():
        raise Refused("reason_missing", "say why: the reason is kept, and shown to the node's owner")
    if expires is not None and not wall < expires < math.inf:
        raise Refused("expiry", "an expiry is a number of seconds from now, above 0")
    state = standing.back if isinstance(target, _Back) else target
    back = standing.state if standing.state in DELIVERING else standing.back
    kept = expires if state in EXPIRING else None
    words = reason[:REASON_CHARACTERS_MAX]
    number = standing.number + 1
    made = Transition(peer, number, event, standing.state, state, actor, words, wall, kept)
    return Standing(state, back, event, actor, words, wall, kept, number), made


def overdue(standing: Standing, wall: float) -> bool:
    """Whether its state has ended by itself."""
    return standing.state in EXPIRING and standing.expires is not None and wall >= standing.expires
