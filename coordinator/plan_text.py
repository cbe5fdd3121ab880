"""What `echo2 plan` shows: the pool to rent, and a table over S. Pure rendering, from 80 columns on."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

from rich import box
from rich.console import Console
from rich.table import Table

from .submit_text import duration

if TYPE_CHECKING:
    from .planning import Report, Row

COLUMNS_MAX = 120
POOL_COLUMNS = 12
COLUMNS_PLAIN = 120
"""Where the output is no terminal: a file, a pipe."""


def show(report: Report, out: TextIO) -> None:
    """Print it."""
    console = Console(file=out, highlight=False)
    console.width = min(console.width, COLUMNS_MAX) if console.is_terminal else COLUMNS_PLAIN
    for line in lines_of(report):
        console.print(line, markup=False, soft_wrap=True)
    console.print()
    console.print(table_of(report))


def lines_of(report: Report) -> list[str]:
    """The plan for the budget that was asked about, in words."""
    row, setup = report.asked, report.setup
    least = "no rate is enough" if row.mu_min is None else f"{row.mu_min:.3g} needed"
    pool = ", ".join(f"{kind.count} of {kind.offered} {kind.name}" for kind in row.rented)
    leases = ", ".join(f"{kind.name} {kind.lease_samples} samples, {kind.lease_seconds:.3g} s" for kind in row.rented)
    times = f"T_train {setup.train_seconds:g} s, T_bcast {setup.broadcast_seconds:g} s"
    made = f"{row.mu_pool:.3g} rollouts a second ({least}, aim {row.mu_target:.3g})"
    price = f"${row.dollars_hour:.4g} an hour, ${row.dollars_hour_pool:.4g} of it for the pool"
    waits = f"the learner waits {100 * row.bubble:.0f} % of the time"
    lines = [
        f"S = {row.S}, kappa = {row.kappa}, R = {setup.R}, n = {setup.n}; {times}",
        f"  rent       {pool}: {made}",
        f"  price      {price}; ${row.dollars_step:.3g} a step",
        f"  a step     {row.step_seconds:.3g} s, decided by {row.bound_by}; {waits}",
        f"  staleness  at most {row.staleness} (bound without S: {row.staleness_bound})",
        f"  a lease    {leases}",
        f"  fits       {'yes' if row.feasible and row.enough else 'no'}",
    ]
    if row.seconds is not None and row.dollars is not None:
        lines.insert(3, f"  in all     {setup.steps} steps: {duration(row.seconds)}, ${row.dollars:.2f}")
    return lines + [f"  change     {advice}" for advice in row.advice]


def table_of(report: Report) -> Table:
    """Each budget's plan on one line."""
    table = Table(box=box.SIMPLE, pad_edge=False, collapse_padding=True)
    for name in ("S", "kappa", "mu_min", "$/h", "step s", "$/step", "bubble", "stale", "lease s", "fits"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column(
        "pool", min_width=POOL_COLUMNS, overflow="fold"
    )  # last, so that it is what wraps on a narrow screen
    for row in report.table:
        table.add_row(*_cells(row), style="bold" if (row.S, row.kappa) == _asked(report) else "")
    return table


def _asked(report: Report) -> tuple[int, int]:
    return report.asked.S, report.asked.kappa


def _cells(row: Row) -> list[str]:
    return [
        str(row.S),
        str(row.kappa),
        "none" if row.mu_min is None else f"{row.mu_min:.3g}",
        f"{row.dollars_hour:.3g}",
        f"{row.step_seconds:.3g}",
        f"{row.dollars_step:.3g}",
        f"{100 * row.bubble:.0f} %",
        str(row.staleness),
        f"{row.lease_seconds:.3g}",
        ("yes" if row.feasible else "no") if row.enough else "short",
        " + ".join(f"{kind.count} {kind.name}" for kind in row.rented),
    ]
