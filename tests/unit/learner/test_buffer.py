"""The replay buffer's rules, the consumed set and the outbox."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from echo2.learner.buffer import Buffer, Shortage, length_class
from echo2.learner.consumed import ConsumedSet
from echo2.learner.interfaces import Batch
from echo2.learner.outbox import Outbox
from echo2.p2p.codec import pack_logprobs, pack_tokens
from echo2.p2p.messages import AdmittedRollout, Finished, StepMetrics

PEER = "12D3KooWQPfBmCkGTXPoCXzwPpGP7AZ9KTbB6sVg4aN8AsxKGoBf"
N = 4
GROUPS = 2
S = 3
BOUND = 30.0


def rollout(ordinal, sample, *, version=0, lease=0, tokens=3):
    return AdmittedRollout(
        sequence=1,
        lease_id=ordinal.to_bytes(6, "big") + sample.to_bytes(2, "big") + lease.to_bytes(8, "big"),
        ordinal=ordinal,
        sample=sample,
        peer=PEER,
        version=version,
        prompt_tokens=pack_tokens([1]),
        tokens=pack_tokens([2] * tokens),
        logprobs=pack_logprobs([-1.0] * tokens),
        finish="stop",
        temperature=1.0,
        reward=0.0,
    )


def key(item):
    return item.lease_id, item.sample


def make(consumed=(), **changes):
    outbox = Outbox()
    arguments = {"group_size": N, "groups_per_step": GROUPS, "staleness_max": S, "outbox": outbox} | changes
    return Buffer(consumed=ConsumedSet(consumed), **arguments), outbox


def fill(buffer, ordinal, *, samples=range(N), version=0, now=0.0, step=0):
    for sample in samples:
        buffer.add(rollout(ordinal, sample, version=version), step=step, now=now)


def take(buffer, step=0, now=0.0):
    return buffer.take(step=step, now=now, partial_seconds=BOUND)


def states(outbox):
    outbox.durable_version = 1000
    return {(e.lease_id, e.sample): (e.state, e.step, e.reason.split(":")[0]) for e in outbox.report().finished}


def test_a_step_takes_the_oldest_complete_groups():
    """Oldest first: by version, then by ordinal; what is left waits for the next step."""
    buffer, _ = make()
    fill(buffer, 1, version=2)
    fill(buffer, 7, version=1)
    fill(buffer, 5, version=1)
    batch = take(buffer, step=2)
    assert [group.ordinal for group in batch.groups] == [5, 7]
    assert batch.staleness == 1
    assert batch.staleness_mean == 1.0
    assert str(take(buffer, step=3)) == "rollouts: 1 of 2 groups ready, 0 partial"


def test_versions_that_a_damaged_checkpoint_lost_are_not_trained_on():
    """After falling back to an older checkpoint, rollouts of later weights belong to no version of this run."""
    buffer, outbox = make(groups_per_step=1)
    fill(buffer, 0, version=5)
    assert isinstance(take(buffer, step=4), Shortage)
    assert set(states(outbox).values()) == {("stale", 4, "version 5 was lost; the run is at 4")}


def test_a_shortage_says_what_is_missing():
    """Waiting is shown with its numbers."""
    buffer, _ = make()
    fill(buffer, 0)
    fill(buffer, 1, samples=[0, 2])
    outcome = take(buffer)
    assert str(outcome) == "rollouts: 1 of 2 groups ready, 1 partial"
    assert outcome.retry_at == BOUND


def test_staleness_is_judged_when_the_step_starts():
    """A rollout that was fresh when it came is dropped when the step that would use it starts more than S later."""
    buffer, outbox = make()
    fill(buffer, 0, version=1, step=2)
    fill(buffer, 1, version=2, step=2)
    fill(buffer, 2, version=2, step=2)
    batch = take(buffer, step=5)
    assert [group.ordinal for group in batch.groups] == [1, 2]
    assert batch.staleness == S
    assert buffer.drops == {("staleness", 4): N}
    assert [s for s in states(outbox).values() if s[0] == "stale"] == [("stale", 5, "staleness 4 is above 3")] * N


def test_an_overdue_partial_group_trains_without_its_missing_samples():
    """After the bound, the oldest partial group counts as ready; the sample that comes after that is late."""
    buffer, outbox = make()
    fill(buffer, 0, samples=[0, 1, 3], now=10.0)
    fill(buffer, 1, now=11.0)
    assert take(buffer, now=10.0 + BOUND - 0.1).retry_at == 10.0 + BOUND
    batch = take(buffer, now=10.0 + BOUND)
    assert [len(group.rollouts) for group in batch.groups] == [3, 4]
    assert buffer.consumed.runs() == ((0, 1, 0b1011), (1, 2, 0b1111))
    late = rollout(0, 2)
    buffer.add(late, step=1, now=50.0)
    assert states(outbox)[key(late)] == ("stale", 1, "late")


def test_a_partial_group_waits_while_an_older_one_waits():
    """Being overdue is not enough: the older group's samples may still come, and it goes first."""
    buffer, _ = make()
    fill(buffer, 9, samples=[0], now=0.0)
    fill(buffer, 2, samples=[0], now=20.0)
    fill(buffer, 3, now=20.0)
    outcome = take(buffer, now=BOUND)
    assert (outcome.groups_ready, outcome.retry_at) == (1, 20.0 + BOUND)
    batch = take(buffer, now=20.0 + BOUND)
    assert [group.ordinal for group in batch.groups] == [2, 3]


def test_a_slot_is_never_consumed_twice():
    """A second lease's rollout for a slot is a duplicate, whether the first is held or consumed; the same one again
    is no event at all."""
    buffer, outbox = make()
    fill(buffer, 0)
    other = rollout(0, 1, lease=1)
    buffer.add(other, step=0, now=0.0)
    assert states(outbox) == {key(other): ("stale", 0, "duplicate")}
    fill(buffer, 0)
    fill(buffer, 1)
    assert len(buffer) == 2 * N
    take(buffer)
    third = rollout(0, 1, lease=2)
    buffer.add(third, step=1, now=0.0)
    fill(buffer, 0)
    assert states(outbox)[key(third)] == ("stale", 1, "duplicate")
    assert states(outbox)[key(rollout(0, 1))] == ("consumed", 0, "")
    assert len(buffer) == 0


def test_withdrawal():
    """A held rollout is forgotten and its slot is free again; a consumed one stays consumed; an unknown one is owed its
    answer and not used if it comes after all."""
    buffer, outbox = make(groups_per_step=1)
    fill(buffer, 0)
    buffer.withdraw(key(rollout(0, 2)), step=0)
    assert isinstance(take(buffer), Shortage)
    buffer.add(rollout(0, 2, lease=1), step=0, now=0.0)
    assert isinstance(take(buffer), Batch)
    buffer.withdraw(key(rollout(0, 1)), step=0)
    unknown = rollout(5, 0)
    buffer.withdraw(key(unknown), step=0)
    buffer.add(unknown, step=0, now=0.0)
    assert len(buffer) == 0
    decided = states(outbox)
    assert decided[key(rollout(0, 2))][0] == "withdrawn"
    assert decided[key(rollout(0, 1))][0] == "consumed"
    assert decided[key(unknown)][0] == "withdrawn"


def test_after_the_run_everything_gets_its_terminal_state():
    """Held rollouts and those still to come are stale once the run is over."""
    buffer, outbox = make()
    fill(buffer, 0, samples=[0])
    buffer.finish(step=9)
    fill(buffer, 1, samples=[1], step=9)
    assert [state for state, *_ in states(outbox).values()] == ["stale", "stale"]
    assert len(buffer) == 0


def test_a_restored_buffer_knows_what_was_consumed():
    """After a restart, the coordinator's unacknowledged rollouts come again; those the checkpoint consumed stay out."""
    buffer, _ = make(consumed=[(0, 2, 0b1111)], outbox=Outbox([finished(rollout(1, 0), "consumed", 3)]))
    fill(buffer, 1, samples=[0], step=4, version=4)
    fill(buffer, 2, step=4, version=4)
    assert len(buffer) == N


def finished(item, state, step):
    return Finished(lease_id=item.lease_id, sample=item.sample, state=state, step=step, reason="")


@pytest.mark.parametrize(("tokens", "expected"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (1000, 1024)])
def test_length_classes(tokens, expected):
    """Lengths are counted by powers of two."""
    assert length_class(tokens) == expected


class BufferAgainstAModel(RuleBasedStateMachine):
    """Random arrivals, resends, reissues, withdrawals, steps and crashes, against plain dictionaries."""

    @initialize()
    def start(self):
        self.outbox = Outbox()
        self.consumed_slots = {}
        self.step = 0
        self.now = 0.0
        self.buffer = self.new_buffer(())
        self.seen = {}
        self.saved = ((), (), 0, {})

    def new_buffer(self, runs):
        return Buffer(
            group_size=N, groups_per_step=GROUPS, staleness_max=S, outbox=self.outbox, consumed=ConsumedSet(runs)
        )

    @rule(ordinal=st.integers(0, 6), sample=st.integers(0, N - 1), lease=st.integers(0, 1), age=st.integers(0, 5))
    def arrives(self, ordinal, sample, lease, age):
        item = self.seen.setdefault(
            (ordinal, sample, lease), rollout(ordinal, sample, lease=lease, version=max(0, self.step - age))
        )
        self.buffer.add(item, step=self.step, now=self.now)

    @rule(ordinal=st.integers(0, 6), sample=st.integers(0, N - 1), lease=st.integers(0, 1))
    def withdrawn(self, ordinal, sample, lease):
        self.buffer.withdraw(key(rollout(ordinal, sample, lease=lease)), step=self.step)

    @rule(seconds=st.floats(0, 20))
    def time_passes(self, seconds):
        self.now += seconds

    @rule()
    def trains(self):
        outcome = take(self.buffer, step=self.step, now=self.now)
        if isinstance(outcome, Shortage):
            assert outcome.groups_ready < GROUPS
            return
        assert len(outcome.groups) == GROUPS
        assert outcome.staleness <= S
        ages = [(group.version, group.ordinal) for group in outcome.groups]
        assert ages == sorted(ages)
        for item in outcome.rollouts:
            slot = (item.ordinal, item.sample)
            assert slot not in self.consumed_slots
            self.consumed_slots[slot] = key(item)
        self.step += 1

    @rule()
    def skips_a_step(self):
        self.step += 1

    @rule()
    def checkpoints(self):
        left = self.outbox.unreported()
        self.saved = (self.buffer.consumed.runs(), left.finished, self.step, dict(self.consumed_slots))
        self.outbox.durable_version = self.step

    @rule()
    def reports(self):
        report = self.outbox.report()
        for entry in report.finished:
            assert entry.state != "consumed" or entry.step < self.outbox.durable_version
        self.outbox.acknowledge(report)
        self.outbox.forget(self.outbox.settled())

    @rule()
    def crashes(self):
        runs, left, self.step, slots = self.saved
        self.outbox = Outbox(left, durable_version=self.step)
        self.consumed_slots = dict(slots)
        self.buffer = self.new_buffer(runs)

    @invariant()
    def the_consumed_set_is_exact_and_compact(self):
        runs = self.buffer.consumed.runs()
        exact = {(g, s) for first, stop, mask in runs for g in range(first, stop) for s in range(N) if mask >> s & 1}
        assert exact == set(self.consumed_slots)
        assert self.buffer.consumed.count() == len(exact)
        for (_, stop, mask), (first, _, other) in itertools.pairwise(runs):
            assert stop <= first
            assert not (stop == first and mask == other)

    @invariant()
    def what_is_consumed_is_not_held(self):
        assert len(self.buffer) <= 7 * N


TestBufferAgainstAModel = BufferAgainstAModel.TestCase
TestBufferAgainstAModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(st.dictionaries(st.integers(0, 30), st.integers(1, 15), max_size=31), st.randoms())
def test_consumed_set_does_not_depend_on_the_order(masks, rng):
    """Whatever the order of consumption, the same set has the same, shortest form, and survives being saved."""
    one, two = ConsumedSet(), ConsumedSet()
    for ordinal in sorted(masks):
        one.add(ordinal, masks[ordinal])
    for ordinal in rng.sample(sorted(masks), len(masks)):
        two.add(ordinal, masks[ordinal])
    assert one.runs() == two.runs() == ConsumedSet(one.runs()).runs()
    assert {o: one.mask(o) for o in range(32) if o in one} == masks


def test_consumed_set_refuses_a_second_time():
    """Adding a group twice is our own fault and never passes unseen."""
    consumed = ConsumedSet([(0, 10, 15)])
    with pytest.raises(ValueError, match="before"):
        consumed.add(9, 15)
    with pytest.raises(ValueError, match="overlap"):
        ConsumedSet([(0, 10, 15), (9, 12, 15)])


def test_outbox_holds_consumption_back_until_it_is_durable():
    """Drops go out at once, a consumption only once a checkpoint covers its step."""
    outbox = Outbox()
    consumed, stale = finished(rollout(0, 0), "consumed", 4), finished(rollout(0, 1), "stale", 4)
    outbox.decide(consumed)
    outbox.decide(stale)
    assert outbox.report().finished == (stale,)
    outbox.durable_version = 4  # steps 0 to 3
    assert outbox.report().finished == (stale,)
    outbox.durable_version = 5
    assert outbox.report().finished == (consumed, stale)
    assert outbox.unreported().finished == (consumed,)


def test_outbox_keeps_what_was_decided_while_a_report_was_under_way():
    """Acknowledging a report settles what was in it and nothing else."""
    outbox = Outbox()
    first, second = finished(rollout(0, 0), "stale", 0), finished(rollout(0, 1), "stale", 0)
    outbox.decide(first)
    report = outbox.report()
    outbox.decide(second)
    outbox.measured(metrics(0))
    outbox.acknowledge(report)
    assert outbox.report().finished == (second,)
    assert outbox.report().steps == (metrics(0),)


def test_a_reply_overtaken_by_a_report_brings_nothing_twice():
    """A fetch answered before the report was, but delivered after it, still carries what the report settled."""
    buffer, outbox = make(groups_per_step=1)
    fill(buffer, 0)
    take(buffer)
    outbox.durable_version = 1
    outbox.acknowledge(outbox.report())
    fill(buffer, 0, step=1)
    assert not outbox.report()
    assert not buffer.drops


def test_a_consumed_rollout_that_is_offered_again_is_reported_again():
    """The coordinator has forgotten it: consumed once more, by that lease; another lease's is a duplicate as ever."""
    buffer, outbox = make(groups_per_step=1)
    fill(buffer, 0)
    take(buffer)
    outbox.durable_version = 1
    told = outbox.report()
    outbox.acknowledge(told)
    outbox.forget(outbox.settled())
    assert outbox.recent() == told.finished
    fill(buffer, 0, step=1)
    assert outbox.report() == told
    assert not buffer.drops
    restarted = Outbox(recent=told.finished, durable_version=1)
    assert restarted.again((told.finished[0].lease_id, told.finished[0].sample))
    assert restarted.report().finished == told.finished[:1]


def metrics(step):
    return StepMetrics(
        step=step,
        rollouts=8,
        groups=2,
        groups_without_spread=0,
        staleness=0,
        staleness_mean=0.0,
        reward_mean=0.5,
        loss=0.0,
        ratio_mean=1.0,
        clip_share=0.0,
        kl_sampler_learner=0.0,
        entropy=1.0,
        response_tokens_mean=3.0,
        gradient_norm=1.0,
        train_seconds=1.0,
        idle_seconds=0.0,
    )
