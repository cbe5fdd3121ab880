"""Three ways of carrying bytes under one small interface: our transport, stock py-libp2p, trio's TLS without libp2p."""

from __future__ import annotations

import datetime
import ssl
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import trio

from echo2.p2p.identity import Identity
from echo2.p2p.libp2p_transport import open_libp2p_transport
from echo2.p2p.messages import PeerAddress

MIB = 1 << 20
ANY_PORT = "/ip4/127.0.0.1/tcp/0"
SERVICES = {"stream": "chunks", "copy": "rollouts", "hop": "receipts"}
"""What a link serves -> the name of a protocol that our transport knows."""


class Pipe(Protocol):
    """One stream."""

    async def send_all(self, data: bytes) -> None: ...
    async def receive_some(self, max_bytes: int) -> bytes: ...


Handler = Callable[[Pipe], Awaitable[None]]


class Link(Protocol):
    """A process's end: `address` tells others how to `open` a stream of a service to it."""

    address: str

    def serve(self, service: str, handler: Handler) -> None: ...
    async def open(self, address: str, service: str) -> Pipe: ...


class OursLink:
    """`libp2p_transport`."""

    def __init__(self, transport: Any) -> None:
        self.transport = transport
        self.address = f"{transport.peer_id} {transport.addresses[0]}"

    def serve(self, service: str, handler: Handler) -> None:
        async def handle(stream: Any) -> None:
            await handler(stream)
            await stream.close_write()
            await stream.receive_some(1)

        self.transport.set_handler(SERVICES[service], handle)

    async def open(self, address: str, service: str) -> Pipe:
        peer, where = address.split()
        stream: Pipe = await self.transport.open(PeerAddress(peer=peer, addresses=(where,)), SERVICES[service])
        return stream


class StockPipe:
    """A stock stream."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    async def send_all(self, data: bytes) -> None:
        await self._stream.write(data)

    async def receive_some(self, max_bytes: int) -> bytes:
        data: bytes = await self._stream.read(max_bytes)
        return data


class StockLink:
    """py-libp2p as it comes, Noise and yamux."""

    def __init__(self, host: Any) -> None:
        self._host = host
        self.address = str(host.get_addrs()[0])

    def serve(self, service: str, handler: Handler) -> None:
        async def handle(stream: Any) -> None:
            await handler(StockPipe(stream))

        self._host.set_stream_handler(f"/bench/{service}", handle)

    async def open(self, address: str, service: str) -> Pipe:
        from libp2p.peer.id import ID
        from multiaddr import Multiaddr

        where, _, peer = address.partition("/p2p/")
        known = ID.from_base58(peer)
        if not self._host.get_network().get_connections(known):
            await self._host.get_network().dial_addr(Multiaddr(where), known)
        return StockPipe(await self._host.new_stream(known, [f"/bench/{service}"]))


class TlsLink:
    """A connection of its own for each stream."""

    def __init__(self, nursery: trio.Nursery, listener: trio.SocketListener, server: ssl.SSLContext) -> None:
        self.address = str(listener.socket.getsockname()[1])
        self._server = server
        self._handlers: dict[bytes, Handler] = {}
        nursery.start_soon(trio.serve_listeners, self._accept, [listener])

    def serve(self, service: str, handler: Handler) -> None:
        self._handlers[service.ljust(8).encode()] = handler

    async def open(self, address: str, service: str) -> Pipe:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        tcp = await trio.open_tcp_stream("127.0.0.1", int(address))
        stream = trio.SSLStream(tcp, context, https_compatible=True)
        await stream.send_all(service.ljust(8).encode())
        return stream

    async def _accept(self, tcp: trio.SocketStream) -> None:
        stream = trio.SSLStream(tcp, self._server, server_side=True, https_compatible=True)
        try:
            await self._handlers[await stream.receive_some(8)](stream)
            await stream.receive_some(1)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        finally:
            await trio.aclose_forcefully(stream)


@asynccontextmanager
async def open_link(kind: str, seed: int) -> AsyncIterator[Any]:
    """A listening end of this kind."""
    identity = Identity(bytes([seed]) * 32)
    if kind == "ours":
        async with open_libp2p_transport(identity, [ANY_PORT]) as transport:
            yield OursLink(transport)
    elif kind == "stock":
        from libp2p import new_host
        from libp2p.crypto.ed25519 import create_new_key_pair
        from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
        from libp2p.security.noise.transport import PROTOCOL_ID, Transport
        from multiaddr import Multiaddr

        keys = create_new_key_pair(identity.seed)
        noise = Transport(keys, noise_privkey=create_noise_key_pair().private_key)
        host = new_host(key_pair=keys, sec_opt={PROTOCOL_ID: noise})
        async with host.run([Multiaddr(ANY_PORT)]):
            yield StockLink(host)
    else:
        async with trio.open_nursery() as nursery:
            (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
            yield TlsLink(nursery, listener, _certified())
            nursery.cancel_scope.cancel()


def _certified() -> ssl.SSLContext:
    """A server's context with a certificate made now."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "bench")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now)
        .not_valid_after(now + datetime.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ) + certificate.public_bytes(serialization.Encoding.PEM)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "both.pem"
        path.write_bytes(pem)
        context.load_cert_chain(path)
    return context
