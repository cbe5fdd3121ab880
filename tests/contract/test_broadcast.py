"""The way of a snapshot through a pool, in memory under a virtual clock and on real sockets and disks."""

from __future__ import annotations

import random
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import pytest
import trio
import trio.testing

from echo2.p2p.broadcast import Broadcaster
from echo2.p2p.channel import Channel
from echo2.p2p.chunk_server import SERVINGS_FORGET_SECONDS, STREAMS_PER_PEER_MAX
from echo2.p2p.chunks import chunks_of, hash_pieces
from echo2.p2p.disk_store import DiskStore
from echo2.p2p.errors import (
    BadChunk,
    BadSignature,
    ProtocolError,
    Refused,
    SchemaViolation,
    StaleManifest,
    Unreachable,
)
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


@pytest.fixture(params=[MemoryWorld, SocketWorld], ids=["memory", "sockets"])
def world(request, tmp_path):
    return request.param(tmp_path)


@pytest.fixture
def memory(tmp_path):
    return MemoryWorld(tmp_path)


@pytest.fixture
def clock(request):
    """The world's: pytest-trio finds a virtual clock among a test's arguments."""
    name = "world" if "world" in request.fixturenames else "memory"
    return request.getfixturevalue(name).clock


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


@pytest.mark.parametrize("kind", ["star", "chain"])
async def test_pool(world, clock, kind):
    """Every node of a pool ends with the bytes the learner published, by either plan; nobody is complained of."""
    signed, manifest = signed_manifest()
    async with world.peers(ROOT, A, B, C) as (root, *nodes):
        await put(root, signed, manifest)
        roster = [node.address for node in nodes]
        snapshots = await fetch_all(nodes, lambda n: reply_for(n, signed, manifest, root.address, roster, kind))
        for node, snapshot in zip(nodes, snapshots, strict=True):
            assert world.read(node.store, snapshot.path) == DATA
            assert node.store.snapshots() == (snapshot,)
            assert node.complaints == []
        await until(lambda: sum(t.acknowledged_bytes for t in root.broadcaster.traffic.values()) >= len(DATA))
        sent = sum(traffic.sent_bytes for traffic in root.broadcaster.traffic.values())
        assert sent == len(DATA) * (3 if kind == "star" else 1)
        received = [sum(t.received_bytes for t in node.broadcaster.traffic.values()) for node in nodes]
        assert received == [len(DATA)] * 3


async def test_forwarded_at_once(world, clock):
    """A relay hands on each chunk while the next ones are still to come, and is asked before it has any."""
    signed, manifest = signed_manifest()
    manifest_hash = payload_hash(signed)
    async with world.peers(A, B) as (relay, node), trio.open_nursery() as nursery:
        reply = reply_for(node, signed, manifest, relay.address, [node.address])
        nursery.start_soon(fetch, node, reply)
        await until(lambda: node.broadcaster.progress is not None)
        await put(relay, signed, manifest, [5])
        await until(lambda: node.store.chunks_held(manifest_hash) == {5})
        await put(relay, signed, manifest, [0, 19])
        await until(lambda: node.store.chunks_held(manifest_hash) == {0, 5, 19})
        progress = node.broadcaster.progress
        assert (progress.chunks_held, progress.chunks) == (3, CHUNKS)
        assert "3 of 20 chunks" in progress.reason
        await put(relay, signed, manifest)
    assert node.broadcaster.progress is None
    assert len(node.store.snapshots()) == 1


class LyingStore(MemoryStore):
    """Flips a bit of chunk 4 on its way out."""

    async def get_chunks(self, manifest_hash, indices):
        right = await super().get_chunks(manifest_hash, indices)
        return [bytes([d[0] ^ 1]) + d[1:] if i == 4 else d for i, d in zip(indices, right, strict=True)]


async def test_lying_relay(world, clock):
    """A relay that flips a bit is complained of and asked no more; the root gives what is missing."""
    signed, manifest = signed_manifest()
    async with world.peers(ROOT, A) as (root, node), world.peers(B, serving=False) as (liar,):
        await put(root, signed, manifest)
        liar.store = LyingStore()
        liar.broadcaster = Broadcaster(
            liar.transport, liar.store, COORDINATOR.peer_id, clock=trio.current_time, complain=lambda *_: None
        )
        liar.broadcaster.serve()
        await put(liar, signed, manifest)
        roster = [liar.address, node.address]
        snapshot = await fetch(node, reply_for(node, signed, manifest, root.address, roster, "chain"))
        assert world.read(node.store, snapshot.path) == DATA
        assert node.complaints == [(liar.id, BadChunk)]
        assert liar.id in node.broadcaster.traffic


@pytest.mark.parametrize("repair_from", ["another holder", "the root"])
async def test_killed_sender(world, clock, repair_from):
    """When a relay dies in the middle, another holder of the roster gives the rest; without one, the root does."""
    signed, manifest = signed_manifest()
    manifest_hash = payload_hash(signed)
    async with world.peers(ROOT, A, B, C) as (root, node, relay, other):
        await put(root, signed, manifest)
        if repair_from == "another holder":
            await put(other, signed, manifest)
        await put(relay, signed, manifest, range(7))
        roster = [relay.address, other.address, node.address]
        plan = build_plan("star", manifest=manifest, manifest_hash=manifest_hash, root=relay.address, nodes=roster[2:])
        plan = plan.model_copy(
            update={
                "root": root.address,
                "entries": (
                    *plan.entries,
                    *build_plan(
                        "star", manifest=manifest, manifest_hash=manifest_hash, root=root.address, nodes=roster[:2]
                    ).entries,
                ),
            }
        )
        reply = ManifestReply(
            manifest=signed, plan=COORDINATOR.sign("plan", plan), ticket=ticket_for(node.id, manifest_hash)
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fetch, node, reply)
            await until(lambda: node.store.chunks_held(manifest_hash) == set(range(7)))
            await world.kill(relay)
        assert len(node.store.snapshots()) == 1
        helper, idle = (other, root) if repair_from == "another holder" else (root, other)
        assert node.broadcaster.traffic[helper.id].received_bytes == len(DATA) - 7 * CHUNK
        assert idle.id not in node.broadcaster.traffic
        assert node.complaints == []


async def test_resume(world, clock):
    """A download that is cut off and taken up by a restarted process fetches only what it has not got."""
    signed, manifest = signed_manifest()
    manifest_hash = payload_hash(signed)
    async with world.peers(ROOT) as (root,):
        await put(root, signed, manifest, range(12))
        async with world.peers(A) as (node,), trio.open_nursery() as nursery:
            nursery.start_soon(fetch, node, reply_for(node, signed, manifest, root.address, [node.address]))
            await until(lambda: len(node.store.chunks_held(manifest_hash)) == 12)
            nursery.cancel_scope.cancel()
        assert root.broadcaster.traffic[A.peer_id].sent_bytes == 12 * CHUNK
        await until(lambda: root.broadcaster.streams_served == 0)
        await put(root, signed, manifest)
        async with world.peers(A) as (node,):
            snapshot = await fetch(node, reply_for(node, signed, manifest, root.address, [node.address]))
            assert world.read(node.store, snapshot.path) == DATA
        assert root.broadcaster.traffic[A.peer_id].sent_bytes == len(DATA)


async def test_refused_manifests(world, clock):
    """By another key, older than one accepted (also after a restart), or with a plan of another: refused, unchanged."""
    signed, manifest = signed_manifest(version=3)
    older_signed, older = signed_manifest(DATA[::-1], version=2)
    newer_signed, newer = signed_manifest(DATA[1:], version=4)
    forged_signed, forged = signed_manifest(DATA[1:], version=5, signer=C)
    async with world.peers(ROOT) as (root,):
        await put(root, signed, manifest)
        async with world.peers(A) as (node,):
            snapshot = await fetch(node, reply_for(node, signed, manifest, root.address, [node.address]))
        async with world.peers(A) as (node,):
            roster = [node.address]
            with pytest.raises(StaleManifest):
                await fetch(node, reply_for(node, older_signed, older, root.address, roster))
            with pytest.raises(BadSignature):
                await fetch(node, reply_for(node, forged_signed, forged, root.address, roster))
            with pytest.raises(BadSignature):
                await fetch(node, reply_for(node, newer_signed, newer, root.address, roster, signer=C))
            mixed = reply_for(node, signed, manifest, root.address, roster).model_copy(
                update={"manifest": newer_signed}
            )
            with pytest.raises(SchemaViolation):
                await fetch(node, mixed)
            with pytest.raises(StaleManifest, match="expired"):
                await fetch(
                    node, reply_for(node, newer_signed, newer, root.address, roster), coordinator_time_seconds=1e9
                )
            assert node.store.snapshots() == (snapshot,)
            again = reply_for(node, signed, manifest, root.address, roster)
            assert await fetch(node, again) == snapshot


@pytest.mark.parametrize("how", ["truncated", "whole hash"])
async def test_never_installed(memory, clock, how):
    """A snapshot that ends too soon, or whose whole is not what was named, is not installed; the old one stays."""
    old_signed, old = signed_manifest(DATA[::-1], version=0)
    changes = {"snapshot_sha256": bytes(32)} if how == "whole hash" else {}
    signed, manifest = signed_manifest(version=1, **changes)
    async with memory.peers(ROOT, A) as (root, node):
        await put(root, old_signed, old, data=DATA[::-1])
        before = await fetch(node, reply_for(node, old_signed, old, root.address, [node.address]))
        await put(root, signed, manifest, range(CHUNKS - 1 if how == "truncated" else CHUNKS))
        with pytest.raises(Unreachable if how == "truncated" else BadChunk) as raised:
            await fetch(node, reply_for(node, signed, manifest, root.address, [node.address]))
        if how == "truncated":
            assert "19 of 20 chunks" in str(raised.value)
        assert node.store.snapshots() == (before,)


async def test_published_anew(world, clock):
    """The same bytes under a raised epoch are taken from the own disk: no chunk is asked of anybody."""
    signed, manifest = signed_manifest(version=6)
    again_signed, again = signed_manifest(version=6, epoch=1)
    async with world.peers(ROOT, A) as (root, node):
        await put(root, signed, manifest)
        await fetch(node, reply_for(node, signed, manifest, root.address, [node.address]))
        before = node.broadcaster.traffic[root.id].received_bytes
        snapshot = await fetch(node, reply_for(node, again_signed, again, root.address, [node.address]))
        assert snapshot.manifest.epoch == 1
        assert world.read(node.store, snapshot.path) == DATA
        assert node.broadcaster.traffic[root.id].received_bytes == before


async def test_tickets(world, clock):
    """A ticket for another peer or snapshot, or not signed by the coordinator, gets no chunk and is complained of."""
    signed, manifest = signed_manifest()
    manifest_hash = payload_hash(signed)
    async with world.peers(ROOT, A) as (root, node):
        await put(root, signed, manifest)
        wrong = [
            ticket_for(B.peer_id, manifest_hash),
            ticket_for(node.id, bytes(32)),
            ticket_for(node.id, manifest_hash, signer=C),
            COORDINATOR.sign("plan", Ticket(run=RUN, manifest_hash=manifest_hash, peer=node.id)),
        ]
        for ticket in wrong:
            with pytest.raises(Refused) as refused:
                await ask(node, root, manifest_hash, ticket=ticket)
            assert refused.value.code == "ticket"
        assert [peer for peer, _ in root.complaints] == [node.id] * 4
        assert sum(traffic.sent_bytes for traffic in root.broadcaster.traffic.values()) == 0
        assert len(await ask(node, root, manifest_hash, ticket=ticket_for(node.id, manifest_hash))) == CHUNKS


async def test_third_time(memory, clock):
    """A chunk is sent to one peer twice; the third time it is refused, and what was not had twice still comes."""
    signed, manifest = signed_manifest()
    manifest_hash = payload_hash(signed)
    async with memory.peers(ROOT, A, B) as (root, node, other):
        await put(root, signed, manifest)
        ticket = ticket_for(node.id, manifest_hash)
        for _ in range(2):
            assert await ask(node, root, manifest_hash, ticket=ticket, stop=4) == [0, 1, 2, 3]
        with pytest.raises(Refused) as refused:
            await ask(node, root, manifest_hash, ticket=ticket, stop=4)
        assert refused.value.code == "served-twice"
        before = root.broadcaster.traffic[node.id].sent_bytes
        with pytest.raises(Refused):
            await ask(node, root, manifest_hash, ticket=ticket, stop=6)
        assert root.broadcaster.traffic[node.id].sent_bytes == before + 2 * CHUNK
        assert len(await ask(other, root, manifest_hash, ticket=ticket_for(other.id, manifest_hash))) == CHUNKS
        await trio.sleep(SERVINGS_FORGET_SECONDS)
        assert await ask(node, root, manifest_hash, ticket=ticket, stop=4) == [0, 1, 2, 3]


async def test_waiting_is_bounded(memory, clock):
    """A holder that has not got a chunk waits as long as it was asked to, then says so; nothing hangs on it."""
    manifest_hash = payload_hash(signed_manifest()[0])
    async with memory.peers(A, B) as (holder, asker):
        ticket = ticket_for(asker.id, manifest_hash)
        for wait in (0.0, 5.0):
            started = trio.current_time()
            with pytest.raises(Refused) as refused:
                await ask(asker, holder, manifest_hash, ticket=ticket, wait_seconds=wait)
            assert refused.value.code == "not-here"
            assert wait <= trio.current_time() - started < wait + 1


async def test_too_many_streams(memory, clock):
    """One peer cannot hold more than a few streams open."""
    manifest_hash = payload_hash(signed_manifest()[0])
    async with memory.peers(A, B) as (holder, asker):
        ticket = ticket_for(asker.id, manifest_hash)
        codes = []

        async def one():
            try:
                await ask(asker, holder, manifest_hash, ticket=ticket, wait_seconds=5.0)
            except Refused as refused:
                codes.append(refused.code)

        async with trio.open_nursery() as nursery:
            for _ in range(STREAMS_PER_PEER_MAX + 2):
                nursery.start_soon(one)
        assert sorted(codes) == ["busy"] * 2 + ["not-here"] * STREAMS_PER_PEER_MAX


async def test_requests_outside(memory, clock):
    """A request that makes no sense costs its sender the stream, and the holder goes on serving others."""
    signed, manifest = signed_manifest()
    manifest_hash = payload_hash(signed)
    async with memory.peers(ROOT, A) as (root, node):
        await put(root, signed, manifest)
        ticket = ticket_for(node.id, manifest_hash)
        with pytest.raises((Unreachable, ProtocolError)):
            await ask(node, root, manifest_hash, ticket=ticket, first=5, stop=5)
        assert root.complaints == [(node.id, SchemaViolation)]
        assert len(await ask(node, root, manifest_hash, ticket=ticket)) == CHUNKS


async def test_late_source_is_passed_over(memory, clock):
    """A source that sends nothing for two seconds is passed over; the root finishes the download."""
    signed, manifest = signed_manifest()
    async with memory.peers(ROOT, A, B) as (root, node, idle):
        await put(root, signed, manifest)
        roster = [idle.address, node.address]
        started = trio.current_time()
        await fetch(node, reply_for(node, signed, manifest, root.address, roster, "chain"))
        assert 2.0 <= trio.current_time() - started < 4.0
        assert node.broadcaster.traffic[root.id].received_bytes == len(DATA)


async def test_silent_link(memory, clock):
    """A source behind a link that went silent is passed over like any late one."""
    signed, manifest = signed_manifest()
    async with memory.peers(ROOT, A, B) as (root, node, other):
        await put(root, signed, manifest)
        await put(other, signed, manifest)
        memory.network.partition(node.id, other.id)
        await fetch(node, reply_for(node, signed, manifest, root.address, [other.address, node.address], "chain"))
        assert len(node.store.snapshots()) == 1


async def test_plan_is_refreshed(memory, clock):
    """When nobody the plan names can be reached, the plan is asked anew, and a new root's address is enough."""
    signed, manifest = signed_manifest()
    async with memory.peers(ROOT, A) as (root, node):
        await put(root, signed, manifest)
        gone = PeerAddress(peer=C.peer_id, addresses=("/memory/nobody",))
        asked = []

        async def refresh():
            asked.append(trio.current_time())
            return reply_for(node, signed, manifest, root.address, [node.address])

        snapshot = await fetch(node, reply_for(node, signed, manifest, gone, [node.address]), refresh=refresh)
        assert memory.read(node.store, snapshot.path) == DATA
        assert len(asked) == 1


async def test_gives_up_with_the_reason(memory, clock):
    """When nobody can be reached at all, the download ends within its bound and says for what it waited."""
    signed, manifest = signed_manifest()
    async with memory.peers(A) as (node,):
        gone = PeerAddress(peer=C.peer_id, addresses=("/memory/nobody",))
        with pytest.raises(Unreachable, match="0 of 20 chunks"):
            await fetch(node, reply_for(node, signed, manifest, gone, [node.address]))
        assert node.store.snapshots() == ()


async def test_lossy_home_lines(memory, clock):
    """With loss on every line, and a leaf, the whole pool still gets there."""
    signed, manifest = signed_manifest()
    memory.network.loss = 0.01
    async with memory.peers(ROOT, A, B, C) as (root, *nodes):
        await put(root, signed, manifest)
        roster = [nodes[0].address, nodes[1].address, PeerAddress(peer=nodes[2].id)]
        snapshots = await fetch_all(nodes, lambda n: reply_for(n, signed, manifest, root.address, roster, "chain"))
        assert [memory.read(n.store, s.path) for n, s in zip(nodes, snapshots, strict=True)] == [DATA] * 3
