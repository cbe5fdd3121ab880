"""What a peer may say before it has named a protocol: a few lines, on a bounded number of streams."""

from __future__ import annotations

from contextlib import suppress

import pytest
import trio
import trio.lowlevel
import trio.testing
from fuzz.wire import HEADER, SYN, client, line
from libp2p.protocol_muxer.multiselect import Multiselect
from unit.p2p.test_libp2p_yamux import Bench

from echo2.p2p.channel import answering, request
from echo2.p2p.errors import Unreachable
from echo2.p2p.guards import FRUITLESS_BURST, TransportLimits
from echo2.p2p.identity import Identity
from echo2.p2p.libp2p_negotiate import LINES_MAX, BadLine, Negotiations
from echo2.p2p.libp2p_stream import DATA, FIN, RST, WINDOW_UPDATE
from echo2.p2p.libp2p_tcp import HANDSHAKE_WRITES_MAX
from echo2.p2p.libp2p_transport import open_libp2p_transport
from echo2.p2p.messages import Ack, PeerAddress

HOST, PEER, HOSTILE = (Identity(bytes([n]) * 32) for n in (1, 2, 3))
NO = line("na")
LS = line("ls")
BOUND_SECONDS = 20.0


class Connection:
    """Counts what it is told of."""

    fruitless = 0

    def bear_fruitless(self):
        self.fruitless += 1


class Spoken:
    """A stream on which the peer has said so much; then it says nothing more. `heard` is what it was answered."""

    def __init__(self, data=b"", peer="PEER"):
        self.peer = peer
        self.connection = Connection()
        self.heard = b""
        self._data = data

    async def receive_some(self, count):
        if not self._data:
            await trio.sleep_forever()
        taken, self._data = self._data[:count], self._data[count:]
        return taken

    async def send_all(self, *data):
        self.heard += b"".join(data)


def negotiations(places_max=4):
    protocols = Multiselect()
    protocols.add_handler("/echo2/hello/1", None)
    return Negotiations(protocols, places_max)


@pytest.mark.parametrize("last", ["/echo2/hello/1", "/foreign/1"])
async def test_lines_of_one_negotiation_are_counted(last):
    """A stock peer's handful of tries is answered, the last of them with the protocol; one line more is an offence."""
    before = (LINES_MAX - 2) * line("/foreign/1")
    stream = Spoken(line("/multistream/1.0.0") + before + line(last) + line("/echo2/hello/1"))
    if last == "/echo2/hello/1":
        assert await negotiations().agree(stream) == last
        return
    with pytest.raises(BadLine, match=f"more than {LINES_MAX} protocol lines"):
        await negotiations().agree(stream)
    assert stream.heard == line("/multistream/1.0.0") + (LINES_MAX - 1) * NO


async def test_what_is_served_is_listed_once():
    """A second `ls` on a stream is an offence, and answered with nothing."""
    asked = line("/multistream/1.0.0") + LS
    assert await negotiations().agree(Spoken(asked + line("/echo2/hello/1"))) == "/echo2/hello/1"
    stream = Spoken(asked + LS + line("/echo2/hello/1"))
    with pytest.raises(BadLine, match="second `ls`"):
        await negotiations().agree(stream)
    assert stream.heard.count(b"/echo2/hello/1") == 1


async def test_silent_streams_of_all_peers_have_a_bound(autojump_clock, nursery):
    """By hand, of 4 places: the eldest of the peer with most goes, and the honest one, with one, is served."""
    places = negotiations(places_max=4)
    ended = []

    async def agree(name, stream):
        try:
            ended.append((name, await places.agree(stream)))
        except Unreachable:
            ended.append((name, stream.connection.fruitless))

    for name in ("a1", "b1", "b2", "b3"):
        nursery.start_soon(agree, name, Spoken(peer=name[0]))
        await trio.testing.wait_all_tasks_blocked()
    assert (places.count, ended) == (4, [])
    nursery.start_soon(agree, "c1", Spoken(peer="c"))
    await trio.testing.wait_all_tasks_blocked()
    assert (places.count, ended) == (4, [("b1", 1)])
    await agree("honest", Spoken(line("/multistream/1.0.0") + line("/echo2/hello/1"), peer="honest"))
    await trio.testing.wait_all_tasks_blocked()
    assert sorted(ended[1:]) == [("b2", 1), ("honest", "/echo2/hello/1")]
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize("frame", [(WINDOW_UPDATE, SYN | FIN), (WINDOW_UPDATE, SYN | RST), (DATA, SYN | FIN)])
async def test_streams_that_begin_with_their_end_cost_the_connection(autojump_clock, nursery, frame):
    """They are served by nobody, and one more than may be is a fault."""
    bench = Bench(nursery)
    for n in range(FRUITLESS_BURST):
        bench.peer.send(*frame, 2 * n + 1)
    await bench.peer.read_all()
    assert (bench.accepted, bench.yamux.closed) == ([], None)
    bench.peer.send(*frame, 2 * FRUITLESS_BURST + 1)
    await bench.peer.read_all()
    assert bench.yamux.fault == "too many streams without a protocol"


async def test_a_strangers_lines_are_answered_a_few_times_only():
    """Before it has proved a key: of a thousand empty lines, 2 KB, some thirty are answered and the connection ends."""
    async with open_libp2p_transport(HOST, ["/ip4/127.0.0.1/tcp/0"]) as host:
        port = int(host.addresses[0].rpartition("/")[2])
        with trio.fail_after(BOUND_SECONDS):
            async with client("port", port, host.peer_id, HOSTILE) as hostile:
                await hostile.send(line("/multistream/1.0.0") + b"\x01\n" * 1000)
                heard = b""
                try:
                    while data := await hostile.tcp.stream.receive_some(4096):
                        heard += data
                except trio.BrokenResourceError:
                    pass
    assert heard.count(NO) < HANDSHAKE_WRITES_MAX


async def test_streams_that_name_no_protocol_cost_a_ban_in_the_end():
    """Opened and reset again and again, however slowly they are sent; an honest peer is served all along."""

    async def count_up(_peer, message):
        return Ack(count=message.count + 1)

    async with (
        open_libp2p_transport(HOST, ["/ip4/127.0.0.1/tcp/0"], limits=TransportLimits(offences_max=1)) as host,
        open_libp2p_transport(PEER, []) as peer,
    ):
        host.set_handler("hello", answering(Ack, count_up, lambda peer, error: None))
        there = PeerAddress(peer=HOST.peer_id, addresses=host.addresses)
        with trio.fail_after(BOUND_SECONDS):
            async with client("yamux", int(host.addresses[0].rpartition("/")[2]), host.peer_id, HOSTILE) as hostile:
                number = 1
                while not host.view().bans:
                    opening = line("/multistream/1.0.0")
                    head = HEADER.pack(0, 1, SYN, number, 0) + HEADER.pack(0, 0, 0, number, len(opening))
                    with suppress(trio.BrokenResourceError):  # it has been refused
                        await hostile.say(head + opening + HEADER.pack(0, 1, RST, number, 0))
                    number += 2
                    await trio.lowlevel.checkpoint()
            assert (await request(peer, there, "hello", Ack(count=1), Ack)).count == 2
        assert [ban.peer for ban in host.view().bans] == [HOSTILE.peer_id]
