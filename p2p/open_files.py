"""How many files and sockets this process may have open, and what of that connections may take.

A process at its bound can open nothing any more: not its ledger, not its status, not the next connection out. So the
bound is raised as far as the system lets us, and strangers get no more of it than what is left over.
"""

from __future__ import annotations

import logging
from types import ModuleType

resource: ModuleType | None
try:
    import resource
except ImportError:  # Windows: sockets are not counted among files there
    resource = None

OPEN_FILES_WANTED = 8192
"""Several times the connections of the largest pool one coordinator is meant for."""

OPEN_FILES_KEPT = 256
"""For all but inbound connections: dials, the ledger, chunks being read and written, pipes, the libraries."""

CONNECTIONS_MIN = 16
"""Taken in however low the bound is: with fewer there is no pool."""

log = logging.getLogger(__name__)


def raise_bound() -> int | None:
    """Raise this process's own bound towards OPEN_FILES_WANTED; the bound in force, None where there is none."""
    if resource is None:
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES_WANTED if hard == resource.RLIM_INFINITY else min(OPEN_FILES_WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (ValueError, OSError) as error:  # macOS has a lower bound of its own, which it does not tell
            log.debug("the bound on open files stays at %d: %s", soft, error)
            return int(soft)
        return int(wanted)
    return int(soft)


def connections_max(wanted: int) -> int:
    """As many inbound connections as are wanted, or as the bound on open files leaves room for."""
    if resource is None:
        return wanted
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft - OPEN_FILES_KEPT >= wanted:
        return wanted
    room = max(int(soft) - OPEN_FILES_KEPT, CONNECTIONS_MIN)
    if room < wanted:
        log.warning(
            "this process may open %d files, so it takes in %d connections at a time and not %d; "
            "raise it with `ulimit -n`, or LimitNOFILE in its unit",
            soft,
            room,
            wanted,
        )
    return min(room, wanted)
