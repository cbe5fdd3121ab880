"""REST: what the coordinator shows and the few things an operator may change.

Reads are open when bound to loopback. Bound elsewhere, every request needs the operator's bearer token; a change needs
it always. Errors are `application/problem+json`. Nothing is fetched from elsewhere, so there are no documentation pages
(they would load scripts from a CDN); the schema itself is at /openapi.json.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import trio
from fastapi import FastAPI, HTTPException, Path, Query, Request, Response, Security
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.security import HTTPBearer
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException as StarletteHTTPException

from echo2.p2p.errors import ConfigurationError, Refused

from .appeals_api import AppealsDesk, add_appeals
from .broadcast_routes import broadcast_routes
from .config import LOOPBACK_HOSTS, TOKEN_HOURS_MAX, TOKEN_USES_MAX
from .metrics import CONTENT_TYPE, Views, exposition, make_registry
from .views import EventView, NodeView, PoolView, RunView
from .web_pages import WebPages

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, MutableMapping, Sequence

    from fastapi.params import Depends

    from .broadcast_view import BroadcastView

    Scope = MutableMapping[str, Any]
    Event = MutableMapping[str, Any]
    Receive = Callable[[], Awaitable[Event]]
    Send = Callable[[Event], Awaitable[None]]
    App = Callable[[Scope, Receive, Send], Awaitable[None]]

log = logging.getLogger(__name__)

BODY_BYTES_MAX = 64 * 1024
"""The largest legal body is a reason of 512 characters; anything above is a mistake or an attack."""

OPERATOR = "operator"
"""Who the audit log names for a change over REST: there is one operator's token."""

Reason = Annotated[str, Field(min_length=1, max_length=512, description="kept in the audit log")]
PeerPath = Annotated[str, Path(min_length=40, max_length=64, pattern=r"^[1-9A-HJ-NP-Za-km-z]+$")]
RunPath = Annotated[str, Path(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


class Desk(Views, AppealsDesk, Protocol):
    """The coordinator's service, as far as REST needs it. Unknown names raise KeyError, impossible changes Refused."""

    def run_view(self, run: str) -> RunView:
        """One run."""

    def create_token(self, *, uses: int, expires_seconds: float | None, actor: str, reason: str) -> str:
        """A token that lets `uses` new nodes in."""

    def suspend_node(self, peer: str, *, actor: str, reason: str) -> None:
        """No more leases; what it has delivered and is not consumed is withdrawn."""

    def restore_node(self, peer: str, *, actor: str, reason: str) -> None:
        """A suspended node takes part again."""

    def broadcast_view(self, limit: int) -> BroadcastView:
        """Where each node is with the newest snapshot."""

    def decisions_view(self) -> list[dict[str, Any]]:
        """Whom the scheduler activated and released, and why, the newest first."""

    def events_view(self, *, limit: int, before: int | None) -> list[EventView]:
        """The audit log, newest first."""

    def pause_run(self, run: str, *, actor: str, reason: str) -> None:
        """No new leases until resumed."""

    def resume_run(self, run: str, *, actor: str, reason: str) -> None:
        """Leases flow again."""

    def stop_run(self, run: str, *, actor: str, reason: str) -> None:
        """End the run for good."""


class Body(BaseModel):
    """A request body: no unknown keys, no coercion."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class TokenRequest(Body):
    """How many nodes a token lets in, and for how long."""

    uses: Annotated[int, Field(ge=1, le=TOKEN_USES_MAX)] = 1
    expires_hours: Annotated[float, Field(gt=0, le=TOKEN_HOURS_MAX)] | None = 72.0
    reason: Reason = "made over REST"


class TokenCreated(BaseModel):
    """The only time the token is shown: the ledger keeps its hash."""

    token: str
    join: str
    uses: int
    expires_hours: float | None


class ChangeRequest(Body):
    """Why a run is paused, resumed or stopped, or a node restored."""

    reason: Reason = "asked over REST"


class SuspendRequest(Body):
    """Why a node is suspended; it is shown to the node's owner."""

    reason: Reason


ONE_TOKEN = TokenRequest()
NO_REASON = ChangeRequest()
"""What a request without a body means."""

BEARER = Security(HTTPBearer(auto_error=False, description="the operator's token"))
"""For /openapi.json: `Gate` is what checks it."""


class Healthz(BaseModel):
    """The process answers; `trouble` says why it refuses requests, if it does."""

    status: str
    trouble: str


class Problem(BaseModel):
    """RFC 9457."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str


PROBLEMS: dict[int | str, dict[str, Any]] = {
    code: {"model": Problem, "content": {"application/problem+json": {}}, "description": HTTPStatus(code).phrase}
    for code in (401, 403, 404, 409, 413, 422)
}


def make_api(
    desk: Desk,
    *,
    join: Callable[[str], str],
    token_sha256: bytes,
    loopback: bool,
    version: str,
    public_page: bool = False,
) -> App:
    """The ASGI application. `join` makes a join string of a token; `token_sha256` is of the operator's token."""
    api = FastAPI(
        title="ECHO-2 coordinator", version=version, docs_url=None, redoc_url=None, responses=PROBLEMS,
        openapi_url="/openapi.json", dependencies=[] if loopback else [BEARER],
    )  # fmt: skip
    _add_reads(api, desk)
    _add_changes(api, desk, join, [BEARER] if loopback else [])
    add_appeals(api, desk, [BEARER] if loopback else [])
    api.include_router(broadcast_routes(desk))
    _add_problems(api)
    gate = Gate(api, token_sha256=token_sha256, loopback=loopback)
    return WebPages(gate, desk, public=public_page, clock=trio.current_time)


def _add_reads(api: FastAPI, desk: Desk) -> None:
    registry = make_registry(desk)

    @api.get("/healthz")
    async def healthz() -> Healthz:
        trouble = desk.pool_view().trouble
        return Healthz(status="trouble" if trouble else "ok", trouble=trouble)

    @api.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        return Response(exposition(registry), media_type=CONTENT_TYPE)

    @api.get("/v1/pool")
    async def pool() -> PoolView:
        return desk.pool_view()

    @api.get("/v1/nodes")
    async def nodes() -> list[NodeView]:
        return list(desk.nodes_view())

    @api.get("/v1/nodes/{peer}")
    async def node(peer: PeerPath) -> NodeView:
        return _known_node(desk, peer)

    @api.get("/v1/runs")
    async def runs() -> list[RunView]:
        return list(desk.runs_view())

    @api.get("/v1/events")
    async def events(
        limit: Annotated[int, Query(ge=1, le=1000, description="lines, the newest first")] = 100,
        before: Annotated[int | None, Query(ge=1, description="only events with a lower id")] = None,
    ) -> list[EventView]:
        return desk.events_view(limit=limit, before=before)

    @api.get("/v1/decisions")
    async def decisions() -> list[dict[str, Any]]:
        return desk.decisions_view()

    @api.get("/v1/runs/{run}")
    async def run(run: RunPath) -> RunView:
        return _known_run(desk, run)


def _add_changes(api: FastAPI, desk: Desk, join: Callable[[str], str], needs: Sequence[Depends]) -> None:
    @api.post("/v1/tokens", status_code=HTTPStatus.CREATED, dependencies=needs)
    async def create_token(response: Response, body: TokenRequest = ONE_TOKEN) -> TokenCreated:
        join("")  # that no join string can be told is said before a token is made that nobody could use
        seconds = None if body.expires_hours is None else body.expires_hours * 3600
        token = desk.create_token(uses=body.uses, expires_seconds=seconds, actor=OPERATOR, reason=body.reason)
        response.headers["Cache-Control"] = "no-store"
        return TokenCreated(token=token, join=join(token), uses=body.uses, expires_hours=body.expires_hours)

    @api.post("/v1/runs/{run}/pause", dependencies=needs)
    async def pause(run: RunPath, body: ChangeRequest = NO_REASON) -> RunView:
        return _change_run(desk, run, desk.pause_run, body.reason)

    @api.post("/v1/runs/{run}/resume", dependencies=needs)
    async def resume(run: RunPath, body: ChangeRequest = NO_REASON) -> RunView:
        return _change_run(desk, run, desk.resume_run, body.reason)

    @api.post("/v1/runs/{run}/stop", dependencies=needs)
    async def stop(run: RunPath, body: ChangeRequest = NO_REASON) -> RunView:
        return _change_run(desk, run, desk.stop_run, body.reason)

    @api.post("/v1/nodes/{peer}/restore", dependencies=needs)
    async def restore(peer: PeerPath, body: ChangeRequest = NO_REASON) -> NodeView:
        _known_node(desk, peer)
        desk.restore_node(peer, actor=OPERATOR, reason=body.reason)
        return _known_node(desk, peer)

    @api.post("/v1/nodes/{peer}/suspend", dependencies=needs)
    async def suspend(peer: PeerPath, body: SuspendRequest) -> NodeView:
        _known_node(desk, peer)
        desk.suspend_node(peer, actor=OPERATOR, reason=body.reason)
        return _known_node(desk, peer)


def _known_node(desk: Desk, peer: str) -> NodeView:
    found = next((node for node in desk.nodes_view() if node.peer == peer), None)
    if found is None:
        raise HTTPException(HTTPStatus.NOT_FOUND, f"no node {peer} was ever admitted here")
    return found


def _known_run(desk: Desk, run: str) -> RunView:
    try:
        return desk.run_view(run)
    except KeyError as error:
        raise HTTPException(HTTPStatus.NOT_FOUND, f"there is no run {run}") from error


def _change_run(desk: Desk, run: str, change: Callable[..., None], reason: str) -> RunView:
    _known_run(desk, run)
    change(run, actor=OPERATOR, reason=reason)
    return _known_run(desk, run)


def _add_problems(api: FastAPI) -> None:
    @api.exception_handler(StarletteHTTPException)
    async def http_error(_: Request, error: StarletteHTTPException) -> Response:
        return problem(error.status_code, str(error.detail))

    @api.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        hint = ""
        if first["loc"] == ("body",) and "json" not in request.headers.get("content-type", ""):
            hint = "; send it with the header Content-Type: application/json"
        return problem(HTTPStatus.UNPROCESSABLE_ENTITY, f"{where}: {first['msg']}{hint}")

    @api.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> Response:
        return problem(HTTPStatus.CONFLICT, error.detail)

    @api.exception_handler(ConfigurationError)
    async def misconfigured(_: Request, error: ConfigurationError) -> Response:
        return problem(HTTPStatus.CONFLICT, str(error))

    @api.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return problem(HTTPStatus.INTERNAL_SERVER_ERROR, "the coordinator failed to answer; its log says why")


def problem(status: int, detail: str) -> Response:
    """An error body by RFC 9457."""
    body = Problem(title=HTTPStatus(status).phrase, status=status, detail=detail)
    headers = {"WWW-Authenticate": 'Bearer realm="echo2"'} if status == HTTPStatus.UNAUTHORIZED else None
    return JSONResponse(body.model_dump(), status, media_type="application/problem+json", headers=headers)


class Gate:
    """In front of everything, unknown paths too: who may ask, and how much they may send."""

    def __init__(self, app: App, *, token_sha256: bytes, loopback: bool) -> None:
        self._app = app
        self._token_sha256 = token_sha256
        self._loopback = loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # no websocket is offered
            await send({"type": "websocket.close", "code": 1000})
            return
        headers = dict(scope["headers"])
        refusal = self._refusal(scope["method"], headers)
        if refusal is not None:
            await refusal(scope, receive, send)
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
                await too_large()(scope, receive, send)
                return
        replay: list[Event] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def receive_whole() -> Event:
            return replay.pop() if replay else await receive()

        await self._app(scope, receive_whole, send)

    def _refusal(self, method: str, headers: dict[bytes, bytes]) -> Response | None:
        if self._loopback and not _names_loopback(headers.get(b"host", b"")):
            # A web page whose name was pointed at 127.0.0.1 (DNS rebinding) may not read the pool.
            return problem(HTTPStatus.FORBIDDEN, "this coordinator answers only to localhost")
        length = headers.get(b"content-length", b"0")
        if not (length.isascii() and length.isdigit() and len(length) < 20) or int(length) > BODY_BYTES_MAX:
            return too_large()
        if self._loopback and method in {"GET", "HEAD"}:
            return None
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer" or not token:
            return problem(HTTPStatus.UNAUTHORIZED, "this needs the operator's token: Authorization: Bearer TOKEN")
        if not hmac.compare_digest(hashlib.sha256(token.strip()).digest(), self._token_sha256):
            return problem(HTTPStatus.FORBIDDEN, "this is not the operator's token")
        return None


def too_large() -> Response:
    """The answer to a body above the bound."""
    return problem(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a request body is at most {BODY_BYTES_MAX} bytes")


def _names_loopback(host: bytes) -> bool:
    text = host.decode("latin-1").lower()
    name = text[1 : text.find("]")] if text.startswith("[") else text.partition(":")[0]
    return name in LOOPBACK_HOSTS
