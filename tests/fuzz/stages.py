"""The stages that are played in memory, by name: module of each. `wire` has a process of its own, beside them."""

from __future__ import annotations

from types import ModuleType

from fuzz import coordinator_stage, learner_stage, mux_stage, nat_stage, node_stage

STAGES: dict[str, ModuleType] = {
    "coordinator": coordinator_stage,
    "confused-learner": coordinator_stage,
    "node": node_stage,
    "learner": learner_stage,
    "nat": nat_stage,
    "mux": mux_stage,
}


def requested() -> dict[str, set[str]]:
    """Daemon -> ids of the protocols whose handlers get hostile requests."""
    names = {
        "coordinator": set(coordinator_stage.PROTOCOLS) | nat_stage.AT_HUB,
        "learner": set(learner_stage.REQUESTED),
        "node": set(node_stage.REQUESTED) | (nat_stage.REQUESTED - nat_stage.AT_HUB),
    }
    return {
        daemon: {name if name.startswith("/") else f"/echo2/{name}/1" for name in protocols}
        for daemon, protocols in names.items()
    }
