"""Log lines: what strangers write in them stays inside them, and every line of a request says which it is of."""

from __future__ import annotations

import json
import logging
import sys

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from echo2.p2p.daemon import configure_logging
from echo2.p2p.errors import ConfigurationError
from echo2.p2p.log_lines import (
    FIELD_CHARS_MAX,
    LIST_MAX,
    MESSAGE_CHARS_MAX,
    JsonLines,
    TextLines,
    said_of,
    short,
    tell,
)


class Kept(logging.Handler):
    """Lines as a formatter makes them, when they are logged."""

    def __init__(self, formatter):
        super().__init__()
        self.setFormatter(formatter)
        self.lines = []

    def emit(self, record):
        self.lines.append(self.format(record))


@pytest.fixture
def logged():
    """A logger, and its lines in JSON and as text."""
    log = logging.Logger("echo2.node.work")
    kept = Kept(JsonLines("node")), Kept(TextLines())
    for handler in kept:
        log.addHandler(handler)
    return log, kept[0].lines, kept[1].lines


HOSTILE = [
    'x", "level": "error", "message": "the run is over',
    "x\n2026-12-01 error: the run is over",
    '{"time": "2026", "message": "forged"}\r\n',
    "\x1b[2K\x1b[1Ahidden\x9b2J\x85",
    "\u202egnirts\u2028second\u2029third\x00",
    "half \ud800 of a pair",
    "] error [event=leases_granted",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_forges_no_line(logged, name):
    """One record is one line of printable characters, the fields are as they were, and the name can be read back."""
    log, as_json, as_text = logged
    tell(log, logging.WARNING, "node_admitted", "admitted: %s", name, peer="12D3", name_said=name)
    (line,), (text,) = as_json, as_text
    assert line.isprintable()
    assert text.isprintable()
    said = json.loads(line)
    assert (said["level"], said["event"], said["message"]) == ("warning", "node_admitted", f"admitted: {name}")
    assert (said["peer"], said["name_said"]) == ("12D3", name)
    assert text.split(" ", 1)[1].startswith("warning node.work [event=node_admitted peer=12D3 ")
    line.encode()
    text.encode()


@given(message=st.text(), field=st.text())
def test_any_text_is_one_printable_line(message, field):
    """Whatever the characters, JSON reads back what was said."""
    record = logging.makeLogRecord(
        {"name": "echo2.x", "levelno": 20, "levelname": "INFO", "msg": "%s", "args": (message,)}
    )
    record.field = field
    line = JsonLines("node").format(record)
    assert line.isprintable()
    assert TextLines().format(record).isprintable()
    assert (json.loads(line)["message"], json.loads(line)["field"]) == (message, field)


def test_a_field_cannot_pass_for_one_of_ours(logged):
    """Level, time and message are the record's own, whatever `extra` is called."""
    log, as_json, _ = logged
    log.info("true", extra={"level": "error", "daemon": "coordinator", "time": "then"})
    line = json.loads(as_json[0])
    assert (line["level"], line["daemon"], line["message"]) == ("info", "node", "true")
    assert line["time"] != "then"


def test_a_line_is_bounded(logged):
    """Megabytes in a message or a field, and thousands of leases, make a line of some kilobytes that says so."""
    log, as_json, as_text = logged
    tell(log, logging.INFO, "e", "%s", "m" * 10**6, reason="r" * 10**6, leases=["ab12"] * 5000)
    assert max(len(as_json[0]), len(as_text[0])) < MESSAGE_CHARS_MAX + FIELD_CHARS_MAX + 10 * LIST_MAX + 500
    line = json.loads(as_json[0])
    assert line["message"].endswith(f"... {10**6 - MESSAGE_CHARS_MAX} characters more")
    assert line["leases"][-1] == f"... {5000 - LIST_MAX} more"


def test_an_exception_is_set_in_below_its_line(logged):
    """As text, no line of it can pass for a record; in JSON it is a field."""
    log, as_json, as_text = logged
    try:
        raise ValueError("first\n12:00:00 error   forged")
    except ValueError:
        log.exception("it failed")
    first, *others = as_text[0].splitlines()
    assert first.endswith("it failed")
    assert others
    assert all(line.startswith("    | ") for line in others)
    assert "ValueError: first\n12:00:00" in json.loads(as_json[0])["exception"]


async def test_context_is_on_every_line_of_the_task_and_its_children(logged):
    """Two requests at once do not mix, what is nested adds, and afterwards nothing is left of it."""
    log, as_json, _ = logged

    async def child():
        log.info("child")

    async def request(number):
        with said_of(request=number, peer="p"):
            await trio.lowlevel.checkpoint()
            with said_of(lease="ab"):
                log.info("inner")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(child)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(request, "r1")
        nursery.start_soon(request, "r2")
    log.info("outside")
    *inside, outside = map(json.loads, as_json)
    assert sorted((line["request"], line["message"], line.get("lease")) for line in inside) == [
        ("r1", "child", None), ("r1", "inner", "ab"), ("r2", "child", None), ("r2", "inner", "ab"),
    ]  # fmt: skip
    assert "request" not in outside


def test_a_lease_is_the_beginning_of_its_id():
    """So that a search for it finds the whole id too, where a tool prints that."""
    assert short(bytes(range(16))) == "000102030405"


def test_text_for_a_terminal_and_json_for_everything_else(monkeypatch):
    """Unless it is said; another format is refused in words."""
    root, before = logging.getLogger(), logging.getLogger().handlers[:]
    try:
        for terminal, form, kind in ((True, "", TextLines), (False, "", JsonLines), (True, "json", JsonLines)):
            monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal, raising=False)
            configure_logging("node", "info", form)
            assert isinstance(root.handlers[-1].formatter, kind)
        with pytest.raises(ConfigurationError, match="--log-format xml is not json or text"):
            configure_logging("node", "info", "xml")
    finally:
        root.handlers[:] = before
