"""How many small frames one connection may send us. Pure: time is an argument, in seconds of any one clock.

`guards.Nuisance` counts frames that serve no one. Frames that may well serve someone, but carry next to nothing, cost
as much to handle, and whether they do serve is more than the muxer can know: a window raised by one byte, a message
sent a byte at a time. So all small ones are counted, against a rate no honest peer needs for its requests, and against
the bytes that the connection moves: window updates come in proportion to what we send, short ends of frames in
proportion to what we receive.
"""

from __future__ import annotations

SMALL_FRAME_BYTES = 256
"""A frame, or a message of Noise, with less payload than this is small: handling it costs more than decrypting it."""

SMALL_FRAMES_BURST = 10_000
"""At once: 40 ms of our processor. All streams of a connection opened and answered at the same time take a fifth."""

SMALL_FRAMES_PER_SECOND = 2000.0
"""For as long as the connection lives: under 1 % of a processor. A request and its answer are about ten."""

BYTES_PER_SMALL_FRAME = 4096
"""Bytes moved either way that pay for one: the narrowest windows in use are raised by several times as much."""


class FrameBudget:
    """A bucket that time and moved bytes fill and small frames empty."""

    def __init__(self, now: float) -> None:
        self._left = float(SMALL_FRAMES_BURST)
        self._at = now

    def spend(self, small_frames: int, moved_bytes: int, now: float) -> bool:
        """`small_frames` came and `moved_bytes` moved since the last call. False: the peer has gone too far."""
        earned = moved_bytes / BYTES_PER_SMALL_FRAME + max(0.0, now - self._at) * SMALL_FRAMES_PER_SECOND
        self._at = now
        self._left = min(SMALL_FRAMES_BURST, self._left - small_frames + earned)
        return self._left >= 0
