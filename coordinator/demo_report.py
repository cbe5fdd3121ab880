"""What a demo run leaves behind: the summary object, metrics.jsonl, report.md and the check of the sums.

Everything here works on numbers already read from the daemons; nothing here talks to a process.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

ENDS_STEPS = 5
"""Steps averaged at either end of the reward curve: a single step is noisier than what a few steps gain."""

TERMINAL_STATES = ("consumed", "rejected", "stale", "withdrawn", "duplicate")
"""How a training rollout can end (DESIGN section 2); the rest is `left`."""


@dataclass(frozen=True, slots=True)
class NodeTally:
    """One node's own word (its status file) beside the coordinator's count of the same thing."""

    name: str
    peer: str
    installs: int
    submitted: int
    submitted_by_coordinator: int


@dataclass(frozen=True, slots=True)
class DemoRecord:
    """Everything a finished (or broken off) demo knows. `steps` are StepViews as JSON, in order."""

    run: str
    model: str
    task: str
    seed: int
    steps_wanted: int
    S: int
    kappa: int
    R: int
    n: int
    learning_rate: float
    steps: Sequence[Mapping[str, Any]]
    seconds: float
    heldout: Sequence[tuple[int, float]]
    rollouts: Mapping[str, int]
    nodes: Sequence[NodeTally]
    learner_consumed: int
    snapshots_published: int
    t_bcast_seconds: float | None
    restarts: Mapping[str, int] = field(default_factory=dict)
    failure: str = ""
    measures: Sequence[tuple[int, Mapping[str, float]]] = ()
    """Of held-out episodes of several turns, by version: final chips by opponent, actions that were no actions."""


def summary(record: DemoRecord) -> dict[str, Any]:
    """The one JSON object printed last. Numbers a broken-off run does not have are null."""
    rewards = [float(step["reward_mean"]) for step in record.steps]
    heldout = sorted(record.heldout)
    return {
        "reward_first": _mean(rewards[:ENDS_STEPS]),
        "reward_last": _mean(rewards[-ENDS_STEPS:]),
        "heldout_first": heldout[0][1] if heldout else None,
        "heldout_last": heldout[-1][1] if len(heldout) > 1 else None,
        "steps": len(record.steps),
        "seconds": round(record.seconds, 3),
        "nodes": len(record.nodes),
        "snapshots_published": record.snapshots_published,
        "installs_per_node": [node.installs for node in record.nodes],
        "staleness_max": max((int(step["staleness"]) for step in record.steps), default=0),
        "S": record.S,
        "kappa": record.kappa,
        "rollouts": {key: record.rollouts.get(key, 0) for key in ("submitted", *TERMINAL_STATES, "left")},
        "bubble": bubble(record.steps),
        "t_bcast_s_median": record.t_bcast_seconds,
        "kl_sampler_learner": _mean([float(step["kl"]) for step in record.steps]),
    }


def bubble(steps: Sequence[Mapping[str, Any]]) -> float | None:
    """T_idle / (T_idle + T_train), without the wait before the first step: nothing could overlap with that one."""
    idle = sum(float(step["idle_seconds"]) for step in steps[1:])
    total = idle + sum(float(step["train_seconds"]) for step in steps)
    return idle / total if total > 0 else None


def check_sums(record: DemoRecord) -> list[str]:
    """What does not add up, in words; empty when nothing was lost and nothing was counted twice."""
    wrong = []
    submitted = record.rollouts.get("submitted", 0)
    parts = {key: record.rollouts.get(key, 0) for key in (*TERMINAL_STATES, "left")}
    if submitted != sum(parts.values()):
        told = " + ".join(f"{count} {key}" for key, count in parts.items())
        wrong.append(f"submitted {submitted} is not {told} = {sum(parts.values())}")
    for node in record.nodes:
        if node.submitted != node.submitted_by_coordinator:
            wrong.append(
                f"{node.name} says it submitted {node.submitted} rollouts, "
                f"the coordinator has {node.submitted_by_coordinator} from it"
            )
    by_nodes = sum(node.submitted for node in record.nodes)
    if by_nodes != submitted:
        wrong.append(f"the nodes say they submitted {by_nodes} rollouts, the coordinator counts {submitted}")
    if record.learner_consumed != parts["consumed"]:
        wrong.append(
            f"the learner consumed {record.learner_consumed} rollouts, the coordinator has {parts['consumed']}"
        )
    if [int(step["step"]) for step in record.steps] != list(range(len(record.steps))):
        wrong.append("a training step is missing or came twice in the step metrics")
    used = sum(int(step["rollouts"]) for step in record.steps)
    if used != record.learner_consumed:
        wrong.append(f"the steps used {used} rollouts, the learner consumed {record.learner_consumed}")
    late = [int(step["step"]) for step in record.steps if int(step["staleness"]) > record.S]
    if late:
        wrong.append(f"steps {late[:5]} trained on rollouts staler than S = {record.S}")
    return wrong


def write_metrics(path: Path, steps: Sequence[Mapping[str, Any]]) -> None:
    """One JSON line a step."""
    path.write_text("".join(json.dumps(dict(step)) + "\n" for step in steps), encoding="utf-8")


def write_report(path: Path, record: DemoRecord, wrong: Sequence[str]) -> None:
    """report.md: what ran, what came of it, where the rollouts went, whether the sums agree."""
    numbers = summary(record)
    lines = [
        f"# Demo run `{record.run}`",
        "",
        (
            f"Model **{record.model}**, task **{record.task}**, {len(record.nodes)} nodes, seed {record.seed}; "
            f"S = {record.S}, kappa = {record.kappa}, R = {record.R}, n = {record.n}, "
            f"learning rate {record.learning_rate:g}. {len(record.steps)} of {record.steps_wanted} steps."
        ),
        "",
    ]
    if record.failure:
        lines += [f"**The run did not finish: {record.failure}.**", ""]
    lines += [
        "![reward per step](reward.png)",
        "",
        "| number | value |",
        "|---|---|",
        (
            f"| reward, first {ENDS_STEPS} steps -> last {ENDS_STEPS} | "
            f"{_text(numbers['reward_first'])} -> {_text(numbers['reward_last'])} |"
        ),
        (
            f"| held-out accuracy, before -> after | "
            f"{_text(numbers['heldout_first'])} -> {_text(numbers['heldout_last'])} |"
        ),
        f"| training time | {numbers['seconds']:.1f} s |",
        f"| learner idle (bubble) | {_text(numbers['bubble'], percent=True)} |",
        f"| worst staleness / budget S | {numbers['staleness_max']} / {record.S} |",
        f"| snapshots published | {numbers['snapshots_published']} |",
        f"| T_bcast, median | {_text(numbers['t_bcast_s_median'])} s |",
        f"| KL sampler-learner, mean | {_text(numbers['kl_sampler_learner'], digits=5)} |",
        "",
        *_measures(record),
        "## Where the rollouts went",
        "",
        "| submitted | " + " | ".join((*TERMINAL_STATES, "left")) + " |",
        "|" + "---:|" * (2 + len(TERMINAL_STATES)),
        "| " + " | ".join(str(count) for count in numbers["rollouts"].values()) + " |",
        "",
        "## Nodes",
        "",
        "| node | peer | snapshots installed | submitted (its word) | submitted (the ledger's) | restarts |",
        "|---|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {node.name} | `{node.peer}` | {node.installs} | {node.submitted} | {node.submitted_by_coordinator} "
        f"| {record.restarts.get(node.name, 0)} |"
        for node in record.nodes
    ]
    others = {name: count for name, count in record.restarts.items() if count and not name.startswith("node")}
    if others:
        lines += [
            "",
            "Restarted besides: " + ", ".join(f"{name} {count} times" for name, count in others.items()) + ".",
        ]
    lines += ["", "## Do the sums agree?", ""]
    lines += [f"- **No**: {item}." for item in wrong] or [
        "- Yes: every rollout the nodes submitted is in the ledger once and has one state;",
        "- yes: the learner's own count of consumed rollouts is the ledger's.",
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _measures(record: DemoRecord) -> list[str]:
    """A table of what held-out episodes measured beside the reward, one column a version; nothing for one turn."""
    if not record.measures:
        return []
    marks = sorted(record.measures)
    names = sorted({name for _, means in marks for name in means})
    return [
        "## What the held-out episodes measured",
        "",
        "| mean of | " + " | ".join(f"version {version}" for version, _ in marks) + " |",
        "|---|" + "---:|" * len(marks),
        *(f"| {name} | " + " | ".join(_text(means.get(name)) for _, means in marks) + " |" for name in names),
        "",
    ]


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _text(value: float | None, *, digits: int = 3, percent: bool = False) -> str:
    if value is None:
        return "-"
    return f"{100 * value:.1f} %" if percent else f"{value:.{digits}f}"
