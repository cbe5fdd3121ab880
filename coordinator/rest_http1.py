"""HTTP/1.1 of one connection: hypercorn's over h11, without what nothing here has use for, and with bounds on the rest.

| a request that                                         | is answered                                               |
|--------------------------------------------------------|-----------------------------------------------------------|
| is of another version of HTTP                          | 505                                                       |
| names more than a path (a URL, a host, `*`)            | 400: nothing is passed on from here                       |
| has a length and is chunked as well                    | 400: a proxy in front might see two requests in it        |
| comes in more than PIECES_MAX pieces                   | 413: each costs us far more than it costs its sender      |

Then the connection ends, as after anything that h11 does not take. What the application still says to a client that is
gone is dropped: neither side's state is of any interest then.
"""

from __future__ import annotations

import json
from http import HTTPStatus
from itertools import chain
from typing import TYPE_CHECKING, Any

import h11
import trio
from hypercorn.events import Closed
from hypercorn.protocol.h11 import H11Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from hypercorn.typing import H11SendableEvent

PIECES_MAX = 512
"""Chunks of a body, or segments that it came in: of 64 KiB, some 45 on an Ethernet, and 120 on the worst of lines."""

_SAID = {
    HTTPStatus.BAD_REQUEST: "this is not an HTTP/1.1 request that is served here",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: f"the body came in more than {PIECES_MAX} pieces; send it with its length",
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE: "the head of a request is at most 16 KiB",
}


class PiecedOut(h11.Connection):
    """h11's connection of a server, that counts the pieces of each body."""

    def __init__(self, head_bytes_max: int) -> None:
        super().__init__(h11.SERVER, max_incomplete_event_size=head_bytes_max)
        self._pieces = 0

    def next_event(self) -> Any:
        """The next event. Raises h11.RemoteProtocolError for what no client may send."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._pieces = 0
        elif isinstance(event, h11.Data):
            self._pieces += 1
            if self._pieces > PIECES_MAX:
                self._process_error(self.their_role)
                raise h11.RemoteProtocolError("too many pieces", HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        return event


class Http1(H11Protocol):
    """No other protocol is offered: of what could be agreed on, HTTP/2 and websockets, nothing here has use.

    `gone` says whether the client is, or has lost its connection.
    """

    def __init__(self, *args: Any, gone: Callable[[], bool]) -> None:
        super().__init__(*args)
        self.connection = PiecedOut(self.config.h11_max_incomplete_size)
        self._gone = gone
        self._bodiless = False

    async def _check_protocol(self, event: h11.Request) -> None:
        """Nothing is changed to."""

    async def _create_stream(self, request: h11.Request) -> None:
        self._bodiless = request.method == b"HEAD"
        refusal = _refusal(request)
        if refusal is not None:
            await self._send_error_response(refusal)
            await self.send(Closed())
            return
        kept = [(name, value) for name, value in request.headers if name != b"upgrade"]
        await super()._create_stream(
            h11.Request(method=request.method, target=request.target, headers=kept, http_version=request.http_version)
        )

    async def _send_h11_event(self, event: H11SendableEvent) -> None:
        if self._gone():
            await trio.lowlevel.checkpoint_if_cancelled()
            return  # from within a shield, or a client that no cancellation follows
        await super()._send_h11_event(event)

    async def _send_error_response(self, status_code: int) -> None:
        status = HTTPStatus(status_code)
        problem = {"type": "about:blank", "title": status.phrase, "status": status, "detail": _SAID.get(status, "")}
        body = json.dumps(problem).encode()
        headers = [
            (b"content-type", b"application/problem+json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
        ]
        await self._send_h11_event(
            h11.Response(status_code=status, headers=list(chain(headers, self.config.response_headers("h11"))))
        )
        if not self._bodiless:
            await self._send_h11_event(h11.Data(data=body))
        await self._send_h11_event(h11.EndOfMessage())


def _refusal(request: h11.Request) -> HTTPStatus | None:
    if request.http_version not in {b"1.0", b"1.1"}:
        return HTTPStatus.HTTP_VERSION_NOT_SUPPORTED
    names = {name for name, _ in request.headers}
    if not request.target.startswith(b"/") or {b"content-length", b"transfer-encoding"} <= names:
        return HTTPStatus.BAD_REQUEST
    return None
