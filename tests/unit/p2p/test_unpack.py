"""What a frame may cost to be read: bounded by its length, and far above what any record of ours needs."""

from __future__ import annotations

import struct
import tracemalloc

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.p2p.codec import decode_frame, decode_record, encode_frame, encode_record
from echo2.p2p.errors import MalformedFrame, SchemaViolation
from echo2.p2p.messages import (
    SAMPLES_MAX,
    Finished,
    Hello,
    LearnerReport,
    Message,
    Record,
    RolloutRecord,
    Slice,
    SubmitRequest,
)
from echo2.p2p.unpack import ITEMS_MIN, TooDense, longest, unpack

NIL, EMPTY_MAP, EMPTY_ARRAY = b"\xc0", b"\x80", b"\x90"


def array(count, items=b""):
    return b"\xdd" + struct.pack(">I", count) + items


def frame(kind, name, value):
    head = msgpack.packb({"type": kind.TYPE, "body": {name: None}})
    return head[:-1] + value


def peak_bytes(call):
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "item", [EMPTY_MAP, EMPTY_ARRAY, NIL, b"\x81\xa1x\x80"], ids=["maps", "arrays", "nil", "nested"]
)
def test_a_frame_of_the_smallest_values_is_refused_before_they_fill_memory(item):
    """As one array, and as many arrays of the most that one may hold."""
    one = frame(SubmitRequest, "slices", array(1 << 18, item * (1 << 18)))
    many = frame(SubmitRequest, "slices", array(64, array(256, item * 256) * 64))

    def refused(body):
        with pytest.raises(MalformedFrame):
            decode_frame(body, SubmitRequest)

    for body in (one, many):
        assert peak_bytes(lambda body=body: refused(body)) < 3 * len(body) + 500_000


def test_arrays_that_only_announce_take_no_memory():
    """Each in the one before, a million values in each: eight megabytes for five bytes, if it were believed."""
    body = frame(SubmitRequest, "slices", array(1 << 20) * 1000)

    def refused():
        with pytest.raises(MalformedFrame):
            decode_frame(body, SubmitRequest)

    assert peak_bytes(refused) < 500_000
    within = frame(SubmitRequest, "slices", array(SAMPLES_MAX) * 1000)
    with pytest.raises(MalformedFrame):
        decode_frame(within, SubmitRequest)


def test_a_record_with_a_thousand_errors_is_refused_without_writing_them_up():
    """It says how many there are; with a few, it says which is the first."""
    many = {"run": "r", "slices": tuple({"rollouts": (None,) * 200} for _ in range(4))}
    with pytest.raises(SchemaViolation, match=r"^SubmitRequest: 8\d\d errors$"):
        decode_record(msgpack.packb(many), SubmitRequest)
    with pytest.raises(SchemaViolation, match=r"SubmitRequest\.slices: "):
        decode_record(msgpack.packb({"run": "r", "slices": None}), SubmitRequest)


def every_record(kind=Record):
    for each in kind.__subclasses__():
        if each.__module__.startswith("echo2."):
            yield each
            yield from every_record(each)


def test_every_tuple_on_the_wire_is_bounded():
    """Else there is no telling how long an array may be; what stands in a record counts for it."""
    assert {kind.__name__: longest(kind) for kind in every_record()}
    assert longest(SubmitRequest) == SAMPLES_MAX
    assert longest(Hello) < ITEMS_MIN
    assert longest(LearnerReport) == 65_536

    class Endless(Record):
        numbers: tuple[int, ...]

    with pytest.raises(TypeError, match=r"Endless\.numbers is a tuple without a bound"):
        longest(Endless)


def test_the_densest_records_are_read():
    """Samples of one token, and drops without a reason, thousands of each in a frame."""
    rollouts = tuple(RolloutRecord(sample=n, tokens=b"1234", logprobs=b"1234", finish="stop") for n in range(256))
    lease = Slice(lease_id=bytes(16), manifest_hash=bytes(32), rollouts=rollouts)
    finished = Finished(lease_id=bytes(16), sample=0, state="stale", step=0, reason="")
    messages: list[Message] = [
        SubmitRequest(run="r", slices=(lease,) * 8),
        LearnerReport(run="r", epoch=0, version=0, finished=(finished,) * 4096, steps=(), status=""),
    ]
    for message in messages:
        assert decode_frame(encode_frame(message)[4:], type(message)) == message
        assert decode_record(encode_record(message), type(message)) == message


@given(
    st.recursive(st.none() | st.integers(-100, 2**40) | st.text(max_size=9), lambda each: st.lists(each, max_size=9))
)
def test_what_is_small_is_read_as_it_is(value):
    """The bounds are no bounds for what any program of ours writes."""

    def tupled(each):
        return tuple(map(tupled, each)) if isinstance(each, list) else each

    assert unpack(msgpack.packb(value)) == tupled(value)


def test_too_dense_is_told_apart():
    """For whoever reads a log."""
    with pytest.raises(TooDense, match="too many values for its length"):
        unpack(array(ITEMS_MIN, array(ITEMS_MIN, EMPTY_MAP * ITEMS_MIN) * ITEMS_MIN))
