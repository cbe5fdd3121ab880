"""REST: the broadcast of the newest snapshot."""

from __future__ import annotations

from typing import Annotated, Protocol

from fastapi import APIRouter, Query

from .broadcast_view import NODES_SHOWN, NODES_SHOWN_MAX, BroadcastView


class BroadcastDesk(Protocol):
    """The coordinator's service, as far as these requests need it."""

    def broadcast_view(self, limit: int) -> BroadcastView:
        """Where each node is with the newest snapshot."""


def broadcast_routes(desk: BroadcastDesk) -> APIRouter:
    """`GET /v1/broadcast`."""
    router = APIRouter()

    @router.get("/v1/broadcast")
    async def broadcast(
        limit: Annotated[int, Query(ge=1, le=NODES_SHOWN_MAX, description="nodes, those that lack it first")] = (
            NODES_SHOWN
        ),
    ) -> BroadcastView:
        return desk.broadcast_view(limit)

    return router
