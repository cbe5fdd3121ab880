"""Raw bytes at every layer of the wire against a real process."""

from __future__ import annotations

import pytest
import trio
from fuzz import wire_bytes, wire_stage, wire_target
from fuzz.case import Case, Step, kept
from fuzz.test_handlers import FUZZ
from fuzz.wire import HEADER, HELLO_LINES, LEVELS, client, line
from hypothesis import given
from hypothesis import strategies as st

from echo2.p2p.libp2p_transport import open_libp2p_transport

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def target():
    with wire_stage.target() as running:
        yield running


@pytest.mark.parametrize("path", kept("wire"), ids=lambda path: path.stem)
def test_corpus_is_borne(target, path):
    """A case that once did harm, or reaches far, does none."""
    target.play(Case.from_json(path.read_text()))


@FUZZ
@given(rng=st.randoms(use_true_random=True))
def test_process_bears_raw_bytes_at_every_layer(target, rng):
    """Whatever comes before, in and after the handshake, the process lives and answers its honest peer."""
    target.play_together([wire_bytes.draw(rng) for _ in range(16)])


def test_nothing_is_left_of_the_hostile(target):
    """Tasks and file handles go back to what they were before a flood of hostile connections."""
    before = target.files(), target.ask("report")
    for level in LEVELS:
        for after in ("read", "reset", "silent"):
            target.play(Case("wire", (Step(level, "", b"\x00\x01" * 30, after),) * 3))
    target.settle(*before)
    assert target.files() <= before[0]
    assert target.ask("report") <= before[1]


async def test_the_hostile_client_reaches_the_layers_it_names():
    """At each layer the right bytes get the right answer: the raw ones are not thrown away further out."""
    async with open_libp2p_transport(wire_target.TARGET, ["/ip4/127.0.0.1/tcp/0"]) as transport:

        async def echo(stream):
            await stream.send_all(await stream.receive_some(64))

        transport.set_handler("hello", echo)
        port, peer = int(transport.addresses[0].rpartition("/")[2]), transport.peer_id
        with trio.fail_after(30):
            for level, data, expected in (
                ("port", HELLO_LINES["noise"], HELLO_LINES["noise"]),
                ("noise", b"\x00\x02hi", b""),
                ("frames", b"\x00\x02hi", b""),
            ):
                async with client(level, port, peer, wire_bytes.BAD) as hostile:
                    await hostile.send(data)
                    heard = b""
                    while len(heard) < len(expected) or not expected:
                        part = await hostile.tcp.stream.receive_some(1 << 16)
                        heard += part
                        if not part:
                            break
                    assert heard.startswith(expected)
            for level, data, expected in (
                ("secured", HELLO_LINES["yamux"], line("/yamux/1.0.0")),
                ("yamux", HEADER.pack(0, 2, 1, 0, 0xBEEF), HEADER.pack(0, 2, 2, 0, 0xBEEF)),
                ("stream", HELLO_LINES["protocol"], line("/echo2/hello/1")),
                ("protocol", b"echo me", b"echo me"),
            ):
                async with client(level, port, peer, wire_bytes.BAD) as hostile:
                    await hostile.send(data)
                    heard = b""
                    while expected not in heard:
                        heard += await hostile.hear()
