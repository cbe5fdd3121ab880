"""Who may do what over REST: one table. Pure.

| role       | may                                                                            |
|------------|--------------------------------------------------------------------------------|
| viewer     | read all but the lists of tokens                                               |
| researcher | that, and judge, start, pause, resume and stop runs                            |
| operator   | everything: nodes, tokens that let nodes in, tokens of people                  |

`READER` is open on loopback, where only this machine's own processes ask, and a viewer's elsewhere; `ANYONE` is the way
in itself. What is not in the table does not exist: a route without an entry cannot be made (`rest_guard`).
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Literal, get_args

Role = Literal["viewer", "researcher", "operator"]
ROLES: tuple[Role, ...] = get_args(Role)
"""The least first: each may do what those before it may."""

Needs = Literal["anyone", "reader", "viewer", "researcher", "operator"]

ANYONE: Needs = "anyone"
READER: Needs = "reader"

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
"""All others change something."""

NEEDS: dict[tuple[str, str], Needs] = {
    ("GET", "/healthz"): "reader",
    ("GET", "/metrics"): "reader",
    ("GET", "/openapi.json"): "reader",
    ("GET", "/v1/pool"): "reader",
    ("GET", "/v1/decisions"): "reader",
    ("GET", "/v1/nodes"): "reader",
    ("GET", "/v1/nodes/{peer}"): "reader",
    ("GET", "/v1/nodes/{peer}/transitions"): "reader",
    ("POST", "/v1/nodes/{peer}/admit"): "operator",
    ("POST", "/v1/nodes/{peer}/drain"): "operator",
    ("POST", "/v1/nodes/{peer}/suspend"): "operator",
    ("POST", "/v1/nodes/{peer}/ban"): "operator",
    ("POST", "/v1/nodes/{peer}/unban"): "operator",
    ("POST", "/v1/nodes/{peer}/restore"): "operator",
    ("GET", "/v1/runs"): "reader",
    ("POST", "/v1/runs"): "operator",
    ("POST", "/v1/runs/validate"): "researcher",
    ("POST", "/v1/runs/estimate"): "researcher",
    ("GET", "/v1/runs/{run}"): "reader",
    ("GET", "/v1/runs/{run}/metrics"): "reader",
    ("POST", "/v1/runs/{run}/start"): "researcher",
    ("POST", "/v1/runs/{run}/pause"): "researcher",
    ("POST", "/v1/runs/{run}/resume"): "researcher",
    ("POST", "/v1/runs/{run}/stop"): "researcher",
    ("GET", "/v1/ledger/postings"): "reader",
    ("GET", "/v1/ledger/balances"): "reader",
    ("GET", "/v1/ledger/verify"): "reader",
    ("GET", "/v1/appeals"): "reader",
    ("POST", "/v1/appeals/{id}/resolve"): "operator",
    ("GET", "/v1/broadcast"): "reader",
    ("GET", "/v1/events"): "reader",
    ("GET", "/v1/events/stream"): "reader",
    ("GET", "/v1/tokens"): "operator",
    ("POST", "/v1/tokens"): "operator",
    ("POST", "/v1/tokens/{token}/revoke"): "operator",
    ("GET", "/v1/access"): "operator",
    ("POST", "/v1/access"): "operator",
    ("POST", "/v1/access/{name}/revoke"): "operator",
    ("GET", "/v1/session"): "anyone",
    ("POST", "/v1/session"): "anyone",
    ("DELETE", "/v1/session"): "viewer",
}
"""By method and path, as the routes write it."""


def refusal(needs: Needs, role: Role | None, *, open_reads: bool) -> HTTPStatus | None:
    """401 for whoever must say who they are, 403 for whoever may not, None for who may. `role`: None for a stranger."""
    if needs == ANYONE or (needs == READER and open_reads):
        return None
    if role is None:
        return HTTPStatus.UNAUTHORIZED
    least = ROLES.index("viewer" if needs in (ANYONE, READER) else needs)
    return None if ROLES.index(role) >= least else HTTPStatus.FORBIDDEN
