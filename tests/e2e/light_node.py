"""A node without an engine: hello, held heartbeats, leases, and rollouts out of a hat. A thousand fit a machine.

What of a node costs the coordinator anything is done as the daemon does it (`node.membership`, `node.delivery`): one
heartbeat held at a time, one request for leases, and slices that are sent again until they are acknowledged. A snapshot
counts as installed as soon as it is heard of.
"""

from __future__ import annotations

import struct
from collections import Counter
from dataclasses import dataclass, field

import trio

from echo2.node.limits import Backoff
from echo2.node.membership import REJOIN_SECONDS_MAX
from echo2.p2p import messages as wire
from echo2.p2p.channel import request
from echo2.p2p.errors import ProtocolError, Refused, Unreachable
from echo2.p2p.identity import open_signed

STOP = 10
"""Of the model that `coordinator_process` writes."""

LEASE_WAIT_SECONDS = 30.0
HEARTBEAT_PAUSE_SECONDS = 0.25
TROUBLE = (Unreachable, Refused, ProtocolError)


@dataclass
class Record:
    """What a node knows of itself, by the system's monotonic clock, which all processes of the machine share."""

    sent: list[float] = field(default_factory=list)
    answered: list[float] = field(default_factory=list)
    acknowledged: dict[tuple[str, int], str] = field(default_factory=dict)
    """(lease id, sample) -> state in the acknowledgement of its slice."""
    acknowledged_at: list[tuple[float, int]] = field(default_factory=list)
    submit_seconds: list[float] = field(default_factory=list)
    troubles: Counter = field(default_factory=Counter)


class Hat:
    """Responses of so many tokens, made once: drawing one costs nothing."""

    def __init__(self, rng, tokens, kinds=16):
        self._rng = rng
        self._kinds = []
        for _ in range(kinds):
            drawn = [rng.randrange(10) for _ in range(tokens - 1)] + [STOP]
            logprobs = [-3 * rng.random() for _ in range(tokens)]
            self._kinds.append((struct.pack(f"<{tokens}i", *drawn), struct.pack(f"<{tokens}f", *logprobs)))

    def rollout(self, sample):
        tokens, logprobs = self._rng.choice(self._kinds)
        return wire.RolloutRecord(sample=sample, tokens=tokens, logprobs=logprobs, finish="stop")

    def slice(self, lease):
        samples = range(lease.sample_first, lease.sample_first + lease.sample_count)
        rollouts = tuple(map(self.rollout, samples))
        return wire.Slice(lease_id=lease.lease_id, manifest_hash=lease.manifest_hash, rollouts=rollouts)


@dataclass
class Pace:
    """Seconds from one submission of a node to its next, and samples asked for at a time. Shared by all of a process.

    0 seconds: as fast as it goes. None: nothing is asked for.
    """

    seconds: float | None = None
    samples: int = 2
    changed: trio.Event = field(default_factory=trio.Event)

    def set(self, seconds):
        self.seconds = seconds
        self.changed.set()
        self.changed = trio.Event()


class LightNode:
    """Runs until cancelled; `record` says what happened."""

    def __init__(self, *, identity, transport, coordinator, run, token, pace, hat, rng, clock):
        self.identity, self.transport, self.coordinator = identity, transport, coordinator
        self.run_name, self.token = run, token
        self.pace, self.hat, self.rng, self.clock = pace, hat, rng, clock
        self.record = Record()
        self.joined = trio.Event()
        self.heartbeat_seconds = 10.0
        self.finishing = False
        self.idle = trio.Event()
        self._notice = None
        self._installed = trio.Event()
        self._session, self._sequence = rng.randbytes(16), 0
        self._backoffs = {
            name: Backoff(rng, most=REJOIN_SECONDS_MAX) for name in ("hello", "heartbeat", "leases", "rollouts")
        }
        self._leases = self._spooled = 0

    async def ask(self, protocol, message, reply, wait=0.0):
        return await request(self.transport, self.coordinator, protocol, message, reply, wait_seconds=wait)

    async def run(self):
        await self._hello()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._beat)
            nursery.start_soon(self._work)

    async def _hello(self):
        message = wire.Hello(
            wire_versions=(1,), software="light", role="node", name="light", token=self.token, addresses=()
        )
        while True:
            try:
                welcome = await self.ask("hello", message, wire.Welcome)
            except TROUBLE as error:
                await self._trouble("hello", error)
                continue
            self.heartbeat_seconds = welcome.heartbeat_seconds
            self._backoffs["hello"].reset()
            self.joined.set()
            return

    async def _trouble(self, what, error):
        code = error.code if isinstance(error, Refused) else type(error).__name__
        self.record.troubles[f"{what}: {code}"] += 1
        await trio.sleep(self._backoffs[what].next(getattr(error, "retry_seconds", None)))

    async def _beat(self):
        while True:
            sent = self.clock()
            try:
                notice = await self._heartbeat()
            except TROUBLE as error:
                await self._trouble("heartbeat", error)
                await self._hello()
                continue
            self._backoffs["heartbeat"].reset()
            self.record.answered.append(self.clock())
            self._notice = notice
            if notice.manifest_hash is not None:
                self._installed.set()
            await trio.sleep(max(0.0, sent + HEARTBEAT_PAUSE_SECONDS - self.clock()))

    async def _heartbeat(self):
        self._sequence += 1
        seen = self._notice
        body = wire.HeartbeatBody(
            run=self.run_name,
            session=self._session,
            sequence=self._sequence,
            epoch=seen.epoch if seen else 0,
            version=seen.version if seen else None,
            manifest_hash=seen.manifest_hash if seen else None,
            state="working",
            leases_held=self._leases,
            rollouts_generated=0,
            rollouts_spooled=self._spooled,
            tokens_per_second=100.0,
            hold_seconds=self.heartbeat_seconds,
        )
        self.record.sent.append(self.clock())
        message = wire.Heartbeat(body=self.identity.sign("heartbeat", body))
        reply = await self.ask("heartbeat", message, wire.HeartbeatReply, self.heartbeat_seconds)
        notice = open_signed(reply.notice, self.coordinator.peer, "notice", wire.PoolNotice)
        assert (notice.peer, notice.sequence) == (self.identity.peer_id, body.sequence)
        return notice

    async def _work(self):
        await self._installed.wait()
        due = None
        while True:
            while self.pace.seconds is None:
                due = None
                self._rest()
                await self.pace.changed.wait()
            if due is None:  # nobody is in step with the others
                due = self.clock() + self.rng.random() * self.pace.seconds
            if leases := await self._lease():
                await trio.sleep(max(0.0, due - self.clock()))
                await self._deliver(leases)
                due = max(due + (self.pace.seconds or 0.0), self.clock())

    def _rest(self):
        if self.finishing:
            self.idle.set()

    async def _lease(self):
        message = wire.LeaseRequest(
            run=self.run_name,
            manifest_hash=self._notice.manifest_hash,
            samples_max=self.pace.samples,
            wait_seconds=0.0 if self.finishing else LEASE_WAIT_SECONDS,
        )
        try:
            reply = await self.ask("leases", message, wire.LeaseReply, LEASE_WAIT_SECONDS)
        except TROUBLE as error:
            await self._trouble("leases", error)
            return ()
        self._backoffs["leases"].reset()
        if not reply.leases:
            await trio.sleep(min(reply.retry_seconds, 1.0))
        self._leases = len(reply.leases)
        return reply.leases

    async def _deliver(self, leases):
        """Until they are acknowledged, however often the coordinator dies over it."""
        slices = tuple(map(self.hat.slice, leases))
        self._leases, self._spooled = 0, sum(len(one.rollouts) for one in slices)
        message = wire.SubmitRequest(run=self.run_name, slices=slices)
        while True:
            began = self.clock()
            try:
                reply = await self.ask("rollouts", message, wire.SubmitReply)
                break
            except TROUBLE as error:
                await self._trouble("rollouts", error)
        self._backoffs["rollouts"].reset()
        now = self.clock()
        self.record.submit_seconds.append(now - began)
        self.record.acknowledged_at.append((now, self._spooled))
        for part, ack in zip(slices, reply.acks, strict=True):
            for one in part.rollouts:
                self.record.acknowledged[part.lease_id.hex(), one.sample] = ack.state
        self._spooled = 0
