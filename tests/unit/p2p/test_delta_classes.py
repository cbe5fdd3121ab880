"""The code of changes by classes: what goes in comes out, and what nobody wrote is refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.p2p import delta_classes
from echo2.p2p.delta_bits import Reader, best_k, pack_low, pack_unary, unpack_low, unpack_unary, varint
from echo2.p2p.delta_classes import decode_changes, encode_changes
from echo2.p2p.errors import BadDelta

WIDTH = 2


def coded(keys, changes, lanes=1, width=WIDTH):
    """The payload of {place: move}."""
    places = np.array(sorted(changes), dtype=np.int64)
    moves = np.array([changes[place] for place in sorted(changes)], dtype=np.int64)
    return encode_changes(np.array(keys, dtype=np.uint8), lanes, places, moves, width)


def decoded(keys, payload, lanes=1, width=WIDTH):
    found = {}
    for places, moves in decode_changes(np.array(keys, dtype=np.uint8), lanes, memoryview(payload), width):
        found.update(zip(places.tolist(), moves.tolist(), strict=True))
    return found


def test_a_rice_code_is_a_unary_part_and_low_bits():
    """6 with two low bits: 6 >> 2 = 1 in unary, 01, and the low bits 10; 1 is 1 and 01."""
    assert best_k(np.array([6, 7, 6])) == 2
    assert pack_unary(np.array([1, 0])) == bytes([0b01100000])
    assert pack_low(np.array([6, 1]), 2) == bytes([0b0110])
    assert unpack_unary(memoryview(bytes([0b01100000])), 2).tolist() == [1, 0]
    assert unpack_low(memoryview(bytes([0b0110])), 2, 2).tolist() == [2, 1]


@given(st.integers(0, 2**42 - 1))
def test_a_varint_is_read_as_it_was_written(value):
    """Below six bytes of seven bits every number comes back, and nothing is left over."""
    reader = Reader(varint(value))
    assert reader.varint(2**42) == value
    reader.end()


@pytest.mark.parametrize("data", [b"", b"\x80", b"\xff" * 7, b"\x05"])
def test_a_bad_varint_is_refused(data):
    """Cut off, endless, or above its limit."""
    with pytest.raises(BadDelta):
        Reader(data).varint(4)


def test_the_payload_is_what_the_format_says():
    """Of the first class elements 2 and 9 went up, by 1 and 3; of the second all but number 7 went down by 1.

    Gaps 2, 6 and 7, each with two low bits: unary 0, 1, 1. Sizes - 1 are 0 and 2, without low bits.
    """
    keys = [5] * 20 + [6] * 20
    changes = {2: 1, 9: 3} | {20 + place: -1 for place in range(20) if place != 7}
    payload = coded(keys, changes)
    head = bytes([5, 6, 0x80 | 0x40 | 2, 2, 0, 0x80 | 0x20 | 2, 19, 1])
    gaps = bytes([1, 0b10101000, 0b1010, 0b11])
    signs = bytes([0b00111111, 0b11111111, 0b11111000])
    assert payload == head + gaps + signs + bytes([1, 0b10010000])
    assert decoded(keys, payload) == changes


@given(st.data())
def test_changes_come_back(data):
    """Whatever changed, however much, in whatever classes, several numbers a key or one."""
    lanes, width = data.draw(st.sampled_from([(1, 2), (1, 4), (4, 1)]))
    keys = data.draw(st.lists(st.integers(0, 255), min_size=1, max_size=120))
    keys = sorted(keys) if data.draw(st.booleans()) else [key % 3 for key in keys]
    most = 2 ** (8 * width) - 1
    move = st.integers(-most, most).filter(bool) | st.sampled_from([-1, 1])
    elements = len(keys) * lanes
    changes = data.draw(st.dictionaries(st.integers(0, elements - 1), move, max_size=elements))
    assert decoded(keys, coded(keys, changes, lanes, width), lanes, width) == changes


def test_changes_come_back_from_several_blocks(monkeypatch):
    """Keys are dealt into classes block by block, and a class's numbers go on from one to the next."""
    monkeypatch.setattr(delta_classes, "SORTED_KEYS", 64)
    rng = np.random.default_rng(0)
    for lanes in (1, 8):
        keys = rng.integers(100, 106, 1000)
        for share in (0.02, 0.7):
            places = np.flatnonzero(rng.random(1000 * lanes) < share).tolist()
            changes = {place: int(rng.choice([-2, -1, 1, 1000])) for place in places}
            assert decoded(keys, coded(keys, changes, lanes), lanes) == changes


def test_rare_changes_cost_about_their_entropy():
    """One in a hundred, up or down: 8.1 bits of position and 1 of sign each; at most 4 % more, head included."""
    rng = np.random.default_rng(1)
    count = 200_000
    places = np.flatnonzero(rng.random(count) < 0.01)
    payload = encode_changes(np.full(count, 9, np.uint8), 1, places, rng.choice([-1, 1], len(places)), WIDTH)
    entropy = -(0.01 * np.log2(0.01) + 0.99 * np.log2(0.99)) * count + len(places)
    assert 8 * len(payload) < 1.04 * entropy


@given(st.data())
def test_a_damaged_payload_is_refused_or_harmless(data):
    """Any other bytes are refused or name other changes of the same elements: never an error of another kind."""
    keys = [key % 4 for key in range(50)]
    payload = bytearray(coded(keys, {3: 1, 4: -1, 30: 700, 31: 2, 44: 1, 48: -1}))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    payload = payload[: data.draw(st.integers(0, len(payload)))] if data.draw(st.booleans()) else payload
    try:
        found = decoded(keys, bytes(payload))
    except BadDelta:
        return
    assert all(0 <= place < len(keys) for place in found)


@given(st.binary(max_size=200))
def test_garbage_is_refused_or_harmless(data):
    """As above, of bytes that never were a payload."""
    try:
        found = decoded([1, 2, 3] * 20, data)
    except BadDelta:
        return
    assert all(0 <= place < 60 for place in found)


def test_announced_numbers_are_checked_before_there_is_room_for_them():
    """A payload of a few bytes that announces more changes than there are elements is refused as it stands."""
    with pytest.raises(BadDelta, match="at most 60"):
        decoded([1] * 60, bytes([1, 1, 0x80]) + varint(61))
    with pytest.raises(BadDelta, match="more than 60"):
        decoded([1] * 60, bytes([1, 2]) + (bytes([0x80]) + varint(40)) * 2)
