"""The coordinator with very many nodes on the network in memory: `python coordinator_memory.py NODES SECONDS`.

In real time and in one process, which is both the coordinator and all nodes, so its CPU is what both cost together
without libp2p: `rollouts_per_s` is what one core makes of the service, its ledger on the disk, and its clients. REST is
what a page costs here: the views, rendered; its p99 is from when it was wanted, so it holds the loop's lag too.
"""

from __future__ import annotations

import gc
import json
import random
import resource
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

import trio
from pydantic import TypeAdapter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.coordinator import LEARNER, SAMPLES, TOKENS, milliseconds
from e2e.light_learner import LightLearner
from e2e.light_node import Hat, LightNode, Pace

from echo2.coordinator.config import CoordinatorConfig
from echo2.coordinator.ledger import open_ledger
from echo2.coordinator.metrics import exposition, make_registry
from echo2.coordinator.service import CoordinatorService
from echo2.coordinator.simulated_model import simulated_text
from echo2.coordinator.views import NodeView
from echo2.p2p.identity import Identity
from echo2.p2p.memory import MemoryNetwork
from echo2.p2p.messages import PeerAddress
from echo2.tasks.arithmetic import Arithmetic
from echo2.tasks.scorer import InlineScorer
from echo2.tasks.token_text import TokenText

HEARTBEAT_SECONDS = 60.0
"""Ten thousand a minute: a pool of this size has that much more time for each."""

RATE = 60.0
"""Rollouts a second that are offered: the nodes take their part of the core."""

COORDINATOR = Identity(b"\x43" * 32)
NODES_RENDERED = TypeAdapter(list[NodeView])


def config(nodes: int) -> CoordinatorConfig:
    run = {"name": "r1", "task": "arithmetic", "model_dir": "m", "learner": LEARNER.peer_id, "steps": 1_000_000}
    run |= {"S": 3, "kappa": 2, "R": max(64, 4 * nodes // 8 * 8), "n": 8, "tokens_max": TOKENS}
    return CoordinatorConfig(heartbeat_seconds=HEARTBEAT_SECONDS, run=run | {"slice_samples_max": SAMPLES})


async def look(service: CoordinatorService, rest: list[float], late: list[int]) -> None:
    registry = make_registry(service)
    due = trio.current_time()
    while True:
        due += 1.0
        for render in (
            lambda: service.pool_view().model_dump_json(),
            lambda: NODES_RENDERED.dump_json(service.nodes_view()),
            lambda: service.runs_view()[0].model_dump_json(),
            lambda: exposition(registry),
        ):
            await trio.sleep_until(due)
            render()
            rest.append(trio.current_time() - due)
            due += 1.0
        late.append(service.pool_view().nodes_late + service.pool_view().nodes_dead)


async def main(count: int, seconds: float, folder: Path) -> dict[str, object]:
    network = MemoryNetwork(random.Random(1))
    text = simulated_text()
    card = text.card.model_copy(update={"context_tokens": 2 * TOKENS})
    task = Arithmetic()
    rest: list[float] = []
    late: list[int] = []
    pace, hat = Pace(), Hat(random.Random(2), TOKENS)
    nodes: list[LightNode] = []
    with closing(open_ledger(f"sqlite:///{folder / 'ledger.sqlite3'}")) as ledger:
        async with network.transport(COORDINATOR) as transport, trio.open_nursery() as nursery:
            service = CoordinatorService(
                config=config(count),
                identity=COORDINATOR,
                transport=transport,
                ledger=ledger,
                scorer=InlineScorer({task.name: task}),
                clock=trio.current_time,
                wall=time.time,
                entropy=random.Random(3).randbytes,
                task=task,
                text=TokenText(card, text._tokenizer.to_str().encode()),
            )
            nursery.start_soon(service.run)
            there = PeerAddress(peer=COORDINATOR.peer_id, addresses=transport.addresses)
            token = service.create_token(uses=10_000, expires_seconds=None, actor="bench", reason="bench")

            async def be(number: int, task_status: trio.TaskStatus[None]) -> None:
                identity = Identity((number + 1).to_bytes(32, "big"))
                async with network.transport(identity) as mine:
                    node = LightNode(
                        identity=identity,
                        transport=mine,
                        coordinator=there,
                        run="r1",
                        token=token,
                        pace=pace,
                        hat=hat,
                        rng=random.Random(number),
                        clock=time.monotonic,
                    )
                    nodes.append(node)
                    nursery.start_soon(node.run)
                    await node.joined.wait()
                    task_status.started()
                    await trio.sleep_forever()

            began = time.monotonic()
            for number in range(count):
                await nursery.start(be, number)
            joined = time.monotonic() - began
            print(f"{count} nodes are in after {joined:.0f} s", file=sys.stderr, flush=True)
            async with network.transport(LEARNER) as mine:
                learner = LightLearner(
                    identity=LEARNER,
                    transport=mine,
                    coordinator=there,
                    run="r1",
                    rollouts_per_step=config(count).run.R,
                    kappa=2,
                    staleness_max=3,
                    steps=1_000_000,
                    wall=time.time,
                )
                nursery.start_soon(learner.run)
                pace.set(SAMPLES * count / RATE)
                while not any(each.complete for each in service.runs_view()[0].evaluations):  # noqa: ASYNC110
                    await trio.sleep(1.0)
                gc.collect()
                gc.freeze()
                nursery.start_soon(look, service, rest, late)
                began, cpu = time.monotonic(), time.process_time()
                await trio.sleep(seconds)
                ended, cpu = time.monotonic(), time.process_time() - cpu
                nursery.cancel_scope.cancel()
    done = sum(n for node in nodes for at, n in node.record.acknowledged_at if began <= at <= ended)
    beats = sum(began <= at <= ended for node in nodes for at in node.record.answered)
    return {
        "nodes": count,
        "rollouts_per_s": round(done / (ended - began), 1),
        "offered_per_s": RATE,
        "heartbeats_per_s": round(beats / (ended - began), 1),
        "rest_p99_ms": milliseconds(sorted(rest), 0.99),
        "cpu_share": round(cpu / (ended - began), 3),
        "rss_MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "nodes_late_or_dead_max": max(late, default=0),
        "join_s": round(joined, 1),
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="bench-coordinator-") as name:
        result = trio.run(main, int(sys.argv[1]), float(sys.argv[2]), Path(name))
    print(json.dumps(result), flush=True)
