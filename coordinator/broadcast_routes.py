"""REST: the broadcast of the newest snapshot."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated

from fastapi import HTTPException, Query

from .broadcast_view import NODES_SHOWN, NODES_SHOWN_MAX, BroadcastView
from .rest_guard import RunName, make_router

if TYPE_CHECKING:
    from fastapi import APIRouter

    from .rest_guard import Rooms


def broadcast_routes(rooms: Rooms) -> APIRouter:
    """Get."""
    router = make_router("broadcast")

    @router.get("/v1/broadcast")
    async def broadcast(
        limit: Annotated[int, Query(ge=1, le=NODES_SHOWN_MAX, description="nodes, those that lack it first")] = (
            NODES_SHOWN
        ),
        run: Annotated[RunName | None, Query(description="of which run; left out: of the first")] = None,
    ) -> BroadcastView:
        """Who has which chunk of it."""
        try:
            return rooms.desk.broadcast_view(limit, run)
        except KeyError as error:
            raise HTTPException(HTTPStatus.NOT_FOUND, f"there is no run {run}") from error

    return router
