"""The engine process: `python -m echo2.node.engine_process OPTIONS`, spoken to over its stdin and stdout.

The only process that opens a snapshot as a model: a crafted file that breaks llama.cpp breaks this process, which has
no keys and a scrubbed environment. It ends when its stdin closes, which is also what happens when the parent dies.
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import json
import os
import queue
import signal
import sys
import threading
from pathlib import Path
from typing import Any, BinaryIO

from .engine import EngineError, EngineOptions, OrderRefused, SnapshotRefused
from .engine_wire import (
    DETAIL_CHARACTERS_MAX,
    LENGTH,
    REPLY_BYTES_MAX,
    REQUEST_BYTES_MAX,
    orders_in,
    pack,
    slices_out,
    unpack,
)
from .llama_engine import LlamaEngine

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve requests until stdin closes."""
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal group; the parent decides
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not land among the frames
    options = EngineOptions(**json.loads(sys.argv[1]))
    requests: queue.Queue[dict[str, Any]] = queue.Queue(maxsize=1)
    threading.Thread(target=_read, args=(sys.stdin.buffer, requests), daemon=True).start()
    server = _Server(LlamaEngine(options))
    _send(replies, {"ok": True, "options": dataclasses.asdict(options)})
    while True:
        _send(replies, server.answer(requests.get()))


def _die_with_parent() -> None:
    """Also when this process is stopped, and so does not see its stdin close."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _read(stdin: BinaryIO, requests: queue.Queue[dict[str, Any]]) -> None:
    """Beside a blocking llama.cpp: the end of the parent ends this process in the middle of a batch too."""
    while True:
        head = stdin.read(LENGTH.size)
        if len(head) < LENGTH.size:
            os._exit(0)
        (length,) = LENGTH.unpack(head)
        body = stdin.read(length) if length <= REQUEST_BYTES_MAX else b""
        if len(body) < length:
            os._exit(0 if length <= REQUEST_BYTES_MAX else 1)
        requests.put(unpack(body))


class _Server:
    """Answers one request after the other; remembers which snapshot is in memory."""

    def __init__(self, engine: LlamaEngine) -> None:
        self._engine = engine
        self._snapshot: tuple[str, bytes] | None = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            if request["op"] == "load":
                self._load(request)
                return {"ok": True}
            return {"ok": True, "slices": slices_out(self._engine.generate(orders_in(request["orders"])))}
        except OrderRefused as error:
            return _no("order", error)
        except SnapshotRefused as error:
            return _no("snapshot", error)
        except (EngineError, ValueError, MemoryError, OSError) as error:
            return _no("engine", error)

    def _load(self, request: dict[str, Any]) -> None:
        """A snapshot that is in memory already is not read again: only its adapter is another one."""
        snapshot = (request["path"], request["sha256"])
        adapter = request["adapter"]
        if adapter is not None:
            _verify(Path(adapter[0]), adapter[1])
        if snapshot != self._snapshot:
            self._snapshot = None
            _verify(Path(request["path"]), request["sha256"])
            self._engine.load(Path(request["path"]))
            self._snapshot = snapshot
        self._engine.adapt(None if adapter is None else Path(adapter[0]))


def _verify(path: Path, sha256: bytes) -> None:
    """Again, right before parsing: the file may have rotted since the store checked it."""
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").digest()
    except OSError as error:
        raise SnapshotRefused(f"cannot read {path.name}: {error.strerror}") from error
    if digest != sha256:
        raise SnapshotRefused(f"{path.name} has changed on disk: its SHA-256 is not the manifest's")


def _no(kind: str, error: Exception) -> dict[str, Any]:
    return {"ok": False, "kind": kind, "detail": (str(error) or type(error).__name__)[:DETAIL_CHARACTERS_MAX]}


def _send(replies: BinaryIO, message: dict[str, Any]) -> None:
    try:
        replies.write(pack(message, REPLY_BYTES_MAX))
        replies.flush()
    except BrokenPipeError:
        os._exit(0)


if __name__ == "__main__":
    main()
