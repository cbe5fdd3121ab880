"""REST: the broadcast of the newest snapshot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from fastapi import Query

from .broadcast_view import NODES_SHOWN, NODES_SHOWN_MAX, BroadcastView
from .rest_guard import make_router

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
    ) -> BroadcastView:
        """Who has which chunk of it."""
        return rooms.desk.broadcast_view(limit)

    return router
