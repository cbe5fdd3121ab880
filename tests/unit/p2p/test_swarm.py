"""Who is asked for what: each rule of the table by hand, then any order of events."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.p2p.chunks import ContentHashes
from echo2.p2p.identity import Identity
from echo2.p2p.manifest import make_manifest
from echo2.p2p.messages import KIB, BroadcastPlan, PeerAddress, PlanEdge, PlanEntry
from echo2.p2p.swarm import (
    BACKOFF_SECONDS,
    LACK_SECONDS,
    LATE_REST_SECONDS,
    LATE_SECONDS,
    REFRESH_SECONDS,
    REPAIR_WAIT_SECONDS,
    ROOT_LATE_SECONDS,
    SOURCE_WAIT_SECONDS,
    STALL_SECONDS,
    Arrived,
    Ask,
    Declined,
    Done,
    Drop,
    Ended,
    Fail,
    Lost,
    Refresh,
    Replanned,
    Start,
    Swarm,
    Tick,
    Wrong,
)

NAMES = ("root", "me", "a", "b", "c", "d", "e")
IDS = {name: Identity(name.encode().ljust(32, b".")).peer_id for name in NAMES}
NAME_OF = {peer: name for name, peer in IDS.items()}
CHUNKS = 12
CONTENT = ContentHashes(CHUNKS * 64 * KIB, 64 * KIB, bytes(32 * CHUNKS), bytes(32))
MANIFEST = make_manifest(
    CONTENT, run="r", publisher=IDS["root"], epoch=0, version=0, domain="f16", previous_hash=None, created_seconds=0
)


def address(name, reachable=True):
    return PeerAddress(peer=IDS[name], addresses=("/ip4/192.0.2.1/tcp/1",) if reachable else ())


def plan(leaves=(), **sources):
    """`me=[("a", 0, 6), ...]`: the edges of each node; all nodes are on the roster."""
    entries = tuple(
        PlanEntry(
            node=address(name, name not in leaves),
            edges=tuple(PlanEdge(source=IDS[source], first=first, stop=stop) for source, first, stop in edges),
        )
        for name, edges in sources.items()
    )
    return BroadcastPlan(
        run="r", manifest_hash=bytes(32), epoch=0, version=0, chunks=CHUNKS, kind="chain", root=address("root"),
        entries=entries,
    )  # fmt: skip


ALL = [("root", 0, CHUNKS)]
RELAYED = plan(me=[("a", 0, CHUNKS)], a=[("b", 0, CHUNKS)], b=ALL, c=ALL, d=ALL, e=ALL)


def swarm(of, held=()):
    return Swarm(MANIFEST, of, IDS["me"], held, 0.0)


def asks(actions):
    return {NAME_OF[action.source.peer]: set(action.chunks) for action in actions if isinstance(action, Ask)}


def number(actions, name):
    return next(a.number for a in actions if isinstance(a, Ask) and a.source.peer == IDS[name])


def everything():
    return set(range(CHUNKS))


def test_start_by_plan():
    """At the start each planned source is asked for its chunks, less those held, and may wait long."""
    state = swarm(plan(me=[("a", 0, 4), ("root", 4, 8), ("a", 8, 12)], a=ALL), held={0, 5})
    actions = state.step(Start(), 0.0)
    assert asks(actions) == {"a": {1, 2, 3, 8, 9, 10, 11}, "root": {4, 6, 7}}
    assert {action.wait_seconds for action in actions} == {SOURCE_WAIT_SECONDS}


def test_done():
    """When the last chunk arrives the download is done, and nothing more is done about later events."""
    state = swarm(plan(me=ALL))
    first = state.step(Start(), 0.0)
    assert state.step(Arrived(IDS["root"], range(11)), 0.1) == []
    assert state.step(Arrived(IDS["root"], [11]), 0.2) == [Done()]
    assert state.step(Ended(number(first, "root"), IDS["root"]), 0.3) == []


def test_nothing_to_do():
    """With every chunk held from before there is nothing to ask."""
    assert swarm(plan(me=ALL), held=everything()).step(Start(), 0.0) == [Done()]


def test_late_is_passed_over():
    """After 2 s of silence a relay is dropped and its chunks are asked of the one above it, who may wait a little."""
    state = swarm(RELAYED)
    first = state.step(Start(), 0.0)
    assert asks(first) == {"a": everything()}
    assert state.step(Arrived(IDS["a"], [0]), 1.0) == []
    late = 1.0 + max(LATE_SECONDS, 4 * 1.0)
    assert state.deadline(1.0) == late
    assert state.step(Tick(), late - 0.01) == []
    actions = state.step(Tick(), late)
    assert actions[0] == Drop(number(first, "a"), IDS["a"], "late")
    assert asks(actions) == {"b": everything() - {0}}
    assert actions[1].wait_seconds == REPAIR_WAIT_SECONDS


def test_slow_but_steady():
    """A source that sends a chunk each 3 s is late only after 4 x 3 s of silence."""
    state = swarm(plan(me=ALL, a=ALL))
    state.step(Start(), 0.0)
    for place in range(4):
        assert state.step(Arrived(IDS["root"], [place]), 3.0 * (place + 1)) == []
    assert not any(isinstance(action, Drop) for action in state.step(Tick(), 12.0 + 11.9))
    assert any(isinstance(action, Drop) for action in state.step(Tick(), 12.0 + 12.0))


def test_root_gets_longer():
    """The root is late only after ten seconds: there is nobody behind it."""
    state = swarm(plan(me=ALL, a=ALL))
    state.step(Start(), 0.0)
    assert not any(isinstance(action, Drop) for action in state.step(Tick(), ROOT_LATE_SECONDS - 0.1))
    actions = state.step(Tick(), ROOT_LATE_SECONDS)
    assert asks(actions) == {"a": everything()}


def test_late_source_is_asked_again_after_its_rest():
    """A late root is left alone for ten seconds and asked again."""
    state = swarm(plan(me=ALL))
    state.step(Start(), 0.0)
    assert asks(state.step(Tick(), 10.0)) == {}
    assert asks(state.step(Tick(), 10.0 + LATE_REST_SECONDS - 0.1)) == {}
    assert asks(state.step(Tick(), 10.0 + LATE_REST_SECONDS)) == {"root": everything()}


def test_liar_is_banned():
    """A source with a wrong hash is dropped and never asked again, whatever else happens."""
    state = swarm(RELAYED)
    first = state.step(Start(), 0.0)
    actions = state.step(Wrong(IDS["a"], "wrong hash"), 0.5)
    assert actions[0] == Drop(number(first, "a"), IDS["a"], "wrong hash")
    assert asks(actions) == {"b": everything()}
    assert state.banned == {IDS["a"]}
    actions = state.step(Lost(number(actions, "b"), IDS["b"], "gone"), 1.0)
    assert "a" not in asks(actions)
    assert "a" not in asks(state.step(Replanned(RELAYED), 20.0))


def test_lost_source_backs_off():
    """A source that cannot be reached rests half a second, then one, two, ... and is asked again."""
    state = swarm(plan(me=ALL))
    actions = state.step(Start(), 0.0)
    now = 0.0
    for failures in range(4):
        assert asks(state.step(Lost(number(actions, "root"), IDS["root"], "gone"), now)) == {}
        assert state.deadline(now) == now + BACKOFF_SECONDS * 2**failures
        now = state.deadline(now)
        actions = state.step(Tick(), now)
        assert asks(actions) == {"root": everything()}


def test_last_resort():
    """The relay, the one above it, and another holder: when these three have not got it, the root is asked."""
    state = swarm(RELAYED)
    actions = state.step(Start(), 0.0)
    for name, following in (("a", "b"), ("b", "c"), ("c", "root")):
        actions = state.step(Declined(number(actions, name), IDS[name], "not-here", 1.0), 0.1)
        assert asks(actions) == {following: everything()}
    assert actions[0].wait_seconds == SOURCE_WAIT_SECONDS


def test_holder_without_the_chunk_is_asked_again():
    """A holder that had not got a chunk is asked for it again three seconds later."""
    state = swarm(plan(me=ALL))
    actions = state.step(Start(), 0.0)
    state.step(Ended(number(actions, "root"), IDS["root"]), 1.0)
    assert asks(state.step(Tick(), 1.0 + LACK_SECONDS - 0.1)) == {}
    assert asks(state.step(Tick(), 1.0 + LACK_SECONDS)) == {"root": everything()}


def test_ticket_declined():
    """When a holder does not take our ticket the plan is asked anew, once."""
    state = swarm(plan(me=[("a", 0, 6), ("b", 6, 12)], a=ALL, b=ALL))
    actions = state.step(Start(), 1.0)
    first = state.step(Declined(number(actions, "a"), IDS["a"], "ticket", None), 1.0)
    second = state.step(Declined(number(actions, "b"), IDS["b"], "ticket", None), 1.1)
    assert [sum(isinstance(action, Refresh) for action in step) for step in (first, second)] == [1, 0]


def test_final_refusal():
    """A chunk that the last possible source will not send again ends the download at once, with the reason."""
    state = swarm(plan(me=ALL))
    actions = state.step(Start(), 0.0)
    state.step(Arrived(IDS["root"], range(6)), 0.5)
    (fail,) = state.step(Declined(number(actions, "root"), IDS["root"], "served-twice", None), 1.0)
    assert isinstance(fail, Fail)
    assert "6 of 12 chunks" in fail.reason
    assert "served-twice" in fail.reason


def test_refreshed_then_failed():
    """Without a chunk the plan is asked anew each ten seconds, and after a minute the download gives up."""
    state = swarm(plan(me=ALL))
    now, refreshed, actions = 0.0, [], state.step(Start(), 0.0)
    while not any(isinstance(action, Fail) for action in actions):
        lost = [Lost(action.number, action.source.peer, "gone") for action in actions if isinstance(action, Ask)]
        event = lost[0] if lost else Tick()
        now = now if lost else state.deadline(now)
        actions = state.step(event, now)
        refreshed += [now for action in actions if isinstance(action, Refresh)]
    assert now == STALL_SECONDS
    assert len(refreshed) == STALL_SECONDS / REFRESH_SECONDS - 1


def test_new_plan():
    """A new plan's sources are asked for what is missing, at once."""
    state = swarm(plan(me=[("a", 0, CHUNKS)], a=ALL))
    actions = state.step(Start(), 0.0)
    state.step(Arrived(IDS["a"], [0]), 0.1)
    actions = state.step(Lost(number(actions, "a"), IDS["a"], "gone"), 0.2)
    assert asks(actions) == {"root": everything() - {0}}
    assert asks(state.step(Lost(number(actions, "root"), IDS["root"], "gone"), 0.3)) == {}
    assert asks(state.step(Replanned(plan(me=[("b", 0, CHUNKS)], b=ALL)), 0.4)) == {"b": everything() - {0}}


def test_not_on_the_roster():
    """A node the plan does not know (it joined later) takes everything from the root."""
    assert asks(swarm(plan(a=ALL)).step(Start(), 0.0)) == {"root": everything()}


def test_source_that_cannot_be_dialled():
    """A planned source without addresses is not asked; the chunks are repaired from others."""
    state = swarm(plan(leaves=("a",), me=[("a", 0, CHUNKS)], a=[("b", 0, CHUNKS)], b=ALL))
    assert asks(state.step(Start(), 0.0)) == {"b": everything()}


def test_end_of_a_dropped_stream_is_ignored():
    """What is reported of a stream dropped before does not touch the one that is open now."""
    state = swarm(plan(me=ALL))
    old = state.step(Start(), 0.0)
    state.step(Tick(), 10.0)
    new = state.step(Tick(), 20.0)
    assert asks(new) == {"root": everything()}
    assert asks(state.step(Lost(number(old, "root"), IDS["root"], "gone"), 20.1)) == {}
    assert state.step(Arrived(IDS["root"], everything()), 20.2) == [Done()]


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(["dead", "liar", "partial", "slow", "mixed"]))
def test_always_ends(seed, weather):
    """Whatever the others do, an honest root gets it done; nobody has two streams or sends what is here already."""
    rng = random.Random(seed)
    state = swarm(RELAYED)
    now, streams, missing, banned = 0.0, {}, everything(), set()
    queue = list(state.step(Start(), now))
    for _ in range(2000):
        while queue:
            action = queue.pop(0)
            match action:
                case Ask():
                    peer = action.source.peer
                    assert peer not in banned
                    assert peer not in {other for other, _ in streams.values()}
                    assert action.chunks <= missing
                    streams[action.number] = (peer, set(action.chunks))
                case Drop():
                    streams.pop(action.number, None)
                case Done():
                    assert not missing
                    return
                case Fail():
                    raise AssertionError(action.reason)
        pick = rng.choice(list(streams)) if streams else None
        silent = all(peer != IDS["root"] for peer, _ in streams.values())  # an honest root is never late
        if pick is None or rng.random() < 0.1:
            now = state.deadline(now) if silent else now + 0.01
            event = Tick()
        else:
            now += 0.01
            peer, owed = streams[pick]
            kind = "honest" if peer == IDS["root"] else weather
            kind = rng.choice(["dead", "liar", "partial", "slow", "honest"]) if kind == "mixed" else kind
            if kind == "dead":
                streams.pop(pick)
                event = Lost(pick, peer, "gone")
            elif kind == "liar":
                streams.pop(pick)
                banned.add(peer)
                event = Wrong(peer, "wrong hash")
            elif kind == "slow":
                now = state.deadline(now) if silent else now + 0.01
                event = Tick()
            elif not owed or (kind == "partial" and rng.random() < 0.5):
                streams.pop(pick)
                event = Ended(pick, peer) if not owed else Declined(pick, peer, "not-here", 1.0)
            else:
                chunk = owed.pop()
                missing.discard(chunk)
                event = Arrived(peer, [chunk])
        assert state.deadline(now) >= now
        assert state.reason(now)
        queue += state.step(event, now)
    raise AssertionError("it did not end")
