"""What a node knows about itself and its pool, shared by its services; whoever changes it wakes whoever waits on it.

One trio task at a time runs between two awaits, so plain attributes are enough. Nothing here decides or does I/O.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from .lifecycle import Facts, Moved, State, state_of, step
from .limits import Rate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from echo2.p2p.messages import PoolNotice, Relayed, RunDescriptor
    from echo2.p2p.store import Snapshot

    from .lifecycle import Event
    from .spool import Counts


log = logging.getLogger(__name__)

ENGINE_STALLED_SECONDS = 30.0
"""A batch is sized to a few seconds, a load of gigabytes takes tens of them: what takes longer is worth a word."""


@dataclass(frozen=True, slots=True)
class Membership:
    """What the coordinator granted on this connection."""

    number: int
    descriptor: RunDescriptor
    heartbeat_seconds: float


class Situation:
    """See the module. Times are of the node's clock."""

    def __init__(self, clock: Callable[[], float], counts: Counts) -> None:
        self.clock = clock
        self.facts = Facts()
        self.membership: Membership | None = None
        self.notice: PoolNotice | None = None
        self.installed: Snapshot | None = None
        self.installs = 0
        self.leases_held = 0
        self.late: tuple[str, ...] = ()
        """Relays that let this node wait in its last download, for the coordinator."""
        self.relayed: tuple[Relayed, ...] = ()
        """Who sent this node what was planned of its last download, for the coordinator to credit."""
        self.counts = counts
        self.tokens_rate = Rate()
        self.samples_rate = Rate()
        self.last_error = ""
        self.last_error_at: float | None = None
        self._failed = ""
        self.engine_job = ""
        self.engine_since = 0.0
        self.lease_reason = ""
        self.joining_trouble = ""
        """Why no welcome comes before a person does something; empty: as far as is known, it will."""
        self.warning = ""
        self.protocol_errors = 0
        self._changed = trio.Event()

    @property
    def state(self) -> State:
        """The state that follows from the facts."""
        return state_of(self.facts)

    def happened(self, event: Event) -> None:
        """An event of the lifecycle."""
        facts = step(self.facts, event)
        if facts != self.facts:
            self.facts = facts
            self.notify()

    def failed(self, what: str, error: BaseException | str) -> None:
        """Something went wrong and will be tried again; shown as `last_error`."""
        self.last_error = f"{what}: {' '.join(str(error).split()) or type(error).__name__}"
        self.last_error_at = self.clock()
        self._failed = what

    def succeeded(self, *what: str) -> None:
        """It works again (or anything whose name begins so): its error is the log's now, not the status's."""
        if self._failed.startswith(what):
            self.last_error, self.last_error_at, self._failed = "", None, ""

    def warned(self, warning: str) -> None:
        """What the coordinator wants the owner to know; empty when nothing. Said in the log once."""
        if warning and warning != self.warning:
            log.warning("the coordinator says: %s", warning)
        self.warning = warning

    @contextmanager
    def engine_at(self, job: str) -> Iterator[None]:
        """Inside, the engine is at work on `job`, and whoever waits for it is told for how long."""
        self.engine_job, self.engine_since = job, self.clock()
        try:
            yield
        finally:
            self.engine_job = ""
            self.notify()

    @property
    def engine_seconds(self) -> float:
        """For how long the engine has been at its job; 0 when it is at rest."""
        return self.clock() - self.engine_since if self.engine_job else 0.0

    @property
    def says(self) -> str:
        """The state in a heartbeat: a node whose engine does not come back is no help, whatever else it would do."""
        stalled = self.state is State.WORKING and self.engine_seconds > ENGINE_STALLED_SECONDS
        return "stalled" if stalled else self.state.value

    def notify(self) -> None:
        """Wake everybody who waits on a change."""
        self._changed.set()
        self._changed = trio.Event()

    async def until(self, holds: Callable[[], object], *, seconds: float = float("inf")) -> bool:
        """Wait until `holds()`, at most `seconds`; whether it holds."""
        with trio.move_on_after(seconds):
            while not holds():
                await self._changed.wait()
        return bool(holds())

    async def pause(self, seconds: float, *, unless: Callable[[], object] = lambda: False) -> None:
        """Wait `seconds`, less when `unless()` comes to hold."""
        await self.until(unless, seconds=max(seconds, 0.0))

    async def joined(self) -> Membership:
        """Wait for a welcome; the membership in force."""
        await self.until(lambda: self.facts.joined)
        assert self.membership is not None
        return self.membership

    def welcomed(self, membership: Membership) -> None:
        """In force from now on. Of another run nothing is in use, nothing is known, and nothing was measured."""
        before, self.membership = self.membership, membership
        if before is not None and before.descriptor.run != membership.descriptor.run:
            self.installed = self.notice = None
            self.late, self.lease_reason = (), ""
            self.tokens_rate, self.samples_rate = Rate(), Rate()
            self.happened(Moved())

    @property
    def order(self) -> tuple[int, int] | None:
        """(epoch, version) in use; None when nothing is installed."""
        snapshot = self.installed
        return None if snapshot is None else (snapshot.manifest.epoch, snapshot.manifest.version)

    @property
    def behind(self) -> bool:
        """Whether the pool has a newer snapshot than the one in use."""
        notice = self.notice
        if notice is None or notice.version is None or notice.manifest_hash is None:
            return False
        return self.order is None or (notice.epoch, notice.version) > self.order
