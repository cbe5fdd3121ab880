"""REST's listener: a connection is accepted with a place for it (`rest_places`), or not at all."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Callable

    from .rest_places import Place, Places

log = logging.getLogger(__name__)


class Seat(trio.abc.AsyncResource):
    """A connection that was accepted, and the place it has. Cancelling `scope` ends it."""

    def __init__(
        self, stream: trio.SocketStream, place: Place, scope: trio.CancelScope, left: Callable[[], None]
    ) -> None:
        self.stream = stream
        self.place = place
        self.scope = scope
        self._left = left

    async def aclose(self) -> None:
        """Close the connection, and give its place back."""
        try:
            await self.stream.aclose()
        finally:
            left, self._left = self._left, _nothing
            left()


def _nothing() -> None:
    pass


class CappedListener(trio.abc.Listener[Seat]):
    """Accepts while there are `places`, or someone gives one up. Never more than `most` are open, and one that waits.

    A connection costs a file, and a process without files writes no ledger and takes no peers: clients of REST, idle
    ones too (which are closed after a few seconds), get no more than their part.
    """

    def __init__(self, listener: trio.SocketListener, places: Places, most: int, clock: Callable[[], float]) -> None:
        self._listener = listener
        self._places = places
        self._open = trio.Semaphore(most, max_value=most)
        self._clock = clock

    async def accept(self) -> Seat:
        """The next connection that is let in."""
        while True:
            stream = await self._listener.accept()
            scope = trio.CancelScope()
            try:
                place = self._places.enter(stream.socket.getpeername()[0], self._clock(), scope.cancel)
            except OSError as error:
                log.debug("a client went away before it was let in: %s", error)
                place = None
            if place is None:
                await trio.aclose_forcefully(stream)
                continue
            try:
                await self._open.acquire()  # until whoever gave up its place has closed
            except BaseException:
                self._places.leave(place)
                await trio.aclose_forcefully(stream)
                raise
            return Seat(stream, place, scope, partial(self._leave, place))

    def _leave(self, place: Place) -> None:
        self._places.leave(place)
        self._open.release()

    async def aclose(self) -> None:
        """Accept no more."""
        await self._listener.aclose()
