"""Everything about being behind a NAT, put together for the daemons: what a node runs, what the coordinator runs.

A node asks the coordinator whether it can be dialled. If so it announces the addresses that were proved. If not it
announces none, so that the broadcast plan makes it a leaf, and keeps a place at the coordinator's relay, through which
others can meet it and hole punching can make their connection direct.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import trio

from .channel import hold_against
from .hole_punch import HolePuncher
from .nat_view import NatView
from .reachability import DialBack, Reachability
from .relay import Bounds, Relay, RelayView
from .relay_client import RelayClient, relayed_address
from .relay_host import Libp2pHost

if TYPE_CHECKING:
    from collections.abc import Callable

    from .libp2p_transport import Libp2pTransport
    from .messages import PeerAddress


class NatNode:
    """The node's side. Make it before the first dial: it adds the relay to the transport's ways of reaching a peer."""

    def __init__(
        self,
        transport: Libp2pTransport,
        coordinator: PeerAddress,
        *,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        host = Libp2pHost(transport)
        self._coordinator = coordinator
        self._kept = False
        self._reachability = Reachability(host, coordinator, wanted=transport.addresses)
        self._client = RelayClient(host, wall=wall, believed=coordinator.peer)
        self._puncher = HolePuncher(
            host, candidates=self._reachability.candidates, clock=clock, seen_at=self._client.seen_at
        )
        self._puncher.serve()
        self._client.serve(met=self._puncher.met)
        host.add_way("relay", self._client.dial)

    @property
    def addresses(self) -> tuple[str, ...]:
        """What to announce: proved addresses only."""
        return self._reachability.addresses

    @property
    def relayed_addresses(self) -> tuple[str, ...]:
        """Where we are met through the relay, while we have a place there; never announced as our own."""
        held = any(place.held for place in self._client.view())
        return relayed_address(self._coordinator) if held else ()

    def view(self) -> NatView:
        """For status."""
        return NatView(self._reachability.view(), self._client.view(), self._puncher.view())

    def check_soon(self) -> None:
        """After every new welcome: this coordinator may never have dialled us."""
        self._reachability.check_soon()

    async def run(self, changed: Callable[[], None]) -> None:
        """Check for ever, and have a place at the relay while nobody can dial us. `changed`: announce anew."""
        keeping = trio.CancelScope()

        async def keep() -> None:
            with keeping:
                await self._client.keep_place(self._coordinator)

        async with trio.open_nursery() as nursery:

            def checked() -> None:
                nonlocal keeping
                if self._reachability.view().reachable:
                    keeping.cancel()
                    self._kept = False
                elif not self._kept:
                    keeping = trio.CancelScope()
                    self._kept = True
                    nursery.start_soon(keep)

            await self._reachability.keep_checking(checked, changed)


class NatCoordinator:
    """The coordinator's side: relay and dialler back, for peers that passed admission (`admitted`)."""

    def __init__(
        self,
        transport: Libp2pTransport,
        *,
        admitted: Callable[[str], bool],
        clock: Callable[[], float],
        wall: Callable[[], float],
        found: Callable[[str], None] = lambda _peer: None,
        bounds: Bounds | None = None,
    ) -> None:
        """`found` is told of each peer of which other addresses are proved than before."""
        host = Libp2pHost(transport)
        self._relay = Relay(host, may_use=admitted, clock=clock, wall=wall, bounds=bounds)
        self._dial_back = DialBack(host, may_ask=admitted, clock=clock, found=found)
        self._relay.serve()
        self._dial_back.serve(partial(hold_against, transport))

    def proved(self, peer: str, claimed: tuple[str, ...]) -> tuple[str, ...]:
        """Those of the addresses that `peer` claims at which it was found: all that others may be told."""
        found = self._dial_back.proved(peer)
        return tuple(address for address in claimed if address in found)

    def view(self) -> RelayView:
        """For status."""
        return self._relay.view()
