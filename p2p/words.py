"""Numbers as a person says them. Pure."""

from __future__ import annotations


def time_left(seconds: float) -> str:
    """A time that is left, with one unit: "50 s", "12 min", "7 h", "3 days"."""
    seconds = max(seconds, 0.0)
    for most, unit, name in ((120.0, 1.0, "s"), (7200.0, 60.0, "min"), (172_800.0, 3600.0, "h")):
        if seconds < most:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds / 86_400.0:.0f} days"
