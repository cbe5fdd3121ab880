"""Being in the pool: hello until welcomed, then heartbeats until the coordinator is lost, and again."""

from __future__ import annotations

import functools
import logging
import math
import re
from contextlib import suppress
from typing import TYPE_CHECKING

import trio

from echo2.p2p.channel import request
from echo2.p2p.errors import (
    AnotherPeer,
    ConfigurationError,
    ProtocolError,
    Refused,
    SchemaViolation,
    Unreachable,
)
from echo2.p2p.identity import open_signed
from echo2.p2p.messages import (
    WIRE_VERSION,
    Heartbeat,
    HeartbeatBody,
    HeartbeatReply,
    Hello,
    PoolNotice,
    RunDescriptor,
    Welcome,
)

from .lifecycle import Blocked, Cleared, Joined, Lost
from .limits import Backoff
from .situation import Membership
from .verdict import standing_words

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from echo2.p2p.identity import Identity
    from echo2.p2p.join import JoinString
    from echo2.p2p.messages import Fetching
    from echo2.p2p.transport import Transport

    from .config import NodeSettings
    from .situation import Situation

log = logging.getLogger(__name__)

HEARTBEAT_PAUSE_SECONDS_MIN = 0.25
"""Between two heartbeats when the coordinator answers at once: it decides how often (by holding), this is the bound,
whatever its welcome or a refusal says: at 5e-324 s a node would do nothing else."""

HEARTBEAT_SECONDS_MAX = 60.0
"""Longest between two heartbeats, whatever the welcome says: the reply is how a node hears of a new snapshot, and a
coordinator holds none for longer than half of it."""

GOODBYE_SECONDS = 3.0
"""For the last heartbeat of a process that was told to stop: whoever told it waits."""

REJOIN_SECONDS_MAX = 8.0
"""Longest between two attempts to reach a coordinator that is away. The transport may hold one back as long, so a node
is back within two heartbeats of its return; and a thousand nodes come again over as many seconds."""

SESSION_ENDED = "session_ended"
"""The coordinator's word that a later process goes on with this key."""

NO_TOKEN = frozenset({"token_missing", "token_unknown", "token_expired", "token_spent"})
"""Codes by which a coordinator turns away a key that it does not know."""

IDENTITY_LIVE = "identity_live"
"""Its word that another process with this key is alive; this one may go on when that one is over."""

MOVED = "moved"
"""Its word that this node works for another of its runs now: hello says for which."""

SHOWN = frozenset({IDENTITY_LIVE, "address_full", "network_full", "too_many_applied", "too_many_keys", "pool_full"})
"""Codes of a no that is not final, and that a person may do something about."""

BANNED = "banned"


class Member:
    """Owns `Situation.membership` and `Situation.notice`.

    `was_member` says whether this home has taken part in the run before. Then a coordinator that does not know its
    token has lost its ledger, or was started on another: the operator's to mend, so the node waits. `welcome` is told
    the run of each welcome, before anything is done for it.
    """

    def __init__(
        self,
        situation: Situation,
        *,
        config: NodeSettings,
        identity: Identity,
        transport: Transport,
        join: JoinString,
        software: str,
        rng: random.Random,
        addresses: Callable[[], tuple[str, ...]],
        fetching: Callable[[bytes | None], Fetching | None] = lambda _in_use: None,
        was_member: Callable[[], bool] = lambda: False,
        welcome: Callable[[str], None] = lambda _run: None,
        home: bytes | None = None,
    ) -> None:
        self._situation = situation
        self._addresses = addresses
        self._fetching = fetching
        self._unsaid = False
        self._was_member = was_member
        self._welcome = welcome
        self._config = config
        self._identity = identity
        self._transport = transport
        self._join = join
        self._software = software
        self._backoff = Backoff(rng)
        self._session = rng.randbytes(16)
        self._home = home
        self._sequence = 0
        self._memberships = 0
        self._told = ""
        self._said = ""

    @property
    def _run(self) -> str | None:
        membership = self._situation.membership
        return None if membership is None else membership.descriptor.run

    def lost(self, membership: Membership, error: Exception) -> None:
        """A request made under `membership` failed in a way that only a new hello can mend."""
        if membership is self._situation.membership and self._situation.facts.joined:
            if isinstance(error, Refused) and error.code == MOVED:
                log.info("moved: %s", error.detail)
            else:
                log.warning("the coordinator is lost: %s", error)
                self._situation.failed("coordinator", error)
            self._situation.happened(Lost())

    def announce(self) -> None:
        """Our addresses are others than the last hello said: say it again."""
        self._unsaid = True
        self._situation.notify()

    async def run(self) -> None:
        """Hello, stay, hello again. Raises ConfigurationError when the coordinator's no is final."""
        while True:
            await self._join_pool()
            self._backoff.reset()
            await self._situation.until(lambda: self._unsaid or not self._situation.facts.joined)
            if not self._situation.facts.joined:
                await trio.sleep(self._backoff.next())

    async def _join_pool(self) -> None:
        while True:
            wait: float | None = None
            most = math.inf
            self._unsaid = False
            hello = Hello(
                wire_versions=(WIRE_VERSION,),
                software=self._software,
                role="node",
                name=self._config.name,
                token=self._join.token,
                addresses=self._addresses(),
                run=self._join.run_wanted,
                price_micros_hour=self._config.price_micros_hour,
                session=self._session,
                home=self._home,
            )
            try:
                welcome = await request(self._transport, self._join.coordinator, "hello", hello, Welcome)
                self._welcomed(welcome)
                return
            except Refused as error:
                again = error.code in NO_TOKEN and (self._memberships or self._was_member())
                if error.retry_seconds is None and not again:
                    raise ConfigurationError(f"the coordinator refuses this node: {error.detail}") from error
                wait = error.retry_seconds
                self._not_in(error, told=error.detail)
                self._situation.joining_trouble = error.detail if error.code in SHOWN else ""
            except ProtocolError as error:
                self._not_in(error, told=str(error))
            except Unreachable as error:
                self._not_in(error)
                most = REJOIN_SECONDS_MAX
            await trio.sleep(min(self._backoff.next(wait), most))

    def _not_in(self, error: Exception, *, told: str | None = None) -> None:
        """Show why the pool is not joined. Who cannot be reached says nothing: what it said before may be why."""
        if told is not None:
            self._told = told
        reason = f"{error}; it said last: {self._told}" if told is None and self._told else str(error)
        self._situation.joining_trouble = ""
        if isinstance(error, AnotherPeer):  # the join string pins a key that is not there: no waiting brings it back
            reason = (
                f"another coordinator ({error.found}) answers at {error.where or 'its address'}; ask the operator for "
                "a new join string and start with --join"
            )
            self._situation.joining_trouble = reason
        self._situation.failed("coordinator", reason)
        kind = re.sub(r"[0-9.]+", "#", reason)
        if kind != self._said:  # a wait that counts down is no news
            self._said = kind
            log.warning("not in the pool: %s", reason)

    def _welcomed(self, welcome: Welcome) -> None:
        descriptor = open_signed(welcome.descriptor, self._join.peer, "run", RunDescriptor)
        if self._join.run_wanted not in {None, descriptor.run}:
            raise ConfigurationError(
                f"the coordinator runs {descriptor.run!r}, the join string is for {self._join.run!r}; ask for a new one"
            )
        if welcome.wire_version != WIRE_VERSION:
            raise SchemaViolation(f"the coordinator chose wire version {welcome.wire_version}, which was not offered")
        self._memberships += 1
        heartbeat_seconds = max(min(welcome.heartbeat_seconds, HEARTBEAT_SECONDS_MAX), HEARTBEAT_PAUSE_SECONDS_MIN)
        self._welcome(descriptor.run)
        self._situation.welcomed(Membership(self._memberships, descriptor, heartbeat_seconds))
        self._situation.succeeded("coordinator", "heartbeat")
        self._situation.joining_trouble = ""
        self._told = self._said = ""
        self._verdict(welcome.node_state)
        self._situation.happened(Joined())
        log.info("joined run %s of %s", descriptor.run, self._join.peer)

    async def beat(self) -> None:
        """Heartbeats: one at a time, held by the coordinator; a new one at once when something changes here."""
        situation = self._situation
        while True:
            membership = await situation.joined()
            sent_at, shown = situation.clock(), self._shown()
            pause = HEARTBEAT_PAUSE_SECONDS_MIN
            try:
                await self._heartbeat_unless_news(membership, shown)
            except ProtocolError as error:
                situation.protocol_errors += 1
                situation.failed("heartbeat", error)
                pause = membership.heartbeat_seconds
            except (Unreachable, Refused) as error:
                wait = error.retry_seconds if isinstance(error, Refused) else None
                if isinstance(error, Refused) and error.code == SESSION_ENDED:
                    raise ConfigurationError(f"this node's key is in use elsewhere: {error.detail}") from error
                live = isinstance(error, Refused) and error.code == IDENTITY_LIVE
                if live or not wait:  # a final no, or `retry at once`: either way hello says what is the matter
                    self.lost(membership, error)
                    continue
                pause = max(wait, HEARTBEAT_PAUSE_SECONDS_MIN)
            left = sent_at + min(pause, membership.heartbeat_seconds) - situation.clock()
            await situation.pause(left, unless=functools.partial(self._has_news, shown))

    async def _heartbeat_unless_news(self, membership: Membership, shown: tuple[object, ...]) -> None:
        """One heartbeat, given up when our own news (an install, a pause) must not wait for its held reply."""
        failure: Exception | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._cancel_on_news, shown, nursery.cancel_scope)
            try:
                notice = await self._heartbeat(membership)
                if notice.run == self._run:  # else it was held while the node was moved to another
                    self._situation.notice = notice
                self._situation.succeeded("heartbeat")
                self._situation.warned(notice.warning)
                self._verdict(notice.node_state, notice.node_reason, notice.node_expires_seconds)
                self._situation.notify()
            except (ProtocolError, Unreachable, Refused, ConfigurationError) as error:
                failure = error
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def _heartbeat(self, membership: Membership) -> PoolNotice:
        self._sequence += 1
        situation, snapshot = self._situation, self._situation.installed
        body = HeartbeatBody(
            run=membership.descriptor.run,
            session=self._session,
            sequence=self._sequence,
            epoch=snapshot.manifest.epoch if snapshot else 0,
            version=snapshot.manifest.version if snapshot else None,
            manifest_hash=snapshot.manifest_hash if snapshot else None,
            state=situation.says,
            leases_held=situation.leases_held,
            rollouts_generated=situation.counts.generated,
            rollouts_spooled=situation.counts.spooled,
            tokens_per_second=situation.tokens_rate.per_second or 0.0,
            hold_seconds=membership.heartbeat_seconds,
            late=situation.late,
            relayed=situation.relayed,
            fetching=self._fetching(snapshot.manifest_hash if snapshot else None),
        )
        reply = await request(
            self._transport,
            self._join.coordinator,
            "heartbeat",
            Heartbeat(body=self._identity.sign("heartbeat", body)),
            HeartbeatReply,
            wait_seconds=membership.heartbeat_seconds,
        )
        notice = open_signed(reply.notice, self._join.peer, "notice", PoolNotice)
        bound = (notice.run, notice.peer, notice.session, notice.sequence)
        if bound != (body.run, self._identity.peer_id, body.session, body.sequence):
            raise SchemaViolation("the notice answers another heartbeat than this node's last")
        return notice

    async def goodbye(self) -> None:
        """Tell the coordinator that this process ends in order, so that nobody waits for it. Whatever fails is let be.

        Call when `Situation.state` is stopped, and nothing else of this node runs any more.
        """
        membership = self._situation.membership
        if membership is None or not self._situation.facts.joined:
            return
        with trio.move_on_after(GOODBYE_SECONDS), suppress(ProtocolError, Unreachable, Refused):
            await self._heartbeat(membership)
            log.info("said goodbye to the coordinator")

    def _shown(self) -> tuple[object, ...]:
        """What the coordinator must hear of at once."""
        return (self._situation.order, self._situation.state)

    def _has_news(self, shown: tuple[object, ...]) -> bool:
        return self._shown() != shown

    async def _cancel_on_news(self, shown: tuple[object, ...], scope: trio.CancelScope) -> None:
        await self._situation.until(functools.partial(self._has_news, shown))
        scope.cancel()

    def _verdict(self, node_state: str, reason: str = "", expires_seconds: float | None = None) -> None:
        """What the coordinator thinks of this node. Raises ConfigurationError when it wants no more of it."""
        if node_state == BANNED:
            raise ConfigurationError(f"the coordinator {standing_words(node_state, reason, expires_seconds)}")
        if node_state in {"applied", "suspended"}:
            words = f"the coordinator {standing_words(node_state, reason, expires_seconds)}"
            if node_state == "applied":
                words = standing_words(node_state, reason, expires_seconds)
            self._situation.happened(Blocked("coordinator", words))
        else:
            self._situation.happened(Cleared("coordinator"))
