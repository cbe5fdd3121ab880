"""What REST says when it does not do what was asked: `application/problem+json` (RFC 9457), and when to come again.

| raised                       | answered                                                                              |
|------------------------------|---------------------------------------------------------------------------------------|
| HTTPException                | its status                                                                            |
| RequestValidationError       | 422, naming the field                                                                 |
| Refused, in `TRY_AGAIN`      | 503 with Retry-After: the database or the scorer is away, the same request will do    |
| Refused                      | 409: the state of things forbids it                                                   |
| ConfigurationError           | 409: the operator must change something first                                         |
| anything else                | 500, and a line in the log: a defect                                                  |
"""

from __future__ import annotations

import logging
import math
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from fastapi import HTTPException
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException as StarletteHTTPException

from echo2.p2p.daemon import SaidSeldom
from echo2.p2p.errors import ConfigurationError, Refused

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fastapi import FastAPI, Request, Response

log = logging.getLogger(__name__)

TRY_AGAIN = frozenset({"ledger_unavailable", "begun_anew", "scorer_unavailable", "busy"})
"""Codes of refusals that pass by themselves."""

RETRY_SECONDS = 5.0
"""Where a refusal names no time of its own."""


class Problem(BaseModel):
    """RFC 9457."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str


_SCHEMA = {"schema": {"$ref": "#/components/schemas/Problem"}}

PROBLEMS: dict[int | str, dict[str, Any]] = {
    code: {"content": {"application/problem+json": _SCHEMA}, "description": HTTPStatus(code).phrase}
    for code in (400, 401, 403, 404, 409, 413, 422, 429, 503)
}
"""What any route may answer, for the schema. By reference: as a model it would be built anew for each of them."""


SAY_WHO = "this needs a token: Authorization: Bearer TOKEN"

_NO_SUCH_ROUTE = frozenset({404, 405})


def problem(status: int, detail: str, headers: Mapping[str, str] | None = None) -> Response:
    """An error body."""
    body = Problem(title=HTTPStatus(status).phrase, status=status, detail=detail)
    all_headers = dict(headers or {})
    if status == HTTPStatus.UNAUTHORIZED:
        all_headers.setdefault("WWW-Authenticate", 'Bearer realm="echo2"')
    return JSONResponse(body.model_dump(), status, media_type="application/problem+json", headers=all_headers)


def refused(error: Refused) -> Response:
    """A refusal of ours as an answer."""
    if error.code in TRY_AGAIN:
        return try_again(error.detail, error.retry_seconds)
    return problem(HTTPStatus.CONFLICT, error.detail)


def try_again(detail: str, seconds: float | None = None) -> Response:
    """503, and when to come again."""
    return problem(HTTPStatus.SERVICE_UNAVAILABLE, detail, _retry_after(RETRY_SECONDS if seconds is None else seconds))


def too_often(seconds: float) -> Response:
    """429, and when to come again."""
    said = f"too many requests; come again in {math.ceil(seconds)} s"
    return problem(HTTPStatus.TOO_MANY_REQUESTS, said, _retry_after(seconds))


class TooOften(HTTPException):
    """The same from inside a route."""

    def __init__(self, seconds: float) -> None:
        said = f"too many attempts; come again in {math.ceil(seconds)} s"
        super().__init__(HTTPStatus.TOO_MANY_REQUESTS, said, _retry_after(seconds))


def _retry_after(seconds: float) -> dict[str, str]:
    return {"Retry-After": str(max(1, math.ceil(seconds)))}


def add_problem_schema(schema: dict[str, Any]) -> None:
    """What `PROBLEMS` refers to, in an OpenAPI schema."""
    schema["components"]["schemas"]["Problem"] = Problem.model_json_schema()


def add_problems(api: FastAPI) -> None:
    """Have every error answered as the table says."""
    log.filters[:] = [SaidSeldom(tracebacks=True)]

    @api.exception_handler(StarletteHTTPException)
    async def http_error(request: Request, error: StarletteHTTPException) -> Response:
        if error.status_code in _NO_SUCH_ROUTE and request.state.who is None and not request.state.door.open_reads:
            return problem(HTTPStatus.UNAUTHORIZED, SAY_WHO)  # a stranger is not told what there is
        return problem(error.status_code, str(error.detail), error.headers)

    @api.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        hint = ""
        if first["loc"] == ("body",) and "json" not in request.headers.get("content-type", ""):
            hint = "; send it with the header Content-Type: application/json"
        return problem(HTTPStatus.UNPROCESSABLE_ENTITY, f"{where}: {first['msg']}{hint}")

    @api.exception_handler(Refused)
    async def refusal(_: Request, error: Refused) -> Response:
        return refused(error)

    @api.exception_handler(ConfigurationError)
    async def misconfigured(_: Request, error: ConfigurationError) -> Response:
        return problem(HTTPStatus.CONFLICT, str(error))

    @api.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return problem(HTTPStatus.INTERNAL_SERVER_ERROR, "the coordinator failed to answer; its log says why")
