"""Where each node is with the newest snapshot, as people see it."""

from __future__ import annotations

import pytest
import trio

from echo2.coordinator.broadcast_view import NODES_SHOWN
from echo2.p2p.messages import Fetching

pytestmark = pytest.mark.slow_on_postgresql


def fetching(manifest_hash, cells=b"\x01", held=1, sources=()):
    return Fetching(manifest_hash=manifest_hash, cells=cells, chunks_held=held, sources=tuple(sources))


def row(service, node):
    return next(row for row in service.broadcast_view(NODES_SHOWN).nodes if row.peer == node.peer_id)


async def test_before_the_first_snapshot_nothing_is_shown_but_why(autojump_clock, world):
    """No figure is made up."""
    async with world.serving() as service:
        view = service.broadcast_view(NODES_SHOWN)
    assert (view.version, view.chunks, view.published_seconds_ago, view.nodes) == (None, None, None, ())
    assert view.waiting == "no snapshot is published yet"


async def test_a_node_is_followed_from_waiting_to_use(autojump_clock, world):
    """By its heartbeats: nothing yet, whole but not loaded, in use and after how long."""
    async with world.serving() as service, world.node(10) as node, world.learner() as learner:
        await node.hello(world.token())
        await learner.hello()
        manifest_hash, _ = await learner.publish()
        await node.heartbeat()
        assert (row(service, node).place, row(service, node).chunks_held, row(service, node).cells) == (
            "waiting",
            None,
            "",
        )
        await node.manifest(manifest_hash)
        await trio.sleep(2)
        await node.heartbeat(fetching=fetching(manifest_hash, sources=[learner.peer_id]))
        assert (row(service, node).place, row(service, node).cells) == ("loading", "01")  # the snapshot has one chunk
        assert service.broadcast_view(NODES_SHOWN).waiting.startswith("1 more nodes to use it")
        await trio.sleep(1)
        await node.heartbeat(manifest=manifest_hash)
        view = service.broadcast_view(NODES_SHOWN)
    (shown,) = view.nodes
    assert (shown.place, shown.counted, shown.chunks_held, shown.cells) == ("in use", True, 1, "01")
    assert shown.seconds == pytest.approx(3, abs=0.3)
    assert (view.in_use, view.counted, view.quorum, view.waiting, view.plan_kind) == (1, 1, 1, "", "star")
    assert view.broadcast_seconds == pytest.approx(3, abs=0.3)


@pytest.mark.parametrize(
    "said",
    [
        lambda current: fetching(bytes(32)),
        lambda current: fetching(current, cells=b"\x01\x00"),
        lambda current: fetching(current, cells=b"\xff" * 32, held=262_144),
    ],
    ids=["another snapshot", "two bytes for one cell", "256 cells"],
)
async def test_a_word_that_does_not_fit_counts_as_none(autojump_clock, world, said):
    """Whatever a node says of its download, the page stays of the size of the snapshot, and the node stays in."""
    async with world.serving() as service, world.node(10) as node, world.learner() as learner:
        await node.hello(world.token())
        await learner.hello()
        manifest_hash, _ = await learner.publish()
        await node.heartbeat(fetching=said(manifest_hash))
        assert (row(service, node).place, row(service, node).cells, row(service, node).sources) == ("waiting", "", ())
        assert service.nodes_view()[0].protocol_errors == 0


async def test_who_lacks_it_after_the_usual_time_is_behind(autojump_clock, world):
    """Once a broadcast was timed; a suspended node is away, and nobody waits for it."""
    async with (
        world.serving() as service,
        world.node(10) as quick,
        world.node(11) as slow,
        world.node(12) as banned,
        world.learner() as learner,
    ):
        for node in (quick, slow, banned):
            await node.hello(world.token())
        await learner.hello()
        first, _ = await learner.publish()
        for node in (quick, slow, banned):
            await node.heartbeat(manifest=first)
        service.suspend_node(banned.peer_id, actor="test", reason="forged")
        second, _ = await learner.publish(version=1)
        await trio.sleep(1)
        await quick.heartbeat(manifest=second)
        await slow.heartbeat(manifest=first)
        view = service.broadcast_view(NODES_SHOWN)
        assert [(row.peer, row.place, row.behind) for row in view.nodes] == [
            (slow.peer_id, "waiting", True),
            (quick.peer_id, "in use", False),
            (banned.peer_id, "away", False),
        ]
        short = service.broadcast_view(1)
    assert ([row.peer for row in short.nodes], short.nodes_left_out) == ([slow.peer_id], 2)
