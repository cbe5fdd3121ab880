"""Any order of grants, slices, losses, refusals, steps, drops and restarts: the promises of `leases` hold."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from echo2.coordinator.leases import LeaseBook, LeaseEntry, LeaseRules, LeaseState
from echo2.coordinator.slots import ATTEMPTS_MAX

LEASE_SECONDS = 10.0
PEERS = ("a", "b", "c")


class LeaseMachine(RuleBasedStateMachine):
    """A coordinator's book, a ledger that remembers, a learner that trains on whole groups, and three nodes."""

    @initialize(
        group_size=st.integers(1, 4),
        groups=st.integers(1, 3),
        staleness=st.integers(0, 3),
        slice_samples=st.integers(1, 4),
        data=st.data(),
    )
    def begin(self, group_size, groups, staleness, slice_samples, data):
        self.n, self.R, self.S = group_size, group_size * groups, staleness
        self.kappa = data.draw(st.integers(1, staleness + 1))
        self.rules = LeaseRules(group_size, self.R, steps=6, staleness_max=staleness, slice_samples=slice_samples)
        self.book = LeaseBook(self.rules)
        self.now = 0.0
        self.published = 0
        self.version = 0
        self.granted: list[LeaseEntry] = []
        self.state: dict[tuple[bytes, int], str] = {}  # as the ledger has it: queued, consumed, stale, ...
        self.delivered: set[bytes] = set()
        self.closed: set[int] = set()

    # what the world does

    @rule(peer=st.sampled_from(PEERS), behind=st.booleans(), samples=st.integers(1, 12), shallow=st.booleans())
    def ask(self, peer, behind, samples, shallow):
        version = max(0, self.published - self.kappa) if behind else self.published
        depth = max(self.S - shallow, self.kappa - 1)
        before = self.book.reserved
        proposal = self.book.propose(
            peer=peer, version=version, newest=self.published, samples_max=samples, depth=depth
        )
        assert proposal.spans or proposal.reason
        leases = []
        for span in proposal.spans:
            lease_id = (len(self.granted) + 1).to_bytes(16)
            lease = LeaseEntry(lease_id, peer, "train", span, version, b"m", 8, self.now, self.now + LEASE_SECONDS)
            self.granted.append(lease)
            leases.append(lease)
        self.book.grant(leases)
        assert sum(lease.span.count for lease in leases) <= samples
        if self.book.reserved > before:
            assert self.book.reserved <= self.book.reserved_max(version, depth), "pacing's bound was exceeded"

    @precondition(lambda self: self.granted)
    @rule(data=st.data())
    def deliver(self, data):
        """Any slice that has not come yet, late ones too."""
        waiting = [lease for lease in self.granted if lease.lease_id not in self.delivered]
        if waiting:
            self._deliver(data.draw(st.sampled_from(waiting)))

    @precondition(lambda self: self.granted)
    @rule(data=st.data())
    def refuse(self, data):
        """A slice whose content is bad."""
        out = [lease for lease in self.book.leases.values() if lease.state is LeaseState.OUT]
        if out:
            lease = data.draw(st.sampled_from(out))
            self.delivered.add(lease.lease_id)
            self.state |= {(lease.lease_id, sample): "rejected" for sample in lease.span.samples}
            self.book.reject(lease)

    @rule(seconds=st.sampled_from([1.0, LEASE_SECONDS]))
    def wait(self, seconds):
        self.now += seconds
        self.book.expire(self.now)

    @rule(peer=st.sampled_from(PEERS))
    def lose(self, peer):
        self.book.release_peer(peer)

    @rule()
    def train(self):
        """A step, if there are enough whole groups that are fresh enough."""
        self._train()

    @rule(data=st.data())
    def withdraw(self, data):
        queued = [key for key, state in self.state.items() if state == "queued"]
        if queued:
            self._finish(data.draw(st.sampled_from(queued)), "withdrawn")

    @rule()
    def restart(self):
        """kill -9: the book is rebuilt from what the ledger has."""
        rebuilt = LeaseBook(self.rules)
        rebuilt.learner_version = self.version
        entries = []
        for lease in self.granted:
            if lease.span.ordinal in self.closed:
                continue
            copy = LeaseEntry(
                lease.lease_id, lease.peer, "train", lease.span, lease.version, b"m", 8, self.now, self.now + 10.0
            )
            live = {
                s: self.state[lease.lease_id, s] == "queued"
                for s in lease.span.samples
                if lease.lease_id in self.delivered
            }
            entries.append((copy, live if lease.lease_id in self.delivered else None))
        ends = [(lease.span.ordinal, lease.span.first + lease.span.count) for lease in self.granted]
        rebuilt.restore(entries, sorted(self.closed), max(ends, default=(0, 0)))
        rebuilt.queued = self._count("queued")
        rebuilt.consumed = self._count("consumed")
        assert rebuilt.reserved == self.book.reserved
        assert (rebuilt.train.next_ordinal, rebuilt.train.next_sample) == (
            self.book.train.next_ordinal,
            self.book.train.next_sample,
        )
        copies = {copy.lease_id: copy for copy, _ in entries}
        self.granted = [copies.get(lease.lease_id, lease) for lease in self.granted]
        self.book = rebuilt

    # what must hold

    @invariant()
    def counts_agree(self):
        if not hasattr(self, "book"):
            return
        assert self.book.queued == self._count("queued")
        assert self.book.consumed == self._count("consumed")
        slots = [slot for group in self.book.train.groups.values() for slot in group]
        for name, count in (("leased", self.book.train.leased), ("open", self.book.train.open)):
            assert count == sum(slot.state.value == name for slot in slots)
        assert self.book.reserved <= min(self.published + self.S + 1, 6) * self.R

    @invariant()
    def no_slot_is_filled_twice(self):
        if not hasattr(self, "book"):
            return
        filled = [self._slot(key) for key, state in self.state.items() if state in {"queued", "consumed"}]
        assert len(filled) == len(set(filled))

    def teardown(self):
        """As long as nodes answer and the learner steps, the run comes to its end: no deadlock."""
        if not hasattr(self, "book"):
            return
        if any(slot.attempts > ATTEMPTS_MAX // 2 for group in self.book.train.groups.values() for slot in group):
            return  # given up slots are for the learner's bound on partial groups
        for _ in range(200):
            if self.version == self.rules.steps:
                return
            self.now += LEASE_SECONDS
            self.book.expire(self.now)
            for peer in PEERS:
                self.ask(peer, behind=False, samples=12, shallow=True)
            for lease in list(self.book.leases.values()):
                if lease.state is LeaseState.OUT:
                    self._deliver(lease)
            self._train()
        raise AssertionError(f"stuck at version {self.version} of {self.rules.steps}")

    def _deliver(self, lease):
        self.delivered.add(lease.lease_id)
        outcomes = self.book.judge(lease)
        accepted = [sample for sample, outcome in outcomes.items() if outcome == "accept"]
        self.state |= {
            (lease.lease_id, sample): "queued" if outcome == "accept" else outcome
            for sample, outcome in outcomes.items()
        }
        self.book.deliver(lease, accepted)

    def _train(self):
        if self.version == self.rules.steps:
            return
        versions = {lease.lease_id: lease.version for lease in self.granted}
        for key in [key for key, state in self.state.items() if state == "queued"]:
            if self.version - versions[key[0]] > self.S:
                self._finish(key, "stale")
        groups: dict[int, list[tuple[bytes, int]]] = {}
        for key, state in self.state.items():
            if state == "queued":
                groups.setdefault(self._slot(key)[0], []).append(key)
        whole = sorted(ordinal for ordinal, keys in groups.items() if len(keys) == self.n)
        if len(whole) * self.n < self.R:
            return
        for ordinal in whole[: self.R // self.n]:
            for key in groups[ordinal]:
                assert self.version - versions[key[0]] <= self.S
                self._finish(key, "consumed")
        self.version += 1
        self.book.learner_at(self.version)
        if self.version % self.kappa == 0 or self.version == self.rules.steps:
            self.published = self.version

    def _finish(self, key, state):
        lease_id, sample = key
        lease = next(lease for lease in self.granted if lease.lease_id == lease_id)
        again = self.book.wanted_again(state=state, version=lease.version, step=self.version)
        self.state[key] = state
        if not again:
            self.closed.add(lease.span.ordinal)
        self.book.finish(
            ordinal=lease.span.ordinal, sample=sample, lease_id=lease_id, consumed=state == "consumed", reopen=again
        )

    def _slot(self, key):
        lease = self.granted[int.from_bytes(key[0]) - 1]
        return lease.span.ordinal, key[1]

    def _count(self, state):
        return sum(found == state for found in self.state.values())


LeaseMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLeases = LeaseMachine.TestCase
