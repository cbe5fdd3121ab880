"""The process under attack: our transport with handlers of every shape. `python wire_target.py`; prints its address."""

from __future__ import annotations

import gc
import logging
import sys

import trio

from echo2.p2p.channel import answering
from echo2.p2p.errors import ProtocolError
from echo2.p2p.guards import TransportLimits
from echo2.p2p.identity import Identity
from echo2.p2p.libp2p_transport import Libp2pTransport, open_libp2p_transport
from echo2.p2p.messages import Ack
from echo2.p2p.transport import Stream

TARGET = Identity(b"\x7a" * 32)

LIMITS = TransportLimits(offences_max=10**9)
"""All cases come from one key: as usual, it would be refused after the first few."""


SERVE_SECONDS = 60.0
"""As every handler of ours bounds a stream."""


def serve(transport: Libp2pTransport) -> None:
    """Handlers: `hello` (an Ack plus one), `report` (living tasks), `leases` (an echo), `chunks` (a sink)."""

    async def count_up(_peer: str, message: Ack) -> Ack:
        return Ack(count=message.count + 1)

    async def tasks(_peer: str, _message: Ack) -> Ack:
        gc.collect()
        return Ack(count=trio.lowlevel.current_statistics().tasks_living)

    async def echo(stream: Stream) -> None:
        with trio.move_on_after(SERVE_SECONDS):
            while data := await stream.receive_some(1 << 20):
                await stream.send_all(data)
            await stream.close_write()

    async def sink(stream: Stream) -> None:
        with trio.move_on_after(SERVE_SECONDS):
            while await stream.receive_some(1 << 20):
                pass
            await stream.close_write()

    def complain(_peer: str, _error: ProtocolError) -> None:
        pass

    transport.set_handler("hello", answering(Ack, count_up, complain))
    transport.set_handler("report", answering(Ack, tasks, complain))
    transport.set_handler("leases", echo)
    transport.set_handler("chunks", sink)


async def main() -> None:
    """Serve for ever."""
    async with open_libp2p_transport(TARGET, ["/ip4/127.0.0.1/tcp/0"], limits=LIMITS) as transport:
        serve(transport)
        print(*transport.addresses, flush=True)
        await trio.sleep_forever()


if __name__ == "__main__":
    logging.basicConfig(level=logging.ERROR, stream=sys.stderr)
    trio.run(main)
