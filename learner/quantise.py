"""From float weights to the bytes of a GGUF tensor: f32, f16, bf16, q8_0. Deterministic, a few rows at a time.

Q8_0 is blocks of 32 numbers of a row: a scale d = max|x| / 127 as float16, then round(x / d) as 32 signed bytes, ties
away from zero. Bit for bit what llama.cpp's own quantiser gives (`ggml_quantize_chunk`), so a snapshot is the same
whoever makes it, and deltas between two snapshots see only what training changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import gguf
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

Domain = Literal["f32", "f16", "bf16", "q8_0"]

FILE_TYPES: dict[Domain, gguf.LlamaFileType] = {
    "f32": gguf.LlamaFileType.ALL_F32,
    "f16": gguf.LlamaFileType.MOSTLY_F16,
    "bf16": gguf.LlamaFileType.MOSTLY_BF16,
    "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
}

BLOCK = 32
"""Numbers that share a scale."""

BLOCK_BYTES = 2 + BLOCK

PIECE_ELEMENTS = 1 << 22
"""Numbers converted at once: 16 MiB as float32, whatever the size of the tensor."""

_TYPES: dict[gguf.GGMLQuantizationType, torch.dtype] = {
    gguf.GGMLQuantizationType.F32: torch.float32,
    gguf.GGMLQuantizationType.F16: torch.float16,
    gguf.GGMLQuantizationType.BF16: torch.bfloat16,
}


@dataclass(frozen=True, slots=True)
class Encoding:
    """How one tensor is stored."""

    kind: gguf.GGMLQuantizationType
    length_bytes: int


def encoding_of(shape: torch.Size, domain: Domain) -> Encoding:
    """Vectors (norms, biases) stay float32, as llama.cpp wants them; matrices are in the domain.

    In q8_0 a matrix whose rows are not whole blocks is in float16, as llama.cpp's own quantiser has it.
    """
    kinds = gguf.GGMLQuantizationType
    if len(shape) < 2:
        kind = kinds.F32
    elif domain == "q8_0":
        kind = kinds.Q8_0 if shape[-1] % BLOCK == 0 else kinds.F16
    else:
        kind = {"f32": kinds.F32, "f16": kinds.F16, "bf16": kinds.BF16}[domain]
    size = shape.numel()
    return Encoding(kind, size // BLOCK * BLOCK_BYTES if kind == kinds.Q8_0 else size * _TYPES[kind].itemsize)


def encoded(weight: torch.Tensor, encoding: Encoding) -> Iterator[memoryview]:
    """The tensor's bytes, little-endian, in pieces of whole rows.

    Raises ValueError for a number that is not finite, or that float16 cannot hold: a sampler would give NaN for it.
    """
    rows = weight.detach().reshape(-1, weight.shape[-1]) if weight.ndim > 1 else weight.detach().reshape(1, -1)
    step = max(1, PIECE_ELEMENTS // max(rows.shape[1], 1))
    for piece in torch.split(rows, step):
        piece = piece.to("cpu")
        if encoding.kind == gguf.GGMLQuantizationType.Q8_0:
            data = q8_0(piece.float())
        else:
            data = piece.to(_TYPES[encoding.kind]).contiguous()
            if not torch.isfinite(data).all():
                raise ValueError(f"a weight is not finite, or too large for {encoding.kind.name}")
        yield data.view(torch.uint8).numpy().data


def q8_0(rows: torch.Tensor) -> torch.Tensor:
    """Rows of float32 [N, 32 K] as uint8 [N, 34 K]. Raises ValueError for a number that is not finite.

    A block all below about 1e-36 becomes zeros, which is what its scale as a float16 makes of it in any case.
    """
    blocks = rows.reshape(-1, BLOCK)
    largest = blocks.abs().amax(dim=1, keepdim=True)
    scale = largest / 127
    if not torch.isfinite(scale.half()).all():
        raise ValueError("a weight is not finite, or too large for Q8_0")
    inverse = scale.reciprocal()
    inverse[~torch.isfinite(inverse)] = 0
    scaled = blocks * inverse
    whole = scaled.trunc()
    # Ties away from zero, like C's roundf; torch.round takes them to the even neighbour. x - trunc(x) is exact.
    whole += scaled.sub_(whole).mul_(2).trunc_()
    out = torch.empty(len(blocks), BLOCK_BYTES, dtype=torch.uint8)
    out[:, :2] = scale.half().view(torch.uint8)
    out[:, 2:] = whole.to(torch.int8).view(torch.uint8)
    return out.reshape(len(rows), -1)
