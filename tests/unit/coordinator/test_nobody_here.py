"""What a run says whose pool has nodes, but none for it."""

from __future__ import annotations

from echo2.coordinator.pool import NodeEntry, Pool


def pool_of(**wanted):
    """A pool that was just heard of, each node in the run `one`."""
    nodes = {name: NodeEntry(name, name, "s", (), run="one", wanted=run, seen_at=100.0) for name, run in wanted.items()}
    return Pool(10.0, nodes)


def test_a_run_without_nodes_says_where_they_are_and_whether_they_can_come():
    """Else it would be "no live node in the pool", and the operator would look for what is there."""
    pool = pool_of(a="one", b=None)
    assert pool.of("one").nobody(100.0) == ""
    assert pool.of("two").nobody(100.0) == (
        "none of the pool's 2 live nodes is placed in this run; kept away by a join string that names another run: 1"
    )
    assert pool_of(b=None).of("two").nobody(100.0) == "none of the pool's 1 live nodes is placed in this run"


def test_nodes_that_are_dead_are_nowhere():
    """Seen from any run, or from none."""
    for view in (pool_of(a="one").of("two"), pool_of(a="one")):
        assert view.nobody(1000.0) == "no live node in the pool"
