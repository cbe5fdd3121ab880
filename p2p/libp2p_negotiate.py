"""multistream-select on a stream: what it is for. What the peer sends here is foreign, and bounded.

Of py-libp2p 0.8.1: a protocol line that is not UTF-8 comes out as UnicodeDecodeError and kills the host
(`multiselect_communicator.py:58`), and a line may announce any length. Here either costs its stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from libp2p.custom_types import TProtocol
from libp2p.exceptions import ParseError
from libp2p.io.abc import ReadWriteCloser
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.protocol_muxer.exceptions import MultiselectCommunicatorError
from libp2p.protocol_muxer.multiselect import MULTISELECT_PROTOCOL_ID, Multiselect
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.utils.varint import encode_delim

from .errors import ProtocolError, Unreachable
from .libp2p_upgrade import HANDSHAKE_SECONDS
from .transport import NOT_SERVED
from .unread import Unread

if TYPE_CHECKING:
    from .libp2p_stream import YamuxStream
    from .transport import ProtocolName

LINE_BYTES_MAX = 1024
"""The longest protocol line; ours have 30."""

LINES_BYTES_MAX = 8 * 1024
"""All lines of one negotiation: a stock peer tries its protocols one by one."""


LINES_MAX = 16
"""Lines of one negotiation: each is answered, which takes 30 us for two bytes."""

NEGOTIATING_MAX = 2048
"""Streams without a protocol in this process, some 10 KiB each. Ours name it in their first frame: so many honest ones
there are only when a thousand peers ask in the same instant, after a stall."""


class BadLine(ProtocolError):
    """A peer we know broke multistream-select."""


def protocol_id(protocol: ProtocolName) -> TProtocol:
    """`hello` -> `/echo2/hello/1`; a whole id, of a protocol that is not ours (`relay_host`), stands for itself."""
    return TProtocol(protocol if protocol.startswith("/") else f"/echo2/{protocol}/1")


async def ask_for(stream: YamuxStream, wanted: TProtocol) -> None:
    """One round trip: both lines are sent at once, then the answers are awaited. Raises Unreachable."""
    await stream.send_all(encode_delim(MULTISELECT_PROTOCOL_ID.encode()) + encode_delim(wanted.encode()))
    lines = MultiselectCommunicator(_Lines(stream))
    if await lines.read() != MULTISELECT_PROTOCOL_ID:
        raise Unreachable(f"{stream.peer} does not speak multistream-select")
    if await lines.read() != wanted:
        raise Unreachable(f"{stream.peer} does not serve {wanted}; {NOT_SERVED}")


class Negotiations:
    """The streams that have not said yet what they are for: a bounded number, and silence holds no place.

    Beyond it the eldest of the peer with most of them goes. A stream that ends without a protocol served no one: a
    connection on which many do breaks the protocol by it.
    """

    def __init__(self, protocols: Multiselect, places_max: int = NEGOTIATING_MAX) -> None:
        self._protocols = protocols
        self._places = Unread(places_max)

    @property
    def count(self) -> int:
        """Streams without a protocol now."""
        return self._places.count

    async def agree(self, stream: YamuxStream) -> str:
        """The protocol of an inbound stream. Raises Unreachable, BadLine."""
        try:
            with self._places.place(stream.peer):
                return await answer(stream, self._protocols)
            raise Unreachable(f"a stream of {stream.peer} named no protocol, and its place was needed")
        except Unreachable:
            stream.connection.bear_fruitless()
            raise


async def answer(stream: YamuxStream, protocols: Multiselect) -> str:
    """The protocol the peer asks for, out of those served. Raises Unreachable, BadLine."""
    lines = _Lines(stream)
    try:
        protocol, _ = await protocols.negotiate(_Counted(lines), int(HANDSHAKE_SECONDS))
    except UnicodeError as error:
        raise BadLine("a protocol line that is not UTF-8") from error
    except Exception as error:
        if lines.too_long or _malformed(error):
            raise BadLine(lines.too_long or "a malformed protocol line") from error
        raise Unreachable(f"no protocol agreed with {stream.peer}: {reason_of(error)}") from error
    return str(protocol)


class _Counted(MultiselectCommunicator):
    """The peer's lines: a bounded number of them, and one `ls`."""

    def __init__(self, lines: _Lines) -> None:
        super().__init__(lines)
        self._lines = lines
        self._count = 0
        self._listed = False

    async def read(self) -> str:
        """The next one. Raises MultiselectCommunicatorError."""
        text = await super().read()
        self._count += 1
        if self._count > LINES_MAX:
            self._lines.too_long = f"more than {LINES_MAX} protocol lines"
        elif text == "ls" and self._listed:
            self._lines.too_long = "a second `ls` on one stream"
        self._listed |= text == "ls"
        if self._lines.too_long:
            raise MultiselectCommunicatorError(self._lines.too_long)
        return text


class _Lines(ReadWriteCloser):
    """A stream as multistream-select's reader wants it."""

    def __init__(self, stream: YamuxStream) -> None:
        self.too_long = ""
        self._stream = stream
        self._left = LINES_BYTES_MAX

    async def read(self, n: int | None = None) -> bytes:
        """1 to n bytes. Raises ConnectionClosedError at the end of the stream, and for more than a protocol needs."""
        if (n or 1) > LINE_BYTES_MAX:
            self.too_long = f"a protocol line of {n} bytes"
        elif self._left <= 0:
            self.too_long = f"more than {LINES_BYTES_MAX} bytes of protocol lines"
        if self.too_long:
            raise ConnectionClosedError(self.too_long, transport="yamux")
        data = await self._stream.receive_some(n or 1)
        if not data:
            raise ConnectionClosedError("the stream ended during negotiation", transport="yamux")
        self._left -= len(data)
        return data

    async def write(self, data: bytes) -> None:
        """Send everything."""
        await self._stream.send_all(data)

    async def close(self) -> None:
        """Reset."""
        await self._stream.reset()

    def get_remote_address(self) -> tuple[str, int] | None:
        """Not known here."""
        return None


def _malformed(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, ParseError):
        error = error.__cause__
    return error is not None


def reason_of(error: BaseException) -> str:
    """The innermost cause in words: libp2p wraps the one that says something in several that do not."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, BaseExceptionGroup) and error.exceptions:
        return reason_of(error.exceptions[0])
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{error}" or type(error).__name__
