"""Snapshots over the network: serve and fetch (DESIGN section 8). One `Broadcaster` a process.

The serving side is `chunk_server`, the asking side `download`, the decisions are in `plan` and `swarm`; this file holds
what comes before the first byte is asked for: signatures, order, and the short cut for bytes that are here already.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import bitmap
from .chunk_server import ChunkServer, PeerTraffic
from .chunks import chunks_of
from .download import Download
from .errors import Refused, SchemaViolation
from .identity import open_signed, payload_hash
from .manifest import accept_manifest
from .messages import FETCH_CELLS_MAX, FETCH_SOURCES_MAX, LATE_MAX, RELAYED_MAX, BroadcastPlan, Fetching, Relayed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from .channel import Complaint
    from .messages import Manifest, ManifestReply, Signed
    from .store import Snapshot, SnapshotStore
    from .transport import Transport


SNAPSHOTS_REMEMBERED = 2
"""Whose senders are acknowledged: the newest, and its base."""


@dataclass(frozen=True, slots=True)
class FetchProgress:
    """The download going on, for status."""

    epoch: int
    version: int
    manifest_hash: bytes
    chunks_held: int
    chunks: int
    reason: str


class Broadcaster:
    """`serve` once; what the store holds is then served, and `fetch` brings more. `traffic` counts chunk bytes by peer.

    The learner, who only serves, adopts its exports into the store.
    """

    def __init__(
        self,
        transport: Transport,
        store: SnapshotStore,
        coordinator: str,
        *,
        clock: Callable[[], float],
        complain: Complaint,
    ) -> None:
        self.transport = transport
        self.store = store
        self.clock = clock
        self.complain = complain
        self.traffic: dict[str, PeerTraffic] = {}
        self._coordinator = coordinator
        self._server = ChunkServer(store, coordinator, clock=clock, complain=complain, traffic=self.traffic)
        self._download: Download | None = None
        self._wanted: tuple[bytes, int] | None = None
        """Manifest hash and chunks of the last snapshot asked for."""
        self._banned: tuple[bytes, set[str]] = (b"", set())
        self._late: tuple[bytes, set[str]] = (b"", set())
        self._planned: OrderedDict[bytes, Counter[str]] = OrderedDict()
        self._whole: set[bytes] = set()

    @property
    def progress(self) -> FetchProgress | None:
        """The download going on now, if any."""
        download = self._download
        if download is None:
            return None
        return FetchProgress(
            epoch=download.manifest.epoch,
            version=download.manifest.version,
            manifest_hash=download.manifest_hash,
            chunks_held=download.chunks_held,
            chunks=chunks_of(download.manifest),
            reason=download.reason,
        )

    def fetching(self, in_use: bytes | None = None) -> Fetching | None:
        """How far the last snapshot asked for is, as a heartbeat says it: also when it is whole, or waits for a source.

        None before the first one, and when it is the one `in_use` (a manifest hash).
        """
        if self._wanted is None or self._wanted[0] == in_use:
            return None
        manifest_hash, chunks = self._wanted
        held, cells = self.store.held_bits(manifest_hash), min(chunks, FETCH_CELLS_MAX)
        return Fetching(
            manifest_hash=manifest_hash,
            cells=bitmap.folded(held, chunks, cells).to_bytes(-(-cells // 8), "little"),
            chunks_held=held.bit_count(),
            sources=self._download.sources[:FETCH_SOURCES_MAX] if self._download is not None else (),
        )

    @property
    def late(self) -> tuple[str, ...]:
        """Relays that let this node wait in its last download; too many of them are this node's own line."""
        late = self._late[1]
        return tuple(sorted(late)) if len(late) <= LATE_MAX else ()

    @property
    def relayed(self) -> tuple[Relayed, ...]:
        """Who sent this node what was planned, of the last snapshot that it downloaded, and of its base."""
        found = [
            Relayed(manifest_hash=manifest_hash, source=source, length_bytes=length)
            for manifest_hash, planned in self._planned.items()
            if manifest_hash in self._whole
            for source, length in planned.items()
        ]
        return tuple(sorted(found, key=lambda each: -each.length_bytes)[:RELAYED_MAX])

    @property
    def streams_served(self) -> int:
        """Peers' requests being answered now."""
        return self._server.streams

    @property
    def turned_away(self) -> int:
        """Requests of ticket holders that found every place for serving taken, since the start."""
        return self._server.turned_away

    def is_holder(self, peer: str) -> bool:
        """Whether `peer` has shown a ticket of the coordinator's here."""
        return self._server.is_holder(peer)

    def serve(self) -> None:
        """Answer chunk requests from now on."""
        self.transport.set_handler("chunks", self._server.answer)

    def announce(self) -> None:
        """Chunks came into the store: whoever waits for them is served at once."""
        self._server.announce()

    async def fetch(
        self,
        reply: ManifestReply,
        *,
        publisher: str,
        run: str,
        refresh: Callable[[], Awaitable[ManifestReply]] | None = None,
        coordinator_time_seconds: float | None = None,
        vouched: bytes | None = None,
    ) -> Snapshot:
        """Verify, download and install in the store the snapshot the coordinator named.

        `vouched` is the manifest hash that an accepted manifest names as its base: that one, and no other, is taken
        although it is older than what was accepted, and may have expired.
        Raises ProtocolError (StaleManifest, BadSignature, ...) when it must not be had, BadChunk when the whole is not
        what its manifest names, Unreachable when it could not be had for now, Refused when the coordinator no longer
        wants us to have it, StorageFailed when our disk does not take it. Chunks verified by then are kept, and the
        next call resumes. An older snapshot is never touched.
        """
        manifest, manifest_hash = accept_manifest(
            reply.manifest,
            publisher=publisher,
            run=run,
            highest=None if vouched is not None else self.store.accepted(publisher, run),
            coordinator_time_seconds=None if vouched is not None else coordinator_time_seconds,
        )
        if vouched is not None and manifest_hash != vouched:
            raise SchemaViolation("this is another snapshot than the base that was asked for")
        plan = self._open_plan(reply, manifest, manifest_hash)
        await self.store.accept(manifest, manifest_hash)
        here = await self._already_here(reply.manifest, manifest, manifest_hash)
        if here is not None:
            return here
        await self.store.begin(reply.manifest, manifest)
        self._wanted = manifest_hash, chunks_of(manifest)
        if self._banned[0] != manifest_hash:
            self._banned = (manifest_hash, set())

        async def replan() -> tuple[BroadcastPlan, Signed]:
            assert refresh is not None
            renewed = await refresh()
            if payload_hash(renewed.manifest) != manifest_hash:
                raise Refused("superseded", "the coordinator names another snapshot now")
            return self._open_plan(renewed, manifest, manifest_hash), renewed.ticket

        download = Download(
            self, manifest, manifest_hash, plan, reply.ticket, self._banned[1], replan if refresh else None
        )
        self._download = download
        if self._late[0] != manifest_hash:
            self._late = (manifest_hash, set())
        download.late = self._late[1]  # of every attempt at this snapshot
        download.planned = self._planned.pop(manifest_hash, Counter())
        self._planned[manifest_hash] = download.planned
        while len(self._planned) > SNAPSHOTS_REMEMBERED:
            self._whole.discard(self._planned.popitem(last=False)[0])
        try:
            snapshot = await download.run()
            download.planned.pop(plan.root.peer, None)  # the learner earns no credit
            self._whole.add(manifest_hash)
            return snapshot
        finally:
            if self._download is download:
                self._download = None

    async def _already_here(self, signed: Signed, manifest: Manifest, manifest_hash: bytes) -> Snapshot | None:
        """The snapshot, if it was installed before or if its bytes were, under another manifest (a raised epoch)."""
        snapshots = self.store.snapshots()
        for known in snapshots:
            if known.manifest_hash == manifest_hash:
                return known
        content = (manifest.snapshot_sha256, manifest.length_bytes)
        for known in snapshots:
            if (known.manifest.snapshot_sha256, known.manifest.length_bytes) == content:
                snapshot = await self.store.alias(signed, manifest, known.manifest_hash)
                self.announce()
                return snapshot
        return None

    def _open_plan(self, reply: ManifestReply, manifest: Manifest, manifest_hash: bytes) -> BroadcastPlan:
        plan = open_signed(reply.plan, self._coordinator, "plan", BroadcastPlan)
        if (plan.run, plan.manifest_hash, plan.chunks) != (manifest.run, manifest_hash, chunks_of(manifest)):
            raise SchemaViolation("the plan is for another snapshot than the manifest it came with")
        return plan
