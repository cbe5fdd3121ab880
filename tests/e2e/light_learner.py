"""A learner without weights: it publishes, fetches, "trains" on what comes, checkpoints in memory and reports.

It does towards the coordinator what the daemon does: reports before it asks under a new epoch, sends a report again
until it is acknowledged, and asks on from the last sequence it was given.
"""

from __future__ import annotations

from collections import Counter

import trio

from echo2.p2p import messages as wire
from echo2.p2p.channel import request
from echo2.p2p.chunks import hash_bytes
from echo2.p2p.errors import ProtocolError, Refused, Unreachable
from echo2.p2p.manifest import make_manifest

FETCH_WAIT_SECONDS = 5.0
RETRY_SECONDS = 0.3
TRAIN_SECONDS = 30.0
"""What it says that a step takes: so a light node of a rollout in some seconds is leased two at a time."""


class LightLearner:
    """`states` is what it has reported and had acknowledged: (lease id, sample) -> step."""

    def __init__(self, *, identity, transport, coordinator, run, rollouts_per_step, kappa, staleness_max, steps, wall):
        self.identity, self.transport, self.coordinator = identity, transport, coordinator
        self.run_name, self.steps, self.wall = run, steps, wall
        self.R, self.kappa, self.S = rollouts_per_step, kappa, staleness_max
        self.version, self.after = 0, 0
        self.consumed, self.stale = {}, {}
        self.served = Counter()
        self.served_as = {}
        self.troubles = Counter()
        self.run_state = ""
        self._buffer = []

    @property
    def buffered(self):
        """What it was given and has not reported."""
        return {key for key, *_ in self._buffer}

    async def _insist(self, protocol, message, reply, wait=0.0):
        """As the daemon: again, after a hello, until it is answered."""
        while True:
            try:
                return await request(self.transport, self.coordinator, protocol, message, reply, wait_seconds=wait)
            except (Unreachable, Refused, ProtocolError) as error:
                code = error.code if isinstance(error, Refused) else type(error).__name__
                self.troubles[f"{protocol}: {code}"] += 1
                await trio.sleep(RETRY_SECONDS)

    async def run(self):
        hello = wire.Hello(wire_versions=(1,), software="light", role="learner", name="learner", addresses=())
        await self._insist("hello", hello, wire.Welcome)
        await self._report()
        await self._publish()
        while self.version < self.steps:
            await self._fetch()
            await self._train()
        while self.run_state not in ("finished", "stopped"):
            await self._fetch()

    async def _publish(self):
        content = hash_bytes(b"snapshot %d " % self.version * 1000)
        manifest = make_manifest(
            content,
            run=self.run_name,
            publisher=self.identity.peer_id,
            epoch=0,
            version=self.version,
            domain="f32",
            previous_hash=None,
            created_seconds=self.wall(),
        )
        signed = self.identity.sign("manifest", manifest)
        await self._insist("publish", wire.PublishRequest(manifest=signed), wire.PublishReply)

    async def _fetch(self):
        message = wire.AdmittedRequest(
            run=self.run_name, after_sequence=self.after, rollouts_max=512, wait_seconds=FETCH_WAIT_SECONDS
        )
        reply = await self._insist("admitted", message, wire.AdmittedReply, FETCH_WAIT_SECONDS)
        self.run_state = reply.run_state
        for rollout in reply.rollouts:
            key = rollout.lease_id, rollout.sample
            self.served[key] += 1
            assert self.served_as.setdefault(rollout.sequence, key) == key, "one sequence, two rollouts"
            self.after = max(self.after, rollout.sequence)
            self._buffer.append((key, rollout.version, rollout.ordinal))

    async def _train(self):
        """A step as soon as there are R that are fresh enough."""
        old = [each for each in self._buffer if each[1] < self.version - self.S]
        if old:
            self._buffer = [each for each in self._buffer if each[1] >= self.version - self.S]
            await self._report(stale=old)
        if len(self._buffer) < self.R:
            return
        batch, self._buffer = self._buffer[: self.R], self._buffer[self.R :]
        step, self.version = self.version, self.version + 1
        await self._report(batch, step)
        if self.version % self.kappa == 0 or self.version == self.steps:
            await self._publish()

    async def _report(self, batch=(), step=None, stale=()):
        finished = [self._finished(key, "consumed", step) for key, *_ in batch]
        finished += [self._finished(key, "stale", self.version) for key, *_ in stale]
        report = wire.LearnerReport(
            run=self.run_name,
            epoch=0,
            version=self.version,
            finished=tuple(finished),
            steps=(self._metrics(batch, step),) if batch else (),
            status="training",
            consumed=len(self.consumed) + len(batch),
        )
        await self._insist("report", report, wire.Ack)
        self.consumed |= dict.fromkeys((key for key, *_ in batch), step)
        self.stale |= dict.fromkeys((key for key, *_ in stale), self.version)

    @staticmethod
    def _finished(key, state, step):
        return wire.Finished(lease_id=key[0], sample=key[1], state=state, step=step, reason="")

    @staticmethod
    def _metrics(batch, step):
        return wire.StepMetrics(
            step=step,
            rollouts=len(batch),
            groups=len({ordinal for *_, ordinal in batch}),
            groups_without_spread=0,
            staleness=step - min(version for _, version, _ in batch),
            staleness_mean=1.0,
            reward_mean=0.5,
            loss=0.1,
            ratio_mean=1.0,
            clip_share=0.0,
            kl_sampler_learner=0.001,
            entropy=0.5,
            response_tokens_mean=100.0,
            gradient_norm=1.0,
            train_seconds=TRAIN_SECONDS,
            idle_seconds=1.0,
        )
