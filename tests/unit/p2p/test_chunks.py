"""Chunk arithmetic: worked by hand, then for any size."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.p2p.bitmap import bits_of
from echo2.p2p.chunks import (
    chunk_bytes_for,
    chunks_of,
    digest_of,
    extent,
    hash_bytes,
    hash_pieces,
    range_of,
    verify_chunk,
    wanted_by,
)
from echo2.p2p.errors import BadChunk, SchemaViolation
from echo2.p2p.identity import Identity
from echo2.p2p.manifest import make_manifest
from echo2.p2p.messages import CHUNK_BYTES_MAX, CHUNKS_MAX, KIB, MIB, ChunkRequest, Manifest, Signed

PUBLISHER = Identity(bytes(32)).peer_id
NO_TICKET = Signed(payload=b"", signature=bytes(64))


def manifest_of(data: bytes, chunk_bytes: int | None = None) -> Manifest:
    chunk_bytes = chunk_bytes or chunk_bytes_for(len(data))
    pieces = [data[at : at + chunk_bytes] for at in range(0, len(data), chunk_bytes)]
    return make_manifest(
        hash_pieces(pieces, chunk_bytes),
        run="r",
        publisher=PUBLISHER,
        epoch=0,
        version=0,
        domain="f16",
        previous_hash=None,
        created_seconds=0.0,
    )


def request_for(first: int, stop: int, stride: int = 1, have: bytes = b"") -> ChunkRequest:
    return ChunkRequest(
        run="r", manifest_hash=bytes(32), ticket=NO_TICKET, first=first, stop=stop, stride=stride, have=have
    )


@pytest.mark.parametrize(
    ("length", "size"),
    [
        (1, 64 * KIB),
        (4 * MIB, 64 * KIB),
        (16 * MIB, 64 * KIB),
        (16 * MIB + 1, 64 * KIB + 1),
        (98 * MIB, 98 * 4 * KIB),
        (1024 * MIB, 4 * MIB),
        (16 * 1024 * MIB, 4 * MIB),
    ],
)
def test_chunk_size(length: int, size: int) -> None:
    """A chunk is G / 256, but never below 64 KiB nor above 4 MiB."""
    assert chunk_bytes_for(length) == size


@given(st.integers(1, CHUNK_BYTES_MAX * CHUNKS_MAX))
def test_chunk_size_bounds(length: int) -> None:
    """The chunk size of any snapshot is within the wire's bounds and gives no more chunks than it may have."""
    size = chunk_bytes_for(length)
    assert 64 * KIB <= size <= CHUNK_BYTES_MAX
    assert -(-length // size) <= CHUNKS_MAX


def test_extents_by_hand() -> None:
    """2500 bytes in chunks of 1024 are 1024, 1024 and 452."""
    manifest = manifest_of(bytes(2500), 1024)
    assert chunks_of(manifest) == 3
    assert [extent(manifest, index) for index in range(3)] == [(0, 1024), (1024, 1024), (2048, 452)]
    for outside in (-1, 3):
        with pytest.raises(SchemaViolation):
            extent(manifest, outside)


@given(st.binary(min_size=1, max_size=6000), st.integers(1024, 2048))
def test_extents_cover(data: bytes, chunk_bytes: int) -> None:
    """Extents follow each other from 0 to the length, and each chunk's hash is that of its bytes."""
    manifest = manifest_of(data, chunk_bytes)
    at = 0
    for index in range(chunks_of(manifest)):
        offset, length = extent(manifest, index)
        assert offset == at
        at += length
        verify_chunk(manifest, index, data[offset:at])
        assert digest_of(manifest, index) == hashlib.sha256(data[offset:at]).digest()
    assert at == len(data)


def test_wrong_bytes() -> None:
    """A flipped bit, a missing byte and an extra byte are each a bad chunk."""
    data = bytes(range(256)) * 8
    manifest = manifest_of(data, 1024)
    good = data[:1024]
    verify_chunk(manifest, 0, good)
    for bad in (bytes([good[0] ^ 1]) + good[1:], good[:-1], good + b"\0"):
        with pytest.raises(BadChunk):
            verify_chunk(manifest, 0, bad)


def test_hash_of_whole() -> None:
    """What is measured is the length, the whole's hash and each chunk's."""
    data = bytes(65 * KIB)
    found = hash_bytes(data)
    assert (found.length_bytes, found.chunk_bytes) == (65 * KIB, 64 * KIB)
    assert found.snapshot_sha256 == hashlib.sha256(data).digest()
    assert found.chunk_sha256 == hashlib.sha256(data[: 64 * KIB]).digest() + hashlib.sha256(data[64 * KIB :]).digest()
    with pytest.raises(ValueError, match="pieces of 4"):
        hash_pieces([b"abc", b"abcd"], 4)


@given(st.sets(st.integers(0, 300), min_size=1))
def test_range_names_exactly_the_wanted(wanted: set[int]) -> None:
    """Whatever set is turned into a request, the holder reads that set out of it."""
    part = range_of(wanted)
    request = request_for(part.first, part.stop, part.stride, part.have)
    assert wanted_by(request, 301) == bits_of(wanted)


def test_range_by_hand() -> None:
    """Chunks 3 and 6 are a range of four with the two in the middle marked as had: 0b0110."""
    part = range_of({3, 6})
    assert (part.first, part.stop, part.have) == (3, 7, b"\x06")
    assert wanted_by(request_for(1, 10, 4), 10) == bits_of([1, 5, 9])
    assert wanted_by(request_for(1, 10, 4, b"\x02"), 10) == bits_of([1, 9])


@pytest.mark.parametrize(("first", "stop", "have"), [(0, 11, b""), (5, 5, b""), (0, 8, b"\0\0")])
def test_request_outside(first: int, stop: int, have: bytes) -> None:
    """A request that reaches outside the snapshot, is empty, or has too long a bitmap is refused."""
    with pytest.raises(SchemaViolation):
        wanted_by(request_for(first, stop, 1, have), 10)
