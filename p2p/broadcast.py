"""Snapshots over the network: serve and fetch (DESIGN section 8). One `Broadcaster` a process.

The serving side is `chunk_server`, the asking side `download`, the decisions are in `plan` and `swarm`; this file holds
what comes before the first byte is asked for: signatures, order, and the short cut for bytes that are here already.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .chunk_server import ChunkServer, PeerTraffic
from .chunks import chunks_of
from .download import Download
from .errors import Refused, SchemaViolation
from .identity import open_signed, payload_hash
from .manifest import accept_manifest
from .messages import LATE_MAX, BroadcastPlan

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from .channel import Complaint
    from .messages import Manifest, ManifestReply, Signed
    from .store import Snapshot, SnapshotStore
    from .transport import Transport


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
        self._banned: tuple[bytes, set[str]] = (b"", set())
        self._late: tuple[bytes, set[str]] = (b"", set())

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

    @property
    def late(self) -> tuple[str, ...]:
        """Relays that let this node wait in its last download; too many of them are this node's own line."""
        late = self._late[1]
        return tuple(sorted(late)) if len(late) <= LATE_MAX else ()

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
        try:
            return await download.run()
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
