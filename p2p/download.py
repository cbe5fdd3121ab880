"""The asking side of `/echo2/chunks/1`: one download, from the first request to the installed snapshot.

`swarm` decides; here its actions become streams and timers, and what happens on them becomes its events. Chunks are
verified and kept in batches (whatever came while the last batch was written), and offered to others at once.
"""

from __future__ import annotations

import logging
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

import trio

from .channel import Channel
from .chunk_server import PeerTraffic
from .chunks import range_of
from .errors import (
    BadChunk,
    Echo2Error,
    ProtocolError,
    Refused,
    StorageFailed,
    Truncated,
    UnexpectedMessage,
    Unreachable,
)
from .messages import Ack, Chunk, ChunkRequest
from .swarm import LATE, Arrived, Ask, Declined, Drop, Ended, Fail, Lost, Refresh, Replanned, Start, Swarm, Tick, Wrong

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from .channel import Complaint
    from .messages import BroadcastPlan, Manifest, Signed
    from .store import Snapshot, SnapshotStore
    from .swarm import Event
    from .transport import Transport

log = logging.getLogger(__name__)

WAITING_BYTES = 4 << 20
"""Received chunks that may wait for the store, per source; then the source is no longer read, and slows down."""

GATHER_SECONDS = 0.005
"""Chunks that come this soon after another are kept in one go with it: a trip to a thread and a file costs more than
the hash of a small chunk. Adds less to a hop than its round trip."""

REFRESH_SECONDS_MAX = 20.0
"""Bound on one refresh of the plan."""

ACKNOWLEDGE_SECONDS = 1.0
"""Once every chunk is here, streams whose END is under way get this long, so that their senders get their credit."""


class Surroundings(Protocol):
    """What a download needs of the process it runs in; `broadcast.Broadcaster` has it."""

    transport: Transport
    store: SnapshotStore
    clock: Callable[[], float]
    complain: Complaint
    traffic: dict[str, PeerTraffic]

    def announce(self) -> None:
        """Tell the serving side that chunks came."""


class Download:
    """One attempt at one snapshot. `run` returns it installed; whatever was verified before an error stays."""

    def __init__(
        self,
        around: Surroundings,
        manifest: Manifest,
        manifest_hash: bytes,
        plan: BroadcastPlan,
        ticket: Signed,
        banned: set[str],
        refresh: Callable[[], Awaitable[tuple[BroadcastPlan, Signed]]] | None,
    ) -> None:
        self.manifest = manifest
        self.manifest_hash = manifest_hash
        self._around = around
        self._ticket = ticket
        self._banned = banned
        self._refresh = refresh
        self._swarm = Swarm(
            manifest,
            plan,
            around.transport.peer_id,
            around.store.chunks_held(manifest_hash),
            around.clock(),
            banned,
        )
        self.late: set[str] = set()
        """Relays that were to send chunks and were silent or lost."""
        self.planned: Counter[str] = Counter()
        """Bytes that came from whom the plan names for them."""
        self._pulls: dict[int, trio.CancelScope] = {}
        self._finishing: dict[int, set[int]] = {}
        self._asked: dict[int, str] = {}
        self._changed = trio.Event()
        self._error: Echo2Error | None = None

    @property
    def chunks_held(self) -> int:
        """Verified chunks here."""
        return self._swarm.chunks - len(self._swarm.missing)

    @property
    def sources(self) -> tuple[str, ...]:
        """Who is asked for chunks now."""
        return tuple(sorted(set(self._asked.values())))

    @property
    def reason(self) -> str:
        """What is being waited for."""
        return self._swarm.reason(self._around.clock())

    async def run(self) -> Snapshot:
        """Download, verify, install. Raises Unreachable with the reason, StorageFailed, or BadChunk for the whole."""
        snapshot: Snapshot | None = None
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self._report(Start())
            try:
                await self._until_here()
                snapshot = await self._around.store.complete(self.manifest_hash)
                await self._let_acknowledge()
            except KeyError:
                self._error = StorageFailed("the snapshot was discarded while it was downloaded")
            except Echo2Error as error:  # not through the nursery, which would wrap it
                self._error = error
            nursery.cancel_scope.cancel()
        if snapshot is not None:
            return snapshot
        assert self._error is not None
        raise self._error

    async def _until_here(self) -> None:
        while self._swarm.missing and self._error is None:
            now = self._around.clock()
            with trio.move_on_after(max(0.0, self._swarm.deadline(now) - now)) as scope:
                await self._changed.wait()
            if scope.cancelled_caught:
                self._report(Tick())
            self._changed = trio.Event()
        if self._error is not None:
            raise self._error

    async def _let_acknowledge(self) -> None:
        for number, owed in self._finishing.items():
            if owed:
                self._pulls[number].cancel()
        with trio.move_on_after(ACKNOWLEDGE_SECONDS):
            while self._pulls:
                self._changed = trio.Event()
                await self._changed.wait()

    def _report(self, event: Event) -> None:
        """Tell the swarm, and start what it says. Never waits, so events are taken in the order they happened."""
        for action in self._swarm.step(event, self._around.clock()):
            match action:
                case Ask():
                    self._pulls[action.number] = scope = trio.CancelScope()
                    self._finishing[action.number] = set(action.chunks)
                    self._asked[action.number] = action.source.peer
                    self._nursery.start_soon(self._pull, action, scope)
                case Drop(number, source, reason):
                    if reason == LATE:
                        self._note_late(source)
                    log.info("passing over %s for version %d: %s", source, self.manifest.version, reason)
                    if number in self._pulls:
                        self._pulls[number].cancel()
                case Refresh(reason):
                    if self._refresh is not None:
                        log.info("asking for the plan of version %d anew: %s", self.manifest.version, reason)
                        self._nursery.start_soon(self._replan, self._refresh)
                case Fail(reason):
                    self._error = Unreachable(f"snapshot of version {self.manifest.version}: {reason}")
        self._changed.set()

    def _note_late(self, source: str) -> None:
        """The coordinator hears of relays that let this node wait, not of the root: that one it cannot plan around."""
        if source in self._swarm.relays:
            self.late.add(source)

    async def _replan(self, refresh: Callable[[], Awaitable[tuple[BroadcastPlan, Signed]]]) -> None:
        try:
            with trio.move_on_after(REFRESH_SECONDS_MAX):
                plan, self._ticket = await refresh()
                self._report(Replanned(plan))
        except Refused as refused:  # the coordinator no longer wants us to have this snapshot
            self._error = refused
            self._changed.set()
        except Echo2Error as error:  # the swarm goes on with the plan it has, within its own bound
            log.info("no new plan for version %d: %s", self.manifest.version, error)

    async def _pull(self, ask: Ask, scope: trio.CancelScope) -> None:
        peer = ask.source.peer
        event: Event | None = None
        with scope:
            try:
                await self._receive(ask)
                event = Ended(ask.number, peer)
            except Refused as refused:
                event = Declined(ask.number, peer, refused.code, refused.retry_seconds)
            except (Unreachable, Truncated) as error:
                event = Lost(ask.number, peer, str(error))
                self._note_late(peer)
            except ProtocolError as error:
                self._banned.add(peer)
                self._around.complain(peer, error)
                event = Wrong(peer, str(error))
            except StorageFailed as error:
                self._error = error
        del self._pulls[ask.number], self._finishing[ask.number], self._asked[ask.number]
        self._changed.set()
        if event is not None:
            self._report(event)

    async def _receive(self, ask: Ask) -> None:
        stream = await self._around.transport.open(ask.source, "chunks")
        done = False
        try:
            channel = Channel(stream)
            wanted = range_of(ask.chunks)
            await channel.send(
                ChunkRequest(
                    run=self.manifest.run,
                    manifest_hash=self.manifest_hash,
                    ticket=self._ticket,
                    first=wanted.first,
                    stop=wanted.stop,
                    stride=wanted.stride,
                    have=wanted.have,
                    wait_seconds=ask.wait_seconds,
                ),
                end=True,
            )
            await self._receive_chunks(channel, ask)
            await channel.send(Ack(count=len(ask.chunks)), end=True)
            await channel.close()
            done = True
        finally:
            if not done:
                with trio.CancelScope(shield=True):
                    await stream.reset()

    async def _receive_chunks(self, channel: Channel, ask: Ask) -> None:
        """Until END: one task reads, another keeps. What was read before an error is still kept."""
        places = max(2, WAITING_BYTES // self.manifest.chunk_bytes)
        to_keep, kept = trio.open_memory_channel[tuple[int, bytes]](places)
        faults: list[Echo2Error] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep, channel.peer, ask.number, kept, faults, nursery.cancel_scope)
            async with to_keep:
                try:
                    await self._read(channel, set(ask.chunks), to_keep)
                except Echo2Error as error:
                    faults.append(error)
        if faults:
            raise min(faults, key=lambda fault: not isinstance(fault, BadChunk))

    async def _read(self, channel: Channel, owed: set[int], to_keep: trio.MemorySendChannel[tuple[int, bytes]]) -> None:
        while True:
            chunk = await channel.receive_or_end(Chunk)
            if chunk is None:
                break
            if chunk.index not in owed:
                raise UnexpectedMessage(f"chunk {chunk.index} was sent but not asked for")
            owed.remove(chunk.index)
            await to_keep.send((chunk.index, chunk.data))
        if owed:
            raise UnexpectedMessage(f"END came with {len(owed)} chunks still owed")

    async def _keep(
        self,
        peer: str,
        number: int,
        received: trio.MemoryReceiveChannel[tuple[int, bytes]],
        faults: list[Echo2Error],
        both: trio.CancelScope,
    ) -> None:
        async for first in received:
            batch = [first]
            await trio.sleep(GATHER_SECONDS)
            with suppress(trio.WouldBlock, trio.EndOfChannel):
                while True:
                    batch.append(received.receive_nowait())
            try:
                await self._around.store.put_chunks(self.manifest_hash, batch)
            except KeyError:
                faults.append(StorageFailed("the snapshot was discarded while it was downloaded"))
            except (ProtocolError, StorageFailed) as error:
                faults.append(error)
            self._kept(peer, number, batch)
            if faults:
                both.cancel()
                return

    def _kept(self, peer: str, number: int, batch: list[tuple[int, bytes]]) -> None:
        held = self._around.store.held_bits(self.manifest_hash)
        new = {index for index, _ in batch if held >> index & 1} & self._swarm.missing
        arrived = [index for index, _ in batch if held >> index & 1]
        traffic = self._around.traffic.setdefault(peer, PeerTraffic())
        traffic.received_bytes += sum(len(data) for index, data in batch if held >> index & 1)
        self._finishing[number].difference_update(arrived)
        for index, data in batch:
            if index in new and self._swarm.is_planned(peer, index):
                new.discard(index)
                self.planned[peer] += len(data)
        if arrived:
            self._around.announce()
            self._report(Arrived(peer, arrived))
