"""The way of a snapshot through a pool, in memory under a virtual clock and on real sockets and disks."""

from __future__ import annotations

import pytest
import trio
from contract.snapshot_pool import (
    CHUNK,
    CHUNKS,
    COORDINATOR,
    DATA,
    ROOT,
    A,
    B,
    C,
    MemoryWorld,
    SocketWorld,
    fetch,
    fetch_all,
    put,
    reply_for,
    signed_manifest,
    ticket_for,
    until,
)

from echo2.coordinator.lateness import Lateness
from echo2.p2p.broadcast import Broadcaster
from echo2.p2p.errors import BadChunk, BadSignature, Refused, SchemaViolation, StaleManifest, Unreachable
from echo2.p2p.identity import Identity, payload_hash
from echo2.p2p.memory_store import MemoryStore
from echo2.p2p.messages import ManifestReply, PeerAddress
from echo2.p2p.plan import LinkRates, build_plan


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
        from_relays = 0 if kind == "star" else 2 * len(DATA)
        assert sum(each.length_bytes for node in nodes for each in node.broadcaster.relayed) == from_relays
        assert all(each.source not in {root.id, node.id} for node in nodes for each in node.broadcaster.relayed)


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


async def test_a_node_says_how_far_its_download_is(world, clock):
    """Which chunks are here and who sends, while they come; all of them and nobody once the snapshot is whole."""
    signed, manifest = signed_manifest()
    manifest_hash = payload_hash(signed)
    async with world.peers(A, B) as (relay, node), trio.open_nursery() as nursery:
        assert node.broadcaster.fetching() is None
        reply = reply_for(node, signed, manifest, relay.address, [node.address])
        nursery.start_soon(fetch, node, reply)
        await until(lambda: node.broadcaster.progress is not None)
        await put(relay, signed, manifest, [1, 3])
        relay.broadcaster.announce()
        await until(lambda: node.broadcaster.progress.chunks_held == 2)
        said = node.broadcaster.fetching()
        assert (said.manifest_hash, said.chunks_held, said.sources) == (manifest_hash, 2, (relay.address.peer,))
        assert int.from_bytes(said.cells, "little") == 0b1010
        await put(relay, signed, manifest, [index for index in range(CHUNKS) if index not in (1, 3)])
        relay.broadcaster.announce()
    whole = node.broadcaster.fetching()
    assert (whole.chunks_held, whole.sources) == (CHUNKS, ())
    assert int.from_bytes(whole.cells, "little") == (1 << CHUNKS) - 1
    assert node.broadcaster.fetching(manifest_hash) is None  # it is in use: nothing more to say


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


async def test_superseded(memory, clock):
    """When the coordinator names another snapshot by now, or declines, a download without progress ends at once."""
    signed, manifest = signed_manifest()
    newer_signed, newer = signed_manifest(DATA[1:], version=1)
    async with memory.peers(ROOT, A) as (root, node):
        reply = reply_for(node, signed, manifest, root.address, [node.address])

        async def newest():
            return reply_for(node, newer_signed, newer, root.address, [node.address])

        async def declines():
            raise Refused("suspended", "you are suspended")

        for refresh, code in ((newest, "superseded"), (declines, "suspended")):
            started = trio.current_time()
            with pytest.raises(Refused) as refused:
                await fetch(node, reply, refresh=refresh)
            assert refused.value.code == code
            assert trio.current_time() - started < 12.0
        assert node.store.snapshots() == ()


async def test_who_lets_others_wait_is_named(memory, clock):
    """A relay that takes requests and never answers is named by those it should have served; nobody else is."""
    names = [Identity(bytes([number]) * 32) for number in range(40, 46)]
    signed, manifest = signed_manifest()
    async with memory.peers(ROOT, *names[1:]) as (root, *nodes), memory.peers(names[0], serving=False) as (silent,):

        async def never(stream):
            await trio.sleep_forever()

        silent.transport.set_handler("chunks", never)
        await put(root, signed, manifest)
        roster = [silent.address, *(node.address for node in nodes)]
        uplink = dict.fromkeys((name.peer_id for name in names), 1e6) | {silent.id: 2e6}
        plan = build_plan(
            "chain", manifest=manifest, manifest_hash=payload_hash(signed), root=root.address, nodes=roster,
            rates=LinkRates(root=3e6, uplink=uplink),
        )  # fmt: skip
        reply = {
            node.id: ManifestReply(
                manifest=signed,
                plan=COORDINATOR.sign("plan", plan),
                ticket=ticket_for(node.id, payload_hash(signed)),
            )
            for node in nodes
        }
        await fetch_all(nodes, lambda node: reply[node.id])
        lateness = Lateness()
        lateness.planned(plan)
        for node in nodes:
            assert root.id not in node.broadcaster.late
            lateness.said(node.id, node.broadcaster.late, (0, 0), 0.0)
        assert lateness.late(0.0) == {silent.id}
        newer_signed, newer = signed_manifest(DATA[::-1], version=1)
        await put(root, newer_signed, newer, data=DATA[::-1])
        await fetch(nodes[0], reply_for(nodes[0], newer_signed, newer, root.address, [nodes[0].address]))
        assert nodes[0].broadcaster.late == ()
