"""`relay_host.Host` over the network in memory, so that relaying and hole punching run under a virtual clock.

What is pretended: the handshake of a new connection is one line that names the peer (the real ones are the wire stage's
business), and what a dial meets is drawn from a generator.
"""

from __future__ import annotations

import errno
import random
from typing import Any

import trio
import trio.testing

from echo2.p2p.errors import Unreachable
from echo2.p2p.libp2p_tcp import HostPort
from echo2.p2p.messages import PeerAddress
from echo2.p2p.transport import Stream, StreamHandler

HELLO_BYTES_MAX = 80
HANDSHAKE_SECONDS = 10.0
SILENT_SECONDS = 30.0
"""As the real connections: a handshake that takes longer fails, a connection on which nothing is heard ends."""


def hello(peer: str) -> bytes:
    """The handshake."""
    return f"{peer}\n".encode()


class Link:
    """One connection."""

    def __init__(self, peer: str, via: str) -> None:
        self.keep = False
        self.peer = peer
        self.via = via
        self.closed: str | None = None
        self.stream_count = 0
        self.ended = trio.Event()

    async def close(self) -> None:
        """End it."""
        await trio.lowlevel.checkpoint()
        self.closed = "closed"
        self.ended.set()


class ListeningSocket:
    """One of ours, as far as hole punching looks."""

    family = 2

    def setsockopt(self, *_arguments: Any) -> None:
        """Whatever."""

    def getsockname(self) -> tuple[str, int]:
        """Where."""
        return "192.0.2.1", 4001


class MemoryHost:
    """One process. `relayed` are the peers that are connected through a relay only; all others are direct."""

    def __init__(self, transport: Any, network: Any, nursery: trio.Nursery, rng: random.Random) -> None:
        self.addresses = ("/ip4/192.0.2.1/tcp/4001",)
        self.listening: Any = (ListeningSocket(),)
        self.relayed: set[str] = set()
        self._transport = transport
        self._network = network
        self._nursery = nursery
        self._rng = rng
        self._links: dict[str, Link] = {}

    @property
    def peer_id(self) -> str:
        """Ours."""
        return str(self._transport.peer_id)

    def set_raw_handler(self, protocol: str, handler: StreamHandler) -> None:
        """See `Host`."""
        self._transport.set_handler(protocol, handler)

    async def open_raw(self, peer: PeerAddress, protocol: str, *, relayed: bool) -> Stream:
        """See `Host`."""
        if relayed != (peer.peer in self.relayed):
            raise Unreachable(f"{peer.peer} is not connected so")
        return await self._open(peer.peer, protocol)

    async def open_on(self, link: Link, protocol: str) -> Stream:
        """See `Host`."""
        return await self._open(link.peer, protocol)

    async def _open(self, peer: str, protocol: str) -> Stream:
        address = PeerAddress(peer=peer, addresses=(f"/memory/{peer}",))
        opened: Stream = await self._transport.open(address, protocol)
        return opened

    async def connect(self, peer: PeerAddress) -> Link:
        """See `Host`."""
        await trio.lowlevel.checkpoint()
        return self._link(peer.peer)

    def _link(self, peer: str) -> Link:
        known = self._links.get(peer)
        if known is None or known.closed is not None:
            known = self._links[peer] = Link(peer, "relay" if peer in self.relayed else "direct")
        return known

    def link_of(self, stream: Stream) -> Link:
        """See `Host`."""
        return self._link(stream.peer)

    def direct_link(self, peer: str) -> Link | None:
        """See `Host`."""
        return None if peer in self.relayed or self._network.find(peer) is None else self._link(peer)

    def offence(self, peer: str, reason: str) -> None:
        """See `Host`."""
        self._transport.offence(peer, reason)

    async def wait_closed(self, link: Link) -> None:
        """See `Host`."""
        await link.ended.wait()

    def remote_of(self, link: Link) -> HostPort | None:
        """See `Host`."""
        return None if link.via == "relay" else HostPort("192.0.2.7", 40_001)

    async def proves(self, peer: str, remote: HostPort) -> None:
        """See `Host`. Port 4001 leads there; another refuses, swallows or leads to somebody else."""
        await trio.lowlevel.checkpoint()
        if remote.port == 4001:
            return
        how = self._rng.random()
        if how < 0.3:
            await trio.sleep_forever()
        if how < 0.6:
            raise OSError(errno.ECONNREFUSED, "refused")
        raise Unreachable(f"{remote.host} did not prove to be {peer}")

    async def dial_from(self, _listening: Any, _remote: HostPort) -> Any:
        """In place of `hole_punch.dial_from`: nothing of the fuzzer's leaves the machine."""
        await trio.sleep(self._rng.choice([0.0, 0.1, 1.0]))
        how = self._rng.random()
        if how < 0.6:
            raise OSError(errno.EHOSTUNREACH, "no way")
        ours, theirs = trio.testing.memory_stream_pair()
        if how < 0.8:
            await theirs.send_all(self._rng.choice([b"GET /\n", b"", hello(self._rng.choice(["x", *self.relayed]))]))
        if how < 0.9:
            await theirs.aclose()
        return ours

    async def upgrade_outbound(self, stream: Any, peer: str, *, via: str = "direct") -> Link:
        """See `Host`."""
        link = await self._upgrade(stream, via)
        if link.peer != peer:
            await link.close()
            raise Unreachable(f"{link.peer} is there instead")
        return link

    async def upgrade_inbound(self, stream: Any, *, via: str = "direct") -> Link:
        """See `Host`."""
        return await self._upgrade(stream, via)

    async def _upgrade(self, stream: Any, via: str) -> Link:
        made = False
        try:
            with trio.fail_after(HANDSHAKE_SECONDS):
                await stream.send_all(hello(self.peer_id))
                said = b""
                while b"\n" not in said:
                    part = await stream.receive_some(HELLO_BYTES_MAX)
                    said += part
                    if not part or len(said) > HELLO_BYTES_MAX:
                        raise Unreachable("handshake failed")
            made = True
        except (trio.TooSlowError, trio.BrokenResourceError) as error:
            raise Unreachable("handshake failed") from error
        finally:
            if not made:
                with trio.CancelScope(shield=True):
                    await self._let_go(stream)
        link = Link(said.partition(b"\n")[0].decode(errors="replace"), via)
        self._nursery.start_soon(self._live, link, stream)
        return link

    async def _live(self, link: Link, stream: Any) -> None:
        """Until it says no more, or says nothing."""
        try:
            while link.closed is None:
                with trio.move_on_after(SILENT_SECONDS) as scope:
                    if not await stream.receive_some(4096):
                        break
                if scope.cancelled_caught:
                    break
        except (Unreachable, trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        await self._let_go(stream)
        await link.close()

    async def _let_go(self, stream: Any) -> None:
        if hasattr(stream, "reset"):
            await stream.reset()
        else:
            await trio.aclose_forcefully(stream)
