"""Raw bytes at every layer, against a process of its own; an honest peer beside it asks on, over one old connection."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import trio
from fuzz.case import Case, Step
from fuzz.source import Defect, Unserved
from fuzz.wire import client
from fuzz.wire_bytes import BAD
from fuzz.wire_target import TARGET

from echo2.p2p.channel import request
from echo2.p2p.identity import Identity
from echo2.p2p.libp2p_transport import open_libp2p_transport
from echo2.p2p.messages import Ack, PeerAddress

NAME = "wire"

HONEST = Identity(b"\x31" * 32)

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
        self.ask()  # the honest peer is connected from now on
        self.idle = self.files(), self.ask("report")

    def play(self, case: Case) -> None:
        """Raise Defect unless the target bore the case and still answers the honest peer."""
        trio.from_thread.run(self._play, case, trio_token=self._token)
        self.played += 1

    def play_together(self, steps: Sequence[Step]) -> None:
        """As many hostile connections at once, an honest request among them and one after."""
        trio.from_thread.run(self._play_together, steps, trio_token=self._token)
        self.played += len(steps)

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
        raise Unserved("the honest peer gets no answer")

    async def _play(self, case: Case) -> None:
        for step in case.steps:
            await self._attack(step)
        await self._served()

    async def _play_together(self, steps: Sequence[Step]) -> None:
        async with trio.open_nursery() as nursery:
            for step in steps:
                nursery.start_soon(self._attack, step)
            await self._served()  # while they are at it
        await self._served()

    async def _served(self) -> None:
        if self._process.poll() is not None:
            raise Defect(f"the process ended with {self._process.returncode}")
        if await self._ask("hello") != 42:
            raise Unserved("the honest peer got a wrong answer")

    async def _attack(self, step: Step) -> None:
        try:
            with trio.move_on_after(HANG_SECONDS):
                await self._say(step)
        except Exception:  # noqa: BLE001 - being refused, in whatever way, is what a hostile client may expect
            pass

    async def _say(self, step: Step) -> None:
        async with client(step.role, self._port, TARGET.peer_id, BAD) as hostile:  # type: ignore[arg-type]
            await hostile.send(step.data)
            if step.after == "read":
                await hostile.tcp.stream.send_eof()
            with trio.move_on_after(LINGER_SECONDS):
                while await hostile.tcp.stream.receive_some(1 << 16):
                    pass
            await hostile.hang_up(rudely=step.after == "reset")


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
