"""The commands that an operator types about the ledger."""

from __future__ import annotations

from contextlib import closing

import pytest
import sqlalchemy as sa
from typer.testing import CliRunner

from echo2.coordinator import records, schema
from echo2.coordinator.ledger import open_ledger
from echo2.coordinator.main import app
from echo2.coordinator.template import TEMPLATE
from echo2.p2p.codec import decode_record
from echo2.p2p.errors import ConfigurationError
from echo2.p2p.identity import Identity, load_or_create_identity, open_signed
from echo2.p2p.messages import Signed
from echo2.p2p.postings import Statement, check_statement

PEER = Identity(bytes([5]) * 32).peer_id


@pytest.fixture
def config(tmp_path, database_url):
    """Settings in a folder of their own, with the key made."""
    text = TEMPLATE.replace("PEER_ID", Identity(bytes([4]) * 32).peer_id)
    if database_url.startswith("postgresql"):
        text = text.replace('# database = ""', f'database = "{database_url}" #')
    path = tmp_path / "coordinator.toml"
    path.write_text(text)
    assert echo2(path, "identity").exit_code == 0
    return path


def echo2(config, *arguments):
    return CliRunner().invoke(app, [*map(str, arguments), "--config", str(config)])


def url_of(config):
    from echo2.coordinator.config import load_config

    return load_config(config).ledger_url


def post(config, amount="1.50", *more):
    return echo2(config, "ledger", "post", PEER, "--amount", amount, "--reason", "for the winter", *more)


def test_a_payment_is_posted_verified_and_exported(config, tmp_path):
    """The whole way, the file for its owner included; what was posted is in the audit log with its reason."""
    assert "posting 1: 1.50 credit" in post(config).output
    assert post(config, "-0.25", "--kind", "adjustment", "--unit", "usd").exit_code == 0
    assert echo2(config, "ledger", "export", tmp_path / "chain.json").output.endswith("chain.json: 2 postings\n")
    assert echo2(config, "ledger", "export", tmp_path / "chain.csv").exit_code == 0
    assert len((tmp_path / "chain.csv").read_text().splitlines()) == 3
    assert post(config).exit_code == 0
    found = echo2(config, "ledger", "verify", "--against", tmp_path / "chain.json")
    assert found.output.startswith("3 postings are as they were written, which go on from the 2 of")
    alone = echo2(config, "ledger", "verify", "--export", tmp_path / "chain.json")
    assert alone.output.startswith("2 postings are as they were written, signed by 12D3Koo")
    told = echo2(config, "ledger", "statement", PEER, tmp_path / "statement")
    assert told.output.endswith("the balance is 3.000000 credit, -0.250000 usd\n")
    signed = decode_record(bytes.fromhex((tmp_path / "statement").read_text()), Signed)
    signer = load_or_create_identity(tmp_path / "state" / "identity.key").peer_id
    opened = open_signed(signed, signer, "statement", Statement)
    assert (len(opened.postings), check_statement(opened)) == (3, "")
    with closing(open_ledger(url_of(config))) as ledger, ledger.reading() as connection:
        line = records.list_events(connection, limit=1)[0]
    assert (line.actor, line.action, line.subject) == ("command line", "payment posted", PEER)
    assert line.reason == "1.50 credit, posting 3: for the winter"


def admitted(config, *nodes):
    with closing(open_ledger(url_of(config))) as ledger, ledger.transaction() as connection:
        for peer, name in nodes:
            connection.execute(
                sa.insert(schema.nodes).values(
                    peer=peer, name=name, role="node", software="s", addresses="[]", state="active", reason="",
                    first_hello=1.0, last_hello=1.0,
                )
            )  # fmt: skip


def test_a_node_is_named_as_elsewhere_and_never_mistaken(config, tmp_path):
    """By its name or the end of its peer id; where two owners chose one name nothing is posted, and nothing signed."""
    other = Identity(bytes([6]) * 32).peer_id
    admitted(config, (PEER, "anna"))
    posted = echo2(config, "ledger", "post", "anna", "--amount", "2", "--reason", "by transfer")
    assert f"posting 1: 2 credit for {PEER}, hash" in posted.output
    told = echo2(config, "ledger", "statement", PEER[-8:], tmp_path / "one")
    assert told.output.endswith("the balance is 2.000000 credit\n")
    admitted(config, (other, "anna"))
    for arguments in (("post", "anna", "--amount", "1", "--reason", "x"), ("statement", "anna", tmp_path / "two")):
        done = echo2(config, "ledger", *arguments)
        assert "'anna' may be any of 2 nodes" in str(done.exception)
        assert isinstance(done.exception, ConfigurationError)
    assert not (tmp_path / "two").exists()
    assert echo2(config, "ledger", "verify").output.startswith("1 postings")


@pytest.mark.parametrize(("amount", "reason"), [("9" * 40, "too much"), ("1", "caf\udce9")])
def test_what_cannot_be_posted_is_said(config, amount, reason):
    """An amount beyond all bounds, a reason whose bytes are no text: one line, and nothing is posted."""
    done = echo2(config, "ledger", "post", PEER, "--amount", amount, "--reason", reason)
    assert done.exit_code != 0
    assert done.exception is None or isinstance(done.exception, (ConfigurationError, SystemExit))
    assert echo2(config, "ledger", "verify").output.startswith("0 postings")


def test_a_tampered_ledger_fails_and_names_the_row(config, tmp_path):
    """Exit code 1: fit for a nightly job."""
    for _ in range(3):
        post(config)
    echo2(config, "ledger", "export", tmp_path / "chain.json")
    with closing(open_ledger(url_of(config))) as ledger, ledger.transaction() as connection:
        connection.execute(sa.update(schema.postings).where(schema.postings.c.id == 2).values(amount_micros=9))
    found = echo2(config, "ledger", "verify")
    assert found.exit_code == 1
    assert "posting 2 (payment of 9 micro credit" in found.output
    assert "was changed" in found.output


@pytest.mark.slow_on_postgresql
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("ledger", "export", "chain.txt"), "neither with .csv nor with .json"),
        (("ledger", "verify", "--export", "missing.json"), "cannot read missing.json"),
        (("ledger", "post", "nobody", "--amount=1", "--reason", "x"), "no node 'nobody' was ever admitted here"),
        (("ledger", "post", PEER + "x", "--amount=1", "--reason", "x"), "is not an Ed25519 peer id"),
        (("ledger", "statement", "nobody", "new"), "no node 'nobody' was ever admitted here"),
        (("ledger", "post", PEER, "--amount=many", "--reason", "x"), "no amount with at most six decimals"),
        (("restore", "missing"), "there is no backup missing"),
    ],
)
def test_mistakes_are_said_in_words(config, arguments, told, tmp_path, monkeypatch):
    """No traceback of ours reaches the person."""
    monkeypatch.chdir(tmp_path)
    post(config)
    with closing(open_ledger(url_of(config))) as ledger, ledger.transaction() as connection:
        connection.execute(sa.delete(schema.postings))
        connection.execute(sa.delete(schema.events))
    found = echo2(config, *arguments)
    assert told in str(found.exception)


def test_a_backup_is_restored_into_the_other_database(config, tmp_path, postgresql):
    """From the command line alone; a second restore is refused."""
    post(config)
    made = echo2(config, "backup", tmp_path / "backup")
    assert "it holds secrets" in made.output
    other = tmp_path / "other"
    other.mkdir()
    text = config.read_text()
    if 'database = "postgresql' not in text:
        text = text.replace('# database = ""', f'database = "{postgresql.database()}" #')
    else:
        text = "\n".join(line for line in text.splitlines() if not line.startswith("database = "))
    (other / "coordinator.toml").write_text(text)
    restored = echo2(other / "coordinator.toml", "restore", tmp_path / "backup")
    assert "are restored; start the coordinator" in restored.output
    assert echo2(other / "coordinator.toml", "ledger", "verify").output.startswith("1 postings are as they were")
    again = echo2(other / "coordinator.toml", "restore", tmp_path / "backup")
    assert "the database is not empty" in str(again.exception)
