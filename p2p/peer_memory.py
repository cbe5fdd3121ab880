"""Bans and back-off of one transport: in memory at once, in the state folder soon after (`peer_file`)."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import trio

from . import peer_file
from .errors import Unreachable
from .guards import BackOff, Ban, Bans, Failing

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from .messages import PeerAddress

log = logging.getLogger(__name__)

REMEMBER_SECONDS = 1.0
"""Between two writes of the file."""

MANY_ROWS = 256
MANY_SECONDS = 30.0
"""And once there is so much in it: in a flood every second brings a ban, and each write is the whole file."""

RETRY_SECONDS = 30.0
"""After a write that the disk refused: full and read-only disks last minutes, and what is to be written is kept."""


class PeerMemory:
    """Without a folder it ends with the process. `wall` is wall-clock time: what is kept outlives a restart."""

    def __init__(
        self, folder: Path | None, offences_max: int, random: Callable[[], float], wall: Callable[[], float]
    ) -> None:
        self.wall = wall
        self._path = None if folder is None else folder / peer_file.PEER_FILE
        self._bans = Bans(offences_max)
        self._back_off = BackOff(random)
        self._changed = trio.Event()
        self._writing = trio.Lock()
        self._rows = 0
        self._told: set[int | None] = set()

    def raise_if_banned(self, peer: str) -> None:
        """Raises Unreachable with the reason."""
        ban = self._bans.find(peer, self.wall())
        if ban is not None:
            raise Unreachable(f"{peer} is banned for {ban.until - self.wall():.0f} s more: {ban.reason}")

    def ban(self, peer: str, reason: str, seconds: float | None) -> Ban:
        """See `guards.Bans`."""
        self._changed.set()
        return self._bans.ban(peer, reason, self.wall(), seconds=seconds)

    def lift(self, peer: str) -> None:
        """See `guards.Bans`."""
        self._bans.lift(peer)
        self._changed.set()

    def offence(self, peer: str, reason: str) -> Ban | None:
        """See `guards.Bans`."""
        ban = self._bans.offence(peer, reason, self.wall())
        if ban is not None:
            self._changed.set()
        return ban

    def back_off_seconds(self, peer: PeerAddress) -> float:
        """Until it may be dialled."""
        return self._back_off.wait(peer.peer, peer.addresses, self.wall())

    def failed(self, peer: PeerAddress) -> None:
        """It could not be dialled."""
        self._back_off.failed(peer.peer, peer.addresses, self.wall())
        self._changed.set()

    def reached(self, peer: str) -> None:
        """There is a connection with it."""
        if self._back_off.succeeded(peer):
            self._changed.set()

    def bans(self) -> list[Ban]:
        """Those in force."""
        return self._bans.current(self.wall())

    def failing(self) -> list[Failing]:
        """Peers that could not be dialled the last time."""
        return self._back_off.remembered(self.wall())

    # The file.

    def recall(self) -> None:
        """What the last process knew."""
        if self._path is not None:
            peer_file.recall(self._path, self._bans, self._back_off, self.wall())

    async def run(self) -> None:
        """Keep the file up to date, until cancelled."""
        while True:
            await self._changed.wait()
            written = await self.flush()
            await trio.sleep(RETRY_SECONDS if not written else MANY_SECONDS if self._many else REMEMBER_SECONDS)

    @property
    def _many(self) -> bool:
        return self._rows > MANY_ROWS

    async def flush(self) -> bool:
        """Write what has changed. False: the disk refuses, it has still to be written."""
        async with self._writing:
            return await self._flush()

    async def _flush(self) -> bool:
        if not self._changed.is_set():
            return True
        self._changed = trio.Event()
        if self._path is None:
            return True
        found = peer_file.rows(self._bans, self._back_off, self.wall())
        self._rows = len(found[0]) + len(found[1])
        refused = await trio.to_thread.run_sync(peer_file.replace_by, self._path, found)
        if refused is None:
            self._told.clear()
            return True
        self._changed.set()
        if refused.errno not in self._told:
            self._told.add(refused.errno)
            log.warning("cannot write %s, bans and back-off are kept in memory: %s", self._path, refused.strerror)
        return False
