"""How a person names a node on the command line: its peer id, the end of one, or the name its owner gave it. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from echo2.p2p.errors import ConfigurationError
from echo2.tasks.scorer_wire import printable

if TYPE_CHECKING:
    from collections.abc import Iterable

PEER_END_MIN = 4
"""Digits of a peer id's end that may stand for all of it."""

NAMED_MAX = 3
"""Nodes named in an error: owners choose names, so any number may share one."""


def one_node(said: str, nodes: Iterable[tuple[str, str]]) -> str:
    """The peer id of the only one of `nodes` (peer id and name of each) that is called so.

    Raises ConfigurationError when none is, or several are: what is done to a node is never done to another by its name.
    """
    found = [
        (peer, name)
        for peer, name in nodes
        if said in (peer, name) or (len(said) >= PEER_END_MIN and peer.endswith(said))
    ]
    if len(found) == 1:
        return found[0][0]
    if not found:
        raise ConfigurationError(f"no node {said!r} was ever admitted here; echo2-coordinator nodes lists them")
    named = ", ".join(f"{printable(name)} {peer}" for peer, name in found[:NAMED_MAX])
    raise ConfigurationError(f"{said!r} may be any of {len(found)} nodes: {named}; name one by its whole peer id")
