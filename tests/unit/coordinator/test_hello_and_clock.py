"""Hello costs a key's own turn and no needless write; a snapshot of a wrong clock is not taken in silence."""

from __future__ import annotations

import pytest
import sqlalchemy as sa
import trio
from unit.coordinator.conftest import WALL

from echo2.coordinator import schema
from echo2.coordinator.admission_limits import HELLO_BURST, HELLO_SECONDS, KEYS_MAX, HelloRate
from echo2.p2p.errors import Refused

pytestmark = pytest.mark.slow_on_postgresql


def test_a_key_may_say_so_many_hellos_and_then_one_at_a_time():
    """Twenty at once, the next after 2 s; asking too early costs nothing; another key has its own."""
    rate = HelloRate()
    assert [rate.count("a", 5.0) for _ in range(HELLO_BURST)] == [0.0] * HELLO_BURST
    assert [rate.count("a", 5.0), rate.count("a", 6.5), rate.count("b", 6.5)] == [HELLO_SECONDS, 0.5, 0.0]
    assert [rate.count("a", 7.0), rate.count("a", 7.0)] == [0.0, HELLO_SECONDS]
    assert [rate.count("a", 200.0) for _ in range(HELLO_BURST + 1)] == [0.0] * HELLO_BURST + [HELLO_SECONDS]


def test_no_more_keys_are_counted_than_are_kept():
    """Strangers' keys take a bounded place; those heard of longest ago are forgotten."""
    rate = HelloRate()
    for number in range(KEYS_MAX + 10):
        rate.count(str(number), 0.0)
    assert len(rate._full_at) == KEYS_MAX


async def test_a_flood_of_hellos_is_told_when_to_come_again(autojump_clock, world):
    """The refusal names the seconds, and then the node is let in."""
    async with world.serving(), world.node(10) as node:
        token = world.token()
        for _ in range(HELLO_BURST):
            await node.hello(token)
        with pytest.raises(Refused) as refused:
            await node.hello(token)
        assert refused.value.code == "too_often"
        assert 0 < refused.value.retry_seconds <= HELLO_SECONDS
        await trio.sleep(refused.value.retry_seconds)
        assert (await node.hello(token)).node_state == "active"


async def test_a_hello_that_says_nothing_new_is_not_written(autojump_clock, world):
    """Nor does it need a ledger that can be written; another address or name does, also of the learner."""
    async with world.serving() as service, world.node(10) as node, world.learner() as learner:
        await node.hello(world.token())
        await learner.hello()

        def hellos():
            with service._office.ledger.reading() as connection:
                return list(connection.scalars(sa.select(schema.nodes.c.last_hello)))

        before = hellos()
        await trio.sleep(10)
        await node.hello()
        await learner.hello()
        assert hellos() == before
        service._admission._recorded.clear()  # as after a restart
        await node.hello()
        await learner.hello()
        assert all(now > then for now, then in zip(hellos(), before, strict=True))


@pytest.mark.parametrize(
    ("offset_hours", "fault"),
    [
        (-2.0, r"was made 2\.0 h from now"),
        (31 * 24.0, r"expires -24\.0 h from now"),
        (720.0, r"expires -?0\.0 h from now"),
    ],
)
async def test_a_snapshot_of_another_time_is_refused_with_the_reason(autojump_clock, world, offset_hours, fault):
    """The learner is told both clocks' difference, and may try again once one of them is set."""
    async with world.serving() as service, world.learner() as learner:
        await learner.hello()
        world.wall_offset = WALL + offset_hours * 3600
        with pytest.raises(Refused, match=fault) as refused:
            await learner.publish()
        assert (refused.value.code, refused.value.retry_seconds) == ("clock", 60.0)
        assert "compare the clocks" in refused.value.detail
        world.wall_offset = WALL
        await learner.publish()
        assert service.run_view("r1").version == 0


async def test_a_snapshot_that_waited_is_taken_and_said(autojump_clock, world, caplog):
    """The coordinator was down for a day while the learner kept asking: that is no wrong clock."""
    async with world.serving() as service, world.learner() as learner:
        await learner.hello()
        world.wall_offset = WALL + 24 * 3600
        await learner.publish()
        assert service.run_view("r1").version == 0
    assert "was made 24.0 h ago" in caplog.text
