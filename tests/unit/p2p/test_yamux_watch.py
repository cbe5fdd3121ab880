"""The watch on a connection whose other end says nothing."""

from __future__ import annotations

import pytest
import trio

from echo2.p2p.libp2p_stream import PING
from echo2.p2p.libp2p_yamux import Yamux


class Silent:
    """Takes everything, says nothing."""

    def __init__(self):
        self.pings = 0

    async def read(self, n=None):
        await trio.sleep_forever()

    async def write(self, data):
        await trio.lowlevel.checkpoint()
        self.pings += data[1] == PING

    async def send_eof(self):
        await trio.lowlevel.checkpoint()

    async def close(self):
        await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("hundredths", range(0, 4000, 53))
async def test_a_silent_link_is_given_up_with_few_pings_whatever_the_clock_says(autojump_clock, hundredths):
    """Also when the last wait, rounded, comes out a hair above nothing: that is not waited in ever so many turns."""
    await trio.sleep(hundredths / 100)
    silent = Silent()
    link = Yamux(silent, silent, "P", initiator=False, accept=lambda stream: True)
    await link.run()
    assert link.closed.startswith("nothing heard for 30 s")
    assert silent.pings <= 5
