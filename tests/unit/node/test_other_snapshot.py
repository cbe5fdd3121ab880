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
