"""The coordinator is killed and started again: what it acknowledged is there, once."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing

import pytest
import trio
import trio.testing

from echo2.coordinator import schema
from echo2.coordinator.cells import check_cell
from echo2.coordinator.ledger import LedgerUnavailable, open_ledger, open_ledger_to_read, sqlite_url
from echo2.p2p.errors import ConfigurationError, Refused
from echo2.tasks.scorer import InlineScorer, ScorerUnavailable


async def begin(world, learner, node):
    await learner.hello()
    await learner.publish()
    await node.join()
    await node.work()
    await trio.testing.wait_all_tasks_blocked(0.1)


async def test_leases_that_were_out_stay_valid(autojump_clock, world, tools):
    """A lease granted before the kill is answered after it; nothing of it was given to another meanwhile."""
    async with world.learner() as learner, world.node(10) as node:
        async with world.serving():
            await begin(world, learner, node)
            (lease,) = (await node.lease(samples=2)).leases
        async with world.serving():
            await node.join(hello=False, held=1)
            (other,) = (await node.lease(samples=2)).leases
            assert (other.ordinal, other.sample_first) == (0, 2)
            assert [ack.state for ack in await node.submit(tools.answer(lease), tools.answer(other))] == ["held"] * 2
            assert world.run.rollouts.submitted == 4


async def test_held_rollouts_are_scored_after_the_restart(autojump_clock, world, tools):
    """Acknowledged and not yet scored when the kill came: the reward comes later, the rollout once."""

    class Stuck:
        confinement = ()

        async def score(self, items):
            await trio.sleep_forever()

    async with world.learner() as learner, world.node(10) as node:
        async with world.serving():
            await begin(world, learner, node)
            assert world.run.evaluations[0].complete
        world.scorer = Stuck()
        async with world.serving():
            await node.join(hello=False)
            await node.work(samples=2)
            assert world.run.rollouts.held == 2
        world.scorer = None
        async with world.serving():
            rollouts = (await learner.fetch(wait=5.0)).rollouts
            assert [rollout.sequence for rollout in rollouts] == [1, 2]
            assert (world.run.rollouts.submitted, world.run.rollouts.admitted) == (2, 2)


async def test_resending_across_a_restart_counts_once(autojump_clock, world, tools):
    """The acknowledgement was lost with the process: the node's resend finds its rollouts recorded."""
    async with world.learner() as learner, world.node(10) as node:
        async with world.serving():
            await begin(world, learner, node)
            (lease,) = (await node.lease(samples=2)).leases
            await node.submit(tools.answer(lease))
        async with world.serving():
            (ack,) = await node.submit(tools.answer(lease))
            assert ack.state in {"held", "admitted"}
            assert world.run.rollouts.submitted == 2


async def test_the_views_are_the_same_after_a_restart(autojump_clock, world, tools):
    """Counts by state, evaluations, steps, receipts and pacing survive; the run goes on to its end."""
    async with world.learner() as learner, world.node(10) as node:
        async with world.serving():
            await begin(world, learner, node)
            rollouts = []
            while len(rollouts) < 24:
                await node.work(samples=8, wait=1.0)
                rollouts += (await learner.fetch(wait=1.0)).rollouts
            await learner.train(rollouts[:8])
            await learner.report([tools.done(rollouts[8], "stale", step=9, reason="staleness 9 is above 2")])
            await node.lease(samples=1)
            before, receipts = world.run, await node.receipts()
        async with world.serving():
            await node.join(hello=False, held=1)
            await learner.fetch(after=rollouts[-1].sequence)
            after = world.run
            assert after.rollouts == before.rollouts
            assert (after.reserved, after.outstanding) == (before.reserved, before.outstanding) == (24, 1)
            assert (after.evaluations, after.series) == (before.evaluations, before.series)
            assert (after.learner_version, after.bubble) == (1, before.bubble)
            assert await node.receipts() == receipts
            redelivered = (await learner.fetch(after=0)).rollouts
            assert [r.sequence for r in redelivered] == [r.sequence for r in rollouts[9:]]


async def test_admitted_sequences_never_come_twice(autojump_clock, world):
    """After a restart the sequence goes on where it was, even when all earlier ones are consumed."""
    async with world.learner() as learner, world.node(10) as node:
        async with world.serving():
            await begin(world, learner, node)
            await node.work(samples=4)
            first = (await learner.fetch(wait=5.0)).rollouts
            await learner.train(first)
        async with world.serving():
            await node.join(hello=False)
            await node.work(samples=4)
            second = (await learner.fetch(wait=5.0)).rollouts
            assert [r.sequence for r in (*first, *second)] == list(range(1, len(first) + len(second) + 1))


async def test_a_restart_in_the_middle_of_the_baseline_goes_on_with_it(autojump_clock, world, tools):
    """Two of four prompts are answered; only the other two are asked again."""
    async with world.learner() as learner, world.node(10) as node:
        async with world.serving():
            await learner.publish()
            await node.join()
            await node.work(samples=2)
            await trio.testing.wait_all_tasks_blocked(0.1)
            assert world.run.waiting == "baseline evaluation: 2 of 4"
        async with world.serving():
            await node.join(hello=False)
            assert world.run.waiting == "baseline evaluation: 2 of 4"
            leases = await node.work()
            assert [lease.ordinal for lease in leases] == [2, 3]
            await trio.testing.wait_all_tasks_blocked(0.1)
            assert world.run.evaluations[0].complete


async def test_suspension_survives_a_restart(autojump_clock, world):
    """The node stays out, and the learner is asked again to withdraw."""
    async with world.learner() as learner, world.node(10) as node:
        async with world.serving() as service:
            await begin(world, learner, node)
            await node.work(samples=2)
            seen = (await learner.fetch(wait=5.0)).rollouts
            service.suspend_node(node.peer_id, actor="operator", reason="forged")
        async with world.serving() as service:
            assert (await node.hello()).node_state == "suspended"
            assert {key.sample for key in (await learner.fetch()).withdraw} == {r.sample for r in seen}
            service.restore_node(node.peer_id, actor="operator", reason="appeal")
            assert (await node.join(hello=False)).node_state == "active"


async def test_a_ledger_that_cannot_be_written_refuses_and_keeps_nothing(autojump_clock, world, tools, monkeypatch):
    """Disk full: no acknowledgement, a time to come again, the trouble on show; then the same request succeeds."""
    async with world.serving() as service, world.learner() as learner, world.node(10) as node:
        await begin(world, learner, node)
        (lease,) = (await node.lease(samples=2)).leases
        ledger = service._office.ledger
        whole = ledger.transaction

        def full():
            ledger.trouble = "database or disk is full"
            raise LedgerUnavailable(ledger.trouble)

        monkeypatch.setattr(ledger, "transaction", full)
        with pytest.raises(Refused) as refused:
            await node.submit(tools.answer(lease))
        assert (refused.value.code, refused.value.retry_seconds) == ("ledger_unavailable", 5.0)
        with pytest.raises(Refused):
            await node.lease(samples=2)
        assert service.pool_view().trouble == "database or disk is full"
        assert (world.run.rollouts.submitted, world.run.outstanding) == (0, 2)
        monkeypatch.setattr(ledger, "transaction", whole)
        await trio.sleep(1.0)
        assert service.pool_view().trouble == ""
        (ack,) = await node.submit(tools.answer(lease))
        assert ack.state == "held"


async def test_a_scorer_that_is_gone_is_waited_for(autojump_clock, world):
    """Rollouts stay held, the reason is shown, and all are scored once the scorer is back."""

    class Flaky(InlineScorer):
        gone = False

        async def score(self, items):
            if self.gone:
                raise ScorerUnavailable("no scorer process")
            return await super().score(items)

    world.scorer = Flaky({world.task.name: world.task})
    async with world.serving() as service, world.learner() as learner, world.node(10) as node:
        await begin(world, learner, node)
        world.scorer.gone = True
        await node.work(samples=2)
        await trio.sleep(0.1)
        assert service.pool_view().trouble == "no scorer process"
        assert world.run.rollouts.held == 2
        world.scorer.gone = False
        assert len((await learner.fetch(wait=20.0)).rollouts) == 2
        assert service.pool_view().trouble == ""


ODD_CELLS = """\
nodes SET addresses = '[bad'
nodes SET addresses = '5'
nodes SET addresses = x'ff'
nodes SET addresses = '[5]'
nodes SET addresses = CAST(x'ff5b' AS TEXT)
nodes SET state = 'odd'
nodes SET role = 'x'
nodes SET name = x'00'
runs SET terms = '[]'
runs SET terms = '{'
runs SET state = 'odd'
runs SET learner_version = 'x'
runs SET learner_epoch = -1
manifests SET payload = x'00'
manifests SET payload = 'text'
manifests SET signature = x'00'
manifests SET broadcast_seconds = 'soon'
steps SET metrics = x'c1'
steps SET metrics = 'text'
rollouts SET state = 'odd'
rollouts SET kind = 'odd'
rollouts SET receipt_sequence = 'x' || receipt_sequence
rollouts SET finish = 'odd' WHERE state = 'held'
contents SET spans = x'00' WHERE id IN (SELECT id FROM rollouts WHERE state = 'held')
rollouts SET details = '{' WHERE state = 'held'
contents SET tokens = 'text' WHERE id IN (SELECT id FROM rollouts WHERE state = 'held')
rollouts SET sample = 'x' || sample WHERE state = 'held'
rollouts SET peer = 'nobody' WHERE state = 'admitted'
contents SET logprobs = 'text' WHERE id IN (SELECT id FROM rollouts WHERE state = 'admitted')
contents SET id = id + 1000 WHERE id IN (SELECT id FROM rollouts WHERE state = 'held')
leases SET sample_first = 'x'
leases SET ordinal = 'x'
leases SET lease_id = x'00' WHERE id = (SELECT max(id) FROM leases)
leases SET kind = 'odd' WHERE kind = 'train'
leases SET ended = x'00' WHERE kind = 'train'
leases SET sample_count = 1000 WHERE kind = 'train'
evaluations SET purpose = 'odd'
evaluations SET samples = 0, finished = NULL
evaluations SET count = 'x'
postings SET hash = 'text'
postings SET hash = x'00'
meta SET value = x'00' WHERE key = 'secret'
meta SET value = 'text' WHERE key = 'secret'
meta SET key = 'gone' WHERE key = 'secret'
""".splitlines()


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_a_ledger_that_is_not_as_it_was_written_is_told_of(autojump_clock, world, tools):
    """One error with what to do, whatever the cell, before anything is served; no seed is made anew."""

    class Stuck:
        confinement = ()

        async def score(self, items):
            await trio.sleep_forever()

    async with world.learner() as learner, world.node(10) as node:
        async with world.serving():
            await begin(world, learner, node)
            rollouts = []
            while len(rollouts) < 12:
                await node.work(samples=8, wait=1.0)
                rollouts += (await learner.fetch(wait=1.0)).rollouts
            await learner.train(rollouts[:8])
        world.scorer = Stuck()
        async with world.serving():
            await node.join(hello=False)
            await node.work(samples=2)
            await node.lease(samples=2)
            assert world.run.rollouts.held == 2
            assert world.run.rollouts.admitted >= 4
    whole = world.path.read_bytes()
    untold = []
    for cell in (None, *ODD_CELLS):
        for file in world.path.parent.glob(f"{world.path.name}*"):
            file.unlink()
        world.path.write_bytes(whole)
        with closing(sqlite3.connect(world.path)) as raw, raw:
            assert cell is None or raw.execute(f"UPDATE {cell}").rowcount, cell
        with closing(open_ledger(sqlite_url(world.path))) as ledger:
            try:
                assert world.make(ledger, None).runs_view()
            except (ConfigurationError, LedgerUnavailable) as error:
                if not re.search(r"is damaged.* restore a backup of it, or move it away", str(error)):
                    raise
            else:
                untold.append(cell)
    assert untold == [None]


@pytest.mark.parametrize("value", ["x'00'", "'text'", "CAST(x'ff' AS TEXT)", "5"])
def test_a_damaged_version_is_told_of(tmp_path, value):
    """By whoever opens the ledger, to write or to read."""
    path = tmp_path / "ledger"
    open_ledger(sqlite_url(path)).close()
    with closing(sqlite3.connect(path)) as raw, raw:
        raw.execute(f"UPDATE meta SET value = {value}")
    for opened in (lambda: open_ledger(sqlite_url(path)), lambda: open_ledger_to_read(sqlite_url(path))):
        with pytest.raises(ConfigurationError, match=r"the ledger .* (is damaged|has schema version|UTF-8)"):
            opened()


def test_a_schema_that_is_no_text_is_told_of(tmp_path):
    """SQLite quotes it in its error, and that is then no UTF-8: met at the start, or later."""
    path = tmp_path / "ledger"
    with closing(open_ledger(sqlite_url(path))) as ledger:
        for section in (ledger.transaction, ledger.reading):
            with pytest.raises(LedgerUnavailable, match="is damaged"), section():
                b"malformed database schema (\xff)".decode()
    whole = b"tabletokenstokens"
    assert path.read_bytes().count(whole) == 1
    path.write_bytes(path.read_bytes().replace(whole, b"table\xff\xfekenstokens"))
    for opened in (lambda: open_ledger(sqlite_url(path)), lambda: open_ledger_to_read(sqlite_url(path))):
        with pytest.raises(ConfigurationError, match=r"the ledger .*malformed database schema .* restore a backup"):
            opened()


def test_amounts_alone_may_be_below_nothing():
    """A payment is taken off a balance; no other whole number of the ledger is negative."""
    check_cell(schema.postings.c.amount_micros, -1)
    with pytest.raises(ValueError, match=r"postings\.quantity is -1"):
        check_cell(schema.postings.c.quantity, -1)


@pytest.mark.parametrize("column", [schema.events.c.kind, schema.postings.c.kind, schema.postings.c.unit])
def test_words_of_the_log_and_of_postings_are_known(column):
    """As of every column that holds one of a few words."""
    with pytest.raises(ValueError, match="is 'odd'"):
        check_cell(column, "odd")
