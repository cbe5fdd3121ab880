"""Homes behind NATs, made of network namespaces: who is behind which kind of NAT, and processes that run there.

    home a --- router a ---.                 routers: `masquerade`  keeps port numbers, lets in answers only
                           +--- internet         `full_cone`   keeps them, lets in anyone to the mapped ports
    home b --- router b ---'   with the relay    `symmetric`   another port for each destination, lets in answers only
                                                 `none`        no NAT: the home's host is on the internet

Needs root (or CAP_NET_ADMIN), `ip` and `iptables`; `hindrance` says what is missing. Run as a script, this file is a
process in one of the homes: `python nat_world.py ROLE ARGUMENTS`. Everything is removed on leaving `open_world`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import asynccontextmanager, contextmanager

import trio

from echo2.p2p.errors import Unreachable
from echo2.p2p.hole_punch import TRIES_MAX, HolePuncher, PunchOutcome
from echo2.p2p.identity import Identity
from echo2.p2p.libp2p_transport import open_libp2p_transport
from echo2.p2p.messages import PeerAddress
from echo2.p2p.reachability import DialBack, Reachability
from echo2.p2p.relay import Relay
from echo2.p2p.relay_client import RelayClient, relayed_address
from echo2.p2p.relay_host import Libp2pHost
from echo2.p2p.relay_wire import Reservation

KINDS = ("none", "masquerade", "full_cone", "symmetric")
PORT = 4001
DIALLED_BYTES, ASKED_BYTES = 100_000, 1_000_000
INTERNET_RELAY = "203.0.113.10"
IDENTITIES = {name: Identity(bytes([n]) * 32) for n, name in enumerate(("relay", "a", "b"), 1)}
RELAY = PeerAddress(peer=IDENTITIES["relay"].peer_id, addresses=(f"/ip4/{INTERNET_RELAY}/tcp/{PORT}",))


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def hindrance() -> str:
    """Why namespaces with NAT cannot be made here; "" if they can."""
    for tool in ("ip", "iptables"):
        if shutil.which(tool) is None:
            return f"`{tool}` is not installed (apt-get install iproute2 iptables)"
    name = f"e2probe{os.getpid()}"
    try:
        run("ip", "netns", "add", name)
        try:
            run("ip", "netns", "exec", name, "iptables", "-t", "nat", "-A", "POSTROUTING", "-j", "MASQUERADE")
        finally:
            run("ip", "netns", "del", name)
    except subprocess.CalledProcessError as error:
        return f"network namespaces with NAT are not permitted here: {error.stderr.strip()}"
    return ""


class World:
    """Two homes and a relay; namespaces are named by this process, so that worlds do not meet."""

    def __init__(self, kinds: dict[str, str]) -> None:
        self.kinds = kinds
        self.log: int = subprocess.DEVNULL
        """A file descriptor for what the processes log."""
        self._prefix = f"e2{os.getpid()}"
        self._made: list[str] = []

    def name(self, place: str) -> str:
        return f"{self._prefix}{place}"

    def public(self, home: str) -> str:
        """Address at which the internet sees a home."""
        return {"a": "203.0.113.21", "b": "203.0.113.22"}[home]

    def build(self) -> None:
        self._namespace("net")
        self._in("net", "ip", "link", "add", "wire", "type", "bridge")
        self._in("net", "ip", "link", "set", "wire", "up")
        self._namespace("relay")
        self._on_internet("relay", f"{INTERNET_RELAY}/24")
        for home, kind in self.kinds.items():
            self._namespace(home)
            if kind == "none":
                self._on_internet(home, f"{self.public(home)}/24")
            else:
                self._behind(home, kind)

    def destroy(self) -> None:
        for name in self._made:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def command(self, place: str, *arguments: str) -> list[str]:
        """To start a process of ours in a place."""
        return ["ip", "netns", "exec", self.name(place), sys.executable, __file__, *arguments]

    def _in(self, place: str, *command: str) -> None:
        run("ip", "netns", "exec", self.name(place), *command)

    def _namespace(self, place: str) -> None:
        run("ip", "netns", "add", self.name(place))
        self._made.append(self.name(place))
        self._in(place, "ip", "link", "set", "lo", "up")

    def _wire(self, place: str, device: str, other: str, other_device: str) -> None:
        self._in(place, "ip", "link", "add", device, "type", "veth", "peer", other_device, "netns", self.name(other))
        self._in(place, "ip", "link", "set", device, "up")
        self._in(other, "ip", "link", "set", other_device, "up")

    def _on_internet(self, place: str, address: str) -> None:
        self._wire(place, "wan", "net", f"to_{place}")
        self._in("net", "ip", "link", "set", f"to_{place}", "master", "wire")
        self._in(place, "ip", "address", "add", address, "dev", "wan")

    def _behind(self, home: str, kind: str) -> None:
        router, inside = f"r{home}", {"a": "10.1.0", "b": "10.2.0"}[home]
        self._namespace(router)
        self._on_internet(router, f"{self.public(home)}/24")
        self._wire(home, "lan", router, "lan")
        self._in(home, "ip", "address", "add", f"{inside}.2/24", "dev", "lan")
        self._in(home, "ip", "route", "add", "default", "via", f"{inside}.1")
        self._in(router, "ip", "address", "add", f"{inside}.1/24", "dev", "lan")
        self._in(router, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        nat = ("iptables", "-t", "nat", "-A")
        fully = ("--random-fully",) if kind == "symmetric" else ()
        self._in(router, *nat, "POSTROUTING", "-o", "wan", "-j", "MASQUERADE", *fully)
        if kind == "full_cone":
            self._in(router, *nat, "PREROUTING", "-i", "wan", "-j", "DNAT", "--to-destination", f"{inside}.2")
            return
        # As routers of homes do: what nobody inside asked for is dropped, not answered.
        for chain in ("INPUT", "FORWARD"):
            answers = ("-m", "conntrack", "--ctstate", "ESTABLISHED,RELATED")
            self._in(router, "iptables", "-A", chain, "-i", "wan", *answers, "-j", "ACCEPT")
            self._in(router, "iptables", "-A", chain, "-i", "wan", "-j", "DROP")


@contextmanager
def open_world(a: str, b: str):
    """Home a behind NAT of kind `a`, home b behind one of kind `b`."""
    world = World({"a": a, "b": b})
    try:
        world.build()
        yield world
    finally:
        world.destroy()


class Process:
    """A process in a place; it says what it did as lines of JSON."""

    def __init__(self, process: trio.Process) -> None:
        self._process = process
        self._rest = b""
        self._said: list[dict] = []

    async def tell(self, order: str) -> None:
        await self._process.stdin.send_all(f"{order}\n".encode())

    async def next(self, event: str) -> dict:
        """The next thing it says under this name; what it says under others is kept."""
        while True:
            for said in self._said:
                if said["event"] == event:
                    self._said.remove(said)
                    return said
            part = await self._process.stdout.receive_some(65_536)
            if not part:
                raise AssertionError(f"the process ended ({await self._process.wait()}) before it said {event!r}")
            *lines, self._rest = (self._rest + part).split(b"\n")
            self._said += map(json.loads, lines)

    async def last_punch(self) -> dict:
        """What hole punching came to: the first success, or the failure of the third try."""
        while True:
            outcome = await self.next("punched")
            if outcome["result"] != "failed" or outcome["tries"] == TRIES_MAX:
                return outcome


@asynccontextmanager
async def process(world: World, place: str, *arguments: str):
    """Run a role in a place; killed at the end."""
    started = await trio.lowlevel.open_process(
        world.command(place, *arguments), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=world.log
    )
    try:
        yield Process(started)
    finally:
        started.kill()
        with trio.CancelScope(shield=True):
            await started.wait()


# The processes.


def say(event: str, **values: object) -> None:
    print(json.dumps({"event": event, **values}, default=vars_of), flush=True)


async def echo(stream) -> None:
    while data := await stream.receive_some(65_536):
        await stream.send_all(data)
    await stream.close_write()


async def echoed(transport, peer: PeerAddress, count: int) -> int:
    """Bytes that came back of `count`."""
    stream = await transport.open(peer, "hello")
    back = 0

    async def send() -> None:
        await stream.send_all(bytes(count))
        await stream.close_write()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        while part := await stream.receive_some(65_536):
            back += len(part)
    return back


async def be_relay() -> None:
    """What the coordinator is in this: relay, and dialler back."""
    async with open_libp2p_transport(IDENTITIES["relay"], [f"/ip4/0.0.0.0/tcp/{PORT}"], announce=RELAY.addresses) as it:
        host = Libp2pHost(it)
        admitted = {one.peer_id for one in IDENTITIES.values()}.__contains__
        Relay(host, may_use=admitted, clock=trio.current_time, wall=lambda: 1e9).serve()
        DialBack(host, may_ask=admitted, clock=trio.current_time).serve(lambda peer, error: None)
        say("ready")
        await trio.sleep_forever()


async def be_node(name: str) -> None:
    """A node in a home: finds out whether it is reachable, keeps a place at the relay, tries hole punching.

    Told to `dial` it reaches the other home, at the addresses it is told or else through the relay; told to `ask` it
    sends a megabyte there and back over the best connection there is.
    """
    other = IDENTITIES["b" if name == "a" else "a"].peer_id
    async with open_libp2p_transport(IDENTITIES[name], [f"/ip4/0.0.0.0/tcp/{PORT}"]) as transport:
        host = Libp2pHost(transport)
        transport.set_handler("hello", echo)
        reachability = Reachability(host, RELAY, wanted=transport.addresses)
        puncher = Puncher(
            host, candidates=reachability.candidates, clock=trio.current_time, open_networks=["203.0.113.0/24"]
        )
        client = Client(host, wall=lambda: 1e9)
        puncher.serve()
        client.serve(met=puncher.met)
        host.add_way("relay", client.dial)
        say("reachability", **vars_of(await reachability.check()), candidates=reachability.candidates())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.keep_place, RELAY)
            async for line in trio.lowlevel.FdStream(os.dup(0)):
                order, *addresses = line.decode().split()
                try:
                    if order == "dial":
                        to = PeerAddress(peer=other, addresses=(*addresses, *relayed_address(RELAY)))
                        count = await echoed(transport, to, DIALLED_BYTES)
                    else:
                        count = await echoed(transport, PeerAddress(peer=other), ASKED_BYTES)
                except Unreachable as error:
                    say("echoed", bytes=0, error=str(error))
                else:
                    say("echoed", bytes=count, via=via_of(transport, other))


class Client(RelayClient):
    """Says what it has come to."""

    async def reserve(self, relay: PeerAddress) -> Reservation:
        reservation = await super().reserve(relay)
        say("place", places=self.view())
        return reservation


class Puncher(HolePuncher):
    """Says what came of each attempt."""

    def _note(self, outcome: PunchOutcome) -> PunchOutcome:
        say("punched", **vars_of(outcome))
        return super()._note(outcome)


def via_of(transport, peer: str) -> list[str]:
    return sorted(one.via for one in transport._connections.get(peer, ()))


def vars_of(record) -> dict:
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


if __name__ == "__main__":
    import logging

    logging.getLogger("multiaddr").setLevel(logging.WARNING)
    logging.basicConfig(level=logging.DEBUG, format="%(relativeCreated)d %(name)s %(message)s")
    trio.run({"relay": be_relay, "node": be_node}[sys.argv[1]], *sys.argv[2:])
