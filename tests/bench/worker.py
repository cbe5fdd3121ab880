"""One process of the bench: `python worker.py KIND SEED FOLDER`. Orders come as JSON lines, answers go back so.

Every process serves `stream` (so many bytes), `copy` (the same, fetched from upstream) and `hop` (the same, in chunks
verified and stored on the way), and can pull any of them; ours also fetches snapshots as a node does.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import struct
import sys
import time
from pathlib import Path
from typing import Any

import trio

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.links import MIB, Pipe, open_link

from echo2.p2p.broadcast import Broadcaster
from echo2.p2p.channel import answering, request
from echo2.p2p.disk_store import DiskStore
from echo2.p2p.identity import Identity, payload_hash
from echo2.p2p.manifest import make_manifest
from echo2.p2p.messages import (
    Ack,
    BroadcastPlan,
    ManifestReply,
    PeerAddress,
    PlanEdge,
    PlanEntry,
    Signed,
    Ticket,
)

COUNT = struct.Struct(">Q")
RUN = "bench"
COORDINATOR = Identity(b"\x63" * 32)
PIECE = random.Random(0).randbytes(MIB)
DIGEST = hashlib.sha256(PIECE).digest()


class Worker:
    """State between orders."""

    def __init__(self, link: Any, kind: str, folder: Path) -> None:
        self.link = link
        self.folder = folder
        self.upstream = ""
        self.bulk = trio.CancelScope()
        link.serve("stream", self.send_bytes)
        link.serve("copy", self.copy)
        link.serve("hop", self.hop)
        if kind == "ours":
            self.store = DiskStore(folder / "store")
            # The broadcaster serves `chunks`, which is where `stream` was: orders say which of the two is wanted.
            self.broadcaster = Broadcaster(
                link.transport, self.store, COORDINATOR.peer_id, clock=time.monotonic, complain=lambda *_: None
            )
            link.transport.set_handler("hello", answering(Ack, self._count, lambda *_: None))

    async def _count(self, _peer: str, message: Ack) -> Ack:
        return Ack(count=message.count + 1)

    # services

    async def send_bytes(self, pipe: Pipe) -> None:
        (left,) = COUNT.unpack(await exactly(pipe, COUNT.size))
        while left > 0:
            await pipe.send_all(PIECE if left >= MIB else PIECE[:left])
            left -= MIB

    async def copy(self, pipe: Pipe) -> None:
        """What comes, goes."""
        wanted = await exactly(pipe, COUNT.size)
        source = await self.link.open(self.upstream, "stream")
        await source.send_all(wanted)
        (left,) = COUNT.unpack(wanted)
        while left > 0:
            data = await source.receive_some(MIB)
            left -= len(data)
            await pipe.send_all(data)

    async def hop(self, pipe: Pipe) -> None:
        """What comes is verified by its SHA-256, stored in a thread, and goes on."""
        wanted = await exactly(pipe, COUNT.size)
        source = await self.link.open(self.upstream, "stream")
        await source.send_all(wanted)
        (left,) = COUNT.unpack(wanted)
        with (self.folder / "hop").open("wb", buffering=0) as file:
            while left > 0:
                piece = await exactly(source, MIB)
                left -= MIB
                await trio.to_thread.run_sync(_keep, file, piece)
                await pipe.send_all(piece)

    # orders

    async def order_cpu(self, _order: dict[str, Any]) -> float:
        return time.process_time()

    async def order_upstream(self, order: dict[str, Any]) -> None:
        self.upstream = order["address"]

    async def order_pull(self, order: dict[str, Any]) -> float:
        """Seconds for so many bytes of a service."""
        pipe = await self.link.open(order["address"], order["service"])
        start = time.perf_counter()
        await pipe.send_all(COUNT.pack(order["bytes"]))
        left = order["bytes"]
        while left > 0:
            data = await pipe.receive_some(MIB)
            if not data:
                raise EOFError(f"{left} bytes are missing")
            left -= len(data)
        return time.perf_counter() - start

    async def order_broadcast(self, _order: dict[str, Any]) -> None:
        self.broadcaster.serve()

    async def order_publish(self, order: dict[str, Any]) -> dict[str, str]:
        """A snapshot of fresh bytes in the store; its signed manifest."""
        path = self.folder / "export"
        with path.open("wb") as file:
            for _ in range(order["bytes"] // MIB):
                file.write(os.urandom(MIB))
        identity = Identity(bytes([1]) * 32)
        manifest = make_manifest(
            await self.store.measure(path),
            run=RUN,
            publisher=identity.peer_id,
            epoch=0,
            version=order["version"],
            domain="f16",
            previous_hash=None,
            created_seconds=time.time(),
        )
        signed = identity.sign("manifest", manifest)
        await self.store.adopt(signed, manifest, path)
        return {"payload": signed.payload.hex(), "signature": signed.signature.hex()}

    async def order_fetch(self, order: dict[str, Any]) -> float:
        """Seconds to the installed snapshot, by a plan in which each of `chain` takes all from the one before."""
        signed = Signed(
            payload=bytes.fromhex(order["manifest"]["payload"]), signature=bytes.fromhex(order["manifest"]["signature"])
        )
        manifest_hash = payload_hash(signed)
        peers = [_peer(address) for address in order["chain"]]
        chunks = order["chunks"]
        entries = tuple(
            PlanEntry(node=node, edges=(PlanEdge(source=source.peer, first=0, stop=chunks),))
            for source, node in itertools.pairwise(peers)
        )
        plan = BroadcastPlan(
            run=RUN,
            manifest_hash=manifest_hash,
            epoch=0,
            version=order["version"],
            chunks=chunks,
            kind="chain",
            root=peers[0],
            entries=entries,
        )
        ticket = Ticket(run=RUN, manifest_hash=manifest_hash, peer=self.link.transport.peer_id)
        reply = ManifestReply(
            manifest=signed, plan=COORDINATOR.sign("plan", plan), ticket=COORDINATOR.sign("ticket", ticket)
        )
        start = time.perf_counter()
        await self.broadcaster.fetch(reply, publisher=peers[0].peer, run=RUN)
        return time.perf_counter() - start

    async def order_discard(self, _order: dict[str, Any]) -> None:
        for snapshot in self.store.snapshots():
            await self.store.discard(snapshot.manifest_hash)

    async def order_control(self, order: dict[str, Any]) -> list[float]:
        """Round trips of small requests, in seconds, while bulk comes in from the same peer."""
        peer = _peer(order["address"])
        trips: list[float] = []
        async with trio.open_nursery() as nursery:

            async def bulk() -> None:
                pipe = await self.link.open(order["address"], "stream")
                await pipe.send_all(COUNT.pack(1 << 40))
                while await pipe.receive_some(MIB):
                    pass

            await request(self.link.transport, peer, "hello", Ack(), Ack)
            nursery.start_soon(bulk)
            await trio.sleep(order["warm_seconds"])
            until = time.perf_counter() + order["seconds"]
            while time.perf_counter() < until:
                start = time.perf_counter()
                await request(self.link.transport, peer, "hello", Ack(), Ack)
                trips.append(time.perf_counter() - start)
                await trio.sleep(0.02)
            nursery.cancel_scope.cancel()
        return trips


def _keep(file: Any, piece: bytes) -> None:
    if hashlib.sha256(piece).digest() != DIGEST:
        raise ValueError("a piece came damaged")
    file.write(piece)


def _peer(address: str) -> PeerAddress:
    peer, where = address.split()
    return PeerAddress(peer=peer, addresses=(where,))


async def exactly(pipe: Pipe, count: int) -> bytes:
    parts: list[bytes] = []
    while count > 0:
        part = await pipe.receive_some(count)
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


async def main(kind: str, seed: str, folder: str) -> None:
    """Take orders until the input ends."""
    async with open_link(kind, int(seed)) as link:
        worker = Worker(link, kind, Path(folder))
        print(json.dumps(link.address), flush=True)
        while line := await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
            order = json.loads(line)
            answer = await getattr(worker, f"order_{order['order']}")(order)
            print(json.dumps(answer), flush=True)
    os._exit(0)


if __name__ == "__main__":
    import logging

    logging.basicConfig(level=logging.CRITICAL)
    if os.environ.get("BENCH_PROFILE") and sys.argv[2] == os.environ["BENCH_PROFILE"]:
        import cProfile
        import pstats

        profile = cProfile.Profile(time.thread_time)
        exit_now, os._exit = os._exit, lambda code: None  # type: ignore[assignment]
        profile.runcall(trio.run, main, *sys.argv[1:])
        with Path(os.environ["BENCH_PROFILE_TO"]).open("w") as out:
            pstats.Stats(profile, stream=out).sort_stats("tottime").print_stats(45)
    else:
        trio.run(main, *sys.argv[1:])
