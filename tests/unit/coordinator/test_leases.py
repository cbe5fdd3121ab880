from __future__ import annotations

import pytest

from echo2.coordinator.leases import LeaseBook, LeaseEntry, LeaseRules, LeaseState
from echo2.coordinator.slots import ATTEMPTS_MAX, Span

RULES = LeaseRules(group_size=4, rollouts_per_step=8, steps=10, staleness_max=2, slice_samples=2)


class Pool:
    """A book, leases numbered as they are granted, and no clock but the one passed in."""

    def __init__(self, rules=RULES):
        self.book = LeaseBook(rules)
        self.granted = []
        self.now = 0.0

    def ask(self, peer="a", version=0, samples=100, depth=2, newest=None, seconds=60.0, nodes=1):
        newest = version if newest is None else newest
        proposal = self.book.propose(
            peer=peer, version=version, newest=newest, samples_max=samples, depth=depth, nodes=nodes
        )
        leases = []
        for span in proposal.spans:
            lease_id = len(self.granted).to_bytes(16)
            lease = LeaseEntry(lease_id, peer, proposal.kind, span, version, b"m" * 32, 8, self.now, self.now + seconds)
            self.granted.append(lease)
            leases.append(lease)
        self.book.grant(leases)
        return leases, proposal.reason

    def deliver(self, lease):
        outcomes = self.book.judge(lease)
        self.book.deliver(lease, [sample for sample, outcome in outcomes.items() if outcome == "accept"])
        return outcomes

    def consume(self, *leases):
        for lease in leases:
            for sample in lease.span.samples:
                self.book.finish(
                    ordinal=lease.span.ordinal, sample=sample, lease_id=lease.lease_id, consumed=True, reopen=False
                )


def spans(leases):
    return [lease.span for lease in leases]


def test_slices_come_oldest_first_and_in_order():
    """Slices of at most slice_samples, group by group."""
    leases, _ = Pool().ask(samples=6)
    assert spans(leases) == [Span(0, 0, 2), Span(0, 2, 2), Span(1, 0, 2)]


def test_a_request_of_odd_size_splits_a_slice_and_the_next_goes_on_there():
    """Never more samples than asked for."""
    pool = Pool()
    assert spans(pool.ask(samples=3)[0]) == [Span(0, 0, 2), Span(0, 2, 1)]
    assert spans(pool.ask(samples=3)[0]) == [Span(0, 3, 1), Span(1, 0, 2)]


def test_pacing_stops_at_the_bound_and_says_so():
    """Under version 0 and depth 2, (0 + 2 + 1) * 8 = 24 samples are leased, no more."""
    pool = Pool()
    leases, _ = pool.ask()
    assert sum(lease.span.count for lease in leases) == 24
    assert pool.ask() == ([], "pacing: 24 of 24 under version 0")


def test_no_node_takes_more_than_its_share_of_what_is_left():
    """Of 24 samples three nodes get 8, then ceil(16 / 3) = 6, then a group at least."""
    pool = Pool()
    taken = [sum(lease.span.count for lease in pool.ask(peer, nodes=3)[0]) for peer in "abcabc"]
    assert taken == [8, 6, 4, 4, 2, 0]


def test_an_evaluation_is_shared_too():
    """Ten held-out prompts among two nodes of groups of four: 5, then a group, then the last."""
    pool = Pool()
    pool.book.open_evaluation(version=0, purpose="baseline", prompts=10)
    assert [len(pool.ask(peer, nodes=2)[0]) for peer in "abab"] == [5, 4, 1, 0]


def test_delivered_rollouts_still_count_until_they_are_dropped():
    """Queued and consumed rollouts are counted by pacing; a higher version gives new room."""
    pool = Pool()
    leases, _ = pool.ask()
    for lease in leases:
        pool.deliver(lease)
    assert pool.ask()[0] == []
    pool.consume(*leases[:4])
    assert pool.ask()[0] == []
    assert sum(lease.span.count for lease in pool.ask(version=1)[0]) == 8


def test_the_run_gets_no_more_than_it_needs():
    """At the end the budget, steps times R, binds before pacing does."""
    pool = Pool(LeaseRules(4, 8, 2, 2, 4))
    leases, _ = pool.ask()
    assert sum(lease.span.count for lease in leases) == 16
    assert pool.ask()[1] == "the run needs no more than 16 rollouts"


def test_an_expired_slice_is_reissued_before_anything_new():
    """The reissue goes first, to whoever asks, and keeps its place in the count."""
    pool = Pool()
    first, _ = pool.ask(samples=2, seconds=5.0)
    pool.ask(samples=2)
    pool.now = 5.0
    assert pool.book.expire(5.0) == first
    assert first[0].state is LeaseState.EXPIRED
    again, _ = pool.ask(peer="b", samples=4)
    assert spans(again) == [Span(0, 0, 2), Span(1, 0, 2)]


def test_a_reissue_is_possible_even_when_pacing_is_at_its_bound():
    """What expired is counted as open, so fresh slots cannot take its room."""
    pool = Pool()
    pool.ask(samples=2, seconds=5.0)
    pool.ask()
    pool.book.expire(10.0)
    assert pool.book.reserved == 24
    again, _ = pool.ask(peer="b")
    assert spans(again) == [Span(0, 0, 2)]


def test_a_late_slice_is_accepted_while_its_slot_is_wanted():
    """First to arrive wins, even after expiry; the reissue's slice is then a duplicate."""
    pool = Pool()
    (late,), _ = pool.ask(samples=2, seconds=5.0)
    pool.book.expire(10.0)
    (reissue,), _ = pool.ask(peer="b", samples=2)
    assert pool.deliver(late) == {0: "accept", 1: "accept"}
    assert pool.deliver(reissue) == {0: "duplicate", 1: "duplicate"}
    assert pool.book.queued == 2


def test_a_reissue_may_be_split_and_the_rest_of_a_late_slice_still_counts():
    """Sample 0 came from the reissue; the late slice adds sample 1 alone."""
    pool = Pool()
    (late,), _ = pool.ask(samples=2, seconds=5.0)
    pool.book.expire(10.0)
    (reissue,), _ = pool.ask(peer="b", samples=1)
    pool.deliver(reissue)
    assert pool.deliver(late) == {0: "duplicate", 1: "accept"}


def test_what_arrives_for_a_closed_group_is_late():
    """Once the learner consumed a rollout of the group, its missing samples are not wanted."""
    pool = Pool()
    leases, _ = pool.ask(samples=4)
    pool.deliver(leases[0])
    pool.consume(leases[0])
    assert pool.book.reserved == 2
    assert pool.deliver(leases[1]) == {2: "late", 3: "late"}
    assert pool.book.leases == {}


def test_leases_too_old_for_the_learner_expire_at_once():
    """When the learner is at 3 with S = 2, version 0 is of no use: the slots go out again under a newer one."""
    pool = Pool()
    (old,), _ = pool.ask(samples=2)
    pool.book.learner_at(3)
    assert pool.book.expire(0.0) == [old]
    assert pool.deliver(old) == {0: "late", 1: "late"}
    assert pool.ask(version=0, newest=2)[1] == "version 0 is too old for step 3 at S = 2"
    assert spans(pool.ask(version=2, samples=2)[0]) == [Span(0, 0, 2)]


def test_a_refused_slice_goes_to_others_first():
    """Its own node gets fresh slots before it gets the refused one again."""
    pool = Pool()
    (bad,), _ = pool.ask(samples=2)
    pool.book.reject(bad)
    assert spans(pool.ask(peer="a", samples=2)[0]) == [Span(0, 2, 2)]
    assert spans(pool.ask(peer="b", samples=2)[0]) == [Span(0, 0, 2)]


def test_a_lone_node_gets_its_refused_slice_again():
    """A pool of one must not wait for ever for somebody else."""
    pool = Pool()
    leases, _ = pool.ask()
    pool.book.reject(leases[0])
    assert spans(pool.ask()[0]) == [Span(0, 0, 2)]


def test_a_slot_that_nothing_fills_is_given_up():
    """After ATTEMPTS_MAX leases the slot is abandoned and counts no more."""
    pool = Pool()
    for _ in range(ATTEMPTS_MAX):
        (lease,), _ = pool.ask(samples=1, seconds=1.0)
        assert lease.span == Span(0, 0, 1)
        pool.now += 1.0
        pool.book.expire(pool.now)
    assert spans(pool.ask(samples=1)[0]) == [Span(0, 1, 1)]
    assert (pool.book.train.abandoned, pool.book.reserved) == (1, 1)


def test_a_withdrawn_rollout_opens_its_slot():
    """The group is completed by another node."""
    pool = Pool()
    (lease,), _ = pool.ask(samples=2)
    pool.deliver(lease)
    pool.book.finish(ordinal=0, sample=1, lease_id=lease.lease_id, consumed=False, reopen=True)
    assert spans(pool.ask(peer="b", samples=1)[0]) == [Span(0, 1, 1)]


@pytest.mark.parametrize(
    ("state", "version", "step", "again"),
    [("withdrawn", 4, 5, True), ("stale", 2, 5, True), ("stale", 6, 5, True), ("stale", 4, 5, False)],
)
def test_only_a_rollout_dropped_for_its_age_is_wanted_again(state, version, step, again):
    """A fresh one that was dropped has a group that is trained already, or that cannot be used."""
    assert Pool().book.wanted_again(state=state, version=version, step=step) is again


def test_a_dead_nodes_leases_are_open_at_once():
    """Nothing waits for the duration of a lease whose node is gone."""
    pool = Pool()
    pool.ask(peer="a", samples=2)
    pool.ask(peer="b", samples=2)
    assert [lease.peer for lease in pool.book.release_peer("a")] == ["a"]
    assert pool.book.held_by("a") == ()
    assert len(pool.book.held_by("b")) == 1
    assert spans(pool.ask(peer="b", samples=2)[0]) == [Span(0, 0, 2)]


def test_an_evaluation_goes_before_all_training():
    """While it is open, only its prompts are leased, one sample each, and only under its version."""
    pool = Pool()
    pool.book.open_evaluation(0, "baseline", 3)
    leases, _ = pool.ask(samples=2)
    assert [(lease.kind, lease.span) for lease in leases] == [("eval", Span(0, 0, 1)), ("eval", Span(1, 0, 1))]
    assert pool.ask(version=2)[1] == "the baseline evaluation needs version 0"
    (last,), _ = pool.ask(samples=9)
    assert pool.ask()[1] == "every held-out prompt is out or answered"
    for lease in (*leases, last):
        pool.deliver(lease)
    assert (pool.book.queued, pool.book.reserved) == (0, 0)
    pool.book.close_evaluation(0)
    assert pool.ask(samples=1)[0][0].kind == "train"


def test_nothing_is_leased_after_the_last_version():
    """The run is over when version `steps` is published, whatever room pacing sees."""
    assert Pool().ask(version=10)[1] == "all 10 steps are trained"


def test_a_book_rebuilt_from_its_leases_is_the_same():
    """After kill -9: outstanding, returned and reissued leases, the frontier and the count are as before."""
    pool = Pool()
    leases, _ = pool.ask(samples=5, seconds=5.0)
    pool.deliver(leases[1])
    pool.book.expire(10.0)
    pool.now = 10.0
    (reissue,), _ = pool.ask(peer="b", samples=2)
    copies = [
        (
            LeaseEntry(e.lease_id, e.peer, e.kind, e.span, e.version, e.manifest_hash, 8, 0.0, 60.0),
            {2: True, 3: True} if e is leases[1] else None,
        )
        for e in pool.granted
    ]
    rebuilt = Pool()
    rebuilt.granted = list(pool.granted)
    rebuilt.book.restore(copies, closed=[], next_slot=(1, 1))
    rebuilt.book.queued = 2
    assert rebuilt.book.reserved == pool.book.reserved == 5
    assert rebuilt.book.train.slot(0, 0).lease_id == reissue.lease_id
    assert rebuilt.deliver(rebuilt.book.leases[leases[0].lease_id]) == {0: "accept", 1: "accept"}
    assert spans(rebuilt.ask(samples=1)[0]) == [Span(1, 1, 1)]


def test_an_interim_evaluation_gets_its_share_and_no_more():
    """At a fifth, four training samples earn one: after every eight come two answers to one prompt."""
    pool = Pool(LeaseRules(4, 800, 10, 2, 2))
    pool.book.open_evaluation(0, "interim", 6, 2, 0.2)
    kinds = [pool.ask(samples=2)[0][0].kind for _ in range(15)]
    assert kinds == ["train", "train", "train", "train", "eval"] * 3
    held_out = [lease.span for lease in pool.granted if lease.kind == "eval"]
    assert held_out == [Span(ordinal, 0, 2) for ordinal in range(3)]
    assert pool.book.reserved == 24  # what is evaluated counts for no pacing


def test_an_interim_evaluation_has_what_training_leaves_idle():
    """Once pacing stops training it is leased freely, and none of that is held against it later."""
    pool = Pool()
    pool.book.open_evaluation(0, "interim", 30, 1, 0.01)
    assert {lease.kind for lease in pool.ask()[0]} == {"train"}
    leases, _ = pool.ask(samples=20)
    assert [lease.kind for lease in leases] == ["eval"] * 20
    assert pool.book.interim.credit == 0
    assert sum(lease.span.count for lease in pool.ask(version=1)[0]) == 8  # another version: nothing of it there


def test_only_nodes_with_its_version_are_asked_to_evaluate():
    """A node with another snapshot trains on, whatever the evaluation has coming."""
    pool = Pool(LeaseRules(4, 800, 10, 2, 2))
    pool.book.open_evaluation(0, "interim", 6, 1, 0.5)
    assert [pool.ask(samples=2, version=1)[0][0].kind for _ in range(4)] == ["train"] * 4
    assert pool.ask(samples=2, version=0)[0][0].kind == "eval"


def test_an_answer_that_comes_after_its_evaluation_is_late():
    """What is out when an evaluation is over is nobody's any more."""
    pool = Pool()
    pool.book.open_evaluation(0, "interim", 6, 1, 0.5)
    pool.ask()
    (lease, *_), _ = pool.ask()
    assert pool.book.evaluation_is_out(0)
    pool.book.close_evaluation(0)
    assert pool.book.judge(lease) == {0: "late"}
    assert pool.book.interim is None
