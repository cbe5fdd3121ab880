"""Which run each node of a pool works for, where a coordinator has several. Pure.

A run's share of the nodes is its weight over the weights of the open runs. Nodes are counted, not weighed by their
speed: rollouts of different runs cannot be compared, and a number that everybody can check is worth more here.

| a node                                        | goes to                                                              |
|-----------------------------------------------|----------------------------------------------------------------------|
| whose join string names a run                 | that one, and is never moved                                         |
| of no run, or of one that is not open         | the open run that lacks most                                         |
| of an open run                                | stays, but for one node a look: from the run with the most too many  |
|                                               | to the one that lacks most, if both together are more than MOVE_MIN  |

An open run without any node gets one before shares are looked at, from a run that has two or more. Where no run is open
nobody is moved: those without a run wait in the first that is not over.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

MOVE_MIN = 1.25
"""Nodes too many in one run and lacking in another, together. Above 1 a move brings the shares closer; a move costs a
download, so it must bring more than that."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A live node; `wanted`: the only run that it takes part in, by its join string."""

    peer: str
    run: str
    wanted: str | None = None


@dataclass(frozen=True, slots=True)
class Share:
    """A run. `open`: it has something to lease; `over`: it never will again."""

    run: str
    weight: float = 1.0
    open: bool = True
    over: bool = False


def place(nodes: Sequence[Placed], runs: Sequence[Share]) -> dict[str, str]:
    """Peer -> the run it goes to, for those that are to change."""
    names = {share.run for share in runs}
    moves = {n.peer: n.wanted for n in nodes if n.wanted is not None and n.wanted in names and n.wanted != n.run}
    free = sorted((node for node in nodes if node.wanted is None), key=lambda node: node.peer)
    open_ones = [share for share in runs if share.open]
    if not open_ones:
        first = next((share.run for share in runs if not share.over), None)
        return moves | {node.peer: first for node in free if first is not None and node.run not in names}
    held = Counter(moves.get(node.peer, node.run) for node in nodes)
    weights = sum(share.weight for share in open_ones)
    fair = {share.run: len(nodes) * share.weight / weights for share in open_ones}
    for node in free:
        if node.run not in fair:
            moves[node.peer] = most = max(fair, key=lambda run: fair[run] - held[run])
            held[most] += 1
    staying = [node for node in free if node.peer not in moves]
    able = {node.run for node in staying if held[node.run] > 1}
    if not able:
        return moves
    rich = max(sorted(able), key=lambda run: held[run] - fair[run])
    poor = max(sorted(fair), key=lambda run: (held[run] == 0, fair[run] - held[run]))
    if poor != rich and (held[poor] == 0 or held[rich] - fair[rich] + fair[poor] - held[poor] >= MOVE_MIN):
        moves[next(node.peer for node in staying if node.run == rich)] = poor
    return moves
