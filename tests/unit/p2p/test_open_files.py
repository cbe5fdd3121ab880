"""The bound on open files is raised as far as it goes, and strangers get no more of it than is left over."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from echo2.p2p import open_files
from echo2.p2p.open_files import CONNECTIONS_MIN, OPEN_FILES_KEPT, OPEN_FILES_WANTED, connections_max, raise_bound

INFINITY = -1


class Bounds(SimpleNamespace):
    """`resource`, with a bound of the test's own."""

    RLIMIT_NOFILE, RLIM_INFINITY = 7, INFINITY
    refuses = False

    def getrlimit(self, what):
        return self.soft, self.hard

    def setrlimit(self, what, bounds):
        if self.refuses:
            raise ValueError("not allowed to exceed maximum limit")
        self.soft, self.hard = bounds


@pytest.mark.parametrize(
    ("soft", "hard", "raised"),
    [
        (1024, 4096, 4096),
        (1024, 1 << 20, OPEN_FILES_WANTED),
        (1024, INFINITY, OPEN_FILES_WANTED),
        (1 << 20, 1 << 20, 1 << 20),
        (INFINITY, INFINITY, INFINITY),
    ],
)
def test_the_bound_is_raised_to_what_is_wanted_or_allowed(monkeypatch, soft, hard, raised):
    """Never lowered, and the hard bound is left as it is."""
    bounds = Bounds(soft=soft, hard=hard)
    monkeypatch.setattr(open_files, "resource", bounds)
    assert raise_bound() == raised
    assert (bounds.soft, bounds.hard) == (raised, hard)


def test_a_system_that_refuses_is_lived_with(monkeypatch):
    """The old bound stays."""
    monkeypatch.setattr(open_files, "resource", Bounds(soft=256, hard=INFINITY, refuses=True))
    assert raise_bound() == 256


@pytest.mark.parametrize(
    ("soft", "connections"),
    [(8192, 1024), (1024, 1024 - OPEN_FILES_KEPT), (100, CONNECTIONS_MIN), (INFINITY, 1024)],
)
def test_connections_leave_room_for_everything_else(monkeypatch, caplog, soft, connections):
    """What does not fit below the bound is not taken in, and a line says what to do about it."""
    monkeypatch.setattr(open_files, "resource", Bounds(soft=soft, hard=soft))
    assert connections_max(1024) == connections
    assert ("ulimit -n" in caplog.text) is (connections < 1024)


def test_where_nothing_counts_files_nothing_is_bounded(monkeypatch):
    """On Windows there is no such bound."""
    monkeypatch.setattr(open_files, "resource", None)
    assert raise_bound() is None
    assert connections_max(1024) == 1024
