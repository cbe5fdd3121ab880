"""Around every request that is served, of peers and over REST: an id on all that is logged of it, and a count.

| request | its id                                                                           | counted by             |
|---------|----------------------------------------------------------------------------------|------------------------|
| wire    | ours                                                                             | protocol, outcome      |
| REST    | `X-Request-ID`, where it is one that a log can show, else ours; in the answer too | route, class of status |

Ids are for reading logs; nothing is decided by them, so they need not come from the coordinator's entropy.
"""

from __future__ import annotations

import logging
import os
import re
from typing import TYPE_CHECKING, Any, TypeVar

from echo2.p2p.errors import ProtocolError, Refused
from echo2.p2p.log_lines import said_of, tell
from echo2.p2p.messages import Message

from .measures import OTHER

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, MutableMapping

    from echo2.p2p.channel import Answer

    from .measures import Measures

    Scope = MutableMapping[str, Any]
    Event = MutableMapping[str, Any]
    Receive = Callable[[], Awaitable[Event]]
    Send = Callable[[Event], Awaitable[None]]
    App = Callable[[Scope, Receive, Send], Awaitable[None]]

Q = TypeVar("Q", bound=Message)

log = logging.getLogger(__name__)

ID_BYTES = 6

HEADER = b"x-request-id"

SANE = re.compile(rb"[A-Za-z0-9._:-]{1,64}")
"""An id of a client's that is kept: it goes into our log and back into a header."""

UNMATCHED = "unmatched"
"""The route of a request that no route took, or that was turned away before."""

SERVER_ERROR = 500

TURNED_AWAY = frozenset({400, 401, 413, 429})
"""Statuses of strangers and of those who ask too often, however many: none of them fills a log that is not asked for
more. What a known person may not is told."""

METHOD_CHARS_MAX = 16
"""Of a method that a log shows: HTTP has no longer ones, and clients may say anything."""


def new_id() -> str:
    """An id for a request."""
    return os.urandom(ID_BYTES).hex()


def served_to_peer(protocol: str, answer: Answer[Q], measures: Measures) -> Answer[Q]:
    """`answer`, with an id in the log, counted by its outcome."""

    async def serve(peer: str, message: Q) -> Message:
        with said_of(request=new_id(), protocol=protocol, peer=peer):
            try:
                reply = await answer(peer, message)
            except Refused as error:
                measures.answered(protocol, error.code)
                tell(log, logging.DEBUG, "request_refused", "%s: %s", error.code, error.detail)
                raise
            except ProtocolError:
                measures.answered(protocol, "error")
                raise
            measures.answered(protocol, "ok")
            return reply

    return serve


class ServedRest:
    """The REST application, with an id for each request and its duration by route. `clock` is monotonic seconds."""

    def __init__(self, app: App, measures: Measures, clock: Callable[[], float]) -> None:
        self._app = app
        self._measures = measures
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = next((value for name, value in scope["headers"] if name == HEADER), b"")
        given = asked.decode() if SANE.fullmatch(asked) else new_id()
        begun, status = self._clock(), SERVER_ERROR

        async def send_with_id(event: Event) -> None:
            nonlocal status
            if event["type"] == "http.response.start":
                status = event["status"]
                event = {**event, "headers": [*event.get("headers", ()), (HEADER, given.encode())]}
            await send(event)

        with said_of(request=given):
            try:
                await self._app(scope, receive, send_with_id)
            finally:
                seconds = self._clock() - begun
                route = getattr(scope.get("route"), "path", UNMATCHED)
                self._measures.served(route if isinstance(route, str) else OTHER, status, seconds)
                quiet = status in TURNED_AWAY or (scope["method"] in {"GET", "HEAD"} and status < SERVER_ERROR)
                tell(
                    log,
                    logging.DEBUG if quiet else logging.INFO,
                    "rest_request",
                    "%s %s: %d in %.3f s",
                    scope["method"][:METHOD_CHARS_MAX],
                    route,
                    status,
                    seconds,
                )
