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
from typing import TYPE_CHECKING, Protocol

import trio

from .errors import Unreachable
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

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

FRAME_BYTES = 65_519 - HEADER.size
"""Payload of a frame we send: with its header exactly one Noise message, so frames never straddle two."""

BATCH_BYTES = 2 * FRAME_BYTES
"""Handed to the socket at once: what a control frame may have to wait behind (0.5 s on a 2 Mbit/s uplink)."""

WINDOWS_BYTES_MAX = 64 * 1024 * 1024
"""All windows of one connection grow to this together: what one peer can make us hold."""

STREAMS_MAX = 256
"""Streams the peer may have open here; beyond, a new one is reset. Ours are bounded by our own callers."""

CONTROL_FRAMES_MAX = 8192
"""Answers waiting to be written. A peer that makes us answer and does not read is cut off here."""

PING_SECONDS = 10.0
"""A ping each so often: measures the round trip, keeps NAT mappings, and finds dead links."""

SILENT_SECONDS_MAX = 30.0
"""Nothing heard for this long, three pings included: the link is dead. Bears a process stalled in one big call."""

WRITE_SECONDS_MAX = 60.0
"""One batch not accepted by the kernel for this long: the peer reads nothing, and what we hold for it is stuck."""

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


class Yamux:
    """All streams of one connection. `run` serves it until it ends; `closed` tells why, once it has."""

    def __init__(
        self, secured: Secured, socket: Socket, peer: str, *, initiator: bool, accept: Callable[[YamuxStream], bool]
    ) -> None:
        """`accept` is told of each inbound stream, in the read loop: it must not wait. False refuses the stream."""
        self.peer = peer
        self.initiator = initiator
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
        self._ping_sent_at = 0.0
        self._ping_value = 0
        self._scope = trio.CancelScope(shield=True)  # ended by `close` or `kill` alone, so that it ends politely
        self._ended = trio.Event()

    @property
    def stream_count(self) -> int:
        """Streams open now, either way."""
        return len(self._streams)

    @property
    def usable(self) -> bool:
        """Whether a new stream may be opened."""
        return self.closed is None and not self.going_away and not self._finishing

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

    def kill(self, reason: str) -> None:
        """End at once, without good-bye."""
        self._end(reason)
        self._scope.cancel()

    # Called by the streams.

    def sender_waits(self, stream: YamuxStream) -> None:
        """`stream.outgoing` has bytes to send."""
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

    def widen(self, wanted: int) -> int:
        """Bytes by which a window may grow, out of the connection's common budget."""
        extra = min(wanted, WINDOWS_BYTES_MAX - self._widened_bytes)
        self._widened_bytes += extra
        return extra

    # Writing.

    async def _write(self) -> None:
        try:
            while True:
                batch = self._next_batch()
                if not batch:
                    if self._finishing:
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
        parts: list[bytes | memoryview] = list(self._control)
        self._control.clear()
        room = BATCH_BYTES
        for _ in range(len(self._waiting)):
            if room <= 0:
                break
            stream = self._waiting.popleft()
            count = min(len(stream.outgoing), stream.send_window, FRAME_BYTES, room)
            if count:
                parts += (HEADER.pack(0, DATA, 0, stream.stream_id, count), stream.outgoing[:count])
                stream.outgoing = stream.outgoing[count:]
                stream.send_window -= count
                stream.touched_at = trio.current_time()
                room -= count
            if not stream.outgoing:
                stream.wake_sender()
            elif stream.send_window > 0:
                self._waiting.append(stream)
        return b"".join(parts)

    # Reading.

    async def _read(self) -> str:
        buffer = bytearray()
        try:
            while True:
                data = await self._secured.read()
                self.heard_bytes += len(data)
                buffer += data
                del buffer[: self._parse(buffer)]
        except PeerFault as fault:
            log.warning("%s broke yamux: %s", self.peer, fault)
            return f"the peer broke yamux: {fault}"
        except Exception as error:  # noqa: BLE001 - whatever libp2p raises, it is the end of this connection only
            return str(error) or type(error).__name__

    def _parse(self, buffer: bytearray) -> int:
        """Handle all whole frames; return the bytes they took."""
        offset = 0
        while len(buffer) - offset >= HEADER.size:
            version, kind, flags, stream_id, length = HEADER.unpack_from(buffer, offset)
            if version != 0 or kind > GO_AWAY:
                raise PeerFault(f"version {version}, frame type {kind}")
            payload = b""
            end = offset + HEADER.size
            if kind == DATA:
                if length > WINDOW_BYTES_MAX:
                    raise PeerFault(f"a frame of {length} bytes")
                if len(buffer) - end < length:
                    break
                payload = bytes(memoryview(buffer)[end : end + length])
                end += length
            offset = end
            if kind in (DATA, WINDOW_UPDATE):
                self._stream_frame(kind, flags, stream_id, length, payload)
            elif kind == PING:
                self._ping_frame(flags, length)
            else:
                self.going_away = True
        return offset

    def _stream_frame(self, kind: int, flags: int, stream_id: int, length: int, payload: bytes) -> None:
        if flags & SYN:
            self._opened(stream_id)
        stream = self._streams.get(stream_id)
        if stream is None:  # reset or refused here while this was on its way
            return
        if flags & RST:
            self.forget(stream_id)
            stream.die("the peer reset it", drop=False)
            return
        if kind == WINDOW_UPDATE:
            stream.send_window += length
            if stream.outgoing:
                self.sender_waits(stream)
        if payload or flags & FIN:
            stream.arrived(payload, fin=bool(flags & FIN))

    def _opened(self, stream_id: int) -> None:
        if stream_id % 2 == (1 if self.initiator else 0) or stream_id <= self._last_remote_id:
            raise PeerFault(f"opened stream {stream_id} out of order")
        self._last_remote_id = stream_id
        inbound = sum(1 for known in self._streams if known % 2 == stream_id % 2)
        stream = YamuxStream(self, stream_id)
        if self._finishing or inbound >= STREAMS_MAX or not self._accept(stream):
            self.send_control(WINDOW_UPDATE, RST, stream_id, 0)
            return
        self._streams[stream_id] = stream
        self.used_at = trio.current_time()
        self.send_control(WINDOW_UPDATE, ACK, stream_id, 0)

    def _ping_frame(self, flags: int, value: int) -> None:
        if flags & SYN:
            self.send_control(PING, ACK, 0, value)
        elif flags & ACK and value == self._ping_value:
            sample = trio.current_time() - self._ping_sent_at
            self.round_trip_seconds = (self.round_trip_seconds + sample) / 2 if self.round_trip_seconds else sample

    # Watching.

    async def _watch(self) -> None:
        while True:
            self._ping_value = (self._ping_value + 1) % 2**32
            self._ping_sent_at = trio.current_time()
            self.send_control(PING, SYN, 0, self._ping_value)
            heard = self.heard_bytes
            await trio.sleep(PING_SECONDS)
            if self.heard_bytes == heard:
                await trio.sleep(SILENT_SECONDS_MAX - PING_SECONDS)
                # After a stall of this very process both timers are due before the socket was read: let it be read.
                await trio.sleep(0.1)
                if self.heard_bytes == heard:
                    self.kill(f"nothing heard for {SILENT_SECONDS_MAX:.0f} s")
            now = trio.current_time()
            if self._write_started_at is not None and now - self._write_started_at > WRITE_SECONDS_MAX:
                self.kill(f"the peer has read nothing for {WRITE_SECONDS_MAX:.0f} s")
            for stream in list(self._streams.values()):
                if stream.fin_sent and now - stream.touched_at > LINGER_SECONDS:
                    await stream.reset()

    def _end(self, reason: str) -> None:
        if self.closed is not None:
            return
        self.closed = reason
        for stream in list(self._streams.values()):
            stream.die(reason, drop=False)
        self._streams.clear()
        self._control.clear()
        self._waiting.clear()
