"""Which source to ask for which chunks, and what to do when one is slow, lies or vanishes. Pure: time is an argument.

| event                      | what follows                                                                          |
|----------------------------|---------------------------------------------------------------------------------------|
| start, new plan            | each planned source is asked for its chunks in one stream                             |
| chunks arrived             | nobody is asked for them again; the source's late clock starts anew                   |
| source silent for longer   | passed over: its stream is dropped, it rests, and its missing chunks are repaired     |
| than max(2 s, 4 x expected)|                                                                                       |
| source wrong (hash, frame) | banned for this snapshot, its chunks are repaired                                     |
| source lost                | rests, each time longer; its chunks are repaired                                      |
| source declined            | as it says: rests `retry_seconds`, or is never asked for these chunks again           |
| source ended, chunks left  | it has not got them now: not asked for these for a while; they are repaired           |
| ticket declined            | the plan is refreshed                                                                 |
| 10 s without a chunk       | the plan is refreshed                                                                 |
| 60 s without a chunk, or a | failed, with the reason; the chunks held stay and the next attempt resumes            |
| chunk nobody may send      |                                                                                       |

Repair of a chunk is pull. In order: its planned source (when it is fit again), whoever is above that source in the plan
(it had the chunk earlier), any other holder of the roster, and after three of them the root, the last resort. A source
has one stream at a time; every wait has a bound, and `reason` says what is being waited for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from .chunks import chunks_of
from .plan import hops, source_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from .messages import BroadcastPlan, Manifest, PeerAddress, PlanEntry

LATE_SECONDS = 2.0
LATE_FACTOR = 4.0
"""A source is late after max(2 s, 4 x expected) of silence: above the jitter of a home line, far below patience."""

ROOT_LATE_SECONDS = 10.0
"""The root is given longer: there is nobody behind it, and it is the one that serves whoever lost a relay."""

ASSUMED_BITS_PER_SECOND = 4e6
"""Rate that sets the expected wait for the first chunk, before anything was measured: a slow home uplink."""

LATE_REST_SECONDS = 10.0
"""A late source is left alone this long: about what a stalled line takes to recover."""

LACK_SECONDS = 3.0
"""A holder that had not got a chunk is asked for it again after this."""

BACKOFF_SECONDS = 0.5
BACKOFF_SECONDS_MAX = 15.0
"""A lost source is tried again after 0.5 s, doubled each time, so that a restarting one is found soon."""

SOURCE_WAIT_SECONDS = 30.0
"""How long a planned source may wait for a chunk it has not got yet; the late rule usually ends it sooner."""

REPAIR_WAIT_SECONDS = 1.0
"""How long a repairing holder may wait: one that is a little behind still helps, one without hope is left soon."""

REPAIR_HOLDERS = 3
"""Holders tried for a chunk before the root is: few, so that repair ends within seconds in a large pool."""

REFRESH_SECONDS = 10.0
STALL_SECONDS = 60.0
"""Without a single chunk for so long, first the plan is asked anew, then the download gives up and says why."""


# What the shell does


@dataclass(frozen=True, slots=True)
class Ask:
    """Open a stream to `source` and ask for these chunks. `number` names the stream in what is reported of its end."""

    number: int
    source: PeerAddress
    chunks: frozenset[int]
    wait_seconds: float


@dataclass(frozen=True, slots=True)
class Drop:
    """Reset this stream, if it is still open."""

    number: int
    source: str
    reason: str


@dataclass(frozen=True, slots=True)
class Refresh:
    """Ask the coordinator for the plan and the ticket as they are now, then report `Replanned`."""

    reason: str


@dataclass(frozen=True, slots=True)
class Done:
    """Every chunk is here."""


@dataclass(frozen=True, slots=True)
class Fail:
    """Give up for now."""

    reason: str


Action = Ask | Drop | Refresh | Done | Fail


# What the shell reports


@dataclass(frozen=True, slots=True)
class Start:
    """The first event."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """These chunks from `source` verified and were kept."""

    source: str
    chunks: Collection[int]


@dataclass(frozen=True, slots=True)
class Wrong:
    """`source` sent bytes that do not verify, or broke the protocol."""

    source: str
    reason: str


@dataclass(frozen=True, slots=True)
class Ended:
    """`source` said END: it sent what it had."""

    number: int
    source: str


@dataclass(frozen=True, slots=True)
class Declined:
    """`source` refused; `retry_seconds` None is final for the chunks it still owed."""

    number: int
    source: str
    code: str
    retry_seconds: float | None


@dataclass(frozen=True, slots=True)
class Lost:
    """No connection to `source`, or its stream was cut."""

    number: int
    source: str
    reason: str


@dataclass(frozen=True, slots=True)
class Replanned:
    """The coordinator's plan as it is now."""

    plan: BroadcastPlan


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed: `deadline` was reached."""


Event = Start | Arrived | Wrong | Ended | Declined | Lost | Replanned | Tick

LATE = "late"
"""Why a source is passed over that was silent for too long."""

TICKET_CODE = "ticket"
"""Refusal code of a holder that does not take our ticket."""

LACKING_CODE = "not-here"
"""Refusal code of a holder whose wait for the next chunk ended."""


@dataclass(slots=True)
class _Source:
    address: PeerAddress
    number: int | None = None  # of the stream that is open
    owed: set[int] = field(default_factory=set)
    asked_at: float = 0.0
    progress_at: float = 0.0
    received: int = 0
    first_seconds: float = 0.0
    failures: int = 0
    rests_until: float = -math.inf
    why: str = ""
    lacks_until: dict[int, float] = field(default_factory=dict)


class Swarm:
    """The state of one download. `step` takes an event and returns what to do; `deadline` is when to send a `Tick`."""

    def __init__(
        self,
        manifest: Manifest,
        plan: BroadcastPlan,
        me: str,
        held: Collection[int],
        now: float,
        banned: Collection[str] = (),
    ) -> None:
        self.chunks = chunks_of(manifest)
        self.missing = set(range(self.chunks)) - set(held)
        self._me = me
        self._chunk_bits = 8 * min(manifest.chunk_bytes, manifest.length_bytes)
        self._unassigned = set(self.missing)
        self._sources: dict[str, _Source] = {}
        self._banned = set(banned)
        self._arrived_at = self._refreshed_at = now
        self._fit_at = math.inf  # when a source that rests or lacks may be asked for what nobody is asked for
        self._over = False
        self._numbers = count()
        self._take_plan(plan)

    @property
    def banned(self) -> frozenset[str]:
        """Peers that sent wrong bytes of this snapshot."""
        return frozenset(self._banned)

    @property
    def relays(self) -> frozenset[str]:
        """Whom the plan names as this node's sources, the root aside."""
        entry = self._entries.get(self._me)
        sources = {edge.source for edge in entry.edges} if entry else set()
        return frozenset(sources - {self._plan.root.peer})

    def is_planned(self, peer: str, chunk: int) -> bool:
        """Whether the plan has this node get `chunk` from `peer`."""
        entry = self._entries.get(self._me)
        return entry is not None and source_of(entry, chunk) == peer

    def step(self, event: Event, now: float) -> list[Action]:
        """Take one event; the actions are to be carried out in order. After Done or Fail there are no more."""
        if self._over:
            return []
        actions: list[Action] = []
        match event:
            case Arrived(peer, chunks):
                self._arrived(peer, chunks, now)
            case Wrong(peer, reason):
                self._banned.add(peer)
                actions += self._release(peer, reason, math.inf)
            case Ended(number, peer) | Lost(number, peer) | Declined(number, peer) if not self._open(number, peer):
                pass  # the end of a stream that was dropped before
            case Ended(_, peer):
                actions += self._release(peer, "", now + LACK_SECONDS, ended=True)
            case Declined(_, peer, "not-here"):
                actions += self._release(peer, "has not got the chunk yet", now + LACK_SECONDS, ended=True)
            case Declined(_, peer, code, retry_seconds):
                if code == TICKET_CODE:
                    retry_seconds = BACKOFF_SECONDS_MAX
                    actions += self._refresh("a holder did not take our ticket", now, at_least=BACKOFF_SECONDS)
                until = math.inf if retry_seconds is None else now + retry_seconds
                actions += self._release(peer, f"declined ({code})", until, rest=until < math.inf, ended=True)
            case Lost(_, peer, reason):
                pause = min(BACKOFF_SECONDS * 2 ** self._sources[peer].failures, BACKOFF_SECONDS_MAX)
                self._sources[peer].failures += 1
                actions += self._release(peer, reason, now + pause, rest=True, ended=True)
            case Replanned(plan):
                self._take_plan(plan)
            case Start() | Tick():
                pass
        if not self.missing:
            self._over = True
            return [*actions, Done()]
        late = [peer for peer, source in self._sources.items() if now >= self._late_at(source)]
        for peer in late:
            actions += self._release(peer, LATE, now + LATE_REST_SECONDS, rest=True)
        if late or not isinstance(event, Arrived):  # the frequent event frees nobody
            actions += self._assign(now)
        if now >= self._arrived_at + STALL_SECONDS or self._hopeless():
            self._over = True
            return [*actions, Fail(self.reason(now))]
        if now >= self._arrived_at + REFRESH_SECONDS:
            actions += self._refresh("no chunk came", now, at_least=REFRESH_SECONDS)
        return actions

    def deadline(self, now: float) -> float:
        """When to report a `Tick` if nothing else happens: never in the past, never beyond the stall bound."""
        times = [self._arrived_at + STALL_SECONDS, max(self._arrived_at, self._refreshed_at) + REFRESH_SECONDS]
        times += [self._late_at(source) for source in self._sources.values()]
        times.append(self._fit_at)
        return max(now, min(at for at in times if at > now or at == times[0]))

    def reason(self, now: float) -> str:
        """What the download waits for, in words for a person."""
        held = self.chunks - len(self.missing)
        asked = [peer for peer, source in self._sources.items() if source.number is not None]
        idle = now - self._arrived_at
        if asked:
            names = ", ".join(peer[-6:] for peer in asked[:3]) + (" and others" if len(asked) > 3 else "")
            return (
                f"{held} of {self.chunks} chunks, {len(asked)} sources sending ({names}), last chunk {idle:.0f} s ago"
            )
        faults = "; ".join(f"{peer[-6:]} {source.why}" for peer, source in self._sources.items() if source.why)
        return f"{held} of {self.chunks} chunks, no source left to ask for {idle:.0f} s ({faults or 'none known'})"[
            :500
        ]

    # how events change the state

    def _take_plan(self, plan: BroadcastPlan) -> None:
        self._plan = plan
        self._entries: dict[str, PlanEntry] = {entry.node.peer: entry for entry in plan.entries}
        holders = [entry.node for entry in plan.entries]
        at = next((place for place, node in enumerate(holders) if node.peer == self._me), 0)
        # Each node starts its search just after itself, so that repairs of a whole pool do not all hit one holder.
        ordered = [*holders[at + 1 :], *holders[:at], plan.root]
        for node in ordered:
            if node.peer != self._me and node.addresses:
                known = self._sources.setdefault(node.peer, _Source(node))
                known.address = node
        self._order = [node.peer for node in ordered if node.peer in self._sources]

    def _arrived(self, peer: str, chunks: Collection[int], now: float) -> None:
        self._arrived_at = now
        self.missing.difference_update(chunks)
        self._unassigned.difference_update(chunks)
        for source in self._sources.values():
            source.owed.difference_update(chunks)
        if peer in self._sources:
            source = self._sources[peer]
            source.progress_at = now
            source.received += len(chunks)
            source.failures = 0

    def _open(self, number: int, peer: str) -> bool:
        return peer in self._sources and self._sources[peer].number == number

    def _release(
        self, peer: str, why: str, until: float, *, rest: bool = False, ended: bool = False
    ) -> Iterator[Action]:
        """End what `peer` was asked for; it is not asked for these chunks (with `rest`, for any) before `until`."""
        source = self._sources.get(peer)
        if source is None:
            return
        if source.number is not None and not ended:
            yield Drop(source.number, peer, why)
        source.number = None
        source.why = why
        if rest:
            source.rests_until = until
        for chunk in source.owed:
            source.lacks_until[chunk] = until
        self._unassigned |= source.owed & self.missing
        source.owed = set()

    def _refresh(self, reason: str, now: float, *, at_least: float) -> Iterator[Action]:
        if now >= self._refreshed_at + at_least:
            self._refreshed_at = now
            yield Refresh(reason)

    def _late_at(self, source: _Source) -> float:
        if source.number is None:
            return math.inf
        expected = source.first_seconds
        if source.received:
            expected = (source.progress_at - source.asked_at) / source.received
        floor = ROOT_LATE_SECONDS if source.address.peer == self._plan.root.peer else LATE_SECONDS
        return source.progress_at + max(floor, LATE_FACTOR * expected)

    def _hopeless(self) -> bool:
        """No source may ever send some chunk again: waiting would be for nothing."""
        fit = [source for peer, source in self._sources.items() if peer not in self._banned]
        return any(all(source.lacks_until.get(chunk, 0.0) == math.inf for source in fit) for chunk in self._unassigned)

    # whom to ask

    def _assign(self, now: float) -> Iterator[Action]:
        self._fit_at = math.inf
        if not self._unassigned:
            return
        chosen: dict[str, set[int]] = {}
        planned: set[str] = set()
        entry = self._entries.get(self._me)
        for chunk in sorted(self._unassigned):
            plan_source = source_of(entry, chunk) if entry else self._plan.root.peer
            peer = next(
                (peer for peer in self._candidates(chunk, plan_source, now) if self._fit(peer, chunk, now)), None
            )
            if peer is not None:
                chosen.setdefault(peer, set()).add(chunk)
                if peer == plan_source:
                    planned.add(peer)
        for peer, chunks in chosen.items():
            source = self._sources[peer]
            source.number = next(self._numbers)
            source.owed = chunks
            source.asked_at = source.progress_at = now
            source.received = 0
            depth = 1 + hops(self._plan, peer, min(chunks))
            source.first_seconds = depth * self._chunk_bits / ASSUMED_BITS_PER_SECOND
            self._unassigned -= chunks
            patient = peer in planned or peer == self._plan.root.peer
            yield Ask(
                source.number,
                source.address,
                frozenset(chunks),
                SOURCE_WAIT_SECONDS if patient else REPAIR_WAIT_SECONDS,
            )
        self._fit_at = min(self._fit_times(), default=math.inf)

    def _fit_times(self) -> Iterator[float]:
        for peer, source in self._sources.items():
            if peer not in self._banned and source.number is None:
                for chunk in self._unassigned:
                    yield max(source.rests_until, source.lacks_until.get(chunk, -math.inf))

    def _candidates(self, chunk: int, plan_source: str | None, now: float) -> Iterable[str]:
        """In order of preference; the root comes last, or at once when enough others had not got the chunk."""
        root = self._plan.root.peer
        if plan_source is not None:
            yield plan_source
        tried = sum(source.lacks_until.get(chunk, now) > now for source in self._sources.values())
        if tried < REPAIR_HOLDERS and plan_source != root:
            above = self._entries.get(plan_source) if plan_source else None
            grandparent = source_of(above, chunk) if above else None
            if grandparent is not None and grandparent != root:
                yield grandparent
        if tried < REPAIR_HOLDERS:
            yield from (peer for peer in self._order if peer != root)
        yield root

    def _fit(self, peer: str, chunk: int, now: float) -> bool:
        source = self._sources.get(peer)
        return (
            source is not None
            and peer not in self._banned
            and source.number is None
            and source.rests_until <= now
            and source.lacks_until.get(chunk, now) <= now
        )
