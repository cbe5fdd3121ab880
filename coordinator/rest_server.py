"""The HTTP server under the API: a socket of our own, served by hypercorn's trio worker."""

from __future__ import annotations

import logging
import socket
from typing import TYPE_CHECKING, Any, cast

import trio
from hypercorn.config import Config
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from hypercorn.utils import wrap_app

from echo2.p2p import open_files
from echo2.p2p.errors import ConfigurationError

if TYPE_CHECKING:
    from .api import App

BACKLOG = 128

CONNECTIONS_MAX = 64
"""At a time: a browser opens 6, a monitor one; an operator's tools many times that. Less where files are few."""

READ_SECONDS = 30
"""For a client to send its request: one that never ends does not hold a connection for ever."""


def open_listener(host: str, port: int) -> socket.socket:
    """Bind and listen before anything else is started. Raises ConfigurationError when the port is taken."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigurationError(f"rest.host = {host!r} is not an address of this machine: {error.strerror}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigurationError(
            f"cannot serve REST on {host} port {port}: {error.strerror}; set another rest.port, or stop what uses it"
        ) from error
    listener.setblocking(False)
    return listener


def url_of(listener: socket.socket) -> str:
    """Where the listener is reached from this machine."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def serve_rest(app: App, listener: socket.socket, *, most: int = CONNECTIONS_MAX) -> None:
    """Serve until cancelled, `most` connections at a time. Takes the listener over."""
    config = Config()
    config.accesslog = None
    config.errorlog = logging.getLogger("hypercorn.error")
    config.include_server_header = False
    config.read_timeout = READ_SECONDS
    asgi: Any = app
    wrapped = wrap_app(asgi, config.wsgi_max_body_size, "asgi")
    context = WorkerContext(None)
    capped = CappedListener(
        trio.SocketListener(trio.socket.from_stdlib_socket(listener)), open_files.connections_max(most)
    )

    async def serve_one(stream: trio.SocketStream) -> None:
        try:
            await TCPServer(wrapped, config, context, ConnectionState({}), cast("Any", stream))
        finally:
            capped.release()

    async with trio.open_nursery() as nursery:
        await trio.serve_listeners(serve_one, [capped], handler_nursery=nursery)


class CappedListener(trio.abc.Listener[trio.SocketStream]):
    """Accepts while fewer than `most` of the accepted are held; `release` gives one back. Others wait in the kernel.

    A connection costs a file, and a process without files writes no ledger and takes no peers: clients of REST, idle
    ones too (which are closed after a few seconds), get no more than their part.
    """

    def __init__(self, listener: trio.SocketListener, most: int) -> None:
        self._listener = listener
        self._places = trio.Semaphore(most, max_value=most)

    async def accept(self) -> trio.SocketStream:
        """The next connection, once there is a place for it."""
        await self._places.acquire()
        try:
            return await self._listener.accept()
        except BaseException:
            self._places.release()
            raise

    def release(self) -> None:
        """One that was accepted is closed."""
        self._places.release()

    async def aclose(self) -> None:
        """Accept no more."""
        await self._listener.aclose()
