"""The node's work: ask for leases, generate them batch by batch, hand the rollouts to the spool.

While the engine works on one batch the leases of the next are already asked for. No lease is ever asked for that cannot
be honoured: before another snapshot is loaded, the asking stops, what is held is generated, and only then the engine
changes its weights (`drained`). A request for leases is never cancelled: the coordinator may just have granted it.
"""

from __future__ import annotations

import logging
from collections import deque
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from echo2.p2p.channel import request
from echo2.p2p.errors import RETRY_SECONDS_MAX, ProtocolError, Refused, SchemaViolation, Unreachable
from echo2.p2p.log_lines import short, shorts, tell
from echo2.p2p.messages import SAMPLES_MAX, SLICES_MAX, Lease, LeaseReply, LeaseRequest, Slice

from .engine import EngineError, EngineFailed, OrderRefused, SliceOrder, SliceResult
from .episodes import play_slices
from .lifecycle import Blocked, Cleared, State
from .limits import Backoff, batch_samples
from .spool import Finished, SpoolFull
from .tokenizer import fetch_text

if TYPE_CHECKING:
    import random
    from collections.abc import AsyncIterator, Sequence

    from echo2.p2p.join import JoinString
    from echo2.p2p.transport import Transport
    from echo2.tasks.scorer import Scorer
    from echo2.tasks.token_text import TokenText

    from .config import NodeSettings
    from .engine import Engine
    from .membership import Member
    from .situation import Situation
    from .spool import Spool

log = logging.getLogger(__name__)

ENGINE_RETRY_SECONDS = 60.0
"""After the engine failed again and again: a pause long enough not to be a restart loop."""

SPOOL_RETRY_SECONDS = 5.0
"""A full disk is looked at again this often; nothing is generated meanwhile."""

LEASE_SECONDS_MAX = 86_400.0
"""Longest that a lease is worked on, whatever its duration: as much as a coordinator may set."""

TOKENIZER_ATTEMPTS = 3
"""In a row, with growing pauses, before the engine counts as failed: the leases in hand expire meanwhile."""

LATE = "it expired before its turn; this machine is slower than it was"

PAUSE_SECONDS_MIN = 0.2
"""Between two requests that brought nothing, whatever the coordinator says."""


@dataclass(frozen=True, slots=True)
class Held:
    """A lease in hand. After `expires_at` (our clock; durations count from receipt) its work is for nothing."""

    lease: Lease
    run: str
    expires_at: float


class Worker:
    """Owns the leases in hand. `ask` and `generate` run side by side."""

    def __init__(
        self,
        situation: Situation,
        *,
        config: NodeSettings,
        transport: Transport,
        join: JoinString,
        engine: Engine,
        spool: Spool,
        member: Member,
        rng: random.Random,
        sandbox: Scorer | None = None,
    ) -> None:
        self._situation = situation
        self._config = config
        self._transport = transport
        self._join = join
        self._engine = engine
        self._spool = spool
        self._member = member
        self._backoff = Backoff(rng)
        self._rng = rng
        self._sandbox = sandbox
        self._text: TokenText | None = None
        self._queue: deque[Held] = deque()
        self._asking = False
        self._generating: tuple[Held, ...] = ()
        self._draining = 0
        self._lease_seconds: float | None = None
        self.expired = 0
        self.refused = 0

    @property
    def idle(self) -> bool:
        """No lease in hand, and none on its way."""
        return not (self._asking or self._queue or self._generating)

    @asynccontextmanager
    async def drained(self) -> AsyncIterator[None]:
        """Inside, no lease is in hand or asked for, and the engine is at rest."""
        self._draining += 1
        self._situation.notify()
        try:
            await self._situation.until(lambda: self.idle)
            yield
        finally:
            self._draining -= 1
            self._situation.notify()

    # asking

    async def ask(self) -> None:
        """For ever: keep up to one batch of leases waiting behind the one in work."""
        situation = self._situation
        while True:
            await situation.until(self._may_ask)
            membership, snapshot = situation.membership, situation.installed
            if membership is None or snapshot is None:
                continue
            wait: float | None
            # With a newer snapshot on its way, a held request would only hold up its loading.
            hold_seconds = 0.0 if situation.behind else self._config.lease_wait_seconds
            self._asking = True
            try:
                reply = await request(
                    self._transport,
                    self._join.coordinator,
                    "leases",
                    LeaseRequest(
                        run=membership.descriptor.run,
                        manifest_hash=snapshot.manifest_hash,
                        samples_max=self._room(),
                        wait_seconds=hold_seconds,
                    ),
                    LeaseReply,
                    wait_seconds=hold_seconds,
                )
                self._take(reply, membership.descriptor.run, snapshot.manifest_hash)
                self._backoff.reset()
                situation.succeeded("leases")
                retry_seconds = min(reply.retry_seconds, RETRY_SECONDS_MAX)
                wait = None if reply.leases else retry_seconds * (1 + 0.2 * self._rng.random())
                situation.lease_reason = "" if reply.leases else reply.reason
            except Unreachable as error:
                self._member.lost(membership, error)
                wait = self._backoff.next()
            except Refused as error:
                situation.failed("leases", error)
                situation.lease_reason = error.detail
                wait = self._backoff.next(error.retry_seconds)
            except ProtocolError as error:
                situation.protocol_errors += 1
                situation.failed("leases", error)
                wait = self._backoff.next()
            finally:
                self._asking = False
                situation.notify()
            if wait is not None:
                await self._rest(max(wait, PAUSE_SECONDS_MIN))

    async def _rest(self, seconds: float) -> None:
        """Wait before asking again, less when there is news that may change the answer."""
        seen = self._news()
        await self._situation.pause(seconds, unless=lambda: self._news() != seen)

    def _news(self) -> tuple[object, ...]:
        notice = self._situation.notice
        return (self._situation.order, notice and notice.run_state)

    def _may_ask(self) -> bool:
        return self._situation.state is State.WORKING and not self._draining and self._room() > 0

    def _room(self) -> int:
        """Samples to ask for: what is missing to one batch in waiting."""
        wanted = batch_samples(
            self._situation.samples_rate.per_second,
            batch_seconds=self._config.batch_seconds,
            lease_seconds=self._lease_seconds,
            samples_max=self._config.batch,
        )
        waiting = sum(held.lease.sample_count for held in self._queue)
        # A nearly full queue is left alone: many small requests would cost more than they bring.
        return wanted - waiting if 2 * waiting <= wanted and len(self._queue) < SLICES_MAX else 0

    def _take(self, reply: LeaseReply, run: str, manifest_hash: bytes) -> None:
        now = self._situation.clock()
        for lease in reply.leases:
            if lease.manifest_hash != manifest_hash:
                raise SchemaViolation("a lease names another snapshot than was asked for")
            if lease.sample_first + lease.sample_count > SAMPLES_MAX:
                raise SchemaViolation(f"a lease of {lease.sample_count} samples from {lease.sample_first} on")
        for lease in reply.leases:
            self._lease_seconds = min(lease.duration_seconds, LEASE_SECONDS_MAX)
            self._queue.append(Held(lease, run, now + self._lease_seconds))
        if reply.leases:
            taken = shorts(lease.lease_id for lease in reply.leases)
            tell(log, logging.INFO, "leases_received", "%d leases", len(taken), leases=taken)
        self._count_held()

    # generating

    async def generate(self) -> None:
        """For ever: everything in waiting is the next batch."""
        while True:
            await self._situation.until(lambda: self._queue)
            batch = self._next_batch()
            if not batch:
                continue
            self._generating = batch
            try:
                await self._run_batch(batch)
            finally:
                self._generating = ()
                self._count_held()

    def _next_batch(self) -> tuple[Held, ...]:
        now = self._situation.clock()
        batch: list[Held] = []
        late: list[str] = []
        while self._queue and len(batch) < SLICES_MAX:
            held = self._queue.popleft()
            if held.expires_at > now:
                batch.append(held)
            else:
                self.expired += 1
                late.append(short(held.lease.lease_id))
        if late:
            self._situation.failed("lease", LATE)
            tell(log, logging.WARNING, "leases_expired", "%d leases: %s", len(late), LATE, leases=late)
        self._count_held()
        return tuple(batch)

    async def _run_batch(self, batch: Sequence[Held]) -> None:
        situation = self._situation
        while True:
            started_at = situation.clock()
            try:
                with situation.engine_at(f"a batch of {sum(held.lease.sample_count for held in batch)}"):
                    results = await self._generate(batch)
            except OrderRefused as error:
                await self._without_the_refused(batch, error)
                return
            except EngineError as error:
                situation.failed("engine", error)
                situation.happened(Blocked("engine", str(error)))
                await situation.pause(ENGINE_RETRY_SECONDS, unless=lambda: situation.state is State.FINISHING)
                finishing = situation.state is State.FINISHING
                situation.happened(Cleared("engine"))
                batch = [held for held in batch if held.expires_at > situation.clock()]
                if finishing or not batch or not isinstance(error, EngineFailed):
                    return
                continue
            situation.succeeded("engine")
            self._measure(results, situation.clock() - started_at)
            await self._spool_up(batch, results)
            return

    async def _generate(self, batch: Sequence[Held]) -> list[SliceResult]:
        """A run has leases of one turn, or leases of several."""
        leases = [held.lease for held in batch]
        if all(lease.sandbox is None for lease in leases):
            return await self._engine.generate([_order(lease) for lease in leases])
        if self._sandbox is None or any(lease.sandbox is None for lease in leases):
            raise OrderRefused("this node plays no sandbox, or the batch is of two kinds")
        return await play_slices(leases, self._engine, self._sandbox, await self._tokenizer())

    async def _tokenizer(self) -> TokenText:
        """The run's tokeniser, fetched when it is first needed. Raises EngineFailed when it is not to be had."""
        membership = await self._situation.joined()
        wanted = membership.descriptor.tokenizer_sha256
        if self._text is not None and self._text.card.tokenizer_sha256 == wanted.hex():
            return self._text
        for attempt in range(1, TOKENIZER_ATTEMPTS + 1):
            try:
                self._text = await fetch_text(self._transport, self._join.coordinator, membership.descriptor)
                return self._text
            except (Unreachable, Refused, ProtocolError) as error:
                self._situation.failed("engine", error)
                why = error
            if attempt < TOKENIZER_ATTEMPTS:
                await trio.sleep(self._backoff.next())
        raise EngineFailed(f"the run's tokenizer cannot be fetched: {why}")

    async def _without_the_refused(self, batch: Sequence[Held], error: OrderRefused) -> None:
        """One order in the batch cannot be run here: the others must not pay for it."""
        if len(batch) > 1:
            for held in batch:
                await self._run_batch([held])
            return
        self.refused += 1
        self._situation.failed("lease", error)
        refused = [short(batch[0].lease.lease_id)]
        tell(log, logging.WARNING, "leases_refused", "a lease cannot be run here: %s", error, leases=refused)

    async def _spool_up(self, batch: Sequence[Held], results: Sequence[SliceResult]) -> None:
        """Durable before anything else; with a full disk, wait here: what is generated is not thrown away."""
        finished = [_finished(held, result) for held, result in zip(batch, results, strict=True)]
        while True:
            try:
                self._spool.add(finished)
                break
            except SpoolFull as error:
                self._situation.failed("spool", error)
                self._situation.happened(Blocked("disk", str(error)))
                await trio.sleep(SPOOL_RETRY_SECONDS)
        made = shorts(held.lease.lease_id for held in batch)
        tell(log, logging.INFO, "leases_generated", "%d leases are generated and spooled", len(made), leases=made)
        self._situation.happened(Cleared("disk"))
        self._situation.succeeded("spool")
        self._situation.counts = self._spool.counts()
        self._situation.notify()

    def _measure(self, results: Sequence[SliceResult], seconds: float) -> None:
        samples = sum(len(result.rollouts) for result in results)
        rollouts = [rollout for result in results for rollout in result.rollouts]
        tokens = sum(sum(rollout.spans[::2]) or len(rollout.tokens) // 4 for rollout in rollouts)
        self._situation.samples_rate.measured(samples, seconds)
        self._situation.tokens_rate.measured(tokens, seconds)

    def _count_held(self) -> None:
        self._situation.leases_held = len(self._queue) + len(self._generating)
        self._situation.notify()


def _order(lease: Lease) -> SliceOrder:
    return SliceOrder(lease.seed, lease.sample_first, lease.sample_count, lease.prompt_tokens, lease.sampling)


def _finished(held: Held, result: SliceResult) -> Finished:
    lease = held.lease
    piece = Slice(lease_id=lease.lease_id, manifest_hash=lease.manifest_hash, rollouts=result.rollouts)
    return Finished(held.run, lease.kind, lease.ordinal, lease.version, piece)
