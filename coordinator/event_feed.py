"""The audit log as it grows, for those who watch it.

Nobody has a queue that could run over: each watcher reads on from the last line it has, at its own pace and at most
PAGE lines at a time; a bell tells all of them at once that there is more. The ledger is asked whether there is once a
second, however many watch, because the command line writes into it as well. On PostgreSQL a line that another process
writes at the very moment of ours may come in behind it and be missed here; `GET /v1/events` has it.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from echo2.p2p.errors import Refused

from .ledger import LedgerUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator

    from .rest_desk import Desk
    from .views import EventView

PAGE = 100

LOOK_SECONDS = 1.0

HEARTBEAT_SECONDS = 5.0
"""Between two signs of life: proxies cut what is silent for half a minute, and the second write to a page that was
closed finds out that it was."""

STREAM_SECONDS = 90.0
"""Then the stream ends, and browsers come again by themselves with the last id they had. Within the bounds on an answer
(`rest_server.ANSWER_SECONDS`)."""

WATCHERS_MAX = 24
"""Each holds a connection, of `rest_server.CONNECTIONS_MAX`."""

WATCHERS_OF_CLIENT_MAX = 8
"""Of one address with one token. A page that is loaded anew holds two places for some seconds, and a browser that found
none does not come again."""


@dataclass(eq=False, slots=True)
class Watcher:
    """One stream. `over`: it gave up its place, and ends at its next line or sign of life."""

    who: str
    address: str
    over: bool = False


class EventFeed:
    """Serves every watcher; `run` looks for news while there are any."""

    def __init__(
        self, desk: Desk, *, stream_seconds: float = STREAM_SECONDS, heartbeat_seconds: float = HEARTBEAT_SECONDS
    ) -> None:
        self._desk = desk
        self._stream_seconds = stream_seconds
        self._heartbeat_seconds = heartbeat_seconds
        self._watchers: dict[Watcher, None] = {}
        self._newest = 0
        self._more = trio.Event()
        self._watched = trio.Event()

    async def run(self) -> None:
        """Look for news until cancelled."""
        while True:
            await self._watched.wait()
            while self._watchers:
                self.look()
                await trio.sleep(LOOK_SECONDS)
            self._watched = trio.Event()

    def look(self) -> None:
        """Ring if the log has grown. A ledger that is away is asked again next time."""
        try:
            newest = self._desk.newest_event()
        except LedgerUnavailable:
            return
        if newest != self._newest:  # less, after a ledger was put back
            self._newest = newest
            self._ring()

    def _ring(self) -> None:
        self._more.set()
        self._more = trio.Event()

    @contextmanager
    def watching(self, address: str, who: str = "") -> Iterator[Watcher]:
        """One place among the watchers; `who`: the token's name, of strangers none. Raises Refused when there is none.

        While all are taken, whoever has most of them, and more than this one would have, gives up the oldest of theirs.
        """
        who = who or address
        if sum((each.who, each.address) == (who, address) for each in self._watchers) >= WATCHERS_OF_CLIENT_MAX:
            raise Refused("busy", f"at most {WATCHERS_OF_CLIENT_MAX} streams of one client at a time", 10.0)
        if len(self._watchers) >= WATCHERS_MAX:
            crowd = Counter(each.who for each in self._watchers)
            most = max(crowd.values())
            if crowd[who] + 1 >= most:
                raise Refused("busy", f"{WATCHERS_MAX} streams are open, and no more may be", 10.0)
            oldest = next(each for each in self._watchers if crowd[each.who] == most)
            del self._watchers[oldest]
            oldest.over = True
            self._ring()
        watcher = Watcher(who, address)
        self._watchers[watcher] = None
        self._watched.set()
        try:
            yield watcher
        finally:
            self._watchers.pop(watcher, None)

    async def events(
        self, after: int | None, goes_on: Callable[[], bool] = lambda: True
    ) -> AsyncGenerator[list[EventView], None]:
        """Lines behind `after`, or from now on: a page as soon as there is one, an empty one as a sign of life.

        Until `goes_on` says no; it is asked before each. Raises LedgerUnavailable if not even the beginning is known.
        """
        last = self._desk.newest_event() if after is None else after
        ends_at = trio.current_time() + self._stream_seconds
        while trio.current_time() < ends_at and goes_on():
            more = self._more
            try:
                page = self._desk.events_behind(last, limit=PAGE)
            except Refused:
                page = []
            if page:
                last = page[-1].id
                yield page
                continue
            with trio.move_on_after(min(self._heartbeat_seconds, max(0.0, ends_at - trio.current_time()))) as waited:
                await more.wait()
            if waited.cancelled_caught:
                yield []
