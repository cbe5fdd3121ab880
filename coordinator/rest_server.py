"""The HTTP server under the API: sockets of our own with bounds in time, and hypercorn's HTTP/1.1 over each of them.

hypercorn's own server is not used: it waits for ever for a client that does not read its answer, and for one that went
away with requests still to be answered. Whoever does so here loses the connection, and its place goes to another. With
a TLS context the same is spoken over TLS, and a greeting takes no longer than the head of a request may. Who gives up
its place for whom while there are none is `rest_places`.
"""

from __future__ import annotations

import logging
import socket
import ssl
from typing import TYPE_CHECKING, Any

import h11
import trio
from hypercorn.config import Config
from hypercorn.events import Closed, RawData, Updated
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from hypercorn.utils import parse_socket_addr, wrap_app

from echo2.p2p import open_files
from echo2.p2p.daemon import SaidSeldom
from echo2.p2p.errors import ConfigurationError

from .rest_gate import WELCOME
from .rest_http1 import Http1
from .rest_places import Places
from .rest_seats import CappedListener, Seat

if TYPE_CHECKING:
    from hypercorn.events import Event as ProtocolEvent
    from hypercorn.protocol.h11 import H11Protocol

    from .rest_gate import App, Event, Receive, Scope, Send

log = logging.getLogger(__name__)

BACKLOG = 128

CONNECTIONS_MAX = 64
"""At a time: a browser opens 6, a monitor one; an operator's tools many times that. Less where files are few."""

IDLE_SECONDS = 5.0
"""For the head of the first or the next request. Those who ask again and again make a new connection where needed."""

READ_SECONDS = 30.0
"""From the head of a request until its answer begins: a body that never ends does not hold a connection for ever."""

WRITE_SECONDS = 10.0
"""A write that does not go on for so long ends the connection. A lost packet, or a laptop's short sleep, is borne."""

ANSWER_SECONDS = 120.0
"""For the whole of an answer: the largest, half a MiB, takes 35 kbit/s. Reading in sips holds no place longer."""

CONNECTION_SECONDS = 600.0
REQUESTS_MAX = 100
"""Of one connection, then it is closed and its place is free for who waits. Clients connect anew by themselves."""

TLS_BYTES = 16 * 1024
"""Of one record: as many as TLS takes."""

LINGER_SECONDS = 1.0
"""What a client still sends is read and dropped so long after the last answer: closed at once, the system would reset
the connection, and the client might lose the answer with it."""

READ_BYTES = 16 * 1024
"""At a time. What was sent behind a request waits here and in the system until that one is answered."""

SEND_BUFFER_BYTES = 128 * 1024
"""In the system, for each connection: without a bound it takes megabytes of answers that nobody reads."""

LAST_ANSWERS = frozenset({400, 401, 403, 413, 429})
"""Who is turned away so has no further use of the connection, and shall not keep a place by it."""


def open_listener(host: str, port: int) -> socket.socket:
    """Bind and listen before anything else is started. Raises ConfigurationError when the port is taken."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigurationError(f"rest.host = {host!r} is not an address of this machine: {error.strerror}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # what it accepts inherits it
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigurationError(
            f"cannot serve REST on {host} port {port}: {error.strerror}; set another rest.port, or stop what uses it"
        ) from error
    listener.setblocking(False)
    return listener


def url_of(listener: socket.socket, scheme: str = "http") -> str:
    """Where the listener is reached from this machine."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


async def serve_rest(
    app: App,
    listener: socket.socket,
    *,
    most: int = CONNECTIONS_MAX,
    tls: ssl.SSLContext | None = None,
    proxy: str = "",
) -> None:
    """Serve until cancelled, `most` connections at a time, over TLS where `tls` is given. Takes the listener over.

    `proxy`: the address of the proxy that brings everybody else's requests; it is under no cap.
    """
    config = Config()
    config.accesslog = None
    config.errorlog = logging.getLogger("hypercorn.error")
    for each in (log, config.errorlog):
        each.filters[:] = [SaidSeldom(tracebacks=True)]
    config.include_server_header = False
    config.keep_alive_max_requests = REQUESTS_MAX
    context = WorkerContext(None)
    most = open_files.connections_max(most)
    capped = CappedListener(
        trio.SocketListener(trio.socket.from_stdlib_socket(listener)), Places(most, proxy), most, trio.current_time
    )

    async def serve_one(seat: Seat) -> None:
        try:
            with seat.scope:
                await Connection(app, config, context, seat, tls).serve()
        except* Exception:
            # A bug: it costs this client its answer, and not everybody theirs.
            log.exception("a connection failed")

    async with trio.open_nursery() as nursery:
        await trio.serve_listeners(serve_one, [capped], handler_nursery=nursery)


class Connection:
    """One client: its requests are answered one after the other, until one of the bounds above is passed."""

    def __init__(
        self, app: App, config: Config, context: WorkerContext, seat: Seat, tls: ssl.SSLContext | None = None
    ) -> None:
        stream = seat.stream
        self._tls = None if tls is None else trio.SSLStream(stream, tls, server_side=True, https_compatible=True)
        self._app = app
        self._config = config
        self._context = context
        self._place = seat.place
        self._stream = stream
        self._ends_at = trio.current_time() + CONNECTION_SECONDS
        self._scope = trio.CancelScope()
        self._writing = trio.Lock()
        self._answering = False
        self._said_all = False
        self._orderly = False

    async def serve(self) -> None:
        """Until either side ends it. Closes the stream."""
        async with self._stream:
            try:
                if await self._greeted():
                    await self._converse()
                if self._orderly:
                    await self._linger()
            except (OSError, trio.BrokenResourceError):
                pass  # the client is gone

    async def _greeted(self) -> bool:
        if self._tls is not None:
            with trio.move_on_after(IDLE_SECONDS) as in_time:
                await self._tls.do_handshake()
            return not in_time.cancelled_caught
        return True

    async def _converse(self) -> None:
        family = self._stream.socket.family
        client = parse_socket_addr(family, self._stream.socket.getpeername())
        server = parse_socket_addr(family, self._stream.socket.getsockname())
        answer: Any = self._answer
        app = wrap_app(answer, self._config.wsgi_max_body_size, "asgi")
        self._allow(IDLE_SECONDS)
        with self._scope:
            async with TaskGroup() as tasks:
                self._protocol = Http1(
                    app,
                    self._config,
                    self._context,
                    tasks,
                    ConnectionState({}),
                    self._tls is not None,
                    client,
                    server,
                    self._event,
                    gone=lambda: self._scope.cancel_called,
                )
                await self._read(self._protocol)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application's answer, of which is seen whether this client has proved itself, and whether it may stay."""

        async def send_on(event: Event) -> None:
            if event["type"] == "http.response.start":
                if scope["state"].get(WELCOME):
                    self._place.proved = trio.current_time()
                if event["status"] in LAST_ANSWERS:
                    event = {**event, "headers": [*event.get("headers", ()), (b"connection", b"close")]}
            await send(event)

        await self._app(scope, receive, send_on)

    def _allow(self, seconds: float) -> None:
        self._scope.deadline = min(self._ends_at, trio.current_time() + seconds)

    async def _read(self, protocol: H11Protocol) -> None:
        """Hand on what comes; `handle` returns when the protocol can take more."""
        while True:
            try:
                data = await (self._tls or self._stream).receive_some(READ_BYTES)
            except trio.BrokenResourceError:
                self._scope.cancel()
                return
            if not data:
                break
            await protocol.handle(RawData(bytes(data)))
            if protocol.connection.their_state in {h11.ERROR, h11.MUST_CLOSE, h11.CLOSED}:
                return  # no request can follow: the connection ends with the answer under way
        if protocol.connection.their_state not in {h11.DONE, h11.MUST_CLOSE}:
            self._scope.cancel()  # in the middle of a request, or between two
            return
        self._said_all = True  # it asked and ended its side: it gets the answer that is under way

    async def _event(self, event: ProtocolEvent) -> None:
        """What the protocol wants done."""
        if isinstance(event, RawData):
            await self._write(event.data)
        elif isinstance(event, Updated):
            self._answering = False
            self._allow(IDLE_SECONDS if event.idle else READ_SECONDS)
            if event.idle and self._said_all:
                await self._end()
        elif isinstance(event, Closed) and self._protocol.connection.our_state not in _ANSWERING:
            await self._end()

    async def _end(self) -> None:
        """When the answer under way has left: requests behind the last one close as well, in the midst of it."""
        async with self._writing:
            self._orderly = True
            self._scope.cancel()

    async def _write(self, data: bytes) -> None:
        if not self._answering:
            self._answering = True
            self._allow(ANSWER_SECONDS)
        async with self._writing:
            rest = memoryview(data)
            while rest:
                sent = 0
                with trio.move_on_after(WRITE_SECONDS):
                    try:
                        sent = await self._send(rest)
                    except (OSError, trio.BrokenResourceError) as error:
                        log.debug("a client went away: %s", error)
                if not sent:
                    self._scope.cancel()
                    await trio.sleep_forever()  # until the cancellation just asked for: nothing more may be written
                rest = rest[sent:]

    async def _send(self, data: memoryview) -> int:
        """As much as goes now. Of TLS, one record: within its time all of it leaves, or nothing may follow."""
        if self._tls is None:
            return await self._stream.socket.send(data)
        record = data[:TLS_BYTES]
        await self._tls.send_all(record)
        return len(record)

    async def _linger(self) -> None:
        with trio.move_on_after(LINGER_SECONDS):
            await self._stream.send_eof()
            while await self._stream.receive_some(READ_BYTES):
                pass


_ANSWERING = frozenset({h11.SEND_RESPONSE, h11.SEND_BODY})
