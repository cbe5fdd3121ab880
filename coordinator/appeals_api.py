"""REST for appeals: what is open, and the operator's answers."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Literal, Protocol

from fastapi import HTTPException, Path
from pydantic import Field

from echo2.p2p.postings import AMOUNT_MICROS_MAX

from .rest_guard import Asker, Body, make_router
from .views import AppealView

if TYPE_CHECKING:
    from fastapi import APIRouter

    from echo2.p2p.postings import Unit

    from .rest_guard import Rooms

AppealPath = Annotated[int, Path(ge=1, le=2**31 - 1)]


class AppealsDesk(Protocol):
    """The part of the service that this needs."""

    def appeals_view(self) -> list[AppealView]:
        """Open appeals first, then those that were answered."""

    def resolve_appeal(
        self, id_: int, upheld: bool, *, actor: str, reason: str, amount_micros: int = 0, unit: Unit = "usd"
    ) -> AppealView:
        """Answer one, for good. Raises KeyError or Refused."""


class Resolution(Body):
    """The operator's answer. `amount_micros`: an adjustment in millionths of `unit`, when the appeal is upheld."""

    upheld: bool
    reason: Annotated[str, Field(min_length=1, max_length=512, description="shown to the node's owner")]
    amount_micros: Annotated[int, Field(ge=-AMOUNT_MICROS_MAX, le=AMOUNT_MICROS_MAX)] = 0
    unit: Literal["credit", "usd"] = "usd"


def appeals_routes(rooms: Rooms) -> APIRouter:
    """List, answer."""
    router, desk = make_router("appeals"), rooms.desk

    @router.get("/v1/appeals")
    async def appeals() -> list[AppealView]:
        """Open ones first, then those that were answered."""
        return desk.appeals_view()

    @router.post("/v1/appeals/{id}/resolve")
    async def resolve(id: AppealPath, body: Resolution, who: Asker) -> AppealView:  # noqa: A002 - the path's word
        """Answer one, for good; the node's owner sees the reason."""
        try:
            return desk.resolve_appeal(
                id, body.upheld, actor=who.name, reason=body.reason, amount_micros=body.amount_micros, unit=body.unit
            )
        except KeyError as error:
            raise HTTPException(HTTPStatus.NOT_FOUND, f"there is no appeal {id}") from error

    return router
