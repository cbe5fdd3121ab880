"""Rollouts in, receipts out. What is acknowledged is durable; what is resent is acknowledged again and counted once."""

from __future__ import annotations

import logging
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from echo2.p2p.errors import Refused
from echo2.p2p.log_lines import short, tell
from echo2.p2p.messages import ReceiptBatch, ReceiptsReply, SliceAck, SubmitReply

from . import records
from .gathering import Gathering
from .intake import ITEM_BYTES, Rejection, SliceRules, check_owner, check_slice
from .leases import LeaseEntry, LeaseState
from .node_states import DELIVERING
from .office import waits_for_the_operator
from .prompts import Unopened
from .records import RolloutEntry
from .run_book import ENDED
from .slots import Span

if TYPE_CHECKING:
    from collections.abc import Sequence

    from echo2.p2p.messages import Receipt, ReceiptsRequest, RolloutRecord, Slice, SubmitRequest

    from .leases import Kind, Outcome
    from .office import Office
    from .pool import NodeEntry
    from .run_book import Changes

log = logging.getLogger(__name__)

RECEIPTS_MAX = 512
"""As `ReceiptBatch` bounds it."""

RECEIPT_BYTES = 160
"""What a receipt takes beside its reason, rounded up."""

RECEIPTS_BYTES_MAX = 960 * 1024
"""Of one page, below its frame bound: a reason is an operator's text, up to four bytes a character."""

SUSPENDED_RETRY_SECONDS = 60.0


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    """One request. What is logged of it is logged in `context`: others are carried out in the same task."""

    node: NodeEntry
    request: SubmitRequest
    context: Context = field(default_factory=copy_context)


@dataclass(slots=True)
class _Delivery:
    """What one slice of a request does to its lease, once it is durable."""

    asked: _Asked
    lease: LeaseEntry
    accepted: list[int]
    rejection: Rejection | None
    tokens: int


class IntakeDesk:
    """Answers submissions and asks for receipts."""

    def __init__(self, office: Office) -> None:
        self._office = office
        self._gathering: Gathering[_Asked, SubmitReply] = Gathering(self._submit, office.clock)

    async def submit(self, peer: str, request: SubmitRequest) -> SubmitReply:
        """One acknowledgement a slice. Raises Refused, and then nothing of the request was kept."""
        office = self._office
        node = office.known_node(peer, request.run)
        await office.open_prompts(self._leased(request))
        refused = self._refusal(node)
        if refused is not None:
            raise refused
        return await self._gathering.ask(_Asked(node, request))

    def _refusal(self, node: NodeEntry) -> Refused | None:
        """Why nothing is taken from a node in its state."""
        if node.state == "suspended":
            return Refused("suspended", f"suspended: {node.state_reason}"[:512], SUSPENDED_RETRY_SECONDS)
        if node.state == "banned":
            return self._office.banned(node)
        return None if node.state in DELIVERING else waits_for_the_operator()

    def _submit(self, asked: Sequence[_Asked]) -> list[SubmitReply | Exception]:
        """What several nodes have handed in, as one change of the run. Raises Refused: then nothing was kept."""
        office = self._office
        changes = office.changes()
        deliveries: dict[bytes, _Delivery] = {}
        taken: set[tuple[str, int, int]] = set()
        told: list[list[SliceAck | None] | Refused] = []
        for each in asked:
            refused = self._refusal(each.node)  # its state may have changed since it asked
            if refused is not None:
                told.append(refused)
            else:
                told.append(each.context.run(self._receive_all, each, changes, deliveries, taken))
        if changes:
            peers = {each.node.peer for each in asked}
            actor = peers.pop() if len(peers) == 1 else "nodes"
            with office.ledger.transaction() as connection:
                changes.write(connection, wall=office.wall(), actor=actor, action="rollouts arrived")
            changes.apply()
            self._apply(deliveries)
        summary = _summaries(changes)
        return [
            acks
            if isinstance(acks, Refused)
            else SubmitReply(
                acks=tuple(ack or summary[part.lease_id] for ack, part in zip(acks, each.request.slices, strict=True))
            )
            for acks, each in zip(told, asked, strict=True)
        ]

    def _leased(self, request: SubmitRequest) -> list[tuple[Kind, int]]:
        """Whose prompts the checks need. A lease that memory let go of is not checked: it comes late."""
        known = self._office.run.leases.leases
        found = [known[received.lease_id] for received in request.slices if received.lease_id in known]
        return [(lease.kind, lease.span.ordinal) for lease in found]

    async def receipts(self, peer: str, request: ReceiptsRequest) -> ReceiptsReply:
        """The node's receipts behind those it has, signed. Raises Refused."""
        office = self._office
        office.known_node(peer, request.run)
        with office.ledger.reading() as connection:
            found = records.receipts_after(connection, request.run, peer, request.after_sequence, RECEIPTS_MAX + 1)
        page: list[Receipt] = []
        left = RECEIPTS_BYTES_MAX
        for receipt in found[:RECEIPTS_MAX]:
            left -= len(receipt.reason.encode()) + RECEIPT_BYTES
            if left < 0:
                break
            page.append(receipt)
        batch = ReceiptBatch(run=request.run, peer=peer, receipts=tuple(page))
        return ReceiptsReply(batch=office.identity.sign("receipts", batch), more=len(found) > len(page))

    def _receive_all(
        self,
        asked: _Asked,
        changes: Changes,
        deliveries: dict[bytes, _Delivery],
        taken: set[tuple[str, int, int]],
    ) -> list[SliceAck | None]:
        return [self._receive(asked, part, changes, deliveries, taken) for part in asked.request.slices]

    def _receive(
        self,
        asked: _Asked,
        received: Slice,
        changes: Changes,
        deliveries: dict[bytes, _Delivery],
        taken: set[tuple[str, int, int]],
    ) -> SliceAck | None:
        """Decide about one slice. An acknowledgement at once when nothing is recorded for it; else None."""
        run, node = self._office.run, asked.node
        lease = run.leases.leases.get(received.lease_id) or self._forgotten(received.lease_id)
        rejection = check_owner(lease.peer if lease is not None else None, node.peer)
        if lease is None or rejection is not None:
            node.last_reason = str(rejection)
            told = f"{node.name} brings a lease that is not its own: {rejection}"
            tell(log, logging.INFO, "leases_refused", "%s", told, peer=node.peer, leases=[short(received.lease_id)])
            self._office.tally.refused["rejected: lease"] += len(received.rollouts)
            return SliceAck(lease_id=received.lease_id, state="rejected", reason=str(rejection)[:512])
        if lease.state is LeaseState.RETURNED:
            return self._again(received.lease_id)
        if received.lease_id in deliveries:  # twice in one request, or sent again before the first was answered
            return None
        outcomes = self._judge(lease, taken)
        accepted = [sample for sample, outcome in outcomes.items() if outcome == "accept"]
        in_time, unaffordable = self._office.payroll.in_time(lease.lease_id), ""
        if accepted and not in_time:
            unaffordable = self._unaffordable(changes, lease, len(accepted))
            if unaffordable:
                outcomes, accepted = dict.fromkeys(outcomes, "late"), []
        if accepted:
            rejection = check_slice(received, self._rules(lease))
        elif in_time:
            in_time = self._is_whole(received, lease)
        tokens = sum(len(rollout.tokens) // ITEM_BYTES for rollout in received.rollouts)
        deliveries[received.lease_id] = _Delivery(asked, lease, [] if rejection else accepted, rejection, tokens)
        contents = {rollout.sample: rollout for rollout in received.rollouts} if not rejection else {}
        for sample, outcome in outcomes.items():
            late = unaffordable or (self._late(lease) if outcome == "late" else "")
            self._arrive(changes, lease, sample, outcome, contents.get(sample), rejection, late, in_time=in_time)
            if outcome == "accept" and not rejection:
                taken.add((lease.kind, lease.span.ordinal, sample))
        return None

    def _judge(self, lease: LeaseEntry, taken: set[tuple[str, int, int]]) -> dict[int, Outcome]:
        run = self._office.run
        if run.state in ENDED:
            return dict.fromkeys(lease.span.samples, "late")
        outcomes = run.leases.judge(lease)
        for sample, outcome in outcomes.items():
            if outcome == "accept" and (lease.kind, lease.span.ordinal, sample) in taken:
                outcomes[sample] = "duplicate"
        return outcomes

    def _arrive(
        self,
        changes: Changes,
        lease: LeaseEntry,
        sample: int,
        outcome: Outcome,
        content: RolloutRecord | None,
        rejection: Rejection | None,
        late: str,
        *,
        in_time: bool,
    ) -> None:
        entry = RolloutEntry(
            id=0,
            lease_id=lease.lease_id,
            sample=sample,
            peer=lease.peer,
            kind=lease.kind,
            ordinal=lease.span.ordinal,
            version=lease.version,
            state="held",
            reason="",
            finish=content.finish if content else "length",
            tokens=content.tokens if content else b"",
            logprobs=content.logprobs if content else b"",
            spans=content.spans if content else (),
            claimed_reward=content.reward if content else None,
            account=lease.account,
            in_time=in_time,
        )
        if outcome == "duplicate":
            changes.arrive(entry, "duplicate", "another lease's slice for this sample came first")
        elif outcome == "late":
            changes.arrive(entry, "stale", late)
        elif rejection is not None:
            changes.arrive(entry, "rejected", str(rejection)[:512])
        else:
            changes.arrive(entry, "held")

    def _unaffordable(self, changes: Changes, lease: LeaseEntry, samples: int) -> str:
        """Why the budget cannot pay for a wanted slice whose lease's time is over; empty when it can."""
        office = self._office
        if lease.account is None:
            return ""
        with office.ledger.reading() as connection:
            office.payroll.revive(connection, lease.account, office.clock(), office.wall())
        refused = changes.pay.refusal(lease.account, samples, office.config.run.lease_seconds)
        return f"late, and {refused}"[:512] if refused else ""

    def _is_whole(self, received: Slice, lease: LeaseEntry) -> bool:
        """Whether a slice that nobody wants any more, and that is paid as it came in time, is what was ordered."""
        try:
            return check_slice(received, self._rules(lease)) is None
        except (
            Unopened
        ):  # its lease was let go of with its group: the prompt is not at hand, nor worth a game's opening
            return True

    def _late(self, lease: LeaseEntry) -> str:
        run = self._office.run
        if run.state in ENDED:
            return f"late: the run is {run.state}"
        if lease.manifest_hash in run.leases.lost:
            return f"late: the learner has lost version {lease.version}"
        if lease.kind == "train" and lease.version < run.leases.learner_version - self._office.config.run.S:
            return f"late: version {lease.version} when the learner was at {run.leases.learner_version}"
        return "late: nothing more of its group is wanted"

    def _apply(self, deliveries: dict[bytes, _Delivery]) -> None:
        """The slices are durable: slots, rates and bells follow."""
        office, now = self._office, self._office.clock()
        book = office.run.leases
        returned: dict[_Asked, list[str]] = {}
        for delivery in deliveries.values():
            node = delivery.asked.node
            self._prove(node, delivery, now)
            short_id = short(delivery.lease.lease_id)
            if delivery.rejection is not None:
                book.reject(delivery.lease)
                office.measures.leases_ended["rejected"] += 1
                told = f"a lease of {node.name} was rejected: {delivery.rejection}"
                delivery.asked.context.run(
                    tell, log, logging.INFO, "leases_rejected", "%s", told, peer=node.peer, leases=[short_id]
                )
                node.last_reason = str(delivery.rejection)
                node.slice_rejected(now)
                continue
            if delivery.accepted:
                node.slice_accepted()
            if delivery.accepted and office.pool.has(node) and delivery.lease.granted_at >= node.placed_at:
                node.meter.accept(len(delivery.accepted), now)
            book.deliver(delivery.lease, delivery.accepted)
            returned.setdefault(delivery.asked, []).append(short_id)
        for asked, leases in returned.items():
            office.measures.leases_ended["returned"] += len(leases)
            told = f"{len(leases)} leases of {asked.node.name} came back"
            asked.context.run(
                tell, log, logging.INFO, "leases_returned", "%s", told, peer=asked.node.peer, leases=leases
            )
        for peer in {delivery.asked.node.peer for delivery in deliveries.values()}:
            office.note_holding(peer)
        office.arrivals.ring()
        office.work.ring()

    def _prove(self, node: NodeEntry, delivery: _Delivery, now: float) -> None:
        """Its probation, and how reliable it is, before the lease's state changes."""
        lease, in_time = delivery.lease, delivery.lease.state is LeaseState.OUT
        node.window.note_returned(lease.lease_id, in_time=in_time)
        if node.state == "probation":
            node.probation = node.probation.came_back(
                lease.lease_id,
                samples=lease.span.count,
                tokens=delivery.tokens,
                in_time=in_time,
                valid=delivery.rejection is None,
                now=now,
            )
            node.unrecorded = True

    def _rules(self, lease: LeaseEntry) -> SliceRules:
        prompts = self._office.prompts
        card = prompts.text.card
        return SliceRules(
            samples=lease.span.samples,
            manifest_hash=lease.manifest_hash,
            prompt_tokens=len(prompts.tokens(lease.kind, lease.span.ordinal)) // ITEM_BYTES,
            tokens_max=lease.tokens_max,
            stop_ids=card.stop_ids,
            vocabulary_size=card.vocabulary_size,
            context_tokens=card.context_tokens,
            episode=prompts.episode_rules(lease.tokens_max, self._office.config.run.turn_tokens_max),
        )

    def _forgotten(self, lease_id: bytes) -> LeaseEntry | None:
        """A lease that memory let go of, because its group is closed."""
        office = self._office
        with office.ledger.reading() as connection:
            row = records.find_lease(connection, office.run.name, lease_id)
            if row is None:
                return None
            returned = bool(records.states_of_lease(connection, office.run.name, lease_id))
        return LeaseEntry(
            lease_id=lease_id,
            peer=row.peer,
            kind=row.kind,
            span=Span(row.ordinal, row.sample_first, row.sample_count),
            version=row.version,
            manifest_hash=row.manifest_hash,
            tokens_max=row.tokens_max,
            granted_at=0.0,
            expires_at=0.0,
            state=LeaseState.RETURNED if returned else LeaseState.EXPIRED,
            account=row.account,
        )

    def _again(self, lease_id: bytes) -> SliceAck:
        """The slice came before: what it became."""
        office = self._office
        with office.ledger.reading() as connection:
            states = records.states_of_lease(connection, office.run.name, lease_id)
        return _ack(lease_id, states)


def _summaries(changes: Changes) -> dict[bytes, SliceAck]:
    states: dict[bytes, list[tuple[str, str]]] = {}
    for verdict in changes.arrivals:
        states.setdefault(verdict.entry.lease_id, []).append((verdict.state, verdict.reason))
    return {lease_id: _ack(lease_id, found) for lease_id, found in states.items()}


def _ack(lease_id: bytes, states: list[tuple[str, str]]) -> SliceAck:
    """One line for a slice: the state most of its rollouts are in, held before any other; and what the rest became."""
    names = [state for state, _ in states]
    state = "held" if "held" in names else max(set(names), key=names.count)
    others = {name: names.count(name) for name in names if name != state}
    reasons = [reason for _, reason in states if reason]
    reason = reasons[0] if reasons else ""
    if others:
        counted = ", ".join(f"{count} {name}" for name, count in sorted(others.items()))
        reason = f"{counted} of {len(names)}: {reason}" if reason else f"{counted} of {len(names)}"
    return SliceAck(lease_id=lease_id, state=state, reason=reason[:512])
