"""What the processes of a learner say to each other: orders of the first to all, sums and shards between all.

Orders are a name, some words (JSON) and arrays, broadcast over gloo; nothing that is received is ever run as code. A
process that waits for its next order longer than the bound takes the first one for lost, so the first lets itself be
heard while it has nothing to order (`Team`).
"""

from __future__ import annotations

import io
import json
import logging
import threading
import time
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

from echo2.p2p.errors import ConfigurationError

from .launch import give_up

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from .launch import Helpers, Place

ORDER_BYTES_MAX = 1 << 32
"""A batch of 4,096 rollouts of 32,768 tokens, three arrays each, still fits."""

HEARD_SHARE = 0.2
"""The first process is heard this often within the bound: four words may come late before it is taken for lost."""

LOOK_SECONDS = 0.5

LATER_SECONDS = 15.0
"""The first process leaves this much longer to the library's own error, which says more, before it gives up."""

REASON_SECONDS = 3.0
"""A broken connection is noticed before the end of the process behind it: that long the reason may take to show."""

WORDS = "words"

NOTHING, END = "nothing", "end"
"""The orders that are `Team`'s own."""

log = logging.getLogger(__name__)


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
            store = distributed.FileStore(str(place.store), place.size)
            store.set_timeout(timeout)
            distributed.init_process_group(
                backend, store=store, rank=place.rank, world_size=place.size, timeout=timeout
            )
        self.mesh: DeviceMesh = init_device_mesh(self.device.type, (place.size,))

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all processes, in each of them; on the CPU, where every process adds in the same order."""
        total = values.detach().cpu().contiguous()
        distributed.all_reduce(total)
        return total

    def send(self, order: str, words: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        """The first process to all others."""
        buffer = io.BytesIO()
        text = json.dumps({"order": order, **words}).encode()
        np.savez(buffer, **{WORDS: np.frombuffer(text, np.uint8), **arrays})
        data = torch.from_numpy(np.frombuffer(buffer.getvalue(), np.uint8).copy())
        distributed.broadcast(torch.tensor([len(data)]), src=0)
        distributed.broadcast(data, src=0)

    def receive(self) -> tuple[str, dict[str, Any], dict[str, NDArray[Any]]]:
        """The next order: its name, its words, its arrays. Raises RuntimeError when the first process is gone."""
        length = torch.zeros(1, dtype=torch.int64)
        distributed.broadcast(length, src=0)
        if not 0 < int(length) <= ORDER_BYTES_MAX:
            raise RuntimeError(f"an order of {int(length)} bytes")
        data = torch.empty(int(length), dtype=torch.uint8)
        distributed.broadcast(data, src=0)
        with np.load(io.BytesIO(data.numpy().tobytes()), allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        words = json.loads(arrays.pop(WORDS).tobytes())
        return words.pop("order"), words, arrays


class Team:
    """The first process's way to have something done by all. Alone (`alone`), a turn is just this process's part."""

    def __init__(self, helpers: Helpers | None, *, seconds: float) -> None:
        self.ranks: Ranks | None = None
        self._helpers = helpers
        self._seconds = seconds
        self._turn = threading.Lock()
        self._since: float | None = None
        self._heard = time.monotonic()
        self._spoilt = False

    def join(self, place: Place) -> None:
        """Meet the others; the process ends when they do not come."""
        self._since = time.monotonic()
        threading.Thread(target=self._watch, daemon=True, name="team").start()
        with self._or_give_up():
            self.ranks = Ranks(place, seconds=self._seconds)
        self._heard, self._since = time.monotonic(), None

    @contextmanager
    def turn(
        self, order: str, words: Mapping[str, Any] | None = None, arrays: Mapping[str, NDArray[Any]] | None = None
    ) -> Iterator[None]:
        """All others do `order`, the block is this process's part of it. When it fails, the processes are out of step.

        Then the learner ends: what is durable is whole, and it goes on from there when it is started again.
        """
        if self.ranks is None:
            yield
            return
        with self._turn, self._taken(self.ranks, order, words, arrays):
            yield

    def progress(self) -> None:
        """The turn that is under way goes on: the wait for the others begins anew."""
        if self._since is not None:
            self._since = time.monotonic()

    def close(self) -> None:
        """Tell the others to end, and see that they do."""
        if self.ranks is not None and not self._spoilt and self._turn.acquire(timeout=1.0):
            helpers, self._helpers = self._helpers, None  # their end is no loss any more
            try:
                self.ranks.send(END, {}, {})
            except RuntimeError as error:
                log.warning("the other processes could not be told to end: %s", error)
            if helpers is not None:
                helpers.close()
        elif self._helpers is not None:
            helpers, self._helpers = self._helpers, None
            helpers.kill()
            helpers.close()

    @contextmanager
    def _taken(
        self,
        ranks: Ranks,
        order: str,
        words: Mapping[str, Any] | None = None,
        arrays: Mapping[str, NDArray[Any]] | None = None,
    ) -> Iterator[None]:
        self._since = time.monotonic()
        try:
            with self._or_give_up():
                ranks.send(order, words or {}, arrays or {})
                yield
        except BaseException:  # cancelled: this process is ending
            self._spoilt = True
            raise
        finally:
            self._heard, self._since = time.monotonic(), None

    @contextmanager
    def _or_give_up(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            log.exception("a process of the learner failed")
            deadline = time.monotonic() + REASON_SECONDS
            while self._lost() is None and time.monotonic() < deadline:
                time.sleep(LOOK_SECONDS / 10)
            self._give_up(self._lost() or (str(error).strip() or type(error).__name__).splitlines()[0])

    def _watch(self) -> None:
        while True:
            time.sleep(LOOK_SECONDS)
            lost, now, since = self._lost(), time.monotonic(), self._since
            if lost is not None and (since is None or now - since > REASON_SECONDS):
                self._give_up(lost)
            if since is not None and now - since > self._seconds + LATER_SECONDS:
                self._give_up(f"its processes have not answered each other for {now - since:.0f} s")
            if now - self._heard > HEARD_SHARE * self._seconds and self._turn.acquire(blocking=False):
                try:
                    if self.ranks is not None and not self._spoilt:
                        with self._taken(self.ranks, NOTHING):
                            pass
                finally:
                    self._turn.release()

    def _lost(self) -> str | None:
        return None if self._helpers is None else self._helpers.lost()

    def _give_up(self, why: str) -> None:
        give_up(
            f"the learner cannot go on: {why}. Start it again: it goes on from its newest checkpoint", self._helpers
        )


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
