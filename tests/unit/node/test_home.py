"""What a node's home remembers, and receipts read back from it without the network."""

from __future__ import annotations

import json
import os
import shutil

import pytest
from typer.testing import CliRunner

from echo2.node.home import (
    JOIN_FILE,
    NAME_FILE,
    home_mark,
    remember_join,
    remember_name,
    remembered_join,
    remembered_name,
)
from echo2.node.main import _Show, app
from echo2.node.receipts import checked, kept_receipts
from echo2.node.spool import Spool
from echo2.node.status import NodeStatus
from echo2.p2p.errors import ConfigurationError
from echo2.p2p.identity import Identity, load_or_create_identity
from echo2.p2p.join import JoinString, parse_join_string
from echo2.p2p.messages import Receipt, ReceiptBatch, Signed

COORDINATOR = Identity(b"\x05" * 32)
JOIN = JoinString(COORDINATOR.peer_id, ("/ip4/10.0.0.1/tcp/4001",), "secret" * 6, "r1")


def batch(peer, *numbers, run="r1", signer=COORDINATOR):
    receipts = tuple(
        Receipt(sequence=n, lease_id=bytes([n]) * 16, sample=0, state="consumed", reason="", reward=1.0)
        for n in numbers
    )
    record = ReceiptBatch(run=run, peer=peer, receipts=receipts)
    return signer.sign("receipts", record), record


def a_home(folder):
    """A node that has joined and has five receipts in two batches. Its peer id."""
    peer = load_or_create_identity(folder / "identity.key").peer_id
    remember_join(folder, JOIN)
    spool = Spool(folder / "spool.sqlite")
    for numbers in ((1, 2, 3), (4, 5)):
        spool.keep_receipts(*batch(peer, *numbers))
    spool.close()
    return peer


def run(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)])


def test_the_join_string_is_remembered_for_its_owner_alone(tmp_path):
    """It comes back whole, and the file that holds its token is private, also when it replaces another."""
    for _ in range(2):
        remember_join(tmp_path, JOIN)
        assert parse_join_string(remembered_join(tmp_path)) == JOIN
        assert (tmp_path / JOIN_FILE).stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == [JOIN_FILE]


def test_it_is_remembered_once_the_coordinator_has_spoken(tmp_path):
    """A mistyped one is not kept."""
    empty = dict.fromkeys(NodeStatus.model_fields, 0) | {
        name: "" for name, field in NodeStatus.model_fields.items() if field.annotation is str
    }
    status = NodeStatus.model_validate(empty | {"receipts": {}, "addresses": (), "network": None, "nat": None})
    show = _Show(tmp_path, JOIN, "anna")
    show(status)
    assert not (tmp_path / JOIN_FILE).exists()
    assert remembered_name(tmp_path) is None
    show(status.model_copy(update={"node_state": "active"}))
    assert parse_join_string(remembered_join(tmp_path)) == JOIN
    assert remembered_name(tmp_path) == "anna"


def test_a_damaged_name_is_said_again(tmp_path):
    """Which file, and with which option; a new one replaces it."""
    for damaged in (b"", b"\xff", b"x" * 2000, b"a\x00b"):
        (tmp_path / NAME_FILE).write_bytes(damaged)
        with pytest.raises(ConfigurationError, match=str(tmp_path / NAME_FILE)):
            remembered_name(tmp_path)
    remember_name(tmp_path, "n-1")
    assert remembered_name(tmp_path) == "n-1"


def test_the_next_start_has_the_name_that_was_said(tmp_path, monkeypatch):
    """Unless another one is said then."""
    names = []

    async def serve(settings, join, home):
        names.append(settings.name)

    monkeypatch.setattr("echo2.node.main._serve", serve)
    for arguments in ((), ("--name", "anna"), ()):
        assert run("run", "--home", tmp_path, "--join", str(JOIN), *arguments).exit_code == 0
        remember_name(tmp_path, names[-1])
    assert names == ["node", "anna", "anna"]


def test_a_home_that_never_joined_needs_a_join_string(tmp_path):
    """Said in words."""
    with pytest.raises(ConfigurationError, match="has not joined a run yet; start it with --join"):
        remembered_join(tmp_path)


def test_receipts_are_listed_and_verified_offline(tmp_path):
    """Every receipt with its state; the last line says who signed them."""
    a_home(tmp_path)
    done = run("receipts", "--home", tmp_path)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert (len(lines), lines[0].split()[:2]) == (6, ["run", "number"])
    assert lines[5].split() == ["r1", "5", "05" * 16, "0", "consumed", "1"]
    assert done.stderr == f"5 receipts, signed by {COORDINATOR.peer_id} for this node\n"
    rows = [json.loads(line) for line in run("receipts", "--json", "--home", tmp_path).stdout.splitlines()]
    assert [(row["run"], row["sequence"], row["state"]) for row in rows] == [("r1", n, "consumed") for n in range(1, 6)]


def test_a_receipt_of_another_signer_is_not_verified(tmp_path):
    """Named, left out of the list, exit 1."""
    a_home(tmp_path)
    stranger = Identity(b"\x06" * 32).peer_id
    done = run("receipts", "--home", tmp_path, "--coordinator", stranger)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith(f"0 receipts, signed by {stranger} for this node; NOT VERIFIED: a batch of r1: ")


def test_what_is_changed_or_of_another_node_is_found(tmp_path):
    """One byte of a payload; a batch signed for somebody else; a batch filed under another run."""
    peer = a_home(tmp_path)
    good = kept_receipts(tmp_path / "spool.sqlite")
    assert len(checked(good, COORDINATOR.peer_id, peer).receipts) == 5
    run_name, signed = good[0]
    damaged = Signed(payload=signed.payload[:-1] + b"\x01", signature=signed.signature)
    foreign, _ = batch(Identity(b"\x07" * 32).peer_id, 6)
    kept = checked([(run_name, damaged), good[1], ("r1", foreign), ("r2", signed)], COORDINATOR.peer_id, peer)
    assert [receipt.sequence for _, receipt in kept.receipts] == [4, 5]
    assert len(kept.bad) == 3


def test_a_home_without_a_spool_is_one_clear_error(tmp_path):
    """Nothing is created by asking."""
    remember_join(tmp_path, JOIN)
    with pytest.raises(ConfigurationError, match="there are no receipts to read"):
        kept_receipts(tmp_path / "spool.sqlite")
    assert not (tmp_path / "spool.sqlite").exists()


def test_a_home_keeps_its_mark_and_a_copy_gets_its_own(tmp_path):
    """A restart finds the mark, a moved home too; a copied home has another, and keeps that."""
    home, copy, moved = tmp_path / "home", tmp_path / "copy", tmp_path / "moved"
    home.mkdir()
    mark = home_mark(home, os.urandom)
    assert mark == home_mark(home, os.urandom)
    assert (home / "home-mark").stat().st_mode & 0o077 == 0
    shutil.copytree(home, copy)
    other = home_mark(copy, os.urandom)
    assert other not in {mark, None}
    assert other == home_mark(copy, os.urandom)
    home.rename(moved)
    assert home_mark(moved, os.urandom) == mark


@pytest.mark.parametrize("damage", [b"", b"{}", b"\xff", b'{"mark": 1, "inode": 2}', b"[]", b"null", b"9" * 5000])
def test_a_damaged_mark_is_made_anew(tmp_path, damage):
    """It costs a wait after a crash, never the start."""
    (tmp_path / "home-mark").write_bytes(damage)
    mark = home_mark(tmp_path, os.urandom)
    assert len(mark) == 16
    assert mark == home_mark(tmp_path, os.urandom)


def test_a_disk_that_takes_no_mark_is_said(tmp_path, caplog):
    """There is none then."""
    assert home_mark(tmp_path / "gone", os.urandom) is None
    assert "cannot keep a mark" in caplog.text
