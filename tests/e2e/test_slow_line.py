"""Control beside bulk on a line of 2 Mbit/s, and rate caps as the wire sees them: real sockets, real time.

The line is a proxy in this process (always), and a TUN device between two network namespaces with a router's queue of
one second and a congestion control that fills it (Linux, root). Run as a script, this file is one of the processes.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import select
import struct
import subprocess
import sys
import time
from contextlib import asynccontextmanager, contextmanager

import pytest
import trio

from echo2.p2p.errors import Unreachable
from echo2.p2p.guards import TransportLimits
from echo2.p2p.identity import Identity
from echo2.p2p.libp2p_tcp import parse_address
from echo2.p2p.libp2p_transport import open_libp2p_transport
from echo2.p2p.messages import PeerAddress

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LINE_BITS_PER_SECOND = 2_000_000
CONTROL_SECONDS_MAX = 0.3
BOUND_SECONDS = 60.0
QUEUE_SECONDS = 1.0
WAY_SECONDS = 0.01
HERE, THERE = Identity(b"\x01" * 32), Identity(b"\x02" * 32)
FREE_PORT = 47_113
"""Inside a namespace of its own every port is free."""


# Both ends.


async def echo(stream):
    while data := await stream.receive_some(4096):
        await stream.send_all(data)
    await stream.close_write()


async def sink(stream):
    while await stream.receive_some(1 << 20):
        pass


@asynccontextmanager
async def serving(address, **options):
    async with open_libp2p_transport(THERE, [address], **options) as transport:
        transport.set_handler("hello", echo)
        transport.set_handler("chunks", sink)
        yield transport


async def bulk(transport, there):
    stream = await transport.open(there, "chunks")
    try:
        while True:
            await stream.send_all(bytes(64 * 1024))
    except Unreachable:
        return


async def round_trips(transport, there, count):
    """Seconds of `count` small questions and answers on one stream, in order of length."""
    seconds = []
    stream = await transport.open(there, "hello")
    for _ in range(count):
        start = trio.current_time()
        await stream.send_all(b"x" * 200)
        got = 0
        while got < 200:
            got += len(await stream.receive_some(4096))
        seconds.append(trio.current_time() - start)
        await trio.sleep(0.1)
    return sorted(seconds)


async def beside_bulk(transport, there, *, settle_seconds, count):
    """The round trips while three streams send all they can; and the bits a second that left meanwhile."""
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(bulk, transport, there)
        await trio.sleep(settle_seconds)
        before, start = transport.view().sent_bytes, trio.current_time()
        seconds = await round_trips(transport, there, count)
        rate = (transport.view().sent_bytes - before) * 8 / (trio.current_time() - start)
        nursery.cancel_scope.cancel()
    return seconds, rate


# A line in this process.


class Proxy:
    """Carries connections; what goes up shares one line and a short queue. `passed` holds (time, bytes) of it."""

    def __init__(self, target, bits_per_second):
        self.target = target
        self.bytes_per_second = bits_per_second / 8
        self.passed = []
        self._put, self._get = trio.open_memory_channel(4)

    async def line(self):
        async for stream, data in self._get:
            await trio.sleep(len(data) / self.bytes_per_second)
            self.passed.append((trio.current_time(), len(data)))
            try:
                await stream.send_all(data)
            except trio.BrokenResourceError:
                continue

    async def carry(self, near):
        try:
            async with near, await trio.open_tcp_stream(*self.target) as far, trio.open_nursery() as nursery:

                async def down():
                    async for data in far:
                        await near.send_all(data)
                    nursery.cancel_scope.cancel()

                nursery.start_soon(down)
                while data := await near.receive_some(2048):
                    await self._put.send((far, data))
                nursery.cancel_scope.cancel()
        except* trio.BrokenResourceError:
            pass


@asynccontextmanager
async def through_proxy(bits_per_second, *, here=None, there=None):
    with trio.fail_after(BOUND_SECONDS):
        async with (
            trio.open_nursery() as nursery,
            serving("/ip4/127.0.0.1/tcp/0", limits=there) as far,
            open_libp2p_transport(HERE, [], limits=here) as near,
        ):
            proxy = Proxy(parse_address(far.addresses[0]), bits_per_second)
            nursery.start_soon(proxy.line)
            (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
            nursery.start_soon(trio.serve_listeners, proxy.carry, [listener])
            port = listener.socket.getsockname()[1]
            yield near, PeerAddress(peer=THERE.peer_id, addresses=(f"/ip4/127.0.0.1/tcp/{port}",)), proxy
            nursery.cancel_scope.cancel()


async def test_control_beside_bulk_through_a_proxy():
    """While bulk fills 2 Mbit/s, a small question is answered within 300 ms."""
    async with through_proxy(LINE_BITS_PER_SECOND) as (near, there, proxy):
        seconds, _ = await beside_bulk(near, there, settle_seconds=3, count=40)
        assert seconds[-2] < CONTROL_SECONDS_MAX
        assert sum(count for _, count in proxy.passed) * 8 > LINE_BITS_PER_SECOND * 4


@pytest.mark.parametrize("side", ["here", "there"])
async def test_caps_as_the_wire_sees_them(side):
    """A cap on what is sent, or at the other end on what is received, is met within 5 % over ten seconds."""
    name = "upload_bits_per_second" if side == "here" else "download_bits_per_second"
    limits = TransportLimits(**{name: float(LINE_BITS_PER_SECOND)})
    async with through_proxy(1_000_000_000, **{side: limits}) as (near, there, proxy):
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(bulk, near, there)
            await trio.sleep(4)  # what the kernel takes in ahead of a capped reader comes at the line's rate
            start = trio.current_time()
            await trio.sleep(10)
            nursery.cancel_scope.cancel()
        bits = 8 * sum(count for at, count in proxy.passed if start <= at < start + 10)
        assert bits == pytest.approx(LINE_BITS_PER_SECOND * 10, rel=0.05)


# A line between namespaces.


def open_tun(name):
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, 0x400454CA, struct.pack("16sH", name.encode(), 0x0001 | 0x1000))  # TUNSETIFF, TUN, NO_PI
    return descriptor


def run_line(names, devices):
    """Move packets between two TUN devices, slowly one way, in order, with a queue like a home router's."""
    ends = [open_tun(device) for device in devices]
    for n, (name, device) in enumerate(zip(names, devices, strict=True)):
        for command in (
            f"ip link set {device} netns {name}",
            f"ip -n {name} addr add 10.79.0.{n + 1} peer 10.79.0.{2 - n} dev {device}",
            f"ip -n {name} link set {device} up",
        ):
            subprocess.run(command.split(), check=True)
    print("up", flush=True)
    due, free_at, number = [], 0.0, 0
    while True:
        now = time.monotonic()
        while due and due[0][0] <= now:
            _, _, end, packet = heapq.heappop(due)
            os.write(end, packet)
        readable, _, _ = select.select(ends, [], [], max(0.0, due[0][0] - now) if due else 1.0)
        now = time.monotonic()
        for end in readable:
            packet, number = os.read(end, 65536), number + 1
            at, other = now, ends[0]
            if end == ends[0]:
                if free_at - now > QUEUE_SECONDS:
                    continue
                at = free_at = max(now, free_at) + len(packet) * 8 / LINE_BITS_PER_SECOND
                other = ends[1]
            heapq.heappush(due, (at + WAY_SECONDS, number, other, packet))


async def serve_far():
    async with serving(f"/ip4/10.79.0.2/tcp/{FREE_PORT}"):
        print("up", flush=True)
        await trio.sleep_forever()


async def measure_near():
    there = PeerAddress(peer=THERE.peer_id, addresses=(f"/ip4/10.79.0.2/tcp/{FREE_PORT}",))
    async with open_libp2p_transport(HERE, []) as transport:
        seconds, rate = await beside_bulk(transport, there, settle_seconds=8, count=60)
    print(seconds[len(seconds) * 95 // 100], rate, flush=True)


@contextmanager
def process(*arguments):
    with subprocess.Popen([*arguments], stdout=subprocess.PIPE, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


@pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or not os.path.exists("/dev/net/tun"),  # noqa: PTH110 - one condition
    reason="needs Linux, root and /dev/net/tun",
)
def test_control_beside_bulk_on_a_line_with_a_deep_queue():
    """With a queue of a second in the way and a sender that would fill it, 95 of 100 questions take under 300 ms."""
    names, devices = [f"e2{os.getpid()}{end}" for end in "ab"], [f"e2t{os.getpid() % 100_000}{end}" for end in "ab"]
    script = [sys.executable, __file__]
    try:
        for name in names:
            subprocess.run(["ip", "netns", "add", name], check=True)
        near, far = (["ip", "netns", "exec", name] for name in names)
        subprocess.run([*near, "sysctl", "-qw", "net.ipv4.tcp_congestion_control=reno"], check=True)
        with process(*script, "line", *names, *devices) as line:
            assert line.stdout.readline() == "up\n"
            with process(*far, *script, "far") as there:
                assert there.stdout.readline() == "up\n"
                with process(*near, *script, "near") as here:
                    seconds, rate = map(float, here.stdout.readline().split())
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)
    assert seconds < CONTROL_SECONDS_MAX
    assert rate > LINE_BITS_PER_SECOND / 2


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["line", *rest]:
            run_line(rest[:2], rest[2:])
        case ["far"]:
            trio.run(serve_far)
        case ["near"]:
            trio.run(measure_near)
