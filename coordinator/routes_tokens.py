"""REST: tokens that let nodes in, and tokens of people and their programs."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Literal

from fastapi import HTTPException, Path
from pydantic import Field

from echo2.p2p.join import ANY_RUN

from .access import EXPIRES_HOURS_MAX, NAME_CHARACTERS_MAX, NAME_PATTERN, OPERATOR
from .config import TOKEN_HOURS_MAX, TOKEN_USES_MAX
from .rest_guard import Asker, Body, Reason, RunName, Why, make_router
from .rest_roles import Role
from .tokens import HASH_SHOWN
from .views import View

if TYPE_CHECKING:
    from fastapi import APIRouter

    from .access import AccessRow
    from .rest_guard import Rooms
    from .tokens import TokenRow

SECONDS_IN_HOUR = 3600

TokenPath = Annotated[str, Path(min_length=HASH_SHOWN, max_length=HASH_SHOWN, pattern=r"^[0-9a-f]+$")]
NamePath = Annotated[str, Path(min_length=1, max_length=NAME_CHARACTERS_MAX, pattern=NAME_PATTERN)]
Name = Annotated[str, Field(min_length=1, max_length=NAME_CHARACTERS_MAX, pattern=NAME_PATTERN)]


class TokenRequest(Body):
    """How many nodes a token lets in, and for how long."""

    uses: Annotated[int, Field(ge=1, le=TOKEN_USES_MAX)] = 1
    expires_hours: Annotated[float, Field(gt=0, le=TOKEN_HOURS_MAX)] | None = 72.0
    run: RunName | Literal["*"] | None = None
    """The only run that it lets nodes into. `*`: the coordinator says which, and may move them; so does None where
    there are several runs."""
    reason: Reason = "made over REST"


ONE_TOKEN = TokenRequest()
"""What a request without a body means."""


class TokenCreated(View):
    """The only time the token is shown: the ledger keeps its hash."""

    token: str
    join: str
    uses: int
    expires_hours: float | None


class TokenView(View):
    """A token that lets nodes in, by the start of its hash."""

    id: str
    uses: int
    used: int
    created_seconds: float
    expires_seconds: float | None
    """Unix seconds; None = never."""
    run: str | None = None
    """The only run that it lets nodes into; None: any."""


class AccessRequest(Body):
    """Whose token it is, what it may, and for how long; without a time until it is revoked."""

    name: Name
    role: Role
    expires_hours: Annotated[float, Field(gt=0, le=EXPIRES_HOURS_MAX)] | None = None
    reason: Reason = "made over REST"


class AccessCreated(View):
    """The only time the token is shown: the ledger keeps its hash."""

    token: str
    name: str
    role: Role
    expires_hours: float | None


class AccessView(View):
    """A token of a person or program. Unix seconds."""

    name: str
    role: Role
    created_seconds: float
    expires_seconds: float | None
    revoked_seconds: float | None


def token_routes(rooms: Rooms) -> APIRouter:
    """Tokens that let nodes in: list, create, revoke."""
    router, desk = make_router("tokens"), rooms.desk

    @router.get("/v1/tokens")
    async def tokens() -> list[TokenView]:
        """Every token made, the oldest first."""
        return [_token(row) for row in desk.tokens_view()]

    @router.post("/v1/tokens", status_code=HTTPStatus.CREATED)
    async def create_token(who: Asker, body: TokenRequest = ONE_TOKEN) -> TokenCreated:
        """A join string: the one thing a volunteer needs."""
        rooms.join("")  # that no join string can be told is said before a token is made that nobody could use
        seconds = None if body.expires_hours is None else body.expires_hours * SECONDS_IN_HOUR
        only = None if body.run == ANY_RUN else body.run
        made = {"actor": who.name, "reason": body.reason}
        try:
            token = desk.create_token(uses=body.uses, expires_seconds=seconds, run=only, **made)
        except KeyError as error:
            raise HTTPException(HTTPStatus.NOT_FOUND, f"there is no run {body.run}") from error
        join = rooms.join(token) if body.run is None else rooms.join(token, body.run)
        return TokenCreated(token=token, join=join, uses=body.uses, expires_hours=body.expires_hours)

    @router.post("/v1/tokens/{token}/revoke")
    async def revoke_token(token: TokenPath, body: Why, who: Asker) -> TokenView:
        """It lets nobody in any more; who is in stays."""
        try:
            return _token(desk.revoke_token(token, actor=who.name, reason=body.reason))
        except KeyError as error:
            raise HTTPException(HTTPStatus.NOT_FOUND, f"there is no token {token}") from error

    return router


def access_routes(rooms: Rooms) -> APIRouter:
    """Tokens of people: list, create, revoke."""
    router, access = make_router("access"), rooms.access

    @router.get("/v1/access")
    async def rows() -> list[AccessView]:
        """Every token made, the oldest first; the operator's own, which is in a file, is not among them."""
        return [_access(row) for row in access.rows()]

    @router.post("/v1/access", status_code=HTTPStatus.CREATED)
    async def create_access(body: AccessRequest, who: Asker) -> AccessCreated:
        """A token for a person or a program; the audit log calls it by its name."""
        seconds = None if body.expires_hours is None else body.expires_hours * SECONDS_IN_HOUR
        token = access.create(body.name, body.role, expires_seconds=seconds, actor=who.name, reason=body.reason)
        return AccessCreated(token=token, name=body.name, role=body.role, expires_hours=body.expires_hours)

    @router.post("/v1/access/{name}/revoke")
    async def revoke_access(name: NamePath, body: Why, who: Asker) -> AccessView:
        """It counts for nothing from now on, and so do the sessions that it opened."""
        if name == OPERATOR:
            said = "the operator's own token is in a file: echo2-coordinator token operator makes another"
            raise HTTPException(HTTPStatus.CONFLICT, said)
        try:
            return _access(access.revoke(name, actor=who.name, reason=body.reason))
        except KeyError as error:
            raise HTTPException(HTTPStatus.NOT_FOUND, f"{name} has no token that counts") from error

    return router


def _token(row: TokenRow) -> TokenView:
    return TokenView(
        id=row.hash_start, uses=row.uses, used=row.used, created_seconds=row.created, expires_seconds=row.expires,
        run=row.run,
    )  # fmt: skip


def _access(row: AccessRow) -> AccessView:
    return AccessView(
        name=row.name,
        role=row.role,
        created_seconds=row.created,
        expires_seconds=row.expires,
        revoked_seconds=row.revoked,
    )
