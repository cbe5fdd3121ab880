"""What an operator can do to a node: one table, of which REST makes routes and the command line commands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class NodeChange:
    """One thing to do: the service's method, and what it does in words. `expires`: it may be for a time."""

    method: str
    summary: str
    expires: bool = False


CHANGES: Mapping[str, NodeChange] = {
    "admit": NodeChange("admit_node", "A node that has applied takes part."),
    "drain": NodeChange("drain_node", "No new leases; what it holds it finishes. Until it is restored."),
    "suspend": NodeChange(
        "suspend_node", "No more leases; what it delivered and is not trained on is withdrawn.", expires=True
    ),
    "ban": NodeChange(
        "ban_node", "As suspended, and nothing is served to it: it is told why, then refused.", expires=True
    ),
    "unban": NodeChange("unban_node", "A banned node's probation begins anew."),
    "restore": NodeChange("restore_node", "A suspended or drained node takes part again."),
}
"""By the last part of the path, and the name of the command."""
