"""What the web page offers to whom, as a script: made of the tables that decide, so that it cannot say otherwise."""

from __future__ import annotations

import json

from .node_changes import CHANGES
from .rest_roles import NEEDS, ROLES, SAFE_METHODS


def rules_module() -> str:
    """A module of JavaScript: the roles, what each change of REST needs, and what can be done to a node in a state."""
    needs = {f"{method} {path}": least for (method, path), least in NEEDS.items() if method not in SAFE_METHODS}
    changes = {
        verb: {"summary": change.summary, "expires": change.expires, "states": change.states}
        for verb, change in CHANGES.items()
    }
    tables = {"ROLES": ROLES, "NEEDS": needs, "NODE_CHANGES": changes}
    return "".join(f"export const {name} = {json.dumps(table)};\n" for name, table in tables.items())
