"""Which process speaks for a node's key. Pure: time is monotonic seconds.

A process draws its session at its start and names the folder it runs in (`home`, a secret kept there; the folder's lock
lets one process at a time run in it). The live session is the one that was heard of last; it lives until it says
goodbye or is dead (three missed heartbeats).

| who comes                                         | is                                                           |
|---------------------------------------------------|--------------------------------------------------------------|
| the live session                                  | the process that is known                                    |
| another session, the live one is over             | welcome, and is the live one from now on                     |
| another session of the live one's home            | welcome at once: the lock proves that the process before it  |
|                                                   | is gone, as after a kill -9 or a power cut                   |
| another session of another home, or of none       | refused, `identity_live`: the live one goes on. Both are     |
|                                                   | told. It may come again, and takes over when that one is over|
| a session that another has followed               | refused for good, `session_ended`                            |

So the earlier of two machines with one key works undisturbed, and the later one is its spare.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from echo2.p2p.errors import Refused

from .pool import DEAD_HEARTBEATS

if TYPE_CHECKING:
    from .pool import NodeEntry

log = logging.getLogger(__name__)

RIVAL_SECONDS = 60.0
"""For so long after a second process was refused, the first one is told of it; it asks again within that."""

ENDED = "another process has gone on with this key since; stop one of the two"


def lives(node: NodeEntry, now: float, heartbeat_seconds: float) -> bool:
    """Whether the node's session goes on as far as is known."""
    return node.session is not None and node.health(now, heartbeat_seconds) != "dead"


def check(node: NodeEntry, session: bytes, home: bytes | None, now: float, heartbeat_seconds: float) -> bool:
    """Whether `session` is another one than before, and may take over. Raises Refused; changes nothing."""
    if session == node.session:
        return False
    if session in node.ended_sessions:
        raise Refused("session_ended", ENDED)
    if not lives(node, now, heartbeat_seconds) or (home is not None and home == node.home):
        return True
    assert node.seen_at is not None, "a live session was heard of"
    silent = now - node.seen_at
    dead = DEAD_HEARTBEATS * heartbeat_seconds
    raise Refused(
        "identity_live",
        f"another process uses this node's key and was heard of {silent:.0f} s ago: stop it, or give this node a key "
        f"of its own (another --home); this one goes on once that one stops, or is silent for {dead:.0f} s",
        max(dead - silent, 1.0),
    )


def rival(node: NodeEntry, host: str | None, now: float) -> bool:
    """A second process was refused. Whether that is news, for the log."""
    news = node.rival_at is None or now - node.rival_at > RIVAL_SECONDS
    node.rival_at = now
    node.rival = f"a second process with this node's key was refused; it came from {host or 'an unknown address'}"
    node.last_reason = node.rival
    return news


def warning(node: NodeEntry, now: float) -> str:
    """What the live process is to know; empty when nothing."""
    told = node.rival_at is not None and now - node.rival_at <= RIVAL_SECONDS
    return node.rival if told else ""


def adopt(node: NodeEntry, session: bytes, home: bytes | None) -> None:
    """`session` is the live one from now on. One that says no home (a heartbeat, after we were started anew) is taken
    to run in that of the node's last hello."""
    end(node)
    node.session = session
    node.home = home or node.home
    node.sequence, node.told, node.idle_since, node.says = -1, None, None, ""


def end(node: NodeEntry) -> None:
    """The live session is over."""
    if node.session is not None:
        node.ended_sessions.append(node.session)
    node.session = None
