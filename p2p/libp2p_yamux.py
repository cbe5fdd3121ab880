"""yamux (https://github.com/hashicorp/yamux/blob/master/spec.md) for one connection between two peers.

py-libp2p 0.8.1's own muxer is not used, for these faults of its:
- The read loop waits for the write lock, so bulk both ways and a stream open on one connection deadlock
  (`yamux.py:1377`). Here reading never waits for writing: whatever reading has to answer goes into a bounded queue.
- Cancelling a write blocked in TCP tears a frame and so the whole connection. Here one task writes, whole frames, and
  nobody cancels it; a sender only lends it bytes.
- A sender stalled for 5 s fails, its reader is not told. Here a sender waits for as long as its caller lets it.
- A peer that ignores the window is only logged (`yamux.py:1546`). Here it costs the peer the connection.
- No cap on streams, and a black-holed link is never noticed. Here there are a cap and pings.

Sending is a pull: the writer takes at most one frame from each waiting stream in turn, control frames first, so that a
small request is not held up behind bulk by more than one batch.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Literal, Protocol

import trio

from .errors import Unreachable
from .frame_budget import SMALL_FRAME_BYTES, FrameBudget
from .guards import FRUITLESS_BURST, FRUITLESS_PER_SECOND, Buffers, Nuisance
from .libp2p_stream import (
    ACK,
    DATA,
    FIN,
    GO_AWAY,
    HEADER,
    PING,
    RST,
    SYN,
    WINDOW_BYTES_MAX,
    WINDOW_UPDATE,
    PeerFault,
    YamuxStream,
)
from .rates import CONTROL_WEIGHT, Limiter

if TYPE_CHECKING:
    from collections.abc import Callable

    from .rates import Turn

log = logging.getLogger(__name__)

Traffic = Literal["control", "bulk"]
"""What a connection is for: small requests that someone waits for, or megabytes that would hold them up."""

Via = Literal["direct", "punched", "relay"]
"""How a connection came about, best first."""

FRAME_BYTES = 65_519 - HEADER.size
"""Payload of a frame we send: with its header exactly one Noise message, so frames never straddle two."""

BATCH_BYTES = 2 * (HEADER.size + FRAME_BYTES)
"""Handed to the socket at once: what a control frame may have to wait behind (0.5 s on a 2 Mbit/s uplink)."""

WINDOWS_BYTES_MAX = 64 * 1024 * 1024
"""All windows of one connection grow to this together: what one peer can make us hold."""

STREAMS_MAX = 256
"""Streams the peer may have open here; beyond, a new one is reset. Ours are bounded by our own callers."""

CONTROL_FRAMES_MAX = 8192
"""Answers waiting to be written. A peer that makes us answer and does not read is cut off here."""

RECEIVING_SECONDS = 1.0
"""A stream counts as receiving for so long after its last byte."""

SEND_WINDOW_MAX = 1 << 30
"""Room a peer may give one stream of ours; far above any use, below the 32 bits of the wire added up without end."""

SLICE_FRAMES = 128
"""Small frames handled in one go, under a millisecond: then every other connection and task gets its turn."""

SLICE_BYTES = 16 * 1024
"""A shorter message ends a turn as well: one read brings thousands of the shortest, each to be decrypted.
Of longer ones it brings 16 at most and ends a turn itself; bulk does not pay for more turns."""

PARTING_FRAMES = 256
"""What may still come for a stream that was ended here: its widest window, in frames of 32 KiB."""

PARTING_STREAMS_MAX = 1024
"""Ended streams for which that is known, the latest ones."""

STALL_GRACE_SECONDS = 0.1
"""For reading what came while this process was held up."""

PING_SECONDS = 10.0
"""A ping each so often: measures the round trip, keeps NAT mappings, and finds dead links."""

SILENT_SECONDS_MAX = 30.0
"""Nothing heard for this long, three pings included: the link is dead. Bears a process stalled in one big call."""

WRITE_SECONDS_MAX = 60.0
"""One batch not accepted by the kernel for this long: the peer reads nothing, and what we hold for it is stuck."""

TAKES_NOTHING_SECONDS = 10.0
"""A slow line takes a batch each second or two; by this long without one, a peer leaves what it asked for with us."""

FRUITLESS = "too many streams without a protocol"

LINGER_SECONDS = 900.0
"""A stream we have finished, on which the peer says nothing for this long, is forgotten: longer than any held reply."""

CLOSE_SECONDS = 1.0
"""What closing waits for: our last bytes to leave, and the peer to have seen our end."""


class Secured(Protocol):
    """What is needed of libp2p's secure session."""

    async def read(self, n: int | None = None) -> bytes:
        """One decrypted message."""

    async def write(self, data: bytes) -> None:
        """Encrypt and send."""


class Socket(Protocol):
    """The TCP connection below, for ending it."""

    async def send_eof(self) -> None:
        """No more from us."""

    async def close(self) -> None:
        """Release."""

    def mind_the_queue(self) -> None:
        """Bulk is being sent: keep it from filling the line's queue."""


class Yamux:
    """All streams of one connection. `run` serves it until it ends; `closed` tells why, once it has.

    Set by its owner: `via`, how it came about; `traffic`, what it is for, None while that is not known; `carries_bulk`,
    megabytes went over it, whatever it is for: such a one is paced from then on; `keep`, not to be closed when idle;
    `remote`, where its other end is seen. `fault` is what the peer broke, if that was the end.
    """

    def __init__(
        self,
        secured: Secured,
        socket: Socket,
        peer: str,
        *,
        initiator: bool,
        accept: Callable[[YamuxStream], bool],
        buffers: Buffers | None = None,
        unsent: Buffers | None = None,
        upload: Limiter | None = None,
    ) -> None:
        """`accept` is told of each inbound stream, in the read loop: it must not wait. False refuses the stream.

        `buffers`, `unsent` and `upload` are the process's; without them this connection is counted alone, uncapped.
        """
        self.peer = peer
        self.initiator = initiator
        self.via: Via = "direct"
        self.traffic: Traffic | None = None
        self.carries_bulk = False
        self.keep = False
        self.remote: tuple[str, int] | None = None
        self.fault: str | None = None
        self.round_trip_seconds = 0.0
        self.heard_bytes = 0
        self.closed: str | None = None
        self.going_away = False
        self.used_at = trio.current_time()
        self._secured = secured
        self._socket = socket
        self._accept = accept
        self._streams: dict[int, YamuxStream] = {}
        self._next_id = 1 if initiator else 2
        self._last_remote_id = 0
        self._widened_bytes = 0
        self._control: deque[bytes] = deque()
        self._waiting: deque[YamuxStream] = deque()
        self._writable = trio.Event()
        self._write_started_at: float | None = None
        self._finishing = False
        self._header = b""
        self._payload_of: YamuxStream | None = None
        self._payload_left = 0
        self._payload_fin = False
        self._buffers = buffers or Buffers(each_max=WINDOWS_BYTES_MAX * 2, total_max=WINDOWS_BYTES_MAX * 2)
        self._unsent = unsent or Buffers(each_max=WINDOWS_BYTES_MAX, total_max=WINDOWS_BYTES_MAX)
        self._sent_at = trio.current_time()
        self._nuisance = Nuisance(trio.current_time())
        self._fruitless = Nuisance(trio.current_time(), FRUITLESS_PER_SECOND, FRUITLESS_BURST)
        self._frame_budget = FrameBudget(trio.current_time())
        self._small_frames = 0
        self._moved_bytes = 0
        self._parting: dict[int, int] = {}
        self._upload = upload or Limiter(None)
        self._turn: Turn | None = None
        self._ping_sent_at = 0.0
        self._ping_value = 0
        self._ping_awaited = False
        self._scope = trio.CancelScope(shield=True)  # ended by `close` or `kill` alone, so that it ends politely
        self._ended = trio.Event()

    @property
    def stream_count(self) -> int:
        """Streams open now, either way."""
        return len(self._streams)

    @property
    def sending(self) -> bool:
        """Whether data wait to be sent."""
        return bool(self._waiting) or self._write_started_at is not None

    @property
    def usable(self) -> bool:
        """Whether a new stream may be opened."""
        return self.closed is None and not self.going_away and not self._finishing

    async def wait_closed(self) -> None:
        """Return when the connection has ended and its socket is released."""
        await self._ended.wait()

    @property
    def receiving_weight(self) -> float:
        """Its share of a capped download: the streams that bytes came for just now."""
        since = trio.current_time() - RECEIVING_SECONDS
        receiving = sum(1 for stream in self._streams.values() if stream.arrived_at >= since)
        return max(1, receiving) * (1 if self.traffic == "bulk" else CONTROL_WEIGHT)

    def mind_the_queue(self) -> None:
        """Called now and then: bulk must not fill the line's queue, where everything else would wait behind it."""
        if self.carries_bulk and self.sending:
            self._socket.mind_the_queue()

    def open_stream(self) -> YamuxStream:
        """A new stream. Raises Unreachable when the connection is ending."""
        if not self.usable:
            raise Unreachable(f"connection to {self.peer}: {self.closed or 'closing'}")
        stream = YamuxStream(self, self._next_id)
        self._next_id += 2
        self._streams[stream.stream_id] = stream
        self.used_at = trio.current_time()
        self.send_control(WINDOW_UPDATE, SYN, stream.stream_id, 0)
        return stream

    async def run(self) -> None:
        """Serve until the connection ends, for whatever reason. Never raises but Cancelled."""
        reason = "closed here"
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._write)
                    nursery.start_soon(self._watch)
                    reason = await self._read()
                    nursery.cancel_scope.cancel()
        finally:
            self._end(reason)
            with trio.CancelScope(shield=True), trio.move_on_after(CLOSE_SECONDS):
                await self._socket.close()
            self._ended.set()

    async def close(self) -> None:
        """Let what was sent leave, say good-bye, end. Bounded; never raises."""
        with trio.CancelScope(shield=True):
            with trio.move_on_after(CLOSE_SECONDS):
                if not self._finishing:
                    self.send_control(GO_AWAY, 0, 0, 0)
                    self._finishing = True
                    self._writable.set()
                await self._ended.wait()
            self._scope.cancel()
            with trio.move_on_after(CLOSE_SECONDS):
                await self._ended.wait()

    def kill(self, reason: str, *, drop: bool = False) -> None:
        """End at once, without good-bye. With `drop`, what has come and was not read yet is never read."""
        self._end(reason, drop=drop)
        self._scope.cancel()

    def bear_fruitless(self) -> None:
        """A stream of the peer's ended without a protocol. Too many of them are the end of the connection."""
        if self.closed is None and self._fruitless.one_more(trio.current_time()):
            self.fault = FRUITLESS
            log.warning("%s broke yamux: %s", self.peer, FRUITLESS)
            self.kill(f"the peer broke yamux: {FRUITLESS}")

    # Called by the streams.

    def sender_waits(self, stream: YamuxStream) -> None:
        """`stream` has bytes to send."""
        if stream.send_window > 0 and stream not in self._waiting:
            self._waiting.append(stream)
            self._writable.set()

    def send_control(self, kind: int, flags: int, stream_id: int, length: int) -> None:
        """Queue a frame without payload. Never waits; a peer for which too many wait is cut off."""
        if self.closed is not None:
            return
        if len(self._control) >= CONTROL_FRAMES_MAX:
            self.kill("the peer does not read what it makes us answer")
            return
        self._control.append(HEADER.pack(0, kind, flags, stream_id, length))
        self._writable.set()

    def forget(self, stream_id: int) -> None:
        """Both ends are done with the stream."""
        stream = self._streams.pop(stream_id, None)
        self.used_at = trio.current_time()
        if stream is not None:
            self._widened_bytes -= stream.widened_bytes
            self._part_with(stream_id)

    def widen(self, wanted: int) -> int:
        """Bytes by which a window may grow, out of the connection's common budget."""
        extra = min(wanted, WINDOWS_BYTES_MAX - self._widened_bytes)
        self._widened_bytes += extra
        return extra

    def buffered(self, count: int) -> None:
        """`count` bytes came for a stream and wait to be read. Whoever holds too much of our memory by that, ends."""
        heavy = self._buffers.take(self, count)
        if isinstance(heavy, Yamux):
            heavy.kill(f"{self._buffers.held(heavy)} bytes sent to us wait to be read", drop=True)

    def unbuffered(self, count: int) -> None:
        """They were read or dropped."""
        self._buffers.give(self, count)

    def unsent(self, count: int) -> None:
        """A stream was given `count` bytes to send. Whoever leaves too much of that with us, ends."""
        if not count:
            return
        if not self._unsent.held(self):
            self._sent_at = trio.current_time()
        heavy = self._unsent.take(self, count)
        if isinstance(heavy, Yamux):
            heavy.kill(f"{self._unsent.held(heavy)} bytes for the peer wait to be sent")

    def sent(self, count: int) -> None:
        """They are on their way, or given up."""
        if count:
            self._unsent.give(self, count)

    @property
    def takes_nothing(self) -> bool:
        """Whether bytes wait for this peer, and it has let none of them go for a while."""
        return trio.current_time() - self._sent_at >= TAKES_NOTHING_SECONDS

    # Writing.

    async def _write(self) -> None:
        try:
            while True:
                batch = self._next_batch()
                if not batch:
                    if self._finishing and not self._waiting:
                        await self._socket.send_eof()
                        return
                    self._writable = trio.Event()
                    await self._writable.wait()
                    continue
                self._write_started_at = trio.current_time()
                await self._secured.write(batch)
                self._write_started_at = None
        except Exception as error:  # noqa: BLE001 - whatever libp2p raises, it is the end of this connection only
            self.kill(f"{type(error).__name__}: {error}")

    def _next_batch(self) -> bytes:
        """Control frames first, then data as far as the upload cap lets us."""
        parts: list[bytes | memoryview] = list(self._control)
        self._control.clear()
        self._upload.count(len(parts) * HEADER.size)
        if not self._upload.capped:
            self._upload.count(self._take_data(parts, BATCH_BYTES, FRAME_BYTES))
            return b"".join(parts)
        if self._turn is None and self._waiting:
            each = min(FRAME_BYTES, self._upload.grant_bytes)
            wanted = sum(min(one.outgoing_bytes, one.send_window, each) + HEADER.size for one in self._waiting)
            weight = len(self._waiting) * (1 if self.traffic == "bulk" else CONTROL_WEIGHT)
            self._turn = self._upload.ask(self, min(wanted, BATCH_BYTES), weight, self._wake)
        if self._turn is not None and self._turn.granted:
            used = self._take_data(parts, self._turn.count, min(FRAME_BYTES, self._upload.grant_bytes))
            self._upload.settle(self._turn, used)
            self._turn = None
        return b"".join(parts)

    def _take_data(self, parts: list[bytes | memoryview], room: int, each: int) -> int:
        """One frame from each waiting stream in turn, until `room` is used; how much was."""
        begun_with = room
        for _ in range(len(self._waiting)):
            if room <= 0:
                break
            stream = self._waiting.popleft()
            count = min(stream.outgoing_bytes, stream.send_window, each, room)
            if count:
                parts += (HEADER.pack(0, DATA, 0, stream.stream_id, count), *stream.take(count))
                stream.send_window -= count
                stream.touched_at = self._sent_at = trio.current_time()
                room -= count + HEADER.size
                self._moved_bytes += count
            if not stream.outgoing_bytes:
                stream.wake_sender()
            elif stream.send_window > 0:
                self._waiting.append(stream)
        return begun_with - room

    def _wake(self) -> None:
        self._writable.set()

    # Reading.

    async def _read(self) -> str:
        try:
            while True:
                data = await self._secured.read()
                self.heard_bytes += len(data)
                self._small_frames = 0
                done = 0
                while (done := self._feed(data, done)) < len(data):
                    await trio.lowlevel.checkpoint()
                self._moved_bytes += len(data)
                if self._small_frames or len(data) < SMALL_FRAME_BYTES:
                    self._pay_for_small()
                if len(data) < SLICE_BYTES:
                    await trio.lowlevel.checkpoint()
        except PeerFault as fault:
            self.fault = str(fault)
            log.warning("%s broke yamux: %s", self.peer, fault)
            return f"the peer broke yamux: {fault}"
        except Exception as error:  # noqa: BLE001 - whatever libp2p raises, it is the end of this connection only
            return str(error) or type(error).__name__

    def _pay_for_small(self) -> None:
        """A message with small frames in it has been handled, or one that is small itself and counts as one."""
        moved, self._moved_bytes = self._moved_bytes, 0
        if not self._frame_budget.spend(max(self._small_frames, 1), moved, trio.current_time()):
            raise PeerFault("too many small frames")

    def _feed(self, data: bytes, offset: int) -> int:
        """Handle what has come: whole headers, and payload as it comes, so that never more than a header is kept.

        Returns how far it got: after many small frames others must have their turn first.
        """
        until = self._small_frames + SLICE_FRAMES
        while offset < len(data) and self.closed is None:
            if self._payload_left:
                count = min(self._payload_left, len(data) - offset)
                self._payload_left -= count
                if self._payload_of is not None:
                    # Without a copy when the frame fills the message; else a small piece would keep a large one.
                    whole = 2 * count >= len(data)
                    self._payload_of.arrived((memoryview(data) if whole else data)[offset : offset + count])
                offset += count
                if not self._payload_left:
                    self._payload_ended()
                continue
            missing = HEADER.size - len(self._header)
            header = self._header + data[offset : offset + missing]
            offset += missing
            if len(header) < HEADER.size:
                self._header = header
                break
            self._header = b""
            self._frame(*HEADER.unpack(header))
            if self._small_frames >= until:
                return offset
        return len(data)

    def _frame(self, version: int, kind: int, flags: int, stream_id: int, length: int) -> None:
        """A header has come."""
        if version != 0 or kind > GO_AWAY:
            raise PeerFault(f"version {version}, frame type {kind}")
        if kind != DATA or length < SMALL_FRAME_BYTES:
            self._small_frames += 1
        if kind == PING:
            self._ping_frame(flags, length)
        elif kind == GO_AWAY:
            if self.going_away:
                self._bear_nuisance()
            self.going_away = True
        else:
            self._stream_frame(kind, flags, stream_id, length)

    def _stream_frame(self, kind: int, flags: int, stream_id: int, length: int) -> None:
        if kind == DATA and length > WINDOW_BYTES_MAX:
            raise PeerFault(f"a frame of {length} bytes")
        if flags & SYN:
            self._opened(stream_id, says_nothing=bool(flags & (FIN | RST)) and (kind != DATA or not length))
        stream = self._streams.get(stream_id)
        if stream is None:
            self._stray(stream_id)
        elif flags & RST or (not length and self._says_nothing(stream, flags)):
            self._bear_nuisance()
        if kind == DATA:
            if stream is not None:
                stream.announced(length)
            self._payload_of, self._payload_left, self._payload_fin = stream, length, bool(flags & FIN)
        if stream is None:  # reset or refused here while this was on its way
            return
        if flags & RST:
            self._payload_of = None
            self.forget(stream_id)
            self._parting.pop(stream_id, None)  # it said itself that nothing more comes
            stream.die("the peer reset it", drop=False)
            return
        if kind == WINDOW_UPDATE:
            if stream.send_window + length > SEND_WINDOW_MAX:
                raise PeerFault(f"raised a window beyond {SEND_WINDOW_MAX} bytes")
            stream.send_window += length
            if stream.outgoing_bytes:
                self.sender_waits(stream)
            if flags & FIN:
                stream.finished()
        elif not length:
            self._payload_ended()

    def _payload_ended(self) -> None:
        if self._payload_of is not None and self._payload_fin:
            self._payload_of.finished()
        self._payload_of = None

    def _bear_nuisance(self) -> None:
        if self._nuisance.one_more(trio.current_time()):
            raise PeerFault("too many frames that serve no one")

    def _part_with(self, stream_id: int) -> None:
        """The stream ended here; what the peer sent before it could know will still come."""
        self._parting[stream_id] = PARTING_FRAMES
        if len(self._parting) > PARTING_STREAMS_MAX:
            del self._parting[next(iter(self._parting))]

    def _stray(self, stream_id: int) -> None:
        """A frame came for a stream that is not, or no longer."""
        left = self._parting.get(stream_id, 0)
        if left > 0:
            self._parting[stream_id] = left - 1
        else:
            self._bear_nuisance()

    def _says_nothing(self, stream: YamuxStream, flags: int) -> bool:
        """Whether a frame without length tells us nothing new: no beginning, no end, not the first consent."""
        if flags & FIN:
            return stream.fin_received
        if flags & ACK and stream.stream_id % 2 == self._next_id % 2:
            known, stream.acknowledged = stream.acknowledged, True
            return known
        return not flags & SYN

    def _opened(self, stream_id: int, *, says_nothing: bool = False) -> None:
        if stream_id % 2 == (1 if self.initiator else 0) or stream_id <= self._last_remote_id:
            raise PeerFault(f"opened stream {stream_id} out of order")
        self._last_remote_id = stream_id
        inbound = sum(1 for known in self._streams if known % 2 == stream_id % 2)
        stream = YamuxStream(self, stream_id)
        if says_nothing:
            self.bear_fruitless()
        if says_nothing or self._finishing or inbound >= STREAMS_MAX or not self._accept(stream):
            self._bear_nuisance()
            self._part_with(stream_id)
            self.send_control(WINDOW_UPDATE, RST, stream_id, 0)
            return
        self._streams[stream_id] = stream
        self.used_at = trio.current_time()
        self.send_control(WINDOW_UPDATE, ACK, stream_id, 0)

    def _ping_frame(self, flags: int, value: int) -> None:
        if flags & SYN:
            self._bear_nuisance()
            self.send_control(PING, ACK, 0, value)
        elif flags & ACK and self._ping_awaited and value == self._ping_value:
            self._ping_awaited = False
            sample = trio.current_time() - self._ping_sent_at
            self.round_trip_seconds = (self.round_trip_seconds + sample) / 2 if self.round_trip_seconds else sample
        else:
            self._bear_nuisance()

    # Watching.

    async def _watch(self) -> None:
        heard, heard_at = self.heard_bytes, trio.current_time()
        while True:
            self._ping_value = (self._ping_value + 1) % 2**32
            self._ping_sent_at = trio.current_time()
            self._ping_awaited = True
            self.send_control(PING, SYN, 0, self._ping_value)
            left = SILENT_SECONDS_MAX - (trio.current_time() - heard_at)  # rounded: a hair may stay, again and again
            await trio.sleep(min(PING_SECONDS, max(left, STALL_GRACE_SECONDS)))
            if self.heard_bytes == heard and trio.current_time() - heard_at >= SILENT_SECONDS_MAX:
                # After a stall of this very process its timers are due before the socket was read: let it be read.
                await trio.sleep(STALL_GRACE_SECONDS)
                if self.heard_bytes == heard:
                    self.kill(f"nothing heard for {SILENT_SECONDS_MAX:.0f} s")
            now = trio.current_time()
            if self.heard_bytes != heard:
                heard, heard_at = self.heard_bytes, now
            if self._write_started_at is not None and now - self._write_started_at > WRITE_SECONDS_MAX:
                self.kill(f"the peer has read nothing for {WRITE_SECONDS_MAX:.0f} s")
            await self._forget_lingering(now)

    async def _forget_lingering(self, now: float) -> None:
        """Not in the loop above, which lives as long as the connection and would keep the stream it looked at last."""
        for stream in list(self._streams.values()):
            if stream.fin_sent and now - stream.touched_at > LINGER_SECONDS:
                await stream.reset()

    def _end(self, reason: str, *, drop: bool = False) -> None:
        if self.closed is not None:
            return
        self.closed = reason
        for stream in list(self._streams.values()):
            stream.die(reason, drop=drop)
        self._streams.clear()
        self._control.clear()
        self._waiting.clear()
        self._parting.clear()
        self._buffers.drop(self)
        self._unsent.drop(self)
        if self._turn is not None:
            self._upload.settle(self._turn, 0)
        self._upload.forget(self)
