from __future__ import annotations

import csv
import io
import json
from contextlib import closing, suppress

import pytest
import sqlalchemy as sa

from echo2.coordinator import accounts, schema
from echo2.coordinator.accounts import Entry
from echo2.coordinator.ledger import open_ledger
from echo2.coordinator.ledger_commands import micros
from echo2.p2p.errors import ConfigurationError
from echo2.p2p.identity import Identity, open_signed
from echo2.p2p.postings import POSTINGS_MAX, Statement, check_statement

COORDINATOR = Identity(bytes([9]) * 32)
PEERS = [Identity(bytes([number]) * 32).peer_id for number in (1, 2)]


def entry(peer=0, amount=1_500_000, kind="credit", unit="credit", reason="rollouts"):
    return Entry("r", PEERS[peer], kind, unit, amount, 3, "coordinator", reason)


@pytest.fixture
def ledger(database_url):
    with closing(open_ledger(database_url)) as ledger:
        yield ledger


def post(ledger, *entries):
    with ledger.transaction() as connection:
        return accounts.append(connection, entries, wall=1_700_000_000.25)


def exported(ledger):
    file = io.StringIO()
    with ledger.reading() as connection:
        accounts.export_json(connection, file, COORDINATOR, wall=1.0)
    return file.getvalue()


def tamper(ledger, number, **values):
    """As somebody with the database's password would."""
    with ledger.transaction() as connection:
        table = schema.postings
        connection.execute(sa.update(table).where(table.c.id == number).values(values))


def fault(ledger):
    with ledger.reading() as connection:
        return accounts.verify(connection).fault


def test_postings_follow_each_other(ledger):
    """Over transactions and processes; amounts are exact; the database gives back what was hashed."""
    post(ledger, entry(), entry(1))
    post(ledger)
    post(ledger, entry(amount=-500_000, kind="payment"), entry(unit="usd", amount=2**53))
    with ledger.reading() as connection:
        chain = accounts.verify(connection)
        assert (chain.count, chain.fault) == (4, "")
        assert accounts.balances(connection, PEERS[0]) == {"credit": 1_000_000, "usd": 2**53}
        assert [posting.wall_micros for posting in accounts.read(connection)] == [1_700_000_000_250_000] * 4


def test_a_failed_transaction_leaves_no_gap(ledger):
    """What was not committed was never posted."""
    post(ledger, entry())
    with suppress(KeyError), ledger.transaction() as connection:
        accounts.append(connection, [entry()], wall=1.0)
        raise KeyError
    assert [posting.id for posting in post(ledger, entry())] == [2]
    assert fault(ledger) == ""


def test_two_processes_post_to_one_chain(ledger, database_url):
    """The command line beside the coordinator: neither forks the other's."""
    with closing(open_ledger(database_url)) as other:
        for _ in range(3):
            post(ledger, entry())
            post(other, entry(1))
    assert fault(ledger) == ""
    with ledger.reading() as connection:
        assert accounts.verify(connection).count == 6


def test_what_cannot_be_posted_is_refused(ledger):
    """A float, an amount out of bounds: and nothing is posted."""
    for false in (entry(amount=0.5), entry(amount=2**53 + 1), entry(kind="gift")):
        with pytest.raises(ValueError, match="validation error"):
            post(ledger, entry(), false)
    with ledger.reading() as connection:
        assert accounts.verify(connection).count == 0


@pytest.mark.slow_on_postgresql
@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"amount_micros": 9_000_000}, "posting 2 .* was changed"),
        ({"reason": "a gift"}, "posting 2 .* was changed"),
        ({"peer": PEERS[1]}, "posting 2 .* was changed"),
        ({"kind": "gift"}, "posting 2 was changed: it holds what no posting can"),
        ({"hash": b"x" * 32}, "posting 2 .* was changed"),
        ({"previous": b"x" * 32}, "posting 2 .* does not follow"),
        ({"id": 7}, "posting 2 is missing"),
    ],
)
def test_a_tampered_row_is_found_and_named(ledger, values, told):
    """By its number, whatever of it was changed."""
    post(ledger, *(entry() for _ in range(4)))
    tamper(ledger, 2, **values)
    assert fault(ledger) != ""
    with pytest.raises(AssertionError, match=told):
        raise AssertionError(fault(ledger))


def test_a_deleted_row_is_found(ledger):
    """Also the newest, by whoever has an export from before."""
    post(ledger, *(entry() for _ in range(4)))
    earlier, _ = accounts.check_export(io.StringIO(exported(ledger)), COORDINATOR.peer_id)
    with ledger.transaction() as connection:
        connection.execute(sa.delete(schema.postings).where(schema.postings.c.id == 4))
    assert fault(ledger) == ""
    with ledger.reading() as connection:
        assert "posting 4 of the export is not in the ledger any more" in accounts.extends(connection, earlier)
    post(ledger, entry(amount=1))
    with ledger.reading() as connection:
        assert "the chain was written anew" in accounts.extends(connection, earlier)


def test_the_chain_goes_on_from_an_earlier_export(ledger):
    """What was posted since does no harm."""
    empty, _ = accounts.check_export(io.StringIO(exported(ledger)))
    post(ledger, entry())
    earlier, _ = accounts.check_export(io.StringIO(exported(ledger)))
    post(ledger, entry())
    with ledger.reading() as connection:
        assert accounts.extends(connection, empty) == accounts.extends(connection, earlier) == ""


def test_an_export_is_checked_without_the_ledger(ledger):
    """The chain, and that its end is signed; what was changed in the file is named."""
    post(ledger, entry(), entry(1), entry())
    text = exported(ledger)
    chain, signer = accounts.check_export(io.StringIO(text))
    assert (chain.count, chain.fault, signer) == (3, "", COORDINATOR.peer_id)
    found = json.loads(text)
    changed = [
        (found | {"postings": found["postings"][:2]}, "it ends with posting 2, its signer says with posting 3"),
        (found | {"head": found["head"][:-2] + "00"}, "is not signed by"),
        (found | {"postings": [found["postings"][0] | {"quantity": 9}]}, "posting 1 .* was changed"),
        (found | {"postings": [found["postings"][0] | {"quantity": "9"}]}, "posting 1 was changed"),
    ]
    for content, told in changed:
        chain, _ = accounts.check_export(io.StringIO(json.dumps(content)))
        with pytest.raises(AssertionError, match=told):
            raise AssertionError(chain.fault)
    assert "not signed by" in accounts.check_export(io.StringIO(text), PEERS[0])[0].fault
    junk = ["", "[]", "{}", '{"format": 1}', json.dumps(found | {"head": "zz"}), json.dumps(found | {"postings": 3})]
    for text in junk:
        with pytest.raises(ConfigurationError):
            accounts.check_export(io.StringIO(text))


def test_a_csv_holds_the_same(ledger):
    """One line each, hashes in hexadecimal."""
    made = post(ledger, entry(), entry(1, reason='commas, "quotes"\nand lines'))
    file = io.StringIO()
    with ledger.reading() as connection:
        assert accounts.export_csv(connection, file) == 2
    rows = list(csv.DictReader(io.StringIO(file.getvalue())))
    assert [row["hash"] for row in rows] == [posting.hash.hex() for posting in made]
    assert rows[1]["reason"] == made[1].reason


def test_a_statement_is_a_nodes_own_in_pages(ledger):
    """Signed, at most POSTINGS_MAX at a time, and each page holds by itself."""
    post(ledger, *(entry(number % 2) for number in range(2 * POSTINGS_MAX + 2)))
    after, pages = 0, []
    while True:
        with ledger.reading() as connection:
            signed = accounts.statement(connection, COORDINATOR, PEERS[0], after=after, wall=2.0)
        page = open_signed(signed, COORDINATOR.peer_id, "statement", Statement)
        assert check_statement(page) == ""
        if not page.postings:
            break
        pages.append(len(page.postings))
        after = page.postings[-1].id
    assert pages == [POSTINGS_MAX, 1]


async def test_consumed_rollouts_are_credited_in_the_same_transaction(autojump_clock, world, tools):
    """Once each, also when the report comes twice; a half for what came in time and was too old."""
    async with world.serving(), world.learner() as learner, world.node(10) as node:
        await learner.hello()
        await learner.publish()
        await node.join()
        await node.work()
        rollouts = []
        while len(rollouts) < 10:
            await node.work(samples=8, wait=5.0)
            rollouts += (await learner.fetch(wait=5.0)).rollouts
        finished = [tools.done(rollout) for rollout in rollouts[:8]]
        finished.append(tools.done(rollouts[8], state="stale", reason="too old"))
        learner.version = 1
        await learner.report(finished, [tools.metrics(0, 8)])
        await learner.report(finished, [tools.metrics(0, 8)])
        with world.service._office.ledger.reading() as connection:
            found = [
                (posting.reason, posting.kind, posting.unit, posting.amount_micros, posting.quantity)
                for posting in accounts.read(connection, peer=node.peer_id)
            ]
            assert found == [
                ("evaluated", "credit", "credit", 4_000_000, 4),
                ("consumed", "credit", "credit", 8_000_000, 8),
                ("stale", "credit", "credit", 500_000, 1),
            ]
            assert accounts.verify(connection).fault == ""


@pytest.mark.parametrize(
    ("text", "amount"), [("12.50", 12_500_000), ("-0.000001", -1), ("3", 3_000_000), ("1e2", 100_000_000)]
)
def test_amounts_are_read_exactly(text, amount):
    """By decimal digits, never through a float."""
    assert micros(text) == amount


@pytest.mark.parametrize("text", ["0.0000001", "much", "", "inf", "nan", "1,50"])
def test_amounts_that_are_none_are_refused(text):
    """Said in words."""
    with pytest.raises(ConfigurationError, match="no amount with at most six decimals"):
        micros(text)
