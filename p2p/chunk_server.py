"""The serving side of `/echo2/chunks/1`: verified chunks to whoever holds a ticket for them.

asker                                   holder (here)
ChunkRequest END  ------------------->  checks the ticket
                  <-------------------  Chunk, Chunk, ... each as soon as it is verified here
                  <-------------------  END, or a Refusal when it will not send the rest
Ack(count) END    ------------------->  credits what arrived; both close
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import trio

from .bitmap import bits_of, lowest
from .channel import Channel, asked
from .chunks import wanted_by
from .errors import (
    BadSignature,
    Echo2Error,
    ProtocolError,
    Refused,
    SchemaViolation,
    Stalled,
    StorageFailed,
    Truncated,
    Unreachable,
)
from .identity import open_signed
from .messages import CHUNKS_MAX, Ack, Chunk, ChunkRequest, Refusal, Ticket
from .swarm import LACKING_CODE, SOURCE_WAIT_SECONDS, TICKET_CODE
from .unread import Unread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from .channel import Complaint
    from .store import SnapshotStore
    from .transport import Stream

log = logging.getLogger(__name__)

SERVINGS_MAX = 2
"""Times one chunk is sent to one peer: once, and once more for a stream that was cut. More is not repair but abuse."""

SERVINGS_FORGET_SECONDS = 600.0
"""Servings are counted anew after this, so that a node whose line was cut at a bad moment is not shut out for ever."""

STREAMS_MAX = 64
"""Streams served at once: each may hold a batch (SEND_BYTES, or one chunk of 4 MiB) twice, so 512 MiB at the worst."""

STREAMS_PER_PEER_MAX = 4
"""Honest askers have one; the rest is for old ones whose end has not been noticed yet."""

SEND_BYTES = 1 << 20
"""Chunks are read and written in batches of about this size: large writes are what makes Noise and yamux fast."""

SEND_SECONDS = 60.0
"""Bound on one batch's write, and on the acknowledgement of all: about 17 KiB/s, below any useful line."""

HANDSHAKE_SECONDS = 10.0
"""Bound on reading a request of one that has shown a ticket before: its uplink may be full of chunks that it relays."""

STRANGER_SECONDS = 4.0
"""And of one that has not: the longest request, 64 KiB, on a line of 17 KiB/s. Most are 1 KiB, one round trip away."""

UNREAD_MAX = 128
"""Requests being read, 64 KiB each at most. They hold no place for serving: that takes a ticket."""

SILENT_MAX = 4
"""Requests of one stranger that never came, for one complaint: five of those are a ban, a few time-outs are a line."""

HOLDERS_MAX = 1024
"""Peers remembered each as holders of a ticket and as silent: as many as a pool has, the eldest is forgotten first."""

BUSY_LOG_SECONDS = 10.0
"""Requests turned away, and pushed out unread, are reported this often at most."""

LOOK_SECONDS = 1.0
"""A serving task looks at the store at least this often, for chunks that came there by another way."""


@dataclass(slots=True)
class PeerTraffic:
    """Chunk bytes exchanged with one peer. Relay credit counts only `acknowledged_bytes`."""

    received_bytes: int = 0
    sent_bytes: int = 0
    acknowledged_bytes: int = 0


async def _refuse(channel: Channel, refused: Refused) -> None:
    refusal = Refusal(code=refused.code, detail=refused.detail[:512], retry_seconds=refused.retry_seconds)
    with trio.fail_after(SEND_SECONDS):
        await channel.send(refusal, end=True)


def _forget_eldest(known: dict[str, Any]) -> None:
    if len(known) > HOLDERS_MAX:
        del known[next(iter(known))]


@dataclass(slots=True)
class _Serving:
    """How often each peer was sent each chunk of one snapshot. All counts age together.

    `sent[peer][n]` are the chunks it was sent more than n times, as a `bitmap`.
    """

    since: float
    sent: dict[str, list[int]] = field(default_factory=dict)


class ChunkServer:
    """Serves what `store` holds; `announce` says that there is more. `traffic` is shared with the receiving side."""

    def __init__(
        self,
        store: SnapshotStore,
        coordinator: str,
        *,
        clock: Callable[[], float],
        complain: Complaint,
        traffic: dict[str, PeerTraffic],
    ) -> None:
        self._store = store
        self._coordinator = coordinator
        self._clock = clock
        self._complain = complain
        self._traffic = traffic
        self._arrival = trio.Event()
        self._streams: dict[str, int] = {}
        self._unread = Unread(UNREAD_MAX)
        self._holders: dict[str, None] = {}
        self._silent: dict[str, int] = {}
        self._turned_away = 0
        self._said: tuple[int, int] = (0, 0)
        self._said_at = -BUSY_LOG_SECONDS
        self._servings: dict[bytes, _Serving] = {}

    @property
    def streams(self) -> int:
        """Requests being answered now."""
        return sum(self._streams.values())

    @property
    def turned_away(self) -> int:
        """Requests of ticket holders that found every place taken, since the start."""
        return self._turned_away

    @property
    def pushed_out(self) -> int:
        """Requests that were not read in time before others needed their place, since the start."""
        return self._unread.evicted

    def is_holder(self, peer: str) -> bool:
        """Whether `peer` has shown a ticket, lately."""
        return peer in self._holders

    def announce(self) -> None:
        """Chunks came into the store: whoever waits for them is served at once."""
        self._arrival.set()
        self._arrival = trio.Event()

    async def answer(self, stream: Stream) -> None:
        """The stream handler. A peer that dies or changes its mind did no wrong; one that breaks the protocol did."""
        peer = stream.peer
        channel = Channel(stream)
        done = False
        try:
            try:
                request = await self._read(channel)
                self._check_ticket(peer, request)
                with self._place(peer):
                    await self._serve(channel, request)
            except Refused as refused:
                await _refuse(channel, refused)
            await channel.close()
            done = True
        except ProtocolError as error:
            if not isinstance(error, Truncated):
                self._complain(peer, error)
        except (Unreachable, trio.TooSlowError) as error:
            log.debug("%s went away while it was served chunks: %s", peer, error)
        finally:
            if not done:
                with trio.CancelScope(shield=True):
                    await stream.reset()

    async def _read(self, channel: Channel) -> ChunkRequest:
        """The request. It holds no place for serving while it is read, and must not keep others from being read.

        Raises Unreachable when it does not come.
        """
        peer = channel.peer
        seconds = HANDSHAKE_SECONDS if peer in self._holders else STRANGER_SECONDS
        with self._unread.place(peer), trio.move_on_after(seconds) as patience:
            self._report()
            return await asked(channel, ChunkRequest)
        if patience.cancelled_caught:
            self._note_silent(peer, seconds)
        raise Unreachable(f"{peer} opened a stream for chunks and did not ask for any")

    def _note_silent(self, peer: str, seconds: float) -> None:
        if peer in self._holders:
            return
        count = self._silent.pop(peer, 0) + 1
        if count >= SILENT_MAX:
            self._complain(peer, Stalled(f"{count} requests for chunks did not come within {seconds:.0f} s"))
            return
        self._silent[peer] = count
        _forget_eldest(self._silent)

    def _note_holder(self, peer: str) -> None:
        self._silent.pop(peer, None)
        self._holders.pop(peer, None)
        self._holders[peer] = None
        _forget_eldest(self._holders)

    @contextmanager
    def _place(self, peer: str) -> Iterator[None]:
        """One of the places for serving. Raises Refused when all are taken."""
        if self._streams.get(peer, 0) >= STREAMS_PER_PEER_MAX or self.streams >= STREAMS_MAX:
            self._turned_away += 1
            self._report()
            raise Refused("busy", "too many streams are being served", LOOK_SECONDS)
        self._streams[peer] = self._streams.get(peer, 0) + 1
        try:
            yield
        finally:
            self._streams[peer] -= 1
            if not self._streams[peer]:
                del self._streams[peer]

    def _report(self) -> None:
        """Say in the log that requests go unanswered, but not for each of a flood."""
        counts, now = (self._turned_away, self._unread.evicted), self._clock()
        if counts == self._said or now - self._said_at < BUSY_LOG_SECONDS:
            return
        away, out = (new - old for new, old in zip(counts, self._said, strict=True))
        self._said, self._said_at = counts, now
        log.warning(
            "requests for chunks: %d turned away busy (%d are being served), %d pushed out before they were sent",
            away,
            self.streams,
            out,
        )

    async def _serve(self, channel: Channel, request: ChunkRequest) -> None:
        """Send, and meanwhile listen: an asker that goes away must not hold its place until the next chunk comes."""
        faults: list[Echo2Error | trio.TooSlowError] = []
        acknowledged: list[Ack] = []
        async with trio.open_nursery() as nursery:

            async def listen() -> None:
                try:
                    acknowledged.append(await asked(channel, Ack))
                except Echo2Error as error:
                    faults.append(error)
                    nursery.cancel_scope.cancel()

            nursery.start_soon(listen)
            try:
                sent, sent_bytes = await self._send_wanted(channel, request)
                nursery.cancel_scope.deadline = trio.current_time() + SEND_SECONDS  # for the acknowledgement
            except (Echo2Error, trio.TooSlowError) as error:
                faults.append(error)
                nursery.cancel_scope.cancel()
        if faults:
            raise faults[0]
        if not acknowledged:
            raise Unreachable(f"{channel.peer} did not acknowledge its chunks")
        if acknowledged[0].count == sent:
            self._traffic.setdefault(channel.peer, PeerTraffic()).acknowledged_bytes += sent_bytes

    def _check_ticket(self, peer: str, request: ChunkRequest) -> None:
        try:
            ticket = open_signed(request.ticket, self._coordinator, "ticket", Ticket)
            if (ticket.peer, ticket.run, ticket.manifest_hash) != (peer, request.run, request.manifest_hash):
                raise SchemaViolation("the ticket is for another peer, run or snapshot")
        except (BadSignature, SchemaViolation) as error:
            self._complain(peer, error)
            raise Refused(TICKET_CODE, str(error)) from error
        self._note_holder(peer)

    async def _send_wanted(self, channel: Channel, request: ChunkRequest) -> tuple[int, int]:
        """Send what is asked for as it comes, then END: how many chunks, of how many bytes together.

        Raises Refused when the rest is not to be had here.
        """
        serving = self._serving(request.manifest_hash)
        counts = serving.sent.setdefault(channel.peer, [0] * SERVINGS_MAX)
        wanted = wanted_by(request, CHUNKS_MAX)
        patience = min(request.wait_seconds, SOURCE_WAIT_SECONDS)
        waits_until = self._clock() + patience
        barred = 0
        sent = sent_bytes = 0
        batch_chunks = 1  # until the size of one is known
        while wanted:
            arrival = self._arrival  # taken before the look at the store, so that nothing is missed between the two
            spent = wanted & counts[-1]
            barred |= spent
            wanted ^= spent
            batch = lowest(wanted & self._store.held_bits(request.manifest_hash), batch_chunks)
            if batch:
                size = await self._send_batch(channel, request.manifest_hash, batch, counts)
                batch_chunks = max(1, SEND_BYTES * len(batch) // size)
                sent, sent_bytes = sent + len(batch), sent_bytes + size
                wanted ^= bits_of(batch)
                waits_until = self._clock() + patience
            elif wanted:
                left = waits_until - self._clock()
                if left <= 0:
                    raise Refused(LACKING_CODE, "the rest has not come here yet", retry_seconds=LOOK_SECONDS)
                with trio.move_on_after(min(left, LOOK_SECONDS)):
                    await arrival.wait()
        if barred:
            age = self._clock() - serving.since
            raise Refused(
                "served-twice",
                f"{barred.bit_count()} of these chunks were sent to you {SERVINGS_MAX} times already",
                retry_seconds=max(0.0, SERVINGS_FORGET_SECONDS - age),
            )
        with trio.fail_after(SEND_SECONDS):
            await channel.send(end=True)
        return sent, sent_bytes

    async def _send_batch(self, channel: Channel, manifest_hash: bytes, batch: Sequence[int], counts: list[int]) -> int:
        now = bits_of(batch)
        for place, fewer in enumerate(counts):  # before anything is awaited: a second stream of that peer must see it
            counts[place], now = fewer | now, fewer & now
        try:
            chunks = await self._store.get_chunks(manifest_hash, batch)
        except KeyError:
            raise Refused("discarded", "the snapshot is no longer held here") from None
        except StorageFailed as error:
            log.error("cannot serve chunks: %s", error)  # noqa: TRY400 - a full or failing disk is no bug to trace
            raise Refused("storage", "the disk here failed", retry_seconds=SEND_SECONDS) from error
        with trio.fail_after(SEND_SECONDS):
            await channel.send(*(Chunk(index=index, data=data) for index, data in zip(batch, chunks, strict=True)))
        size = sum(map(len, chunks))
        self._traffic.setdefault(channel.peer, PeerTraffic()).sent_bytes += size
        return size

    def _serving(self, manifest_hash: bytes) -> _Serving:
        now = self._clock()
        for known, serving in list(self._servings.items()):
            if now >= serving.since + SERVINGS_FORGET_SECONDS:
                del self._servings[known]
        return self._servings.setdefault(manifest_hash, _Serving(now))
