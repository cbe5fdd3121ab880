"""What a person may see of a transport: its rates, its connections, whom it cannot reach and why, whom it refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from .dialer import DialReport
    from .libp2p_yamux import Yamux
    from .peer_memory import PeerMemory


class _View(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ConnectionView(_View):
    """One connection."""

    peer: str
    via: str
    """direct, punched or relay."""
    traffic: str
    """control, bulk, or empty while nothing was asked on it."""
    streams: int
    round_trip_seconds: float | None
    """Of the last pings; None: none came back yet."""


class UnreachableView(_View):
    """A peer that could not be dialled the last time."""

    peer: str
    tried: str
    """Each address and way, and why it failed."""
    retry_seconds: float
    """Until it is dialled again."""


class BanView(_View):
    """A peer that is refused."""

    peer: str
    reason: str
    seconds: float
    """How much longer."""


class TransportView(_View):
    """A transport now. Lists are cut at `ROWS_MAX`."""

    upload_bits_per_second_max: float | None
    download_bits_per_second_max: float | None
    sent_bytes: int
    received_bytes: int
    sent_bits_per_second: float
    received_bits_per_second: float
    """Over the last ten seconds."""
    inbound_connections: int
    unread_bytes: int
    connections: tuple[ConnectionView, ...]
    unreachable: tuple[UnreachableView, ...]
    bans: tuple[BanView, ...]


ROWS_MAX = 64
"""Rows of each list: what a person reads, and a status file carries each second."""


def connection_views(connections: Iterable[Yamux]) -> tuple[ConnectionView, ...]:
    """One for each connection."""
    return tuple(
        ConnectionView(
            peer=one.peer,
            via=one.via,
            traffic=one.traffic or "",
            streams=one.stream_count,
            round_trip_seconds=one.round_trip_seconds or None,
        )
        for one in list(connections)[:ROWS_MAX]
    )


def unreachable_views(memory: PeerMemory, reports: Mapping[str, DialReport]) -> tuple[UnreachableView, ...]:
    """The peers whose last dial failed, and what it tried."""
    return tuple(
        UnreachableView(
            peer=each.peer,
            tried=str(reports.get(each.peer) or "before the last restart"),
            retry_seconds=max(0.0, each.retry_at - memory.wall()),
        )
        for each in memory.failing()[-ROWS_MAX:]
    )


def ban_views(memory: PeerMemory) -> tuple[BanView, ...]:
    """The bans in force."""
    return tuple(
        BanView(peer=ban.peer, reason=ban.reason, seconds=ban.until - memory.wall())
        for ban in memory.bans()[-ROWS_MAX:]
    )
