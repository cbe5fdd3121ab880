"""From the notice of a new snapshot to its use: fetch, let the batch in hand end, load, say so at once.

Whatever fails, the old snapshot stays in use and the reason is shown. On a restart, and when the coordinator moves the
node to another run, the newest whole snapshot on disk is used without a download.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from echo2.p2p.channel import request
from echo2.p2p.errors import ProtocolError, Refused, SchemaViolation, StorageFailed, Unreachable
from echo2.p2p.identity import payload_hash
from echo2.p2p.manifest import accept_manifest
from echo2.p2p.messages import ManifestReply, ManifestRequest

from .engine import AdapterFile, EngineFailed, SnapshotRefused
from .lifecycle import Blocked, Cleared, Installed, may_install
from .limits import Backoff

if TYPE_CHECKING:
    import random

    from echo2.p2p.broadcast import Broadcaster
    from echo2.p2p.join import JoinString
    from echo2.p2p.messages import Manifest, PoolNotice
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
        self._run = ""

    async def run(self) -> None:
        """For ever: install what the pool's notice names, when it is above what is in use."""
        await self._situation.joined()
        while True:
            await self._situation.until(
                lambda: self._moved() or (self._wanted() is not None and may_install(self._situation.facts))
            )
            membership = await self._situation.joined()
            if self._moved():
                self._run = membership.descriptor.run
                await self._reuse(membership)
                continue
            notice = self._wanted()
            if notice is None or notice.manifest_hash is None:
                continue
            try:
                snapshot = await self._fetch_and_tell(membership, notice)
            except (Unreachable, Refused, ProtocolError, StorageFailed) as error:
                self._situation.failed(f"snapshot {notice.version}", error)
                if isinstance(error, StorageFailed) and self._situation.installed is None:
                    self._situation.happened(Blocked("snapshot", str(error)))
                log.warning("snapshot %s is not here yet: %s", notice.version, error)
                wait = self._backoff.next(getattr(error, "retry_seconds", None))
                await self._situation.pause(wait, unless=self._moved)
                continue
            self._situation.happened(Cleared("snapshot"))
            if self._moved():
                continue
            if await self._use(snapshot):
                self._backoff.reset()
                await self._tidy()
            elif snapshot.manifest_hash not in self._refused:
                await self._situation.pause(ENGINE_RETRY_SECONDS, unless=self._moved)

    def _moved(self) -> bool:
        """Whether the node is in another run than it was when a snapshot was looked for last."""
        membership = self._situation.membership
        return membership is not None and membership.descriptor.run != self._run

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
            if manifest.base_hash is not None and self._base_of(manifest) is None:
                continue  # fetched again, with its base, when the notice comes
            if await self._use(snapshot):
                log.info("using snapshot %d from disk", manifest.version)
                return

    async def _fetch_and_tell(self, membership: Membership, notice: PoolNotice) -> Snapshot:
        try:
            return await self._fetch(membership, notice)
        finally:
            self._situation.late, self._situation.relayed = self._broadcaster.late, self._broadcaster.relayed

    async def _fetch(self, membership: Membership, notice: PoolNotice) -> Snapshot:
        """What the notice names; an adapter's base before it, since that one is worth nothing by itself."""
        assert notice.manifest_hash is not None
        run, publisher = membership.descriptor.run, membership.descriptor.learner.peer
        reply = await self._ask_manifest(run, notice.manifest_hash)
        manifest, _ = accept_manifest(
            reply.manifest,
            publisher=publisher,
            run=run,
            highest=self._store.accepted(publisher, run),
            coordinator_time_seconds=notice.coordinator_time_seconds,
        )
        if (manifest.epoch, manifest.version) != (notice.epoch, notice.version):
            # It would be installed, not be what the notice says is newest, and be asked for again at once.
            raise SchemaViolation(
                f"the notice calls epoch {manifest.epoch} version {manifest.version} epoch {notice.epoch} "
                f"version {notice.version}"
            )
        base_hash = manifest.base_hash
        if base_hash is not None and self._base_of(manifest) is None:
            await self._broadcaster.fetch(
                await self._ask_manifest(run, base_hash),
                publisher=publisher,
                run=run,
                refresh=partial(self._ask_manifest, run, base_hash),
                vouched=base_hash,
            )
            reply = await self._ask_manifest(run, notice.manifest_hash)  # that took a while: a plan of now
        return await self._broadcaster.fetch(
            reply,
            publisher=publisher,
            run=run,
            refresh=partial(self._ask_manifest, run, notice.manifest_hash),
            coordinator_time_seconds=notice.coordinator_time_seconds,
        )

    async def _ask_manifest(self, run: str, manifest_hash: bytes) -> ManifestReply:
        ask = ManifestRequest(run=run, manifest_hash=manifest_hash)
        reply = await request(self._transport, self._join.coordinator, "manifest", ask, ManifestReply)
        if payload_hash(reply.manifest) != manifest_hash:  # else we would install it, be behind still, and again
            raise SchemaViolation("the coordinator answered with another snapshot than was asked for")
        return reply

    def _base_of(self, manifest: Manifest) -> Snapshot | None:
        """The whole snapshot that an adapter belongs to, when it is here."""
        here = self._store.snapshots()
        return next((known for known in here if known.manifest_hash == manifest.base_hash), None)

    async def _load(self, snapshot: Snapshot) -> None:
        """A whole snapshot, or an adapter with its base. Raises as the engine does."""
        manifest = snapshot.manifest
        if manifest.base_hash is None:
            await self._engine.load(snapshot.path, manifest.snapshot_sha256)
            return
        base = self._base_of(manifest)
        if base is None or base.manifest.kind != "full":
            raise SnapshotRefused(f"the base of adapter {manifest.version} is not here")
        await self._engine.load(
            base.path, base.manifest.snapshot_sha256, AdapterFile(snapshot.path, manifest.snapshot_sha256)
        )

    async def _use(self, snapshot: Snapshot) -> bool:
        """Load `snapshot` between two batches. False, with the reason shown, when the old one stays in use."""
        situation, manifest = self._situation, snapshot.manifest
        async with self._worker.drained():
            if self._moved():
                return False
            current = situation.installed
            try:
                # A learner that resumed publishes the same bytes under a higher epoch: nothing to load.
                if current is None or current.manifest.snapshot_sha256 != manifest.snapshot_sha256:
                    with situation.engine_at(f"loading snapshot {manifest.version}"):
                        await self._load(snapshot)
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
        """Keep the newest few of this run, the one in use and its base among them: the rest serve nobody."""
        snapshots = self._store.snapshots()
        ours = [snapshot for snapshot in snapshots if snapshot.manifest.run == self._run]
        kept = ours[-self._snapshots_kept :]
        needed = {snapshot.manifest.base_hash for snapshot in kept}
        if self._situation.installed is not None:
            needed |= {self._situation.installed.manifest_hash, self._situation.installed.manifest.base_hash}
        for snapshot in snapshots:
            if snapshot in kept or snapshot.manifest_hash in needed:
                continue
            try:
                await self._store.discard(snapshot.manifest_hash)
            except StorageFailed as error:
                self._situation.failed("clearing old snapshots", error)
