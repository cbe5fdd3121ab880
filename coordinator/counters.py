"""What the ledger numbers over all runs, so that two runs never give out the same number."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Numbers:
    """The next of each. Given out in memory between two awaits, and durable with what bears it."""

    rollout_id: int = 1
    account: int = 1
