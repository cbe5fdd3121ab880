"""A coordinator with a past, served over a real socket from a thread of its own, for a browser to look at.

Its peers are on a network in memory and do as they are told, and so does its clock (`pass_time`): nodes are late and
dead without anybody waiting. `python tests/e2e/web_stage.py` serves one to look at.
"""

from __future__ import annotations

import hashlib
import math
import os
import random
import sys
import threading
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import sqlalchemy as sa
import trio
import trio.testing

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `python tests/e2e/web_stage.py`

from unit.coordinator.conftest import WALL, Learner, Node, World, answer, done, identity, metrics

from echo2.coordinator.access import AccessBook
from echo2.coordinator.api import make_api
from echo2.coordinator.books import Books
from echo2.coordinator.event_feed import EventFeed
from echo2.coordinator.rest_gate import Door
from echo2.coordinator.rest_guard import Rooms
from echo2.coordinator.rest_limits import Limits
from echo2.coordinator.rest_server import open_listener, serve_rest
from echo2.coordinator.rest_sessions import Sessions
from echo2.coordinator.run_judge import Judge
from echo2.coordinator.service import CoordinatorService
from echo2.p2p.chunks import hash_bytes
from echo2.p2p.manifest import make_manifest
from echo2.p2p.memory import MemoryNetwork
from echo2.p2p.messages import (
    AppealReply,
    AppealRequest,
    DropCount,
    Fetching,
    Heartbeat,
    HeartbeatBody,
    HeartbeatReply,
    Hello,
    PublishReply,
    PublishRequest,
    Welcome,
)
from echo2.tasks.scorer import InlineScorer

TOKEN = "operators-own-token"
RUN = "r1"
STEPS = 40
CHUNK_BYTES = 64 * 1024
CHUNKS = 90
HOSTILE = "<img src=x onerror=alert(1)>"
SCRIPT = "</td><script>document.title='owned'</script>"
PRICED = 5
NAMES = ("anna-3090", "bertha", "carl-gaming", "dora", "emil-laptop", "frida", "gustav", "rented-a10", "rented-h100")
NEWCOMER = "newcomer"
APPLICANT = "applicant"

WATCHED_SECONDS = 0.2
"""Between two signs of life of a stream of events: the places of pages that are closed are soon free for the next."""


class NamedNode(Node):
    """A node with a name of its own, that says how far its download is."""

    async def hello(self, token="", name="volunteer"):
        message = Hello(wire_versions=(1,), software="echo2 0.1.0", role="node", name=name, token=token)
        return await self.ask("hello", message, Welcome)

    async def beat(self, *, version=None, held=0, state="working", share=None, sources=()):
        """A heartbeat; `share` of the newest snapshot is here."""
        self.sequence += 1
        current = self.world.service._office.run.current
        fetching = None
        if share is not None:
            have = round(share * CHUNKS)
            cells = (((1 << have) - 1) | (1 << (CHUNKS - 1) if 0 < share < 1 else 0)).to_bytes(
                -(-CHUNKS // 8), "little"
            )
            fetching = Fetching(
                manifest_hash=current.manifest_hash, cells=cells, chunks_held=have, sources=tuple(sources)
            )
        body = HeartbeatBody(
            run=RUN, session=self.session, sequence=self.sequence, epoch=0, version=version,
            manifest_hash=self.installed, state=state, leases_held=held, rollouts_generated=0, rollouts_spooled=0,
            tokens_per_second=310.0, hold_seconds=0.0, fetching=fetching,
        )  # fmt: skip
        return await self.ask("heartbeat", Heartbeat(body=self.identity.sign("heartbeat", body)), HeartbeatReply)

    async def appeal(self, number, subject, text):
        message = AppealRequest(run=RUN, appeal_id=number.to_bytes(16), subject=subject, text=text)
        return await self.ask("appeal", message, AppealReply)

    async def install(self):
        """Uses the newest snapshot from now on."""
        current = self.world.service._office.run.current
        self.installed = current.manifest_hash
        await self.beat(version=current.manifest.version, held=1)


class LargeLearner(Learner):
    """Publishes snapshots of many chunks."""

    async def publish_large(self, version):
        content = hash_bytes(random.Random(version).randbytes(CHUNK_BYTES) * CHUNKS)
        manifest = make_manifest(
            content, run=RUN, publisher=self.peer_id, epoch=0, version=version, domain="f32", previous_hash=None,
            created_seconds=WALL,
        )  # fmt: skip
        await self.ask("publish", PublishRequest(manifest=self.identity.sign("manifest", manifest)), PublishReply)


class WebWorld(World):
    """The unit tests' world with a clock that stands still until it is put forward: what is shown stays as it is."""

    skipped = 1000.0

    def clock(self):
        return self.skipped

    def make(self, ledger, transport):
        return CoordinatorService(
            config=self.config(),
            identity=self.coordinator,
            transport=transport,
            ledger=ledger,
            scorer=InlineScorer({self.task.name: self.task}),
            clock=self.clock,
            wall=lambda: self.wall_offset + self.skipped - 1000.0,
            entropy=self.rng.randbytes,
            task=self.task,
            text=self.text,
        )


def curves(step):
    """A step of a run that goes well."""
    learned = 1 - math.exp(-step / 14)
    wobble = 0.03 * math.sin(step * 1.7)
    fields = {
        "reward_mean": 0.31 + 0.55 * learned + wobble,
        "reward_std": 0.4 - 0.2 * learned,
        "kl_sampler_learner": 0.0011 + 0.0006 * math.cos(step / 3) ** 2,
        "kl_reference": 0.002 * step,
        "train_seconds": 2.0 + 0.3 * math.sin(step),
        "idle_seconds": max(0.0, 1.6 - step / 20) + (0.9 if step % 9 == 4 else 0.0),
        "response_tokens_mean": 3.0 + learned,
        "staleness": 2,
        "staleness_mean": 1.2,
        "staleness_counts": (3, 4, 1 + step % 2),
        "drops": (DropCount(reason="too stale", tokens_max=16, count=1),) if step % 10 == 3 else (),
    }
    return metrics(step, 8).model_copy(update=fields)


class Stage:
    """`start`, look at `url`, `stop`; the ledger stays for the next `start`."""

    def __init__(self, folder, *, public=True):
        prices = {identity(PRICED).peer_id: 0.35, identity(PRICED + 1).peer_id: 0.8}
        self.world = WebWorld(
            folder / "ledger.sqlite3",
            network=MemoryNetwork(random.Random(1), delay_seconds=0.0001),
            run_settings={"steps": 60, "name": RUN, "eval_every": 10, "eval_share": 0.5},
            activation={"prices": prices, "period_seconds": 1.0},
            admission={"mode": "hand", "warmup_leases": 2},
        )
        self.public = public
        self.port = self.guarded_port = 0
        self.leased = None
        self.has_past = False

    # from the test's thread

    def start(self):
        ready = threading.Event()
        self.failure = None
        self.thread = threading.Thread(target=self._thread, args=(ready,), daemon=True)
        self.thread.start()
        assert ready.wait(60)
        if self.failure is not None:
            raise self.failure

    def stop(self):
        if self.thread.is_alive():
            trio.from_thread.run_sync(self.scope.cancel, trio_token=self.trio_token)
            self.thread.join(20)
        assert not self.thread.is_alive()

    @contextmanager
    def running(self):
        self.start()
        try:
            yield self
        finally:
            self.stop()

    def do(self, asynchronous, *arguments):
        """Run it where the coordinator lives, and wait."""
        return trio.from_thread.run(asynchronous, *arguments, trio_token=self.trio_token)

    @property
    def url(self):
        """Where reading is open, as on loopback."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def guarded_url(self):
        """The same coordinator, where nothing is shown before a sign-in, as off loopback."""
        return f"http://127.0.0.1:{self.guarded_port}"

    # in the coordinator's thread

    def _thread(self, ready):
        try:
            trio.run(self._serve, ready)
        except BaseException as error:  # noqa: BLE001 - told to the test's thread
            self.failure = error
            ready.set()

    async def _serve(self, ready):
        self.trio_token = trio.lowlevel.current_trio_token()
        with trio.CancelScope() as self.scope:
            async with AsyncExitStack() as stack:
                service = await stack.enter_async_context(self.world.serving())
                self.nodes = [await stack.enter_async_context(self.world.peer(10 + n, NamedNode)) for n in range(7)]
                priced = await stack.enter_async_context(self.world.peer(PRICED, NamedNode))
                spare = await stack.enter_async_context(self.world.peer(PRICED + 1, NamedNode))
                self.newcomer = await stack.enter_async_context(self.world.peer(30, NamedNode))
                self.applicant = await stack.enter_async_context(self.world.peer(31, NamedNode))
                self.nodes += [priced, spare]
                self.learner = await stack.enter_async_context(self.world.peer(2, LargeLearner))
                if not self.has_past:
                    await self.past()
                    self.has_past = True
                await self.present()
                self.rooms = self.make_rooms(service)
                nursery = await stack.enter_async_context(trio.open_nursery())
                nursery.start_soon(self.rooms.feed.run)
                self.port = self.serve_at(self.port, Door(), nursery)
                self.guarded_port = self.serve_at(self.guarded_port, Door(open_reads=False), nursery)
                ready.set()
                await trio.sleep_forever()

    def make_rooms(self, service):
        """As the coordinator's process does, but for the clock of its nodes."""
        ledger, peer = service._office.ledger, self.world.coordinator.peer_id
        wall = service._office.wall
        own = {"ada": hashlib.sha256(TOKEN.encode()).digest()}
        return Rooms(
            desk=service,
            access=AccessBook(ledger, own=own, wall=wall, entropy=os.urandom),
            sessions=Sessions(os.urandom),
            books=Books(self.world.url),
            feed=EventFeed(service, heartbeat_seconds=WATCHED_SECONDS),
            judge=Judge(self.world.config(), self.world.text, service.pool_view),
            limits=Limits(),
            join=lambda token: f"echo2://{peer}@192.0.2.1:4001/{RUN}?token={token}",
            clock=trio.current_time,
        )

    def serve_at(self, port, door, nursery):
        listener = open_listener("127.0.0.1", port)
        api = make_api(self.rooms, door=door, version="0.1.0", public_page=self.public)
        nursery.start_soon(serve_rest, api, listener)
        return listener.getsockname()[1]

    async def past(self):
        """What is in the ledger afterwards: nodes, evaluations, rollouts of every fate, steps, events."""
        service, token = self.world.service, self.world.token(uses=100)
        for node, name in zip(self.nodes, NAMES, strict=True):
            await node.hello(token, name)
        for node in self.nodes[4:7]:  # they get no work here: the operator knows them
            service.drain_node(node.peer_id, actor="ada", reason="to be looked at")
            service.restore_node(node.peer_id, actor="ada", reason="known to me")
        await self.newcomer.hello(token, NEWCOMER)
        await self.applicant.hello(name=APPLICANT)
        await self.learner.hello()
        for version in range(0, STEPS, 10):
            await self.generation(version)
        service.suspend_node(
            self.nodes[3].peer_id, actor="ada", reason=f"rewards that cannot be {SCRIPT}", expires_seconds=7200.0
        )
        await self.nodes[3].appeal(1, "suspension", f"they are right {HOSTILE}")
        await self.nodes[0].appeal(2, self.leased.hex(), "my answer came in time")
        engine = sa.create_engine(self.world.url)
        with engine.begin() as connection:
            connection.execute(
                sa.text("UPDATE nodes SET name = :name WHERE peer = :peer"),
                {"name": HOSTILE, "peer": self.nodes[6].peer_id},
            )
        engine.dispose()
        self.world.service._office.pool.nodes[self.nodes[6].peer_id].name = HOSTILE

    async def generation(self, version):
        """One version's life: published, installed everywhere, evaluated, worked under; ten steps follow it."""
        await self.learner.publish_large(version)
        self.pass_time(0.6 + version / 100)
        for node in (*self.nodes, self.newcomer):
            await node.install()
        for turn in range(6):
            newcomers = [self.newcomer] if version == turn == 0 else []
            working = (*newcomers, *self.nodes[:4], *self.nodes[7:])
            grants = [(node, (await node.lease(1 if node is self.newcomer else 2)).leases) for node in working]
            self.leased = next(
                (found[0].lease_id for node, found in grants if node is self.nodes[0] and found), self.leased
            )
            self.pass_time(1.1)
            for place, (node, leases) in enumerate(grants):
                good = (place + turn) % 7 < 3 + version // 10
                if not leases:
                    continue
                if turn == 4 and place == 1:  # an engine that stops before its end: refused
                    await node.submit(*(answer(lease, finish="length") for lease in leases))
                else:
                    await node.submit(*(answer(lease, None if good else [9]) for lease in leases))
            for node in self.nodes:
                await node.beat(version=version, held=1)
        await trio.testing.wait_all_tasks_blocked(0.005)  # every reward is there
        found = (await self.learner.fetch()).rollouts
        self.learner.version = version + 10
        fates = [done(one, step=version) for one in found[:24]]
        fates += [done(one, "stale", version, "too stale: 3 steps, S = 2") for one in found[24:28]]
        await self.learner.report(
            fates, [curves(step) for step in range(version, version + 10)], f"step {version + 10}"
        )

    async def present(self):
        """A broadcast under way: nodes that have it, that fetch it, that wait, that are late, dead and suspended."""
        current = self.world.service._office.run.current
        await self.learner.hello()
        await self.nodes[5].beat()
        self.pass_time(14.0)
        await self.nodes[4].beat(version=current.manifest.version)
        self.pass_time(16.0)
        for node in (*self.nodes[:3], *self.nodes[6:], self.newcomer):
            await node.beat(version=STEPS - 10)
        if current.manifest.version < STEPS:
            await self.learner.publish_large(STEPS)
            self.pass_time(0.3)
        await self.learner.fetch(after=0)
        first, second, third = self.nodes[:3]
        for node in (first, second):
            await node.install()
            self.pass_time(0.4)
        await self.nodes[7].install()
        await third.beat(version=STEPS - 10, share=0.6, sources=(first.peer_id, self.learner.peer_id))
        await self.nodes[6].beat(version=STEPS - 10, share=0.15, sources=(self.learner.peer_id,))
        await self.nodes[8].beat(version=STEPS - 10, share=1.0)
        await self.applicant.hello(name=APPLICANT)
        self.pass_time(1.0)

    async def newest_event(self):
        (newest,) = self.world.service.events_view(limit=1)
        return newest

    async def count_events(self):
        return len(self.world.service.events_view(limit=1000))

    async def run(self):
        return self.world.service.run_view(RUN)

    async def appeals(self):
        return self.world.service.appeals_view()

    async def make_access(self, name, role):
        """A token for somebody of this role."""
        return self.rooms.access.create(name, role, expires_seconds=None, actor="ada", reason="they help")

    def pass_time(self, seconds):
        """The clock goes on, and what looks at it from time to time has looked."""
        self.world.skipped += seconds
        self.world.service._scheduler.look()


def main():
    """Serve until interrupted."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder, Stage(Path(folder)).running() as stage:
        print(f"{stage.url}, token {TOKEN}, public page {stage.url}/public/{RUN}", flush=True)
        stage.thread.join()


if __name__ == "__main__":
    main()
