"""The HTTP server under the API: a socket of our own, served by hypercorn's trio worker."""

from __future__ import annotations

import logging
import socket
from typing import TYPE_CHECKING, Any

from hypercorn.config import Config, Sockets
from hypercorn.trio.run import worker_serve
from hypercorn.utils import wrap_app

from echo2.p2p.errors import ConfigurationError

if TYPE_CHECKING:
    from .api import App

BACKLOG = 128

GRACE_SECONDS = 2.0
"""Given to requests under way when the process is told to stop."""

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


async def serve_rest(app: App, listener: socket.socket) -> None:
    """Serve until cancelled. Takes the listener over."""
    config = Config()
    config.accesslog = None
    config.errorlog = logging.getLogger("hypercorn.error")
    config.include_server_header = False
    config.graceful_timeout = GRACE_SECONDS
    config.read_timeout = READ_SECONDS
    asgi: Any = app
    await worker_serve(wrap_app(asgi, config.wsgi_max_body_size, "asgi"), config, sockets=Sockets([], [listener], []))
