"""A real coordinator under load that is killed again and again: its pool, its learner, and what must hold afterwards.

The coordinator is a process; light nodes and a light learner are tasks of this one, over real libp2p, so that what they
were told is at hand. Nobody of them is restarted or helped.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager, closing

import sqlalchemy as sa
import trio
from e2e.coordinator_process import RUN, CoordinatorProcess
from e2e.light_learner import LightLearner
from e2e.light_node import Hat, LightNode, Pace

from echo2.coordinator import history, schema
from echo2.coordinator.ledger import open_ledger_to_read
from echo2.p2p.identity import Identity
from echo2.p2p.libp2p_transport import open_libp2p_transport
from echo2.p2p.messages import PeerAddress

TOKENS = 64
HEARTBEAT_SECONDS = 5.0
LOOK_SECONDS = 0.02
WORK_SECONDS_MAX = 3.0
"""Between two kills. Short, so that most of them meet a request under way."""

SETTLE_SECONDS = 90.0
LEARNER = Identity(b"\x4b" * 32)
TRANSIENT = ("held", "admitted")


class KillPool:
    """`faults` is what must not be; `back_seconds` how long the slowest node took to be back, after each kill."""

    def __init__(self, coordinator, learner, nodes, rng, slack_seconds):
        self.coordinator, self.learner, self.nodes = coordinator, learner, nodes
        self.slack_seconds = slack_seconds
        self.back_seconds = []
        self.rng = rng
        self.pace = nodes[0].pace

    @property
    def acknowledged(self):
        """(lease id, sample) of every rollout whose node was told that it is durable."""
        return {key for node in self.nodes for key in node.record.acknowledged}

    async def work(self):
        await trio.sleep(self.rng.uniform(0.0, WORK_SECONDS_MAX))

    async def kill(self):
        """`kill -9` at this moment, a restart as a supervisor would, and every node has to be back by itself."""
        await trio.to_thread.run_sync(self.coordinator.kill)
        self.coordinator.start()
        while not self.coordinator.listens():  # noqa: ASYNC110 - of another process
            await trio.sleep(LOOK_SECONDS)
        await self.all_are_heard_of(time.monotonic(), 2 * HEARTBEAT_SECONDS)
        await trio.to_thread.run_sync(self.check_acknowledged)

    async def all_are_heard_of(self, since, seconds):
        """Within so long of `since` each node has an answer to a heartbeat."""
        with trio.move_on_after(seconds + self.slack_seconds):
            while self.silent(since):  # noqa: ASYNC110 - nodes only record
                await trio.sleep(LOOK_SECONDS)
            self.back_seconds.append(time.monotonic() - since)
            return
        away = self.silent(since)
        raise AssertionError(
            f"{len(away)} nodes are not back after {seconds + self.slack_seconds} s: {away[0].record.troubles}"
        )

    async def goes_on(self, seconds):
        """Within so long another rollout is acknowledged."""
        before = len(self.acknowledged)
        with trio.move_on_after(seconds):
            while len(self.acknowledged) == before:  # noqa: ASYNC110 - nodes only record
                await trio.sleep(LOOK_SECONDS)
            return
        run = (await trio.to_thread.run_sync(self.coordinator.get, "/v1/runs"))[0]
        pool = await trio.to_thread.run_sync(self.coordinator.get, "/v1/pool")
        nodes = sum((node.record.troubles for node in self.nodes), Counter())
        said = {"waiting": run["waiting"], "rollouts": run["rollouts"], "trouble": pool["trouble"]}
        said |= {"reserved": run["reserved"], "outstanding": run["outstanding"], "version": run["version"]}
        learner = self.learner
        said |= {
            "learner": learner.troubles,
            "at": learner.version,
            "has": len(learner.buffered),
            "after": learner.after,
        }
        raise AssertionError(f"nothing is acknowledged for {seconds} s: {said}; {nodes}; {self.pace.seconds}")

    def silent(self, since):
        """Nodes without an answer to a heartbeat since then."""
        return [node for node in self.nodes if not node.record.answered or node.record.answered[-1] < since]

    def rows(self):
        """(lease id, sample, peer, state, receipt sequence) of every rollout in the ledger."""
        with closing(open_ledger_to_read(self.coordinator.database)) as ledger, ledger.reading() as connection:
            table = schema.rollouts.c
            columns = (table.lease_id, table.sample, table.peer, table.state, table.receipt_sequence)
            return [(row[0].hex(), *row[1:]) for row in connection.execute(sa.select(*columns))]

    def check_acknowledged(self):
        """What was acknowledged is there, once, and so is every receipt."""
        acknowledged = self.acknowledged
        rows = self.rows()
        keys = Counter((row[0], row[1]) for row in rows)
        assert max(keys.values(), default=1) == 1, "a rollout is in the ledger twice"
        assert acknowledged <= keys.keys(), f"{len(acknowledged - keys.keys())} acknowledged rollouts are lost"
        receipts = Counter((row[2], row[4]) for row in rows if row[4] is not None)
        assert max(receipts.values(), default=1) == 1, "two rollouts have one receipt"
        assert all((row[4] is None) == (row[3] in TRANSIENT) for row in rows), "a terminal state without its receipt"

    async def settle(self):
        """No more work: everything under way is handed in and acknowledged, and the learner has had all of it."""
        for node in self.nodes:
            node.finishing = True
        self.pace.set(None)
        with trio.fail_after(SETTLE_SECONDS):
            for node in self.nodes:
                await node.idle.wait()
            while True:
                states = Counter(row[3] for row in await trio.to_thread.run_sync(self.rows))
                mine = len(self.learner.consumed), len(self.learner.buffered)
                if not states["held"] and (states["consumed"], states["admitted"]) == mine:
                    return
                await trio.sleep(0.5)

    def check_sums(self):
        """Nodes, learner and ledger tell the same, and so does the log of events."""
        self.check_acknowledged()
        rows = self.rows()
        keys = {(row[0], row[1]) for row in rows}
        assert keys == self.acknowledged, "the ledger has rollouts that no node was told of"
        by_state = {state: {row[:2] for row in rows if row[3] == state} for state in ("consumed", "stale", "admitted")}
        assert by_state["consumed"] == hexed(self.learner.consumed)
        assert hexed(self.learner.stale) <= by_state["stale"]
        assert by_state["admitted"] == hexed(self.learner.buffered)
        assert set(self.learner.served.values()) <= {1}, "a rollout was given to the learner twice"
        assert not {state for node in self.nodes for state in node.record.acknowledged.values()} & {"rejected"}
        for node in self.nodes:
            sequences = sorted(row[4] for row in rows if row[2] == node.identity.peer_id and row[4] is not None)
            assert sequences == list(range(1, len(sequences) + 1)), "a receipt is missing"
        with closing(open_ledger_to_read(self.coordinator.database)) as ledger, ledger.reading() as connection:
            assert history.replay(history.read_bodies(connection)) == history.read_state(connection)


def hexed(keys):
    return {(lease_id.hex(), sample) for lease_id, sample in keys}


@asynccontextmanager
async def kill_pool(folder, *, nodes, seed, database="", seconds_each=0.5, slack_seconds=0.0):
    """A pool at work: the baseline evaluation is over, and training rollouts come in."""
    coordinator = CoordinatorProcess(
        folder,
        learner=LEARNER.peer_id,
        context_tokens=2 * TOKENS,
        heartbeat_seconds=HEARTBEAT_SECONDS,
        database=database,
        steps=1_000_000,
        S=3,
        kappa=2,
        R=64,
        n=8,
        tokens_max=TOKENS,
        slice_samples_max=2,
        lease_seconds=30.0,
    )
    rng = random.Random(seed)
    pace, hat = Pace(seconds_each), Hat(rng, TOKENS)
    join = coordinator.token(nodes)
    there = PeerAddress(peer=join.peer, addresses=join.addresses)
    try:
        coordinator.start()
        await trio.to_thread.run_sync(coordinator.wait_until_it_serves)
        async with AsyncExitStack() as stack:
            transports = [
                await stack.enter_async_context(open_libp2p_transport(identity, []))
                for identity in (LEARNER, *(Identity((number + 1).to_bytes(32, "big")) for number in range(nodes)))
            ]
            pool = [
                LightNode(
                    identity=Identity((number + 1).to_bytes(32, "big")),
                    transport=transport,
                    coordinator=there,
                    run=RUN,
                    token=join.token,
                    pace=pace,
                    hat=hat,
                    rng=random.Random(rng.random()),
                    clock=time.monotonic,
                )
                for number, transport in enumerate(transports[1:])
            ]
            learner = LightLearner(
                identity=LEARNER,
                transport=transports[0],
                coordinator=there,
                run=RUN,
                rollouts_per_step=64,
                kappa=2,
                staleness_max=3,
                steps=1_000_000,
                wall=time.time,
            )
            async with trio.open_nursery() as nursery:
                for each in (learner, *pool):
                    nursery.start_soon(each.run)
                with trio.fail_after(SETTLE_SECONDS):
                    while learner.version < 2:  # noqa: ASYNC110 - nodes and learner only record
                        await trio.sleep(LOOK_SECONDS)
                yield KillPool(coordinator, learner, pool, rng, slack_seconds)
                nursery.cancel_scope.cancel()
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(coordinator.stop)
