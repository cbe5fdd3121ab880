"""One yamux stream: its buffers, its windows, and the calls of `transport.Stream`. The connection is `libp2p_yamux`."""

from __future__ import annotations

import math
import struct
from collections import deque
from typing import TYPE_CHECKING

import trio

from .errors import Unreachable

if TYPE_CHECKING:
    from .libp2p_yamux import Traffic, Yamux
    from .transport import Piece

HEADER = struct.Struct(">BBHII")
"""Version, frame type, flags, stream id, length (of the payload; of anything else, its value)."""

DATA, WINDOW_UPDATE, PING, GO_AWAY = range(4)
SYN, ACK, FIN, RST = 1, 2, 4, 8

WINDOW_BYTES = 256 * 1024
"""Receive window of a new stream, fixed by the specification."""

SMALL_BYTES = 4096
"""Payloads below it are joined with what came before: kept apart, one-byte frames would take 50 times their length."""

WINDOW_BYTES_MAX = 8 * 1024 * 1024
"""A window grows to this for a reader that keeps up: 1 Gbit/s at 67 ms round trip."""


class PeerFault(Exception):
    """The peer broke yamux; it loses the connection."""


class YamuxStream:
    """One stream; implements `transport.Stream`. At most one task sends and one receives at a time."""

    def __init__(self, connection: Yamux, stream_id: int) -> None:
        self.stream_id = stream_id
        self.outgoing_bytes = 0
        self.send_window = WINDOW_BYTES
        self.receive_window = WINDOW_BYTES
        self.touched_at = trio.current_time()
        self.arrived_at = -math.inf
        self.fin_sent = False
        self.fin_received = False
        self.acknowledged = False
        self.abandoned = False
        self._connection = connection
        self._window_target = WINDOW_BYTES
        self._credit = 0
        self._credited_at = trio.current_time()
        self._outgoing: deque[memoryview] = deque()
        self._received: deque[Piece] = deque()
        self._received_bytes = 0
        self._kept_bytes = 0
        self._wanted_bytes = 1
        self._reset_reason: str | None = None
        self._dropped = False
        self._sending = False
        self._sendable = trio.Event()
        self._receivable = trio.Event()

    @property
    def peer(self) -> str:
        """Authenticated peer id of the other end."""
        return self._connection.peer

    @property
    def connection(self) -> Yamux:
        """The connection it runs on."""
        return self._connection

    async def send_all(self, *data: bytes) -> None:
        """Returns when the writer has taken everything. Cancelled in between, an unknown part was sent: reset then."""
        await trio.lowlevel.checkpoint()
        self._raise_if_dead()
        if self.fin_sent:
            raise trio.ClosedResourceError("this stream was closed for writing")
        if self._sending:
            raise trio.BusyResourceError("two tasks send on one stream")
        self._sending = True
        self._outgoing.extend(memoryview(part) for part in data if part)
        self.outgoing_bytes = sum(map(len, self._outgoing))
        try:
            self._connection.unsent(self.outgoing_bytes)
            self._raise_if_dead()  # of that, perhaps
            self._connection.sender_waits(self)
            while self.outgoing_bytes:
                self._sendable = trio.Event()
                await self._sendable.wait()
                # All taken before the stream died: what the peer said about it is still to be read.
                if self.outgoing_bytes:
                    self._raise_if_dead()
        finally:
            self._connection.sent(self.outgoing_bytes)
            self._outgoing.clear()
            self.outgoing_bytes = 0
            self._sending = False

    async def receive_some(self, max_bytes: int) -> bytes:
        """Buffered bytes first, even when the stream has died since; then b"" after FIN, else Unreachable."""
        await trio.lowlevel.checkpoint()
        while not self._received:
            if not await self._more(1):
                return b""
        head = self._pop(max_bytes)
        self._read(len(head))
        return bytes(head)

    async def receive_parts(self, max_bytes: int) -> list[Piece]:
        """Fewer bytes only when the sender waits for room, or there are no more: being woken for each costs as much as
        decrypting it.
        """
        await trio.lowlevel.checkpoint()
        while self._received_bytes < max_bytes and not (self._received and self._crowded):
            if not await self._more(max_bytes):
                break
        parts: list[Piece] = []
        count = 0
        while self._received and count < max_bytes:
            parts.append(self._pop(max_bytes - count))
            count += len(parts[-1])
        self._read(count)
        return parts

    def keeps(self, count: int) -> None:
        """The window moves on all the same: these bytes are charged to the connection, not to the window."""
        more = count - self._kept_bytes
        self._kept_bytes = count
        if more < 0:
            self._connection.unbuffered(-more)
        elif more and self._connection.closed is None:  # of one that ended nothing is counted any more
            self._connection.buffered(more)

    async def close_write(self) -> None:
        """Queue FIN behind what was sent."""
        await trio.lowlevel.checkpoint()
        self.finish()

    async def reset(self) -> None:
        """Drop everything, tell the peer."""
        self._reset_now("it was reset here")
        await trio.lowlevel.cancel_shielded_checkpoint()

    def finish(self) -> None:
        """Send FIN, once."""
        if self.fin_sent or self._reset_reason is not None:
            return
        self.fin_sent = True
        self._connection.send_control(WINDOW_UPDATE, FIN, self.stream_id, 0)
        if self.fin_received:
            self._connection.forget(self.stream_id)

    def abandon(self) -> None:
        """Nobody here will use it again: reset it unless it was finished, and when the peer sends more than its FIN."""
        self.abandoned = True
        self.keeps(0)
        if not self.fin_sent or self._received:
            self._reset_now("its handler ended")

    def _reset_now(self, reason: str) -> None:
        if self._reset_reason is None and not (self.fin_sent and self.fin_received):
            self._connection.send_control(WINDOW_UPDATE, RST, self.stream_id, 0)
        self._connection.forget(self.stream_id)
        self.die(reason, drop=True)

    def says_what_for(self, traffic: Traffic) -> None:
        """The first stream of a connection made by the peer tells what it is for."""
        if self._connection.traffic is None and not self._connection.initiator:
            self._connection.traffic = traffic

    # Called by the connection only.

    @property
    def widened_bytes(self) -> int:
        """What its window has taken of the connection's budget."""
        return self._window_target - WINDOW_BYTES

    def die(self, reason: str, *, drop: bool) -> None:
        """Every further call raises Unreachable, after what was received already unless `drop`."""
        if self._reset_reason is None:
            self._reset_reason = reason
        if drop:
            self._dropped = True
            self._connection.unbuffered(self._received_bytes)
            self._received.clear()
            self._received_bytes = 0
        self.wake_sender()
        self._receivable.set()

    def take(self, count: int) -> list[memoryview]:
        """The next `count` bytes to be sent, of at least so many."""
        self.outgoing_bytes -= count
        self._connection.sent(count)
        taken: list[memoryview] = []
        while count:
            part = self._outgoing.popleft()
            if len(part) > count:
                self._outgoing.appendleft(part[count:])
                part = part[:count]
            taken.append(part)
            count -= len(part)
        return taken

    def wake_sender(self) -> None:
        """The writer took everything, or the stream died."""
        self._sendable.set()

    def announced(self, count: int) -> None:
        """A frame of `count` bytes begins: checked now, before any of it is kept."""
        self.touched_at = self.arrived_at = trio.current_time()
        if count > self.receive_window:
            raise PeerFault(f"sent {count} bytes into a window of {self.receive_window}")
        if count and self.fin_received:
            raise PeerFault(f"sent {count} bytes after the end of the stream")
        self.receive_window -= count

    def arrived(self, payload: bytes | memoryview) -> None:
        """Bytes of a frame that was announced."""
        if self._dropped:
            return
        if self.abandoned:
            self._reset_now("it has no reader")
            return
        last = self._received[-1] if self._received else b""
        if len(payload) < SMALL_BYTES and isinstance(last, bytearray) and len(last) < SMALL_BYTES:
            last += payload
        else:
            self._received.append(bytearray(payload) if len(payload) < SMALL_BYTES else payload)
        self._received_bytes += len(payload)
        self._connection.buffered(len(payload))
        if self._received_bytes >= self._wanted_bytes or self._crowded:
            self._receivable.set()

    def finished(self) -> None:
        """The peer sends no more."""
        self.fin_received = True
        if self.fin_sent:
            self._connection.forget(self.stream_id)
        self._receivable.set()

    async def _more(self, wanted_bytes: int) -> bool:
        """Wait until about so many bytes are here. False when no more come; raises Unreachable when none are left."""
        if self.fin_received and not self._dropped:
            return False
        if self._reset_reason is not None and self._received:
            return False
        self._raise_if_dead()
        self._wanted_bytes = wanted_bytes
        self._receivable = trio.Event()
        await self._receivable.wait()
        return True

    @property
    def _crowded(self) -> bool:
        """Half the window is used up: what is here must be read before the sender gets room again."""
        return self.receive_window < self._window_target // 2

    def _pop(self, max_bytes: int) -> Piece:
        head = self._received.popleft()
        if len(head) > max_bytes:
            view = memoryview(head)
            self._received.appendleft(view[max_bytes:])
            head = view[:max_bytes]
        return head

    def _read(self, count: int) -> None:
        self._received_bytes -= count
        self._connection.unbuffered(count)
        self._give_credit(count)

    def _raise_if_dead(self) -> None:
        if self._reset_reason is not None:
            raise Unreachable(f"stream with {self.peer}: {self._reset_reason}")

    def _give_credit(self, count: int) -> None:
        """Grant half a window at a time; double the window while the sender uses it up within 4 round trips."""
        self._credit += count
        if self._credit < self._window_target // 2 or self.fin_received or self._reset_reason is not None:
            return
        now = trio.current_time()
        grant = self._credit
        if now - self._credited_at < 4 * self._connection.round_trip_seconds and self._window_target < WINDOW_BYTES_MAX:
            extra = self._connection.widen(self._window_target)
            self._window_target += extra
            grant += extra
        self._credit = 0
        self._credited_at = now
        self.receive_window += grant
        self._connection.send_control(WINDOW_UPDATE, 0, self.stream_id, grant)
