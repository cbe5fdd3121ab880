"""reward.png: the reward per step with its moving mean and the held-out marks, and a strip of staleness below."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import matplotlib as mpl

from .demo_report import ENDS_STEPS, DemoRecord

mpl.use("Agg")  # before pyplot: a demo runs where there is no display

from matplotlib import pyplot as plt
from matplotlib.ticker import MaxNLocator

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

INK, MUTED, GRID = "#1f2933", "#7b8794", "#e4e7eb"
PALE, BLUE, RUST, GREEN = "#9fb3c8", "#0b69a3", "#c2410c", "#7c9885"
STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
}


def draw_reward(path: Path, record: DemoRecord) -> None:
    """Write the picture to `path`. Works for a broken-off run too, with whatever steps it has."""
    with mpl.rc_context(STYLE):
        figure, (top, below) = plt.subplots(
            2, 1, sharex=True, figsize=(9, 5.4), dpi=150, gridspec_kw={"height_ratios": [5, 1], "hspace": 0.12}
        )
        _reward(top, record)
        _staleness(below, record)
        for axes in (top, below):
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(axis="y", color=GRID, linewidth=0.8)
            axes.set_axisbelow(True)
        figure.align_ylabels()
        figure.savefig(path, bbox_inches="tight", facecolor="white")
        plt.close(figure)


def _reward(axes: Axes, record: DemoRecord) -> None:
    steps = [int(step["step"]) for step in record.steps]
    rewards = [float(step["reward_mean"]) for step in record.steps]
    axes.plot(steps, rewards, color=PALE, linewidth=1, label="reward of the step")
    axes.plot(steps, moving_mean(rewards), color=BLUE, linewidth=2.2, label=f"mean over {ENDS_STEPS} steps")
    marks = sorted(record.heldout)
    if marks:
        axes.plot(
            [version for version, _ in marks],
            [value for _, value in marks],
            "D",
            color=RUST,
            markersize=8,
            markeredgecolor="white",
            clip_on=False,
            zorder=5,
            label="held-out accuracy",
        )
    for version, value in marks:
        offset, align = (-10, "right") if version > len(steps) / 2 else (10, "left")
        where: Any = {"xytext": (offset, -16), "textcoords": "offset points", "ha": align}
        axes.annotate(f"{value:.2f}", (version, value), color=RUST, fontweight="bold", **where)
    if all(0 <= value <= 1 for value in rewards):
        axes.set_ylim(0, 1.02)
    axes.set_ylabel("reward")
    title = f"{record.model}, {record.task}: {len(record.nodes)} nodes, S = {record.S}, kappa = {record.kappa}"
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", pad=12)
    axes.legend(frameon=False, loc="lower right")


def _staleness(axes: Axes, record: DemoRecord) -> None:
    steps = [int(step["step"]) for step in record.steps]
    axes.bar(steps, [int(step["staleness"]) for step in record.steps], width=1.0, color=GREEN, linewidth=0)
    axes.axhline(record.S, color=RUST, linewidth=1.2, linestyle=(0, (4, 3)))
    right: Any = {"xycoords": ("axes fraction", "data"), "xytext": (6, 0), "textcoords": "offset points"}
    axes.annotate(f"S = {record.S}", (1.0, record.S), color=RUST, va="center", **right)
    axes.set_ylim(0, max(record.S, 1) * 1.15)
    axes.set_xlim(-0.5, max(len(steps), 1))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=4, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.set_ylabel("staleness")
    axes.set_xlabel("training step")


def moving_mean(values: Sequence[float]) -> list[float]:
    """Mean of each value and up to ENDS_STEPS - 1 before it."""
    return [statistics.fmean(values[max(0, end - ENDS_STEPS) : end]) for end in range(1, len(values) + 1)]
