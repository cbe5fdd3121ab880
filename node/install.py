"""From the notice of a new snapshot to its use: fetch, let the batch in hand end, load, say so at once.

Whatever fails, the old snapshot stays in use and the reason is shown. On a restart the newest whole snapshot on disk is
used without a download.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from echo2.p2p.channel import request
from echo2.p2p.errors import ProtocolError, Refused, SchemaViolation, StorageFailed, Unreachable
from echo2.p2p.identity import payload_hash
from echo2.p2p.messages import ManifestReply, ManifestRequest

from .engine import EngineFailed, SnapshotRefused
from .lifecycle import Blocked, Cleared, Installed, may_install
from .limits import Backoff

if TYPE_CHECKING:
    import random

    from echo2.p2p.broadcast import Broadcaster
    from echo2.p2p.join import JoinString
    from echo2.p2p.messages import PoolNotice
    from echo2.p2p.store import Snapshot, SnapshotStore
    from echo2.p2p.transport import Transport

    from .engine import Engine
    from .membership import Member
    from .situation import Membership, Situation
    from .work import Worker

log = logging.getLogger(__name__)

ENGINE_RETRY_SECONDS = 60.0
"""After the engine failed again and again at loading: a pause long enough not to be a restart loop."""


class Installer:
    """Owns `Situation.installed`."""

    def __init__(
        self,
        situation: Situation,
        *,
        transport: Transport,
        join: JoinString,
        store: SnapshotStore,
        broadcaster: Broadcaster,
        engine: Engine,
        worker: Worker,
        member: Member,
        rng: random.Random,
        snapshots_kept: int,
    ) -> None:
        self._situation = situation
        self._transport = transport
        self._join = join
        self._store = store
        self._broadcaster = broadcaster
        self._engine = engine
        self._worker = worker
        self._member = member
        self._backoff = Backoff(rng)
        self._snapshots_kept = snapshots_kept
        self._refused: set[bytes] = set()

    async def run(self) -> None:
        """For ever: install what the pool's notice names, when it is above what is in use."""
        await self._reuse(await self._situation.joined())
        while True:
            await self._situation.until(lambda: self._wanted() is not None and may_install(self._situation.facts))
            notice = self._wanted()
            if notice is None or notice.manifest_hash is None:
                continue
            membership = await self._situation.joined()
            try:
                snapshot = await self._fetch_and_tell(membership, notice)
            except (Unreachable, Refused, ProtocolError, StorageFailed) as error:
                self._situation.failed(f"snapshot {notice.version}", error)
                if isinstance(error, StorageFailed) and self._situation.installed is None:
                    self._situation.happened(Blocked("snapshot", str(error)))
                log.warning("snapshot %s is not here yet: %s", notice.version, error)
                await self._situation.pause(self._backoff.next(getattr(error, "retry_seconds", None)))
                continue
            self._situation.happened(Cleared("snapshot"))
            if await self._use(snapshot):
                self._backoff.reset()
                await self._tidy()
            elif snapshot.manifest_hash not in self._refused:
                await self._situation.pause(ENGINE_RETRY_SECONDS)

    def _wanted(self) -> PoolNotice | None:
        notice = self._situation.notice
        return notice if self._situation.behind and notice and notice.manifest_hash not in self._refused else None

    async def _reuse(self, membership: Membership) -> None:
        """The newest whole snapshot of this run on disk, from before a restart."""
        for snapshot in reversed(self._store.snapshots()):
            manifest = snapshot.manifest
            theirs = (manifest.run, manifest.publisher)
            if theirs != (membership.descriptor.run, membership.descriptor.learner.peer):
                continue
            if await self._use(snapshot):
                log.info("using snapshot %d from disk", manifest.version)
                return

    async def _fetch_and_tell(self, membership: Membership, notice: PoolNotice) -> Snapshot:
        try:
            return await self._fetch(membership, notice)
        finally:
            self._situation.late = self._broadcaster.late

    async def _fetch(self, membership: Membership, notice: PoolNotice) -> Snapshot:
        assert notice.manifest_hash is not None
        ask = ManifestRequest(run=membership.descriptor.run, manifest_hash=notice.manifest_hash)

        async def refresh() -> ManifestReply:
            return await request(self._transport, self._join.coordinator, "manifest", ask, ManifestReply)

        reply = await refresh()
        if payload_hash(reply.manifest) != notice.manifest_hash:  # else we would install it, be behind still, and again
            raise SchemaViolation("the coordinator answered with another snapshot than its notice names")
        return await self._broadcaster.fetch(
            reply,
            publisher=membership.descriptor.learner.peer,
            run=membership.descriptor.run,
            refresh=refresh,
            coordinator_time_seconds=notice.coordinator_time_seconds,
        )

    async def _use(self, snapshot: Snapshot) -> bool:
        """Load `snapshot` between two batches. False, with the reason shown, when the old one stays in use."""
        situation, manifest = self._situation, snapshot.manifest
        async with self._worker.drained():
            current = situation.installed
            try:
                # A learner that resumed publishes the same bytes under a higher epoch: nothing to load.
                if current is None or current.manifest.snapshot_sha256 != manifest.snapshot_sha256:
                    with situation.engine_at(f"loading snapshot {manifest.version}"):
                        await self._engine.load(snapshot.path, manifest.snapshot_sha256)
            except SnapshotRefused as error:
                self._refused.add(snapshot.manifest_hash)
                situation.failed(f"snapshot {manifest.version} cannot be used", error)
                log.warning("snapshot %d cannot be used: %s", manifest.version, error)
                if current is None:
                    situation.happened(Blocked("snapshot", str(error)))
                await self._store.discard(snapshot.manifest_hash)
                return False
            except EngineFailed as error:
                situation.failed("engine", error)
                situation.happened(Blocked("engine", str(error)))
                return False
            situation.installed = snapshot
            situation.installs += 1
            situation.succeeded("engine", "snapshot")
            situation.happened(Cleared("engine"))
            situation.happened(Cleared("snapshot"))
            situation.happened(Installed())
            situation.notify()
        log.info("snapshot %d (epoch %d) is in use", manifest.version, manifest.epoch)
        return True

    async def _tidy(self) -> None:
        """Keep the newest few, the one in use among them: the rest serve nobody."""
        snapshots = self._store.snapshots()
        for snapshot in snapshots[: max(len(snapshots) - self._snapshots_kept, 0)]:
            if self._situation.installed is not None and snapshot.path == self._situation.installed.path:
                continue
            try:
                await self._store.discard(snapshot.manifest_hash)
            except StorageFailed as error:
                self._situation.failed("clearing old snapshots", error)
