"""Everything that is alive in this process, counted: what a peer that vanished could have been left in.

Nothing is left out: every object the collector knows, of whatever library, and in those of the packages `OPENED` the
size of each collection, text and byte string, and in our own each whole number. Also what is in no object: the caches
of functions, the globals of modules, the borrowers of limiters.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections import Counter, OrderedDict, deque
from types import CellType, ModuleType

import trio

OURS = "echo2"
OPENED = (OURS, "libp2p", "trio", "multiaddr", "multihash", "noise", "__main__")
"""Packages whose objects are looked into by attribute."""

CONTAINERS = (dict, list, set, deque, OrderedDict, bytearray)
"""Counted wherever they are: also those that only a running function or another collection knows."""


def census() -> Counter[str]:
    """Counts by name: `objects of TYPE`, `items in TYPE.attribute`, `sum of TYPE.attribute`, `cached by FUNCTION`..."""
    # trio forgets a deadline that was taken back only when it would have come, or when many are: no peer's doing.
    trio._core._run.GLOBAL_RUN_CONTEXT.runner.deadlines._prune()
    gc.collect()
    found: Counter[str] = Counter()
    for thing in gc.get_objects():
        kind = type(thing)
        found[f"objects of {_name(kind)}"] += 1
        if kind in CONTAINERS:
            found[f"items in every {_name(kind)}"] += len(thing)
        elif kind is CellType:
            found["items in variables of closures"] += _length_in(thing)
        elif isinstance(thing, functools._lru_cache_wrapper):
            found[f"cached by {getattr(thing, '__qualname__', '?')}"] += thing.cache_info().currsize
        elif isinstance(thing, trio.CapacityLimiter):
            found["borrowed of CapacityLimiter"] += thing.borrowed_tokens
        elif _package(kind) in OPENED:
            _look_into(thing, kind, found)
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and name.split(".")[0] in OPENED:
            for attribute, value in list(vars(module).items()):
                if isinstance(value, dict | list | set) and attribute != "__builtins__":
                    found[f"items in {name}.{attribute}"] += len(value)
    return found


def _look_into(thing: object, kind: type, found: Counter[str]) -> None:
    for attribute in _attributes(thing, kind):
        try:
            value = object.__getattribute__(thing, attribute)
        except AttributeError:
            continue
        name = f"{_name(kind)}.{attribute}"
        if isinstance(value, int) and not isinstance(value, bool):
            if _package(kind) == OURS:
                found[f"sum of {name}"] += value
            continue
        found[f"items in {name}"] += _length(value)
        if isinstance(value, dict):
            found[f"items in {name}[]"] += sum(map(_length, value.values()))


def _length_in(cell: CellType) -> int:
    try:
        return _length(cell.cell_contents)
    except ValueError:  # not filled yet
        return 0


def _length(value: object) -> int:
    """0 for what has none. Not asked by `isinstance(value, Sized)`, which would leave a record of each new type."""
    if isinstance(value, type) or not hasattr(type(value), "__len__"):
        return 0
    try:
        return len(value)  # type: ignore[arg-type]
    except TypeError:  # ctypes claims a length for what has none
        return 0


def _package(kind: type) -> str:
    return str(kind.__module__).partition(".")[0]


def _attributes(thing: object, kind: type) -> set[str]:
    slots = (s for each in kind.__mro__ for s in _tuple(each.__dict__.get("__slots__", ())))
    return {*getattr(thing, "__dict__", {}), *(_mangled(kind, slot) for slot in slots)}


def _tuple(slots: object) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _mangled(kind: type, slot: str) -> str:
    return f"_{kind.__name__.lstrip('_')}{slot}" if slot.startswith("__") and not slot.endswith("__") else slot


def _name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
