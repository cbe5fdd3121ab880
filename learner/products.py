"""The number format a CPU multiplies matrices in; weights, sums, activations and optimiser are float32 in any case."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from echo2.p2p.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator


def check_products(dtype: str) -> None:
    """Raises ConfigurationError when this processor would compute bf16 products more slowly than f32 ones."""
    if dtype == "bf16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        raise ConfigurationError('train.dtype = "bf16": this processor has no bf16 instructions; set it to "f32"')


@contextmanager
def products_in(dtype: str) -> Iterator[None]:
    """Matrix products in this format, in the block.

    The setting is the whole process's, but nothing else in a learner multiplies matrices.
    """
    matmul: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before, matmul.fp32_precision = matmul.fp32_precision, "bf16" if dtype == "bf16" else "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = before
