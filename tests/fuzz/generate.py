"""What a peer may say, drawn from a `random.Random`: valid records, nearly valid ones, and bytes that are neither.

Made from the schema itself (pydantic's own reading of each field), so that a new message or field is fuzzed unasked.
One generator serves both uses: the soak seeds it, and the tests have hypothesis stand in for `Random`, which shrinks.
"""

from __future__ import annotations

import random
import types
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
import msgpack
from pydantic.fields import FieldInfo

from echo2.p2p import messages, postings
from echo2.p2p.codec import END, LENGTH
from echo2.p2p.identity import Identity
from echo2.p2p.messages import Message, Record
from echo2.p2p.reachability import DialBackReply, DialBackRequest

ITEMS_MAX = 4
"""Items of a generated array, characters of a text: enough to go wrong. What is huge is made huge on purpose."""

HUGE_BYTES = 70_000
"""Above the bound of most messages."""

KINDS: dict[str, type[Message]] = {kind.TYPE: kind for kind in [*Message.__subclasses__(), DialBackRequest]}
"""Every message of the wire."""

assert DialBackReply.TYPE in KINDS

Pools = dict[str, list[Any]]
"""Field name -> values that mean something to the receiver (lease ids that exist, the run's name, ...)."""

Draw = Callable[["Maker"], Any]

POOLED = 0.75
"""Share of the fields with a pool that are taken from it."""

SIGNED_RECORDS: dict[tuple[str, str], tuple[str, type[Record]]] = {
    ("heartbeat", "body"): ("heartbeat", messages.HeartbeatBody),
    ("heartbeat-reply", "notice"): ("notice", messages.PoolNotice),
    ("manifest-reply", "manifest"): ("manifest", messages.Manifest),
    ("manifest-reply", "plan"): ("plan", messages.BroadcastPlan),
    ("manifest-reply", "ticket"): ("ticket", messages.Ticket),
    ("chunk-request", "ticket"): ("ticket", messages.Ticket),
    ("publish", "manifest"): ("manifest", messages.Manifest),
    ("publish-reply", "plan"): ("plan", messages.BroadcastPlan),
    ("receipts-reply", "batch"): ("receipts", messages.ReceiptBatch),
    ("statement-reply", "statement"): ("statement", postings.Statement),
    ("welcome", "descriptor"): ("run", messages.RunDescriptor),
}
"""(message type, field) -> what is signed there: its label and record."""

HOW = ["valid"] * 6 + ["spoilt"] * 3 + ["mangled"] * 2 + ["other", "raw", "huge", "no-end", "twice"]


class Maker:
    """Draws for one receiver. `signer(label)` is whose signature it believes, `other` somebody else."""

    def __init__(self, rng: random.Random, pools: Pools, signer: Callable[[str], Identity], other: Identity) -> None:
        self.rng = rng
        self.pools = pools
        self._signer = signer
        self._other = other

    def chance(self, share: float) -> bool:
        """True in this share of cases."""
        return self.rng.random() < share

    def record(self, kind: type[Record]) -> dict[str, Any]:
        """The fields of a record that satisfies the schema, as plain values; mostly from the pools."""
        return {name: self.field(name, draw) for name, draw in _fields(kind).items()}

    def field(self, name: str, draw: Draw) -> Any:
        """One field's value."""
        pool = self.pools.get(name)
        return self.rng.choice(pool) if pool and self.chance(POOLED) else draw(self)

    def message(self, kind: type[Message]) -> dict[str, Any]:
        """A record of the wire whose signatures hold, mostly; else by another's key, or under another label."""
        body = self.record(kind)
        for name in body:
            if (kind.TYPE, name) not in SIGNED_RECORDS or (name in self.pools and self.chance(0.4)):
                continue
            label, record = SIGNED_RECORDS[kind.TYPE, name]
            body[name] = self.signed(label, self.record(record))
        return body

    def signed(self, label: str, content: Any) -> dict[str, Any]:
        """A signature, which mostly holds, over whatever it is."""
        how = self.rng.random()
        payload = msgpack.packb(content, use_bin_type=True)
        if how < 0.1:
            payload = self.mangled(payload)
        signer = self._other if 0.1 < how < 0.2 else self._signer(label)
        named = "ticket" if 0.2 < how < 0.25 and label != "ticket" else label
        return {"payload": payload, "signature": _signature(signer, named, payload)}

    def request(self, kind: type[Message]) -> bytes:
        """All that one peer sends on one stream where `kind` is expected: mostly right, often nearly, sometimes not."""
        how = self.rng.choice(HOW)
        if how == "raw":
            return self.rng.randbytes(self.rng.randrange(64))
        if how == "huge":
            return LENGTH.pack(self.rng.choice([1, HUGE_BYTES, 2**24, 2**31, 2**32 - 1])) + bytes(HUGE_BYTES)
        chosen = KINDS[self.rng.choice(sorted(KINDS))] if how == "other" else kind
        body = self.message(chosen)
        if how == "spoilt" and body:
            body = self.spoilt(body)
        data = frame(chosen.TYPE, body) + END
        if how == "mangled":
            return self.mangled(data)
        if how == "no-end":
            return data[:-4]
        return data + data if how == "twice" else data

    def bent(self, data: bytes) -> bytes:
        """Frames that some peer did send, with one thing changed inside a frame: it stays true to what was asked."""
        frames = unpacked(data)
        if not frames or self.chance(0.1):
            return self.mangled(data)
        at = self.rng.randrange(len(frames))
        kind, body = frames[at]
        frames[at] = kind, self._bent(KINDS.get(kind), body)
        return b"".join(frame(*one) for one in frames) + END

    def _bent(self, kind: type[Record] | None, body: Any) -> Any:
        if not isinstance(body, dict) or not body:
            return self.odd()
        body = dict(body)
        name = self.rng.choice(sorted(map(str, body)))
        inner = body.get(name)
        known = SIGNED_RECORDS.get((getattr(kind, "TYPE", ""), name))
        if known and isinstance(inner, dict) and isinstance(inner.get("payload"), bytes) and self.chance(0.9):
            label, record = known
            try:
                content = msgpack.unpackb(inner["payload"], raw=False, strict_map_key=False)
            except ValueError:
                content = {}
            body[name] = self.signed(label, self._bent(record, content))
        elif kind is not None and name in kind.model_fields and self.chance(0.7):
            body[name] = self.field(name, _fields(kind)[name])
        else:
            body = self.spoilt(body)
        return body

    def odd(self) -> Any:
        """A value that no field expects, or that one expects elsewhere."""
        rng = self.rng
        return rng.choice(_ODD)(rng)

    def spoilt(self, body: dict[str, Any]) -> dict[str, Any]:
        """The body with one thing wrong, at any depth: a field missing, one too many, or one with an odd value."""
        body = dict(body)
        name = self.rng.choice(sorted(map(str, body)))
        inner = body.get(name)
        if isinstance(inner, dict) and inner and self.chance(0.5):
            body[name] = self.spoilt(inner)
            return body
        if isinstance(inner, tuple | list) and inner and isinstance(inner[0], dict) and inner[0] and self.chance(0.5):
            body[name] = (self.spoilt(inner[0]), *inner[1:])
            return body
        how = self.rng.choice(["missing", "extra", "odd", "odd", "odd"])
        if how == "missing":
            body.pop(name, None)
        else:
            body[name if how == "odd" else name + "x"] = self.odd()
        return body

    def mangled(self, data: bytes) -> bytes:
        """Bytes with one accident: cut, doubled, a byte changed, junk put in, a length that lies."""
        rng = self.rng
        at = rng.randint(0, len(data))
        how = rng.choice(["cut", "flip", "insert", "double", "length", "tail"])
        if how == "cut":
            return data[:at]
        if how == "flip" and at < len(data):
            return data[:at] + bytes([data[at] ^ rng.randint(1, 255)]) + data[at + 1 :]
        if how == "insert":
            return data[:at] + rng.randbytes(rng.randint(1, 12)) + data[at:]
        if how == "double":
            return data + data
        if how == "length":
            return rng.choice([b"\x00\x00\x00\x00", b"\xff\xff\xff\xff", b"\x00\x01\x00\x01"]) + data[4:]
        return data + rng.randbytes(rng.randint(0, 12))


def frame(kind: Any, body: Any) -> bytes:
    """The frame as a peer that checks nothing would send it."""
    packed = msgpack.packb({"type": kind, "body": body}, use_bin_type=True)
    return LENGTH.pack(len(packed)) + packed


def unpacked(data: bytes) -> list[tuple[Any, Any]]:
    """(type, body) of each frame in front; stops at END and at whatever is no frame."""
    found = []
    while len(data) > LENGTH.size:
        (length,) = LENGTH.unpack(data[: LENGTH.size])
        try:
            raw = msgpack.unpackb(data[LENGTH.size : LENGTH.size + length], raw=False, strict_map_key=False)
            found.append((raw["type"], raw["body"]))
        except (ValueError, TypeError, KeyError, msgpack.UnpackException):
            break
        data = data[LENGTH.size + length :]
    return found


def _signature(signer: Identity, label: str, payload: bytes) -> bytes:
    return signer._key.sign(f"echo2/{label}/1".encode() + b"\0" + payload)


# The schema, read once.


@cache
def _fields(kind: type[Record]) -> dict[str, Draw]:
    return {name: _value(field.annotation, field.metadata) for name, field in kind.model_fields.items()}


def _value(kind: Any, metadata: list[Any]) -> Draw:
    """Draws values of one annotation within its bounds."""
    origin = get_origin(kind)
    if origin is Annotated:
        inner, *more = get_args(kind)
        flat = [part for one in more for part in (one.metadata if isinstance(one, FieldInfo) else [one])]
        return _value(inner, [*metadata, *flat])
    if origin is Literal:
        values = get_args(kind)
        return lambda maker: maker.rng.choice(values)
    if origin in (Union, types.UnionType):
        parts = [_value(part, metadata) for part in get_args(kind)]
        return lambda maker: maker.rng.choice(parts)(maker)
    if origin is tuple:
        low, high = _lengths(metadata)
        high = min(high, max(low, ITEMS_MAX))
        item = _value(get_args(kind)[0], [])
        return lambda maker: tuple(item(maker) for _ in range(maker.rng.randint(low, high)))
    if isinstance(kind, type) and issubclass(kind, Record):
        return lambda maker: maker.record(kind)
    return _plain(kind, metadata)


def _plain(kind: Any, metadata: list[Any]) -> Draw:
    low, high = _lengths(metadata)
    if kind is type(None):
        return lambda _maker: None
    if kind is bool:
        return lambda maker: maker.chance(0.5)
    if kind is int:
        least, most = _bounds(metadata, -(2**63), 2**64 - 1)
        edges = sorted({least, min(least + 1, most), most, *(one for one in (0, 1) if least <= one <= most)})
        return lambda maker: maker.rng.choice(
            [maker.rng.randint(least, min(most, least + 300)), maker.rng.choice(edges), maker.rng.randint(least, most)]
        )
    if kind is float:
        least, most = _bounds(metadata, -1e308, 1e308)
        fine = [one for one in (least, most, 0.0, 1.0, 30.0, 1e-9, 5e-324) if least <= one <= most]
        if any(isinstance(one, annotated_types.Gt) for one in metadata):
            fine = [one for one in fine if one > least]
        return lambda maker: maker.rng.choice([*fine, least + (most - least) * (1 - maker.rng.random())])
    if kind is bytes:
        most = min(high, max(low, 4 * ITEMS_MAX))
        return lambda maker: maker.rng.randbytes(maker.rng.randint(low, most))
    if any(getattr(one, "pattern", None) for one in metadata):
        alphabet = "123abcXYZ" if low > 1 else "ab1.-_"
        most = min(high, max(low, ITEMS_MAX))
        return lambda maker: (
            maker.rng.choice("a1B")
            + "".join(maker.rng.choice(alphabet) for _ in range(maker.rng.randint(max(low - 1, 0), most - 1)))
        )
    most = min(high, max(low, 2 * ITEMS_MAX))
    return lambda maker: "".join(maker.rng.choice(_CHARACTERS) for _ in range(maker.rng.randint(low, most)))


_CHARACTERS = "aZ09 /.-_\x00\n\x1b\u00e9\u202e\u4e2d\U0001f600\uffff"

_ODD: list[Callable[[random.Random], Any]] = [
    lambda _rng: None,
    lambda rng: rng.choice([True, False]),
    lambda rng: rng.randint(-(2**63), 2**64 - 1),
    lambda rng: rng.choice([0, -1, 1, 2**31, 2**53, 2**53 + 1, 2**63, 2**64 - 1]),
    lambda rng: rng.choice([float("nan"), float("inf"), -float("inf"), -0.0, 1e308, 5e-324, -1.0]),
    lambda rng: "".join(rng.choice(_CHARACTERS) for _ in range(rng.randrange(8))),
    lambda rng: rng.randbytes(rng.randrange(8)),
    lambda _rng: "x" * HUGE_BYTES,
    lambda _rng: bytes(HUGE_BYTES),
    lambda rng: [rng.randrange(256) for _ in range(rng.randrange(4))],
    lambda rng: {str(number): number for number in range(rng.randrange(3))},
    lambda rng: {rng.choice([0, None, b"k"]): 1},
    lambda rng: _nested(rng.choice([10, 500])),
    lambda rng: msgpack.ExtType(rng.randrange(128), rng.randbytes(4)),
    lambda rng: msgpack.Timestamp(rng.randrange(2**32), 0),
]
"""What no field expects, among it."""


def _nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def _lengths(metadata: list[Any]) -> tuple[int, int]:
    low = max([0, *(one.min_length for one in metadata if isinstance(one, annotated_types.MinLen))])
    high = min([1 << 20, *(one.max_length for one in metadata if isinstance(one, annotated_types.MaxLen))])
    return low, high


def _bounds(metadata: list[Any], least: Any, most: Any) -> tuple[Any, Any]:
    for one in metadata:
        step = 1 if isinstance(least, int) else 0
        if isinstance(one, annotated_types.Ge):
            least = max(least, one.ge)
        if isinstance(one, annotated_types.Gt):
            least = max(least, one.gt + step)
        if isinstance(one, annotated_types.Le):
            most = min(most, one.le)
        if isinstance(one, annotated_types.Lt):
            most = min(most, one.lt - step) if step else min(most, one.lt * (1 - 1e-9))
    return least, most
