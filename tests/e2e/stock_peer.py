"""An unmended py-libp2p 0.8.1 host as the other process of a test: `python stock_peer.py ROLE ARGUMENTS`.

What it has to say goes to standard output, a line at a time.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

import trio
from libp2p import new_host
from libp2p.crypto import rsa
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from libp2p.security.insecure.transport import PLAINTEXT_PROTOCOL_ID, InsecureTransport
from libp2p.security.noise.transport import PROTOCOL_ID, Transport
from multiaddr import Multiaddr

SEED = b"\x02" * 32
"""The key of the tests' other process when it serves, so that a stock one and one of ours are interchangeable."""

DIALLER_SEED = b"\x03" * 32
"""Its key when it dials."""

ANY_PORT = "/ip4/127.0.0.1/tcp/0"
MIB = 1 << 20

BULK_STREAMS = 8
"""With fewer, the deadlock of fault 4 takes longer to come."""


def say(*words: object) -> None:
    print(*words, flush=True)


def stock_host(security: str = "noise", seed: bytes = DIALLER_SEED):
    """As the library makes it; `default`: with the security it comes with."""
    keys = create_new_key_pair(seed)
    options = {
        "noise": {PROTOCOL_ID: Transport(keys, noise_privkey=create_noise_key_pair().private_key)},
        "plaintext": {PLAINTEXT_PROTOCOL_ID: InsecureTransport(keys)},
        "default": None,
    }
    return new_host(key_pair=keys, sec_opt=options[security])


def address_of(host) -> str:
    return str(host.get_addrs()[0]).split("/p2p/")[0]


async def raises(_stream):
    raise ZeroDivisionError("a mistake in a handler")


async def pour_into(stream):
    while True:
        await stream.write(bytes(MIB))


async def serve(security="noise", listen=ANY_PORT):
    """`hello` echoes a byte, `report` raises, `chunks` reads to the end, `leases` holds, `receipts` echoes for ever."""
    held = 0

    async def echo_byte(stream):
        await stream.write(await stream.read(1))
        await stream.close()

    async def read_to_end(stream):
        total = 0
        try:
            while data := await stream.read(MIB):
                total += len(data)
            say("end", total)
        except Exception as error:  # noqa: BLE001 - which one is libp2p's affair
            say("error", type(error).__name__, total)

    async def hold(_stream):
        nonlocal held
        held += 1
        say("held", held)
        await trio.sleep_forever()

    async def echo_all(stream):
        with suppress(Exception):
            while data := await stream.read(MIB):
                await stream.write(data)

    async def pour(stream):
        with suppress(Exception):
            async with trio.open_nursery() as both:
                both.start_soon(pour_into, stream)
                while await stream.read(MIB):
                    pass

    host = stock_host(security, SEED)
    async with host.run([Multiaddr(listen)]):
        host.set_stream_handler("/echo2/hello/1", echo_byte)
        host.set_stream_handler("/echo2/report/1", raises)
        host.set_stream_handler("/echo2/chunks/1", read_to_end)
        host.set_stream_handler("/echo2/leases/1", hold)
        host.set_stream_handler("/echo2/receipts/1", echo_all)
        host.set_stream_handler("/echo2/admitted/1", pour)
        say(address_of(host))
        await trio.sleep_forever()


async def serve_and_tell_of_keys():
    """`serve`, and say `parsed` for each key that is handed to the parser of RSA keys, private ones included."""
    parse = rsa.RSA.import_key

    def told(data, *further):
        say("parsed", len(data))
        return parse(data, *further)

    rsa.RSA.import_key = told
    await serve()


async def dial(security, address, peer):
    """Dial; say whether a stream could be opened."""
    host = stock_host(security)
    async with host.run([]):
        try:
            with trio.fail_after(5):
                await host.get_network().dial_addr(Multiaddr(address), ID.from_base58(peer))
                stream = await host.new_stream(ID.from_base58(peer), ["/echo2/hello/1"])
                await stream.write(b"\0\0\0\0")
            say("connected")
        except Exception as error:  # noqa: BLE001
            say("refused", type(error).__name__)
        await host.close()


async def with_host(action, *, listen=()):
    host = stock_host()
    async with host.run([Multiaddr(one) for one in listen]):
        await action(host)
        await host.close()


async def blocked_write(address, peer):
    """Fault 5: fill the connection, give the write up, go on with a sibling stream when told to."""

    async def action(host):
        them = ID.from_base58(peer)
        await host.get_network().dial_addr(Multiaddr(address), them)
        sibling = await host.new_stream(them, ["/echo2/receipts/1"])
        await sibling.write(b"a")
        await sibling.read(1)
        big = await host.new_stream(them, ["/echo2/chunks/1"])
        say("ready")
        await trio.to_thread.run_sync(sys.stdin.readline)
        with trio.move_on_after(1.0):
            while True:
                await big.write(bytes(MIB))
        say("gave up")
        await trio.to_thread.run_sync(sys.stdin.readline)
        try:
            with trio.fail_after(10):
                await sibling.write(b"b")
                answer = await sibling.read(1)
            say("sibling", answer)
        except Exception as error:  # noqa: BLE001
            say("sibling failed", type(error).__name__)

    await with_host(action)


async def patient_write(address, peer):
    """Fault 6: write 64 MiB to a reader that stalls."""

    async def action(host):
        them = ID.from_base58(peer)
        await host.get_network().dial_addr(Multiaddr(address), them)
        stream = await host.new_stream(them, ["/echo2/leases/1"])
        say("writing")
        try:
            await stream.write(bytes(64 * MIB))
            say("written")
        except Exception as error:  # noqa: BLE001
            say("failed", type(error).__name__)

    await with_host(action)


async def write_and_wait(address, peer):
    """Fault 7: write 50,000 bytes, to be killed then."""

    async def action(host):
        them = ID.from_base58(peer)
        await host.get_network().dial_addr(Multiaddr(address), them)
        stream = await host.new_stream(them, ["/echo2/chunks/1"])
        await stream.write(bytes(50_000))
        say("half")
        await trio.sleep_forever()

    await with_host(action)


async def write_and_leave(address, peer):
    """Fault 7: write 200,000 bytes, close, leave at once."""

    async def action(host):
        them = ID.from_base58(peer)
        await host.get_network().dial_addr(Multiaddr(address), them)
        stream = await host.new_stream(them, ["/echo2/chunks/1"])
        await stream.write(bytes(200_000))
        await stream.close()

    await with_host(action)
    say("left")


async def watch(address, peer, seconds):
    """Fault 9: connect, then say after a while whether the peer, which is silent by then, counts as connected."""

    async def action(host):
        them = ID.from_base58(peer)
        await host.get_network().dial_addr(Multiaddr(address), them)
        say("ready")
        await trio.to_thread.run_sync(sys.stdin.readline)
        await trio.sleep(float(seconds))
        say("connected" if host.get_network().get_connections(them) else "noticed")

    await with_host(action)


async def connect_to(dead, good, peer):
    """Fault 11: a dead address first; then the good one alone."""

    async def action(host):
        them = ID.from_base58(peer)
        for addresses in ((dead, good), (good,)):
            try:
                with trio.fail_after(10):
                    await host.connect(PeerInfo(them, [Multiaddr(one) for one in addresses]))
                say("connected")
            except Exception as error:  # noqa: BLE001
                say("failed", type(error).__name__)

    await with_host(action)


async def listen_on(address):
    """Fault 12: listen, say where."""

    async def action(host):
        say("listening", *map(str, host.get_addrs()))
        await trio.sleep_forever()

    await with_host(action, listen=(address,))


async def leave_without_close(address, peer):
    """Fault 13: connect, leave `run()`, live on."""
    host = stock_host()
    async with host.run([]):
        await host.get_network().dial_addr(Multiaddr(address), ID.from_base58(peer))
    say("left")
    await trio.sleep_forever()


async def know(address, peer):
    """Fault 14: know an address, do nothing; say whether there is a connection all the same."""

    async def action(host):
        them = ID.from_base58(peer)
        host.get_peerstore().add_addrs(them, [Multiaddr(address)], 3600)
        with trio.move_on_after(15):
            while not host.get_network().get_connections(them):  # noqa: ASYNC110 - the other side has no event to wait on
                await trio.sleep(0.1)
            say("dialled unasked")
            return
        say("left alone")

    await with_host(action)


async def both_ways(address, peer, seconds):
    """Fault 4: bulk both ways on one connection, streams opened beside it; each second, the bytes that came."""

    async def action(host):
        them = ID.from_base58(peer)
        await host.get_network().dial_addr(Multiaddr(address), them)
        moved = [0]

        async def bulk():
            stream = await host.new_stream(them, ["/echo2/admitted/1"])
            async with trio.open_nursery() as both:
                both.start_soon(pour_into, stream)
                while True:
                    data = await stream.read(MIB)  # awaited first, lest counts of other tasks are lost
                    moved[0] += len(data)

        async def open_streams():
            while True:
                stream = await host.new_stream(them, ["/echo2/hello/1"])
                await stream.write(b"x")
                await stream.read(1)
                await stream.close()
                moved[0] += 1

        async with trio.open_nursery() as nursery:
            for _ in range(BULK_STREAMS):
                nursery.start_soon(bulk)
                nursery.start_soon(open_streams)
            before = 0
            for _ in range(int(seconds)):
                await trio.sleep(1)
                say("moved", moved[0] - before)
                before = moved[0]
            say("done")
            os._exit(0)

    await with_host(action)


async def behind_bulk(address, peer):
    """Fault 15: while bulk fills the line, ask for a byte on a new stream; say how much bulk came first."""

    async def action(host):
        them = ID.from_base58(peer)
        await host.get_network().dial_addr(Multiaddr(address), them)
        moved, enough = [0], trio.Event()

        async def bulk():
            stream = await host.new_stream(them, ["/echo2/admitted/1"])
            while True:
                data = await stream.read(MIB)  # awaited first, lest counts of other tasks are lost
                moved[0] += len(data)
                if moved[0] >= MIB:
                    enough.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(bulk)
            await enough.wait()
            before = moved[0]
            stream = await host.new_stream(them, ["/echo2/hello/1"])
            await stream.write(b"x")
            await stream.read(1)
            say("moved", moved[0] - before)
            os._exit(0)

    await with_host(action)


ROLES = {
    f.__name__: f
    for f in (
        serve,
        serve_and_tell_of_keys,
        dial,
        blocked_write,
        patient_write,
        write_and_wait,
        write_and_leave,
        watch,
        connect_to,
        listen_on,
        leave_without_close,
        know,
        both_ways,
        behind_bulk,
    )
}

if __name__ == "__main__":
    trio.run(ROLES[sys.argv[1]], *sys.argv[2:])
