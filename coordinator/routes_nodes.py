"""REST: the nodes, and what an operator does to one (`node_changes`)."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import HTTPException, Query, Request, Response
from pydantic import Field

from .node_changes import CHANGES, NodeChange
from .rest_guard import Asker, Limit, PeerPath, Why, link_next, make_router
from .views import Health, NodeView, TransitionView

if TYPE_CHECKING:
    from fastapi import APIRouter

    from .rest_guard import Rooms

EXPIRES_SECONDS_MAX = 366 * 86_400.0

NodeState = NodeView.model_fields["state"].annotation
"""The states as the view has them."""


class WhyFor(Why):
    """Why, and for how long; without a time until it is taken back."""

    expires_seconds: Annotated[float, Field(gt=0, le=EXPIRES_SECONDS_MAX)] | None = None


def node_routes(rooms: Rooms) -> APIRouter:
    """List, get, change."""
    router, desk = make_router("nodes"), rooms.desk

    @router.get("/v1/nodes")
    async def nodes(
        request: Request,
        response: Response,
        limit: Limit = 100,
        after: Annotated[int, Query(ge=0, le=2**53, description="only nodes behind this place")] = 0,
        state: Annotated[NodeState | None, Query(description="only those in this state")] = None,  # type: ignore[valid-type]
        health: Annotated[Health | None, Query(description="only those of this health")] = None,
    ) -> list[NodeView]:
        """Every node ever admitted, in the order of admission: pages stay as they are while nodes are added."""
        page: list[NodeView] = []
        last = after
        for place, node in enumerate(desk.nodes_view()[after:], after):
            if (state is None or node.state == state) and (health is None or node.health == health):
                if len(page) == limit:
                    link_next(request, response, after=last + 1)
                    break
                page.append(node)
                last = place
        return page

    @router.get("/v1/nodes/{peer}")
    async def node(peer: PeerPath) -> NodeView:
        """One node: the coordinator's verdict, and why."""
        return _known(rooms, peer)

    @router.get("/v1/nodes/{peer}/transitions")
    async def transitions(peer: PeerPath) -> list[TransitionView]:
        """How it came to its state, the newest first: who changed it, why, when, and until when."""
        _known(rooms, peer)
        return desk.transitions_view(peer)

    for verb, change in CHANGES.items():
        _add_change(router, rooms, verb, change)
    return router


def _add_change(router: APIRouter, rooms: Rooms, verb: str, change: NodeChange) -> None:
    act = getattr(rooms.desk, change.method)

    def carry_out(peer: str, who: Asker, reason: str, **options: Any) -> NodeView:
        _known(rooms, peer)
        act(peer, actor=who.name, reason=reason, **options)
        return _known(rooms, peer)

    async def plain(peer: PeerPath, body: Why, who: Asker) -> NodeView:
        return carry_out(peer, who, body.reason)

    async def for_a_time(peer: PeerPath, body: WhyFor, who: Asker) -> NodeView:
        return carry_out(peer, who, body.reason, expires_seconds=body.expires_seconds)

    router.add_api_route(
        f"/v1/nodes/{{peer}}/{verb}",
        for_a_time if change.expires else plain,
        methods=["POST"],
        name=f"{verb}_node",
        description=f"{change.summary} The reason is kept, and its owner sees it.",
    )


def _known(rooms: Rooms, peer: str) -> NodeView:
    try:
        return rooms.desk.node_view(peer)
    except KeyError as error:
        raise HTTPException(HTTPStatus.NOT_FOUND, f"no node {peer} was ever admitted here") from error
