"""Any order of hellos, goodbyes, operators' orders, waits and restarts: state, history and ledger say the same."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import sqlalchemy as sa
import trio
import trio.testing
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from echo2.coordinator import history, schema
from echo2.coordinator.ledger import open_ledger_to_read
from echo2.coordinator.node_states import STATES, TABLE
from echo2.p2p.errors import Refused, Unreachable

ORDERS = {
    "admit": "admitted", "drain": "drained", "suspend": "suspended", "restore": "restored", "ban": "banned",
    "unban": "unbanned",
}  # fmt: skip
NODES = (10, 11)

nodes = st.sampled_from(NODES)
actions = st.one_of(
    st.tuples(st.just("hello"), nodes),
    st.tuples(st.just("goodbye"), nodes),
    st.tuples(st.sampled_from(sorted(ORDERS)), nodes),
    st.tuples(st.sampled_from(["suspend", "ban"]), nodes, st.sampled_from([50.0, 500.0])),
    st.tuples(st.just("wait"), st.sampled_from([1.0, 60.0])),
    st.tuples(st.just("restart")),
)


class Player:
    """Plays actions on a pool, and holds each outcome against the table."""

    def __init__(self, world):
        self.world = world
        self.state: dict[int, str] = {}
        self.peers: dict[int, str] = {}

    async def play(self, script):
        pieces: list[list] = [[]]
        for action in script:
            if action[0] == "restart":
                pieces.append([])
            else:
                pieces[-1].append(action)
        for piece in pieces:
            async with self.world.serving() as service:
                self.agrees(service)
                for action in piece:
                    await self.act(service, *action)
                    await trio.sleep(1.0)
                    self.follow(service)
                    self.agrees(service)
        self.replays()

    async def act(self, service, what, *how):
        if what == "wait":
            await trio.sleep(how[0])
            return
        number, *more = how
        state = self.state.get(number, "new")
        if what in ORDERS:
            self.order(service, what, number, state, *more)
            return
        async with self.world.node(number) as node:
            self.peers[number] = node.peer_id
            before = len(service.transitions_view(node.peer_id)) if state != "new" else 0
            code = ""
            try:
                if what == "hello":
                    await node.hello(session=node.session, home=b"h" * 16)
                elif state != "new":
                    node.session = trio.current_time().hex().encode().ljust(16)[:16]
                    await node.hello(session=node.session, home=b"h" * 16)
                    await node.heartbeat(state="stopped")
            except Refused as refused:
                code = refused.code
            except Unreachable:
                code = "banned"  # the transport refuses whom the operator has banned
            assert code in ({"banned", "session_ended"} if state == "banned" else {"", "session_ended"})
            if state == "banned":
                assert len(service.transitions_view(node.peer_id)) == before

    def order(self, service, what, number, state, expires=None):
        ask = getattr(service, f"{what}_node")
        facts = {"actor": "operator", "reason": f"{what} it"}
        if expires is not None:
            facts["expires_seconds"] = expires
        if state == "new":
            with pytest.raises(KeyError):
                ask(self.peers.get(number, "nobody"), **facts)
            return
        if (state, ORDERS[what]) not in TABLE:
            with pytest.raises(Refused, match="a node that is"):
                ask(self.peers[number], **facts)
            return
        ask(self.peers[number], **facts)

    def follow(self, service):
        """The model takes what was recorded since, each step of which the table must have."""
        for number, peer in self.peers.items():
            try:
                moves = list(reversed(service.transitions_view(peer)))
            except KeyError:
                continue
            state = "new"
            for place, move in enumerate(moves):
                assert move.number == place + 1
                assert move.from_state == state
                assert (state, move.event) in TABLE
                assert move.reason
                assert move.actor
                assert move.expires_seconds is None or move.to_state in {"suspended", "banned"}
                if move.event == "lapsed":
                    assert moves[place - 1].expires_seconds <= move.wall_seconds
                state = move.to_state
            self.state[number] = state

    def agrees(self, service):
        views = {view.peer: view for view in service.nodes_view()}
        assert {view.state for view in views.values()} <= set(STATES)
        now = self.world.wall_offset + trio.current_time()
        for number, state in self.state.items():
            view = views[self.peers[number]]
            assert view.state == state
            assert view.state_expires is None or view.state_expires > now - 1.0, "its time is over"
            (last, *_) = service.transitions_view(view.peer)
            assert (view.state_by, view.state_reason, view.state_since, view.state_expires) == (
                last.actor, last.reason, last.wall_seconds, last.expires_seconds,
            )  # fmt: skip
            assert service.admitted(view.peer) is (state in {"probation", "standby", "active", "draining"})

    def replays(self):
        """The tables are what the log of changes tells, and the node's row is the end of its history."""
        ledger = open_ledger_to_read(self.world.url)
        try:
            with ledger.reading() as connection:
                state = history.read_state(connection)
                assert history.replay(history.read_bodies(connection)) == state
                rows = connection.execute(sa.select(schema.nodes.c.peer, schema.nodes.c.state)).all()
        finally:
            ledger.close()
        found = dict(map(tuple, rows))
        assert {self.peers[number]: kept for number, kept in self.state.items()} == found


def run(world, script, mode, warmup):
    world.admission = {"mode": mode, "warmup_leases": warmup}
    world.rng, world.network = random.Random(2), replace_network(world)
    trio.run(Player(world).play, script, clock=trio.testing.MockClock(autojump_threshold=0))


def replace_network(world):
    return type(world.network)(random.Random(1), delay_seconds=0.01)


script = st.lists(actions, max_size=14)
modes = st.sampled_from(["open", "hand"])
LONG = [
    ("hello", 10), ("admit", 10), ("drain", 10), ("restart",), ("goodbye", 10), ("hello", 10), ("restore", 10),
    ("ban", 10, 50.0), ("restart",), ("hello", 10), ("wait", 60.0), ("suspend", 10, 50.0), ("restart",),
    ("wait", 60.0), ("goodbye", 10), ("restart",), ("hello", 10),
]  # fmt: skip


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(script=script, mode=modes, warmup=st.sampled_from([0, 10]))
@example(script=LONG, mode="hand", warmup=10)
@example(script=LONG, mode="open", warmup=0)
def test_any_life_on_sqlite(world_of, script, mode, warmup):
    """In the state folder's own database."""
    with TemporaryDirectory() as folder:
        run(world_of(Path(folder) / "ledger.sqlite3", ""), script, mode, warmup)


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(script=script, mode=modes, warmup=st.sampled_from([0, 10]))
@example(script=LONG, mode="hand", warmup=10)
def test_any_life_on_postgresql(world_of, postgresql, script, mode, warmup):
    """The same on a server."""
    run(world_of(None, postgresql.emptied()), script, mode, warmup)


@pytest.fixture
def world_of(tools):
    return lambda path, url: replace(tools.world(path), database_url=url)
