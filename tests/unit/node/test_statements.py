from __future__ import annotations

import pytest
from typer.testing import CliRunner

from echo2.node.main import app
from echo2.p2p.codec import encode_record
from echo2.p2p.errors import ConfigurationError
from echo2.p2p.identity import Identity, load_or_create_identity
from echo2.p2p.postings import ORIGIN, Posting, Statement, posting_hash

COORDINATOR = Identity(bytes([9]) * 32)


@pytest.fixture
def home(tmp_path):
    """A node's folder, with its key."""
    folder = tmp_path / "home"
    load_or_create_identity(folder / "identity.key")
    return folder


def postings(peer, *amounts):
    made = []
    for number, amount in enumerate(amounts, 1):
        values = [number, "r", peer, "credit", "credit", amount, 1, "coordinator", "rollouts", 1]
        values.append(made[-1].hash if made else ORIGIN)
        names = [name for name in Posting.model_fields if name != "hash"]
        made.append(Posting(**dict(zip(names, values, strict=True)), hash=posting_hash(values)))
    return tuple(made)


def write(path, peer, made, signer=COORDINATOR):
    said = Statement(peer=peer, after=0, postings=made, head_id=made[-1].id, head_hash=made[-1].hash, wall_micros=1)
    path.write_text(encode_record(signer.sign("statement", said)).hex() + "\n")
    return path


def check(home, *files):
    arguments = ["statement", *map(str, files), "--home", str(home), "--coordinator", COORDINATOR.peer_id]
    return CliRunner().invoke(app, arguments)


def test_a_statement_is_checked_offline(home, tmp_path):
    """Each posting once, whatever statements it is in, and what they come to, exactly."""
    peer = load_or_create_identity(home / "identity.key").peer_id
    made = postings(peer, 1_500_000, -250_001)
    found = check(home, write(tmp_path / "1", peer, made[:1]), write(tmp_path / "2", peer, made))
    assert found.exit_code == 0
    assert "2 postings: 1.249999 credit" in found.output
    assert "-0.250001 credit" in found.output
    assert f"signed by {COORDINATOR.peer_id}, and unaltered" in found.output


def test_what_is_wrong_is_said(home, tmp_path):
    """Another node's, one that was altered before it was signed, two that contradict each other."""
    peer = load_or_create_identity(home / "identity.key").peer_id
    made = postings(peer, 1, 2)
    other = write(tmp_path / "other", COORDINATOR.peer_id, postings(COORDINATOR.peer_id, 1))
    altered = write(tmp_path / "altered", peer, (made[0].model_copy(update={"amount_micros": 3}),))
    first, second = write(tmp_path / "1", peer, made), write(tmp_path / "2", peer, postings(peer, 1, 3))
    for files, told in (
        ([other], "not for this node"),
        ([altered], "posting 1 was changed"),
        ([first, second], "they contradict each other: posting 2 has 2 hashes"),
    ):
        found = check(home, *files)
        assert (found.exit_code, told in found.output) == (1, True)


def test_a_file_that_is_none_is_refused(home, tmp_path):
    """Signed by somebody else, or no statement at all: one line."""
    peer = load_or_create_identity(home / "identity.key").peer_id
    forged = write(tmp_path / "forged", peer, postings(peer, 1), signer=Identity(bytes([8]) * 32))
    (tmp_path / "text").write_text("hello")
    (tmp_path / "bytes").write_text("00")
    for path in (forged, tmp_path / "text", tmp_path / "bytes"):
        found = check(home, path)
        assert isinstance(found.exception, ConfigurationError)
        assert "is no statement signed by" in str(found.exception)
