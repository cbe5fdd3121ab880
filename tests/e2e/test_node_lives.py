"""Node processes and a coordinator over real sockets: applied, admitted, stopped, killed, doubled, banned."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager, closing

import pytest
import trio

from echo2.coordinator import node_life
from echo2.coordinator.config import CoordinatorConfig
from echo2.coordinator.ledger import open_ledger
from echo2.coordinator.service import CoordinatorService
from echo2.node.status import table
from echo2.p2p.identity import Identity
from echo2.p2p.join import JoinString
from echo2.p2p.libp2p_transport import open_libp2p_transport
from echo2.tasks.model_card import ModelCard
from echo2.tasks.scorer import InlineScorer
from echo2.tasks.task import Prompt, Score

pytestmark = pytest.mark.e2e

SECONDS = 120.0
"""Bound on any one wait; loading a node takes most of what is needed."""

HEARTBEAT_SECONDS = 5.0


class Task:
    """Of which nothing is asked: no learner comes."""

    name, train_size, heldout_size = "nothing", 8, 0

    def prompt(self, split, index):
        return Prompt(split, index, "1")

    def score(self, prompt, response):
        return Score(0.0)


class Text:
    """Digits are their own token ids."""

    card = ModelCard(
        name="digits", architecture="llama", tokenizer_sha256="0" * 64, vocabulary_size=15, context_tokens=16,
        stop_ids=(14,),
    )  # fmt: skip

    def encode(self, text):
        return [int(digit) for digit in text]

    def decode(self, tokens):
        return ["" for _ in tokens]


class Pool:
    """A coordinator in this process, and node processes beside it."""

    def __init__(self, folder, service, join):
        self.folder, self.service, self.join = folder, service, join
        self.processes = []

    def start(self, home):
        """A node process with this home; it ends with the pool at the latest."""
        (self.folder / home).mkdir(exist_ok=True)
        errors = (self.folder / f"{home}-{len(self.processes)}.log").open("wb")
        process = subprocess.Popen(
            [sys.executable, "-m", "echo2.node.main", "run", "--join", str(self.join), "--home",
             str(self.folder / home), "--name", home],
            stdout=errors, stderr=errors, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        process.log = self.folder / f"{home}-{len(self.processes)}.log"
        self.processes.append(process)
        return process

    def status(self, home):
        try:
            return json.loads((self.folder / home / "status.json").read_text())
        except (OSError, ValueError):
            return {}

    def rows(self, home):
        return table(self.status(home))

    def views(self):
        return self.service.nodes_view()

    async def until(self, holds):
        with trio.move_on_after(SECONDS):
            while not holds():  # noqa: ASYNC110 - other processes ring no bell
                await trio.sleep(0.05)
            return
        raise AssertionError(f"{self.views()}; {[process.log.read_text()[-1500:] for process in self.processes]}")

    async def ended(self, process):
        await self.until(lambda: process.poll() is not None)
        return process.returncode

    def events(self):
        return [move.event for move in reversed(self.service.transitions_view(self.views()[0].peer))]


@asynccontextmanager
async def pool(folder, **admission):
    """The coordinator serves inside, on 127.0.0.1."""
    learner, coordinator = Identity(b"\x07" * 32), Identity(b"\x08" * 32)
    config = CoordinatorConfig(
        heartbeat_seconds=HEARTBEAT_SECONDS,
        admission=admission,
        run={
            "name": "r1",
            "task": "nothing",
            "model_dir": "m",
            "learner": learner.peer_id,
            "steps": 4,
            "tokens_max": 4,
        },
    )
    with closing(open_ledger(f"sqlite:///{folder / 'ledger.sqlite3'}", clock=trio.current_time)) as ledger:
        async with (
            open_libp2p_transport(coordinator, ["/ip4/127.0.0.1/tcp/0"], state_dir=folder) as transport,
            trio.open_nursery() as nursery,
        ):
            service = CoordinatorService(
                config=config, identity=coordinator, transport=transport, ledger=ledger,
                scorer=InlineScorer({"nothing": Task()}), clock=trio.current_time, wall=time.time, entropy=os.urandom,
                task=Task(), text=Text(),
            )  # fmt: skip
            nursery.start_soon(service.run)
            token = service.create_token(uses=1, expires_seconds=None, actor="test", reason="test")
            world = Pool(folder, service, JoinString(coordinator.peer_id, transport.addresses, token, "r1"))
            try:
                yield world
            finally:
                for process in world.processes:
                    process.kill()
                    process.wait()
                nursery.cancel_scope.cancel()


async def test_a_life_from_application_to_ban(tmp_path, monkeypatch):
    """Applied, admitted, stopped, back, banned: each is seen at the coordinator and at the node, in words."""
    monkeypatch.setattr(node_life, "REFUSED_SECONDS", 3.0)
    async with pool(tmp_path, mode="hand") as world:
        world.join = JoinString(world.join.peer, world.join.addresses, "", "r1")
        process = world.start("a")
        await world.until(lambda: world.status("a").get("node_state") == "applied")
        assert world.status("a")["state"] == "blocked"
        assert "the operator of this pool has yet to admit this node" in dict(world.rows("a"))["waiting for"]
        (view,) = world.views()
        world.service.admit_node(view.peer, actor="operator", reason="a friend")
        await world.until(lambda: world.status("a").get("node_state") == "probation")
        assert dict(world.rows("a"))["standing"] == "in probation: 0 of its first 10 leases have come back"

        process.send_signal(signal.SIGTERM)
        assert await world.ended(process) == 0
        assert world.views()[0].state == "left"
        assert world.service.pool_view().nodes_dead == 0
        process = world.start("a")
        await world.until(lambda: world.views()[0].state == "probation")
        assert world.events() == ["applied", "admitted", "goodbye", "returned"]
        await world.until(lambda: world.status("a").get("node_state") == "probation")

        world.service.ban_node(view.peer, actor="operator", reason="forged rewards")
        assert await world.ended(process) == 2
        words = "error: the coordinator has banned this node: forged rewards"
        assert process.log.read_text().splitlines()[-1] == words
        assert dict(world.rows("a"))["standing"] == "the coordinator has banned this node: forged rewards"
        again = world.start("a")
        assert await world.ended(again) == 2
        last = again.log.read_text().splitlines()[-1]
        assert last.endswith("the operator has banned this node: forged rewards")
        assert "Traceback" not in again.log.read_text()


async def test_a_killed_node_is_back_at_once_and_a_copy_of_its_key_waits(tmp_path):
    """kill -9 leaves no goodbye: its home proves the restart, at the first hello. Another home with the key is refused,
    on both sides in words, until the first one stops."""
    async with pool(tmp_path, mode="open") as world:
        first = world.start("a")
        await world.until(lambda: world.status("a").get("node_state") == "probation")
        first.kill()
        first.wait()
        before = world.views()[0].last_seen_seconds
        second = world.start("a")
        await world.until(lambda: world.status("a").get("node_state") == "probation" and second.log.stat().st_size)
        await world.until(lambda: "joined run" in second.log.read_text())
        assert before is not None
        assert "not in the pool" not in second.log.read_text(), "it was welcomed at its first hello"
        assert world.events() == ["joined"], "nothing happened to the node"

        shutil.copytree(tmp_path / "a", tmp_path / "b")
        spare = world.start("b")
        await world.until(lambda: "another process uses this node's key" in str(world.status("b").get("waiting_for")))
        assert "identity_live" in spare.log.read_text()
        await world.until(lambda: "second process" in str(world.status("a").get("warning")))
        assert "second process" in world.views()[0].reason
        assert second.poll() is None
        second.send_signal(signal.SIGTERM)
        assert await world.ended(second) == 0
        await world.until(lambda: world.status("b").get("node_state") == "probation")
        assert world.events() == ["joined", "goodbye", "returned"]
        assert len(world.views()) == 1
