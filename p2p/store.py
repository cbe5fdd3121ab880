"""The seam between broadcast and a disk: verified chunks in, whole verified snapshots out.

`disk_store.DiskStore` is the real one (its work runs in threads), `memory_store.MemoryStore` the fake; one contract
suite (`tests/contract/test_store.py`). It holds only bytes that hash to what a manifest names, so whatever it returns
may be forwarded, and a partial or failed snapshot can never be taken for a whole one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from .chunks import ContentHashes
    from .messages import Manifest, Signed


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A complete snapshot: its manifest, the manifest's hash, and where its verified bytes lie (in memory: a name)."""

    manifest: Manifest
    manifest_hash: bytes
    path: Path


@dataclass(frozen=True, slots=True)
class Accepted:
    """The highest manifest accepted of one (publisher, run): nothing that is not above it is accepted again."""

    epoch: int
    version: int
    manifest_hash: bytes


class SnapshotStore(Protocol):
    """Keyed by manifest hash. All methods are safe to repeat and survive `kill -9` between any two.

    Every method that writes may raise `errors.StorageFailed` (`StorageFull` when there is no room).
    """

    async def begin(self, signed: Signed, manifest: Manifest) -> None:
        """Make room for a snapshot; keeps chunks already here from an earlier, interrupted download.

        Forgets unfinished snapshots of the same publisher and run that are below it: they cannot be asked for again.
        """

    def chunks_held(self, manifest_hash: bytes) -> frozenset[int]:
        """Indices of verified chunks (all of them for a complete snapshot; none when unknown)."""

    def held_bits(self, manifest_hash: bytes) -> int:
        """`chunks_held` as a `bitmap`, which costs next to nothing."""

    async def put_chunk(self, manifest_hash: bytes, index: int, data: bytes) -> None:
        """Verify against the manifest, then keep. Raises BadChunk, and ProtocolError for an index outside it."""

    async def put_chunks(self, manifest_hash: bytes, chunks: Sequence[tuple[int, bytes]]) -> None:
        """As `put_chunk` for many in one go. Those that verify are kept even when another of them raises BadChunk.

        Raises KeyError for a snapshot that was not begun.
        """

    async def get_chunk(self, manifest_hash: bytes, index: int) -> bytes:
        """A verified chunk. Raises KeyError when it is not here."""

    async def get_chunks(self, manifest_hash: bytes, indices: Sequence[int]) -> list[bytes]:
        """As `get_chunk` for many in one go, in the order asked."""

    async def complete(self, manifest_hash: bytes) -> Snapshot:
        """Once every chunk is here: fsync, rename.

        The whole is checked against snapshot_sha256 first, unless its bytes can only be those of the chunks as they
        were verified: the chunks' hashes then say all there is to say. (Whoever loads the file hashes it once more.)
        Raises KeyError when unknown, Truncated when chunks are missing, BadChunk (and forgets the bytes) when the
        whole was checked and is not what the manifest names.
        """

    def snapshots(self) -> tuple[Snapshot, ...]:
        """Complete snapshots, oldest (epoch, version) first."""

    async def measure(self, path: Path) -> ContentHashes:
        """Hash a file of this process, as a manifest of it will name it."""

    async def adopt(self, signed: Signed, manifest: Manifest, path: Path) -> Snapshot:
        """Take over a file this process made itself (the learner's export) as a complete snapshot.

        The file is moved: afterwards it is only at the returned path. Raises BadChunk, and leaves the file alone, when
        it is not what the manifest names.
        """

    async def alias(self, signed: Signed, manifest: Manifest, existing_hash: bytes) -> Snapshot:
        """The same bytes as an existing complete snapshot, published anew (a raised epoch): no download, no copy.

        Raises KeyError when `existing_hash` is not complete here, BadChunk when its bytes are not what the manifest
        names.
        """

    async def discard(self, manifest_hash: bytes) -> None:
        """Forget a snapshot, whole or partial, and free its room."""

    def accepted(self, publisher: str, run: str) -> Accepted | None:
        """The highest accepted manifest of this publisher and run; survives restarts."""

    async def accept(self, manifest: Manifest, manifest_hash: bytes) -> None:
        """Record durably that this manifest was accepted. Never lowers what is recorded."""
