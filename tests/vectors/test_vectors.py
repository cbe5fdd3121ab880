"""The bytes of the wire, pinned: golden vectors of every message and signed record, malformed ones with their error.

A vector is a text file: `key: value` lines, an empty line, then a hexdump with a comment on each element. The golden
ones were written once by `python tests/vectors/test_vectors.py` from `examples.py`. A change to one of them is a change
of `WIRE_VERSION`, so the script never overwrites a file. The malformed ones are written by hand.
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import msgpack
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # pytest's importlib mode adds no folder

from examples import MESSAGES, SIGNED, SIGNER

from echo2.p2p import errors, messages
from echo2.p2p.channel import Channel
from echo2.p2p.codec import END, LENGTH, decode_frame, encode_frame, encode_record
from echo2.p2p.identity import open_signed

FOLDER = Path(__file__).parent
GOLDEN = FOLDER / "golden"
MALFORMED = FOLDER / "malformed"

BY_NAME = {kind.__name__: kind for kind in messages.Message.__subclasses__() if kind.__module__.startswith("echo2.")}
"""Every message type of the wire."""


def read_vector(path):
    """The header of a vector file, and its bytes."""
    head, _, dump = path.read_text().partition("\n\n")
    header = dict(line.split(": ", 1) for line in head.splitlines() if not line.startswith("#"))
    return header, bytes.fromhex("".join(line.partition("#")[0] for line in dump.splitlines()))


class OneStream:
    """A stream that has received some bytes and then the end, a few at a time."""

    peer = SIGNER.peer_id

    def __init__(self, data):
        self.data = data

    async def receive_parts(self, max_bytes):
        count = min(max_bytes, 7)
        part, self.data = self.data[:count], self.data[count:]
        return [part] if part else []

    def keeps(self, count):
        """It came and went with the test."""


# Golden.


def test_every_message_and_every_signed_record_has_an_example():
    """No message type, and no label that is signed, is without a golden vector."""
    assert {type(message).__name__ for message in MESSAGES} == set(BY_NAME)
    labels = {"manifest", "run", "heartbeat", "notice", "plan", "ticket", "receipts", "statement"}
    assert {label for label, _ in SIGNED} == labels


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.TYPE)
async def test_golden_message(message):
    """A message encodes to its pinned bytes, and those bytes decode to it."""
    header, data = read_vector(GOLDEN / f"{message.TYPE}.hex")
    assert header == {"message": type(message).__name__}
    assert encode_frame(message) == data
    assert await Channel(OneStream(data + END)).receive(type(message)) == message


@pytest.mark.parametrize(("label", "record"), SIGNED, ids=[label for label, _ in SIGNED])
def test_golden_signed_record(label, record):
    """A record signs to its pinned payload and signature, and opens to itself under that signer and label."""
    header, payload = read_vector(GOLDEN / f"signed-{label}.hex")
    signed = messages.Signed(payload=payload, signature=bytes.fromhex(header["signature"]))
    assert (header["record"], header["signer"]) == (type(record).__name__, SIGNER.peer_id)
    assert SIGNER.sign(label, record) == signed
    assert open_signed(signed, SIGNER.peer_id, label, type(record)) == record


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.TYPE)
def test_no_prefix_of_a_golden_body_is_a_message(message):
    """However a body is cut, it is an error, never a shorter message."""
    _, data = read_vector(GOLDEN / f"{message.TYPE}.hex")
    body = data[LENGTH.size :]
    for length in range(0, len(body), max(1, len(body) // 64)):
        with pytest.raises(errors.ProtocolError):
            decode_frame(body[:length], type(message))


# Malformed.


@pytest.mark.parametrize("path", sorted(MALFORMED.glob("frame-*.hex")), ids=lambda path: path.stem)
async def test_malformed_frame(path):
    """A malformed frame raises the error that its vector names, through the channel."""
    header, data = read_vector(path)
    with pytest.raises(errors.ProtocolError) as caught:
        await Channel(OneStream(data)).receive(BY_NAME[header["expect"]])
    assert type(caught.value).__name__ == header["error"]
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("path", sorted(MALFORMED.glob("signed-*.hex")), ids=lambda path: path.stem)
def test_malformed_signed_record(path):
    """A signed record that is forged or malformed raises the error that its vector names."""
    header, payload = read_vector(path)
    signed = messages.Signed(payload=payload, signature=bytes.fromhex(header["signature"]))
    with pytest.raises(errors.ProtocolError) as caught:
        open_signed(signed, header["signer"], header["label"], getattr(messages, header["record"]))
    assert type(caught.value).__name__ == header["error"]


def test_there_is_a_malformed_vector_for_every_error_a_decoder_raises():
    """Each class of failure of codec, channel and identity is pinned by at least one vector."""
    named = {read_vector(path)[0]["error"] for path in MALFORMED.glob("*.hex")}
    expected = {"Truncated", "FrameTooLarge", "MalformedFrame", "UnexpectedMessage", "SchemaViolation", "BadSignature"}
    assert named == expected


# Writing.


def dump(data, *, framed):
    """Hexdump of a frame or payload, one msgpack element a line."""
    lines = [f"{data[:4].hex()}  # length: {len(data) - 4} bytes follow"] if framed else []
    start = 4 if framed else 0
    _element(data, start, 0, lines)
    return "\n".join(lines) + "\n"


def _element(data, start, depth, lines):
    """Append the lines of one element; return where it ends."""
    pad = "  " * depth
    first = data[start]
    if 0x80 <= first <= 0x8F or 0x90 <= first <= 0x9F or first in (0xDC, 0xDE):
        is_map = first < 0x90 or first == 0xDE
        head = 1 if first < 0xA0 else 3
        count = first & 0x0F if head == 1 else struct.unpack_from(">H", data, start + 1)[0]
        lines.append(f"{pad}{data[start : start + head].hex()}  # {'map' if is_map else 'array'} of {count}")
        end = start + head
        for _ in range(count):
            if is_map:
                end = _element(data, end, depth + 1, lines)
            end = _element(data, end, depth + (2 if is_map else 1), lines)
        return end
    unpacker = msgpack.Unpacker(raw=False)
    unpacker.feed(data[start:])
    value = unpacker.unpack()
    end = start + unpacker.tell()
    text = f"{len(value)} bytes" if isinstance(value, bytes) else repr(value)
    raw = data[start:end].hex()
    pieces = [raw[i : i + 64] for i in range(0, len(raw), 64)]
    lines += [f"{pad}{pieces[0]}  # {text}", *(f"{pad}{piece}" for piece in pieces[1:])]
    return end


def _write(path, header, body):
    if path.exists():
        print(f"{path.name} exists: a golden vector is never overwritten")
        return
    path.write_text("".join(f"{key}: {value}\n" for key, value in header.items()) + "\n" + body)


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for example in MESSAGES:
        _write(
            GOLDEN / f"{example.TYPE}.hex",
            {"message": type(example).__name__},
            dump(encode_frame(example), framed=True),
        )
    for name, example in SIGNED:
        made = SIGNER.sign(name, example)
        assert made.payload == encode_record(example)
        about = {"record": type(example).__name__, "signer": SIGNER.peer_id, "signature": made.signature.hex()}
        _write(GOLDEN / f"signed-{name}.hex", about, dump(made.payload, framed=False))
