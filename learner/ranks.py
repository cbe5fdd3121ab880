"""What the processes of a learner say to each other: orders of the first to all, sums and shards between all.

Orders are a name, some words (JSON) and arrays, broadcast over gloo; nothing that is received is ever run as code. A
process that waits for its next order longer than the bound takes the first one for lost, so the first lets itself be
heard while it has nothing to order (`team`).
"""

from __future__ import annotations

import io
import json
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

from echo2.p2p.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from .launch import Place

ORDER_BYTES_MAX = 1 << 32
"""A batch of 4,096 rollouts of 32,768 tokens, three arrays each, still fits."""

WORDS = "words"

LET_GO_SECONDS = 1.0


class Ranks:
    """This process among `place.size`. Making it waits for all of them; raises RuntimeError when they do not come."""

    def __init__(self, place: Place, *, seconds: float) -> None:
        self.rank = place.rank
        self.size = place.size
        self.device = device_for(place.local_rank)
        timeout = timedelta(seconds=seconds)
        backend = "gloo" if self.device.type == "cpu" else "cpu:gloo,cuda:nccl"
        if place.store is None:
            distributed.init_process_group(backend, timeout=timeout)
        else:
            store = cast("Any", distributed).FileStore(str(place.store), place.size)
            store.set_timeout(timeout)
            distributed.init_process_group(
                backend, store=store, rank=place.rank, world_size=place.size, timeout=timeout
            )
        self.mesh: DeviceMesh = init_device_mesh(self.device.type, (place.size,))

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all processes, in each of them; on the CPU, where every process adds in the same order."""
        total = values.detach().cpu().contiguous()
        distributed.all_reduce(total)
        _wait_until_let_go(total)
        return total

    def send(self, order: str, words: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        """The first process to all others."""
        buffer = io.BytesIO()
        text = json.dumps({"order": order, **words}).encode()
        np.savez(buffer, **cast("Any", {WORDS: np.frombuffer(text, np.uint8), **arrays}))
        data = torch.from_numpy(np.frombuffer(buffer.getvalue(), np.uint8).copy())
        _broadcast(torch.tensor([len(data)]))
        _broadcast(data)

    def receive(self) -> tuple[str, dict[str, Any], dict[str, NDArray[Any]]]:
        """The next order: its name, its words, its arrays. Raises RuntimeError when the first process is gone."""
        length = torch.zeros(1, dtype=torch.int64)
        _broadcast(length)
        if not 0 < int(length) <= ORDER_BYTES_MAX:
            raise RuntimeError(f"an order of {int(length)} bytes")
        data = torch.empty(int(length), dtype=torch.uint8)
        _broadcast(data)
        with np.load(io.BytesIO(data.numpy().tobytes()), allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        words = json.loads(arrays.pop(WORDS).tobytes())
        return words.pop("order"), words, arrays


def _broadcast(tensor: Tensor) -> None:
    distributed.broadcast(tensor, src=0)
    _wait_until_let_go(tensor)


def _wait_until_let_go(tensor: Tensor) -> None:
    """Until gloo's thread holds it no more: for some microseconds after the call it does, one time in eight.

    Whoever lets go last takes the interpreter's lock to do it. In a process that is ending, a thread that asks for that
    lock aborts it: "terminate called without an active exception", exit code -6.
    """
    deadline = time.monotonic() + LET_GO_SECONDS
    while cast("Any", tensor)._use_count() > 1 and time.monotonic() < deadline:
        time.sleep(0)


def device_for(local_rank: int) -> torch.device:
    """A GPU of its own, or the CPU on a machine without. Raises ConfigurationError when there are too few."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise ConfigurationError(
            f"more processes than GPUs: this machine has {torch.cuda.device_count()}; start at most one process each"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)
