"""Keeping a home line's queue short while bulk is sent on it.

A router in front of a slow line holds what it cannot send, often a second of it, and everything else waits behind: no
connection of its own saves a control request from that. The kernel measures each connection's round trip; what it is
above the shortest one seen is time in queues. While it is too much, the bulk connection is paced below what arrives,
until the queue is gone; then it is let go, faster and faster. `Pacer` is the pure decision. Linux only: elsewhere
`read_line` knows nothing, and the cap on uploads (`--upload-mbit`, a little below the line's rate) does the same.
"""

from __future__ import annotations

import socket
import struct
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import trio

QUEUE_SECONDS_MAX = 0.08
"""Time in queues that bulk may cause: a control round trip has 300 ms, its own way included."""

QUEUE_SECONDS_LOW = 0.04
"""Below it, bulk may speed up again."""

SLOWER, MUCH_SLOWER, FASTER = 0.8, 0.5, 1.06
"""Of what arrives, of what arrives when the queue is three times too long, of the pace so far."""

PACE_MIN = 32 * 1024.0
"""Bytes a second bulk keeps when others fill the queue: a chunk of 64 KiB in two seconds."""

PACE_FREE = 4.0
"""A pace this far above what arrives holds nothing back, and is lifted."""

LOOK_SECONDS = 0.2
"""Between two looks: a few round trips of a home line."""

_SO_MAX_PACING_RATE = 47
_TCP_INFO_BYTES = 168
_ROUND_TRIP_AT, _SHORTEST_AT, _DELIVERED_AT = 68, 148, 160
"""Offsets in Linux's `struct tcp_info` (tcpi_rtt, tcpi_min_rtt in microseconds; tcpi_delivery_rate in bytes/s)."""


@dataclass(frozen=True)
class Line:
    """What the kernel knows of a connection."""

    round_trip_seconds: float
    shortest_seconds: float
    delivered_per_second: float


class Pacer:
    """One bulk connection's pace in bytes a second; None: as fast as it goes."""

    def __init__(self) -> None:
        self.pace: float | None = None

    def step(self, line: Line) -> float | None:
        """The pace from now on; called each `LOOK_SECONDS` while there is something to send."""
        queued = line.round_trip_seconds - line.shortest_seconds
        if queued > QUEUE_SECONDS_MAX:
            part = MUCH_SLOWER if queued > 3 * QUEUE_SECONDS_MAX else SLOWER
            arrives = line.delivered_per_second
            paced = arrives * part if self.pace is None else min(self.pace, arrives * part)
            self.pace = max(PACE_MIN, paced)
        elif self.pace is not None and queued < QUEUE_SECONDS_LOW:
            self.pace *= FASTER
            if self.pace > PACE_FREE * max(line.delivered_per_second, PACE_MIN):
                self.pace = None
        return self.pace


def read_line(connection: socket.socket | trio.socket.SocketType) -> Line | None:
    """None where the system does not tell."""
    if sys.platform != "linux":
        return None
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    except OSError:
        return None
    if len(info) < _TCP_INFO_BYTES:
        return None
    round_trip, shortest = (struct.unpack_from("=I", info, at)[0] for at in (_ROUND_TRIP_AT, _SHORTEST_AT))
    return Line(round_trip / 1e6, shortest / 1e6, float(struct.unpack_from("=Q", info, _DELIVERED_AT)[0]))


def set_pace(connection: socket.socket | trio.socket.SocketType, pace: float | None) -> None:
    """Tell the kernel; one that does not know how goes on as it was."""
    if sys.platform != "linux":  # elsewhere the number may mean something else
        return
    rate = 2**64 - 1 if pace is None else int(pace)
    try:
        connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("=Q", rate))
    except OSError:
        return
