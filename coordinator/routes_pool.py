"""REST: the process and the pool as a whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from .metrics import CONTENT_TYPE, exposition, make_registry
from .rest_guard import make_router
from .views import PoolView

if TYPE_CHECKING:
    from fastapi import APIRouter

    from .rest_guard import Rooms


class Healthz(BaseModel):
    """The process answers; `trouble` says why it refuses requests, if it does."""

    status: str
    trouble: str


def pool_routes(rooms: Rooms) -> APIRouter:
    """Health, metrics, the schema, the pool, decisions."""
    router, desk = make_router("pool"), rooms.desk
    registry = make_registry(desk)

    @router.get("/healthz")
    async def healthz() -> Healthz:
        """Whether it works, and why not."""
        trouble = desk.pool_view().trouble
        return Healthz(status="trouble" if trouble else "ok", trouble=trouble)

    @router.get("/metrics", response_class=Response, responses={200: {"content": {CONTENT_TYPE: {}}}})
    async def metrics() -> Response:
        """The pool, in Prometheus' text format."""
        return Response(exposition(registry), media_type=CONTENT_TYPE)

    @router.get("/openapi.json", include_in_schema=False)
    async def openapi(request: Request) -> Response:
        return JSONResponse(request.app.openapi())

    @router.get("/v1/pool")
    async def pool() -> PoolView:
        """The pool as a whole."""
        return desk.pool_view()

    @router.get("/v1/decisions")
    async def decisions() -> list[dict[str, Any]]:
        """Which paid nodes were activated and released, and by which numbers; the newest first."""
        return desk.decisions_view()

    return router
