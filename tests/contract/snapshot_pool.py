"""A small pool that broadcasts snapshots, on either transport: what the broadcast tests share."""

from __future__ import annotations

import random
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import trio
import trio.testing

from echo2.p2p.broadcast import Broadcaster
from echo2.p2p.channel import Channel
from echo2.p2p.chunks import chunks_of, hash_pieces
from echo2.p2p.disk_store import DiskStore
from echo2.p2p.identity import Identity, payload_hash
from echo2.p2p.libp2p_transport import open_libp2p_transport
from echo2.p2p.manifest import make_manifest
from echo2.p2p.memory import MemoryNetwork
from echo2.p2p.memory_store import MemoryStore
from echo2.p2p.messages import Ack, Chunk, ChunkRequest, ManifestReply, PeerAddress, Ticket
from echo2.p2p.plan import LinkRates, build_plan
from echo2.p2p.transport import Transport

COORDINATOR = Identity(b"C" * 32)
ROOT, A, B, C = (Identity(name * 32) for name in (b"R", b"a", b"b", b"c"))
RUN = "r"
CHUNK = 16 * 1024
CHUNKS = 20
DATA = random.Random(7).randbytes(CHUNK * CHUNKS - 100)
CHAIN = LinkRates(root=3e6, uplink=dict.fromkeys((A.peer_id, B.peer_id, C.peer_id), 1e6))
BOUND_SECONDS = 100.0
"""Above every bound of the code under test; a hang fails by it."""


@dataclass
class Peer:
    """One process: a transport, a store, a broadcaster, and what it complained of."""

    identity: Identity
    transport: Transport
    store: object
    broadcaster: Broadcaster
    complaints: list = field(default_factory=list)

    @property
    def id(self):
        return self.identity.peer_id

    @property
    def address(self):
        return PeerAddress(peer=self.id, addresses=self.transport.addresses)


class World:
    """Peers that come and go; a store outlives the process that used it."""

    @asynccontextmanager
    async def peers(self, *identities, serving=True):
        async with AsyncExitStack() as stack:
            made = []
            for identity in identities:
                transport = await stack.enter_async_context(self.transport(identity))
                complaints = []
                broadcaster = Broadcaster(
                    transport,
                    self.store(identity),
                    COORDINATOR.peer_id,
                    clock=trio.current_time,
                    complain=lambda peer, error, complaints=complaints: complaints.append((peer, type(error))),
                )
                if serving:
                    broadcaster.serve()
                made.append(Peer(identity, transport, broadcaster.store, broadcaster, complaints))
            yield made


class MemoryWorld(World):
    def __init__(self, tmp_path):
        self.network = MemoryNetwork(random.Random(1), delay_seconds=0.02)
        self.stores = {}
        self.clock = trio.testing.MockClock(autojump_threshold=0)

    def transport(self, identity):
        return self.network.transport(identity)

    def store(self, identity):
        return self.stores.setdefault(identity.peer_id, MemoryStore())

    def read(self, store, path):
        return store.files[path]

    async def kill(self, peer):
        self.network.kill(peer.id)


class SocketWorld(World):
    def __init__(self, tmp_path):
        self.tmp_path = tmp_path
        self.clock = None

    def transport(self, identity):
        return open_libp2p_transport(identity, ("/ip4/127.0.0.1/tcp/0",))

    def store(self, identity):
        return DiskStore(self.tmp_path / identity.peer_id)

    def read(self, store, path):
        return path.read_bytes()

    async def kill(self, peer):
        """What the kernel does to a killed process: every socket closes and nothing is said."""
        peer.transport._accepting.cancel()
        for connection in [one for known in peer.transport._connections.values() for one in known]:
            await connection._socket.abort()


def signed_manifest(data=DATA, *, version=0, epoch=0, signer=ROOT, **changes):
    pieces = [data[at : at + CHUNK] for at in range(0, len(data), CHUNK)]
    made = make_manifest(
        hash_pieces(pieces, CHUNK),
        run=RUN,
        publisher=ROOT.peer_id,
        epoch=epoch,
        version=version,
        domain="f16",
        previous_hash=None,
        created_seconds=0.0,
    ).model_copy(update=changes)
    return signer.sign("manifest", made), made


async def put(peer, signed, manifest, indices=None, data=DATA):
    """Chunks into a peer's store; all of them and whole when no indices are named."""
    await peer.store.begin(signed, manifest)
    which = range(chunks_of(manifest)) if indices is None else indices
    await peer.store.put_chunks(payload_hash(signed), [(i, data[i * CHUNK : (i + 1) * CHUNK]) for i in which])
    if indices is None:
        await peer.store.complete(payload_hash(signed))
    peer.broadcaster.announce()


def reply_for(asker, signed, manifest, root, nodes, kind="star", signer=COORDINATOR):
    plan = build_plan(kind, manifest=manifest, manifest_hash=payload_hash(signed), root=root, nodes=nodes, rates=CHAIN)
    return ManifestReply(
        manifest=signed, plan=signer.sign("plan", plan), ticket=ticket_for(asker.id, payload_hash(signed), signer)
    )


def ticket_for(peer, manifest_hash, signer=COORDINATOR):
    return signer.sign("ticket", Ticket(run=RUN, manifest_hash=manifest_hash, peer=peer))


async def fetch(peer, reply, **options):
    with trio.fail_after(BOUND_SECONDS):
        return await peer.broadcaster.fetch(reply, publisher=ROOT.peer_id, run=RUN, **options)


async def fetch_all(nodes, reply_of):
    """Every node at once; the snapshots in the nodes' order."""
    found = {}

    async def one(node):
        found[node.id] = await fetch(node, reply_of(node))

    async with trio.open_nursery() as nursery:
        for node in nodes:
            nursery.start_soon(one, node)
    return [found[node.id] for node in nodes]


async def ask(asker, holder, manifest_hash, *, ticket, first=0, stop=CHUNKS, wait_seconds=0.0, ack=True):
    """One request by hand: the indices that came. Raises Refused."""
    stream = await asker.transport.open(holder.address, "chunks")
    channel = Channel(stream)
    with trio.fail_after(BOUND_SECONDS):
        await channel.send(
            ChunkRequest(
                run=RUN,
                manifest_hash=manifest_hash,
                ticket=ticket,
                first=first,
                stop=stop,
                wait_seconds=wait_seconds,
            ),
            end=True,
        )
        came = []
        while (chunk := await channel.receive_or_end(Chunk)) is not None:
            came.append(chunk.index)
        if ack:
            await channel.send(Ack(count=len(came)), end=True)
            await channel.close()
        return came


async def until(condition):
    with trio.fail_after(BOUND_SECONDS):
        while not condition():  # noqa: ASYNC110 - what is waited for is the state of code under test, which has no event
            await trio.sleep(0.01)
