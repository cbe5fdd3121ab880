"""The faults found in py-libp2p 0.8.1, between real processes: ours is free of them; canaries show they still exist.

A canary that fails after an upgrade of libp2p says that the wrapper it names may go. Run as a script, this file is the
other process: `python test_libp2p_faults.py ROLE ARGUMENTS`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager, suppress

import pytest
import trio

from echo2.p2p import libp2p_transport, libp2p_yamux
from echo2.p2p.channel import Channel, answering, request
from echo2.p2p.errors import ConfigurationError, Truncated, Unreachable
from echo2.p2p.identity import Identity
from echo2.p2p.libp2p_transport import open_libp2p_transport
from echo2.p2p.messages import Ack, Chunk, PeerAddress

pytestmark = pytest.mark.e2e

ANY_PORT = "/ip4/127.0.0.1/tcp/0"
BOUND_SECONDS = 30.0
HERE, THERE = Identity(b"\x01" * 32), Identity(b"\x02" * 32)


# The other process.


async def count_back(_peer, message):
    return Ack(count=message.count + 1)


async def raises(_stream):
    raise ZeroDivisionError("a mistake in a handler")


async def serve_ours(address):
    """Serve `hello` (an Ack plus one), `report` (raises) and `chunks` (half a frame, then nothing)."""

    async def half(stream):
        await stream.send_all((100_000).to_bytes(4, "big") + bytes(50_000))
        print("half", flush=True)
        await trio.sleep_forever()

    async with open_libp2p_transport(THERE, [address]) as transport:
        transport.set_handler("hello", answering(Ack, count_back, lambda peer, error: None))
        transport.set_handler("report", raises)
        transport.set_handler("chunks", half)
        print(*transport.addresses, flush=True)
        await trio.sleep_forever()


def stock_host(security):
    from libp2p import new_host
    from libp2p.crypto.ed25519 import create_new_key_pair
    from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
    from libp2p.security.insecure.transport import PLAINTEXT_PROTOCOL_ID, InsecureTransport
    from libp2p.security.noise.transport import PROTOCOL_ID, Transport

    keys = create_new_key_pair(THERE.seed)
    noise = {PROTOCOL_ID: Transport(keys, noise_privkey=create_noise_key_pair().private_key)}
    plain = {PLAINTEXT_PROTOCOL_ID: InsecureTransport(keys)}
    return new_host(key_pair=keys, sec_opt={"noise": noise, "plaintext": plain}[security])


async def serve_stock(security):
    """An unmended host, whose handlers of `hello` echo one byte and of `report` raise."""
    from multiaddr import Multiaddr

    async def echo_byte(stream):
        await stream.write(await stream.read(1))
        await stream.close()

    host = stock_host(security)
    async with host.run([Multiaddr(ANY_PORT)]):
        host.set_stream_handler("/echo2/hello/1", echo_byte)
        host.set_stream_handler("/echo2/report/1", raises)
        print(str(host.get_addrs()[0]).split("/p2p/")[0], flush=True)
        await trio.sleep_forever()


async def dial_stock(security, address, peer):
    """Dial with an unmended host; say whether a stream could be opened."""
    from libp2p.peer.id import ID
    from multiaddr import Multiaddr

    host = stock_host(security)
    async with host.run([]):
        try:
            with trio.fail_after(5):
                await host.get_network().dial_addr(Multiaddr(address), ID.from_base58(peer))
                stream = await host.new_stream(ID.from_base58(peer), ["/echo2/hello/1"])
                await stream.write(b"\0\0\0\0")
            print("connected", flush=True)
        except Exception as error:  # noqa: BLE001 - which one is libp2p's affair
            print("refused", type(error).__name__, flush=True)
        await host.close()


async def cycle_ours(address, peer, times):
    """Come, ask once, leave; again and again."""
    for _ in range(int(times)):
        async with open_libp2p_transport(THERE, []) as transport:
            await request(transport, PeerAddress(peer=peer, addresses=(address,)), "hello", Ack(), Ack)
    print("cycled", flush=True)


async def send_and_leave(address, peer):
    """Send, close and exit at once."""
    async with open_libp2p_transport(THERE, []) as transport:
        stream = await transport.open(PeerAddress(peer=peer, addresses=(address,)), "chunks")
        await stream.send_all(bytes(200_000))
        await stream.close_write()


ROLES = {f.__name__: f for f in (serve_ours, serve_stock, dial_stock, cycle_ours, send_and_leave)}


# The tests.


@asynccontextmanager
async def other(role, *arguments):
    """The other process; killed at the end."""
    process = await trio.lowlevel.open_process(
        [sys.executable, __file__, role, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        with trio.fail_after(BOUND_SECONDS):
            yield process
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()


async def line_of(process):
    text = b""
    while not text.endswith(b"\n"):
        part = await process.stdout.receive_some(1)
        assert part, f"the other process ended with {await process.wait()}"
        text += part
    return text.decode().strip()


@asynccontextmanager
async def served_by(role, *arguments):
    async with other(role, *arguments) as process:
        address = await line_of(process)
        yield process, PeerAddress(peer=THERE.peer_id, addresses=(address,))


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
    async with served_by("serve_ours", ANY_PORT) as (_, there):
        await ask(here, there)
        before = connection_with(here, there)
        stream = await here.open(there, "report")
        with pytest.raises(Unreachable):
            await stream.receive_some(1)
        await send_bad_line(here, there)
        await ask(here, there)
        assert connection_with(here, there) is before


@pytest.mark.parametrize("how", ["handler", "utf8"])
async def test_canary_1_stock_host_dies(here, how):
    """0.8.1 itself: a raising handler, or a bad line, ends the process; `_serve` is still needed."""
    async with served_by("serve_stock", "noise") as (process, there):
        stream = await here.open(there, "hello")
        await stream.send_all(b"x")
        assert await stream.receive_some(1) == b"x"
        if how == "handler":
            with suppress(Unreachable):
                await here.open(there, "report")
        else:
            await send_bad_line(here, there)
        assert await process.wait() != 0


async def test_fault_2_plaintext_peers_are_refused_both_ways(here):
    """Neither do we dial a peer that offers only plaintext, nor does one get in; with Noise it does."""
    here.set_handler("hello", answering(Ack, count_back, lambda peer, error: None))
    async with served_by("serve_stock", "plaintext") as (_, there):
        with pytest.raises(Unreachable):
            await here.open(there, "hello")
    outcomes = {}
    for security in ("plaintext", "noise"):
        async with other("dial_stock", security, here.addresses[0], here.peer_id) as process:
            outcomes[security] = (await line_of(process)).split()[0]
    assert outcomes == {"plaintext": "refused", "noise": "connected"}


async def test_fault_3_three_hundred_visits_leave_nothing_behind(here):
    """After 300 connections came and went, no connection, handler or task of theirs is left, and the next is served."""
    here.set_handler("hello", answering(Ack, count_back, lambda peer, error: None))
    tasks = trio.lowlevel.current_statistics().tasks_living
    async with other("cycle_ours", here.addresses[0], here.peer_id, "301") as process:
        assert await line_of(process) == "cycled"
    with trio.fail_after(5):
        for connection in [one for known in here._connections.values() for one in known]:
            await ended(connection)
        await trio.testing.wait_all_tasks_blocked(0.05)
    assert not here._inbound
    assert not here._connections
    assert trio.lowlevel.current_statistics().tasks_living <= tasks + 1
    assert not here._serving


async def test_canary_3_stock_host_goes_deaf():
    """0.8.1 itself: after 250 connections came and went it accepts no more; owning the accept loop is still needed."""
    async with served_by("serve_stock", "noise") as (_, there):
        visits = 0
        with suppress(Unreachable):
            while visits < 260:
                async with open_libp2p_transport(Identity(visits.to_bytes(32, "big")), []) as visitor:
                    await visitor.open(there, "hello")
                visits += 1
        assert 240 <= visits <= 251


async def test_fault_7_killed_sender_is_not_an_end_of_stream(here):
    """A sender killed by SIGKILL in the middle of a frame is reported, never taken for a complete message."""
    async with served_by("serve_ours", ANY_PORT) as (process, there):
        channel = Channel(await here.open(there, "chunks"))
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
    async with other("send_and_leave", here.addresses[0], here.peer_id) as process:
        await done.wait()
        assert await process.wait() == 0
    assert got == [200_000]


async def test_killed_and_restarted_peer_is_reached_again_at_once(here):
    """A peer killed by SIGKILL and started again on its port under its key answers the first request after it is up."""
    async with served_by("serve_ours", ANY_PORT) as (process, there):
        await ask(here, there)
        process.kill()
        await process.wait()
        with trio.fail_after(5), pytest.raises(Unreachable):
            await ask(here, there)
    async with served_by("serve_ours", there.addresses[0]) as (_, again):
        assert again == there
        with trio.fail_after(5):
            await ask(here, there)


async def test_fault_9_frozen_peer_is_noticed(here, monkeypatch):
    """A peer that no longer answers makes `open` fail in time, and its connection is found dead without being used."""
    monkeypatch.setattr(libp2p_transport, "OPEN_SECONDS", 0.5)
    monkeypatch.setattr(libp2p_transport, "DIAL_SECONDS", 0.5)
    monkeypatch.setattr(libp2p_yamux, "PING_SECONDS", 0.2)
    monkeypatch.setattr(libp2p_yamux, "SILENT_SECONDS_MAX", 0.6)
    async with served_by("serve_ours", ANY_PORT) as (process, there):
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
    async with served_by("serve_ours", ANY_PORT) as (_, there):
        dead = ("/ip4/127.0.0.1/tcp/1", "/ip4/192.0.2.1/tcp/4001", "nonsense")
        with trio.fail_after(5):
            await ask(here, PeerAddress(peer=there.peer, addresses=(*dead, *there.addresses)))


async def test_a_refused_connection_is_said_in_words(here):
    """The cause, and not that there was a group of one cause."""
    nobody = PeerAddress(peer=Identity(b"\x03" * 32).peer_id, addresses=("/ip4/127.0.0.1/tcp/1",))
    with pytest.raises(Unreachable, match=r"/ip4/127.0.0.1/tcp/1: connection refused$"):
        await here.open(nobody, "hello")


async def test_idle_connection_is_closed_and_made_again(here, monkeypatch):
    """A connection without streams goes after a while, at both ends, and the next request makes a new one."""
    async with served_by("serve_ours", ANY_PORT) as (_, there):
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
    async with served_by("serve_ours", ANY_PORT) as (_, there):
        expected = PeerAddress(peer=Identity(b"\x03" * 32).peer_id, addresses=there.addresses)
        with pytest.raises(Unreachable):
            await here.open(expected, "hello")


async def test_fault_12_busy_port_is_an_error_that_names_it(here):
    """A second process on the same port is told which address is taken and what to do, and the first one keeps it."""
    async with served_by("serve_ours", ANY_PORT) as (_, there):
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
    async with served_by("serve_ours", ANY_PORT) as (process, there):
        await ask(here, there)
        connection = connection_with(here, there)
        process.send_signal(signal.SIGINT)
        with trio.fail_after(5):
            await ended(connection)
        assert there.peer not in here._connections or connection not in here._connections[there.peer]


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    trio.run(ROLES[sys.argv[1]], *sys.argv[2:])
