"""What `echo2 watch` shows of a run. Pure rendering, from 80 columns on."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from .capacity import mu_target
from .demo_screen import BLOCKS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import RenderableType

    from .rest_client import Look
    from .views import EvaluationView, NodeView, RunView

COLUMNS_MAX = 140
"""Wider lines are hard to follow by eye."""

LABEL_COLUMNS = 11
PROGRESS_COLUMNS = 24
HISTOGRAM_COLUMNS = 30
HISTOGRAM_STEPS = 32
"""Steps whose rollouts the histogram is of: as many as T_train is the median of."""

HISTOGRAM_ROWS = 6
EVALUATIONS_SHOWN = 4
REASONS_SHOWN = 4
FIXED_LINES = 22
"""Lines of everything but histogram rows, reasons and nodes."""

NODES_MIN = 3


def render(look: Look, *, width: int, height: int = 50, note: str = "") -> RenderableType:
    """The whole screen; what has no room is counted, not cut off. `note`: why it may be an old one."""
    run = look.run
    width = min(width, COLUMNS_MAX)
    inner = width - 4
    histogram = staleness_lines(run)
    reasons = sorted(look.pool.refused.items(), key=lambda item: (-item[1], item[0]))
    rows = max(NODES_MIN, height - FIXED_LINES - len(histogram) - min(len(reasons), REASONS_SHOWN))
    parts: list[RenderableType] = [
        _head(run),
        *_waiting(look, note),
        Text(),
        _curve("reward", [step.reward_mean for step in run.series], inner),
        *_heldout(run.evaluations, inner),
        Text(),
        *histogram,
        Text(),
        _numbers(look),
        Text(),
        *_rollouts(look, reasons, inner),
        Text(),
        _nodes(look.nodes, rows=rows),
    ]
    title = f"{run.run}: {run.model} on {run.task}"
    return Panel(Group(*parts), box=box.ROUNDED, border_style="dim", title=title, title_align="left", width=width)


def plain_line(look: Look) -> str:
    """The same on one line, where there is no terminal."""
    run, pool = look.run, look.pool
    parts = [run.state, f"step {run.learner_version}/{run.steps}"]
    if run.reward_mean is not None:
        parts.append(f"reward {run.reward_mean:.3f}")
    measured = [one for one in run.evaluations if one.mean is not None]
    if measured:
        parts.append(f"held-out {measured[-1].mean:.3f} at version {measured[-1].version}")
    if run.staleness is not None:
        parts.append(f"staleness {run.staleness}/{run.staleness_max}")
    if run.bubble is not None:
        parts.append(f"bubble {100 * run.bubble:.0f} %")
    parts.append(f"nodes {pool.nodes_healthy}")
    waiting = pool.trouble or run.waiting
    return "  ".join([*parts, *([f"waiting for: {waiting}"] if waiting else [])])


def sparkline(values: Sequence[float], columns: int) -> str:
    """One bar a value, from the lowest to the highest; means where values outnumber columns."""
    if not values:
        return ""
    wide = min(columns, len(values))
    ends = [number * len(values) // wide for number in range(wide + 1)]
    bars = [sum(values[a:b]) / (b - a) for a, b in pairwise(ends)]
    low, high = min(bars), max(bars)
    top = len(BLOCKS) - 1
    return "".join(
        BLOCKS[top // 2 if high == low else 1 + round((bar - low) / (high - low) * (top - 1))] for bar in bars
    )


def staleness_counts(run: RunView, steps: int = HISTOGRAM_STEPS) -> Counter[int]:
    """Rollouts of the last steps by staleness."""
    counts: Counter[int] = Counter()
    for step in run.series[-steps:]:
        for age, count in enumerate(step.staleness_counts):
            counts[age] += count
    return counts


def staleness_lines(run: RunView) -> list[RenderableType]:
    """A bar for each staleness there was; the highest rows stand for all above them."""
    counts = staleness_counts(run)
    total = counts.total()
    bound = "" if run.staleness_estimate is None else f", Delta = {run.staleness_estimate}"
    budget = f"S = {run.staleness_max}{bound}"
    if not total:
        return [_line("staleness", f"no step yet ({budget})")]
    ages = sorted(age for age, count in counts.items() if count)
    first, last = ages[0], ages[-1]
    shown = range(first, min(last, first + HISTOGRAM_ROWS - 1) + 1)
    largest = max(counts.values())
    lines = []
    for number, age in enumerate(shown):
        count = counts[age] if age != shown[-1] else sum(counts[more] for more in range(age, last + 1))
        label = "staleness" if number == 0 else ""
        name = f"{age}" if age == last or age != shown[-1] else f"{age}+"
        bar = "█" * max(1 if count else 0, round(HISTOGRAM_COLUMNS * count / largest))
        text = _line(label, f"{name:>3} ")
        text.append(bar.ljust(HISTOGRAM_COLUMNS), style="green" if age <= run.staleness_max else "red")
        text.append(f" {100 * count / total:3.0f} %")
        if number == 0:
            text.append(f"   {budget}", style="dim")
        lines.append(text)
    return list(lines)


def _head(run: RunView) -> Text:
    done = PROGRESS_COLUMNS * min(run.learner_version, run.steps) // max(1, run.steps)
    style = {"running": "bold green", "finished": "bold cyan", "stopped": "bold red"}.get(run.state, "bold yellow")
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(f"{run.state}", style=style).append(f"  step {run.learner_version} of {run.steps}  ")
    line.append("█" * done, style="cyan").append("░" * (PROGRESS_COLUMNS - done), style="dim")
    version = "none" if run.version is None else str(run.version)
    return line.append(f"  newest snapshot: {version}", style="dim")


def _waiting(look: Look, note: str) -> list[RenderableType]:
    why = note or look.pool.trouble or look.run.waiting
    learner = "" if look.run.learner_connected or look.run.state in ("finished", "stopped") else "the learner is away"
    lines = [_line("waiting for", why or "nothing", "yellow" if why else "dim")]
    if look.run.state_reason and look.run.state_reason not in why:
        lines.append(_line("because", look.run.state_reason, "dim"))
    if learner:
        lines.append(_line("", f"{learner}; it last said: {look.run.learner_status or 'nothing'}", "yellow"))
    return list(lines)


def _curve(name: str, values: Sequence[float], inner: int) -> Text:
    if not values:
        return _line(name, "no step yet", "dim")
    ends = f"  {min(values):.3g} to {max(values):.3g}, now {values[-1]:.3f}"
    text = _line(name, "")
    text.append(sparkline(values, inner - LABEL_COLUMNS - 1 - len(ends)), style="cyan")
    return text.append(ends, style="dim")


def _heldout(evaluations: Sequence[EvaluationView], inner: int) -> list[RenderableType]:
    measured = [one.mean for one in evaluations if one.mean is not None and 2 * one.count >= one.size]
    lines: list[RenderableType] = [_curve("held-out", measured, inner)] if measured else []
    for one in evaluations[-EVALUATIONS_SHOWN:]:
        mean = "-" if one.mean is None else f"{one.mean:.3f}"
        ended = "" if one.complete else f", {'ended early: ' if one.reason else ''}{one.count} of {one.size}"
        lines.append(_line("", f"version {one.version} ({one.purpose}): {mean} avg@{one.samples}{ended}", "dim"))
    return lines or [_line("held-out", "not measured yet", "dim")]


def _numbers(look: Look) -> RenderableType:
    run, pool = look.run, look.pool
    target = mu_target(pool.mu_min) if pool.mu_target is None else pool.mu_target
    table = Table.grid(padding=(0, 2))
    for _ in range(3):
        table.add_column(style="dim", no_wrap=True)
        table.add_column(justify="right", no_wrap=True)
    enough = pool.mu_min is None or pool.mu_pool >= pool.mu_min
    mu = Text(_number(pool.mu_pool, "/s"), style="" if enough else "bold yellow")
    train, least = _number(run.t_train_seconds, " s"), _number(pool.mu_min, "/s")
    rows = (
        ("bubble", "-" if run.bubble is None else f"{100 * run.bubble:.1f} %", "mu_pool", mu, "nodes", _pool(look)),
        ("T_train", train, "mu_min", least, "leased", str(run.outstanding)),
        (
            "T_bcast", _number(run.t_bcast_seconds, " s"), "mu_target", _number(target, "/s"),
            "reserved", f"{run.reserved} of {run.reserved_max if run.reserved_max is not None else '-'}",
        ),
    )  # fmt: skip
    for row in rows:
        table.add_row(*row)
    return table


def _pool(look: Look) -> str:
    pool = look.pool
    others = (
        ("late", pool.nodes_late),
        ("dead", pool.nodes_dead),
        ("suspended", pool.nodes_suspended),
        ("standing by", pool.nodes_standby),
        ("in probation", pool.nodes_probation),
        ("waiting for you", pool.nodes_applied),
        ("draining", pool.nodes_draining),
        ("banned", pool.nodes_banned),
    )
    return ", ".join([f"{pool.nodes_healthy} healthy", *(f"{count} {name}" for name, count in others if count)])


def _rollouts(look: Look, reasons: Sequence[tuple[str, int]], inner: int) -> list[RenderableType]:
    counts: Mapping[str, int] = look.run.rollouts.model_dump()
    words = [f"{name} {count}" for name, count in counts.items() if count or name in ("submitted", "consumed")]
    packed = [""]
    for word in words:
        if packed[-1] and len(packed[-1]) + len(word) + 2 > inner - LABEL_COLUMNS - 1:
            packed.append("")
        packed[-1] += f"  {word}" if packed[-1] else word
    lines: list[RenderableType] = [_line("" if number else "rollouts", row) for number, row in enumerate(packed)]
    for reason, count in reasons[:REASONS_SHOWN]:
        lines.append(_line("", f"{count} {reason}", "dim"))
    if len(reasons) > REASONS_SHOWN:
        lines.append(_line("", f"and {len(reasons) - REASONS_SHOWN} reasons more", "dim"))
    return lines


def _nodes(nodes: Sequence[NodeView], *, rows: int) -> RenderableType:
    table = Table(box=None, expand=True, pad_edge=False, header_style="dim")
    table.add_column("node", no_wrap=True, max_width=20)
    table.add_column("health", no_wrap=True)
    for name in ("version", "rate/s", "held", "accepted", "rejected"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("why", ratio=1, no_wrap=True, overflow="ellipsis")
    order = sorted(nodes, key=lambda node: (node.state == "suspended", node.health == "dead", -(node.mu or 0.0)))
    shown = order if len(order) <= rows else order[: rows - 1]
    for node in shown:
        health = node.health if node.state in {"active", "standby"} else node.state
        table.add_row(
            node.name,
            Text(health, style={"healthy": "", "late": "yellow"}.get(health, "red")),
            "-" if node.version is None else str(node.version),
            _number(node.mu, ""),
            str(node.samples_held),
            str(node.accepted),
            Text(str(node.rejected), style="yellow" if node.rejected else "dim"),
            Text(node.reason or node.node_says, style="dim"),
        )
    if len(shown) < len(order):
        table.add_row(f"and {len(order) - len(shown)} more")
    return table if nodes else _line("nodes", "none yet", "dim")


def _line(label: str, text: str, style: str = "") -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    return line.append(f"{label:<{LABEL_COLUMNS}} ", style="dim").append(text, style=style)


def _number(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:.3g}{unit}"
