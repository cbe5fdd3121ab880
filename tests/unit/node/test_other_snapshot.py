"""A coordinator whose notice names one snapshot and whose manifest is another's."""

from __future__ import annotations

import trio


async def until(condition, *, seconds=600.0):
    with trio.fail_after(seconds):
        while not condition():  # noqa: ASYNC110 - a test looks from outside, and virtual time costs nothing
            await trio.sleep(0.25)


async def test_a_manifest_of_another_snapshot_is_refused_and_asked_for_again_after_a_pause(autojump_clock, pool):
    """The node keeps what it has, says why, and does not ask again and again without a breath between."""
    await pool.publish(0)
    async with pool.node() as node:
        await until(lambda: node.status.version == 0)
        pool.notice_changes |= {"manifest_hash": b"\x07" * 32, "version": 1}
        asked = pool.manifests_asked
        await until(lambda: "another snapshot" in node.status.last_error)
        await trio.sleep(60)
        assert asked < pool.manifests_asked < asked + 20
        assert node.status.version == 0
        pool.notice_changes.clear()
        await pool.publish(2)
        await until(lambda: node.status.version == 2)


async def test_a_notice_that_calls_a_snapshot_by_another_version_is_not_asked_after_without_a_pause(
    autojump_clock, pool
):
    """Installed, it would not be what the notice calls newest: it is left, and asked for again after a pause."""
    await pool.publish(1)
    pool.notice_changes = {"version": 2}
    async with pool.node() as node:
        await trio.sleep(60)
        assert node.status.version is None
        assert "version 1" in node.status.last_error
    assert pool.manifests_asked < 60
