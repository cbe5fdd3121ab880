"""`kill -9` of a coordinator under load, and of its database: nothing acknowledged is lost or doubled."""

from __future__ import annotations

import time

import pytest
import trio
from e2e.kill_pool import HEARTBEAT_SECONDS, kill_pool

from echo2.coordinator.ledger import RECONNECT_SECONDS_MAX
from echo2.node.membership import REJOIN_SECONDS_MAX

pytestmark = pytest.mark.e2e

QUICK_NODES, QUICK_KILLS = 12, 3
NODES, KILLS, DATABASE_KILLS = 50, 50, 10
BACK_OFF_SECONDS = REJOIN_SECONDS_MAX
"""Beyond the two heartbeats: a node that has just failed to reach it comes again after that at the latest. What it took
is printed."""


GOES_ON_SECONDS_MAX = 120.0
"""Until the next rollout is acknowledged, where other tests use the same cores."""


async def killed(folder, *, nodes, kills, seed, database=""):
    async with kill_pool(folder, nodes=nodes, seed=seed, database=database, slack_seconds=BACK_OFF_SECONDS) as pool:
        for _ in range(kills):
            await pool.work()
            await pool.kill()
        await pool.settle()
        pool.check_sums()
        slowest = sorted(pool.back_seconds)
        print(
            f"{kills} kills, {len(pool.acknowledged)} rollouts acknowledged, {pool.learner.version} steps; all nodes "
            f"back within {slowest[len(slowest) // 2]:.1f} s (median), {slowest[-1]:.1f} s (most)"
        )
        assert len(pool.back_seconds) == kills


async def test_three_kills_of_a_coordinator_lose_and_double_nothing(tmp_path):
    """A dozen nodes; two heartbeats and a back-off after each kill all are back, and all that was acknowledged."""
    await killed(tmp_path, nodes=QUICK_NODES, kills=QUICK_KILLS, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
async def test_fifty_kills_of_a_coordinator_lose_and_double_nothing(tmp_path, request, kind):
    """The same with fifty nodes and fifty kills, on either database."""
    database = request.getfixturevalue("postgresql").emptied() if kind == "postgresql" else ""
    await killed(tmp_path, nodes=NODES, kills=KILLS, seed=2, database=database)


@pytest.mark.slow
async def test_ten_kills_of_postgresql_lose_and_double_nothing(tmp_path, postgresql):
    """The server dies under a coordinator at work and comes back: the coordinator too, without a restart of its own."""
    database = postgresql.emptied()
    async with kill_pool(tmp_path, nodes=NODES, seed=3, database=database, slack_seconds=BACK_OFF_SECONDS) as pool:
        for _ in range(DATABASE_KILLS):
            await pool.work()
            await trio.to_thread.run_sync(postgresql.kill)
            await pool.work()
            postgresql.start()  # not in a thread: it would end with that (`postgresql._end_with_us`)
            await pool.all_are_heard_of(time.monotonic(), RECONNECT_SECONDS_MAX + 2 * HEARTBEAT_SECONDS)
            await pool.goes_on(GOES_ON_SECONDS_MAX)
            await trio.to_thread.run_sync(pool.check_acknowledged)
        assert pool.coordinator.process.poll() is None
        assert pool.coordinator.starts == 1
        await pool.settle()
        pool.check_sums()
