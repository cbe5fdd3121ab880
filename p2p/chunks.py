"""Chunk arithmetic, hashing and verification. Pure.

A chunk is the unit hashed, sent, verified and forwarded. Chunk i of a snapshot covers bytes
[i * chunk_bytes, min((i + 1) * chunk_bytes, length_bytes)); only the last may be shorter.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .bitmap import below, spread
from .errors import BadChunk, SchemaViolation
from .messages import CHUNK_BYTES_MAX, KIB

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from .messages import ChunkRequest, Manifest

CHUNKS_WANTED = 256
"""Chunks in a snapshot of middling size: a chunk is a hop's latency, so a relay adds about 1/256 of the transfer."""

CHUNK_BYTES_MIN = 64 * KIB
"""Below this the cost of a frame and of a hash call is felt."""

DIGEST_BYTES = 32


def chunk_bytes_for(length_bytes: int) -> int:
    """Chunk size of a snapshot of G bytes: clamp(G / 256, 64 KiB, 4 MiB)."""
    return min(max(-(-length_bytes // CHUNKS_WANTED), CHUNK_BYTES_MIN), CHUNK_BYTES_MAX)


def chunk_count(length_bytes: int, chunk_bytes: int) -> int:
    """How many chunks cover `length_bytes`."""
    return -(-length_bytes // chunk_bytes)


def extent(manifest: Manifest, index: int) -> tuple[int, int]:
    """(offset, length) in bytes of one chunk. Raises SchemaViolation for an index outside the snapshot."""
    offset = index * manifest.chunk_bytes
    if not 0 <= offset < manifest.length_bytes:
        raise SchemaViolation(f"chunk {index} is outside a snapshot of {chunks_of(manifest)} chunks")
    return offset, min(manifest.chunk_bytes, manifest.length_bytes - offset)


def chunks_of(manifest: Manifest) -> int:
    """How many chunks a manifest names."""
    return chunk_count(manifest.length_bytes, manifest.chunk_bytes)


def digest_of(manifest: Manifest, index: int) -> bytes:
    """SHA-256 the manifest names for one chunk."""
    return manifest.chunk_sha256[DIGEST_BYTES * index : DIGEST_BYTES * (index + 1)]


def verify_chunk(manifest: Manifest, index: int, data: bytes | memoryview) -> None:
    """Raise BadChunk unless `data` is exactly the chunk named, SchemaViolation for an index outside the snapshot."""
    _, length = extent(manifest, index)
    if len(data) != length:
        raise BadChunk(f"chunk {index} is {length} bytes, got {len(data)}")
    if hashlib.sha256(data).digest() != digest_of(manifest, index):
        raise BadChunk(f"the bytes of chunk {index} are not what the manifest names")


@dataclass(frozen=True, slots=True)
class ContentHashes:
    """What a manifest says of a snapshot's bytes."""

    length_bytes: int
    chunk_bytes: int
    chunk_sha256: bytes
    snapshot_sha256: bytes


def hash_pieces(pieces: Iterable[bytes | memoryview], chunk_bytes: int) -> ContentHashes:
    """Hash content that comes in pieces of exactly `chunk_bytes`, the last one shorter or equal."""
    whole = hashlib.sha256()
    digests: list[bytes] = []
    length = 0
    for piece in pieces:
        if length % chunk_bytes or not 0 < len(piece) <= chunk_bytes:
            raise ValueError(f"pieces of {chunk_bytes} bytes are hashed, got one of {len(piece)} at {length}")
        whole.update(piece)
        digests.append(hashlib.sha256(piece).digest())
        length += len(piece)
    return ContentHashes(length, chunk_bytes, b"".join(digests), whole.digest())


def hash_bytes(data: bytes) -> ContentHashes:
    """Hash content that is in memory, with the chunk size that is right for its length."""
    chunk_bytes = chunk_bytes_for(len(data))
    view = memoryview(data)
    return hash_pieces((view[at : at + chunk_bytes] for at in range(0, len(data), chunk_bytes)), chunk_bytes)


@dataclass(frozen=True, slots=True)
class ChunkRange:
    """The part of a ChunkRequest that says which chunks: first, first + stride, ... below stop, less `have`."""

    first: int
    stop: int
    stride: int
    have: bytes


def range_of(wanted: Collection[int]) -> ChunkRange:
    """The narrowest range that asks for exactly `wanted` (not empty)."""
    first, last = min(wanted), max(wanted)
    span = range(first, last + 1)
    if len(span) == len(wanted):
        return ChunkRange(first, last + 1, 1, b"")
    have = bytearray(-(-len(span) // 8))
    for place, index in enumerate(span):
        if index not in wanted:
            have[place // 8] |= 1 << (place % 8)
    return ChunkRange(first, last + 1, 1, bytes(have))


def wanted_by(request: ChunkRequest, chunks: int) -> int:
    """Chunks a request asks for, as a `bitmap`. Raises SchemaViolation when it reaches outside the snapshot."""
    if request.stop > chunks or request.first >= request.stop:
        raise SchemaViolation(f"chunks {request.first} to {request.stop} asked of a snapshot of {chunks}")
    span = range(request.first, request.stop, request.stride)
    if len(request.have) > -(-len(span) // 8):
        raise SchemaViolation(f"a bitmap of {len(request.have)} bytes for {len(span)} chunks")
    places = below(len(span)) & ~int.from_bytes(request.have, "little")
    return spread(places, request.stride) << request.first
