"""A coordinator, its pool and its scoring in one, over the real transport: it feeds one learner and keeps the books.

It leases the prompts of a curriculum in order, a slot (group, sample) once; a slot whose rollout was dropped is leased
anew. Long answers take longer to come. Whatever a learner that is killed again and again may say, one rollout has one
terminal state, and nothing is consumed that no checkpoint on the disk covers.
"""

from __future__ import annotations

import random
from collections import Counter
from contextlib import asynccontextmanager

import trio

from echo2.p2p import messages as wire
from echo2.p2p.channel import answering
from echo2.p2p.codec import pack_logprobs, pack_tokens
from echo2.p2p.identity import Identity, open_signed
from echo2.p2p.libp2p_transport import open_libp2p_transport

COORDINATOR, NODE = Identity(b"c" * 32), Identity(b"n" * 32)
RUN = "demo"
LONG_SHARE = 0.15
LONG_SECONDS = 0.4
HOLD_SECONDS = 0.15
"""How long a reply is kept back for the kill that is to come before it."""


class Strike:
    """A kill to come: at the `after`-th time that `phase` is reached, `delay` seconds later."""

    def __init__(self, phase, after=0, delay=0.0):
        self.phase, self.after, self.delay = phase, after, delay
        self.due = trio.Event()

    def reached(self):
        self.after -= 1
        if self.after < 0:
            self.due.set()

    def __str__(self):
        return f"{self.phase}, {self.after} times later, {self.delay:.3f} s on"


class Feed:
    """The run's books; they outlive every learner. `durable` says which version the newest checkpoint on disk has."""

    def __init__(
        self, learner, card, *, steps, durable, staleness_max=3, kappa=2, rollouts=8, group=4, seed=0, fixed=False
    ):
        self.seed = seed
        self.learner, self.card = learner, card
        self.steps, self.staleness_max, self.kappa = steps, staleness_max, kappa
        self.rollouts_per_step, self.group = rollouts, group
        self.durable = durable
        self.strike = None
        self.rng = random.Random(seed)
        self.rollouts, self.states, self.steps_of, self.reasons = {}, {}, {}, Counter()
        self.slots = {
            (ordinal, sample): None for ordinal in range(steps * rollouts // group) for sample in range(group)
        }
        self.manifests, self.metrics, self.statuses, self.epochs = [], {}, [], []
        self.newest_report = None
        self.sequence = 0
        self.changed = trio.Event()
        self.prompts = {}
        self.faults = []
        if fixed:
            for slot in self.slots:
                self.admit(slot, self.lease(slot, version=0))

    # the pool

    def lease(self, slot, *, version):
        """A slot's answer is as long each time it is drawn: what is slow once is slow again."""
        lease = self.rng.randbytes(16)
        self.slots[slot] = (lease, slot[1])
        draw = random.Random(f"{self.seed} {slot}")
        prompt = self.prompts.setdefault(slot[0], [draw.randrange(10) for _ in range(3)])
        room = self.card.context_tokens - len(prompt)
        length = room if draw.random() < LONG_SHARE else draw.randint(2, max(2, room // 4))
        tokens = [draw.randrange(10) for _ in range(length - 1)] + [self.card.stop_ids[0]]
        return {"lease": lease, "version": version, "prompt": prompt, "tokens": tokens, "long": length == room}

    def admit(self, slot, made):
        self.sequence += 1
        self.rollouts[made["lease"], slot[1]] = wire.AdmittedRollout(
            sequence=self.sequence,
            lease_id=made["lease"],
            ordinal=slot[0],
            sample=slot[1],
            peer=NODE.peer_id,
            version=made["version"],
            prompt_tokens=pack_tokens(made["prompt"]),
            tokens=pack_tokens(made["tokens"]),
            logprobs=pack_logprobs([-1.5] * len(made["tokens"])),
            finish="stop",
            temperature=1.0,
            reward=float(self.rng.random() < 0.5),
        )
        self.wake()

    def wake(self):
        self.changed.set()
        self.changed = trio.Event()

    def useful(self):
        """Slots that are leased, held, admitted or consumed."""
        return sum(key is not None for key in self.slots.values())

    async def generate(self, nursery):
        """Oldest prompt first, paced to S."""
        while True:
            await trio.sleep(0.02)
            if not self.manifests:
                continue
            version = self.manifests[-1].version
            bound = (version + self.staleness_max + 1) * self.rollouts_per_step
            for slot, key in self.slots.items():
                if key is None and self.useful() < bound:
                    nursery.start_soon(self.deliver, slot, self.lease(slot, version=version))

    async def deliver(self, slot, made):
        await trio.sleep(LONG_SECONDS if made["long"] else 0.02)
        self.admit(slot, made)

    # the learner's desk

    async def at(self, phase):
        if self.strike is not None and self.strike.phase == phase:
            self.strike.reached()
            if self.strike.due.is_set():
                await trio.sleep(HOLD_SECONDS)

    def descriptor(self):
        return wire.RunDescriptor(
            run=RUN,
            task="sums",
            model="tiny",
            tokenizer_sha256=bytes.fromhex(self.card.tokenizer_sha256),
            vocabulary_size=self.card.vocabulary_size,
            context_tokens=self.card.context_tokens,
            learner=wire.PeerAddress(peer=self.learner),
            staleness_max=self.staleness_max,
            publish_period=self.kappa,
            rollouts_per_step=self.rollouts_per_step,
            group_size=self.group,
            steps=self.steps,
            sampling=wire.Sampling(temperature=1.0, tokens_max=self.card.context_tokens, stop_ids=self.card.stop_ids),
        )

    @property
    def published(self):
        return [(manifest.epoch, manifest.version) for manifest in self.manifests]

    async def hello(self, peer, message):
        assert (peer, message.role) == (self.learner, "learner")
        await self.at("hello")
        newest = self.manifests[-1] if self.manifests else None
        return wire.Welcome(
            wire_version=1,
            node_state="active",
            coordinator_time_seconds=0.0,
            heartbeat_seconds=10.0,
            descriptor=COORDINATOR.sign("run", self.descriptor()),
            standing=wire.Standing(
                incarnation=b"i" * 16,
                epoch=max(self.epochs, default=None),
                published_epoch=newest.epoch if newest else None,
                published_version=newest.version if newest else None,
                learner_version=self.newest_report.version if self.newest_report else 0,
                admitted_sequence=self.sequence,
            ),
        )

    async def admitted(self, peer, message):
        def ready():
            return tuple(
                rollout
                for key, rollout in self.rollouts.items()
                if rollout.sequence > message.after_sequence and key not in self.states
            )

        with trio.move_on_after(min(message.wait_seconds, 1.0)):
            while not ready():
                await self.changed.wait()
        await self.at("fetch")
        return wire.AdmittedReply(run_state="running", rollouts=ready()[: message.rollouts_max], withdraw=())

    async def report(self, peer, message):
        if self.newest_report is None or message.epoch != self.newest_report.epoch:
            assert message.epoch > max(self.epochs, default=-1), "an epoch was used twice"
            self.epochs.append(message.epoch)
        self.newest_report = message
        self.statuses.append(message.status)
        for entry in message.finished:
            self.settle(entry)
        for metrics in message.steps:
            self.metrics[metrics.step] = metrics
        if any(entry.state == "consumed" for entry in message.finished):
            await self.at("report")
        self.wake()
        return wire.Ack(count=len(message.finished))

    def settle(self, entry):
        key = (entry.lease_id, entry.sample)
        rollout = self.rollouts[key]
        assert self.states.setdefault(key, entry.state) == entry.state, "a rollout changed its terminal state"
        if entry.state == "consumed":
            assert entry.step < self.durable(), "consumption was reported before it was durable"
            assert self.steps_of.setdefault(key, entry.step) == entry.step, "a rollout was consumed by two steps"
            assert 0 <= entry.step - rollout.version <= self.staleness_max, "staler than S"
        else:
            self.reasons[entry.reason] += 1
            slot = (rollout.ordinal, rollout.sample)
            if self.slots[slot] == key:
                self.slots[slot] = None

    async def publish(self, peer, message):
        manifest = open_signed(message.manifest, self.learner, "manifest", wire.Manifest)
        assert manifest.version <= self.durable(), "published before it was durable"
        if manifest not in self.manifests:
            assert all((manifest.epoch, manifest.version) > order for order in self.published)
            self.manifests.append(manifest)
        await self.at("publish")
        plan = wire.BroadcastPlan(
            run=RUN,
            manifest_hash=b"h" * 32,
            epoch=manifest.epoch,
            version=manifest.version,
            chunks=1,
            kind="star",
            root=wire.PeerAddress(peer=self.learner),
            entries=(),
        )
        return wire.PublishReply(plan=COORDINATOR.sign("plan", plan))

    @asynccontextmanager
    async def open(self):
        """Serving until the end of the block; gives the address to dial."""
        async with open_libp2p_transport(COORDINATOR, ("/ip4/127.0.0.1/tcp/0",)) as transport:
            for protocol, kind, answer in (
                ("hello", wire.Hello, self.hello),
                ("admitted", wire.AdmittedRequest, self.admitted),
                ("report", wire.LearnerReport, self.report),
                ("publish", wire.PublishRequest, self.publish),
            ):
                transport.set_handler(protocol, answering(kind, self.noting(answer), self.complain, wait_seconds=60.0))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.generate, nursery)
                yield f"{transport.addresses[0]}/p2p/{COORDINATOR.peer_id}"
                nursery.cancel_scope.cancel()

    def noting(self, answer):
        """What is wrong is kept: the transport loses no more than the stream it happened on."""

        async def noted(peer, message):
            try:
                return await answer(peer, message)
            except Exception as error:
                self.faults.append(repr(error))
                raise

        return noted

    @staticmethod
    def complain(peer, error):
        """A killed learner's connections break: that is what is tested."""

    @property
    def over(self):
        """Everything consumed and acknowledged, and the last version published."""
        consumed = sum(state == "consumed" for state in self.states.values())
        return consumed == len(self.slots) and self.published[-1:] and self.published[-1][1] == self.steps

    def check_books(self, consumed_runs):
        """At the end: each slot consumed once, R by each step, and the checkpoint says exactly the same."""
        assert not self.faults
        consumed = {key for key, state in self.states.items() if state == "consumed"}
        slots = Counter((self.rollouts[key].ordinal, key[1]) for key in consumed)
        assert slots == Counter(dict.fromkeys(self.slots, 1)), "a prompt was skipped, or a slot consumed twice"
        assert Counter(self.steps_of.values()) == Counter(dict.fromkeys(range(self.steps), self.rollouts_per_step))
        masks = {ordinal: mask for first, stop, mask in consumed_runs for ordinal in range(first, stop)}
        assert masks == dict.fromkeys(range(len(self.slots) // self.group), (1 << self.group) - 1)
        assert self.newest_report.consumed == len(consumed)
        assert set(self.metrics) == set(range(self.steps))
        assert all(metrics.staleness <= self.staleness_max for metrics in self.metrics.values())
