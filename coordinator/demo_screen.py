"""What the demo shows while it runs: a live screen on a terminal, plain lines elsewhere. Pure rendering."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import RenderableType

BLOCKS = " ▁▂▃▄▅▆▇█"
CHART_ROWS = 4
CHART_COLUMNS = 48
PROGRESS_COLUMNS = 30
NUMBERS_COLUMNS = 64
WIDE_COLUMNS = 116
"""From this width on, panels stand side by side and the node table has every column."""

COLUMNS_MAX = 140
"""Wider lines are hard to follow by eye."""

FIXED_LINES = 14
FIXED_LINES_NARROW = 18
"""Lines of everything but nodes and notes: frame, three of head, panels, legend, the nodes' heading, and the terminal's
own last one. On a narrow terminal the numbers stand below the chart."""

LEGEND = "learner idle: the bubble; broadcast: T_bcast, until nodes have new weights"

ROLLOUT_KEYS = ("submitted", "consumed", "left", "rejected", "stale", "withdrawn", "duplicate")
"""What became of the rollouts; `left` are those not decided yet."""

ROLLOUT_WORDS = {"left": "undecided"}
"""What the screen calls them, where that is another word than the reports'."""

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


def render(state: ScreenState, *, width: int = WIDE_COLUMNS, height: int = 40) -> RenderableType:
    """The whole screen, for a terminal of `width` columns and `height` lines; what has no room is left out, not cut."""
    width = min(width, COLUMNS_MAX)
    inner, wide = width - 4, width >= WIDE_COLUMNS
    head = Table.grid(expand=True)
    head.add_column(no_wrap=True, overflow="ellipsis")
    head.add_column(justify="right", no_wrap=True)
    head.add_row(Text(state.title, style="bold"), Text(_clock(state.seconds), style="dim"))
    waiting = Text(no_wrap=True, overflow="ellipsis")
    if state.waiting_for:
        waiting.append("waiting for: ", style="yellow").append(state.waiting_for)
    nodes, notes = _shares(len(state.nodes), len(state.notes), height - (FIXED_LINES if wide else FIXED_LINES_NARROW))
    parts: list[RenderableType] = [
        head,
        _progress(state),
        waiting,
        *_panels(state, inner=inner, wide=wide),
        Text(LEGEND, style="dim", no_wrap=True, overflow="ellipsis"),
        _nodes_table(state.nodes, rows=nodes, wide=wide),
    ]
    shown = state.notes[len(state.notes) - notes :]
    parts += [Text(f"· {note}", style="dim", overflow="ellipsis", no_wrap=True) for note in shown]
    return Panel(
        Group(*parts), box=box.ROUNDED, border_style="dim", title="ECHO-2 demo", title_align="left", width=width
    )


def _shares(nodes: int, notes: int, lines: int) -> tuple[int, int]:
    """How many lines of the rest go to the nodes and to the notes: one note at least, then nodes, then notes."""
    least = min(notes, 1)
    rows = max(1, min(nodes, lines - least))
    return rows, max(least, min(notes, NOTES_SHOWN, lines - rows))


def _progress(state: ScreenState) -> Text:
    """Told by its characters, not by colour alone."""
    done = PROGRESS_COLUMNS * min(state.step, state.steps) // max(1, state.steps)
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(f"step {state.step} of {state.steps}  ", style="bold cyan")
    line.append("█" * done, style="cyan").append("░" * (PROGRESS_COLUMNS - done), style="dim")
    return line.append(f"  {state.phase}")


def plain_line(state: ScreenState) -> str:
    """The same, on one line."""
    parts = [f"[{_clock(state.seconds)}] {state.phase}", f"step {state.step}/{state.steps}"]
    if state.rewards:
        parts.append(f"reward {state.rewards[-1]:.3f}")
    if state.staleness is not None:
        parts.append(f"staleness {state.staleness}/{state.S}")
    if state.bubble is not None:
        parts.append(f"learner idle {100 * state.bubble:.0f} %")
    if state.t_bcast_seconds is not None:
        parts.append(f"broadcast {state.t_bcast_seconds:.2f} s")
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


def _panels(state: ScreenState, *, inner: int, wide: bool) -> list[RenderableType]:
    if not wide:
        return [_reward_panel(state, width=inner), _numbers(state)]
    grid = Table.grid(padding=(0, 1))
    numbers = Panel(
        _numbers(state), title="pool and rollouts", title_align="left", box=box.ROUNDED, border_style="dim",
        width=NUMBERS_COLUMNS, height=CHART_ROWS + 2,
    )  # fmt: skip
    grid.add_row(_reward_panel(state, width=inner - NUMBERS_COLUMNS - 1), numbers)
    return [grid]


def _reward_panel(state: ScreenState, *, width: int) -> RenderableType:
    rows = chart(state.rewards, columns=max(8, width - 8))
    body = Text(no_wrap=True)
    for number, row in enumerate(rows):
        label = {0: "1.0", len(rows) - 1: "0.0"}.get(number, "   ") if max(state.rewards, default=0) <= 1 else "   "
        body.append(f"{label} ", style="dim")
        body.append(row + ("\n" if number < len(rows) - 1 else ""), style="cyan")
    now = f"now {state.rewards[-1]:.3f}" if state.rewards else "no step yet"
    marks = ", ".join(f"{value:.3f} at version {version}" for version, value in state.heldout)
    return Panel(
        body, title=f"reward, {now}", subtitle=f"held-out: {marks}" if marks else None, title_align="left",
        subtitle_align="left", box=box.ROUNDED, border_style="dim", width=width,
    )  # fmt: skip


def _numbers(state: ScreenState) -> RenderableType:
    count = {key: str(state.rollouts.get(key, 0)) for key in ROLLOUT_KEYS}
    table = Table.grid(padding=(0, 2), expand=True)
    for _ in range(3):
        table.add_column(style="dim", no_wrap=True)
        table.add_column(justify="right", no_wrap=True)
    measured = (
        ("staleness", "-" if state.staleness is None else f"{state.staleness} of {state.S}"),
        ("learner idle", "-" if state.bubble is None else f"{100 * state.bubble:.1f} %"),
        ("broadcast", _seconds(state.t_bcast_seconds)),
        ("training step", _seconds(state.t_train_seconds)),
    )
    kept = [(ROLLOUT_WORDS.get(key, key), count[key]) for key in ROLLOUT_KEYS[:3]]
    lost = [(key, count[key]) for key in ROLLOUT_KEYS[3:]]
    for row in zip(measured, [*kept, ("learner", state.learner or "starting")], lost, strict=True):
        table.add_row(*(text for pair in row for text in pair))
    return table


def _nodes_table(nodes: Sequence[NodeRow], *, rows: int, wide: bool) -> RenderableType:
    table = Table(box=None, expand=True, pad_edge=False, header_style="dim")
    table.add_column("node", no_wrap=True)
    table.add_column("state", no_wrap=True, min_width=10)
    for name in ("version", "rate/s", "sent", *(("installs", "restarts") if wide else ())):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("waiting for", ratio=1, no_wrap=True, overflow="ellipsis")
    shown = nodes if len(nodes) <= rows else nodes[: rows - 1]
    for node in shown:
        more = [str(node.installs), Text(str(node.restarts), style="yellow" if node.restarts else "dim")]
        table.add_row(
            node.name,
            node.state or "starting",
            "-" if node.version is None else str(node.version),
            "-" if node.rate is None else f"{node.rate:.1f}",
            str(node.submitted),
            *(more if wide else ()),
            Text(node.waiting_for, style="dim"),
        )
    if len(shown) < len(nodes):
        table.add_row(f"and {len(nodes) - len(shown)} more")
    return table


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"
