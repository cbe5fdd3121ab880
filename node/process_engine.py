"""The real engine: llama.cpp in a process of its own, started, watched, restarted.

A child that dies or hangs in the middle of a batch costs that batch's time and nothing else: it is started again with
growing pauses, the snapshot is loaded again, and the same orders run again (their seeds make them the same rollouts).
After `FAILURES_MAX` failures in a row the call fails with the reason: bad work is not restarted all night.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import trio

from .child import start_child
from .engine import (
    AdapterFile,
    EngineError,
    EngineFailed,
    EngineOptions,
    OrderRefused,
    SliceOrder,
    SliceResult,
    SnapshotRefused,
)
from .engine_wire import LENGTH, REPLY_BYTES_MAX, REQUEST_BYTES_MAX, orders_out, pack, slices_in, unpack

if TYPE_CHECKING:
    from pathlib import Path

    from .child import Child

T = TypeVar("T")

log = logging.getLogger(__name__)

START_SECONDS = 60.0
"""Importing numpy and llama.cpp, and finding the GPU, on a slow disk."""

LOAD_SECONDS = 900.0
"""Hashing and loading tens of gigabytes from a hard disk."""

LOAD_BYTES_PER_SECOND_MIN = 20e6
"""Slower than any disk that a model of gigabytes is on: sets how long a load may take."""

GENERATE_SECONDS = 900.0
"""One batch, while nothing is known of this machine's speed. The services size batches to seconds."""

PATIENCE_SECONDS = 60.0
PATIENCE_FACTOR = 20.0
"""A call may take max(60 s, 20 x what it should take), and four times that after each failure in a row: far above any
busy machine, and a process that hangs costs a minute instead of a quarter of an hour."""

FAILURES_MAX = 4
"""Failures in a row before the node pauses and says why."""

BACKOFF_SECONDS = 0.5
"""Pause before the first restart; doubles with each failure in a row."""

ILLEGAL_INSTRUCTION = frozenset({-4, 0xC000001D})
"""How a process that met one ends: SIGILL, and what Windows calls it."""

PASSED_ON = frozenset(
    {
        *("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "TEMP", "TMP", "SYSTEMROOT"),
        *("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME"),
    }
)
PASSED_ON_PREFIXES = ("CUDA_", "NVIDIA_", "HIP_", "ROCR_", "HSA_", "GGML_", "VK_")


def scrubbed(environment: Mapping[str, str]) -> dict[str, str]:
    """What the engine process may know: how to find its libraries and the GPU. No keys, tokens or proxies."""
    return {k: v for k, v in environment.items() if k in PASSED_ON or k.startswith(PASSED_ON_PREFIXES)}


@dataclass(frozen=True, slots=True)
class Policy:
    """A snapshot and, it may be, the adapter on it."""

    path: Path
    sha256: bytes
    adapter: AdapterFile | None


class ProcessEngine:
    """See `engine.Engine`. `command` is replaced in tests; the child is `echo2.node.engine_process`."""

    def __init__(
        self,
        options: EngineOptions,
        *,
        command: Sequence[str] | None = None,
        generate_seconds: float = GENERATE_SECONDS,
        load_seconds: float = LOAD_SECONDS,
        patience_seconds: float = PATIENCE_SECONDS,
        backoff_seconds: float = BACKOFF_SECONDS,
        sleep: Callable[[float], Awaitable[None]] = trio.sleep,
    ) -> None:
        # -P: the working directory is not on the path, so no file lying there can pass for a module.
        self._command = list(command or (sys.executable, "-P", "-m", "echo2.node.engine_process"))
        self._options = options
        self._generate_seconds = generate_seconds
        self._load_seconds = load_seconds
        self._patience_seconds = patience_seconds
        self._sample_seconds: float | None = None
        self._failures = 0
        self._backoff_seconds = backoff_seconds
        self._sleep = sleep
        self._process: Child | None = None
        self._loaded: Policy | None = None
        self._child_has: Policy | None = None
        self._closed = False
        self.restarts = 0
        self.last_error = ""

    @property
    def pid(self) -> int | None:
        """The child's process id, None while there is none."""
        return self._process.pid if self._process else None

    async def load(self, path: Path, snapshot_sha256: bytes, adapter: AdapterFile | None = None) -> None:
        """See `engine.Engine.load`. The old snapshot is put back if the new one does not load."""
        wanted = Policy(path, snapshot_sha256, adapter)
        try:
            await self._supervised(lambda: self._ensure_loaded(wanted))
        except (SnapshotRefused, EngineFailed) as error:
            # A file that kills the process it is opened in is refused like one that llama.cpp declines.
            if self._loaded is not None:
                old = self._loaded
                await self._supervised(lambda: self._ensure_loaded(old))
                raise SnapshotRefused(str(error)) from error
            raise
        self._loaded = wanted

    async def generate(self, slices: Sequence[SliceOrder]) -> list[SliceResult]:
        """See `engine.Engine.generate`."""
        if self._loaded is None:
            raise EngineError("no snapshot is loaded")
        loaded = self._loaded
        request = {"op": "generate", "orders": orders_out(slices)}
        samples = max(sum(order.sample_count for order in slices), 1)

        async def attempt() -> list[SliceResult]:
            await self._ensure_loaded(loaded)
            started = trio.current_time()
            reply = await self._ask(request, self._bound(self._expected(samples), self._generate_seconds))
            self._sample_seconds = (trio.current_time() - started) / samples
            return slices_in(reply.get("slices"), slices)

        return await self._supervised(attempt)

    def _expected(self, samples: int) -> float | None:
        """How long a batch should take by the one before it; None for the first."""
        return None if self._sample_seconds is None else samples * self._sample_seconds

    def _bound(self, expected_seconds: float | None, most_seconds: float) -> float:
        if expected_seconds is None:
            return most_seconds
        bound = max(self._patience_seconds, PATIENCE_FACTOR * expected_seconds)
        return float(min(bound * 4**self._failures, most_seconds))

    async def close(self) -> None:
        """See `engine.Engine.close`."""
        self._closed = True
        await self._kill()

    async def _supervised(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Run `attempt` until it succeeds or is refused, restarting the child between; EngineFailed after too many."""
        if self._closed:
            raise EngineError("the engine is closed")
        for failure in range(1, FAILURES_MAX + 1):
            self._failures = failure - 1
            done = False
            try:
                result = await attempt()
                done = True
                return result
            except (OrderRefused, SnapshotRefused):
                done = True
                raise
            except EngineError as error:
                self.last_error = str(error)
                log.warning("engine failure %d of %d: %s", failure, FAILURES_MAX, error)
            finally:
                if not done:  # a cancelled request leaves a reply in the pipe: that child is of no use any more
                    await self._kill()
            if failure < FAILURES_MAX:
                self.restarts += 1
                await self._sleep(self._backoff_seconds * 2 ** (failure - 1))
        raise EngineFailed(f"the engine failed {FAILURES_MAX} times in a row; the last time: {self.last_error}")

    async def _ensure_loaded(self, wanted: Policy) -> None:
        if self._process is None:
            await self._start()
        if self._child_has != wanted:
            self._child_has = None
            seconds = self._bound(_load_seconds(wanted.path), self._load_seconds)
            adapter = None if wanted.adapter is None else [str(wanted.adapter.path), wanted.adapter.sha256]
            request = {"op": "load", "path": str(wanted.path), "sha256": wanted.sha256, "adapter": adapter}
            await self._ask(request, seconds)
            self._child_has = wanted

    async def _start(self) -> None:
        try:
            self._process = await start_child([*self._command, json.dumps(asdict(self._options))], scrubbed(os.environ))
        except OSError as error:
            raise EngineError(f"the engine process cannot be started: {error.strerror}") from error
        self._child_has = None
        await self._reply(START_SECONDS)

    async def _ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        frame = pack(request, REQUEST_BYTES_MAX)
        try:
            with trio.move_on_after(seconds) as scope:
                await process.stdin.send_all(frame)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise EngineError(await self._how_it_ended()) from error
        if scope.cancelled_caught:
            raise EngineError(f"the engine process took no request for {seconds:.0f} s")
        reply = await self._reply(seconds)
        if reply.get("ok") is True:
            return reply
        detail = str(reply.get("detail"))[:400]
        kinds = {"order": OrderRefused, "snapshot": SnapshotRefused}
        raise kinds.get(str(reply.get("kind")), EngineError)(detail)

    async def _reply(self, seconds: float) -> dict[str, Any]:
        with trio.move_on_after(seconds):
            (length,) = LENGTH.unpack(await self._exactly(LENGTH.size))
            if length > REPLY_BYTES_MAX:
                raise EngineError(f"the engine process announced a reply of {length} bytes")
            return unpack(await self._exactly(length))
        raise EngineError(f"the engine process did not answer for {seconds:.0f} s")

    async def _exactly(self, count: int) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        data = bytearray()
        while len(data) < count:
            try:
                part = await self._process.stdout.receive_some(min(count - len(data), 1 << 20))
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                part = b""
            if not part:
                raise EngineError(await self._how_it_ended())
            data += part
        return bytes(data)

    async def _how_it_ended(self) -> str:
        assert self._process is not None
        with trio.move_on_after(2):
            await self._process.wait()
        code = self._process.returncode
        if code in ILLEGAL_INSTRUCTION and not self._options.plain_kernels:
            self._options = replace(self._options, plain_kernels=True)
            return "llama.cpp used an instruction that is not allowed here; going on without its special kernels"
        if code is None:
            return "the engine process closed its pipes"
        return f"the engine process was killed by signal {-code}" if code < 0 else f"the engine process ended ({code})"

    async def _kill(self) -> None:
        """End the child and reap it, whatever state it is in."""
        process, self._process, self._child_has = self._process, None, None
        if process is None:
            return
        with trio.CancelScope(shield=True):
            process.kill()
            await process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    await pipe.aclose()


def _load_seconds(path: Path) -> float | None:
    """How long loading this file may be expected to take on the slowest disk."""
    try:
        return path.stat().st_size / LOAD_BYTES_PER_SECOND_MIN / PATIENCE_FACTOR
    except OSError:
        return None  # the child will say what is the matter
