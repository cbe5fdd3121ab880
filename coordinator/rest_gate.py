"""In front of every route, unknown paths too: who asks, how often, how much they send, and what is said to browsers.

In this order:

| looked at                       | else                                                                          |
|---------------------------------|-------------------------------------------------------------------------------|
| headers that say who asks what  | 400: each once, and Host a name or address with or without a port             |
| the proxy, where there is one   | 403: only it may connect                                                      |
| Host, on loopback               | 403: a page whose name was pointed at 127.0.0.1 may not read the pool         |
| Origin of a change              | 403: a page of elsewhere may not change anything, whatever it sends           |
| the length of the body          | 413; without a length it is counted as it comes                               |
| the token, or the cookie        | 401; a cookie that is none is passed over, as browsers keep them              |
| the CSRF token of a change      | 403, where a cookie said who asks                                             |
| how often this client asked     | 429, reads and changes apart, by token, else by address                       |
| a stranger's path, off loopback | 401 but for the way in, before anything of a body is read                     |

What a route needs is the route's (`rest_guard`): it finds who asks in `request.state.who`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers, MutableHeaders

from echo2.p2p.errors import Refused

from .config import LOOPBACK_HOSTS
from .rest_limits import Buckets, Limits, address_in, client_of
from .rest_problems import SAY_WHO, problem, refused, too_often
from .rest_roles import ANYONE, NEEDS, SAFE_METHODS, Role
from .rest_sessions import COOKIE, CSRF_HEADER, SECURE_COOKIE, csrf_holds

if TYPE_CHECKING:
    from starlette.responses import Response

    from .access import AccessBook
    from .rest_sessions import Sessions

Scope = MutableMapping[str, Any]
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

BODY_BYTES_MAX = 64 * 1024
"""The largest legal body is a run file; anything above is a mistake or an attack."""

CREDENTIAL_BYTES_MAX = 512
"""Of a token or cookie that is worth looking at."""

HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
    "object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""On every answer."""

HSTS = "max-age=31536000"

HOST = re.compile(r"(?P<name>[a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?", re.IGNORECASE)
"""A name or IPv4 address, or an IPv6 address in brackets, and a port: what browsers and tools send."""

SAID_ONCE = ("authorization", "content-length", "content-type", "host", "origin", CSRF_HEADER.lower())
"""Of two different ones, whoever stands in front of us may have looked at the other."""

WAY_IN = frozenset(path for (_, path), needs in NEEDS.items() if needs == ANYONE)

WELCOME = "welcome"
"""In the state of a request's scope: whether who asks has shown a right to."""

PROXY_HEADERS = ("x-forwarded-for", "forwarded", "x-real-ip")

DENIALS = {
    "unknown": "this token is not known here",
    "revoked": "this token was revoked; ask an operator for another",
    "expired": "this token has expired; ask an operator for another",
}


@dataclass(frozen=True, slots=True)
class Door:
    """How the port is reached. `open_reads`: only this machine's own processes can. `proxy`: the one that may."""

    open_reads: bool = True
    tls: bool = False
    proxy: str = ""

    def is_proxy(self, address: str) -> bool:
        """Whether this is the proxy's address."""
        found = address_in(address)
        return found is not None and found == address_in(self.proxy)


@dataclass(frozen=True, slots=True)
class Who:
    """Who asks: the token's name, its role and SHA-256; `cookie` where a session said so."""

    name: str
    role: Role
    access: bytes
    cookie: str = ""


class Gate:
    """The ASGI application around the routes."""

    def __init__(
        self,
        app: App,
        *,
        door: Door,
        access: AccessBook,
        sessions: Sessions,
        limits: Limits,
        clock: Callable[[], float],
    ) -> None:
        self._app = app
        self._door = door
        self._access = access
        self._sessions = sessions
        self._clock = clock
        self._reads = Buckets(limits.reads)
        self._changes = Buckets(limits.changes)
        self._failures = Buckets(limits.failures)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # no websocket is offered
            await send({"type": "websocket.close", "code": 1000})
            return

        async def send_safely(event: Event) -> None:
            if event["type"] == "http.response.start":
                self._add_headers(MutableHeaders(scope=event))
            await send(event)

        refusal = self._refusal(scope)
        if refusal is not None:
            await refusal(scope, receive, send_safely)
            return
        body = bytearray()
        more = True
        while more:  # a body may come without a length: it is read here, under the bound, and handed on whole
            event = await receive()
            if event["type"] != "http.request":
                return  # the client went away
            body += event.get("body", b"")
            more = event.get("more_body", False)
            if len(body) > BODY_BYTES_MAX:
                await too_large()(scope, receive, send_safely)
                return
        replay: list[Event] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def receive_whole() -> Event:
            return replay.pop() if replay else await receive()

        await self._app(scope, receive_whole, send_safely)

    def _add_headers(self, headers: MutableHeaders) -> None:
        for name, value in HEADERS.items():
            headers.setdefault(name, value)
        headers.setdefault("Cache-Control", "no-store")
        if self._door.tls:
            headers.setdefault("Strict-Transport-Security", HSTS)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        change = scope["method"] not in SAFE_METHODS
        address = (scope.get("client") or ("",))[0]
        refusal = self._wrong_way(headers, address, change)
        if refusal is not None:
            return refusal
        length = headers.get("content-length", "0")
        if not (length.isascii() and length.isdigit() and len(length) < 20) or int(length) > BODY_BYTES_MAX:
            return too_large()
        client, now = f"address {client_of(address_of(scope, self._door))}", self._clock()
        try:
            who = self._who(headers, client, now)
        except Refused as error:
            return refused(error)
        if who is not None and not isinstance(who, Who):
            return who
        if change and who is not None and who.cookie and not csrf_holds(who.cookie, headers.get(CSRF_HEADER, "")):
            if not _is_login(scope):
                said = f"a change in a session needs the header {CSRF_HEADER}; GET /v1/session says its value"
                return problem(HTTPStatus.FORBIDDEN, said)
            who = None  # logging in anew; nobody is, who cannot say it
        wait = (self._changes if change else self._reads).take(client if who is None else f"token {who.name}", now)
        if wait:
            return too_often(wait)
        welcome = who is not None or self._door.open_reads
        if not welcome and scope["path"] not in WAY_IN:
            return problem(HTTPStatus.UNAUTHORIZED, SAY_WHO)
        scope.setdefault("state", {}).update({"who": who, "client": client, "door": self._door, WELCOME: welcome})
        return None

    def _wrong_way(self, headers: Headers, address: str, change: bool) -> Response | None:
        """Why nobody at all may ask so."""
        host = headers.get("host", "")
        if host and not HOST.fullmatch(host):
            return problem(HTTPStatus.BAD_REQUEST, "the header Host must be a name or an address, and a port or none")
        twice = next((name for name in SAID_ONCE if len(headers.getlist(name)) > 1), None)
        if twice is not None:
            return problem(HTTPStatus.BAD_REQUEST, f"the header {twice} may be there only once")
        if self._door.proxy:
            if not (self._door.is_proxy(address) or is_loopback(address)):  # commands of this machine come with a token
                return problem(HTTPStatus.FORBIDDEN, f"only the proxy {self._door.proxy} may ask here")
        elif any(name in headers for name in PROXY_HEADERS):
            # Reads that are open to this machine's processes would be open to all that the proxy lets through.
            said = (
                "this came through a proxy: set rest.behind_proxy and rest.proxy_address in the coordinator's settings"
            )
            return problem(HTTPStatus.FORBIDDEN, said)
        if self._door.open_reads and not _names_loopback(host):
            return problem(HTTPStatus.FORBIDDEN, "this coordinator answers only to localhost")
        origin = headers.get("origin")
        if change and origin is not None and origin.lower().partition("://")[2] != host.lower():
            return problem(HTTPStatus.FORBIDDEN, "a page of another origin may not change anything here")
        return None

    def _who(self, headers: Headers, client: str, now: float) -> Who | Response | None:
        """Who asks; the refusal of a token that is none; None for a stranger. Raises Refused."""
        said = headers.get("authorization")
        if said is not None:
            scheme, _, token = said.partition(" ")
            token = token.strip()
            if scheme.lower() != "bearer" or not token or len(token) > CREDENTIAL_BYTES_MAX:
                return self._failed(client, now, SAY_WHO)
            digest = hashlib.sha256(token.encode("latin-1")).digest()
            found = self._access.find(digest)
            if isinstance(found, str):
                return self._failed(client, now, DENIALS[found])
            return Who(found.name, found.role, digest)
        cookie = cookie_of(headers)
        session = self._sessions.find(cookie, now) if cookie else None
        if session is None:
            return None
        found = self._access.find(session.access)
        if isinstance(found, str):
            self._sessions.close(cookie)
            return None
        return Who(found.name, found.role, session.access, cookie)

    def _failed(self, client: str, now: float, why: str) -> Response:
        wait = self._failures.take(client, now)
        return too_often(wait) if wait else problem(HTTPStatus.UNAUTHORIZED, why)


def too_large() -> Response:
    """The answer to a body above the bound."""
    return problem(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a request body is at most {BODY_BYTES_MAX} bytes")


def cookie_of(headers: Headers) -> str:
    """The session's cookie; empty where there is none."""
    try:
        jar = SimpleCookie(headers.get("cookie", ""))
    except CookieError:
        return ""
    found = jar.get(SECURE_COOKIE) or jar.get(COOKIE)
    return "" if found is None or len(found.value) > CREDENTIAL_BYTES_MAX else found.value


def _is_login(scope: Scope) -> bool:
    return bool(scope["method"] == "POST" and scope["path"] == "/v1/session")


def address_of(scope: Scope, door: Door) -> str:
    """The client's address; behind the proxy, as the proxy saw it: the last of the list, which it alone wrote."""
    address = str((scope.get("client") or ("",))[0])
    if not door.is_proxy(address):
        return address
    last = ",".join(Headers(scope=scope).getlist("x-forwarded-for")).rpartition(",")[2].strip()
    return str(address_in(last) or address)


def is_loopback(address: str) -> bool:
    """Whether it is of this machine alone."""
    found = address_in(address)
    return found is not None and found.is_loopback


def _names_loopback(host: str) -> bool:
    found = HOST.fullmatch(host)
    return found is not None and found["name"].lower().strip("[]") in LOOPBACK_HOSTS
