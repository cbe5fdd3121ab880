"""REST: the audit log, page by page, and as it grows (server-sent events)."""

from __future__ import annotations

import re
from contextlib import aclosing
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Header, HTTPException, Query, Request, Response
from fastapi.responses import StreamingResponse

from echo2.p2p.errors import Refused

from .rest_guard import Limit, link_next, make_router
from .views import EventView

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from fastapi import APIRouter

    from .event_feed import EventFeed, Watcher
    from .rest_gate import Who
    from .rest_guard import Rooms

EVENT_ID_MAX = 2**53

RETRY_MILLISECONDS = 2000
"""Before a browser comes again."""

EVENT_STREAM = "text/event-stream"


def event_routes(rooms: Rooms) -> APIRouter:
    """The list and the stream."""
    router, desk, feed = make_router("events"), rooms.desk, rooms.feed

    @router.get("/v1/events")
    async def events(
        request: Request,
        response: Response,
        limit: Limit = 100,
        before: Annotated[int | None, Query(ge=1, le=EVENT_ID_MAX, description="only events with a lower id")] = None,
    ) -> list[EventView]:
        """The audit log, the newest first."""
        found = desk.events_view(limit=limit, before=before)
        if len(found) == limit and found[-1].id > 1:
            link_next(request, response, before=found[-1].id)
        return found

    @router.get(
        "/v1/events/stream",
        response_class=StreamingResponse,
        responses={
            200: {"content": {EVENT_STREAM: {"schema": {"type": "string"}}}, "description": "events as they come"}
        },
    )
    async def stream(
        request: Request,
        after: Annotated[int | None, Query(ge=0, le=EVENT_ID_MAX, description="begin behind this event")] = None,
        last_event_id: Annotated[str | None, Header(description="where a stream broke off; before `after`")] = None,
    ) -> StreamingResponse:
        """The audit log as it grows. It ends after a while; browsers go on by themselves, others with Last-Event-ID."""
        begin = after if last_event_id is None else _id_of(last_event_id)
        begin = desk.newest_event() if begin is None else begin
        return EventStream(feed, begin, request.state.client, request.state.who, partial(_may_still, rooms))

    return router


def _may_still(rooms: Rooms, who: Who | None) -> bool:
    """Whether it would be let in again. While the ledger is away, nobody's right is taken."""
    if who is None:
        return True  # where reading is open
    try:
        found = rooms.access.find(who.access)
    except Refused:
        return True
    return not isinstance(found, str) and (not who.cookie or rooms.sessions.is_open(who.cookie))


class EventStream(StreamingResponse):
    """Pages of events as they come. It has a place among the watchers exactly as long as it is being answered."""

    def __init__(
        self, feed: EventFeed, begin: int, client: str, who: Who | None, may_still: Callable[[Who | None], bool]
    ) -> None:
        super().__init__(self._lines(), media_type=EVENT_STREAM, headers={"X-Accel-Buffering": "no"})
        self._feed = feed
        self._begin = begin
        self._client = client
        self._who = who
        self._may_still = may_still
        self._watcher: Watcher | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer. Raises Refused, before anything was sent, when there is no place."""
        with self._feed.watching(self._client, "" if self._who is None else f"token {self._who.name}") as self._watcher:
            await super().__call__(scope, receive, send)

    def _goes_on(self) -> bool:
        return not (self._watcher and self._watcher.over) and self._may_still(self._who)

    async def _lines(self) -> AsyncIterator[bytes]:
        yield b"retry: %d\n\n" % RETRY_MILLISECONDS
        async with aclosing(self._feed.events(self._begin, self._goes_on)) as pages:
            async for page in pages:
                yield b"".join(map(_event, page)) or b":\n\n"


def _event(event: EventView) -> bytes:
    return f"id: {event.id}\nevent: audit\ndata: {event.model_dump_json()}\n\n".encode()


def _id_of(said: str) -> int:
    if not re.fullmatch(r"[0-9]{1,15}", said):
        raise HTTPException(HTTPStatus.UNPROCESSABLE_ENTITY, "header.last-event-id: must be an event's id")
    return int(said)
