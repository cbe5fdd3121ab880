"""The spool: nothing lost, nothing counted twice, whatever ends the process."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.node.spool import ACKED_ROWS_MAX, Finished, Spool, SpoolFull
from echo2.p2p.codec import pack_logprobs, pack_tokens
from echo2.p2p.errors import ConfigurationError
from echo2.p2p.identity import Identity, open_signed
from echo2.p2p.messages import SLICES_MAX, Receipt, ReceiptBatch, RolloutRecord, Slice, SliceAck

COORDINATOR = Identity(bytes(32))


def lease(number: int) -> bytes:
    return number.to_bytes(16, "big")


def finished(number: int, kind="train", samples=2, tokens=3, run="demo", first=0) -> Finished:
    rollout = {"tokens": pack_tokens([1] * tokens), "logprobs": pack_logprobs([-1.0] * tokens), "finish": "stop"}
    rollouts = tuple(RolloutRecord(sample=i, **rollout) for i in range(first, first + samples))
    return Finished(run, kind, number, 0, Slice(lease_id=lease(number), manifest_hash=bytes(32), rollouts=rollouts))


def ack(number: int, state="held") -> SliceAck:
    return SliceAck(lease_id=lease(number), state=state, reason="")


def receipts(first: int, states) -> ReceiptBatch:
    return ReceiptBatch(
        run="demo",
        peer=COORDINATOR.peer_id,
        receipts=tuple(
            Receipt(sequence=first + i, lease_id=lease(first + i), sample=0, state=state, reason="", reward=None)
            for i, state in enumerate(states)
        ),
    )


def receipt(sequence: int, number: int, sample: int = 0) -> Receipt:
    return Receipt(sequence=sequence, lease_id=lease(number), sample=sample, state="consumed", reason="", reward=None)


@pytest.fixture
def spool():
    return Spool(":memory:")


def test_a_slice_waits_until_it_is_acknowledged(spool):
    """It comes back byte for byte, oldest first, and is gone only after its acknowledgement."""
    spool.add([finished(1), finished(2)])
    assert spool.pending("demo") == [finished(1).slice, finished(2).slice]
    assert spool.acknowledge([ack(1)]) == 1
    assert spool.pending("demo") == [finished(2).slice]


def test_train_and_evaluation_rollouts_are_counted_apart(spool):
    """`submitted` is of train leases only, and counts rollouts."""
    spool.add([finished(1, samples=3), finished(2, "eval", samples=1)])
    spool.acknowledge([ack(1), ack(2)])
    counts = spool.counts()
    assert (counts.generated, counts.submitted, counts.evaluations_submitted, counts.spooled) == (4, 3, 1, 0)
    assert counts.undecided == 4


@given(st.lists(st.one_of(st.tuples(st.just("add"), st.integers(0, 4)), st.tuples(st.just("ack"), st.integers(0, 4)))))
def test_counts_whatever_is_repeated(events):
    """Adding or acknowledging a lease again changes nothing; an unknown acknowledgement is ignored."""
    spool = Spool(":memory:")
    added, acked = set(), set()
    for what, number in events:
        if what == "add":
            spool.add([finished(number)])
            added.add(number)
        else:
            spool.acknowledge([ack(number), ack(number)])
            acked |= {number} & added
    counts = spool.counts()
    assert counts.generated == 2 * len(added)
    assert counts.submitted == 2 * len(acked)
    assert counts.spooled == 2 * len(added - acked)
    assert {s.lease_id for s in spool.pending("demo")} == {lease(n) for n in added - acked}


def test_a_submission_is_bounded(spool):
    """At most 64 slices and about 12 MiB; a single large one still goes."""
    spool.add([finished(n) for n in range(SLICES_MAX + 1)])
    assert len(spool.pending("demo")) == SLICES_MAX
    large = Spool(":memory:")
    large.add([finished(n, samples=10, tokens=131_072) for n in range(3)])
    assert len(large.pending("demo")) == 1


def test_only_the_runs_own_slices_are_sent(spool):
    """A home that served another run before keeps that run's slices for it."""
    spool.add([finished(1, run="other"), finished(2)])
    assert spool.pending("demo") == [finished(2).slice]


def test_receipts_keep_the_signed_bytes_and_are_counted_once(spool):
    """A batch asked for twice is counted once; the kept bytes still verify."""
    spool.add([finished(number, samples=1) for number in range(1, 5)])
    spool.acknowledge([ack(number) for number in range(1, 5)])
    assert spool.counts().undecided == 4
    for first, states in [
        (1, ["consumed", "stale"]),
        (1, ["consumed", "stale"]),
        (2, ["stale", "consumed", "rejected"]),
    ]:
        batch = receipts(first, states)
        spool.keep_receipts(COORDINATOR.sign("receipts", batch), batch)
    assert spool.counts().receipts == {"consumed": 2, "stale": 1, "rejected": 1}
    assert spool.counts().undecided == 0
    assert spool.receipts_after("demo") == 4
    kept = [open_signed(s, COORDINATOR.peer_id, "receipts", ReceiptBatch) for s in spool.receipt_batches("demo")]
    assert [r.sequence for batch in kept for r in batch.receipts] == [1, 2, 2, 3, 4]


def test_receipts_of_a_slice_from_the_middle_of_its_group_are_ours(spool):
    """Samples are numbered within the group, not within the slice."""
    spool.add([finished(1, first=6)])
    spool.acknowledge([ack(1)])
    batch = ReceiptBatch(run="demo", peer=COORDINATOR.peer_id, receipts=(receipt(1, 1, 6), receipt(2, 1, 7)))
    spool.keep_receipts(COORDINATOR.sign("receipts", batch), batch)
    counts = spool.counts()
    assert (counts.receipts, counts.receipts_elsewhere, counts.undecided) == ({"consumed": 2}, 0, 0)


def test_receipts_of_work_done_elsewhere_hide_nothing(spool):
    """A node moved with its key gets the receipts of its old machine too: they are kept, and decide nothing here."""
    batch = receipts(1, ["consumed"] * 500)
    spool.keep_receipts(COORDINATOR.sign("receipts", batch), batch)
    spool.add([finished(1000, samples=20)])
    spool.acknowledge([ack(1000)])
    counts = spool.counts()
    assert (counts.undecided, counts.receipts, counts.receipts_elsewhere) == (20, {}, 500)
    assert spool.receipts_after("demo") == 500
    batch = receipts(1000, ["consumed"])
    spool.keep_receipts(COORDINATOR.sign("receipts", batch), batch)
    assert spool.counts().undecided == 19
    assert spool.counts().receipts == {"consumed": 1}


def test_a_receipt_may_come_before_the_acknowledgement(spool):
    """The answer to a submission was lost, the slice is sent again; what is decided by then is not waited for."""
    spool.add([finished(1)])
    batch = receipts(1, ["stale"])
    spool.keep_receipts(COORDINATOR.sign("receipts", batch), batch)
    assert spool.counts().undecided == 0
    spool.acknowledge([ack(1)])
    assert spool.counts().undecided == 1


def test_a_second_receipt_of_one_rollout_counts_once(spool):
    """A coordinator restored from a copy may say again, under another number, what it had said."""
    spool.add([finished(3)])
    spool.acknowledge([ack(3)])
    for sequence in (3, 4):
        batch = receipts(3, ["consumed"]).model_copy(update={"receipts": (receipt(sequence, 3),)})
        spool.keep_receipts(COORDINATOR.sign("receipts", batch), batch)
    assert (spool.counts().undecided, spool.counts().receipts) == (1, {"consumed": 1})


def test_what_the_history_forgets_is_not_waited_for(spool, monkeypatch):
    """Else `finish` would wait for a receipt that can no longer be matched."""
    monkeypatch.setattr("echo2.node.spool.ACKED_ROWS_MAX", 3)
    for number in range(10):
        spool.add([finished(number)])
        spool.acknowledge([ack(number)])
    assert spool.counts().undecided == 6


def test_a_spool_of_an_older_release_is_taken_over(tmp_path):
    """Which of its rollouts are decided is read from the batches it kept, once."""
    spool = Spool(tmp_path / "spool.sqlite")
    spool.add([finished(number) for number in (1, 2, 3)])
    spool.acknowledge([ack(1), ack(2)])
    batch = receipts(1, ["consumed", "stale", "consumed", "rejected"])
    spool.keep_receipts(COORDINATOR.sign("receipts", batch), batch)
    before = spool.counts()
    spool._db.execute("ALTER TABLE slice DROP COLUMN decided")
    spool._db.execute("DELETE FROM total WHERE name IN ('undecided', 'receipts_elsewhere')")
    spool.close()
    for _ in range(2):
        spool = Spool(tmp_path / "spool.sqlite")
        assert spool.counts() == before
        spool.close()
    assert (before.undecided, before.receipts_elsewhere) == (2, 1)


def test_history_is_bounded_and_counts_are_not(spool, monkeypatch):
    """Old acknowledged slices go; their sums stay."""
    monkeypatch.setattr("echo2.node.spool.ACKED_ROWS_MAX", 3)
    assert ACKED_ROWS_MAX > 3
    for number in range(10):
        spool.add([finished(number)])
        spool.acknowledge([ack(number)])
    assert spool.counts().submitted == 20
    assert spool._db.execute("SELECT COUNT(*) FROM slice").fetchone() == (3,)


def test_what_was_added_survives_kill_9(tmp_path):
    """A process killed right after `add` returns has lost nothing; a half-done one leaves nothing half."""
    path = tmp_path / "spool.sqlite"
    script = textwrap.dedent(f"""
        import os, sys
        from echo2.node.spool import Spool, Finished
        from echo2.p2p.messages import Slice, RolloutRecord
        spool = Spool({str(path)!r})
        for n in range(3):
            rollout = RolloutRecord(sample=0, tokens=b"0000", logprobs=b"0000", finish="stop")
            piece = Slice(lease_id=n.to_bytes(16, "big"), manifest_hash=bytes(32), rollouts=(rollout,))
            spool.add([Finished("demo", "train", n, 0, piece)])
        os.kill(os.getpid(), 9)
    """)
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -9
    spool = Spool(path)
    assert [s.lease_id for s in spool.pending("demo")] == [lease(n) for n in range(3)]
    assert spool.counts().spooled == 3
    spool.close()


def test_nobody_else_can_read_the_spool(tmp_path):
    """Prompts and rollouts are for the coordinator alone, also in a folder that others may enter."""
    spool = Spool(tmp_path / "spool.sqlite")
    spool.add([finished(1)])
    assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o600}
    spool.close()


def test_a_full_disk_is_said_and_changes_nothing(tmp_path):
    """The call raises SpoolFull, the slices before it are intact, and it succeeds once there is room."""
    spool = Spool(tmp_path / "spool.sqlite")
    spool.add([finished(1)])
    (pages,) = spool._db.execute("PRAGMA page_count").fetchone()
    spool._db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(SpoolFull, match="free some room"):
        spool.add([finished(2, samples=200, tokens=100)])
    assert spool.pending("demo") == [finished(1).slice]
    assert spool.counts().generated == 2
    spool._db.execute("PRAGMA max_page_count = 1000000")
    spool.add([finished(2, samples=200, tokens=100)])
    assert spool.counts().generated == 202
    spool.close()


def test_a_file_that_is_no_spool_is_one_clear_error(tmp_path):
    """Not a traceback of the database."""
    path = tmp_path / "spool.sqlite"
    path.write_bytes(b"not a database at all" * 100)
    with pytest.raises(ConfigurationError, match="cannot use the spool"):
        Spool(path)


def damaged(path, first_byte):
    """A spool with work in it, whose bytes from there on a failing disk has made into something else."""
    made = Spool(path)
    made.add([finished(number, tokens=200) for number in range(40)])
    made.acknowledge([ack(number) for number in range(10)])
    batch = receipts(1, ["consumed"] * 5)
    made.keep_receipts(COORDINATOR.sign("receipts", batch), batch)
    made.close()
    with path.open("r+b") as file:
        file.seek(first_byte)
        file.write(b"\xa5" * (path.stat().st_size - first_byte))


def used(path):
    """All that a node does with its spool."""
    made = Spool(path)
    try:
        made.knows("demo")
        made.receipts_after("demo")
        list(made.receipt_batches("demo"))
        made.pending("demo")
        made.add([finished(99)])
        made.acknowledge([ack(number) for number in range(60)])
        made.give_up(lease(99), "x")
        batch = receipts(6, ["consumed"] * 5)
        made.keep_receipts(COORDINATOR.sign("receipts", batch), batch)
    finally:
        made.close()


@pytest.mark.parametrize("first_byte", [0, 16, 100, *range(1024, 60_000, 2048)])
def test_a_damaged_spool_names_itself_and_what_is_lost(tmp_path, first_byte):
    """At start or when the damage is met: one line for a person, wherever the damage is."""
    path = tmp_path / "spool.sqlite"
    damaged(path, first_byte)
    with pytest.raises(ConfigurationError, match=r"spool\.sqlite: it is damaged .* move it away.* lost"):
        used(path)


@pytest.mark.parametrize(
    ("whole", "odd"),
    [(b"tablehistoryhistory", b"table\xff\xfestoryhistory"), (b"tableslice", b"table\xfflice")],
)
def test_a_spool_whose_schema_is_no_text_names_itself(tmp_path, whole, odd):
    """SQLite quotes it in its error, which is then no UTF-8."""
    path = tmp_path / "spool.sqlite"
    damaged(path, 1 << 30)
    assert whole in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(whole, odd))
    with pytest.raises(ConfigurationError, match=r"spool\.sqlite: it is damaged .* move it away.* lost"):
        used(path)


@pytest.mark.parametrize("section", [Spool._transaction, Spool._reading])
def test_an_error_of_the_database_that_is_no_text_is_damage_at_any_time(spool, section):
    """Also where a schema is read again, in the middle of the work; the next call finds no transaction open."""
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="is damaged"), section(spool):
            b"malformed database schema (\xff)".decode()
    spool.add([finished(1)])


@pytest.mark.parametrize(
    "change", ["total SET value = 'x'", "slice SET record = 'text'", "slice SET run = x'ff'", "receipts SET last = 'x'"]
)
def test_a_cell_that_is_not_as_written_is_damage(tmp_path, change):
    """SQLite keeps any type in any column."""
    path = tmp_path / "spool.sqlite"
    damaged(path, 1 << 30)
    made = Spool(path)
    made._db.execute(f"UPDATE {change}")
    made.close()
    with pytest.raises(ConfigurationError, match="is damaged"):
        used(path)


def test_a_spool_damaged_while_it_is_used_ends_the_same_way(tmp_path):
    """Pages that are read later than at the start."""
    path = tmp_path / "spool.sqlite"
    damaged(path, 1 << 30)
    made = Spool(path)
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xa5" * (path.stat().st_size - 4096))
    made._db.execute("PRAGMA shrink_memory")
    with pytest.raises(ConfigurationError, match="is damaged"):
        made.pending("demo")
    with pytest.raises(ConfigurationError, match="is damaged"):
        made.add([finished(100)])
    made.close()
