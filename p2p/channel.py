"""Typed messages over a byte stream, and the one request-reply pattern that every protocol but `chunks` uses.

A request is: frame, END | reply frame, END. Both sides treat a stream that ends without END as cut: a SIGKILLed sender
looks like a clean end of stream to yamux.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import trio

from .codec import END, LENGTH, check_length, decode_parts, frame_parts
from .errors import OwnFrameTooLarge, ProtocolError, Refused, Stalled, Truncated, UnexpectedMessage, Unreachable
from .messages import Message, Refusal
from .turns import Turns

if TYPE_CHECKING:
    from .messages import PeerAddress
    from .transport import Piece, ProtocolName, Stream, StreamHandler, Transport
    from .unread import Unread

M = TypeVar("M", bound=Message)
Q = TypeVar("Q", bound=Message)

log = logging.getLogger(__name__)

REQUEST_SECONDS = 30.0
"""Bound on one request and its reply, beyond any waiting the request itself asked for."""

TOO_LARGE_SECONDS = 60.0
"""When to ask again for an answer that was too large to be sent: it depends on what is in the pool then."""

RECEIVE_BYTES = 1 << 20
"""Most bytes asked of the stream at once: bounds what one read allocates."""

STRANGER_BYTES_MAX = 64 * 1024
"""Longest frame of a peer that may not have what it asks for: what hello needs. Anything larger is not read."""

BODY_PIECE_BYTES = 64 * 1024
BODY_PIECE_SECONDS = 10.0
"""A request that has begun brings a piece each so often: 6.5 KiB/s. Askers give up after `REQUEST_SECONDS`, so a slower
line is of no use to them either; and ten seconds bear a lost packet, and a full uplink before a poor line."""


class Channel:
    """Frames over one stream. Not for use by two tasks in the same direction at once.

    With `hurried`, what follows the first byte must come at the least rate, else Stalled. With `bytes_max`, longer
    frames are not read, TooMuch, and the first byte is hurried too.
    """

    def __init__(self, stream: Stream, *, hurried: bool = False, bytes_max: int | None = None) -> None:
        self._stream = stream
        self._bytes_max = bytes_max
        self._hurried = hurried
        self._begun = bytes_max is not None
        self._kept_bytes = 0
        self._keeping = False

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """What is received inside counts as unread until the end of it, and not only until it is decoded."""
        self._keeping = True
        try:
            yield
        finally:
            self._keeping = False
            self._let_go()

    @property
    def peer(self) -> str:
        """Authenticated peer id of the other end."""
        return self._stream.peer

    async def send(self, *messages: Message, end: bool = False) -> None:
        """Send frames in one write; with `end`, END after them."""
        parts = [part for message in messages for part in frame_parts(message)]
        await self.send_encoded(*parts, *([END] if end else ()))

    async def send_encoded(self, *parts: bytes) -> None:
        """Send what `codec.frame_parts` made, in one write: the messages need not live until it has left."""
        await self._stream.send_all(*parts)

    async def receive(self, *expected: type[M]) -> M:
        """The next frame, one of the expected types.

        Raises Refused if the peer declines, UnexpectedMessage at END, Truncated when the stream is cut, and what
        `codec.decode_parts` raises.
        """
        message = await self.receive_or_end(*expected)
        if message is None:
            raise UnexpectedMessage(f"END came where {' or '.join(k.TYPE for k in expected)} was expected")
        return message

    async def receive_or_end(self, *expected: type[M]) -> M | None:
        """As `receive`, but None when the peer says END."""
        try:
            (length,) = LENGTH.unpack(b"".join(await self._exactly(LENGTH.size)))
            if length == 0:
                return None
            check_length(length, expected)
            if self._bytes_max is not None and length > self._bytes_max:
                raise TooMuch(f"frame of {length} bytes announced, at most {self._bytes_max} are read")
            message = decode_parts(await self._exactly(length), *expected)
        finally:
            if not self._keeping:
                self._let_go()
        if isinstance(message, Refusal) and Refusal not in expected:
            raise Refused(message.code, message.detail, message.retry_seconds)
        return message  # type: ignore[return-value]  # a Refusal only when Refusal was asked for

    async def receive_end(self) -> None:
        """Require END."""
        try:
            if b"".join(await self._exactly(LENGTH.size)) != END:
                raise UnexpectedMessage("END was expected")
        finally:
            if not self._keeping:
                self._let_go()

    async def close(self) -> None:
        """No more frames from here. Call only after the peer has acknowledged: what is in flight may be lost."""
        await self._stream.close_write()

    async def reset(self) -> None:
        """Abandon the stream."""
        await self._stream.reset()

    async def _exactly(self, count: int) -> list[Piece]:
        """They are kept on the sender's account: read piece by piece out of the window, they still lie here."""
        parts: list[Piece] = []
        missing = count
        while missing:
            more = await self._piece(missing)
            if not more:
                raise Truncated(f"the stream from {self.peer} ended {missing} bytes early")
            size = sum(map(len, more))
            missing -= size
            self._begun = True
            self._kept_bytes += size
            self._stream.keeps(self._kept_bytes)
            parts += more
        return parts

    async def _piece(self, missing: int) -> list[Piece]:
        if not (self._hurried and self._begun):
            return await self._stream.receive_parts(min(missing, RECEIVE_BYTES))
        with trio.move_on_after(BODY_PIECE_SECONDS):
            return await self._stream.receive_parts(min(missing, BODY_PIECE_BYTES))
        raise Stalled(f"{missing} bytes of a request did not go on for {BODY_PIECE_SECONDS:.0f} s")

    def _let_go(self) -> None:
        self._kept_bytes = 0
        self._stream.keeps(0)


class TooMuch(Exception):
    """A frame that this channel does not read, though its type may be so long."""


async def request(
    transport: Transport,
    peer: PeerAddress,
    protocol: ProtocolName,
    message: Message,
    reply: type[M],
    *,
    wait_seconds: float = 0.0,
) -> M:
    """Ask `peer` once and return its reply.

    `wait_seconds` is how long the peer was told it may hold the reply. Raises Unreachable (try again), Refused (do as
    its code says) or ProtocolError (the peer is at fault).
    """
    with trio.move_on_after(REQUEST_SECONDS + wait_seconds):
        stream = await transport.open(peer, protocol)
        done = False
        try:
            channel = Channel(stream)
            try:
                await channel.send(message, end=True)
            except Unreachable:  # it may have said why it reads no more
                await channel.receive(reply)
                raise
            answer = await channel.receive(reply)
            await channel.receive_end()
            await channel.close()
            done = True
            return answer
        except Truncated as error:  # a peer that died mid-reply is the network's fault: the request may be repeated
            raise Unreachable(str(error)) from error
        finally:
            if not done:
                with trio.CancelScope(shield=True):
                    await stream.reset()
    raise Unreachable(f"{peer.peer} did not answer {protocol} within {REQUEST_SECONDS + wait_seconds:.0f} s")


async def asked(channel: Channel, kind: type[Q]) -> Q:
    """One request and its END. A Refusal is an answer: raised here as Refused, it would pass for our own word."""
    try:
        message = await channel.receive(kind)
    except Refused as error:
        raise UnexpectedMessage(f"a refusal came where {kind.TYPE} was expected") from error
    await channel.receive_end()
    return message


Answer = Callable[[str, Q], Awaitable[Message]]
"""(authenticated peer id, request) -> reply. Raise `Refused` to decline."""

Allowed = Callable[[str], Refused | None]
"""(authenticated peer id) -> why it may not have what this protocol gives, None when it may. Changes nothing."""

Complaint = Callable[[str, ProtocolError], None]
"""Told of each peer that broke the protocol, for counting."""


def hold_against(transport: Transport, peer: str, error: ProtocolError) -> None:
    """Have the transport count a breach. Not a cut stream: a peer that is killed five times must not be banned.

    Nor a message of our own that is too large.
    """
    if not isinstance(error, Truncated | OwnFrameTooLarge):
        transport.offence(peer, f"{type(error).__name__}: {error}")


def answering(
    kind: type[Q],
    answer: Answer[Q],
    complain: Complaint,
    *,
    wait_seconds: float = 0.0,
    allowed: Allowed | None = None,
    unread: Unread | None = None,
) -> StreamHandler:
    """A stream handler that reads one `kind`, calls `answer` and sends what it returns, or a Refusal.

    `wait_seconds` is the longest that `answer` may hold the reply by its own rules. A peer that is not `allowed` is a
    stranger: of its frames only those up to `STRANGER_BYTES_MAX` are read, at a place among the `unread`, and it is
    complained of when they stall. The bytes of a request count as unread until it is answered. Of one peer's requests
    `turns.TOGETHER_MAX` are answered at a time.
    """
    turns = Turns()

    async def reply_to(channel: Channel, request: _Request[Q], refused: Refused | None) -> tuple[bytes, ...]:
        """The reply, encoded: nothing of it or of the request is kept while it waits for the asker's line."""
        reply: Message
        try:
            if request.message is None:
                assert refused is not None
                raise refused
            reply = await answer(channel.peer, request.message)
        except Refused as refusal:
            reply = _refusal(refusal)
        finally:
            request.message = None
        try:
            return frame_parts(reply)
        except OwnFrameTooLarge as error:  # nothing of it was sent
            log.error("the answer to %s: %s", channel.peer, error)  # noqa: TRY400 - no bug to trace
            return frame_parts(_too_large(error))

    async def handle(stream: Stream) -> None:
        refused = allowed(stream.peer) if allowed is not None else None
        channel = Channel(stream, hurried=True, bytes_max=None if refused is None else STRANGER_BYTES_MAX)
        done = False
        try:
            with trio.move_on_after(2 * REQUEST_SECONDS + wait_seconds), channel.keeping():
                request = await _read_request(channel, kind, unread if refused is not None else None)
                async with turns.turn(stream.peer):
                    whole = request.message is not None
                    await channel.send_encoded(*await reply_to(channel, request, refused), END)
                await channel.close()
                done = whole  # else it is told to stop sending, behind the refusal
        except Stalled as error:
            log.debug("%s: %s", stream.peer, error)
            if refused is not None and (unread is None or unread.stalled(stream.peer, trio.current_time())):
                complain(stream.peer, error)
        except ProtocolError as error:
            complain(stream.peer, error)
        except Unreachable as error:
            log.debug("%s went away during %s: %s", stream.peer, kind.TYPE, error)
        finally:
            if not done:
                with trio.CancelScope(shield=True):
                    await stream.reset()

    return handle


@dataclass(slots=True)
class _Request(Generic[Q]):
    """A request that was read; None when it is longer than is read of a stranger."""

    message: Q | None


async def _read_request(channel: Channel, kind: type[Q], unread: Unread | None) -> _Request[Q]:
    with ExitStack() as stack:
        if unread is not None:
            stack.enter_context(unread.place(channel.peer))
        try:
            return _Request(await asked(channel, kind))
        except TooMuch:
            return _Request(None)
    raise Unreachable("its place was needed")


def _refusal(refused: Refused) -> Refusal:
    return Refusal(code=refused.code, detail=refused.detail[:512], retry_seconds=refused.retry_seconds)


def _too_large(error: OwnFrameTooLarge) -> Refusal:
    """The asker did no wrong, and is told that we have."""
    return Refusal(code="too_large", detail=f"the answer is too large: {error}"[:512], retry_seconds=TOO_LARGE_SECONDS)
