"""Which relays hold up the others, by the word of those they should have served. Pure: time is an argument.

A relay that accepts a request and never answers costs each of its children a wait, in every broadcast, while its own
heartbeats are those of a healthy node. Its children say so. A stranger's word is not enough:

| a relay is late when           | because                                                                           |
|--------------------------------|-----------------------------------------------------------------------------------|
| two nodes name it, or all that | one node alone may have a bad line, or may lie                                    |
| it was to serve                |                                                                                   |
| and it names no late one       | whoever waits for a late relay is late itself, and says for whom                  |
| within the last ten minutes    | a line that stalled recovers; the next broadcast after that tries it again        |

It is then planned as a leaf: it gets everything, and nobody waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from echo2.p2p.messages import BroadcastPlan

REMEMBERED_SECONDS = 600.0
"""Some tens of broadcasts of a small model, one or two of a large one."""

ACCUSERS = 2

NAMES_MAX = 64
"""Remembered of one node: several heartbeats' worth, the newest. Bounds the memory by the number of admitted nodes."""


@dataclass(frozen=True, slots=True)
class _Said:
    order: tuple[int, int]
    at: float
    needed: int
    """How many must say so of this relay, by the plan it was said of."""


class Lateness:
    """What nodes said of each other."""

    def __init__(self) -> None:
        self._said: dict[str, dict[str, _Said]] = {}
        self._children: Mapping[str, int] = {}

    def planned(self, plan: BroadcastPlan) -> None:
        """How many each relay is to serve from now on."""
        children: dict[str, set[str]] = {}
        for entry in plan.entries:
            for edge in entry.edges:
                children.setdefault(edge.source, set()).add(entry.node.peer)
        self._children = {source: len(nodes) for source, nodes in children.items()}

    def said(self, accuser: str, late: Sequence[str], order: tuple[int, int], now: float) -> None:
        """A node's word on the broadcast of the snapshot `order`; it may come again, and counts from the first time."""
        before = self._said.get(accuser, {})
        words = {name: said for name, said in before.items() if now - said.at < REMEMBERED_SECONDS and name not in late}
        for name in late:
            known = before.get(name)
            words[name] = known if known is not None and known.order == order else self._new(name, order, now)
        self._said[accuser] = dict(list(words.items())[-NAMES_MAX:])
        if not words:
            del self._said[accuser]

    def late(self, now: float) -> frozenset[str]:
        """The relays that hold up the others."""
        accusers: dict[str, set[str]] = {}
        needed: dict[str, int] = {}
        for accuser, words in self._said.items():
            for name, said in words.items():
                if now - said.at < REMEMBERED_SECONDS and name != accuser:
                    accusers.setdefault(name, set()).add(accuser)
                    needed[name] = min(said.needed, needed.get(name, ACCUSERS))
        suspects = {name for name, who in accusers.items() if len(who) >= needed[name]}
        return frozenset(
            name for name in suspects if not any(name in accusers[other] for other in suspects if other != name)
        )

    def _new(self, name: str, order: tuple[int, int], now: float) -> _Said:
        return _Said(order, now, min(ACCUSERS, self._children.get(name, ACCUSERS)))
