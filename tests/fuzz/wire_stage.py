"""Raw bytes at every layer, against a process of its own; an honest peer beside it asks on, over one old connection."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import trio
from fuzz.case import Case, Step
from fuzz.stage import Defect
from fuzz.strategies import mangled
from fuzz.wire import HEADER, HELLO_LINES, LEVELS, client, line
from fuzz.wire_target import TARGET
from hypothesis import strategies as st

from echo2.p2p.channel import request
from echo2.p2p.codec import END, encode_frame
from echo2.p2p.identity import Identity
from echo2.p2p.libp2p_transport import open_libp2p_transport
from echo2.p2p.messages import Ack, PeerAddress

NAME = "wire"

HONEST, BAD = Identity(b"\x31" * 32), Identity(b"\x32" * 32)

HANG_SECONDS = 60.0
"""A request of the honest peer that takes so long will never be answered."""

LINGER_SECONDS = 0.02
"""How long a hostile client reads before it hangs up: time for the target to act on what it was sent."""


class Target:
    """The process, and the honest peer's connection to it. Used from a thread that is not trio's."""

    def __init__(self) -> None:
        self.played = 0
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("wire_target.py"))],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().decode().strip()
        self._port = int(self.address.rpartition("/")[2])
        self._ready = threading.Event()
        self._thread = threading.Thread(target=trio.run, args=(self._live,), daemon=True)
        self._thread.start()
        self._ready.wait()

    def play(self, case: Case) -> None:
        """Raise Defect unless the target bore the case and still answers the honest peer."""
        trio.from_thread.run(self._play, case, trio_token=self._token)
        self.played += 1

    def ask(self, protocol: Any = "hello") -> int:
        """What the target answers the honest peer."""
        answer: int = trio.from_thread.run(self._ask, protocol, trio_token=self._token)
        return answer

    def resident_bytes(self) -> int:
        """Its resident memory now."""
        text = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(text.partition("VmRSS:")[2].split()[0]) * 1024

    def files(self) -> int:
        """Its open file handles."""
        return len(list(Path(f"/proc/{self._process.pid}/fd").iterdir()))

    def settle(self, files: int, tasks: int) -> None:
        """Wait until it has no more of either than this, or for long enough that it never will."""
        for _ in range(600):
            if self.files() <= files and self.ask("report") <= tasks:
                return
            time.sleep(0.1)

    def close(self) -> str:
        """End both. What the target wrote to its standard error: nothing, if all was well."""
        self._token.run_sync_soon(self._stop.cancel)
        self._thread.join()
        self._process.terminate()
        assert self._process.stderr is not None
        said = self._process.stderr.read().decode()
        self._process.wait()
        self._process.stderr.close()
        assert self._process.stdout is not None
        self._process.stdout.close()
        return said if "Traceback" in said else ""

    async def _live(self) -> None:
        async with AsyncExitStack() as stack:
            self._stop = stack.enter_context(trio.CancelScope())
            self._token = trio.lowlevel.current_trio_token()
            self._honest = await stack.enter_async_context(open_libp2p_transport(HONEST, []))
            self._ready.set()
            await trio.sleep_forever()

    async def _ask(self, protocol: Any) -> int:
        peer = PeerAddress(peer=TARGET.peer_id, addresses=(self.address,))
        with trio.move_on_after(HANG_SECONDS):
            return (await request(self._honest, peer, protocol, Ack(count=41), Ack)).count
        raise Defect("the honest peer gets no answer")

    async def _play(self, case: Case) -> None:
        for step in case.steps:
            with trio.move_on_after(HANG_SECONDS):
                await self._attack(step)
        if self._process.poll() is not None:
            raise Defect(f"the process ended with {self._process.returncode}")
        if await self._ask("hello") != 42:
            raise Defect("the honest peer got a wrong answer")

    async def _attack(self, step: Step) -> None:
        try:
            async with client(step.role, self._port, TARGET.peer_id, BAD) as hostile:  # type: ignore[arg-type]
                await hostile.send(step.data)
                if step.after == "read":
                    await hostile.tcp.stream.send_eof()
                with trio.move_on_after(LINGER_SECONDS):
                    while await hostile.tcp.stream.receive_some(1 << 16):
                        pass
                await hostile.hang_up(rudely=step.after == "reset")
        except Exception:  # noqa: BLE001 - being refused, in whatever way, is what a hostile client may expect
            pass


@contextmanager
def target() -> Iterator[Target]:
    """A target for many cases. What it logged as an exception of ours is a defect too."""
    running = Target()
    try:
        yield running
    finally:
        said = running.close()
    if said:
        raise Defect(said[-4000:])


# What is said at each level.


def _numbers(draw: Any) -> bytes:
    """A yamux frame with fields from the edges of their ranges."""
    kind = draw(st.one_of(st.integers(0, 3), st.integers(0, 255)))
    flags = draw(st.one_of(st.sampled_from([0, 1, 2, 4, 8, 3, 5, 15]), st.integers(0, 65535)))
    stream = draw(st.one_of(st.sampled_from([0, 1, 2, 3, 5, 2**32 - 1]), st.integers(0, 2**32 - 1)))
    payload = draw(st.binary(max_size=20))
    lengths = st.sampled_from([len(payload), 0, 1, 2**18, 2**18 + 1, 2**23, 2**31, 2**32 - 1])
    version = draw(st.sampled_from([0] * 9 + [1, 255]))
    return HEADER.pack(version, kind, flags, stream, draw(lengths)) + (payload if kind == 0 else b"")


@st.composite
def yamux_bytes(draw: Any) -> bytes:
    """Frames that are right, wrong, cut or too many."""
    data = b"".join(_numbers(draw) for _ in range(draw(st.integers(1, 12))))
    how = draw(st.sampled_from(["as-is", "as-is", "mangled", "flood", "opens", "drops"]))
    if how == "flood":
        return data * draw(st.integers(2, 300))
    if how == "opens":
        return b"".join(HEADER.pack(0, 1, 1, 2 * n + 1, 0) for n in range(draw(st.integers(1, 600))))
    if how == "drops":
        return b"".join(HEADER.pack(0, 1, 1, 2 * n + 1, 0) + HEADER.pack(0, 1, 8, 2 * n + 1, 0) for n in range(300))
    return draw(mangled(data)) if how == "mangled" else data


@st.composite
def line_bytes(draw: Any, proper: bytes) -> bytes:
    """Lines of multistream-select: right, mangled, with lengths that lie, not UTF-8, or none."""
    texts = st.one_of(st.text(max_size=12), st.sampled_from(["ls", "na", "/noise", "/plaintext/2.0.0", "/echo2/x/1"]))
    lines = b"".join(line(text[:60]) for text in draw(st.lists(texts, max_size=4)) if len(text.encode()) < 120)
    raw = draw(st.one_of(st.binary(max_size=40), st.just(b"\xff" * 10), st.just(b"\x04\xff\xfe\xfd\x0a")))
    return draw(st.one_of(mangled(proper), st.sampled_from([lines, raw, proper + raw, proper + lines, lines * 50])))


@st.composite
def noise_bytes(draw: Any) -> bytes:
    """Messages with their 16-bit lengths; contents of any kind."""
    parts = draw(st.lists(st.one_of(st.binary(max_size=100), st.binary(min_size=32, max_size=32)), max_size=4))
    data = b"".join(len(part).to_bytes(2, "big") + part for part in parts)
    return draw(st.one_of(st.just(data), mangled(data + b"\0\0\0\0"), st.just(b"\xff\xff" + bytes(70_000))))


MESSAGE = encode_frame(Ack(count=1)) + END

SAYINGS: dict[str, Callable[[], st.SearchStrategy[bytes]]] = {
    "port": lambda: st.one_of(
        st.binary(max_size=64), line_bytes(HELLO_LINES["noise"]), st.just(b"GET / HTTP/1.1\r\n\r\n")
    ),
    "noise": noise_bytes,
    "frames": noise_bytes,
    "secured": lambda: line_bytes(HELLO_LINES["yamux"]),
    "yamux": yamux_bytes,
    "stream": lambda: line_bytes(HELLO_LINES["protocol"]),
    "protocol": lambda: st.one_of(mangled(MESSAGE), st.binary(max_size=64), st.just(MESSAGE * 3)),
}


@st.composite
def steps(draw: Any) -> Step:
    level = draw(st.sampled_from([*LEVELS, "yamux", "yamux"]))
    return Step(level, "", draw(SAYINGS[level]()), draw(st.sampled_from(["read", "reset", "silent"])))


def cases() -> st.SearchStrategy[Case]:
    """A few connections, one after the other."""
    return st.lists(steps(), min_size=1, max_size=4).map(lambda found: Case(NAME, tuple(found)))
