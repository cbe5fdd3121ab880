"""The event log tells the tables again."""

from __future__ import annotations

from contextlib import closing, suppress

import msgpack
import pytest
import sqlalchemy as sa
import trio
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from echo2.coordinator import history, records, schema
from echo2.coordinator.history import KEYS, Delete, Insert, Update
from echo2.coordinator.ledger import open_ledger
from echo2.p2p.errors import Refused


def replayed(world):
    with closing(open_ledger(world.url)) as ledger, ledger.reading() as connection:
        return history.replay(history.read_bodies(connection)), history.read_state(connection)


def actions(world):
    with closing(open_ledger(world.url)) as ledger, ledger.reading() as connection:
        return set(connection.scalars(sa.select(schema.events.c.action)))


async def test_a_whole_run_is_told_again(autojump_clock, world, tools):
    """Admission, leases and how they ended, every rollout's states, operators' actions: the tables."""
    async with world.serving(), world.learner() as learner, world.node(10) as node, world.node(11) as other:
        await learner.hello()
        await learner.publish()
        await node.join()
        await other.join()
        await node.work()
        (lost,) = (await other.lease(samples=2)).leases
        rollouts = []
        await node.lease(samples=2)
        while len(rollouts) < 24:
            await node.heartbeat()
            await node.work(samples=8, wait=5.0)
            rollouts += (await learner.fetch(wait=5.0)).rollouts
        await learner.train(rollouts[:8])
        await learner.report([tools.done(rollouts[8], state="stale", step=1, reason="too old")])
        world.service.suspend_node(other.peer_id, actor="operator", reason="odd \0 rewards")
        world.service.restore_node(other.peer_id, actor="operator", reason="talked to its owner")
        world.service.pause_run("r1", actor="operator", reason="lunch")
        world.service.resume_run("r1", actor="operator", reason="fed")
        await learner.publish(version=1)
        await node.join(hello=False)
        await node.work(samples=2, wait=5.0)
        world.service.stop_run("r1", actor="operator", reason="enough")
        with pytest.raises(Refused):
            await node.hello(versions=(99,))
    told, tables = replayed(world)
    assert told == tables
    assert tables["leases"][lost.lease_id,]["ended"]
    assert {row["state"] for row in tables["rollouts"].values()} >= {"consumed", "stale", "evaluated", "withdrawn"}
    assert actions(world) >= {
        *("token made", "node admitted", "run begun", "published", "leases granted", "leases ended"),
        *("rollouts arrived", "rollouts scored", "report", "node suspended", "node active", "run stopped"),
    }


async def test_decisions_are_in_the_log_and_change_no_table(autojump_clock, world, tools):
    """Whom the scheduler activated and released: lines for people, and for itself after a restart."""
    world.activation = {"prices": {tools.identity(number).peer_id: 0.1 * number for number in (10, 11)}}
    async with world.serving(), world.learner() as learner, world.node(10) as node, world.node(11) as other:
        await learner.hello()
        await learner.publish()
        await node.join()
        await trio.sleep(15.0)
        await other.join()
        for _ in range(6):
            await trio.sleep(10.0)
            await other.heartbeat()
        standing_by = [view.peer for view in world.service.nodes_view() if view.standby]
        assert standing_by == [node.peer_id]
    told, tables = replayed(world)
    assert told == tables
    assert actions(world) >= {"node activated", "node released"}
    async with world.serving():
        assert [view.peer for view in world.service.nodes_view() if view.standby] == standing_by


async def test_the_audit_log_is_for_people(autojump_clock, world, tools):
    """The daily flow is not in it; who did what, and why, is."""
    async with world.serving(), world.learner() as learner, world.node(10) as node:
        await learner.hello()
        await learner.publish()
        await node.join()
        await node.work()
        world.service.suspend_node(node.peer_id, actor="operator", reason="odd rewards")
        lines = world.service.events_view()
    assert [line.action for line in lines][:1] == ["node suspended"]
    assert (lines[0].actor, lines[0].reason) == ("operator", "odd rewards")
    assert not {"leases granted", "rollouts arrived"} & {line.action for line in lines}


TABLES = sorted(KEYS)
WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)


def value_of(column):
    kind = column.type.python_type
    values = {
        int: st.integers(0, 2**31 - 1),
        float: st.floats(allow_nan=False, allow_infinity=False, width=32),
        bytes: st.binary(max_size=8),
        str: WORDS,
    }[kind]
    return st.none() | values if column.nullable else values


def row_of(name):
    columns = [column for column in schema.metadata.tables[name].c if column.name != "id" or name == "rollouts"]
    return st.fixed_dictionaries({column.name: value_of(column) for column in columns})


class Histories(RuleBasedStateMachine):
    """Any rows at all, put into the tables, changed and taken away through `records.record`, and rolled back."""

    url = "sqlite://"

    def __init__(self):
        super().__init__()
        self.ledger = open_ledger(self.url)
        self.keys = {name: [] for name in TABLES}

    def teardown(self):
        self.ledger.close()

    def record(self, *changes):
        with self.ledger.transaction() as connection:
            records.record(connection, changes, wall=1.0, actor="a", action="b", kind="flow")

    @rule(data=st.data(), name=st.sampled_from(TABLES))
    def insert(self, data, name):
        left_out = history.CONTENT.get(name, frozenset())
        rows = data.draw(st.lists(row_of(name), min_size=1, max_size=3))
        columns = [column for column in rows[0] if column not in left_out]
        content = [{column: row[column] for column in row if column in left_out} for row in rows]
        change = Insert(name, columns, [[row[column] for column in columns] for row in rows], {}, content)
        try:
            self.record(change)
        except sa.exc.IntegrityError:
            return  # it is there already: then neither table nor log has any of it
        self.keys[name] += [tuple(row[key] for key in KEYS[name]) for row in rows]

    @rule(data=st.data(), name=st.sampled_from(TABLES))
    def update(self, data, name):
        if not self.keys[name]:
            return
        rows = [column for column in schema.metadata.tables[name].c if column.name not in {*KEYS[name], "id"}]
        rows = [column for column in rows if column.name not in history.CONTENT.get(name, frozenset())]
        changed = data.draw(st.lists(st.sampled_from(rows), min_size=1, max_size=3, unique=True))
        key = data.draw(st.sampled_from(self.keys[name]))
        values = [data.draw(value_of(column)) for column in changed]
        with suppress(sa.exc.IntegrityError):  # two receipts of one number
            self.record(Update(name, [column.name for column in changed], [(*key, *values)]))

    @rule(data=st.data(), name=st.sampled_from(TABLES))
    def delete(self, data, name):
        if not self.keys[name]:
            return
        key = self.keys[name].pop(data.draw(st.integers(0, len(self.keys[name]) - 1)))
        self.record(Delete(name, [key]))

    @invariant()
    def told_again(self):
        with self.ledger.reading() as connection:
            assert history.replay(history.read_bodies(connection)) == history.read_state(connection)


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=20, stateful_step_count=15, deadline=None)


def test_an_update_of_nothing_is_a_defect(database_url):
    """And then neither table nor log has it."""
    change = history.update("nodes", ["nobody"], {"state": "active"})
    with closing(open_ledger(database_url)) as ledger:
        with pytest.raises(LookupError, match="no row"), ledger.transaction() as connection:
            records.record(connection, [change], wall=1.0, actor="a", action="b")
        with ledger.reading() as connection:
            assert list(history.read_bodies(connection)) == []


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ([["=", "nodes", ["peer"], ["state"], [["p", "active"]]]], "which is not there"),
        ([["-", "nodes", ["peer"], [["p"]]]], "which is not there"),
        ([["+", "nodes", {"peer": "p"}, [], [[], []]]], "a second time"),
    ],
)
def test_a_log_with_a_gap_is_found(body, told):
    """A body that does not follow from those before it."""
    with pytest.raises(ValueError, match=told):
        history.replay([msgpack.packb(body)])


def test_replay_goes_on_from_a_state():
    """Two halves are the whole."""
    bodies = [
        history.encode([history.insert("closed_groups", {"run": "r", "ordinal": ordinal, "reason": ""})])
        for ordinal in range(4)
    ]
    assert history.replay(bodies[2:], history.replay(bodies[:2])) == history.replay(bodies)


ODD = ["", "NULL", '{"a",b}', "back\\slash", "quote'\"", "%s %b", "ünïcode \U0001f600", " space ", "\x01\n\t", ","]


def test_many_rows_at_once_are_the_same_rows(database_url):
    """One statement of arrays, where it is used: no value is taken for another, nor for nothing."""
    leases = [
        (bytes([number, 0, 39, 92]) * 4, text, "train", number, 2**31 - 1, 0, -1, bytes(number), number)
        for number, text in enumerate(ODD)
    ]
    leases = [(*row, None if row[0][0] % 2 else 7) for row in leases]
    entries = [
        records.RolloutEntry(
            number + 1, bytes([number]) * 16, 0, text, "train", 0, 0, "held", "", "stop", bytes(256), b"\0'\\", (1, 2)
        )
        for number, text in enumerate(ODD)
    ]
    arrivals = [records.Verdict(entry, "held", entry.peer) for entry in entries]
    shared = {"run": "r", "duration_seconds": 0.1, "granted": 1e300, "ended": None}
    details = {"a": 0.1}
    rewards = [None, 0.1, -0.0, 1e-300, 1.0] * 2
    changed = [
        records.Verdict(entry, "admitted", text, None, reward, entry.id, None, None if entry.id % 2 else details)
        for entry, text, reward in zip(entries, ODD[::-1], rewards, strict=True)
    ]
    with closing(open_ledger(database_url)) as ledger:
        for changes in (
            [Insert("leases", records.LEASE_COLUMNS, leases, shared)],
            records.arrived_rollouts("r", arrivals, wall=2.5),
            [records.changed_rollouts(changed)],
            [Update("leases", ("ended",), [(row[0], text) for row, text in zip(leases, ODD, strict=True)])],
        ):
            with ledger.transaction() as connection:
                records.record(connection, changes, wall=1.0, actor="a", action="b", kind="flow")
        with ledger.reading() as connection:
            state = history.read_state(connection)
            assert history.replay(history.read_bodies(connection)) == state
            loaded = records.load_unfinished(connection, "r")
    assert [row["ended"] for row in state["leases"].values()] == ODD
    assert [row["reason"] for row in state["rollouts"].values()] == ODD[::-1]
    assert [(entry.peer, entry.tokens, entry.logprobs, entry.spans) for entry in loaded] == [
        (text, bytes(256), b"\0'\\", (1, 2)) for text in ODD
    ]
    assert [dict(entry.details or {}) for entry in loaded] == [{}, details] * 5
