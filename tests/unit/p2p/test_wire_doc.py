"""The specification of the wire says what the code does."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import get_args

import pytest

from echo2.p2p import errors, messages
from echo2.p2p.codec import END, LENGTH, decode_frame
from echo2.p2p.guards import TransportLimits
from echo2.p2p.identity import Label
from echo2.p2p.messages import Ack, ManifestRequest, Message, Record
from echo2.p2p.postings import Posting, Statement
from echo2.p2p.reachability import REACHABILITY_PROTOCOL
from echo2.p2p.relay import Bounds
from echo2.p2p.relay_wire import HOP_PROTOCOL, PUNCH_PROTOCOL, STOP_PROTOCOL
from echo2.p2p.transport import ProtocolName

DOC = (Path(__file__).parents[3] / "packaging" / "docs" / "wire.md").read_text(encoding="utf-8")
UNITS = {"KiB": 1024, "MiB": 1024 * 1024}


def section(title: str) -> str:
    return re.split(r"^## ", DOC.split(f"\n## {title}\n")[1], maxsplit=1, flags=re.MULTILINE)[0]


def rows(title: str) -> list[list[str]]:
    """Cells of a section's table, without its head."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    return [[cell.strip().strip("`") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


def size(text: str) -> int:
    return sum(int(number) * UNITS[unit] for number, unit in (part.split() for part in text.split(" + ")))


def records() -> dict[str, type[Record]]:
    kinds = {name: kind for name, kind in vars(messages).items() if isinstance(kind, type) and issubclass(kind, Record)}
    kinds |= {"Posting": Posting, "Statement": Statement}
    return {name: kind for name, kind in kinds.items() if kind not in (Record, Message)}


def test_every_message_is_listed_with_its_type_and_bound():
    """The table of messages and the classes agree, none missing on either side."""
    listed = {(kind, name, size(bound)) for kind, name, _, _, bound in rows("Messages")}
    assert listed == {
        (kind.TYPE, name, kind.BYTES_MAX) for name, kind in records().items() if issubclass(kind, Message)
    }


def test_every_record_is_listed_with_its_fields_in_order():
    """Field order is part of the signed bytes."""
    listed: dict[str, list[str]] = {}
    types: dict[str, str] = {}
    fields: list[str] = []
    for line in re.split(r"^```", section("Records"), flags=re.MULTILINE)[1].splitlines():
        if match := re.match(r"([A-Z]\w+)(?: \(([a-z-]+)\))?", line):
            fields = listed[match[1]] = []
            types[match[1]] = match[2]
        elif match := re.match(r"  (\w+) ", line):
            fields.append(match[1])
    assert listed == {name: list(kind.model_fields) for name, kind in records().items()}
    assert types == {name: getattr(kind, "TYPE", None) for name, kind in records().items()}


def test_every_protocol_has_its_paragraph():
    """Each name that a transport serves is specified, and no other."""
    assert set(re.findall(r"^### (\w+)$", section("Protocols"), re.MULTILINE)) == set(get_args(ProtocolName))
    for name in get_args(ProtocolName):
        assert f"`/echo2/{name}/1`" in section("Protocols")


def test_every_label_is_listed():
    """Each purpose a signature may have is specified, and no other."""
    assert {label for label, *_ in rows("Identity and signatures")} == set(get_args(Label))


def test_every_limit_is_listed_with_its_value():
    """The shared limits of `messages.py` are those of the page."""
    for name, value, _ in rows("Limits"):
        assert getattr(messages, name) == int(value)


def test_every_limit_of_the_transport_is_listed_with_its_value():
    """All that are counted are there; the owner's caps on the line are no limits of the wire."""
    listed = {name: float(value) for name, value, _ in rows("Limits of the transport")}
    assert listed == {
        name: value
        for name, value in asdict(TransportLimits()).items()
        if value is not None and not isinstance(value, bool)
    }


def test_every_limit_of_the_relay_is_listed_with_its_value():
    """Those of all circuits together, and those of one."""
    bounds = asdict(Bounds())
    known = bounds | bounds.pop("limit")
    table = section("Reaching each other").split("| limit of the relay |")[1].split("\n\n")[0]
    listed = dict(re.findall(r"^\| `(\w+)`(?: of a circuit)? \| (\d+) \|$", table, re.MULTILINE))
    assert {name: float(value) for name, value in listed.items()} == known


def test_every_protocol_of_reaching_each_other_is_listed():
    """The ids that a transport serves beside our own requests."""
    for protocol in (REACHABILITY_PROTOCOL, HOP_PROTOCOL, STOP_PROTOCOL, PUNCH_PROTOCOL):
        assert f"`{protocol}`" in section("Reaching each other")


@pytest.mark.parametrize("kind", errors.ProtocolError.__subclasses__())
def test_every_breach_of_the_protocol_is_listed(kind):
    """Each class of error that a peer can be counted for is specified."""
    assert kind.__name__ in {row[0] for row in rows("Errors")}


def test_the_example_bytes_are_right():
    """Both examples decode to what the page says they are."""
    blocks = re.findall(r"```hex\n(.*?)```", DOC, re.DOTALL)
    ack, request = (bytes.fromhex(re.sub(r"#.*", "", block)) for block in blocks)
    for frames in (ack, request):
        assert frames.endswith(END)
        assert LENGTH.unpack(frames[:4]) == (len(frames) - 8,)
    assert decode_frame(ack[4:-4], Ack) == Ack(count=3)
    assert decode_frame(request[4:-4], ManifestRequest) == ManifestRequest(run="r", manifest_hash=bytes(range(32)))
