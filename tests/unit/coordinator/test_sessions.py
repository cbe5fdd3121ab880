"""Two processes with one key: which of them goes on, and who is told."""

from __future__ import annotations

import pytest
import trio

from echo2.p2p.errors import Refused

AGAIN = 6
"""More often than a transport takes from a peer."""

SECOND, HERE, THERE = b"2" * 16, b"h" * 16, b"t" * 16


async def test_a_second_process_with_a_live_key_is_refused_and_both_are_told(autojump_clock, world, caplog):
    """The earlier one goes on undisturbed; owner and operator see why; nothing flaps."""
    async with world.serving() as service, world.node(10) as node:
        await node.hello(world.token(), session=node.session, home=HERE)
        for _ in range(AGAIN):
            await node.heartbeat()
            with pytest.raises(Refused, match="another process uses this node's key") as refused:
                await node.hello(session=SECOND, home=THERE)
            assert refused.value.code == "identity_live"
            assert 0 < refused.value.retry_seconds <= 30.0
            with pytest.raises(Refused) as refused:
                await node.heartbeat(session=SECOND, sequence=1)
            assert refused.value.code == "identity_live"
        assert not world.network.find(world.coordinator.peer_id).offences
        words = "a second process with this node's key was refused; it came from 127.0.0.1"
        assert (await node.heartbeat()).warning == words
        assert service.nodes_view()[0].reason == words
        assert [record.getMessage() for record in caplog.records].count(f"volunteer: {words}") == 1
        assert [event.action for event in service.events_view()].count("second process refused") == 1
        for _ in range(4):
            await trio.sleep(20.0)
            notice = await node.heartbeat()
        assert notice.warning == "", "it is told for a minute"


async def test_the_owner_of_the_live_process_is_told_at_once(autojump_clock, world):
    """His held heartbeat comes back with it."""
    async with world.serving(), world.node(10) as node, trio.open_nursery() as nursery:
        await node.hello(world.token(), session=node.session, home=HERE)
        await node.heartbeat()
        told = []

        async def wait():
            told.append(((await node.heartbeat(hold=10.0)).warning, trio.current_time()))

        nursery.start_soon(wait)
        await trio.sleep(1.0)
        began = trio.current_time()
        with pytest.raises(Refused):
            await node.hello(session=SECOND, home=THERE)
        await trio.sleep(1.0)
        ((warning, at),) = told
        assert warning
        assert at - began < 1.0


async def test_the_second_process_takes_over_when_the_first_is_dead(autojump_clock, world):
    """As its refusal says; the first, should it wake up, is told that it is over."""
    async with world.serving(), world.node(10) as node:
        await node.hello(world.token(), session=node.session, home=HERE)
        await node.heartbeat()
        await trio.sleep(5.0)
        with pytest.raises(Refused) as refused:
            await node.hello(session=SECOND, home=THERE)
        await trio.sleep(refused.value.retry_seconds + 0.1)
        await node.hello(session=SECOND, home=THERE)
        await node.heartbeat(session=SECOND, sequence=1)
        for again in (node.heartbeat, lambda: node.hello(session=node.session, home=HERE)):
            with pytest.raises(Refused, match="stop one of the two") as refused:
                await again()
            assert (refused.value.code, refused.value.retry_seconds) == ("session_ended", None)


async def test_a_process_that_comes_back_in_its_home_goes_on_at_once(autojump_clock, world):
    """After a kill -9 there is no goodbye: the home proves it. The held reply of the one before ends."""
    async with world.serving(), world.node(10) as node, trio.open_nursery() as nursery:
        await node.hello(world.token(), session=node.session, home=HERE)
        await node.heartbeat()
        ended = []

        async def wait():
            with pytest.raises(Refused) as refused:
                await node.heartbeat(hold=10.0)
            ended.append((refused.value.code, trio.current_time()))

        nursery.start_soon(wait)
        await trio.sleep(1.0)
        began = trio.current_time()
        assert (await node.hello(session=SECOND, home=HERE)).node_state == "active"
        assert (await node.heartbeat(session=SECOND, sequence=1)).node_state == "active"
        await trio.sleep(0.5)
        ((code, at),) = ended
        assert (code, at - began < 1.0) == ("session_ended", True)


async def test_a_process_that_said_goodbye_is_no_hindrance(autojump_clock, world):
    """Another home may go on with its key at once; the node is what it was before."""
    async with world.serving() as service, world.node(10) as node:
        await node.hello(world.token(), session=node.session, home=HERE)
        await node.heartbeat()
        assert (await node.heartbeat(state="stopped")).node_state == "left"
        assert [view.state for view in service.nodes_view()] == ["left"]
        pool = service.pool_view()
        assert (pool.nodes_left, pool.nodes_dead) == (1, 0)
        assert (await node.hello(session=SECOND, home=THERE)).node_state == "active"
        assert [move.event for move in service.transitions_view(node.peer_id)][:2] == ["returned", "goodbye"]


async def test_a_home_is_known_after_a_restart_of_the_coordinator(autojump_clock, world):
    """The node need not have said hello again: killed then, it is back at once all the same."""
    async with world.node(10) as node:
        async with world.serving():
            await node.hello(world.token(), session=node.session, home=HERE)
            await node.heartbeat()
        async with world.serving() as service:
            await node.heartbeat()
            with pytest.raises(Refused) as refused:
                await node.hello(session=SECOND, home=THERE)
            assert refused.value.code == "identity_live"
            assert (await node.hello(session=SECOND, home=HERE)).node_state == "active"
            assert (await node.heartbeat(session=SECOND, sequence=1)).node_state == "active"
            assert len(service.nodes_view()) == 1
