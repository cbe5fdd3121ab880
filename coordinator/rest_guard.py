"""What every module of routes is made with: the rooms it may use, and routes that ask who may before all else."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any, cast

from fastapi import APIRouter, Depends, HTTPException, Path, Query, Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field

from echo2.tasks.catalog import suggestion

from .rest_gate import Door, Who
from .rest_problems import PROBLEMS, SAY_WHO
from .rest_roles import ANYONE, NEEDS, READER, refusal

if TYPE_CHECKING:
    from .access import AccessBook
    from .books import Books
    from .event_feed import EventFeed
    from .rest_desk import Desk
    from .rest_limits import Limits
    from .rest_sessions import Sessions
    from .run_judge import Judge

Reason = Annotated[str, Field(min_length=1, max_length=512, description="kept in the audit log")]
PeerPath = Annotated[str, Path(min_length=40, max_length=64, pattern=r"^[1-9A-HJ-NP-Za-km-z]+$")]
RUN_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
RunPath = Annotated[str, Path(min_length=1, max_length=64, pattern=RUN_PATTERN)]
RunName = Annotated[str, Field(min_length=1, max_length=64, pattern=RUN_PATTERN)]
Limit = Annotated[int, Query(ge=1, le=1000, description="so many at most; the header Link names the next page")]


PARAMETER_SHOWN = 64
"""Of a parameter's name that was not meant for us."""


class Body(BaseModel):
    """A request body: no unknown keys, no coercion."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Why(Body):
    """Why something is done."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class Rooms:
    """What the routes work with."""

    desk: Desk
    access: AccessBook
    sessions: Sessions
    books: Books
    feed: EventFeed
    judge: Judge
    limits: Limits
    join: Callable[..., str]
    """A join string of a token, and of a run or `*`, where that is not what it would be by itself. Raises
    ConfigurationError while no address is known."""
    clock: Callable[[], float]


class GuardedRoute(APIRoute):
    """A route of the table in `rest_roles`: whoever may not is told so before the request is looked at any further.

    A parameter that the route has not is refused: a filter with a typing error would else answer with everything. But
    `limit` may be said of any list, of those too that are never long.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler with the guard before it. Raises KeyError for a route that is not in the table."""
        handle = super().get_route_handler()
        method = next(iter(self.methods or ()))
        needs = NEEDS[method, self.path_format]
        parameters = {field.alias for field in self.dependant.query_params} | {"limit"}

        async def guarded(request: Request) -> Response:
            who, door = request.state.who, cast("Door", request.state.door)
            status = refusal(needs, who and who.role, open_reads=door.open_reads)
            if status == HTTPStatus.UNAUTHORIZED:
                raise HTTPException(status, SAY_WHO)
            if status is not None:
                raise HTTPException(status, f"this needs the role {needs}; {who.name} is {who.role}")
            for name in request.query_params:
                if name not in parameters:
                    what = f"there is no parameter {name[:PARAMETER_SHOWN]!r} here{suggestion(name, parameters)}"
                    raise HTTPException(HTTPStatus.UNPROCESSABLE_ENTITY, what)
            return await handle(request)

        return guarded


def make_router(tag: str) -> APIRouter:
    """An empty router of guarded routes."""
    return APIRouter(route_class=GuardedRoute, responses=PROBLEMS, tags=[tag])


def _who(request: Request) -> Who:
    return cast("Who", request.state.who)


Asker = Annotated[Who, Depends(_who)]
"""Who asks, in routes that need a role."""


def link_next(request: Request, response: Response, **changed: object) -> None:
    """Name the next page in the header Link (RFC 8288): this request with these parameters changed."""
    url = request.url.include_query_params(**changed)
    response.headers["Link"] = f'<{url.path}?{url.query}>; rel="next"'


def add_security(schema: dict[str, Any], *, open_reads: bool) -> None:
    """Say in an OpenAPI schema what each route needs."""
    schemes = schema.setdefault("components", {}).setdefault("securitySchemes", {})
    schemes["token"] = {"type": "http", "scheme": "bearer", "description": "an access token"}
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            needs = NEEDS[method.upper(), path]
            if needs == ANYONE or (needs == READER and open_reads):
                continue
            operation["security"] = [{"token": []}]
            operation["description"] = f"{operation.get('description', '')}\n\nRole: {needs}.".strip()
