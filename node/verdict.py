"""What the coordinator thinks of this node, in words for its owner. Pure."""

from __future__ import annotations

from echo2.p2p.words import time_left


def standing_words(
    node_state: str, reason: str, expires_seconds: float | None, *, returned: int = 0, leases: int = 0
) -> str:
    """One line: "has suspended this node for 50 min more: too slow"."""
    why = f": {reason}" if reason else ""
    left = "" if expires_seconds is None else f" for {time_left(expires_seconds)} more"
    match node_state:
        case "applied":
            return "the operator of this pool has yet to admit this node; it waits, nothing need be done here"
        case "probation":
            return f"in probation: {returned} of its first {leases} leases have come back" if leases else "in probation"
        case "standby":
            return "standing by: the pool makes enough without this node, and calls it when it does not"
        case "draining":
            return f"drained by the operator: it finishes what it has, and gets no more{why}"
        case "suspended" | "banned":
            return f"has {node_state} this node{left}{why}"
        case _:
            return ""
