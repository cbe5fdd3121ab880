"""The judges themselves: each must condemn a trace that is wrong in its way and pass one that is right."""

from __future__ import annotations

from sim import checkers
from sim.checkers import Resume, Step, Trace, Trained


def rollout(ordinal: int, version: int = 0, lease: bytes = b"L", sample: int = 0) -> Trained:
    return Trained(lease + bytes([ordinal]), sample, ordinal, version)


def trace(*events, **states) -> Trace:
    seen = Trace(learner=list(events))
    for step in checkers.lineage(seen):
        for one in step.batch:
            seen.ledger[one.lease, one.sample] = "consumed"
    return seen


def test_a_clean_run_passes_all_three():
    """Steps in order, each slot once, nothing too old."""
    seen = trace(Step(0, 0, (rollout(0),)), Step(0, 1, (rollout(1),)))
    assert not checkers.nothing_consumed_twice(seen)
    assert not checkers.nothing_acknowledged_lost(seen)
    assert not checkers.staleness_bounded(seen, 3)


def test_the_same_slot_from_two_leases_is_found():
    """A reissued slice that is trained on as well as the first is a double consumption."""
    seen = trace(Step(0, 0, (rollout(0),)), Step(0, 1, (rollout(0, lease=b"M"),)))
    assert any("slot" in finding for finding in checkers.nothing_consumed_twice(seen))


def test_steps_undone_by_a_resume_may_use_their_rollouts_again():
    """What a crash rolled back was not consumed."""
    seen = trace(Step(0, 0, (rollout(0),)), Step(0, 1, (rollout(1),)), Resume(1), Step(1, 1, (rollout(1),)))
    assert not checkers.nothing_consumed_twice(seen)


def test_using_them_again_without_a_resume_is_found():
    """The same rollout in two steps of one lineage is condemned."""
    seen = trace(Step(0, 0, (rollout(0),)), Step(0, 1, (rollout(0),)))
    assert checkers.nothing_consumed_twice(seen)


def test_a_ledger_that_disagrees_with_the_lineage_is_found():
    """Consumed in the ledger but never trained, and trained but not consumed."""
    seen = trace(Step(0, 0, (rollout(0),)))
    seen.ledger[b"X", 0] = "consumed"
    seen.ledger[rollout(0).lease, 0] = "admitted"
    assert len(checkers.nothing_consumed_twice(seen)) == 2


def test_an_acknowledged_rollout_missing_from_the_ledger_is_found():
    """An acknowledgement is a promise."""
    seen = trace(Step(0, 0, (rollout(0),)))
    seen.acknowledged.add((b"gone", 3))
    assert checkers.nothing_acknowledged_lost(seen)


def test_a_receipt_that_contradicts_the_ledger_is_found():
    """A node told `stale` for what was consumed was told wrong."""
    seen = trace(Step(0, 0, (rollout(0),)))
    seen.receipts.append(("peer", 1, rollout(0).lease, 0, "stale"))
    assert checkers.nothing_acknowledged_lost(seen)


def test_a_step_on_a_policy_too_old_or_unborn_is_found():
    """Staleness is judged for undone steps too: the bound holds at every moment."""
    assert checkers.staleness_bounded(trace(Step(0, 4, (rollout(0, version=0),)), Resume(0)), 3)
    assert checkers.staleness_bounded(trace(Step(0, 0, (rollout(0, version=2),))), 3)
