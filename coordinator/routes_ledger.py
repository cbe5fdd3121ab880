"""REST: the chain of credits and payments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from fastapi import Query, Request, Response

from .rest_guard import Limit, link_next, make_router
from .views import View

if TYPE_CHECKING:
    from fastapi import APIRouter

    from echo2.p2p.postings import Posting

    from .rest_guard import Rooms

PeerQuery = Annotated[
    str | None,
    Query(min_length=40, max_length=64, pattern=r"^[1-9A-HJ-NP-Za-km-z]+$", description="only this node's"),
]


class PostingView(View):
    """One line of the chain; hashes in hexadecimal, amounts in millionths of the unit."""

    id: int
    run: str
    peer: str
    kind: str
    unit: str
    amount_micros: int
    quantity: int
    actor: str
    reason: str
    wall_micros: int
    previous: str
    hash: str


class BalanceView(View):
    """What a node's postings come to in one unit."""

    peer: str
    unit: str
    amount_micros: int
    postings: int


class ChainView(View):
    """Whether every posting is as it was written; `fault` names the first that is not."""

    intact: bool
    fault: str
    postings: int
    head: str


def ledger_routes(rooms: Rooms) -> APIRouter:
    """Postings, balances, verify."""
    router, books = make_router("ledger"), rooms.books

    @router.get("/v1/ledger/postings")
    async def postings(
        request: Request,
        response: Response,
        limit: Limit = 100,
        after: Annotated[int, Query(ge=0, le=2**53, description="only postings behind this one")] = 0,
        peer: PeerQuery = None,
    ) -> list[PostingView]:
        """The chain in order, or one node's part of it."""
        found = await books.postings(peer=peer, after=after, limit=limit)
        if len(found) == limit:
            link_next(request, response, after=found[-1].id)
        return [_posting(posting) for posting in found]

    @router.get("/v1/ledger/balances")
    async def balances(
        request: Request,
        response: Response,
        limit: Limit = 100,
        after: Annotated[
            str, Query(max_length=64, pattern=r"^[1-9A-HJ-NP-Za-km-z]*$", description="only nodes behind this peer id")
        ] = "",
        peer: PeerQuery = None,
    ) -> list[BalanceView]:
        """What is credited and owed, by node and unit; `limit` counts nodes."""
        found = await books.balances(peer=peer, after=after, limit=limit)
        if peer is None and len({balance.peer for balance in found}) == limit:
            link_next(request, response, after=found[-1].peer)
        return [
            BalanceView(peer=one.peer, unit=one.unit, amount_micros=one.amount_micros, postings=one.postings)
            for one in found
        ]

    @router.get("/v1/ledger/verify")
    async def verify() -> ChainView:
        """Check every posting's hash, and that none is missing."""
        chain = await books.verify()
        return ChainView(intact=not chain.fault, fault=chain.fault, postings=chain.count, head=chain.head.hex())

    return router


def _posting(posting: Posting) -> PostingView:
    values = posting.model_dump()
    return PostingView(**values | {name: values[name].hex() for name in ("previous", "hash")})
