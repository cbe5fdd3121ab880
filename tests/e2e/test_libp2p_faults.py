"""The faults found in py-libp2p 0.8.1, between real processes: ours is free of them, stock is not (the canaries).

Fault 16 (no Linux wheel of fastecdsa) is not one of running processes; the README says what must be installed.
"""

from __future__ import annotations

import signal
from contextlib import suppress
from pathlib import Path

import pytest
import trio
from e2e.fault_peers import (
    ANY_PORT,
    HERE,
    MIB,
    count_back,
    line_of,
    other,
    ours,
    port_of,
    pour_into,
    resident_bytes,
    served_by_ours,
    served_by_stock,
    stock,
)
from fuzz.wire import HEADER, HELLO_LINES, SYN, client

from echo2.p2p import libp2p_transport, libp2p_yamux
from echo2.p2p.channel import Channel, answering, request
from echo2.p2p.errors import ConfigurationError, Truncated, Unreachable
from echo2.p2p.identity import Identity
from echo2.p2p.libp2p_transport import open_libp2p_transport
from echo2.p2p.messages import Ack, Chunk, PeerAddress

pytestmark = pytest.mark.e2e

LINE = Path(__file__).parents[1] / "bench" / "line.py"
HOSTILE = Identity(b"\x05" * 32)


@pytest.fixture
async def here():
    async with open_libp2p_transport(HERE, [ANY_PORT]) as transport:
        yield transport


async def ask(transport, peer):
    assert (await request(transport, peer, "hello", Ack(count=1), Ack)).count == 2


async def ended(connection):
    await connection._ended.wait()


def connection_with(transport, peer):
    (connection,) = transport._connections[peer.peer]
    return connection


async def send_bad_line(transport, peer):
    """A protocol line that is not UTF-8, on a fresh stream."""
    stream = connection_with(transport, peer).open_stream()
    with suppress(Unreachable):
        await stream.send_all(b"\x04\xff\xfe\xfd\x0a")
        while await stream.receive_some(1024):
            pass


async def test_fault_1_handler_exception_and_bad_utf8_leave_the_host_alive(here):
    """After a raising handler and a line that is not UTF-8, the same connection still answers."""
    async with served_by_ours() as (_, there):
        await ask(here, there)
        before = connection_with(here, there)
        stream = await here.open(there, "report")
        with pytest.raises(Unreachable):
            await stream.receive_some(1)
        await send_bad_line(here, there)
        await ask(here, there)
        assert connection_with(here, there) is before


async def test_fault_2_plaintext_peers_are_refused_both_ways(here):
    """Neither do we dial a peer that offers only plaintext, nor does one get in; with Noise it does."""
    here.set_handler("hello", answering(Ack, count_back, lambda peer, error: None))
    async with served_by_stock("plaintext") as (_, there):
        with pytest.raises(Unreachable):
            await here.open(there, "hello")
    outcomes = {}
    for security in ("plaintext", "noise"):
        async with stock("dial", security, here.addresses[0], here.peer_id) as process:
            outcomes[security] = (await line_of(process)).split()[0]
    assert outcomes == {"plaintext": "refused", "noise": "connected"}


async def test_fault_3_three_hundred_visits_leave_nothing_behind(here):
    """After 300 connections came and went, no connection, handler or task of theirs is left, and the next is served."""
    here.set_handler("hello", answering(Ack, count_back, lambda peer, error: None))
    tasks = trio.lowlevel.current_statistics().tasks_living
    async with ours("cycle_ours", here.addresses[0], here.peer_id, "301") as process:
        assert await line_of(process) == "cycled"
    with trio.fail_after(5):
        for connection in [one for known in here._connections.values() for one in known]:
            await ended(connection)
        await trio.testing.wait_all_tasks_blocked(0.05)
    assert not here._inbound
    assert not here._connections
    assert trio.lowlevel.current_statistics().tasks_living <= tasks + 1
    assert not here._serving


async def test_fault_7_killed_sender_is_not_an_end_of_stream(here):
    """A sender killed by SIGKILL in the middle of a frame is reported, never taken for a complete message."""
    async with served_by_ours() as (process, there):
        channel = Channel(await here.open(there, "publish"))
        assert await line_of(process) == "half"
        process.kill()
        with pytest.raises((Truncated, Unreachable)):
            await channel.receive(Chunk)


async def test_fault_7_send_close_exit_loses_nothing(here):
    """A process that sends, closes and exits at once has delivered every byte."""
    got = []
    done = trio.Event()

    async def count(stream):
        total = 0
        while part := await stream.receive_some(1 << 20):
            total += len(part)
        got.append(total)
        done.set()

    here.set_handler("chunks", count)
    async with ours("send_and_leave", here.addresses[0], here.peer_id) as process:
        await done.wait()
        assert await process.wait() == 0
    assert got == [200_000]


async def test_killed_and_restarted_peer_is_reached_again_at_once(here):
    """A peer killed by SIGKILL and started again on its port under its key answers the first request after it is up."""
    async with served_by_ours() as (process, there):
        await ask(here, there)
        process.kill()
        await process.wait()
        with trio.fail_after(5), pytest.raises(Unreachable):
            await ask(here, there)
    async with served_by_ours(there.addresses[0]) as (_, again):
        assert again == there
        with trio.fail_after(5):
            await ask(here, there)


async def test_fault_9_frozen_peer_is_noticed(here, monkeypatch):
    """A peer that no longer answers makes `open` fail in time, and its connection is found dead without being used."""
    monkeypatch.setattr(libp2p_transport, "OPEN_SECONDS", 0.5)
    monkeypatch.setattr(libp2p_transport, "DIAL_SECONDS", 0.5)
    monkeypatch.setattr(libp2p_yamux, "PING_SECONDS", 0.2)
    monkeypatch.setattr(libp2p_yamux, "SILENT_SECONDS_MAX", 0.6)
    async with served_by_ours() as (process, there):
        await ask(here, there)
        idle = connection_with(here, there)
        process.send_signal(signal.SIGSTOP)
        with trio.fail_after(5):
            await ended(idle)
        with trio.fail_after(5), pytest.raises(Unreachable):
            await here.open(there, "hello")
        process.send_signal(signal.SIGCONT)
        await ask(here, there)


async def test_fault_11_dead_addresses_cost_no_time(here):
    """With a dead, a silent and a malformed address before the good one, the peer is reached at once."""
    async with served_by_ours() as (_, there):
        dead = ("/ip4/127.0.0.1/tcp/1", "/ip4/192.0.2.1/tcp/4001", "nonsense")
        with trio.fail_after(5):
            await ask(here, PeerAddress(peer=there.peer, addresses=(*dead, *there.addresses)))


async def test_a_refused_connection_is_said_in_words(here):
    """The cause, and not that there was a group of one cause."""
    nobody = PeerAddress(peer=Identity(b"\x03" * 32).peer_id, addresses=("/ip4/127.0.0.1/tcp/1",))
    with pytest.raises(Unreachable, match=r"/ip4/127.0.0.1/tcp/1 .*Connection refused$"):
        await here.open(nobody, "hello")


async def test_idle_connection_is_closed_and_made_again(here, monkeypatch):
    """A connection without streams goes after a while, at both ends, and the next request makes a new one."""
    async with served_by_ours() as (_, there):
        await ask(here, there)
        idle = connection_with(here, there)
        monkeypatch.setattr(libp2p_transport, "IDLE_SECONDS", 0.1)
        async with open_libp2p_transport(Identity(b"\x04" * 32), []) as impatient:
            await ask(impatient, there)
            with trio.fail_after(5):
                await ended(connection_with(impatient, there))
            await ask(impatient, there)
        assert idle.usable


async def test_wrong_key_at_an_address_is_unreachable(here):
    """An address where another key answers is not the peer that was asked for."""
    async with served_by_ours() as (_, there):
        expected = PeerAddress(peer=Identity(b"\x03" * 32).peer_id, addresses=there.addresses)
        with pytest.raises(Unreachable):
            await here.open(expected, "hello")


async def test_fault_12_busy_port_is_an_error_that_names_it(here):
    """A second process on the same port is told which address is taken and what to do, and the first one keeps it."""
    async with served_by_ours() as (_, there):
        (address,) = there.addresses
        with pytest.raises(ConfigurationError, match=f"{address}.*another process.*choose another port"):
            async with open_libp2p_transport(HERE, [address]):
                pass
        await ask(here, there)


@pytest.mark.parametrize(
    ("address", "complaint"),
    [
        ("127.0.0.1:4001", "not an address such as"),
        ("/ip4/127.0.0.1/udp/4001", "not an address such as"),
        ("/ip4/192.0.2.1/tcp/0", "no interface of this machine"),
    ],
)
async def test_unfit_listening_address_is_a_configuration_error(address, complaint):
    """What is wrong with a listening address is said in one line."""
    with pytest.raises(ConfigurationError, match=complaint):
        async with open_libp2p_transport(HERE, [address]):
            pass


async def test_fault_13_leaving_closes_the_connection_at_the_peer(here):
    """When a process leaves, its peer counts no connection with it any more."""
    async with served_by_ours() as (process, there):
        await ask(here, there)
        connection = connection_with(here, there)
        process.send_signal(signal.SIGINT)
        with trio.fail_after(20):
            await ended(connection)
        assert there.peer not in here._connections or connection not in here._connections[there.peer]


async def ask_on(stream):
    """One byte to an echo and back."""
    await stream.send_all(b"x")
    assert await stream.receive_some(1) == b"x"


async def test_fault_5_cancelled_write_costs_its_stream_only(here):
    """A write given up while the peer takes nothing does not harm a sibling stream of the same connection."""
    async with served_by_ours() as (process, there):
        sibling = await here.open(there, "receipts")
        await ask_on(sibling)
        big = await here.open(there, "rollouts")
        process.send_signal(signal.SIGSTOP)
        with trio.move_on_after(0.3) as given_up:
            await pour_into(big)
        assert given_up.cancelled_caught
        process.send_signal(signal.SIGCONT)
        await big.reset()
        await ask_on(sibling)


@pytest.mark.slow
async def test_fault_6_stalled_reader_gets_everything_at_last(here):
    """A reader that does nothing for seconds delays the writer; neither fails."""
    async with served_by_ours() as (_, there):
        stream = await here.open(there, "rollouts")
        await stream.send_all(bytes([7]) + bytes(4 * MIB))
        await stream.close_write()
        assert await stream.receive_some(64) == str(4 * MIB).encode()


@pytest.mark.slow
async def test_fault_4_bulk_both_ways_and_new_streams_never_stop(here):
    """For 20 s, with 8 streams pouring each way and new ones opening, bytes and requests get through every 2 s."""
    moved = requests = 0

    async def bulk(there):
        nonlocal moved
        stream = await here.open(there, "chunks")
        async with trio.open_nursery() as both:
            both.start_soon(pour_into, stream)
            while True:
                data = await stream.receive_some(MIB)  # awaited first: `moved += await` would lose others' counts
                moved += len(data)

    async def ask_on_and_on(there):
        nonlocal requests
        while True:
            await ask(here, there)
            requests += 1

    async with served_by_ours() as (_, there), trio.open_nursery() as nursery:
        for _ in range(8):
            nursery.start_soon(bulk, there)
            nursery.start_soon(ask_on_and_on, there)
        for _ in range(10):
            before = moved, requests
            await trio.sleep(2)
            assert moved > before[0]
            assert requests > before[1]
        nursery.cancel_scope.cancel()


async def push(hostile):
    """64 MiB on its stream 1, whatever the window says."""
    for _ in range(64 * 16):
        await hostile.send(HEADER.pack(0, 0, 0, 1, 65_536) + bytes(65_536))


async def test_fault_8_peer_that_ignores_the_window_is_cut_off(here):
    """64 MiB pushed at a reader that reads nothing cost that peer its connection, not the process its memory."""
    async with served_by_ours() as (process, there):
        await ask(here, there)
        before = resident_bytes(process)
        async with client("yamux", port_of(there), there.peer, HOSTILE) as hostile:
            opening = HELLO_LINES["hold"]
            await hostile.send(HEADER.pack(0, 1, SYN, 1, 0) + HEADER.pack(0, 0, 0, 1, len(opening)) + opening)
            assert await line_of(process) == "held 1"
            with pytest.raises((trio.BrokenResourceError, trio.ClosedResourceError)):
                await push(hostile)
        await ask(here, there)
        assert resident_bytes(process) - before < 16 * MIB


async def test_fault_10_streams_of_one_peer_are_capped(here):
    """Of 600 streams one peer opens, no more are served than one may have; another peer is served beside it."""
    async with served_by_ours() as (process, there), client("yamux", port_of(there), there.peer, HOSTILE) as hostile:
        opening = HELLO_LINES["hold"]
        for n in range(600):
            number = 2 * n + 1
            head = HEADER.pack(0, 1, SYN, number, 0) + HEADER.pack(0, 0, 0, number, len(opening))
            await hostile.send(head + opening)
        await hostile.send(HEADER.pack(0, 2, SYN, 0, 0xBEEF))
        heard = b""
        while HEADER.pack(0, 2, 2, 0, 0xBEEF) not in heard:
            heard += await hostile.hear()
        await ask(here, there)
        with trio.move_on_after(1.0):
            while await line_of(process) != f"held {libp2p_yamux.STREAMS_MAX + 1}":
                pass
            pytest.fail("more streams are served than one peer may have")


async def test_fault_14_nobody_is_dialled_unasked(here):
    """A known peer whose connection ended is not dialled until something is wanted of it."""
    async with served_by_ours() as (_, there):
        await ask(here, there)
        await here.disconnect(there.peer)
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert not here._connections
        await ask(here, there)


@pytest.mark.slow
async def test_fault_15_request_is_not_held_up_behind_bulk(here):
    """On a line of 2 Mbit/s that bulk fills, a request is answered before the line has carried 64 KiB more of bulk."""
    moved = 0

    async def bulk(there):
        nonlocal moved
        stream = await here.open(there, "chunks")
        while True:
            data = await stream.receive_some(MIB)
            moved += len(data)

    async with served_by_ours() as (_, there), other(LINE, str(port_of(there)), "250000") as line_process:
        slow = PeerAddress(peer=there.peer, addresses=(f"/ip4/127.0.0.1/tcp/{await line_of(line_process)}",))
        await ask(here, slow)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bulk, slow)
            while moved < MIB:  # noqa: ASYNC110 - the other side has no event to wait on
                await trio.sleep(0.1)
            for _ in range(5):
                before = moved
                await ask(here, slow)
                assert moved - before < 64 * 1024
            nursery.cancel_scope.cancel()
