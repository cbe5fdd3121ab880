"""REST for appeals: what is open, and the operator's answers."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Literal, Protocol

from fastapi import FastAPI, HTTPException, Path
from pydantic import BaseModel, ConfigDict, Field

from echo2.p2p.postings import AMOUNT_MICROS_MAX

from .views import AppealView

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastapi.params import Depends

    from echo2.p2p.postings import Unit

OPERATOR = "operator"
"""Who the audit log names."""

AppealPath = Annotated[int, Path(ge=1, le=2**31 - 1)]


class AppealsDesk(Protocol):
    """The part of the service that this needs."""

    def appeals_view(self) -> list[AppealView]:
        """Open appeals first, then those that were answered."""

    def resolve_appeal(
        self, id_: int, upheld: bool, *, actor: str, reason: str, amount_micros: int = 0, unit: Unit = "usd"
    ) -> AppealView:
        """Answer one, for good. Raises KeyError or Refused."""


class Resolution(BaseModel):
    """The operator's answer. `amount_micros`: an adjustment in millionths of `unit`, when the appeal is upheld."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    upheld: bool
    reason: Annotated[str, Field(min_length=1, max_length=512, description="shown to the node's owner")]
    amount_micros: Annotated[int, Field(ge=-AMOUNT_MICROS_MAX, le=AMOUNT_MICROS_MAX)] = 0
    unit: Literal["credit", "usd"] = "usd"


def add_appeals(api: FastAPI, desk: AppealsDesk, needs: Sequence[Depends]) -> None:
    """`GET /v1/appeals` and `POST /v1/appeals/{id}/resolve`. `needs`: what a change needs."""

    @api.get("/v1/appeals")
    async def appeals() -> list[AppealView]:
        return desk.appeals_view()

    @api.post("/v1/appeals/{id}/resolve", dependencies=needs)
    async def resolve(id: AppealPath, body: Resolution) -> AppealView:  # noqa: A002 - the path's word
        try:
            return desk.resolve_appeal(
                id, body.upheld, actor=OPERATOR, reason=body.reason, amount_micros=body.amount_micros, unit=body.unit
            )
        except KeyError as error:
            raise HTTPException(HTTPStatus.NOT_FOUND, f"there is no appeal {id}") from error
