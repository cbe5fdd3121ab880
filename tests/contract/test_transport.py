"""What every Transport does, asked of the one on sockets and of the one in memory."""

from __future__ import annotations

import random
from contextlib import asynccontextmanager, suppress

import pytest
import trio

from echo2.p2p.channel import REQUEST_SECONDS, Channel, answering, request
from echo2.p2p.errors import ConfigurationError, Truncated, Unreachable
from echo2.p2p.identity import Identity
from echo2.p2p.libp2p_transport import open_libp2p_transport
from echo2.p2p.memory import MemoryNetwork
from echo2.p2p.messages import Ack, Chunk, PeerAddress

MIB = 1 << 20
BOUND_SECONDS = 20.0
"""Far above what any step takes; a hang fails by it."""

ALICE, BOB, CAROL = (Identity(bytes([n]) * 32) for n in (1, 2, 3))


class MemoryWorld:
    """Transports on one in-memory network."""

    def __init__(self):
        self.network = MemoryNetwork(random.Random(1))

    def transport(self, identity, *, reachable=True):
        return self.network.transport(identity, reachable=reachable)

    async def kill(self, transport):
        self.network.kill(transport.peer_id)


class SocketWorld:
    """Transports on 127.0.0.1; one that comes back gets its old port."""

    def __init__(self):
        self.listening = {}

    @asynccontextmanager
    async def transport(self, identity, *, reachable=True):
        fresh = ("/ip4/127.0.0.1/tcp/0",) if reachable else ()
        async with open_libp2p_transport(identity, self.listening.get(identity.peer_id, fresh)) as transport:
            self.listening[identity.peer_id] = transport.addresses
            yield transport

    async def kill(self, transport):
        """What the kernel does to a killed process: every socket closes and nothing is said."""
        transport._accepting.cancel()
        for connection in [one for known in transport._connections.values() for one in known]:
            await connection._socket.abort()


@pytest.fixture(params=[MemoryWorld, SocketWorld], ids=["memory", "sockets"])
def world(request):
    return request.param()


def address_of(transport):
    return PeerAddress(peer=transport.peer_id, addresses=transport.addresses)


async def echo(stream):
    while data := await stream.receive_some(MIB):
        await stream.send_all(data)
    await stream.close_write()


async def read_all(stream):
    parts = []
    while part := await stream.receive_some(MIB):
        parts.append(part)
    return b"".join(parts)


async def send_forever(channel):
    while True:
        await channel.send(Chunk(index=0, data=bytes(MIB)))


async def hold(stream):
    """Read nothing, say nothing."""
    await trio.sleep_forever()


@pytest.fixture
async def pair(world):
    """Alice and Bob; Bob serves `hello` as an echo and `leases` by holding the stream."""
    async with world.transport(ALICE) as alice, world.transport(BOB) as bob:
        bob.set_handler("hello", echo)
        bob.set_handler("leases", hold)
        with trio.fail_after(BOUND_SECONDS):
            yield alice, bob


async def test_several_buffers_arrive_as_one(pair):
    """What is sent in several buffers comes in order and without a seam, and in parts as well as in one."""
    alice, bob = pair
    stream = await alice.open(address_of(bob), "hello")
    sent = [b"head", b"", bytes(range(256)) * 1000, b"tail"]
    await stream.send_all(*sent)
    await stream.close_write()
    got = []
    while parts := await stream.receive_parts(100_000):
        assert 0 < sum(map(len, parts)) <= 100_000
        got += parts
    assert b"".join(got) == b"".join(sent)


async def test_each_end_knows_the_other_by_its_key(pair):
    """The peer of a stream is the peer id that the other transport announces."""
    alice, bob = pair
    seen = []

    async def note(stream):
        seen.append(stream.peer)
        await stream.close_write()

    bob.set_handler("report", note)
    stream = await alice.open(address_of(bob), "report")
    assert await stream.receive_some(1) == b""
    assert stream.peer == bob.peer_id == BOB.peer_id
    assert seen == [ALICE.peer_id]


async def test_megabytes_come_back_whole(pair):
    """What is sent while it is being read back arrives once, in order."""
    alice, bob = pair
    data = random.Random(2).randbytes(5 * MIB + 3)
    stream = await alice.open(address_of(bob), "hello")

    async def send():
        await stream.send_all(data)
        await stream.close_write()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        assert await read_all(stream) == data


async def test_bulk_both_ways_and_new_streams_do_not_block_each_other(pair):
    """With both peers sending on several streams, a new stream still opens and answers."""
    alice, bob = pair
    alice.set_handler("hello", echo)
    data = random.Random(3).randbytes(4 * MIB)
    done = []

    async def bulk(here, there):
        stream = await here.open(address_of(there), "hello")

        async def send():
            await stream.send_all(data)
            await stream.close_write()

        async with trio.open_nursery() as inner:
            inner.start_soon(send)
            assert await read_all(stream) == data
        done.append(1)

    async with trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(bulk, alice, bob)
            nursery.start_soon(bulk, bob, alice)
        while len(done) < 4:
            stream = await alice.open(address_of(bob), "hello")
            await stream.send_all(b"ping")
            assert await stream.receive_some(4) == b"ping"
            await stream.close_write()
            assert await stream.receive_some(1) == b""


async def test_half_closed_stream_still_carries_the_answer(pair):
    """After close_write the other direction works, and the peer has seen the end."""
    alice, bob = pair

    async def count(stream):
        await stream.send_all(str(len(await read_all(stream))).encode())
        await stream.close_write()

    bob.set_handler("report", count)
    stream = await alice.open(address_of(bob), "report")
    await stream.send_all(b"x" * 100_000)
    await stream.close_write()
    assert await read_all(stream) == b"100000"
    assert await stream.receive_some(1) == b""


async def test_reset_is_seen_by_the_peer_and_costs_only_the_stream(pair):
    """A reset stream is Unreachable at both ends; a sibling lives on; a second reset does nothing."""
    alice, bob = pair
    failed = trio.Event()

    async def reads(stream):
        try:
            await stream.receive_some(1)
        except Unreachable:
            failed.set()
            raise

    bob.set_handler("report", reads)
    sibling = await alice.open(address_of(bob), "hello")
    stream = await alice.open(address_of(bob), "report")
    await stream.reset()
    await stream.reset()
    await failed.wait()
    with pytest.raises(Unreachable):
        await stream.send_all(b"x")
    with pytest.raises(Unreachable):
        await stream.receive_some(1)
    await sibling.send_all(b"still here")
    assert await sibling.receive_some(64) == b"still here"


async def test_handler_exception_costs_its_stream_only(pair):
    """After a handler raises, its stream is dead, and siblings and new streams work."""
    alice, bob = pair

    async def raises(stream):
        raise ZeroDivisionError("a mistake of ours")

    bob.set_handler("report", raises)
    sibling = await alice.open(address_of(bob), "hello")
    stream = await alice.open(address_of(bob), "report")
    with pytest.raises(Unreachable):
        await stream.receive_some(1)
    await sibling.send_all(b"a")
    assert await sibling.receive_some(1) == b"a"
    again = await alice.open(address_of(bob), "hello")
    await again.send_all(b"b")
    assert await again.receive_some(1) == b"b"


async def test_stream_its_handler_left_open_is_ended(pair):
    """A handler that returns without closing leaves the peer with an error, not with a wait."""
    alice, bob = pair

    async def leaves(stream):
        await stream.receive_some(1)

    bob.set_handler("report", leaves)
    stream = await alice.open(address_of(bob), "report")
    await stream.send_all(b"x")
    with pytest.raises(Unreachable):
        await stream.receive_some(1)


async def test_unserved_protocol_is_unreachable_at_once(pair):
    """Opening what the peer does not serve raises Unreachable, and the connection stays good."""
    alice, bob = pair
    with trio.fail_after(2), pytest.raises(Unreachable, match=r"does not serve .*; it may still be starting, or"):
        await alice.open(address_of(bob), "publish")
    await (await alice.open(address_of(bob), "hello")).reset()


async def test_absent_peer_is_unreachable(world):
    """Nobody listening, or nowhere to dial: Unreachable within a bound."""
    async with world.transport(ALICE) as alice:
        async with world.transport(BOB) as bob:
            gone = address_of(bob)
        with trio.fail_after(BOUND_SECONDS):
            for address in (gone, PeerAddress(peer=CAROL.peer_id), address_of(alice)):
                with pytest.raises(Unreachable):
                    await alice.open(address, "hello")


async def test_peer_without_addresses_is_reached_over_its_own_connection(world):
    """A leaf cannot be dialled, yet whoever it is connected to can open streams to it."""
    async with world.transport(ALICE, reachable=False) as leaf, world.transport(BOB) as bob:
        assert leaf.addresses == ()
        leaf.set_handler("hello", echo)
        bob.set_handler("hello", echo)
        with trio.fail_after(BOUND_SECONDS):
            with pytest.raises(Unreachable):
                await bob.open(address_of(leaf), "hello")
            await leaf.open(address_of(bob), "hello")
            stream = await bob.open(address_of(leaf), "hello")
            await stream.send_all(b"x")
            assert await stream.receive_some(1) == b"x"


async def test_cancelled_send_and_receive_leave_siblings_working(pair):
    """Cancelling a send that waits for room, or a receive that waits for bytes, costs at most that stream."""
    alice, bob = pair
    stuck = await alice.open(address_of(bob), "leases")
    quiet = await alice.open(address_of(bob), "leases")
    sibling = await alice.open(address_of(bob), "hello")
    with trio.move_on_after(0.1) as sending:
        await stuck.send_all(bytes(8 * MIB))
    with trio.move_on_after(0.1) as receiving:
        await quiet.receive_some(1)
    with trio.move_on_after(0.1) as opening:
        opening.cancel()
        await alice.open(address_of(bob), "hello")
    assert sending.cancelled_caught
    assert receiving.cancelled_caught
    assert opening.cancelled_caught
    data = random.Random(4).randbytes(MIB)

    async def send():
        await sibling.send_all(data)
        await sibling.close_write()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        assert await read_all(sibling) == data
    await stuck.reset()


async def test_sender_waits_for_a_slow_reader_and_then_goes_on(pair):
    """A reader that pauses makes the sender wait; nothing is lost and nothing fails."""
    alice, bob = pair
    go, total = trio.Event(), 3 * MIB
    received = []

    async def slow(stream):
        await go.wait()
        received.append(len(await read_all(stream)))
        await stream.close_write()

    bob.set_handler("report", slow)
    stream = await alice.open(address_of(bob), "report")
    sent = trio.Event()

    async def send():
        await stream.send_all(bytes(total))
        await stream.close_write()
        sent.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        with trio.move_on_after(0.2):
            await sent.wait()
        assert not sent.is_set()
        go.set()
        assert await stream.receive_some(1) == b""
    assert received == [total]


async def test_peer_killed_midway_is_never_a_whole_frame(world):
    """When the peer dies in the middle of a frame, a channel says Truncated or Unreachable."""
    async with world.transport(ALICE) as alice, world.transport(BOB) as bob:
        started = trio.Event()

        async def half(stream):
            await stream.send_all((100_000).to_bytes(4, "big") + bytes(50_000))
            started.set()
            await trio.sleep_forever()

        bob.set_handler("chunks", half)
        with trio.fail_after(BOUND_SECONDS):
            channel = Channel(await alice.open(address_of(bob), "chunks"))
            await started.wait()
            await world.kill(bob)
            with pytest.raises((Truncated, Unreachable)):
                await channel.receive(Chunk)
            with pytest.raises(Unreachable):
                await send_forever(channel)


async def test_request_whose_peer_dies_is_unreachable(world):
    """A request in flight when its peer dies raises Unreachable long before its own time-out."""
    async with world.transport(ALICE) as alice, world.transport(BOB) as bob:
        asked = trio.Event()

        async def never(peer, message):
            asked.set()
            await trio.sleep_forever()

        bob.set_handler("report", answering(Ack, never, lambda peer, error: None))
        with trio.fail_after(REQUEST_SECONDS / 3):
            async with trio.open_nursery() as nursery:

                async def ask():
                    with pytest.raises(Unreachable):
                        await request(alice, address_of(bob), "report", Ack(), Ack)

                nursery.start_soon(ask)
                await asked.wait()
                await world.kill(bob)


async def test_reopening_after_the_other_side_came_back(world):
    """A peer that was killed and started again under its key and address is reached by the next open."""
    async with world.transport(ALICE) as alice:
        with trio.fail_after(BOUND_SECONDS):
            for n in range(3):
                async with world.transport(BOB) as bob:
                    bob.set_handler("hello", echo)
                    stream = await alice.open(address_of(bob), "hello")
                    await stream.send_all(bytes([n]))
                    assert await stream.receive_some(1) == bytes([n])
                    await world.kill(bob)
                with pytest.raises(Unreachable):
                    await stream.receive_some(1)


async def test_disconnect_breaks_the_streams_and_not_the_peer(pair):
    """After disconnect the old streams are Unreachable at both ends, and a new one can be opened."""
    alice, bob = pair
    stream = await alice.open(address_of(bob), "hello")
    await alice.disconnect(bob.peer_id)
    await alice.disconnect(CAROL.peer_id)
    with pytest.raises(Unreachable):
        await stream.receive_some(1)
    again = await alice.open(address_of(bob), "hello")
    await again.send_all(b"x")
    assert await again.receive_some(1) == b"x"


async def test_what_was_sent_before_leaving_arrives(world):
    """Leaving the network right after sending and closing delivers every byte."""
    async with world.transport(BOB) as bob:
        got = []
        done = trio.Event()

        async def count(stream):
            got.append(len(await read_all(stream)))
            done.set()

        bob.set_handler("report", count)
        with trio.fail_after(BOUND_SECONDS):
            async with world.transport(ALICE) as alice:
                stream = await alice.open(address_of(bob), "report")
                await stream.send_all(bytes(200_000))
                await stream.close_write()
            await done.wait()
        assert got == [200_000]


async def test_error_in_the_body_comes_out_as_it_is(world):
    """An exception raised while holding a transport is not wrapped in a group."""
    with pytest.raises(ConfigurationError, match="as it is"):
        async with world.transport(ALICE):
            raise ConfigurationError("as it is")


async def test_an_offence_costs_no_stream(pair):
    """One breach held against a peer, known or not, raises nothing and leaves its streams as they are."""
    alice, bob = pair
    stream = await alice.open(address_of(bob), "hello")
    alice.offence(bob.peer_id, "said something odd")
    alice.offence(CAROL.peer_id, "was never here")
    await stream.send_all(b"a")
    assert await stream.receive_some(1) == b"a"
    again = await alice.open(address_of(bob), "hello")
    await again.reset()


async def served(alice, bob):
    """Whether bob echoes a byte of alice's."""
    try:
        stream = await alice.open(address_of(bob), "hello")
        await stream.send_all(b"x")
        return await stream.receive_some(1) == b"x"
    except Unreachable:
        return False


async def test_the_address_of_a_connected_peer_is_known(pair):
    """As an IP address, at both ends, while the two are connected; of a stranger nothing is."""
    alice, bob = pair
    assert bob.remote(alice.peer_id) is None
    assert await served(alice, bob)
    assert bob.remote(alice.peer_id) == "127.0.0.1"
    assert alice.remote(bob.peer_id) == "127.0.0.1"
    assert bob.remote(CAROL.peer_id) is None
    await alice.disconnect(bob.peer_id)
    with trio.fail_after(BOUND_SECONDS):
        while bob.remote(alice.peer_id) is not None:  # noqa: ASYNC110 - a connection's end rings no bell
            await trio.sleep(0.01)


async def test_a_banned_peer_is_refused_until_it_is_forgiven(pair):
    """Its streams end, and it opens no other; forgiven, it is served as before."""
    alice, bob = pair
    held = await alice.open(address_of(bob), "leases")
    await held.send_all(b"x")
    bob.ban(alice.peer_id, "odd", 600.0)
    with trio.fail_after(BOUND_SECONDS):
        with suppress(Unreachable):
            assert await held.receive_some(1) == b""
        assert not await served(alice, bob)
        bob.lift_ban(alice.peer_id)
        while not await served(alice, bob):  # noqa: ASYNC110 - it may wait before its next dial
            await trio.sleep(0.05)
