"""A network inside one process: the same seam as `libp2p_transport`, under any trio clock, with faults on order.

One `MemoryNetwork` joins any number of transports. It knows delay, a rate for each sender, loss (of a piece: the stream
breaks, as a TCP connection would after its time-out), crashes (`kill`) and silent links (`partition`). It uses trio
alone (no threads), and draws only from the generator it is given, so a run under a virtual clock repeats itself.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio

from .errors import ConfigurationError, Unreachable
from .transport import NOT_SERVED

if TYPE_CHECKING:
    import random
    from collections.abc import AsyncIterator

    from .identity import Identity
    from .messages import PeerAddress
    from .transport import Piece, ProtocolName, Stream, StreamHandler, Transport

log = logging.getLogger(__name__)

PIECE_BYTES = 64 * 1024
"""What is sent, delayed and lost as one: about a yamux frame."""

WINDOW_BYTES = 1024 * 1024
"""Sent but not read yet, per stream and direction; then the sender waits, as it would on a real one."""

DIAL_SECONDS = 10.0
"""Until a peer behind a silent link is given up, as in `libp2p_transport`."""

SILENT_SECONDS = 30.0
"""Until a stream on a link gone silent breaks, as in `libp2p_yamux`."""


class MemoryNetwork:
    """Joins transports. `delay_seconds` is one way, `loss` the chance of a piece, `bytes_per_second` each sender's."""

    def __init__(
        self,
        rng: random.Random,
        *,
        delay_seconds: float = 0.0,
        loss: float = 0.0,
        bytes_per_second: float = math.inf,
    ) -> None:
        self.delay_seconds = delay_seconds
        self.loss = loss
        self.bytes_per_second = bytes_per_second
        self._rng = rng
        self._transports: dict[str, MemoryTransport] = {}
        self._silent: set[frozenset[str]] = set()
        self._connected: set[frozenset[str]] = set()

    @asynccontextmanager
    async def transport(
        self, identity: Identity, *, reachable: bool = True, host: str = "127.0.0.1"
    ) -> AsyncIterator[Transport]:
        """Come onto the network. `reachable=False`: no addresses, others can use only connections made from here.

        `host` is the IP address that others see it come from.
        """
        if identity.peer_id in self._transports:
            raise ConfigurationError(f"{identity.peer_id} is already on this network; stop the other process first")
        body_error: Exception | None = None
        async with trio.open_nursery() as nursery:
            transport = MemoryTransport(self, identity.peer_id, nursery, reachable=reachable, host=host)
            self._transports[identity.peer_id] = transport
            try:
                yield transport
            except Exception as error:  # noqa: BLE001 - raised again outside, lest the nursery wrap it in a group
                body_error = error
            finally:
                transport.leave("the peer left")
        if body_error is not None:
            raise body_error

    def kill(self, peer: str) -> None:
        """Crash: its handlers stop, its streams break at both ends, it refuses until it opens a transport again."""
        if peer in self._transports:
            self._transports[peer].leave("the peer crashed")

    def partition(self, a: str, b: str) -> None:
        """Nothing passes between a and b from now on, and neither is told: streams break after SILENT_SECONDS."""
        self._silent.add(frozenset((a, b)))
        self._connected.discard(frozenset((a, b)))
        if a in self._transports:
            for end in self._transports[a].ends_with(b):
                end.fall_silent()

    def heal(self, a: str, b: str) -> None:
        """The link works again, for new streams."""
        self._silent.discard(frozenset((a, b)))

    # Called by transports and streams.

    def find(self, peer: str) -> MemoryTransport | None:
        """The transport of a peer that is up."""
        return self._transports.get(peer)

    def gone(self, transport: MemoryTransport) -> None:
        """A transport left."""
        self._transports.pop(transport.peer_id, None)
        self._connected = {pair for pair in self._connected if transport.peer_id not in pair}

    def silent(self, a: str, b: str) -> bool:
        """Whether the two are partitioned."""
        return frozenset((a, b)) in self._silent

    def connect(self, a: str, b: str) -> None:
        """The two have a connection from now on."""
        self._connected.add(frozenset((a, b)))

    def disconnect(self, a: str, b: str) -> None:
        """They have none from now on."""
        self._connected.discard(frozenset((a, b)))

    def connected(self, a: str, b: str) -> bool:
        """Whether they have a connection, so that one without addresses can be reached."""
        return frozenset((a, b)) in self._connected

    def loses(self) -> bool:
        """Draw whether one piece is lost. Draws nothing on a network without loss."""
        return self.loss > 0 and self._rng.random() < self.loss


class MemoryTransport:
    """See `transport.Transport`; made by `MemoryNetwork.transport`."""

    def __init__(
        self, network: MemoryNetwork, peer_id: str, nursery: trio.Nursery, *, reachable: bool, host: str
    ) -> None:
        self._network = network
        self._peer_id = peer_id
        self.host = host
        self._addresses = (f"/memory/{peer_id}",) if reachable else ()
        self._nursery = nursery
        self._serving: dict[trio.CancelScope, None] = {}
        self._handlers: dict[str, StreamHandler] = {}
        self.offences: Counter[str] = Counter()
        """By peer. Nobody is refused for them: a simulation must show what a misbehaving peer does."""
        self._bans: dict[str, float] = {}
        self._ends: dict[MemoryStream, None] = {}  # in order, unlike a set: a run must repeat itself
        self._left = False
        self._uplink_free_at = -math.inf

    @property
    def peer_id(self) -> str:
        """Our own peer id."""
        return self._peer_id

    @property
    def addresses(self) -> tuple[str, ...]:
        """One invented address, or none."""
        return self._addresses

    def set_handler(self, protocol: ProtocolName, handler: StreamHandler) -> None:
        """Serve inbound streams of `protocol`."""
        self._handlers[protocol] = handler

    async def open(self, peer: PeerAddress, protocol: ProtocolName) -> Stream:
        """A new stream; takes one round trip. Raises Unreachable."""
        await trio.lowlevel.checkpoint()
        network, name = self._network, peer.peer
        if self._left:
            raise Unreachable("this process has left the network")
        if name == self._peer_id:
            raise Unreachable(f"{name} is this process itself")
        if not peer.addresses and not network.connected(self._peer_id, name):
            raise Unreachable(f"{name} is not connected and has no address to dial")
        if network.silent(self._peer_id, name) or network.loses():
            await trio.sleep(DIAL_SECONDS)
            raise Unreachable(f"cannot reach {name}: no answer within {DIAL_SECONDS:.0f} s")
        await trio.sleep(network.delay_seconds)
        remote = network.find(name)
        end = remote.accept(self, protocol) if remote is not None else None
        opened = False
        try:
            await trio.sleep(network.delay_seconds)
            if remote is None:
                raise Unreachable(f"cannot reach {name}: connection refused")
            if end is None:
                raise Unreachable(f"{name} does not serve {protocol}; {NOT_SERVED}")
            opened = True
            return end
        finally:
            if end is not None and not opened:
                end.cut("it was reset here")

    async def disconnect(self, peer: str) -> None:
        """Break every stream with `peer`."""
        await trio.lowlevel.checkpoint()
        self._network.disconnect(self._peer_id, peer)
        for end in self.ends_with(peer):
            end.break_off("the connection was closed")

    def offence(self, peer: str, reason: str) -> None:
        """Count it."""
        log.debug("%s: an offence of %s: %s", self._peer_id, peer, reason)
        self.offences[peer] += 1

    def remote(self, peer: str) -> str | None:
        """What the peer said it comes from, while the two are connected."""
        found = self._network.find(peer)
        return found.host if found is not None and self._network.connected(self._peer_id, peer) else None

    def ban(self, peer: str, reason: str, seconds: float | None = None) -> None:
        """Refuse it for so long, or for good, and end its streams."""
        self._bans[peer] = math.inf if seconds is None else trio.current_time() + seconds
        self._network.disconnect(self._peer_id, peer)
        for end in self.ends_with(peer):
            end.break_off(f"it is banned: {reason}")

    def lift_ban(self, peer: str) -> None:
        """Serve it again."""
        self._bans.pop(peer, None)

    # Called by the network and by the streams.

    def accept(self, caller: MemoryTransport, protocol: ProtocolName) -> MemoryStream | None:
        """Begin to serve a stream; returns the caller's end, None when the protocol is not served here."""
        handler = self._handlers.get(protocol)
        if handler is None or self._left or caller._left:
            return None
        if trio.current_time() < self._bans.get(caller.peer_id, -math.inf):
            return None
        ours, theirs = MemoryStream(self._network, self), MemoryStream(self._network, caller)
        ours.join(theirs)
        self._network.connect(self._peer_id, caller.peer_id)
        scope = trio.CancelScope()
        self._serving[scope] = None
        self._nursery.start_soon(self._serve, ours, handler, scope)
        return theirs

    def ends_with(self, peer: str) -> list[MemoryStream]:
        """Our ends of the streams with one peer."""
        return [end for end in self._ends if end.peer == peer]

    def add(self, end: MemoryStream) -> None:
        """A stream begins."""
        self._ends[end] = None

    def forget(self, end: MemoryStream) -> None:
        """A stream is over."""
        self._ends.pop(end, None)

    def leave(self, reason: str) -> None:
        """Off the network: streams break, the peers see it one delay later, after what was sent before."""
        if self._left:
            return
        self._left = True
        self._network.gone(self)
        for end in list(self._ends):
            end.break_off(reason)
        for scope in self._serving:  # not the nursery's: the task that holds the context is the caller's
            scope.cancel()

    def uplink_slot(self, count: int) -> float:
        """When the last of `count` bytes is out, if they queue up now behind all others of this sender."""
        start = max(trio.current_time(), self._uplink_free_at)
        self._uplink_free_at = start + count / self._network.bytes_per_second
        return self._uplink_free_at

    async def _serve(self, end: MemoryStream, handler: StreamHandler, scope: trio.CancelScope) -> None:
        try:
            with scope:
                await handler(end)
        except Unreachable as error:
            log.debug("stream from %s: %s", end.peer, error)
        except Exception:
            log.exception("serving a stream of %s failed; only that stream is lost", end.peer)
            end.cut("the peer's handler failed")
        finally:
            del self._serving[scope]
            if not end.fin_sent:
                end.cut("the peer's handler ended")


class MemoryStream:
    """One end of a stream. `dead_at` is when this end learns that it broke; what arrived before can still be read."""

    def __init__(self, network: MemoryNetwork, owner: MemoryTransport) -> None:
        self.fin_sent = False
        self._network = network
        self._owner = owner
        self._other: MemoryStream = self
        self._arriving: deque[tuple[float, bytes]] = deque()  # b"" is FIN
        self._unread_bytes = 0
        self._silent = False
        self._dead_at = math.inf
        self._reason = ""
        self._sending = False
        self._changed = trio.Event()

    @property
    def peer(self) -> str:
        """Peer id of the other end."""
        return self._other._owner.peer_id

    async def send_all(self, *data: bytes) -> None:
        """Piece by piece: wait for room at the reader, then for the uplink."""
        await trio.lowlevel.checkpoint()
        self._raise_if_dead()
        if self.fin_sent:
            raise trio.ClosedResourceError("this stream was closed for writing")
        if self._sending:
            raise trio.BusyResourceError("two tasks send on one stream")
        self._sending = True
        try:
            whole = data[0] if len(data) == 1 else b"".join(data)
            for start in range(0, len(whole), PIECE_BYTES):
                piece = whole[start : start + PIECE_BYTES]
                while self._other._unread_bytes + len(piece) > WINDOW_BYTES:
                    await self._wait(math.inf)
                    self._raise_if_dead()
                if self._network.bytes_per_second < math.inf:
                    await trio.sleep_until(self._owner.uplink_slot(len(piece)))
                    self._raise_if_dead()
                if self._network.loses():
                    self.fall_silent()
                self._deliver(piece)
        finally:
            self._sending = False

    async def receive_some(self, max_bytes: int) -> bytes:
        """The next bytes that have arrived."""
        await trio.lowlevel.checkpoint()
        while True:
            now = trio.current_time()
            if self._arriving and self._arriving[0][0] <= now:
                return self._take(max_bytes)
            self._raise_if_dead()
            await self._wait(self._arriving[0][0] if self._arriving else math.inf)

    async def receive_parts(self, max_bytes: int) -> list[Piece]:
        """What `receive_some` returns."""
        data = await self.receive_some(max_bytes)
        return [data] if data else []

    def keeps(self, count: int) -> None:
        """Nothing: memory is not bounded here."""

    async def close_write(self) -> None:
        """FIN, behind what was sent."""
        await trio.lowlevel.checkpoint()
        if not self.fin_sent and self._dead_at > trio.current_time():
            self.fin_sent = True
            self._deliver(b"")
            if self._other.fin_sent:
                self._owner.forget(self)
                self._other._owner.forget(self._other)

    async def reset(self) -> None:
        """Abandon both directions."""
        self.cut("it was reset")
        await trio.lowlevel.cancel_shielded_checkpoint()

    # Called by the transport.

    def join(self, other: MemoryStream) -> None:
        """Make two ends one stream."""
        self._other, other._other = other, self
        self._owner.add(self)
        other._owner.add(other)

    def cut(self, reason: str) -> None:
        """A reset: both directions end, what has arrived here is dropped."""
        if self._dead_at == math.inf:
            self._arriving.clear()
            self._unread_bytes = 0
            self.break_off(reason)

    def break_off(self, reason: str) -> None:
        """Break at this end now, at the other a delay later (never, if the link is silent: it finds out by itself)."""
        now = trio.current_time()
        self._die(now, reason)
        if not self._silent:
            self._other._die(now + self._network.delay_seconds, reason)

    def fall_silent(self) -> None:
        """Nothing passes any more, either way; both ends find out after SILENT_SECONDS."""
        for end in (self, self._other):
            if not end._silent:
                end._silent = True
                end._die(trio.current_time() + SILENT_SECONDS, "the link went silent")

    def _die(self, at: float, reason: str) -> None:
        if at < self._dead_at:
            self._dead_at, self._reason = at, reason
        self._owner.forget(self)
        self._wake()
        self._other._wake()

    def _raise_if_dead(self) -> None:
        if self._dead_at <= trio.current_time():
            raise Unreachable(f"stream with {self.peer}: {self._reason}")

    def _deliver(self, piece: bytes) -> None:
        if self._silent or self._other._dead_at <= trio.current_time():
            return
        self._other._arriving.append((trio.current_time() + self._network.delay_seconds, piece))
        self._other._unread_bytes += len(piece)
        self._other._wake()

    def _take(self, max_bytes: int) -> bytes:
        at, piece = self._arriving[0]
        if not piece:  # FIN stays, so that every later read says the same
            return b""
        taken = piece[:max_bytes]
        if len(taken) < len(piece):
            self._arriving[0] = (at, piece[max_bytes:])
        else:
            self._arriving.popleft()
        self._unread_bytes -= len(taken)
        self._other._wake()
        return taken

    async def _wait(self, until: float) -> None:
        self._changed = trio.Event() if self._changed.is_set() else self._changed
        with trio.move_on_at(min(until, self._dead_at)):
            await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
