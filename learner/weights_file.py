"""Safetensors files, read and written one tensor at a time: a model folder may be larger than the memory.

The format: le64 length of a JSON header {name: {dtype, shape, data_offsets}}, padded with spaces to a multiple of
8, then the tensors' bytes without gaps.
"""

from __future__ import annotations

import json
import os
import struct
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from safetensors import safe_open

from echo2.p2p.errors import ConfigurationError

from .reading import read_table, reading

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
_CODES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_OURS = {code: dtype for dtype, code in _CODES.items()}
_WRITTEN = {**_CODES, torch.uint8: "U8"}
"""A generator's state is bytes."""


class Weights:
    """The tensors of a Hugging Face folder, in one file or in shards; a context manager.

    Raises ConfigurationError when there are none that are safe to read (a pickle runs code), or when they are broken.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._where: dict[str, Any] = {}
        with ExitStack() as opened:
            for path in _files(folder):
                with reading(path):
                    file = opened.enter_context(safe_open(path, framework="pt"))
                    self._where.update(dict.fromkeys(file.keys(), file))
            self._stack = opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()

    @property
    def names(self) -> frozenset[str]:
        """Of all tensors."""
        return frozenset(self._where)

    def shape(self, name: str) -> torch.Size:
        """Without reading the tensor."""
        with self._reading(name):
            return torch.Size(self._where[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype | None:
        """Without reading the tensor; None for what is not f32, f16 or bf16."""
        with self._reading(name):
            return _OURS.get(self._where[name].get_slice(name).get_dtype())

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor, as it is stored."""
        with self._reading(name):
            tensor: torch.Tensor = self._where[name].get_tensor(name)
        return tensor

    def _reading(self, name: str) -> AbstractContextManager[None]:
        return reading(f"the tensor {name} in {self.folder}", "cannot be read")


def write_weights(
    path: Path, tensors: Mapping[str, tuple[torch.Size, torch.dtype]], load: Callable[[str], torch.Tensor]
) -> None:
    """Writes a safetensors file, durably; `load` is asked for each tensor in turn. Raises OSError."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (shape, dtype) in tensors.items():
        start, end = end, end + shape.numel() * dtype.itemsize
        header[name] = {"dtype": _WRITTEN[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, (_, dtype) in tensors.items():
            file.write(load(name).detach().to(dtype).contiguous().view(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def _files(folder: Path) -> list[Path]:
    index = folder / INDEX_FILE
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    if not index.is_file():
        raise ConfigurationError(
            f"there is neither {SINGLE_FILE} nor {INDEX_FILE} in {folder}; weights of other formats are not read"
        )
    shards = read_table(index).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise ConfigurationError(f"{index} has no weight_map")
    for shard in shards.values():
        if not isinstance(shard, str) or Path(shard).name != shard or not (folder / shard).is_file():
            raise ConfigurationError(f"{index} names {str(shard)[:64]!r}, which is not a file of the folder")
    return [folder / shard for shard in sorted(set(shards.values()))]
