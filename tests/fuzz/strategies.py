"""Hypothesis strategies for what a peer may say: valid records, nearly valid ones, and bytes that are neither.

Made from the schema itself (pydantic's own reading of each field), so that a new message or field is fuzzed unasked.
"""

from __future__ import annotations

import types
import typing
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
import msgpack
from hypothesis import strategies as st
from pydantic.fields import FieldInfo

from echo2.p2p import messages
from echo2.p2p.codec import END, LENGTH
from echo2.p2p.identity import Identity
from echo2.p2p.messages import Message, Record

ITEMS_MAX = 4
"""Items of a generated array, characters of a text: enough to go wrong. What is huge is made huge on purpose."""

HUGE_BYTES = 70_000
"""Above the bound of most messages."""

KINDS = {kind.TYPE: kind for kind in Message.__subclasses__()}
"""Every message of the wire."""

Pools = dict[str, list[Any]]
"""Field name -> values that mean something to the receiver (lease ids that exist, the run's name, ...)."""


def records(kind: type[Record], pools: Pools, *, known: float = 0.7) -> st.SearchStrategy[dict[str, Any]]:
    """The fields of a record that satisfies the schema, as plain values; mostly from `pools` where there is one."""
    return st.fixed_dictionaries(
        {name: _field(name, field, pools, known=known) for name, field in kind.model_fields.items()}
    )


def _field(name: str, field: FieldInfo, pools: Pools, *, known: float) -> st.SearchStrategy[Any]:
    made = _value(field.annotation, field.metadata, pools, known=known)
    if name not in pools:
        return made
    pooled = st.sampled_from(pools[name])
    return st.one_of(pooled, pooled, pooled, made) if known > 0.5 else st.one_of(pooled, made)


def _value(kind: Any, metadata: list[Any], pools: Pools, *, known: float) -> st.SearchStrategy[Any]:
    """Values of one annotation within its bounds."""
    origin = get_origin(kind)
    if origin is Annotated:
        inner, *more = get_args(kind)
        flat = [part for one in more for part in (one.metadata if isinstance(one, FieldInfo) else [one])]
        return _value(inner, [*metadata, *flat], pools, known=known)
    if origin is Literal:
        return st.sampled_from(get_args(kind))
    if origin in (Union, types.UnionType):
        return st.one_of([_value(part, metadata, pools, known=known) for part in get_args(kind)])
    if origin is tuple:
        low, high = _lengths(metadata)
        item = _value(get_args(kind)[0], [], pools, known=known)
        return st.lists(item, min_size=low, max_size=min(high, max(low, ITEMS_MAX))).map(tuple)
    if isinstance(kind, type) and issubclass(kind, Record):
        return records(kind, pools, known=known)
    return _plain(kind, metadata)


def _plain(kind: type, metadata: list[Any]) -> st.SearchStrategy[Any]:
    low, high = _lengths(metadata)
    if kind is type(None):
        return st.none()
    if kind is bool:
        return st.booleans()
    if kind is int:
        least, most = _bounds(metadata, -(2**63), 2**64 - 1)
        edges = sorted({least, min(least + 1, most), most})
        return st.one_of(st.integers(least, min(most, least + 300)), st.sampled_from(edges), st.integers(least, most))
    if kind is float:
        least, most = _bounds(metadata, -1e308, 1e308)
        return st.floats(least, most, allow_nan=False, exclude_min=_exclusive(metadata))
    if kind is bytes:
        return st.binary(min_size=low, max_size=min(high, max(low, 4 * ITEMS_MAX)))
    pattern = next((one.pattern for one in metadata if getattr(one, "pattern", None)), None)
    if pattern is not None:
        alphabet = "123abcXYZ" if low > 1 else "ab1.-_"
        first = st.sampled_from("a1B")
        rest = st.text(alphabet, min_size=max(low - 1, 0), max_size=min(high - 1, max(low, ITEMS_MAX)))
        return st.builds(lambda head, tail: head + tail, first, rest)
    return st.text(min_size=low, max_size=min(high, max(low, 2 * ITEMS_MAX)))


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


def _exclusive(metadata: list[Any]) -> bool:
    return any(isinstance(one, annotated_types.Gt) for one in metadata)


ODD_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(max_size=8),
    st.binary(max_size=8),
    st.just("x" * HUGE_BYTES),
    st.just(b"\x00" * HUGE_BYTES),
    st.lists(st.integers(0, 255), max_size=4),
    st.dictionaries(st.text(max_size=3), st.integers(0, 9), max_size=2),
)
"""What no field expects, among it."""


@st.composite
def spoilt(draw: Any, body: dict[str, Any]) -> dict[str, Any]:
    """The body with one thing wrong, at any depth: a field missing, one too many, or one with an odd value."""
    spoilt_body = dict(body)
    name = draw(st.sampled_from(sorted(spoilt_body)))
    inner = spoilt_body[name]
    if isinstance(inner, dict) and inner and draw(st.booleans()):
        spoilt_body[name] = draw(spoilt(inner))
        return spoilt_body
    if isinstance(inner, tuple) and inner and isinstance(inner[0], dict) and draw(st.booleans()):
        spoilt_body[name] = (draw(spoilt(inner[0])), *inner[1:])
        return spoilt_body
    how = draw(st.sampled_from(["missing", "extra", "odd", "odd", "odd"]))
    if how == "missing":
        del spoilt_body[name]
    elif how == "extra":
        spoilt_body[draw(st.text(max_size=4))] = draw(ODD_VALUES)
    else:
        spoilt_body[name] = draw(ODD_VALUES)
    return spoilt_body


def signed(signer: Identity, label: str, content: Any) -> dict[str, Any]:
    """A signature that holds, over whatever it is."""
    payload = msgpack.packb(content, use_bin_type=True)
    return {"payload": payload, "signature": signer._key.sign(f"echo2/{label}/1".encode() + b"\0" + payload)}


def frame(kind: str, body: Any) -> bytes:
    """The frame as a peer that checks nothing would send it."""
    packed = msgpack.packb({"type": kind, "body": body}, use_bin_type=True)
    return LENGTH.pack(len(packed)) + packed


@st.composite
def mangled(draw: Any, data: bytes) -> bytes:
    """Bytes with one accident: cut, doubled, a byte changed, junk put in, a length that lies."""
    at = draw(st.integers(0, len(data)))
    how = draw(st.sampled_from(["cut", "flip", "insert", "double", "length", "tail"]))
    if how == "cut":
        return data[:at]
    if how == "flip" and at < len(data):
        return data[:at] + bytes([data[at] ^ draw(st.integers(1, 255))]) + data[at + 1 :]
    if how == "insert":
        return data[:at] + draw(st.binary(min_size=1, max_size=12)) + data[at:]
    if how == "double":
        return data + data
    if how == "length":
        return draw(st.sampled_from([b"\x00\x00\x00\x00", b"\xff\xff\xff\xff", b"\x00\x01\x00\x01"])) + data[4:]
    return data + draw(st.binary(max_size=12))


@st.composite
def requests(draw: Any, kind: type[Message], pools: Pools, sign: typing.Callable[..., Any]) -> bytes:
    """All that one peer sends on one stream where `kind` is expected: mostly right, often nearly, sometimes not at all.

    `sign(field name, body)` may replace the `Signed` fields by signatures that hold, or by those of somebody else.
    """
    how = draw(
        st.sampled_from(["valid"] * 6 + ["spoilt"] * 3 + ["mangled"] * 2 + ["other", "raw", "huge", "no-end", "twice"])
    )
    chosen = kind if how != "other" else draw(st.sampled_from(sorted(KINDS.values(), key=lambda one: one.TYPE)))
    body = draw(records(chosen, pools))
    body = draw(sign(chosen, body))
    if how == "spoilt" and body:
        body = draw(spoilt(body))
    data = frame(chosen.TYPE, body) + END
    if how == "mangled":
        return draw(mangled(data))
    if how == "raw":
        return draw(st.binary(max_size=64))
    if how == "huge":
        return LENGTH.pack(draw(st.integers(1, 2**32 - 1))) + bytes(HUGE_BYTES)
    if how == "no-end":
        return data[:-4]
    if how == "twice":
        return data + data
    return data


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
    ("welcome", "descriptor"): ("run", messages.RunDescriptor),
}
"""(message type, field) -> what is signed there: its label and record."""
