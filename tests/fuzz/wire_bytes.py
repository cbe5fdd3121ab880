"""Raw bytes for each layer of the wire (`wire.LEVELS`), drawn from a `random.Random`."""

from __future__ import annotations

import random
from collections.abc import Callable

from fuzz.case import Step
from fuzz.generate import Maker
from fuzz.wire import HEADER, HELLO_LINES, LEVELS, line

from echo2.p2p.codec import END, encode_frame
from echo2.p2p.identity import Identity
from echo2.p2p.messages import Ack

BAD = Identity(b"\x32" * 32)

MESSAGE = encode_frame(Ack(count=1)) + END

TEXTS = [
    "ls",
    "na",
    "/noise",
    "/plaintext/2.0.0",
    "/yamux/1.0.0",
    "/echo2/x/1",
    "/echo2/hello/1",
    "",
    "\u00e9\u4e2d",
    "a" * 59,
]

TARGETS = ("hello", "leases", "chunks")
"""Protocols the target serves: one request, an echo, a sink of bulk."""


def _mangled(rng: random.Random, data: bytes) -> bytes:
    return Maker(rng, {}, lambda _label: BAD, BAD).mangled(data)


def _frame(rng: random.Random, streams: list[int]) -> bytes:
    """A yamux frame with fields from the edges of their ranges."""
    kind = rng.choice([0, 0, 0, 1, 1, 1, 2, 3, rng.randrange(256)])
    flags = rng.choice([0, 0, 1, 1, 2, 4, 8, 3, 5, 15, rng.randrange(65_536)])
    stream = rng.choice([*streams, *streams, 0, 1, 2, 3, 5, 2**32 - 1, rng.randrange(2**32)])
    payload = rng.randbytes(rng.randrange(20))
    length = rng.choice([len(payload)] * 6 + [0, 1, 2**18, 2**18 + 1, 2**23, 2**31, 2**32 - 1])
    version = rng.choice([0] * 19 + [1])
    return HEADER.pack(version, kind, flags, stream, length) + (payload if kind == 0 else b"")


def yamux_bytes(rng: random.Random) -> bytes:
    """Frames that are right, wrong, cut or too many."""
    first = rng.randrange(1, 2000, 2)
    opened = b"".join(HEADER.pack(0, 1, 1, first + 2 * n, 0) for n in range(rng.randrange(3)))
    data = opened + b"".join(_frame(rng, [first, first + 2]) for _ in range(rng.randint(1, 12)))
    how = rng.choice(["as-is"] * 24 + ["mangled"] * 5 + ["flood", "opens", "drops"])
    if how == "flood":
        return data * rng.randint(2, 300)
    if how == "opens":
        return b"".join(HEADER.pack(0, 1, 1, first + 2 * n, 0) for n in range(rng.randint(1, 600)))
    if how == "drops":
        return b"".join(HEADER.pack(0, 1, flags, first + 2 * n, 0) for n in range(300) for flags in (1, 8))
    return _mangled(rng, data) if how == "mangled" else data


def line_bytes(rng: random.Random, proper: bytes) -> bytes:
    """Lines of multistream-select: right, mangled, with lengths that lie, not UTF-8, or none."""
    lines = b"".join(line(rng.choice(TEXTS)) for _ in range(rng.randrange(5)))
    raw = rng.choice([rng.randbytes(rng.randrange(40)), b"\xff" * 10, b"\x04\xff\xfe\xfd\x0a", b"\x80\x80\x01a"])
    choices = [_mangled(rng, proper), _mangled(rng, proper), lines, raw, proper + raw, proper + lines, lines * 50]
    return rng.choice(choices)


def noise_bytes(rng: random.Random) -> bytes:
    """Messages with their 16-bit lengths; contents of any kind."""
    parts = [rng.randbytes(rng.choice([32, rng.randrange(100)])) for _ in range(rng.randrange(5))]
    data = b"".join(len(part).to_bytes(2, "big") + part for part in parts)
    return rng.choice([data, data, _mangled(rng, data + b"\0\0\0\0"), b"\xff\xff" + bytes(70_000)])


def message_bytes(rng: random.Random) -> bytes:
    """Where a message is expected."""
    return rng.choice([_mangled(rng, MESSAGE), _mangled(rng, MESSAGE), rng.randbytes(rng.randrange(64)), MESSAGE * 3])


SAYINGS: dict[str, Callable[[random.Random], bytes]] = {
    "port": lambda rng: rng.choice(
        [rng.randbytes(rng.randrange(64)), line_bytes(rng, HELLO_LINES["noise"]), b"GET / HTTP/1.1\r\n\r\n"]
    ),
    "noise": noise_bytes,
    "frames": noise_bytes,
    "secured": lambda rng: line_bytes(rng, HELLO_LINES["yamux"]),
    "yamux": yamux_bytes,
    "stream": lambda rng: line_bytes(rng, HELLO_LINES["protocol"]),
    "protocol": message_bytes,
}


def draw(rng: random.Random, levels: tuple[str, ...] = (*LEVELS, "yamux", "yamux")) -> Step:
    """Bytes for one connection, or one stream of a connection."""
    level = rng.choice(levels)
    protocol = rng.choice(TARGETS) if level == "protocol" else ""
    return Step(level, protocol, SAYINGS[level](rng), rng.choice(["read", "reset", "silent"]))
