"""The seam between broadcast and a disk: verified chunks in, whole verified snapshots out.

`disk_store.DiskStore` is the real one (its work runs in threads), `memory.MemoryStore` the fake; one contract suite
(`tests/contract/test_store.py`). It holds only bytes that hash to what a manifest names, so whatever it returns may be
forwarded, and a partial or failed snapshot can never be taken for a whole one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    from .messages import Manifest, Signed


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A complete snapshot: its manifest, the manifest's hash, and where its verified bytes lie (in memory: a name)."""

    manifest: Manifest
    manifest_hash: bytes
    path: Path


class SnapshotStore(Protocol):
    """Keyed by manifest hash. All methods are safe to repeat and survive `kill -9` between any two."""

    async def begin(self, signed: Signed, manifest: Manifest) -> None:
        """Make room for a snapshot; keeps chunks already here from an earlier, interrupted download."""

    def chunks_held(self, manifest_hash: bytes) -> frozenset[int]:
        """Indices of verified chunks (all of them for a complete snapshot; none when unknown)."""

    async def put_chunk(self, manifest_hash: bytes, index: int, data: bytes) -> None:
        """Verify against the manifest, then keep. Raises BadChunk, and ProtocolError for an index outside it."""

    async def get_chunk(self, manifest_hash: bytes, index: int) -> bytes:
        """A verified chunk. Raises KeyError when it is not here."""

    async def complete(self, manifest_hash: bytes) -> Snapshot:
        """Once every chunk is here: check the whole against snapshot_sha256, fsync, rename. Raises BadChunk."""

    def snapshots(self) -> tuple[Snapshot, ...]:
        """Complete snapshots, oldest (epoch, version) first."""

    async def adopt(self, signed: Signed, manifest: Manifest, path: Path) -> Snapshot:
        """Take over a file this process made itself (the learner's export) as a complete snapshot."""

    async def discard(self, manifest_hash: bytes) -> None:
        """Forget a snapshot, whole or partial, and free its room."""
