"""The learner's line to the coordinator: hello first and after every break, then asks until it is answered.

A coordinator that is down, restarting or saying no for now (a refusal with a time to come again) is waited for, for
ever, with the reason on show. A final refusal ends the process: then a person must change something.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeVar

import trio

from echo2.p2p.channel import request
from echo2.p2p.errors import ConfigurationError, ProtocolError, Refused, Unreachable
from echo2.p2p.identity import open_signed
from echo2.p2p.messages import WIRE_VERSION, Hello, Message, RunDescriptor, Standing, Welcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from echo2.p2p.messages import PeerAddress
    from echo2.p2p.transport import ProtocolName, Transport

M = TypeVar("M", bound=Message)

BACKOFF_SECONDS_FIRST = 0.5
BACKOFF_SECONDS_MAX = 30.0
"""A coordinator back from a restart is found within this time."""

PASSING = frozenset({"run_over"})
"""Refusals without a time to come again that need nobody: the next fetch says the same, and ends the asking."""

SOFTWARE = "echo2-learner/0.1"

log = logging.getLogger(__name__)


class CoordinatorLink:
    """Requests to one coordinator. `trouble` says what is being waited for, "" when all is well.

    `standing` is what the coordinator said last of its ledger; `greeted` is called at each hello.
    """

    def __init__(self, transport: Transport, coordinator: PeerAddress, run: str, name: str) -> None:
        self._transport = transport
        self._coordinator = coordinator
        self._run = run
        self._name = name
        self._greeted = False
        self._greeting = trio.Lock()
        self._told = ""
        self.trouble: dict[ProtocolName, str] = {}
        self.standing: Standing | None = None
        self.greeted: Callable[[], None] = lambda: None

    async def first_hello(self, accept: Callable[[RunDescriptor], None]) -> RunDescriptor:
        """The run as the coordinator describes it, once it answers.

        Raises ConfigurationError when it refuses this learner for good, or when `accept` does.
        """
        backoff = Backoff()
        while True:
            try:
                descriptor = await self._hello()
                break
            except Refused as refusal:
                if refusal.retry_seconds is None:
                    raise ConfigurationError(f"the coordinator refuses this learner: {refusal}") from refusal
                self._told = refusal.detail
                self._show("hello", str(refusal))
                await trio.sleep(max(refusal.retry_seconds, backoff.next()))
            except (Unreachable, ProtocolError) as error:
                self._show("hello", self._failing(error))
                await trio.sleep(backoff.next())
        self._show("hello", "")
        accept(descriptor)
        return descriptor

    async def ask(self, protocol: ProtocolName, message: Message, reply: type[M], *, wait_seconds: float = 0.0) -> M:
        """The coordinator's reply, however long it takes. Only for requests that may be repeated.

        Raises ConfigurationError when it refuses for good.
        """
        backoff = Backoff()
        try:
            while True:
                try:
                    async with self._greeting:
                        if not self._greeted:
                            await self._hello()
                    return await request(
                        self._transport, self._coordinator, protocol, message, reply, wait_seconds=wait_seconds
                    )
                except Refused as refusal:
                    if refusal.retry_seconds is None and refusal.code not in PASSING:
                        raise ConfigurationError(f"the coordinator refuses this learner: {refusal}") from refusal
                    self._told = refusal.detail
                    seconds = max(refusal.retry_seconds or 0.0, backoff.next())
                    self._show(protocol, f"the coordinator refuses {protocol}: {refusal}")
                except (Unreachable, ProtocolError) as error:
                    seconds = backoff.next()
                    self._show(protocol, self._failing(error))
                self._greeted = False  # it may have restarted and not know us yet
                await trio.sleep(seconds)
        finally:
            self._show(protocol, "")

    async def _hello(self) -> RunDescriptor:
        hello = Hello(
            wire_versions=(WIRE_VERSION,),
            software=SOFTWARE,
            role="learner",
            name=self._name,
            addresses=self._transport.addresses[:16],
        )
        welcome = await request(self._transport, self._coordinator, "hello", hello, Welcome)
        descriptor = open_signed(welcome.descriptor, self._coordinator.peer, "run", RunDescriptor)
        if descriptor.run != self._run:
            raise ConfigurationError(f"the coordinator's run is {descriptor.run!r}, this learner's {self._run!r}")
        if descriptor.learner.peer != self._transport.peer_id:
            raise ConfigurationError(
                f"the run's learner is {descriptor.learner.peer}, this is {self._transport.peer_id}; set `learner` in "
                "the coordinator's run, or start with the home folder that holds that key"
            )
        self._greeted, self._told = True, ""
        self.standing = welcome.standing
        self.greeted()
        return descriptor

    def _failing(self, error: Exception) -> str:
        """Why there is no answer. Who cannot be reached says nothing: what it said before may be why."""
        if isinstance(error, ProtocolError):
            self._told = str(error)
        elif self._told:
            return f"the coordinator: {error}; it said last: {self._told}"
        return f"the coordinator: {error}"

    def _show(self, protocol: ProtocolName, trouble: str) -> None:
        if self.trouble.get(protocol, "") != trouble:
            log.log(logging.WARNING if trouble else logging.INFO, "%s", trouble or f"{protocol}: answered again")
        if trouble:
            self.trouble[protocol] = trouble
        else:
            self.trouble.pop(protocol, None)


class Backoff:
    """Waiting times that double from half a second up to half a minute."""

    def __init__(self) -> None:
        self._seconds = BACKOFF_SECONDS_FIRST

    def next(self) -> float:
        """How long to wait this time."""
        seconds = self._seconds
        self._seconds = min(2 * seconds, BACKOFF_SECONDS_MAX)
        return seconds
