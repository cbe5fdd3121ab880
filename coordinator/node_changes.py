"""What an operator can do to a node: one table, of which REST makes routes and the command line commands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .node_states import STATES, legal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .node_states import NodeEvent, NodeState


@dataclass(frozen=True, slots=True)
class NodeChange:
    """One thing to do: the service's method, the event of `node_states`, and what it does in words.

    `expires`: it may be for a time.
    """

    method: str
    event: NodeEvent
    summary: str
    expires: bool = False

    @property
    def states(self) -> tuple[NodeState, ...]:
        """Those in which a node can be changed so."""
        return tuple(state for state in STATES if legal(state, self.event))


CHANGES: Mapping[str, NodeChange] = {
    "admit": NodeChange("admit_node", "admitted", "A node that has applied takes part."),
    "drain": NodeChange("drain_node", "drained", "No new leases; what it holds it finishes. Until it is restored."),
    "suspend": NodeChange(
        "suspend_node",
        "suspended",
        "No more leases; what it delivered and is not trained on is withdrawn.",
        expires=True,
    ),
    "ban": NodeChange(
        "ban_node", "banned", "As suspended, and nothing is served to it: it is told why, then refused.", expires=True
    ),
    "unban": NodeChange("unban_node", "unbanned", "A banned node's probation begins anew."),
    "restore": NodeChange("restore_node", "restored", "A suspended or drained node takes part again."),
}
"""By the last part of the path, and the name of the command."""
