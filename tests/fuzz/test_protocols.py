"""What the daemons serve is what is fuzzed: a new handler cannot be forgotten."""

from __future__ import annotations

from contextlib import asynccontextmanager, closing
from functools import partial

import trio
import trio.testing
from fuzz.stages import requested
from unit.coordinator.conftest import DigitText

from echo2.coordinator import run_tools
from echo2.coordinator import serve as coordinator_serve
from echo2.coordinator.config import CoordinatorConfig
from echo2.learner import main as learner_main
from echo2.learner.config import LearnerConfig
from echo2.learner.fake_trainer import FakeDisk, FakeTrainer
from echo2.learner.metrics_log import MetricsFile, MetricsLog
from echo2.node import main as node_main
from echo2.node.config import NodeSettings
from echo2.p2p.identity import Identity
from echo2.p2p.join import JoinString
from echo2.p2p.libp2p_transport import Libp2pTransport
from echo2.p2p.settings import make_settings
from echo2.tasks.arithmetic import Arithmetic
from echo2.tasks.scorer import InlineScorer

ELSEWHERE = Identity(b"\x0e" * 32)

REGISTERED_SECONDS = 20.0
"""Long: a daemon registers as it starts, before it waits for anybody."""


async def registered(monkeypatch, serve, wanted):
    """Full ids of the protocols a daemon serves, with nobody there to answer it."""
    found: set[str] = set()
    usual = Libp2pTransport.set_handler

    def noted(self, protocol, handler):
        usual(self, protocol, handler)
        found.update(self._handlers)

    monkeypatch.setattr(Libp2pTransport, "set_handler", noted)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        with trio.move_on_after(REGISTERED_SECONDS):
            while not found >= wanted:
                await trio.lowlevel.checkpoint()
        await trio.testing.wait_all_tasks_blocked(0.01)  # what is beyond the wanted shall be seen as well
        nursery.cancel_scope.cancel()
    return found


@asynccontextmanager
async def no_scorer(*_specs, **_options):
    yield InlineScorer({})


async def arithmetic(*_arguments):
    return Arithmetic()


async def test_the_coordinator_serves_what_is_fuzzed(tmp_path, monkeypatch):
    """Neither more nor less."""
    for module in (coordinator_serve, run_tools):
        monkeypatch.setattr(module, "check_task", lambda run: None)
        monkeypatch.setattr(module, "FolderText", lambda folder: DigitText())
    monkeypatch.setattr(run_tools, "load_task", arithmetic)
    monkeypatch.setattr(coordinator_serve, "load_operator_token_hash", lambda path: None)
    monkeypatch.setattr(run_tools, "open_scorer", no_scorer)
    run = {"name": "r", "task": "arithmetic", "model_dir": "m", "learner": ELSEWHERE.peer_id, "steps": 1}
    values = {"run": run, "rest": {"port": 0}, "listen": ["/ip4/127.0.0.1/tcp/0"]}
    config = make_settings(values, CoordinatorConfig, source="c.toml", folder=tmp_path)
    wanted = requested()["coordinator"]
    assert await registered(monkeypatch, lambda: coordinator_serve.serve(config), wanted) == wanted


async def test_a_node_serves_what_is_fuzzed(tmp_path, monkeypatch):
    """Neither more nor less."""
    join = JoinString(ELSEWHERE.peer_id, ("/ip4/127.0.0.1/tcp/1",), "token", "r")
    wanted = requested()["node"]
    found = await registered(monkeypatch, lambda: node_main._serve(NodeSettings(), join, tmp_path), wanted)
    assert found == wanted


async def test_the_learner_serves_what_is_fuzzed(tmp_path, monkeypatch):
    """Neither more nor less."""
    coordinator = f"/ip4/127.0.0.1/tcp/1/p2p/{ELSEWHERE.peer_id}"
    listen = ["/ip4/127.0.0.1/tcp/0"]
    values = {"home": "home", "coordinator": coordinator, "run": "r", "model_dir": "m", "listen": listen}
    config = make_settings(values, LearnerConfig, source="l.toml", folder=tmp_path)
    trainer = FakeTrainer(disk=FakeDisk(), write=lambda name, data: tmp_path / name, train_seconds=1.0)
    trainer.card = None
    wanted = requested()["learner"]
    key = Identity(b"\x0f" * 32)
    with closing(MetricsLog(MetricsFile(tmp_path / "metrics.jsonl"))) as metrics:
        serve = partial(learner_main._serve, config, key, trainer, metrics)
        assert await registered(monkeypatch, serve, wanted) == wanted
