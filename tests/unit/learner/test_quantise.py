"""Number formats of a snapshot, against gguf-py's quantiser and llama.cpp's own."""

from __future__ import annotations

import ctypes
from pathlib import Path

import llama_cpp
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from echo2.learner.quantise import BLOCK, PIECE_ELEMENTS, encoded, encoding_of, q8_0

torch.set_num_threads(1)

FLOATS = st.one_of(
    st.floats(-70_000, 70_000, width=32),
    st.sampled_from([0.0, -0.0, 0.5, -0.5, 1.5, 63.5, -63.5, 127.0, -127.0, 1e-30, 3e-38, 65504.0]),
)


def llama_cpp_quantised(rows: np.ndarray) -> np.ndarray:
    libraries = sorted((Path(llama_cpp.__file__).parent / "lib").glob("*ggml-base*"))
    if not libraries:
        pytest.skip("this build of llama.cpp has no library of its own for ggml")
    quantise = ctypes.CDLL(str(libraries[0])).ggml_quantize_chunk
    quantise.restype = ctypes.c_size_t
    quantise.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    out = np.zeros((len(rows), rows.shape[1] // 32 * 34), np.uint8)
    assert quantise(8, rows.ctypes.data, out.ctypes.data, 0, *rows.shape, None) == out.nbytes
    return out


@given(arrays(np.float32, (3, 64), elements=FLOATS))
@settings(max_examples=200, deadline=None)
def test_q8_0_is_bit_for_bit_that_of_gguf_and_of_llama_cpp(rows):
    """Ties, zeros, huge and tiny blocks: the same scale and the same bytes from all three."""
    rows[np.abs(rows) < 1e-34] = 0  # below it theirs divide by zero, with whatever result
    ours = q8_0(torch.from_numpy(rows.copy())).numpy()
    assert (ours == llama_cpp_quantised(rows)).all()
    assert (ours == quants.quantize(rows, GGMLQuantizationType.Q8_0)).all()


@pytest.mark.parametrize("scale", [1e-36, 1e-3, 0.02, 1.0, 6e4])
def test_q8_0_of_many_random_rows_is_theirs_too(scale):
    """A quarter of a million normally distributed weights at every scale that weights have."""
    rows = (torch.randn(512, 512, generator=torch.Generator().manual_seed(1)) * scale).numpy()
    ours = q8_0(torch.from_numpy(rows.copy())).numpy()
    assert (ours == llama_cpp_quantised(rows)).all()
    assert (ours == quants.quantize(rows, GGMLQuantizationType.Q8_0)).all()


def test_a_block_by_hand():
    """Largest 127, so d = 1 and each number is rounded by itself, halves away from zero."""
    block = torch.zeros(1, BLOCK)
    block[0, :6] = torch.tensor([127.0, 0.5, -0.5, 1.5, 2.4999, -126.6])
    data = q8_0(block)
    assert data.shape == (1, 34)
    assert data[0, :2].view(torch.float16).item() == 1.0
    assert data[0, 2:9].view(torch.int8).tolist() == [127, 1, -1, 2, 2, -127, 0]


def test_a_subnormal_block_is_zeros():
    """Its scale is 0 as a float16, so whatever stands beside it means 0: no NaN on the way."""
    data = q8_0(torch.full((1, BLOCK), 1e-42))
    assert data.view(torch.int8).tolist() == [[0] * 34]


@pytest.mark.parametrize("domain", ["f16", "bf16"])
def test_halves_round_to_the_nearest_even(domain):
    """As gguf-py converts them, bit for bit."""
    rows = torch.randn(64, 96, generator=torch.Generator().manual_seed(2)) * 3
    kind = GGMLQuantizationType.F16 if domain == "f16" else GGMLQuantizationType.BF16
    data = b"".join(encoded(rows, encoding_of(rows.shape, domain)))
    assert data == quants.quantize(rows.numpy(), kind).tobytes()


@pytest.mark.parametrize(
    ("shape", "domain", "kind"),
    [
        ((8, 64), "f32", "F32"),
        ((8, 64), "f16", "F16"),
        ((8, 64), "bf16", "BF16"),
        ((8, 64), "q8_0", "Q8_0"),
        ((8, 48), "q8_0", "F16"),
        ((64,), "q8_0", "F32"),
        ((64,), "bf16", "F32"),
    ],
)
def test_vectors_stay_in_f32_and_broken_blocks_in_f16(shape, domain, kind):
    """What llama.cpp would choose for each tensor."""
    encoding = encoding_of(torch.Size(shape), domain)
    assert encoding.kind.name == kind
    assert sum(map(memoryview.__len__, map(flat, encoded(torch.ones(shape), encoding)))) == encoding.length_bytes


def flat(view: memoryview) -> memoryview:
    return view.cast("B")


def test_pieces_are_the_whole():
    """A tensor larger than a piece gives the same bytes as its rows by themselves, in several pieces."""
    rows = torch.randn(5, PIECE_ELEMENTS // 4, generator=torch.Generator().manual_seed(3))
    encoding = encoding_of(rows.shape, "q8_0")
    pieces = [bytes(piece) for piece in encoded(rows, encoding)]
    assert len(pieces) == 2
    assert b"".join(pieces) == q8_0(rows).numpy().tobytes()


@pytest.mark.parametrize(("domain", "value"), [(d, v) for d in ("f32", "bf16", "f16", "q8_0") for v in ("nan", "inf")])
def test_a_number_that_is_none_is_refused(domain, value):
    """A sampler would answer with NaN; the learner says which tensor it is instead."""
    rows = torch.zeros(2, 32)
    rows[1, 3] = float(value)
    with pytest.raises(ValueError, match="not finite"):
        list(encoded(rows, encoding_of(rows.shape, domain)))


@pytest.mark.parametrize(("domain", "value"), [("f16", 1e5), ("q8_0", 1e7)])
def test_a_number_too_large_for_the_format_is_refused(domain, value):
    """Rather no snapshot than infinite weights."""
    rows = torch.full((2, 32), value)
    with pytest.raises(ValueError, match="too large"):
        list(encoded(rows, encoding_of(rows.shape, domain)))
