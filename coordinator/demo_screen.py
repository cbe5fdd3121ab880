"""What the demo shows while it runs: a live screen on a terminal, plain lines elsewhere. Pure rendering."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import RenderableType

BLOCKS = " ▁▂▃▄▅▆▇█"
CHART_ROWS = 4
CHART_COLUMNS = 48
WIDE_COLUMNS = 116
"""From this width on, panels stand side by side and the node table has every column."""

ROLLOUT_KEYS = ("submitted", "consumed", "left", "rejected", "stale", "withdrawn", "duplicate")
"""What became of the rollouts; `left` are those not decided yet."""

NOTES_SHOWN = 4
"""Last things that happened (a restart, a published snapshot) kept on the screen."""


@dataclass(frozen=True, slots=True)
class NodeRow:
    """One node. `rate` is accepted rollouts per second while it holds work."""

    name: str
    state: str
    version: int | None
    rate: float | None
    submitted: int
    installs: int
    restarts: int
    waiting_for: str


@dataclass(frozen=True, slots=True)
class ScreenState:
    """Everything on the screen."""

    title: str
    phase: str
    waiting_for: str
    seconds: float
    step: int
    steps: int
    rewards: Sequence[float]
    heldout: Sequence[tuple[int, float]]
    staleness: int | None
    S: int
    bubble: float | None
    t_bcast_seconds: float | None
    t_train_seconds: float | None
    rollouts: Mapping[str, int]
    nodes: Sequence[NodeRow]
    learner: str = ""
    notes: Sequence[str] = field(default=())


def render(state: ScreenState, *, width: int = WIDE_COLUMNS) -> RenderableType:
    """The whole screen, for a terminal of `width` columns."""
    wide = width >= WIDE_COLUMNS
    head = Table.grid(expand=True)
    head.add_column()
    head.add_column(justify="right")
    head.add_row(Text(state.title, style="bold"), Text(_clock(state.seconds), style="dim"))
    progress = Table.grid(padding=(0, 2))
    progress.add_row(
        Text(f"step {state.step} of {state.steps}", style="bold cyan"),
        ProgressBar(total=max(1, state.steps), completed=state.step, width=50),
        Text(state.phase),
    )
    waiting = Text("waiting for: ", style="yellow") + Text(state.waiting_for) if state.waiting_for else Text("")
    parts: list[RenderableType] = [
        head,
        progress,
        waiting,
        *_panels(state, wide=wide),
        _nodes_table(state.nodes, wide=wide),
    ]
    parts += [Text(f"· {note}", style="dim", overflow="ellipsis", no_wrap=True) for note in state.notes[-NOTES_SHOWN:]]
    return Panel(
        Group(*parts),
        box=box.ROUNDED,
        border_style="dim",
        title="ECHO-2 demo",
        title_align="left",
        width=min(width, 124),
    )


def plain_line(state: ScreenState) -> str:
    """The same, on one line."""
    parts = [f"[{_clock(state.seconds)}] {state.phase}", f"step {state.step}/{state.steps}"]
    if state.rewards:
        parts.append(f"reward {state.rewards[-1]:.3f}")
    if state.staleness is not None:
        parts.append(f"staleness {state.staleness}/{state.S}")
    if state.bubble is not None:
        parts.append(f"bubble {100 * state.bubble:.0f} %")
    if state.t_bcast_seconds is not None:
        parts.append(f"T_bcast {state.t_bcast_seconds:.2f} s")
    if state.rollouts.get("submitted"):
        parts.append(f"rollouts {state.rollouts['submitted']}")
    if state.nodes:
        versions = ",".join("-" if node.version is None else str(node.version) for node in state.nodes)
        parts.append(f"nodes at {versions}")
    if state.waiting_for:
        parts.append(f"waiting for: {state.waiting_for}")
    return "  ".join(parts)


def chart(values: Sequence[float], *, columns: int = CHART_COLUMNS, rows: int = CHART_ROWS) -> list[str]:
    """Bars from 0 to 1 (or the largest value), top row first; means where values outnumber columns."""
    if not values:
        return [" " * columns] * rows
    top = max(1.0, *values)
    wide = min(columns, len(values))
    bars = []
    for column in range(wide):
        part = values[column * len(values) // wide : (column + 1) * len(values) // wide]
        level = max(0.0, sum(part) / len(part)) / top * rows * (len(BLOCKS) - 1)
        bars.append(max(1, round(level)))  # something at every step: no bar would read as no step
    lines = []
    for row in reversed(range(rows)):
        filled = (min(len(BLOCKS) - 1, max(0, bar - row * (len(BLOCKS) - 1))) for bar in bars)
        lines.append("".join(BLOCKS[level] for level in filled).ljust(columns))
    return lines


def _panels(state: ScreenState, *, wide: bool) -> list[RenderableType]:
    if not wide:
        return [_reward_panel(state), _numbers_panel(state)]
    grid = Table.grid(padding=(0, 1))
    grid.add_row(_reward_panel(state), _numbers_panel(state))
    return [grid]


def _reward_panel(state: ScreenState) -> RenderableType:
    rows = chart(state.rewards)
    body = Text()
    for number, row in enumerate(rows):
        label = {0: "1.0", len(rows) - 1: "0.0"}.get(number, "   ") if max(state.rewards, default=0) <= 1 else "   "
        body.append(f"{label} ", style="dim")
        body.append(row + ("\n" if number < len(rows) - 1 else ""), style="cyan")
    now = f"now {state.rewards[-1]:.3f}" if state.rewards else "no step yet"
    marks = ", ".join(f"{value:.3f} at {version}" for version, value in state.heldout)
    return Panel(
        body, title=f"reward, {now}", subtitle=f"held-out: {marks}" if marks else None, title_align="left",
        subtitle_align="left", box=box.ROUNDED, border_style="dim", expand=False,
    )  # fmt: skip


def _numbers_panel(state: ScreenState) -> RenderableType:
    count = {key: str(state.rollouts.get(key, 0)) for key in ROLLOUT_KEYS}
    table = Table.grid(padding=(0, 1))
    for _ in range(3):
        table.add_column(style="dim")
        table.add_column(justify="right")
    staleness = "-" if state.staleness is None else f"{state.staleness} of {state.S}"
    bubble = "-" if state.bubble is None else f"{100 * state.bubble:.1f} %"
    rows = (("staleness", staleness), ("bubble", bubble), ("T_bcast", _seconds(state.t_bcast_seconds)))
    for (name, text), kept, lost in zip(rows, ROLLOUT_KEYS[:3], ROLLOUT_KEYS[3:6], strict=True):
        table.add_row(name, text, kept, count[kept], lost, count[lost])
    last = ROLLOUT_KEYS[6]
    table.add_row("T_train", _seconds(state.t_train_seconds), "", "", last, count[last])
    learner = f"learner: {state.learner}" if state.learner else None
    return Panel(
        table, title="pool and rollouts", subtitle=learner, title_align="left", subtitle_align="left",
        box=box.ROUNDED, border_style="dim", expand=False,
    )  # fmt: skip


def _nodes_table(nodes: Sequence[NodeRow], *, wide: bool) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, expand=True, pad_edge=False)
    table.add_column("node", no_wrap=True)
    table.add_column("state", no_wrap=True, min_width=10)
    for name in ("version", "rate/s", "sent", *(("installs", "restarts") if wide else ())):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("waiting for", ratio=1, no_wrap=True, overflow="ellipsis")
    for node in nodes:
        more = [str(node.installs), Text(str(node.restarts), style="yellow" if node.restarts else "dim")]
        table.add_row(
            node.name,
            node.state,
            "-" if node.version is None else str(node.version),
            "-" if node.rate is None else f"{node.rate:.1f}",
            str(node.submitted),
            *(more if wide else ()),
            Text(node.waiting_for, style="dim"),
        )
    return table


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"
