"""What a person may see of being behind a NAT. Apart from the code that finds it out: a status file needs no libp2p."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .relay_wire import Limit

PunchResult = Literal["direct", "failed", "not_tried"]


@dataclass(frozen=True, slots=True)
class ReachabilityView:
    """Whether others can dial us. `reachable` is None until the coordinator could be asked."""

    reachable: bool | None = None
    observed: str | None = None
    """Where the coordinator sees us."""
    mapped: str | None = None
    """Where it sees our listening port; None when the port could not be dialled from."""
    proved: tuple[str, ...] = ()
    unproved: tuple[str, ...] = ()
    """Addresses that we were told to announce, or listen on, and do not announce."""
    reason: str = "not asked yet"


@dataclass(frozen=True, slots=True)
class PlaceView:
    """One relay of ours: whether we have a place there, and if not why."""

    relay: str
    held: bool
    reason: str
    limit: Limit | None = None


@dataclass(frozen=True, slots=True)
class PunchOutcome:
    """What came of hole punching with one peer."""

    peer: str
    result: PunchResult
    tries: int
    reason: str
    """Why there is no direct connection, or how there came to be one."""
    ours: tuple[str, ...] = ()
    """Addresses at which we asked to be dialled."""
    theirs: tuple[str, ...] = ()
    """Addresses that we dialled."""


@dataclass(frozen=True, slots=True)
class NatView:
    """A node's status: can it be dialled, where is it met otherwise, and what came of hole punching with whom."""

    reachability: ReachabilityView
    places: tuple[PlaceView, ...]
    hole_punching: tuple[PunchOutcome, ...]
