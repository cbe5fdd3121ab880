"""REST: sessions of browsers. A page logs in with a token once, and has a cookie that no script can read."""

from __future__ import annotations

import hashlib
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated

from fastapi import HTTPException, Request, Response
from pydantic import Field

from .rest_gate import CREDENTIAL_BYTES_MAX, DENIALS
from .rest_guard import Asker, Body, make_router
from .rest_limits import Buckets
from .rest_problems import TooOften
from .rest_roles import Role
from .rest_sessions import ABSOLUTE_SECONDS, COOKIE, SECURE_COOKIE, csrf_of
from .views import View

if TYPE_CHECKING:
    from fastapi import APIRouter

    from .rest_gate import Door, Who
    from .rest_guard import Rooms


class LoginRequest(Body):
    """The token, where it is not in the header Authorization."""

    token: Annotated[str, Field(min_length=1, max_length=CREDENTIAL_BYTES_MAX)] | None = None


NO_LOGIN = LoginRequest()


class SessionView(View):
    """Who asks: no role for a stranger. `csrf`: what the header X-CSRF-Token of a change must say; else empty."""

    name: str
    role: Role | None
    csrf: str


def session_routes(rooms: Rooms) -> APIRouter:
    """Open, look at, close."""
    router = make_router("session")
    logins = Buckets(rooms.limits.logins)

    @router.post("/v1/session", status_code=HTTPStatus.CREATED)
    async def log_in(request: Request, response: Response, body: LoginRequest = NO_LOGIN) -> SessionView:
        """Open a session with a token: in the body, or in the header Authorization."""
        wait = logins.take(request.state.client, rooms.clock())
        if wait:
            raise TooOften(wait)
        name, role, access = _holder(rooms, request.state.who, body.token)
        cookie = rooms.sessions.open(access, rooms.clock())
        _set_cookie(response, request.state.door, cookie, ABSOLUTE_SECONDS)
        return SessionView(name=name, role=role, csrf=csrf_of(cookie))

    @router.get("/v1/session")
    async def session(request: Request) -> SessionView:
        """Who I am; a page asks it before it knows, so a stranger is no error."""
        who: Who | None = request.state.who
        if who is None:
            return SessionView(name="", role=None, csrf="")
        return SessionView(name=who.name, role=who.role, csrf=csrf_of(who.cookie) if who.cookie else "")

    @router.delete("/v1/session", status_code=HTTPStatus.NO_CONTENT)
    async def log_out(request: Request, who: Asker) -> Response:
        """End the session."""
        response = Response(status_code=HTTPStatus.NO_CONTENT)
        if who.cookie:
            rooms.sessions.close(who.cookie)
            _set_cookie(response, request.state.door, "", 0)
        return response

    return router


def _holder(rooms: Rooms, who: Who | None, token: str | None) -> tuple[str, Role, bytes]:
    if token is None:
        if who is None:
            raise HTTPException(HTTPStatus.UNAUTHORIZED, 'a session needs a token: {"token": "..."}')
        return who.name, who.role, who.access
    digest = hashlib.sha256(token.encode()).digest()
    found = rooms.access.find(digest)
    if isinstance(found, str):
        raise HTTPException(HTTPStatus.UNAUTHORIZED, DENIALS[found])
    return found.name, found.role, digest


def _set_cookie(response: Response, door: Door, value: str, seconds: float) -> None:
    secure = door.tls
    response.set_cookie(
        SECURE_COOKIE if secure else COOKIE, value, max_age=int(seconds), path="/", secure=secure, httponly=True,
        samesite="strict",
    )  # fmt: skip
