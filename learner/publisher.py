"""From a durable checkpoint to a snapshot the pool may run: export, hash, sign, adopt, tell the coordinator.

It works beside training. The snapshot is made from the checkpoint, not from the live weights, so training the next step
cannot leak into it and a crash anywhere here loses nothing: the resumed learner publishes the checkpoint anew.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Literal

import trio

from echo2.p2p.errors import Echo2Error
from echo2.p2p.identity import payload_hash
from echo2.p2p.manifest import make_manifest
from echo2.p2p.messages import PublishReply, PublishRequest

from .link import Backoff

if TYPE_CHECKING:
    from collections.abc import Callable

    from echo2.p2p.identity import Identity
    from echo2.p2p.store import Snapshot, SnapshotStore

    from .interfaces import Trainer
    from .link import CoordinatorLink

SNAPSHOTS_KEPT = 2
"""The newest, and the one before it for nodes still downloading that."""

log = logging.getLogger(__name__)


class Publisher:
    """Publishes what it is offered, one at a time; of several that wait, only the newest.

    With `adapters`, version 0 is published whole and later ones as adapters on it: as long as the store holds it.
    """

    def __init__(
        self,
        *,
        identity: Identity,
        run: str,
        domain: Literal["f32", "f16", "bf16", "q8_0"],
        trainer: Trainer,
        store: SnapshotStore,
        link: CoordinatorLink,
        wall: Callable[[], float],
        adapters: bool = False,
    ) -> None:
        self._identity = identity
        self._adapters = adapters
        self._run = run
        self._domain = domain
        self._trainer = trainer
        self._store = store
        self._link = link
        self._wall = wall
        self._offered: tuple[int, int] | None = None
        self._busy = False
        self._newest: PublishRequest | None = None
        self._repeat = False
        self._scope = trio.CancelScope()
        self._changed = trio.lowlevel.ParkingLot()
        self.published: tuple[int, int] | None = None
        self.trouble = ""

    def offer(self, epoch: int, version: int) -> None:
        """Publish this checkpoint, which is durable, as soon as the one before it is out."""
        self._offered = (epoch, version)
        self._changed.unpark_all()

    def again(self) -> None:
        """The coordinator may have forgotten what is published: tell it of the newest again, in the very same bytes.

        So nodes that have it need nothing anew. Safe when it has forgotten nothing.
        """
        self._repeat = self._newest is not None
        self._changed.unpark_all()

    def stop(self) -> None:
        """The run is over: nothing more will be taken, so nothing more is offered."""
        self._scope.cancel()

    async def drained(self) -> None:
        """Wait until everything offered is published, or publishing was stopped."""
        while not self._scope.cancel_called and (self._offered is not None or self._busy):
            await self._changed.park()

    async def run(self) -> None:
        """Work until stopped."""
        with self._scope:
            while True:
                if self._offered is None:
                    if self._repeat and self._newest is not None:
                        self._repeat = False
                        await self._link.ask("publish", self._newest, PublishReply)
                    else:
                        await self._changed.park()
                    continue
                (epoch, version), self._offered = self._offered, None
                self._busy = True
                if await self._publish(epoch, version):
                    self.published = (epoch, version)
                self._busy = False
                self._changed.unpark_all()
                await self._discard_old()
        self.trouble = ""
        self._changed.unpark_all()

    async def _publish(self, epoch: int, version: int) -> bool:
        backoff = Backoff()
        while True:
            try:
                request = await self._make(epoch, version)
                break
            except (OSError, Echo2Error) as error:  # a full disk, most likely: room may be made while we wait
                self.trouble = f"cannot make the snapshot of version {version}: {error}"
                log.warning("%s", self.trouble)
                await trio.sleep(backoff.next())
            if self._offered is not None:  # a newer one waits, and this one's checkpoint may be gone by now
                return False
        self.trouble = ""
        self._newest, self._repeat = request, False
        await self._link.ask("publish", request, PublishReply)
        log.info("published version %d", version, extra={"epoch": epoch, "version": version})
        return True

    async def _make(self, epoch: int, version: int) -> PublishRequest:
        base = self._base() if self._adapters and version > 0 else None
        if self._adapters and version > 0 and base is None:
            log.warning("version 0 is not in the snapshot folder any more: version %d is published whole", version)
        path = await self._trainer.export(epoch, version, adapter=base is not None)
        previous = self._store.accepted(self._identity.peer_id, self._run)
        manifest = make_manifest(
            await self._store.measure(path),
            run=self._run,
            publisher=self._identity.peer_id,
            epoch=epoch,
            version=version,
            domain=self._domain,
            previous_hash=previous.manifest_hash if previous else None,
            created_seconds=self._wall(),
            base_hash=None if base is None else base.manifest_hash,
        )
        signed = self._identity.sign("manifest", manifest)
        await self._store.adopt(signed, manifest, path)
        await self._store.accept(manifest, payload_hash(signed))
        # Signed anew it is the very same bytes: `_base` saw to it, and Ed25519 draws nothing.
        again = None if base is None else self._identity.sign("manifest", base.manifest)
        return PublishRequest(manifest=signed, base=again)

    def _base(self) -> Snapshot | None:
        """Version 0, which a run with adapters keeps as long as it lasts: what nodes put the adapters on.

        Only one whose manifest this release would sign as the very same bytes: another hash is another base to nodes.
        """
        for snapshot in reversed(self._store.snapshots()):
            manifest = snapshot.manifest
            ours = (manifest.run, manifest.publisher) == (self._run, self._identity.peer_id)
            if ours and manifest.version == 0 and manifest.kind == "full":
                again = payload_hash(self._identity.sign("manifest", manifest))
                return snapshot if again == snapshot.manifest_hash else None
        return None

    async def _discard_old(self) -> None:
        snapshots = self._store.snapshots()
        base = self._base() if self._adapters else None
        # Also the one under which adapters were published before a restart: nodes may be downloading it.
        needed = {snapshot.manifest.base_hash for snapshot in snapshots} | {base.manifest_hash if base else None}
        for snapshot in snapshots[:-SNAPSHOTS_KEPT]:
            if snapshot.manifest_hash in needed:
                continue
            try:
                await self._store.discard(snapshot.manifest_hash)
            except (OSError, Echo2Error) as error:
                log.warning("cannot discard the snapshot of version %d: %s", snapshot.manifest.version, error)
