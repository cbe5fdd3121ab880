"""A process of many light nodes: `python light_host.py`, told what to be in its first line of input, as JSON.

Orders are lines of input: {"pace": seconds or null}, {"report": path} (what the nodes know, written there), each
answered by a line; the end of input ends it.
"""

from __future__ import annotations

import gc
import json
import random
import sys
import time
from pathlib import Path

import trio

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from e2e.light_node import Hat, LightNode, Pace

from echo2.p2p.identity import Identity
from echo2.p2p.libp2p_transport import open_libp2p_transport
from echo2.p2p.messages import PeerAddress


def say(**what):
    print(json.dumps(what), flush=True)


def summary(node):
    """A node's record as JSON has it."""
    acknowledged = [[lease, sample, state] for (lease, sample), state in node.record.acknowledged.items()]
    return vars(node.record) | {"acknowledged": acknowledged, "peer": node.identity.peer_id}


class Host:
    """`about`: coordinator {peer, addresses}, run, token, first, count, tokens, samples."""

    def __init__(self, about):
        self._about = about
        self._rng = random.Random(about["first"])
        self._pace = Pace(samples=about["samples"])
        self._hat = Hat(self._rng, about["tokens"])
        self._nodes = []

    async def run(self):
        async with trio.open_nursery() as nursery:
            for number in range(self._about["count"]):
                await nursery.start(self._node, self._about["first"] + number + 1)
            gc.collect()
            gc.freeze()
            say(joined=len(self._nodes))
            await self._obey()
            nursery.cancel_scope.cancel()

    async def _node(self, number, task_status):
        coordinator = self._about["coordinator"]
        identity = Identity(number.to_bytes(32, "big"))
        async with open_libp2p_transport(identity, []) as transport, trio.open_nursery() as nursery:
            node = LightNode(
                identity=identity,
                transport=transport,
                coordinator=PeerAddress(peer=coordinator["peer"], addresses=tuple(coordinator["addresses"])),
                run=self._about["run"],
                token=self._about["token"],
                pace=self._pace,
                hat=self._hat,
                rng=random.Random(number),
                clock=time.monotonic,
            )
            self._nodes.append(node)
            nursery.start_soon(node.run)
            await node.joined.wait()
            task_status.started()

    async def _obey(self):
        while line := await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
            order = json.loads(line)
            if "pace" in order:
                self._pace.set(order["pace"])
                say(pace=order["pace"])
            else:
                text = json.dumps([summary(node) for node in self._nodes])
                await trio.Path(order["report"]).write_text(text)
                say(reported=len(self._nodes))


if __name__ == "__main__":
    sys.stdin.reconfigure(encoding="utf-8")
    trio.run(Host(json.loads(sys.stdin.readline())).run)
