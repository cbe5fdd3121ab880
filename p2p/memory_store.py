"""`SnapshotStore` in memory: the same contract as `disk_store`, without threads, for virtual time.

Keep the object across a simulated crash and it stands for the disk. `files` stands for the file system: what a fake
trainer exports is put there under a name, and complete snapshots appear under theirs.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from .chunks import ContentHashes, chunks_of, extent, hash_bytes, verify_chunk
from .errors import BadChunk, StorageFailed, StorageFull, Truncated
from .identity import payload_hash
from .manifest import highest_of, is_below
from .store import Snapshot

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .messages import Manifest, Signed
    from .store import Accepted


@dataclass(slots=True)
class _Entry:
    manifest: Manifest
    chunks: dict[int, bytes] = field(default_factory=dict)
    held: int = 0
    complete: bool = False


class MemoryStore:
    """`bytes_max`, when set, is the size of the pretended disk."""

    def __init__(self, *, bytes_max: int | None = None) -> None:
        self.files: dict[Path, bytes] = {}
        self._bytes_max = bytes_max
        self._entries: dict[bytes, _Entry] = {}
        self._accepted: dict[tuple[str, str], Accepted] = {}

    async def begin(self, signed: Signed, manifest: Manifest) -> None:
        """See `SnapshotStore`."""
        manifest_hash = payload_hash(signed)
        if manifest_hash in self._entries:
            return
        for other_hash, other in list(self._entries.items()):
            if not other.complete and is_below(other.manifest, manifest):
                del self._entries[other_hash]
        used = sum(entry.manifest.length_bytes for entry in self._entries.values())
        if self._bytes_max is not None and used + manifest.length_bytes > self._bytes_max:
            raise StorageFull(f"a snapshot of {manifest.length_bytes} bytes does not fit, {used} bytes are in use")
        self._entries[manifest_hash] = _Entry(manifest)

    def chunks_held(self, manifest_hash: bytes) -> frozenset[int]:
        """See `SnapshotStore`."""
        entry = self._entries.get(manifest_hash)
        return frozenset(entry.chunks) if entry else frozenset()

    def held_bits(self, manifest_hash: bytes) -> int:
        """See `SnapshotStore`."""
        entry = self._entries.get(manifest_hash)
        return entry.held if entry else 0

    async def put_chunk(self, manifest_hash: bytes, index: int, data: bytes) -> None:
        """See `SnapshotStore`."""
        await self.put_chunks(manifest_hash, [(index, data)])

    async def put_chunks(self, manifest_hash: bytes, chunks: Sequence[tuple[int, bytes]]) -> None:
        """See `SnapshotStore`."""
        entry = self._entries[manifest_hash]
        wrong: BadChunk | None = None
        for index, _ in chunks:
            extent(entry.manifest, index)
        for index, data in chunks:
            if index in entry.chunks:
                continue
            try:
                verify_chunk(entry.manifest, index, data)
                entry.chunks[index] = bytes(data)
                entry.held |= 1 << index
            except BadChunk as error:
                wrong = wrong or error
        if wrong:
            raise wrong

    async def get_chunk(self, manifest_hash: bytes, index: int) -> bytes:
        """See `SnapshotStore`."""
        return self._entries[manifest_hash].chunks[index]

    async def get_chunks(self, manifest_hash: bytes, indices: Sequence[int]) -> list[bytes]:
        """See `SnapshotStore`."""
        return [await self.get_chunk(manifest_hash, index) for index in indices]

    async def complete(self, manifest_hash: bytes) -> Snapshot:
        """See `SnapshotStore`."""
        entry = self._entries[manifest_hash]
        path = Path("memory") / manifest_hash.hex()
        if not entry.complete:
            count = chunks_of(entry.manifest)
            if len(entry.chunks) < count:
                raise Truncated(f"only {len(entry.chunks)} of {count} chunks are here")
            whole = b"".join(entry.chunks[index] for index in range(count))
            if hashlib.sha256(whole).digest() != entry.manifest.snapshot_sha256:
                del self._entries[manifest_hash]
                raise BadChunk("every chunk verified, but the whole is not the snapshot the manifest names")
            self.files[path] = whole
            entry.complete = True
        return Snapshot(entry.manifest, manifest_hash, path)

    def snapshots(self) -> tuple[Snapshot, ...]:
        """See `SnapshotStore`."""
        whole = [
            Snapshot(entry.manifest, manifest_hash, Path("memory") / manifest_hash.hex())
            for manifest_hash, entry in self._entries.items()
            if entry.complete
        ]
        return tuple(sorted(whole, key=lambda snapshot: (snapshot.manifest.epoch, snapshot.manifest.version)))

    async def measure(self, path: Path) -> ContentHashes:
        """See `SnapshotStore`."""
        return hash_bytes(self._file(path))

    async def adopt(self, signed: Signed, manifest: Manifest, path: Path) -> Snapshot:
        """See `SnapshotStore`."""
        manifest_hash = payload_hash(signed)
        snapshot = await self._install(signed, manifest, self._file(path))
        if path != snapshot.path:
            self._forget_file(path)
        return Snapshot(manifest, manifest_hash, snapshot.path)

    async def alias(self, signed: Signed, manifest: Manifest, existing_hash: bytes) -> Snapshot:
        """See `SnapshotStore`."""
        existing = self._entries[existing_hash]
        if not existing.complete:
            raise KeyError(existing_hash)
        return await self._install(signed, manifest, self.files[Path("memory") / existing_hash.hex()])

    async def discard(self, manifest_hash: bytes) -> None:
        """See `SnapshotStore`."""
        if self._entries.pop(manifest_hash, None):
            self.files.pop(Path("memory") / manifest_hash.hex(), None)

    def accepted(self, publisher: str, run: str) -> Accepted | None:
        """See `SnapshotStore`."""
        return self._accepted.get((publisher, run))

    async def accept(self, manifest: Manifest, manifest_hash: bytes) -> None:
        """See `SnapshotStore`."""
        key = (manifest.publisher, manifest.run)
        self._accepted[key] = highest_of(self._accepted.get(key), manifest, manifest_hash)

    def _file(self, path: Path) -> bytes:
        if path in self.files:
            return self.files[path]
        try:
            return path.read_bytes()
        except OSError as error:
            raise StorageFailed(f"cannot read {path}: {error.strerror}") from error

    def _forget_file(self, path: Path) -> None:
        if self.files.pop(path, None) is None:
            path.unlink(missing_ok=True)

    async def _install(self, signed: Signed, manifest: Manifest, data: bytes) -> Snapshot:
        manifest_hash = payload_hash(signed)
        if len(data) != manifest.length_bytes:
            raise BadChunk(f"the file is {len(data)} bytes, the manifest names {manifest.length_bytes}")
        new = manifest_hash not in self._entries
        await self.begin(signed, manifest)
        step = manifest.chunk_bytes
        pieces = [(index, data[index * step : (index + 1) * step]) for index in range(chunks_of(manifest))]
        try:
            await self.put_chunks(manifest_hash, pieces)
            return await self.complete(manifest_hash)
        except BadChunk:
            if new:
                self._entries.pop(manifest_hash, None)
            raise
