"""A run that publishes adapters: the node fetches the base first, keeps it, and swaps adapters on it."""

from __future__ import annotations

import trio

from echo2.node.fake_engine import FakeEngine
from echo2.p2p.memory_store import MemoryStore

MINUTES = 120.0
DAYS_31 = 31 * 24 * 3600.0


async def until(holds, seconds=MINUTES):
    with trio.fail_after(seconds):
        while not holds():  # noqa: ASYNC110 - the outside has no event to wait on
            await trio.sleep(0.05)


def held(pool):
    return [(snapshot.manifest.version, snapshot.manifest.kind) for snapshot in pool.store.snapshots()]


async def test_adapters_are_swapped_on_the_base(autojump_clock, pool):
    """The base is loaded and downloaded once, each adapter once, and the base outlives every tidying."""
    base = await pool.publish(0)
    async with pool.node(snapshots_kept=2) as node:
        await until(lambda: node.status.version == 0)
        sha256 = pool.engine.loaded
        for version in (2, 4, 6, 8):
            await pool.publish(version, base=base, data=bytes([version]) * 5000)
            await until(lambda version=version: node.status.version == version)
            assert pool.engine.base == sha256 != pool.engine.loaded
    assert pool.engine.loads == 5
    await trio.sleep(1)
    assert held(pool) == [(0, "full"), (6, "adapter"), (8, "adapter")]


async def test_a_late_node_fetches_the_base_first(autojump_clock, pool):
    """It hears of an adapter only, and gets what that is worth nothing without."""
    base = await pool.publish(0)
    await pool.publish(2, base=base, data=b"adapter" * 500)
    pool.work = 4
    async with pool.node() as node:
        await until(lambda: node.status.receipts == {"consumed": 8})
        assert node.status.version == 2
    assert held(pool) == [(0, "full"), (2, "adapter")]
    assert {piece.manifest_hash for piece in pool.received} == {pool.published[2]}


async def test_a_restarted_node_works_with_what_is_on_its_disk(autojump_clock, pool):
    """Base and adapter are both there: nothing is downloaded again."""
    base = await pool.publish(0)
    await pool.publish(2, base=base, data=b"adapter" * 500)
    async with pool.node() as node:
        await until(lambda: node.status.version == 2)
    asked, pool.engine = pool.manifests_asked, FakeEngine()
    async with pool.node() as node:
        await until(lambda: node.status.version == 2)
        assert pool.engine.base is not None
    assert pool.manifests_asked == asked


async def test_a_base_that_was_lost_is_fetched_again_although_it_is_older(autojump_clock, pool):
    """The adapter that was accepted vouches for it: no older manifest is taken, but for that one."""
    base = await pool.publish(0)
    await pool.publish(2, base=base, data=b"adapter" * 500)
    async with pool.node() as node:
        await until(lambda: node.status.version == 2)
    await pool.store.discard(base)
    pool.engine = FakeEngine()
    async with pool.node() as node:
        await until(lambda: node.status.version == 2)
    assert held(pool) == [(0, "full"), (2, "adapter")]


async def test_a_base_older_than_any_manifest_may_be_is_still_the_base(autojump_clock, pool):
    """A run may last longer than a manifest may be accepted: the adapter's manifest is fresh."""
    base = await pool.publish(0)
    await pool.publish(2, base=base, data=b"adapter" * 500, created_seconds=DAYS_31)
    pool.notice_changes = {"coordinator_time_seconds": DAYS_31 + 60}
    async with pool.node() as node:
        await until(lambda: node.status.version == 2)
    assert held(pool) == [(0, "full"), (2, "adapter")]


async def test_another_snapshot_in_the_bases_place_is_refused(autojump_clock, pool):
    """The manifest hash in the adapter's manifest is the only base there is; an honest one then mends it."""
    base = await pool.publish(0)
    other = await pool.publish(1, data=b"another" * 900)
    await pool.publish(2, base=base, data=b"adapter" * 500)
    pool.base_instead = other
    async with pool.node() as node:
        await trio.sleep(60)
        assert node.status.version is None
        assert isinstance(pool.store, MemoryStore)
        assert pool.store.snapshots() == ()
        pool.base_instead = None
        await until(lambda: node.status.version == 2, seconds=900)


async def test_an_adapter_that_cannot_be_used_leaves_the_one_before(autojump_clock, pool):
    """The node goes on with the old adapter and says why; the next one is used."""
    base = await pool.publish(0)
    async with pool.node() as node:
        await until(lambda: node.status.version == 0)
        await pool.publish(2, base=base, data=b"good" * 500)
        await until(lambda: node.status.version == 2)
        good = pool.engine.loaded
        await pool.publish(4, base=base, data=b"bad" * 500)
        pool.engine.refused.add(pool.published[1].snapshot_sha256)
        await trio.sleep(30)
        assert (node.status.version, pool.engine.loaded) == (2, good)
        await pool.publish(6, base=base, data=b"fine" * 500)
        await until(lambda: node.status.version == 6)
