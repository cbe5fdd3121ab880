"""PostgreSQL killed under the coordinator, at every moment of a transaction: a real server, a real `kill -9`."""

from __future__ import annotations

import random
from contextlib import closing, contextmanager, suppress
from itertools import pairwise

import psycopg
import pytest
import sqlalchemy as sa
import trio

from echo2.coordinator import history, records, schema
from echo2.coordinator.ledger import RECONNECT_SECONDS_MAX, LedgerUnavailable, open_ledger
from echo2.p2p.errors import ConfigurationError, Refused
from echo2.p2p.messages import Hello, Welcome


@pytest.fixture
def server(postgresql):
    """Running before the test, and after it."""
    yield postgresql
    if postgresql.process.poll() is not None:
        postgresql.start()


@pytest.fixture
def database_url(server):
    return server.emptied()


class Time:
    now = 0.0

    def __call__(self):
        return self.now


def add_event(ledger, reason):
    with ledger.transaction() as connection:
        records.add_event(connection, wall=1.0, actor="a", action="b", reason=reason)


def reasons(ledger):
    with ledger.reading() as connection:
        return [row.reason for row in records.list_events(connection, limit=100)]


class Saboteur:
    """Kills the server at a chosen moment of what a ledger does next."""

    def __init__(self, ledger, server):
        self.server = server
        self.dialect = ledger._engine.dialect
        self.engine = ledger._engine
        self.commit = self.dialect.do_commit

    @contextmanager
    def at(self, moment, statements=1):
        left = statements

        def before(*_):
            nonlocal left
            left -= 1
            if moment == "statement" and left == 0:
                self.server.kill()

        def commit(connection):
            if moment == "before commit":
                self.server.kill()
            self.commit(connection)
            if moment == "after commit":
                self.server.kill()
                connection.execute("SELECT 1")  # the answer never came: the driver finds a dead connection

        sa.event.listen(self.engine, "before_cursor_execute", before)
        self.dialect.do_commit = commit
        try:
            yield
        finally:
            sa.event.remove(self.engine, "before_cursor_execute", before)
            self.dialect.do_commit = self.commit


def test_a_server_that_dies_in_a_statement_is_waited_for(server, database_url):
    """Refused, with the reason for the operator and none of it for strangers; asked again after ever longer pauses."""
    clock = Time()
    with closing(open_ledger(database_url, clock=clock)) as ledger:
        add_event(ledger, "first")
        with Saboteur(ledger, server).at("statement"), pytest.raises(LedgerUnavailable) as refused:
            add_event(ledger, "second")
        assert str(server.folder) not in refused.value.detail
        assert "cannot be reached" in ledger.trouble
        assert not ledger.in_doubt
        tried = []
        sa.event.listen(ledger._engine, "do_connect", lambda *_: tried.append(clock.now))
        while clock.now < 60:
            with pytest.raises(LedgerUnavailable):
                ledger.probe()
            clock.now += 0.5
        pauses = [later - sooner for sooner, later in pairwise(tried)]
        assert pauses == [1.0, 2.0, 4.0, 8.0, RECONNECT_SECONDS_MAX, RECONNECT_SECONDS_MAX]
        server.start()
        clock.now += RECONNECT_SECONDS_MAX
        add_event(ledger, "third")
        assert (ledger.trouble, reasons(ledger)) == ("", ["third", "first"])


@pytest.mark.parametrize(("moment", "kept"), [("before commit", ["first"]), ("after commit", ["second", "first"])])
def test_a_server_that_dies_in_a_commit_leaves_it_in_doubt(server, database_url, moment, kept):
    """Nothing more is written or read until whoever has the contents in memory has settled it."""
    clock = Time()
    with closing(open_ledger(database_url, clock=clock, exclusive=True)) as ledger:
        add_event(ledger, "first")
        with Saboteur(ledger, server).at(moment), pytest.raises(LedgerUnavailable):
            add_event(ledger, "second")
        assert ledger.in_doubt
        server.start()
        clock.now += RECONNECT_SECONDS_MAX
        ledger.probe()
        for use in (lambda: add_event(ledger, "third"), lambda: reasons(ledger)):
            with pytest.raises(LedgerUnavailable):
                use()
        ledger.in_doubt = False
        assert reasons(ledger) == kept


def test_a_restart_between_two_transactions_is_not_noticed(server, database_url):
    """A connection that died while nobody used it is opened anew, before anybody is refused."""
    with closing(open_ledger(database_url, exclusive=True)) as ledger:
        add_event(ledger, "first")
        server.kill()
        server.start()
        add_event(ledger, "second")
        assert reasons(ledger) == ["second", "first"]


def test_two_coordinators_cannot_use_one_database(database_url):
    """The second one is told; the command line may use it beside the first; after its end the way is free."""
    with closing(open_ledger(database_url, exclusive=True)) as ledger:
        with pytest.raises(ConfigurationError, match="another coordinator uses this database"):
            open_ledger(database_url, exclusive=True)
        with closing(open_ledger(database_url)) as beside:
            add_event(beside, "from the command line")
        assert reasons(ledger) == ["from the command line"]
    open_ledger(database_url, exclusive=True).close()


def test_a_server_that_lies_about_durability_is_refused(server, database_url):
    """fsync = off: what was acknowledged could be lost."""
    server.execute("ALTER SYSTEM SET fsync = off")
    server.execute("SELECT pg_reload_conf()")
    try:
        with psycopg.connect(host=str(server.folder), user="echo2", dbname="postgres", autocommit=True) as connection:
            while connection.execute("SHOW fsync").fetchone() == ("on",):
                pass
        with pytest.raises(ConfigurationError, match="fsync = off"):
            open_ledger(database_url)
    finally:
        server.execute("ALTER SYSTEM RESET fsync")
        server.execute("SELECT pg_reload_conf()")


def test_a_value_that_no_table_holds_refuses_its_sender_alone(database_url):
    """A NUL in a text that was let through: no trouble of the ledger's, which would stop everybody."""
    with closing(open_ledger(database_url)) as ledger:
        with pytest.raises(Refused) as refused, ledger.transaction() as connection:
            connection.execute(sa.insert(schema.events).values(wall=1.0, actor="\0", action="", subject="", reason=""))
        assert (refused.value.code, ledger.trouble) == ("unrecordable", "")


async def test_a_nul_in_what_peers_say_is_recorded_as_a_mark(autojump_clock, server, world):
    """PostgreSQL has none in a text: a stranger must not be able to make its hello, or anybody's, fail by one."""
    async with world.serving(), world.node(10) as node, world.learner() as learner:
        said = {"wire_versions": (1,), "software": "odd\0", "role": "node", "name": "volunteer"}
        await node.ask("hello", Hello(**said, token=world.token(), addresses=("/ip4/\0",)), Welcome)
        await learner.hello()
        await learner.report(status="busy \0")
        assert world.service.pool_view().trouble == ""
    async with world.serving():
        assert world.service.nodes_view()[0].software == "odd\ufffd"
        assert world.run.learner_status == "busy \ufffd"


def rollouts(world):
    with closing(open_ledger(world.url)) as ledger, ledger.reading() as connection:
        keys = connection.execute(sa.select(schema.rollouts.c.lease_id, schema.rollouts.c.sample)).all()
        return [tuple(key) for key in keys]


def log_agrees(world):
    with closing(open_ledger(world.url)) as ledger, ledger.reading() as connection:
        return history.replay(history.read_bodies(connection)) == history.read_state(connection)


async def insist(ask, *args):
    """Ask as daemons do: again, until it is answered. The answer, and how often it was refused."""
    refused = 0
    while True:
        try:
            return await ask(*args), refused
        except Refused as error:
            if error.code not in {"ledger_unavailable", "begun_anew"}:
                raise
            refused += 1
            await trio.sleep(1.0)


@pytest.mark.parametrize("moment", ["statement", "before commit", "after commit"])
async def test_a_submission_cut_off_by_the_servers_death(autojump_clock, server, world, tools, moment):
    """It is not acknowledged; the trouble is on show; sent again, once the server is back, it counts once."""
    async with world.serving(), world.learner() as learner, world.node(10) as node:
        await learner.hello()
        await learner.publish()
        await node.join()
        leases = (await node.lease()).leases
        slices = [tools.answer(lease) for lease in leases]
        with Saboteur(world.service._office.ledger, server).at(moment), pytest.raises(Refused) as refused:
            await node.submit(*slices)
        assert refused.value.code == "ledger_unavailable"
        await trio.sleep(5.0)
        assert "cannot be reached" in world.service.pool_view().trouble
        server.start()
        acks, _ = await insist(node.submit, *slices)
        assert len(acks) == len(leases)
        assert {ack.state for ack in acks} <= {"held", "evaluated"}
        await trio.sleep(5.0)
        assert world.service.pool_view().trouble == ""
        received = rollouts(world)
        assert len(received) == len(set(received)) == sum(lease.sample_count for lease in leases)
    assert log_agrees(world)


async def test_a_decision_cut_off_by_the_servers_death(autojump_clock, server, world, tools):
    """It was committed, and nobody heard of it: it is read from the log, though the server dies in that too."""
    world.activation = {"prices": {tools.identity(10).peer_id: 0.1}}
    deaths = []

    def die_in_recalling(_connection, _cursor, statement, *_):
        if "max(events.id)" in statement and not deaths:
            deaths.append(trio.current_time())
            server.kill()

    def activated():
        return [event.subject for event in world.service.events_view() if event.action == "node activated"]

    async with world.serving() as service, world.learner() as learner, world.node(10) as node:
        await learner.hello()
        await learner.publish()
        await node.join()
        ledger = service._office.ledger
        with Saboteur(ledger, server).at("after commit"):
            while server.process.poll() is None:
                await trio.sleep(1.0)
                assert not world.service.decisions_view()
        sa.event.listen(ledger._engine, "before_cursor_execute", die_in_recalling)
        server.start()
        await trio.sleep(20.0)
        assert deaths
        server.start()
        await trio.sleep(20.0)
        assert (service.pool_view().trouble, activated()) == ("", [node.peer_id])
        await node.join(hello=False)
        assert (await node.lease()).leases
    assert log_agrees(world)


class Work:
    """A node and a learner that keep, as the daemons do, what is not acknowledged, and send it again."""

    def __init__(self, world, learner, node, tools):
        self.world, self.learner, self.node, self.tools = world, learner, node, tools
        self.unsent = []
        self.acknowledged = set()
        self.buffer = []
        self.unpublished = False

    async def round(self):
        """Raises Refused at the first thing that is refused."""
        learner, node = self.learner, self.node
        await node.join(hello=False)
        if self.unpublished:
            await learner.publish(version=learner.version)
            self.unpublished = False
        if not self.unsent:
            self.unsent = [self.tools.answer(lease) for lease in (await node.lease(8, 1.0)).leases]
        if self.unsent:
            await node.submit(*self.unsent)
            self.acknowledged |= {(part.lease_id, one.sample) for part in self.unsent for one in part.rollouts}
            self.unsent = []
        self.buffer += (await learner.fetch(wait=1.0)).rollouts
        if len(self.buffer) >= 8 and learner.version < 6:
            batch, step = self.buffer[:8], learner.version
            learner.version += 1
            try:
                done = [self.tools.done(rollout, step=step) for rollout in batch]
                await learner.report(done, [self.tools.metrics(step, 8)])
            except Refused:
                learner.version -= 1
                raise
            self.buffer = self.buffer[8:]
            self.unpublished = True


@pytest.mark.slow
async def test_ten_deaths_in_the_course_of_a_run(autojump_clock, server, world, tools):
    """Whatever it dies in, the run goes on to its end, and every rollout has its one state."""
    rng = random.Random(5)
    world.run_settings = {"steps": 6}
    deaths = 0
    async with world.serving(), world.learner() as learner, world.node(10) as node:
        await learner.hello()
        await learner.publish()
        await node.hello(world.token())
        work = Work(world, learner, node, tools)
        while world.run.state != "finished":
            moment = rng.choice(["statement", "before commit", "after commit"]) if deaths < 10 else "never"
            with Saboteur(world.service._office.ledger, server).at(moment, rng.randint(1, 5)):
                while server.process.poll() is None and world.run.state != "finished":
                    with suppress(Refused):
                        await work.round()
            if server.process.poll() is not None:
                deaths += 1
                server.start()
            await trio.sleep(20.0)
        assert deaths == 10
        received = rollouts(world)
        assert len(received) == len(set(received))
        assert work.acknowledged <= set(received)
        assert world.run.rollouts.consumed == 48
    assert log_agrees(world)
