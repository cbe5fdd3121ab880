"""The four pictures of `echo2 export`: reward, staleness, bubble, drops."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.ticker import MaxNLocator, PercentFormatter

from .demo_plot import BLUE, GREEN, GRID, INK, MUTED, PALE, RUST, STYLE, moving_mean

mpl.use("Agg")  # before pyplot: there may be no display

from matplotlib import pyplot as plt

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from echo2.p2p.messages import StepMetrics

    from .export_run import Exported

SIZE = (9.0, 4.2)
DOTS_PER_INCH = 150

SHADES = ("#d9e2ec", "#9fb3c8", "#627d98", "#334e68", "#102a43")
"""Staleness 0, 1, ...: the older, the darker; the last stands for all above it."""

REASONS = (RUST, "#d9822b", "#a26769", "#5d5c61", "#7c9885", "#9fb3c8")
REASONS_SHOWN = len(REASONS)


def draw(out: Path, exported: Exported, *, title: str) -> list[Path]:
    """Write the pictures; those that nothing is known for are left out. Returns their paths."""
    steps = exported.steps
    made = []
    with mpl.rc_context(STYLE):
        if steps or exported.evaluations:
            made.append(_save(out / "reward.png", _reward(steps, exported.evaluations, title)))
        if steps:
            made.append(_save(out / "staleness.png", _staleness(steps, exported.staleness_max, title)))
            made.append(_save(out / "bubble.png", _bubble(steps, title)))
        if steps or exported.lost:
            made.append(_save(out / "drops.png", _drops(steps, exported, title)))
    return made


def _save(path: Path, figure: Figure) -> Path:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
    partial = path.with_name(f".{path.name}.partial")
    figure.savefig(partial, format="png", dpi=DOTS_PER_INCH, bbox_inches="tight", facecolor="white")
    plt.close(figure)
    return partial.replace(path)


def _panel(title: str, ylabel: str) -> tuple[Figure, Axes]:
    figure, axes = plt.subplots(figsize=SIZE)
    _dress(axes, ylabel)
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", pad=12)
    return figure, axes


def _dress(axes: Axes, ylabel: str) -> None:
    axes.set_ylabel(ylabel)
    axes.set_xlabel("training step")
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))


def _legend(axes: Axes, **where: Any) -> None:
    axes.legend(frameon=False, **where)


def _reward(steps: Sequence[StepMetrics], evaluations: Sequence[Mapping[str, Any]], title: str) -> Figure:
    figure, axes = _panel(f"{title}: reward", "reward")
    numbers, rewards = [one.step for one in steps], [one.reward_mean for one in steps]
    if steps:
        axes.plot(numbers, rewards, color=PALE, linewidth=1, label="of each training step")
        axes.plot(numbers, moving_mean(rewards), color=BLUE, linewidth=2.2, label="mean over 5 steps")
    whole = [(one["version"], one["mean"]) for one in evaluations if one["complete"] and one["mean"] is not None]
    part = [(one["version"], one["mean"]) for one in evaluations if not one["complete"] and one["mean"] is not None]
    samples = max((one["samples"] for one in evaluations), default=1)
    if whole:
        axes.plot(*zip(*whole, strict=True), "D-", color=RUST, linewidth=1, markersize=6, markeredgecolor="white",
                  label=f"held-out, avg@{samples}", zorder=5, clip_on=False)  # fmt: skip
    if part:
        axes.plot(*zip(*part, strict=True), "D", markerfacecolor="white", markeredgecolor=RUST, markersize=6,
                  label="held-out, ended early", zorder=5, clip_on=False)  # fmt: skip
    shown = rewards + [mean for _, mean in whole + part]
    if shown and all(0 <= value <= 1 for value in shown):
        axes.set_ylim(0, 1.02)
    _legend(axes, loc="lower right")
    return figure


def _staleness(steps: Sequence[StepMetrics], budget: int, title: str) -> Figure:
    """Shares of each step's rollouts by age above; the oldest of each step below."""
    figure, (top, below) = plt.subplots(
        2, 1, sharex=True, figsize=(SIZE[0], SIZE[1] + 1.2), gridspec_kw={"height_ratios": [3, 2], "hspace": 0.15}
    )
    top.set_title(f"{title}: staleness", loc="left", fontsize=12, fontweight="bold", pad=12)
    numbers = [one.step for one in steps]
    counts = [one.staleness_counts or (0,) * one.staleness + (one.rollouts,) for one in steps]
    ages = sorted({min(age, len(SHADES) - 1) for row in counts for age, count in enumerate(row) if count})
    bottom = [0.0] * len(steps)
    for age in ages:
        last = age == len(SHADES) - 1
        shares = [(sum(row[age:]) if last else sum(row[age : age + 1])) / max(1, sum(row)) for row in counts]
        label = f"{age} or more" if last and max(map(len, counts)) > len(SHADES) else str(age)
        top.bar(numbers, shares, bottom=bottom, width=1.0, color=SHADES[age], linewidth=0, label=label)
        bottom = [low + share for low, share in zip(bottom, shares, strict=True)]
    top.set_ylim(0, 1)
    top.yaxis.set_major_formatter(PercentFormatter(1.0))
    _dress(top, "rollouts by age")
    top.set_xlabel("")
    _legend(top, loc="center left", bbox_to_anchor=(1.0, 0.5), title="steps old")
    below.bar(numbers, [one.staleness for one in steps], width=1.0, color=GREEN, linewidth=0)
    below.axhline(budget, color=RUST, linewidth=1.2, linestyle=(0, (4, 3)))
    right: Any = {"xycoords": ("axes fraction", "data"), "xytext": (6, 0), "textcoords": "offset points"}
    below.annotate(f"S = {budget}", (1.0, budget), color=RUST, va="center", **right)
    below.set_ylim(0, max(budget, 1) * 1.2)
    below.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=4))
    _dress(below, "oldest")
    figure.align_ylabels()
    return figure


def _bubble(steps: Sequence[StepMetrics], title: str) -> Figure:
    """Seconds of each step above, the wait before the first left out; the bubble so far below."""
    figure, (top, below) = plt.subplots(
        2, 1, sharex=True, figsize=(SIZE[0], SIZE[1] + 1.2), gridspec_kw={"height_ratios": [3, 2], "hspace": 0.15}
    )
    top.set_title(f"{title}: the learner's time", loc="left", fontsize=12, fontweight="bold", pad=12)
    numbers = [one.step for one in steps]
    train = [one.train_seconds for one in steps]
    idle = [0.0, *(one.idle_seconds for one in steps[1:])]
    top.bar(numbers, train, width=0.9, color=BLUE, linewidth=0, label="training")
    top.bar(numbers, idle, bottom=train, width=0.9, color=RUST, linewidth=0, label="waiting for rollouts")
    _dress(top, "seconds")
    top.set_xlabel("")
    top.legend(frameon=False, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2)
    so_far = [
        sum(idle[: end + 1]) / max(1e-9, sum(idle[: end + 1]) + sum(train[: end + 1])) for end in range(len(steps))
    ]
    below.plot(numbers, so_far, color=INK, linewidth=1.8)
    below.annotate(
        f"{100 * so_far[-1]:.1f} %", (numbers[-1], so_far[-1]), xytext=(6, 0), textcoords="offset points", va="center"
    )
    below.set_ylim(0, max(0.05, *so_far) * 1.15)
    below.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    _dress(below, "bubble so far")
    figure.align_ylabels()
    return figure


def _drops(steps: Sequence[StepMetrics], exported: Exported, title: str) -> Figure:
    """What the learner dropped, step by step; and all that was lost, by reason."""
    figure, (top, below) = plt.subplots(
        2, 1, figsize=(SIZE[0], SIZE[1] + 1.2), gridspec_kw={"height_ratios": [2, 2], "hspace": 0.45}
    )
    lost = exported.lost.total()
    share = f"{lost} of {exported.rollouts} rollouts" if exported.rollouts else "none"
    top.set_title(f"{title}: lost {share}", loc="left", fontsize=12, fontweight="bold", pad=12)
    by_reason: dict[str, Counter[int]] = {}
    for one in steps:
        for drop in one.drops:
            by_reason.setdefault(drop.reason, Counter())[one.step] += drop.count
    numbers = [one.step for one in steps]
    bottom = [0] * len(steps)
    ranked = sorted(by_reason, key=lambda name: -by_reason[name].total())
    for place, reason in enumerate(ranked[:REASONS_SHOWN]):
        counts = [by_reason[reason][number] for number in numbers]
        top.bar(numbers, counts, bottom=bottom, width=0.9, color=REASONS[place], linewidth=0, label=reason)
        bottom = [low + count for low, count in zip(bottom, counts, strict=True)]
    _dress(top, "dropped by the learner")
    if by_reason:
        _legend(top, loc="center left", bbox_to_anchor=(1.0, 0.5))
    else:
        _nothing(top, "the learner dropped nothing")
        top.set_xlim(-0.5, max(len(steps), 1) - 0.5)
    rows = exported.lost.most_common(REASONS_SHOWN)[::-1]
    if rows:
        bars = below.barh([name for name, _ in rows], [count for _, count in rows], color=PALE, height=0.6)
        below.bar_label(bars, padding=4, color=INK)
        below.set_xlabel("rollouts lost in all")
        below.grid(axis="x", color=GRID, linewidth=0.8)
        below.xaxis.set_major_locator(MaxNLocator(integer=True))
        below.margins(x=0.1)
    else:
        _nothing(below, "no rollout was lost")
        below.set_axis_off()
    return figure


def _nothing(axes: Axes, words: str) -> None:
    axes.text(0.5, 0.5, words, transform=axes.transAxes, ha="center", va="center", color=MUTED)
    axes.set_yticks([])
