"""The coordinator's service, as far as REST needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from .appeals_api import AppealsDesk
from .metrics import Views

if TYPE_CHECKING:
    from .broadcast_view import BroadcastView
    from .config import RunConfig
    from .tokens import TokenRow
    from .views import EventView, NodeView, RunView, StepView, TransitionView


class Desk(Views, AppealsDesk, Protocol):
    """Unknown names raise KeyError, impossible changes Refused, and so does a ledger that is away."""

    def nodes_of(self, run: str) -> list[NodeView]:
        """Those that work for a run or have done so, with what they did for it."""

    def node_view(self, peer: str) -> NodeView:
        """One node."""

    def run_view(self, run: str) -> RunView:
        """One run."""

    def steps_view(self, run: str, *, after: int, limit: int) -> list[StepView]:
        """What was reported of the steps behind `after`, in order."""

    def decisions_view(self) -> list[dict[str, Any]]:
        """Whom the scheduler activated and released, and why, the newest first."""

    def events_view(self, *, limit: int, before: int | None) -> list[EventView]:
        """The audit log, newest first."""

    def events_behind(self, after: int, *, limit: int) -> list[EventView]:
        """The audit log behind `after`, oldest first."""

    def newest_event(self) -> int:
        """The newest line of the audit log; 0 while it has none."""

    def tokens_view(self) -> list[TokenRow]:
        """Every token that lets nodes in, the oldest first."""

    def create_token(
        self, *, uses: int, expires_seconds: float | None, actor: str, reason: str, run: str | None = None
    ) -> str:
        """A token that lets `uses` new nodes in, into any run or one alone."""

    def revoke_token(self, hash_start: str, *, actor: str, reason: str) -> TokenRow:
        """It lets nobody in any more; who is in stays."""

    def broadcast_view(self, limit: int, run: str | None = None) -> BroadcastView:
        """Where each node of a run is with its newest snapshot; None: of the first run."""

    def transitions_view(self, peer: str) -> list[TransitionView]:
        """How a node came to its state, the newest first."""

    def admit_node(self, peer: str, *, actor: str, reason: str) -> None:
        """A node that has applied takes part."""

    def drain_node(self, peer: str, *, actor: str, reason: str) -> None:
        """No new leases; what it holds it finishes."""

    def suspend_node(self, peer: str, *, actor: str, reason: str, expires_seconds: float | None = None) -> None:
        """No more leases; what it has delivered and is not consumed is withdrawn."""

    def ban_node(self, peer: str, *, actor: str, reason: str, expires_seconds: float | None = None) -> None:
        """As suspended, and nothing is served to it."""

    def unban_node(self, peer: str, *, actor: str, reason: str) -> None:
        """A banned node's probation begins anew."""

    def restore_node(self, peer: str, *, actor: str, reason: str) -> None:
        """A suspended or drained node takes part again."""

    async def create_run(self, run: RunConfig, *, actor: str, reason: str) -> RunView:
        """One run more, from now on and after a restart. Raises ConfigurationError for a task that cannot be used."""

    def pause_run(self, run: str, *, actor: str, reason: str) -> None:
        """No new leases until resumed."""

    def resume_run(self, run: str, *, actor: str, reason: str) -> None:
        """Leases flow again."""

    def stop_run(self, run: str, *, actor: str, reason: str) -> None:
        """End the run for good."""
