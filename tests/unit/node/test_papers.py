"""Statements and appeals at the node: kept, shown, checked without the network."""

from __future__ import annotations

import pytest
import trio
from typer.testing import CliRunner

from echo2.node.appeals import listed, new_appeal
from echo2.node.config import NodeSettings
from echo2.node.home import remember_join
from echo2.node.main import app
from echo2.node.papers import UNSENT_MAX, Papers
from echo2.node.spool import Spool
from echo2.p2p.channel import answering
from echo2.p2p.errors import ConfigurationError, Refused
from echo2.p2p.identity import Identity, load_or_create_identity
from echo2.p2p.join import JoinString
from echo2.p2p.messages import (
    AppealReply,
    AppealRequest,
    Receipt,
    ReceiptBatch,
    Signed,
    StatementReply,
    StatementRequest,
)
from echo2.p2p.postings import ORIGIN, Posting, Statement, posting_hash

COORDINATOR = Identity(bytes([9]) * 32)
JOIN = JoinString(COORDINATOR.peer_id, ("/ip4/127.0.0.1/tcp/4001",), "secret" * 6, "r")
POOLS = Identity(bytes([1]) * 32)
"""The coordinator of the pool that other tests use too."""

LEASE = "1ea5e0000000000000000000000000ff"


@pytest.fixture
def home(tmp_path):
    folder = tmp_path / "home"
    load_or_create_identity(folder / "identity.key")
    remember_join(folder, JOIN)
    return folder


def postings(peer, *facts):
    """(reason, unit, quantity, amount) each."""
    made = []
    for number, (reason, unit, quantity, amount) in enumerate(facts, 1):
        values = [number, "r", peer, "credit", unit, amount, quantity, "coordinator", reason, 1]
        values.append(made[-1].hash if made else ORIGIN)
        names = [name for name in Posting.model_fields if name != "hash"]
        made.append(Posting(**dict(zip(names, values, strict=True)), hash=posting_hash(values)))
    return made


def page(peer, after, made, head, signer=COORDINATOR):
    statement = Statement(
        peer=peer, after=after, postings=tuple(made), head_id=head.id, head_hash=head.hash, wall_micros=1
    )
    return signer.sign("statement", statement), statement


def keep(home, peer, *pages):
    papers = Papers(home / "papers.sqlite")
    for signed, statement in pages:
        papers.keep_statement(COORDINATOR.peer_id, signed, statement)
    papers.close()


def receipts(home, peer, *states):
    spool = Spool(home / "spool.sqlite")
    found = tuple(
        Receipt(sequence=number, lease_id=bytes(16), sample=0, state=state, reason="", reward=None)
        for number, state in enumerate(states, 1)
    )
    batch = ReceiptBatch(run="r", peer=peer, receipts=found)
    spool.keep_receipts(COORDINATOR.sign("receipts", batch), batch)
    spool.close()


def call(home, *words):
    return CliRunner().invoke(app, [*words, "--home", str(home)])


def test_what_was_fetched_is_checked_against_the_receipts(home):
    """Without the network: sums, signatures, the chain, and state by state what is credited and what is not."""
    peer = load_or_create_identity(home / "identity.key").peer_id
    made = postings(
        peer,
        ("consumed", "credit", 2, 2_000_000),
        ("pay", "usd", 2, 100),
        ("stale", "credit", 1, 500_000),
        ("consumed", "credit", 1, 1_000_000),
    )
    keep(home, peer, page(peer, 0, made[:2], made[1]), page(peer, 2, made[2:], made[3]))
    receipts(home, peer, "consumed", "consumed", "consumed", "consumed", "stale", "stale", "rejected", "evaluated")
    found = call(home, "statement")
    assert found.exit_code == 0, found.output
    assert "4 postings: 3.500000 credit, 0.000100 usd" in found.output
    assert "r: 4 receipts say consumed, 3 are credited: 1 ARE NOT" in found.output
    assert "r: 2 receipts say stale, 1 are credited: the other 1 came after their lease's time" in found.output
    assert "r: 1 receipts say evaluated, 0 are credited: NONE IS CREDITED" in found.output
    assert f"signed by {COORDINATOR.peer_id}, and unaltered" in found.output


def test_a_kept_statement_that_is_wrong_is_told_in_words(home):
    """A page that was taken away, one that was altered on the disk, one that the coordinator contradicts."""
    peer = load_or_create_identity(home / "identity.key").peer_id
    made = postings(peer, ("consumed", "credit", 1, 1), ("consumed", "credit", 1, 2), ("consumed", "credit", 1, 3))
    receipts(home, peer, "consumed")
    keep(home, peer, page(peer, 1, made[1:], made[2]))
    found = call(home, "statement")
    assert (found.exit_code, "a page is missing here: postings behind 0, up to 1" in found.output) == (1, True)
    other = postings(peer, ("consumed", "credit", 1, 7))
    keep(home, peer, page(peer, 0, other, other[0]))
    found = call(home, "statement")
    assert (found.exit_code, "they contradict each other: posting 1 has 2 hashes" in found.output) == (1, True)
    signed, statement = page(peer, 0, made[:1], made[0])
    keep(home, peer, (Signed(payload=signed.payload[:-1] + b"\x07", signature=signed.signature), statement))
    found = call(home, "statement")
    assert isinstance(found.exception, ConfigurationError)
    assert "was changed since it was fetched" in str(found.exception)


def test_a_home_without_statements_says_so(home):
    """No traceback, no exit code of a fault."""
    found = call(home, "statement")
    assert (found.exit_code, "no statement was fetched yet" in found.output) == (0, True)


def test_pages_that_were_kept_before_a_kill_go_on(tmp_path):
    """An empty page takes the place of the empty one before it; a full one is kept for good."""
    peer = Identity(bytes([1]) * 32).peer_id
    made = postings(peer, ("consumed", "credit", 1, 1), ("stale", "credit", 1, 2))
    for signed, statement in (page(peer, 0, [], made[0]), page(peer, 0, [], made[1]), page(peer, 0, made, made[1])):
        papers = Papers(tmp_path / "p")
        papers.keep_statement("c", signed, statement)
        papers.close()
    papers = Papers(tmp_path / "p")
    assert papers.last_posting("c") == 2
    assert papers.last_posting("another") == 0
    assert papers._db.execute("SELECT COUNT(*) FROM statements").fetchone() == (1,)


def test_an_appeal_is_put_into_the_home(home):
    """By one command, listed by another; what no coordinator would take is refused at once, in words."""
    assert "no appeals" in call(home, "appeals").output
    assert call(home, "appeal", LEASE.upper(), "  it was right  ").exit_code == 0
    assert call(home, "appeal", "suspension", "x" * 1024).exit_code == 0
    shown = call(home, "appeals").output
    assert f"unsent    r                {LEASE}\n    it was right\n" in shown
    for about, text, told in (
        ("lease", "x", "is neither a lease nor the word suspension"),
        (LEASE, " ", "has 1 to 1024 characters"),
        (LEASE, "x" * 1025, "this one has 1025"),
        (LEASE, "\udcff", "bytes that are no characters"),
    ):
        with pytest.raises(ConfigurationError, match=told):
            new_appeal(JOIN, about, text, bytes(16))


def test_a_script_that_appeals_for_ever_is_stopped():
    """The home takes so many that were not sent."""
    papers = Papers(":memory:")
    for number in range(UNSENT_MAX):
        papers.add_appeal(new_appeal(JOIN, "suspension", "x", number.to_bytes(16)))
    with pytest.raises(ConfigurationError, match="wait to be sent"):
        papers.add_appeal(new_appeal(JOIN, "suspension", "x", UNSENT_MAX.to_bytes(16)))


def test_a_damaged_file_is_told_of(tmp_path):
    """What to do is said, and that no rollout is lost by it."""
    path = tmp_path / "papers.sqlite"
    path.write_bytes(b"not a database at all, but long enough to be one" * 100)
    with pytest.raises(ConfigurationError, match=r"is damaged .* move it away"):
        Papers(path)


async def test_the_node_fetches_and_sends(autojump_clock, pool):
    """Pages until there are no more; an appeal until it is taken, then now and then until it is answered."""
    peer = pool.identity.peer_id
    made = postings(peer, ("consumed", "credit", 1, 1), ("stale", "credit", 1, 2))
    asked, texts = [], []

    async def statement(sender, request):
        asked.append(request.after)
        signed, _ = page(peer, request.after, made[request.after : request.after + 1], made[1], POOLS)
        return StatementReply(statement=signed, more=request.after < 1)

    async def appeal(sender, request):
        texts.append(request.text)
        if request.subject == LEASE:
            raise Refused("unknown_lease", "no such lease")
        if len(texts) < 3:
            raise Refused("too_many_appeals", "later", 10.0)
        answered = len(texts) > 5
        return AppealReply(
            appeal_id=request.appeal_id, state="upheld" if answered else "open", answer="so it was" if answered else ""
        )

    papers = Papers(":memory:")
    join = pool.join
    papers.add_appeal(new_appeal(join, "suspension", "why?", bytes(16)))
    papers.add_appeal(new_appeal(join, LEASE, "it was right", bytes(15) + b"1"))
    transport = pool.network._transports[pool.join.peer]
    for protocol, kind, answer in (("statement", StatementRequest, statement), ("appeal", AppealRequest, appeal)):
        transport.set_handler(protocol, answering(kind, answer, lambda *_: None, wait_seconds=60))
    pool.papers = papers
    async with pool.node():
        await trio.sleep(400.0)
    assert asked[:3] == [0, 1, 2]
    first, second = papers.appeals()
    assert (first.state, first.answer) == ("upheld", "so it was")
    assert (second.state, second.answer) == ("declined", "no such lease")
    assert texts.count("it was right") == 1
    assert "answer: so it was" in "\n".join(listed([first]))


@pytest.mark.parametrize(("text", "micros"), [(0.0, 0), (0.35, 350_000), (1e6, 10**12), (0.1 + 0.2, 300_000)])
def test_a_price_is_told_in_whole_millionths(text, micros):
    """No binary fraction gets onto the wire."""
    assert NodeSettings(price_hour=text).price_micros_hour == micros


@pytest.mark.parametrize("price", [-0.1, float("nan"), float("inf"), 1e6 + 1])
def test_a_price_that_is_none_is_refused(price):
    """By the node's own settings, before anybody is told."""
    with pytest.raises(ValueError, match="price_hour"):
        NodeSettings(price_hour=price)


def test_settings_in_the_home(home, monkeypatch):
    """node.toml says the price; the command line goes before it; a mistake in it is told with its name."""
    seen = []
    monkeypatch.setattr("echo2.node.main.run_daemon", lambda _serve: None)
    monkeypatch.setattr("echo2.node.main._serve", lambda settings, *_: seen.append(settings))
    monkeypatch.setattr("echo2.node.main.run_daemon", lambda serve: _step(serve))
    (home / "node.toml").write_text('price_hour = 0.35\nthreads = 3\nname = "kitchen"\n')
    assert call(home, "run").exit_code == 0
    assert call(home, "run", "--price-hour", "0.5").exit_code == 0
    assert [(each.price_hour, each.threads, each.name) for each in seen] == [(0.35, 3, "kitchen"), (0.5, 3, "kitchen")]
    (home / "node.toml").write_text("price_hours = 1\n")
    told = call(home, "run").exception
    assert isinstance(told, ConfigurationError)
    assert "node.toml: unknown key 'price_hours'; did you mean 'price_hour'" in str(told)


def _step(serve):
    with pytest.raises(TypeError):  # what stands for `_serve` returns nothing to wait for
        serve().send(None)
