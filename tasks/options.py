"""Checks of a task's options: each returns the value or raises ValueError that says what was wanted."""

from __future__ import annotations

import math
from pathlib import Path


def whole_number(option: str, value: object, *, low: int, high: int) -> int:
    """An integer, low <= value <= high. True and 3.0 are none."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{option} = {value!r} must be a whole number from {low} to {high}")
    return value


def share(option: str, value: object) -> float:
    """A number strictly between 0 and 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or not 0 < value < 1:
        raise ValueError(f"{option} = {value!r} must be a number between 0 and 1")
    return float(value)


def text(option: str, value: object, *, characters_max: int = 4096) -> str:
    """A string that is not empty."""
    if not isinstance(value, str) or not 0 < len(value) <= characters_max:
        raise ValueError(f"{option} = {str(value)[:64]!r} must be a text of 1 to {characters_max} characters")
    return value


def path(option: str, value: object) -> Path:
    """An absolute path. The scorer's process has no folder of its own to start from."""
    place = Path(text(option, value))
    if not place.is_absolute():
        raise ValueError(f"{option} = {str(place)[:200]!r} must be an absolute path")
    return place


def table(option: str, value: object) -> dict[str, object]:
    """A mapping with names for keys."""
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"{option} = {str(value)[:64]!r} must be a table of names and values")
    return value
