"""Who is in the pool and how each node does. Pure: what must survive is in the ledger, and time is an argument.

| health  | rule                                                     |
|---------|----------------------------------------------------------|
| healthy | heard of within LATE_HEARTBEATS heartbeats               |
| late    | heard of within DEAD_HEARTBEATS: three missed ones       |
| dead    | not heard of since, or not since this coordinator started |

A node whose slices are refused one after the other rests: it would burn its owner's power all night for nothing.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .capacity import RateMeter
from .node_states import SERVING, Standing
from .probation import LeaseWindow, Probation

if TYPE_CHECKING:
    from collections.abc import Iterator

    from echo2.p2p.messages import Fetching

    from .node_states import NodeState
    from .views import Health

LATE_HEARTBEATS = 1.5
"""A held reply takes one heartbeat; half of another is the network's."""

DEAD_HEARTBEATS = 3.0

REJECTED_IN_ROW_MAX = 8
"""Refused slices in a row before a node rests."""

REST_SECONDS_FIRST = 30.0
REST_SECONDS_MAX = 3600.0
"""Doubles with every further refusal; a node that was mended finds out within the hour, or at once after a restart."""

KNOWN_MAX = 10_000
"""Nodes kept in memory; beyond, those go that are silent and have nothing with us. The ledger has them."""

SESSIONS_REMEMBERED = 16
"""Ended sessions of one key: a heartbeat of one of them is a replay, or a second machine with the same key."""

COMPLAINTS_PEERS_MAX = 1024
"""Peers whose protocol errors are counted; the longest quiet is forgotten. Peer ids cost an attacker nothing."""

ACTIVE, UNPROVED = Standing("active"), Probation()


@dataclass(slots=True)
class NodeEntry:
    """One admitted node. `seen_at` is None until it is heard of by this process."""

    peer: str
    name: str
    software: str
    addresses: tuple[str, ...]
    standing: Standing = ACTIVE
    run: str = ""
    """The run that it works for; empty: it was placed in none yet."""
    placed_at: float = float("-inf")
    """When it was moved there by this process; leases it was given before count for no rate."""
    wanted: str | None = None
    """The only one it takes part in, by its last hello; None: any."""
    bound: str | None = None
    """The only one that its token lets it into; None: any."""
    probation: Probation = UNPROVED
    window: LeaseWindow = field(default_factory=LeaseWindow)
    """How its last leases ended, as far as this process gave them."""
    unrecorded: bool = False
    """Its probation has gone on since it was last written."""
    host: str | None = None
    """The IP address it said hello from; None where it is not known."""
    seen_at: float | None = None
    session: bytes | None = None
    home: bytes | None = None
    """SHA-256 of the mark of the folder it runs in, as its last hello with one said."""
    sequence: int = -1
    rival_at: float | None = None
    """When a second process with its key was last refused."""
    rival: str = ""
    ended_sessions: deque[bytes] = field(default_factory=lambda: deque(maxlen=SESSIONS_REMEMBERED))
    told: tuple[object, ...] | None = None
    """What the last heartbeat reply of this session said, and when."""
    told_at: float = 0.0
    says: str = ""
    epoch: int | None = None
    version: int | None = None
    manifest_hash: bytes | None = None
    installed_at: float | None = None
    """When this process first heard that it uses that snapshot."""
    fetching: Fetching | None = None
    """How far its download is, by its own word."""
    tokens_per_second: float = 0.0
    idle_since: float | None = None
    """Since when its heartbeats have said that it holds and spools nothing."""
    meter: RateMeter = field(default_factory=RateMeter)
    last_reason: str = ""
    rejected_in_row: int = 0
    rest_until: float = float("-inf")
    account: int = 0
    """Its newest account over all runs, of those that are open: see `payroll`."""
    price: int = 0
    """Micro-dollars an hour that it would be activated at; 0 for a volunteer."""

    @property
    def state(self) -> NodeState:
        """See `node_states`."""
        assert self.standing.state != "new", "a node in the pool was let in"
        return self.standing.state

    @property
    def state_reason(self) -> str:
        """Why."""
        return self.standing.reason

    @property
    def standby(self) -> bool:
        """It has a price and is not activated: it is given no leases, and counts for no rate and no quorum."""
        return self.standing.state == "standby"

    def health(self, now: float, heartbeat_seconds: float) -> Health:
        """See the table above."""
        if self.seen_at is None or now - self.seen_at > DEAD_HEARTBEATS * heartbeat_seconds:
            return "dead"
        return "healthy" if now - self.seen_at <= LATE_HEARTBEATS * heartbeat_seconds else "late"

    def slice_rejected(self, now: float) -> None:
        """Count a refused slice; after several in a row the node rests, each time longer."""
        self.rejected_in_row += 1
        over = self.rejected_in_row - REJECTED_IN_ROW_MAX
        if over >= 0:
            self.rest_until = now + min(REST_SECONDS_FIRST * 2.0 ** min(over, 10), REST_SECONDS_MAX)

    def slice_accepted(self) -> None:
        """Its work is good again."""
        self.rejected_in_row = 0
        self.rest_until = float("-inf")


AWAY = frozenset({"paused", "blocked", "finishing", "stopped"})
"""What a node says of itself when it installs nothing and takes no leases: no broadcast counts on it."""


STALLED = "stalled"
"""What a node says whose engine does not come back from a batch; it may at any moment, so broadcasts count on it."""


class Pool:
    """Every admitted node, by peer id. `of` a run: `nodes` are still all of them, and only the run's are counted."""

    def __init__(
        self, heartbeat_seconds: float, nodes: dict[str, NodeEntry] | None = None, run: str | None = None
    ) -> None:
        self.heartbeat_seconds = heartbeat_seconds
        self.nodes: dict[str, NodeEntry] = {} if nodes is None else nodes
        self._run = run

    def of(self, run: str) -> Pool:
        """The same nodes, seen from one of the runs that share them."""
        return Pool(self.heartbeat_seconds, self.nodes, run)

    def has(self, node: NodeEntry) -> bool:
        """Whether the node is placed in this run."""
        return self._run is None or node.run == self._run

    def members(self) -> Iterator[NodeEntry]:
        """The nodes that are placed in this run."""
        return filter(self.has, self.nodes.values())

    def live(self, now: float) -> Iterator[NodeEntry]:
        """Nodes that take part, are not dead and, by their own word, are not away."""
        for node in self.members():
            here = node.state in SERVING and node.says not in AWAY
            if here and node.health(now, self.heartbeat_seconds) != "dead":
                yield node

    def working(self, now: float) -> Iterator[NodeEntry]:
        """Live nodes that are active: what others may count on."""
        return (node for node in self.live(now) if node.state == "active")

    def counted(self, now: float) -> list[NodeEntry]:
        """The working ones; while there is none, those in probation, or a new pool would be none."""
        live = list(self.live(now))
        return [node for node in live if node.state == "active"] or [n for n in live if n.state == "probation"]

    def nobody(self, now: float) -> str:
        """Why no node can be counted on, in the nodes' own words; empty when one can."""
        says = Counter(
            node.says
            for node in self.members()
            if node.state in {"active", "probation"} and node.health(now, self.heartbeat_seconds) != "dead"
        )
        if not says:
            standby = sum(node.standby for node in self.live(now))
            if standby:
                return f"{standby} live nodes, all of them standing by"
            applied = sum(node.state == "applied" for node in self.members())
            waiting = f"; {applied} nodes wait for the operator to admit them" if applied else ""
            elsewhere = [node for node in Pool(self.heartbeat_seconds, self.nodes).live(now) if not self.has(node)]
            if elsewhere:
                kept = sum(bool(node.wanted) for node in elsewhere)
                why = f"; kept away by a join string that names another run: {kept}" if kept else ""
                return f"none of the pool's {len(elsewhere)} live nodes is placed in this run{why}{waiting}"
            return f"no live node in the pool{waiting}"
        if any(word not in AWAY and word != STALLED for word in says):
            return ""
        return (
            f"nodes that can work: of {says.total()} live, {', '.join(f'{says[word]} {word}' for word in sorted(says))}"
        )

    def mu(self, now: float) -> float:
        """mu_pool = sum of a_i mu_i, in rollouts per second."""
        return sum(node.meter.rate(now) or 0.0 for node in self.working(now))


class Complaints:
    """How often each peer broke the protocol, and how last."""

    def __init__(self) -> None:
        self.total = 0
        self._peers: OrderedDict[str, tuple[int, str]] = OrderedDict()

    def add(self, peer: str, error: str) -> None:
        """Count one."""
        self.total += 1
        count, _ = self._peers.pop(peer, (0, ""))
        self._peers[peer] = (count + 1, error)
        if len(self._peers) > COMPLAINTS_PEERS_MAX:
            self._peers.popitem(last=False)

    def of(self, peer: str) -> tuple[int, str]:
        """Count and last error of a peer."""
        return self._peers.get(peer, (0, ""))


class Tally:
    """How many rollouts are in which state, per node and in all; and why those that were lost were."""

    def __init__(self) -> None:
        self.train: Counter[str] = Counter()
        self.evaluated = 0
        self.by_peer: dict[str, Counter[str]] = {}
        self.refused: Counter[str] = Counter()

    def move(self, peer: str, kind: str, old: str | None, new: str, reason: str = "", count: int = 1) -> None:
        """Count rollouts that went from one state (None: just arrived) to another."""
        mine = self.by_peer.setdefault(peer, Counter())
        if kind == "eval":
            mine[f"eval {new}"] += count
            self.evaluated += count if new == "evaluated" else 0
        else:
            for counter in (mine, self.train):
                counter[new] += count
                if old is not None:
                    counter[old] -= count
        if new in {"rejected", "duplicate", "stale", "withdrawn"}:
            self.refused[f"{new}: {_short(reason)}" if reason else new] += count


def _short(reason: str) -> str:
    """The kind of a reason: its words before the first number or colon, so that the kinds stay few."""
    return re.split(r"[^A-Za-z_ ']", reason, maxsplit=1)[0].strip()[:32] or "other"
