"""REST, put together: the routes behind the gate.

| module                                                          | has                                           |
|-----------------------------------------------------------------|-----------------------------------------------|
| `rest_roles`                                                    | who may do what: one table                    |
| `rest_gate`                                                     | who asks, how often, how much                 |
| `rest_guard`                                                    | what every route is made with                 |
| `rest_problems`                                                 | errors, `application/problem+json`            |
| `routes_pool` `_nodes` `_runs` `_tokens` `_ledger` `_events` `_session` | the routes                            |
| `appeals_api` `broadcast_routes` `web_pages`                    | more of them, and the web page               |

Nothing is fetched from elsewhere, so there are no documentation pages (they would load scripts from a CDN); the schema
itself is at /openapi.json.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import FastAPI

from .appeals_api import appeals_routes
from .broadcast_routes import broadcast_routes
from .rest_gate import App, Door, Gate
from .rest_guard import GuardedRoute, add_security
from .rest_problems import add_problem_schema, add_problems
from .routes_events import event_routes
from .routes_ledger import ledger_routes
from .routes_nodes import node_routes
from .routes_pool import pool_routes
from .routes_runs import run_routes
from .routes_session import session_routes
from .routes_tokens import access_routes, token_routes
from .web_pages import WebPages

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastapi import APIRouter

    from .rest_guard import Rooms

ROUTERS: tuple[Callable[[Rooms], APIRouter], ...] = (
    pool_routes,
    node_routes,
    run_routes,
    token_routes,
    access_routes,
    ledger_routes,
    event_routes,
    session_routes,
    appeals_routes,
    broadcast_routes,
)
"""Each makes the routes of one noun; every route of theirs has a line in `rest_roles.NEEDS`."""


class Api(FastAPI):
    """The application, whose schema says what each route needs."""

    open_reads = True

    def openapi(self) -> dict[str, Any]:
        """The schema, made once."""
        if not self.openapi_schema:
            schema = super().openapi()
            add_problem_schema(schema)
            add_security(schema, open_reads=self.open_reads)
        return self.openapi_schema or {}


def make_api(rooms: Rooms, *, door: Door, version: str, public_page: bool = False) -> App:
    """The ASGI application. `public_page`: whether a run has a page for everybody."""
    api = Api(title="ECHO-2 coordinator", version=version, docs_url=None, redoc_url=None, openapi_url=None)
    api.open_reads = door.open_reads
    api.router.redirect_slashes = False
    for make in ROUTERS:
        router = make(rooms)
        assert all(isinstance(route, GuardedRoute) for route in router.routes), "made by rest_guard.make_router"
        api.include_router(router)
    add_problems(api)
    gate = Gate(api, door=door, access=rooms.access, sessions=rooms.sessions, limits=rooms.limits, clock=rooms.clock)
    return WebPages(gate, rooms.desk, door=door, public=public_page, clock=rooms.clock)
