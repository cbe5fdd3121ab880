"""Which samples of which groups are still to be generated. Pure; used by `leases`.

A slot is one sample of one group, (ordinal, sample). Its states:

| state     | event                                              | next                                |
|-----------|----------------------------------------------------|-------------------------------------|
| fresh     | lease (fresh slots in order, oldest ordinal first) | leased                              |
| leased    | its lease's slice is accepted                      | filled                              |
| leased    | its lease expires, is rejected, or its node dies   | open                                |
| leased    | another (older) lease's slice is accepted          | filled: the first to arrive wins    |
| open      | lease (a reissue: before any fresh slot)           | leased                              |
| open      | a late slice is accepted                           | filled                              |
| filled    | another lease's slice arrives                      | filled: that arrival is a duplicate |
| filled    | its rollout is withdrawn                           | open                                |
| open      | ATTEMPTS_MAX leases of it came to nothing          | abandoned                           |
| any       | its group is closed                                | forgotten: arrivals are late        |
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ATTEMPTS_MAX = 32
"""Leases of one slot that end without an accepted rollout before it is given up: far more than bad luck, and a bound on
what one prompt that no engine can answer may cost."""


class SlotState(Enum):
    """See the table above."""

    FRESH = "fresh"
    LEASED = "leased"
    OPEN = "open"
    FILLED = "filled"
    ABANDONED = "abandoned"


@dataclass(slots=True)
class Slot:
    """One sample of one group. `lease_id` is the lease that holds or filled it."""

    state: SlotState = SlotState.FRESH
    lease_id: bytes | None = None
    attempts: int = 0
    failed_by: str | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """Samples first ... first + count - 1 of one group."""

    ordinal: int
    first: int
    count: int

    @property
    def samples(self) -> range:
        """The sample numbers."""
        return range(self.first, self.first + self.count)


class SlotTable:
    """The open groups of one kind. `choose` decides without changing anything; the rest record what became durable."""

    def __init__(self, group_size: int, ordinals: int | None = None) -> None:
        self.group_size = group_size
        self.ordinals = ordinals
        self.groups: dict[int, list[Slot]] = {}
        self.next_ordinal = 0
        self.next_sample = 0
        self.leased = 0
        """Slots of open groups that are out with a node."""
        self.open = 0
        """Slots of open groups that must be leased again."""
        self.abandoned = 0
        self._open_ordinals: dict[int, int] = {}

    @property
    def exhausted(self) -> bool:
        """True when no fresh slot is left."""
        return self.ordinals is not None and self.next_ordinal >= self.ordinals

    @property
    def fresh(self) -> int:
        """Fresh slots left in a table of so many ordinals; 0 in one without an end."""
        if self.ordinals is None:
            return 0
        return max(0, (self.ordinals - self.next_ordinal) * self.group_size - self.next_sample)

    def choose(self, *, samples_max: int, span_samples: int, spans_max: int, fresh_max: int, peer: str) -> list[Span]:
        """What to lease next: reissues, oldest first; then fresh slots; then reissues that `peer` itself failed."""
        spans: list[Span] = []
        left = samples_max
        for source in (self._open_runs(peer, failed=False), self._fresh_runs(fresh_max), self._open_runs(peer, True)):
            for run in source:
                first, stop = run.first, run.first + run.count
                while first < stop and left and len(spans) < spans_max:
                    count = min(stop - first, span_samples, left)
                    spans.append(Span(run.ordinal, first, count))
                    first += count
                    left -= count
                if not left or len(spans) >= spans_max:
                    return spans
        return spans

    def is_fresh(self, span: Span) -> bool:
        """True when the span has never been leased."""
        return (span.ordinal, span.first) >= (self.next_ordinal, self.next_sample)

    def lease(self, span: Span, lease_id: bytes) -> None:
        """The span is out under `lease_id`."""
        slots = self._group(span.ordinal)
        if slots is None:
            return
        for sample in span.samples:
            slot = slots[sample]
            self._move(span.ordinal, slot, SlotState.LEASED)
            slot.lease_id = lease_id
        end = (span.ordinal, span.first + span.count)
        if end > (self.next_ordinal, self.next_sample):
            self.next_ordinal, self.next_sample = end
            if self.next_sample == self.group_size:
                self.next_ordinal, self.next_sample = span.ordinal + 1, 0

    def release(self, span: Span, lease_id: bytes, peer: str, *, failed: bool) -> None:
        """The lease came to nothing: what it still holds is open again. `failed`: its content was refused."""
        for slot in self._slots(span):
            if slot.state is SlotState.LEASED and slot.lease_id == lease_id:
                slot.attempts += 1
                slot.failed_by = peer if failed else slot.failed_by
                gave_up = slot.attempts >= ATTEMPTS_MAX
                self._move(span.ordinal, slot, SlotState.ABANDONED if gave_up else SlotState.OPEN)

    def take_back(self, span: Span, lease_id: bytes) -> None:
        """The lease never went out: what it holds is open, and no attempt was made."""
        for slot in self._slots(span):
            if slot.state is SlotState.LEASED and slot.lease_id == lease_id:
                self._move(span.ordinal, slot, SlotState.OPEN)

    def fill(self, ordinal: int, sample: int, lease_id: bytes) -> None:
        """A rollout for this slot is durable."""
        for slot in self._slots(Span(ordinal, sample, 1)):
            self._move(ordinal, slot, SlotState.FILLED)
            slot.lease_id = lease_id

    def reopen(self, ordinal: int, sample: int, lease_id: bytes) -> None:
        """The rollout that filled the slot was withdrawn."""
        for slot in self._slots(Span(ordinal, sample, 1)):
            if slot.state is SlotState.FILLED and slot.lease_id == lease_id:
                self._move(ordinal, slot, SlotState.OPEN)

    def abandon(self, ordinal: int) -> None:
        """Give up a whole group that nothing can answer, so that nobody waits for it."""
        for slot in self._group(ordinal) or ():
            self._move(ordinal, slot, SlotState.ABANDONED)
        if ordinal == self.next_ordinal:
            self.next_ordinal, self.next_sample = ordinal + 1, 0

    def close(self, ordinal: int) -> None:
        """The group needs nothing more (trained, dropped, or unusable)."""
        for slot in self.groups.get(ordinal, ()):
            self._move(ordinal, slot, SlotState.FRESH)
        self.groups.pop(ordinal, None)
        if ordinal == self.next_ordinal:
            self.next_ordinal, self.next_sample = ordinal + 1, 0

    def is_closed(self, ordinal: int) -> bool:
        """True for a group that was begun and needs nothing more."""
        return ordinal < self.next_ordinal and ordinal not in self.groups

    def slot(self, ordinal: int, sample: int) -> Slot | None:
        """The slot, None when its group is closed or was never begun."""
        slots = self.groups.get(ordinal)
        return slots[sample] if slots is not None and sample < len(slots) else None

    def filled(self) -> int:
        """Filled slots of open groups."""
        return sum(slot.state is SlotState.FILLED for slots in self.groups.values() for slot in slots)

    def _open_runs(self, peer: str, failed: bool) -> Iterator[Span]:
        for ordinal in sorted(self._open_ordinals):
            first: int | None = None
            slots = self.groups[ordinal]
            for sample in range(self.group_size + 1):
                slot = slots[sample] if sample < self.group_size else None
                wanted = slot is not None and slot.state is SlotState.OPEN and (slot.failed_by == peer) is failed
                if wanted and first is None:
                    first = sample
                elif not wanted and first is not None:
                    yield Span(ordinal, first, sample - first)
                    first = None

    def _fresh_runs(self, fresh_max: int) -> Iterator[Span]:
        ordinal, first = self.next_ordinal, self.next_sample
        while fresh_max > 0 and (self.ordinals is None or ordinal < self.ordinals):
            count = min(self.group_size - first, fresh_max)
            yield Span(ordinal, first, count)
            fresh_max -= count
            ordinal, first = ordinal + 1, 0

    def _group(self, ordinal: int) -> list[Slot] | None:
        slots = self.groups.get(ordinal)
        if slots is None and ordinal >= self.next_ordinal:
            slots = self.groups[ordinal] = [Slot() for _ in range(self.group_size)]
        return slots

    def _slots(self, span: Span) -> Iterable[Slot]:
        slots = self.groups.get(span.ordinal)
        return slots[span.first : span.first + span.count] if slots is not None else ()

    def _move(self, ordinal: int, slot: Slot, state: SlotState) -> None:
        if slot.state is state:
            return
        self.leased += (state is SlotState.LEASED) - (slot.state is SlotState.LEASED)
        self.abandoned += (state is SlotState.ABANDONED) - (slot.state is SlotState.ABANDONED)
        opened = (state is SlotState.OPEN) - (slot.state is SlotState.OPEN)
        if opened:
            self.open += opened
            left = self._open_ordinals.get(ordinal, 0) + opened
            if left:
                self._open_ordinals[ordinal] = left
            else:
                del self._open_ordinals[ordinal]
        slot.state = state
