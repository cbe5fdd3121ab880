"""Tables of `echo2-coordinator pool | nodes | runs | events | decisions`. Pure rendering, from 80 columns on.

What strangers wrote (names, reasons) is shown without what could move a terminal's cursor.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from echo2.tasks.scorer_wire import printable as printable

from .money import MICRO

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rich.console import RenderableType

WIDE_COLUMNS = 110
"""From here on a table shows what is nice to know."""

PEER_SHOWN = 8
"""The end of a peer id: the beginning is the same for all."""

NAME_SHOWN = 24
NAME_SHOWN_NARROW = 14

STYLES = {
    **dict.fromkeys(("active", "healthy", "running", "finished"), "green"),
    **dict.fromkeys(("late", "paused", "draining", "ready", "standby", "pending"), "yellow"),
    **dict.fromkeys(("suspended", "banned", "dead", "stopped"), "red"),
}

RED = "red"


def pool_table(pool: Mapping[str, Any]) -> Table:
    """The pool as a whole, a line each."""
    nodes = [f"{pool[f'nodes_{state}']} {state}" for state in ("healthy", "late", "dead", "suspended", "standby")]
    target = "not known yet" if pool["mu_target"] is None else f"{pool['mu_target']:.3g}/s"
    refused = sorted(pool["refused"].items(), key=lambda item: -item[1])
    rows = {
        "nodes": ", ".join(nodes),
        "speed": f"{pool['mu_pool']:.3g} rollouts/s; wanted: {target} (the least: {_number(pool['mu_min'], '/s')})",
        "T_train": _number(pool["t_train_seconds"], " s"),
        "T_bcast": _number(pool["t_bcast_seconds"], " s"),
        "refused": ", ".join(f"{count} {reason}" for reason, count in refused) or "none",
        "protocol errors": str(pool["protocol_errors"]),
        "scorer confined by": ", ".join(pool["scorer_confinement"]) or "nothing",
        "coordinator": pool["coordinator"],
        "addresses": ", ".join(pool["addresses"]),
    }
    return facts(rows, trouble=pool["trouble"])


def nodes_table(nodes: Sequence[Mapping[str, Any]], *, width: int) -> RenderableType:
    """A line a node, and below the table, where there is room for them, the reasons."""
    wide = width >= WIDE_COLUMNS
    table = _table("node", "peer", "state", "health", "lag", "mu/s", "accepted", "rejected")
    for column in table.columns[4:]:
        column.justify = "right"
    if wide:
        for name in ("leases", "seen", "$/h"):
            table.add_column(name, justify="right", no_wrap=True)
    shown = NAME_SHOWN if wide else NAME_SHOWN_NARROW
    reasons = []
    for node in nodes:
        state = "standby" if node["standby"] and node["state"] == "active" else node["state"]
        cells = [
            _text(node["name"][:shown]), _text(node["peer"][-PEER_SHOWN:]), _word(state), _word(node["health"]),
            _text(_number(node["version_lag"])), _text(_number(node["mu"])), _text(str(node["accepted"])),
            Text(str(node["rejected"]), RED if node["rejected"] else ""),
        ]  # fmt: skip
        if wide:
            cells += [_text(str(node["leases_held"])), _text(ago(node["last_seen_seconds"]))]
            cells.append(_text(f"{node['price_hour']:.2f}" if node["price_hour"] else "-"))
        if node["reason"]:
            reasons.append(_text(f" {node['name'][:shown]}: {node['reason']}"))
        table.add_row(*cells)
    return Group(table, *reasons)


def node_table(node: Mapping[str, Any]) -> Table:
    """All of one node."""
    counts = ", ".join(f"{count} {state}" for state, count in node["rollouts"].items() if count) or "none"
    state = f"{node['state']} since {moment(node['state_since'])} UTC" if node["state_since"] else node["state"]
    version = f"{_number(node['version'])} (epoch {node['epoch']}), {_number(node['version_lag'])} behind"
    rows = {
        "peer": node["peer"],
        "name": node["name"],
        "run": node["run"] or "none",
        "software": node["software"],
        "state": state + (f", by {short(node['state_by'])}" if node["state_by"] else ""),
        "until": f"{moment(node['state_expires'])} UTC",
        "health": f"{node['health']}, heard of {_heard(node['last_seen_seconds'])}",
        "it says": node["node_says"] or "-",
        "probation": f"{node['warmup_returned']} of its first {node['warmup_leases']} leases are back, "
        f"{node['warmup_failed']} failed",
        "benchmark": f"{_number(node['benchmark_rollouts_per_second'])} rollouts/s, "
        f"{_number(node['benchmark_tokens_per_second'])} tokens/s",
        "speed": f"mu {_number(node['mu'])} rollouts/s, {_number(node['tokens_per_second'])} tokens/s",
        "version": "none" if node["version"] is None else version,
        "price": _price(node),
        "balance": f"{node['balance_credits']:,.2f} credits, {_dollars(node['balance_dollars'])}",
        "holds": f"{node['leases_held']} leases, {node['samples_held']} samples",
        "unanswered": f"{node['leases_unanswered']} of the last {node['leases_judged']} leases",
        "brought": f"{node['accepted']} accepted, {node['rejected']} rejected, {node['evaluated']} evaluated",
        "rollouts": counts,
        "protocol errors": str(node["protocol_errors"]),
        "addresses": ", ".join(node["addresses"]) or "none at which it can be dialled",
    }
    if not node["warmup_leases"]:
        del rows["probation"]
    if node["state_expires"] is None:
        del rows["until"]
    return facts(rows, trouble=node["reason"], label="reason")


def _dollars(amount: float) -> str:
    return f"{'-' if amount < 0 else ''}${abs(amount):,.2f}"


def _heard(seconds: float | None) -> str:
    return ago(seconds) if seconds is None else f"{ago(seconds)} ago"


def _price(node: Mapping[str, Any]) -> str:
    if not node["price_hour"]:
        return "none: a volunteer"
    rho = node["rho_dollars"]
    return f"${node['price_hour']:.2f} an hour" + ("" if rho is None else f"; rho ${1000 * rho:.3g} for 1000 rollouts")


def runs_table(runs: Sequence[Mapping[str, Any]], *, width: int) -> Table:
    """A line a run."""
    wide = width >= WIDE_COLUMNS
    table = _table("run", "state", "step", "reward", "stale", "bubble")
    if wide:
        for name in ("weight", "nodes", "task", "model", "learner"):
            table.add_column(name, no_wrap=True)
    table.add_column("waits for")
    for run in runs:
        cells = [
            _text(run["run"]), _word(run["state"]), _text(f"{run['learner_version']}/{run['steps']}"),
            _text(_number(run["reward_mean"])), _text(_number(run["staleness"])), _text(_percent(run["bubble"])),
        ]  # fmt: skip
        if wide:
            cells += [_text(f"{run.get('weight', 1.0):g}"), _text(str(run.get("nodes", "")))]
            cells += [_text(run["task"]), _text(run["model"])]
            cells.append(_text(run["learner_status"] if run["learner_connected"] else "away"))
        table.add_row(*cells, _text(run["waiting"] or "nothing"))
    return table


def run_table(run: Mapping[str, Any]) -> Table:
    """One run, a line each."""
    evaluations = [
        f"version {one['version']} ({one['purpose']}): {_number(one['mean'])} avg@{one['samples']}, "
        f"{one['count']} of {one['size']}"
        for one in run["evaluations"]
    ]
    rows = {
        "run": f"{run['run']}: {run['task']} with {run['model']}",
        "state": run["state"] + (f": {run['state_reason']}" if run["state_reason"] else ""),
        "waits for": run["waiting"] or "nothing",
        "step": f"{run['learner_version']} of {run['steps']}; version {_number(run['version'])} is published",
        "learner": f"{run['learner_status'] or '-'}" if run["learner_connected"] else "away",
        "reward": _number(run["reward_mean"]),
        "staleness": f"{_number(run['staleness'])}; S = {run['staleness_max']}, kappa = {run['publish_period']}",
        "KL": _number(run["kl"]),
        "bubble": _percent(run["bubble"]),
        "T_train, T_bcast": f"{_number(run['t_train_seconds'], ' s')}, {_number(run['t_bcast_seconds'], ' s')}",
        "rollouts": ", ".join(f"{count} {state}" for state, count in run["rollouts"].items()),
        "reserved": f"{run['reserved']} of {_number(run['reserved_max'])}, {run['outstanding']} leased",
        "evaluations": "\n".join(evaluations) or "none",
    }
    return facts(rows)


def events_table(events: Iterable[Mapping[str, Any]], *, width: int) -> Table:
    """A line an event, as they are given. Where there is little room, without the year and the seconds."""
    wide = width >= WIDE_COLUMNS
    table = _table("id", "when (UTC)", "who", "what")
    table.columns[0].justify = "right"
    table.add_column("why")
    for event in events:
        number, when, who, what, whom, why = event_cells(event)
        table.add_row(*map(_text, (number, when if wide else when[5:16], who, f"{what}: {whom}", why)))
    return table


def event_cells(event: Mapping[str, Any]) -> tuple[str, ...]:
    """An event in words."""
    subject = event["subject"]
    return (
        str(event["id"]), moment(event["wall_seconds"]), short(event["actor"]), event["action"], short(subject),
        event["reason"],
    )  # fmt: skip


def decisions_table(decisions: Sequence[Mapping[str, Any]]) -> Table:
    """A line a decision, the newest first."""
    table = _table("run", "what", "nodes", "mu", "target", "$/h")
    table.add_column("why")
    for made in decisions:
        chosen = ", ".join(map(short, made["chosen"])) or "-"
        table.add_row(
            _text(made["run"]), _text(made["action"]), _text(chosen), _text(_number(made["mu_pool"])),
            _text(_number(made["mu_target"])), _text(f"{made['price_after'] / MICRO:.2f}"), _text(made["reason"]),
        )  # fmt: skip
    return table


def rows_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Plain cells under these heads."""
    table = _table(*columns)
    for row in rows:
        table.add_row(*map(_text, row))
    return table


def facts(rows: Mapping[str, str], *, trouble: str = "", label: str = "trouble") -> Table:
    """Names and values; what is wrong comes first."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    if trouble:
        table.add_row(label, Text(printable(trouble), RED))
    for name, value in rows.items():
        table.add_row(name, Text("\n".join(map(printable, value.split("\n")))))
    return table


def moment(seconds: float | None) -> str:
    """A time for people; empty for none."""
    return "" if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")


def ago(seconds: float | None) -> str:
    """How long since."""
    if seconds is None:
        return "never"
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def short(name: str) -> str:
    """A peer id by its end; other names as they are."""
    return f"…{name[-PEER_SHOWN:]}" if len(name) > 40 and name.isalnum() else name


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in columns:
        table.add_column(name, no_wrap=True)
    return table


def _text(value: str) -> Text:
    return Text(printable(value))


def _word(value: str) -> Text:
    return Text(printable(value), STYLES.get(value, ""))


def _number(value: float | None, unit: str = "") -> str:
    return "-" if value is None else f"{value:.3g}{unit}" if isinstance(value, float) else f"{value}{unit}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"
