"""A snapshot as the difference to another one: files in, files out, and nothing wrong is ever left behind."""

import hashlib
import io
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from echo2.p2p import delta
from echo2.p2p.delta import HEAD, MAGIC, SPAN, decode_delta, encode_delta, read_head
from echo2.p2p.delta_bits import varint
from echo2.p2p.delta_frames import CLASSES, SAME, STORED, XORED, decode_frame, encode_frame, frame_bytes
from echo2.p2p.errors import BadDelta
from echo2.p2p.gguf_layout import Kind, Span, layout_of

MIB = 1 << 20


def gguf(tensors, tokens=("a", "bc")):
    """A GGUF file of [(ggml type, shape, bytes)], with the kinds of metadata that ours have."""

    def text(value):
        return struct.pack("<Q", len(value)) + value

    pairs = [
        text(b"general.architecture") + struct.pack("<I", 8) + text(b"llama"),
        text(b"tokens") + struct.pack("<IIQ", 9, 8, len(tokens)) + b"".join(text(each.encode()) for each in tokens),
        text(b"types") + struct.pack("<IIQ", 9, 5, 2) + bytes(8),
        text(b"flag") + struct.pack("<IB", 7, 1),
    ]
    data, infos = b"", b""
    for number, (kind, shape, content) in enumerate(tensors):
        data += bytes(-len(data) % 32)
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        infos += text(f"t{number}".encode()) + dims + struct.pack("<IQ", kind, len(data))
        data += content
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs)) + b"".join(pairs) + infos
    return head + bytes(-len(head) % 32) + data + bytes(-len(data) % 32)


def weights(count, seed=0, moved=0.0, spread=0.2):
    rng = np.random.default_rng(seed)
    values = rng.normal(0, spread, count).astype(np.float32)
    return values + (moved * np.random.default_rng(seed + 99).choice([-1, 1], count)).astype(np.float32)


def bf16(values):
    return (values.view(np.uint32) >> 16).astype("<u2").tobytes()


def q8_0(values):
    blocks = values.reshape(-1, 32)
    scale = np.abs(blocks).max(axis=1, keepdims=True) / 127
    whole = np.rint(blocks / scale).astype(np.int8)
    return np.concatenate([scale.astype("<f2").view(np.uint8), whole.view(np.uint8)], axis=1).tobytes()


def model(moved=0.0, count=40_000, seed=0):
    """One matrix of each kind, a vector between them."""
    every = weights(count, seed, moved)
    return gguf(
        [
            (30, (200, count // 200), bf16(every)),
            (0, (100,), (1 + weights(100, 5, moved)).astype("<f4").tobytes()),
            (1, (200, count // 200), every.astype("<f2").tobytes()),
            (8, (32, count // 32), q8_0(every)),
        ]
    )


class Case:
    """Two files and the delta between them."""

    def __init__(self, folder, base, new):
        self.base, self.new, self.delta, self.out = (folder / name for name in ("base", "new", "delta", "out"))
        self.base.write_bytes(base)
        self.new.write_bytes(new)
        self.content = new
        encode_delta(self.base, self.new, self.delta)
        self.bytes = self.delta.read_bytes()

    def decode(self, data=None):
        self.out.unlink(missing_ok=True)
        stream = io.BytesIO(self.bytes if data is None else data)
        sha256 = hashlib.sha256(self.content).digest()
        decode_delta(self.base, stream, self.out, sha256=sha256, length_bytes=len(self.content))
        return self.out.read_bytes()

    def refuses(self, data, words=None):
        with pytest.raises(BadDelta, match=words):
            self.decode(data)
        assert not self.out.exists()
        assert not self.out.with_name("out.partial").exists()


@pytest.fixture
def case(tmp_path):
    return Case(tmp_path, model(), model(moved=1e-4))


def test_the_layout_of_a_gguf_file():
    """Header, each tensor by its type, padding between them; neighbours of one type are one span."""
    same = bf16(weights(64))
    data = gguf(
        [(30, (64,), same), (30, (8, 8), same), (0, (3,), bytes(12)), (8, (32, 2), bytes(68)), (2, (32,), b"x" * 18)]
    )
    start = len(data) - (256 + 32 + 96 + 32)
    spans = layout_of(io.BytesIO(data), len(data))
    assert spans == (
        Span(Kind.BYTES, start),
        Span(Kind.BF16, 256),
        Span(Kind.F32, 12),
        Span(Kind.BYTES, 20),
        Span(Kind.Q8_0, 68),
        Span(Kind.BYTES, 28 + 32),
    )


@given(st.data())
def test_a_damaged_gguf_file_is_bytes(data):
    """Whatever it says of itself, the spans cover the file once and none reaches beyond it."""
    content = bytearray(model(count=6400))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, 400))] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.integers(0, len(content)))]
    spans = layout_of(io.BytesIO(bytes(content)), len(content))
    assert sum(span.length_bytes for span in spans) == len(content)


def test_a_delta_gives_the_new_snapshot(case):
    """Every kind of tensor, bit for bit; and of what moved a little it is far smaller than the file."""
    assert case.decode() == case.content
    assert len(case.bytes) < len(case.content) / 3


def test_a_small_move_makes_a_small_delta(tmp_path):
    """Weights of a real spread moved by 1e-6: below 1 % of a file in bf16, and of one in Q8_0."""
    for kind, form in ((30, bf16), (8, q8_0)):
        base, new = (gguf([(kind, (1024, 400), form(weights(409_600, 0, moved)))]) for moved in (0, 1e-6))
        folder = tmp_path / str(kind)
        folder.mkdir()
        case = Case(folder, base, new)
        assert case.decode() == new
        assert len(case.bytes) < 0.01 * len(new)


@pytest.mark.parametrize(
    ("base", "new"),
    [
        (b"", b"something"),
        (b"something", b""),
        (b"abc" * 100, b"abc" * 100),
        (bytes(1000), bytes(999) + b"longer than before"),
        (b"other" * 500, model(count=6400)),
        (model(count=6400), model(count=12_800)),
    ],
    ids=["from nothing", "to nothing", "the same", "longer", "another kind", "another model"],
)
def test_any_two_files_have_a_delta(tmp_path, base, new):
    """Another length and another layout cost bytes, not correctness."""
    assert Case(tmp_path, base, new).decode() == new


def test_the_same_files_give_the_same_bytes(case, tmp_path):
    """Nothing of time, place or chance is in a delta."""
    again = tmp_path / "elsewhere"
    again.mkdir()
    assert Case(again, case.base.read_bytes(), case.content).bytes == case.bytes


def test_several_frames(tmp_path, monkeypatch):
    """A span of more than a frame holds is cut, at whole elements."""
    assert frame_bytes(Kind.Q8_0) % 34 == 0
    monkeypatch.setattr(delta, "frame_bytes", lambda kind: 34 * 60 if kind == Kind.Q8_0 else 4096)
    case = Case(tmp_path, model(), model(moved=1e-4))
    assert case.decode() == case.content


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_bits_are_numbers(kind, data):
    """NaN, infinities, both zeros and moves across zero come back bit for bit."""
    width = {Kind.F32: 4, Kind.Q8_0: 34}.get(kind, 2)
    count = data.draw(st.integers(1, 12)) * width
    base = np.frombuffer(data.draw(st.binary(min_size=count, max_size=count)), np.uint8)
    new = base.copy()
    for place in data.draw(st.lists(st.integers(0, count - 1), max_size=6)):
        new[place] ^= data.draw(st.integers(0, 255))
    code, payload = encode_frame(kind, base, new)
    frame = base.copy()
    decode_frame(kind, code, memoryview(payload), frame)
    assert frame.tobytes() == new.tobytes()


def test_memory_does_not_grow_with_the_file(tmp_path):
    """Encoding and decoding take less than 64 MiB beside files of several frames."""
    rng = np.random.default_rng(0)
    base, new = tmp_path / "base", tmp_path / "new"
    elements = 8 * MIB
    values = np.tile(weights(MIB), elements // MIB)
    base.write_bytes(gguf([(30, (MIB, elements // MIB), bf16(values))]))
    values += (1e-4 * rng.choice([-1.0, 1.0], MIB).astype(np.float32)).repeat(elements // MIB)
    new.write_bytes(gguf([(30, (MIB, elements // MIB), bf16(values))]))
    del values
    sha256 = hashlib.sha256(new.read_bytes()).digest()
    tracemalloc.start()
    encode_delta(base, new, tmp_path / "delta")
    with (tmp_path / "delta").open("rb") as file:
        decode_delta(base, file, tmp_path / "out", sha256=sha256, length_bytes=new.stat().st_size)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 * MIB


# what a hostile or broken sender can do


@given(cut=st.integers(0, 10_000_000))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
def test_a_cut_delta_is_refused(case, cut):
    """At whatever byte."""
    case.refuses(case.bytes[: cut % len(case.bytes)])


@given(place=st.integers(0, 10_000_000), value=st.integers(1, 255))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
def test_a_damaged_delta_is_refused(case, place, value):
    """A changed byte anywhere costs the delta, or is one that says nothing (a bit of padding): never a wrong file."""
    damaged = bytearray(case.bytes)
    place = place % len(damaged) if value % 2 else place % (HEAD.size + 9 * 8)
    damaged[place] ^= value
    try:
        assert case.decode(bytes(damaged)) == case.content
    except BadDelta:
        assert not case.out.exists()
        assert not case.out.with_name("out.partial").exists()


@given(data=st.binary(max_size=400))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_garbage_is_refused(case, data):
    """With or without the right head before it."""
    case.refuses(data)
    head = HEAD.size + SPAN.size * len(read_head(io.BytesIO(case.bytes)).spans)
    case.refuses(case.bytes[:head] + data)


def test_more_after_the_end_is_refused(case):
    """A delta ends where its last frame does."""
    case.refuses(case.bytes + b"x", "goes on")


def test_another_base_is_refused(case):
    """A base of the same length with one other bit makes another snapshot, which is not kept."""
    data = bytearray(case.base.read_bytes())
    data[-200] ^= 1
    case.base.write_bytes(data)
    case.refuses(case.bytes, "from the base that is here")
    case.base.write_bytes(data[:-1])
    case.refuses(case.bytes, "another base")


def test_only_the_announced_snapshot_is_made(case):
    """What the delta says of itself decides nothing: the caller's hash does."""
    with pytest.raises(BadDelta, match="another snapshot"):
        decode_delta(case.base, io.BytesIO(case.bytes), case.out, sha256=bytes(32), length_bytes=len(case.content))
    lie = bytearray(case.bytes)
    lie[-1] ^= 1
    case.refuses(bytes(lie))


def test_nothing_is_written_over(case):
    """A file that is there already stays."""
    case.out.write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        decode_delta(case.base, io.BytesIO(case.bytes), case.out, sha256=bytes(32), length_bytes=1)
    with pytest.raises(FileExistsError):
        encode_delta(case.base, case.new, case.out)
    assert case.out.read_bytes() == b"mine"


def crafted(new_bytes, spans, frames, base_bytes=1000, count=None):
    head = HEAD.pack(MAGIC, bytes(32), bytes(32), base_bytes, new_bytes, len(spans) if count is None else count)
    return head + b"".join(SPAN.pack(*span) for span in spans) + frames


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (crafted(1000, [], b"", count=2**32 - 1), "spans"),
        (crafted(1000, [(9, 1000)], b""), "kind 9"),
        (crafted(0, [(0, 0)], b""), "0 bytes long"),
        (crafted(1000, [(0, 999)], b""), "cover 999"),
        (crafted(2000, [(0, 2000)], b""), "beyond the end"),
        (crafted(2**63, [(5, 2**63 - 1), (5, 1), (0, 1)], b""), "beyond the end"),
    ],
    ids=["many spans", "unknown kind", "empty span", "a gap", "beyond the base", "huge"],
)
def test_a_crafted_head_is_refused(data, words):
    """Before anything is made of it."""
    with pytest.raises(BadDelta, match=words):
        read_head(io.BytesIO(data))


def test_a_payload_longer_than_its_frame_is_refused_unread(tmp_path):
    """The announced length is bounded by the frame's before so much is read."""
    base = tmp_path / "base"
    base.write_bytes(bytes(1000))
    data = crafted(1000, [(0, 1000)], bytes([STORED]) + varint(2**40))
    with pytest.raises(BadDelta, match="at most 1000"):
        decode_delta(base, io.BytesIO(data), tmp_path / "out", sha256=bytes(32), length_bytes=1000)


def test_a_bomb_is_refused_at_its_frame_s_length():
    """Deflated zeros, a thousand times longer than the frame: nothing beyond the frame is inflated."""
    _, payload = encode_frame(Kind.BYTES, np.zeros(4 * MIB, np.uint8), np.full(4 * MIB, 7, np.uint8))
    frame = np.zeros(4096, np.uint8)
    tracemalloc.start()
    with pytest.raises(BadDelta, match="does not inflate to 4096"):
        decode_frame(Kind.BYTES, XORED, memoryview(payload), frame)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < MIB


@pytest.mark.parametrize(
    ("kind", "code", "payload"),
    [
        (Kind.BYTES, SAME, b"x"),
        (Kind.BYTES, STORED, b"x" * 33),
        (Kind.BYTES, XORED, b"garbage"),
        (Kind.BYTES, XORED, b""),
        (Kind.BYTES, CLASSES, bytes([0, 0, 0, 0, 0])),
        (Kind.BF16, CLASSES, b""),
        (Kind.BF16, CLASSES, bytes([9, 3])),
        (Kind.Q8_0, CLASSES, bytes([0, 0, 0, 0, 0])),
        (Kind.BF16, 4, b""),
    ],
)
def test_a_frame_that_nobody_wrote_is_refused(kind, code, payload):
    """Codes that are not, or not for this kind; payloads too long, too short, or senseless."""
    with pytest.raises(BadDelta):
        decode_frame(kind, code, memoryview(payload), np.zeros(34, np.uint8))
