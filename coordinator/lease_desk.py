"""Leases: what a node with room is given. `leases.LeaseBook` decides; here it is made durable, then sent."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

from echo2.p2p.codec import pack_tokens
from echo2.p2p.log_lines import shorts, tell
from echo2.p2p.messages import SLICES_MAX, Lease, LeaseReply, Sampling, Sandboxed

from . import capacity
from .admission import train_sampling
from .leases import LeaseEntry, Proposal
from .office import WAIT_SECONDS_MAX
from .prompts import Unopened
from .records import closed_groups, new_leases, record
from .run_book import ENDED

if TYPE_CHECKING:
    from echo2.p2p.messages import LeaseRequest

    from .leases import Kind
    from .node_states import NodeState
    from .office import Office
    from .pool import NodeEntry

log = logging.getLogger(__name__)

LEASE_ID_BYTES = 16

RETRY_SECONDS = 1.0
"""When a node that could not wait should ask again."""

REPLY_PROMPT_BYTES_MAX = 6 << 20
"""Prompt bytes in one reply, below its frame bound."""

OPENED_AHEAD = 32
"""Episodes whose openings are fetched at once, in order of their ordinals: a fraction of a second of the worker."""

NO_LEASES: dict[NodeState, str] = {
    "applied": "applied: the operator has yet to admit this node",
    "standby": "standing by: the pool makes enough without this node; it is called when it does not",
    "draining": "draining: {}",
    "suspended": "suspended: {}",
    "banned": "banned: {}",
    "left": "left: {}",
}
"""Why a node of these states is given none; {} is the reason of the state."""

UNUSABLE_MAX = 1000
"""Prompts in a row that do not fit the context before a request gives up: the task and the model do not match."""


class LeaseDesk:
    """Answers lease requests and lets leases expire."""

    def __init__(self, office: Office) -> None:
        self._office = office
        self._sandbox = _sandboxed(office)

    async def lease(self, peer: str, request: LeaseRequest) -> LeaseReply:
        """Up to `samples_max` samples, waiting up to `wait_seconds` for work. Raises Refused."""
        office = self._office
        node = office.known_node(peer, request.run)
        deadline = office.clock() + min(request.wait_seconds, WAIT_SECONDS_MAX)
        while True:
            now = office.clock()
            try:
                leases, reason, retry_at = self._grant(node, request, now)
            except Unopened as error:  # nothing was granted yet; those behind it come next
                await office.open_prompts((error.kind, error.ordinal + ahead) for ahead in range(OPENED_AHEAD))
                continue
            if leases or now >= deadline:
                known = 0.0 if math.isinf(retry_at) else retry_at - now
                retry = 0.0 if leases else max(RETRY_SECONDS, known)
                node.last_reason = "" if leases else node.last_reason
                return LeaseReply(leases=leases, retry_seconds=retry, reason=reason[:512])
            await office.work.wait(min(deadline, retry_at, self._next_expiry(now)) - now)
            node.seen_at = office.clock()

    def expire(self) -> None:
        """Give back what is overdue, and what dead nodes hold."""
        office, now = self._office, self._office.clock()
        gone = office.run.leases.expire(now)
        for lease in gone:  # one that ended early did so for our reasons: its version is too old, or lost
            office.note_ended([lease], "expired", "late" if lease.expires_at <= now else "none")
        for node in office.pool.nodes.values():
            if node.seen_at is not None and node.health(now, office.config.heartbeat_seconds) == "dead":
                released = office.run.leases.release_peer(node.peer)
                office.note_ended(released, "released: its node is dead", "gone")
                gone += released
        for lease in gone:
            office.note_holding(lease.peer)
            found = office.pool.nodes.get(lease.peer)
            if found is not None:
                found.last_reason = f"a lease of version {lease.version} expired"
        if gone:
            office.work.ring()
        office.record_ended()

    def _next_expiry(self, now: float) -> float:
        """When leases next expire; never so soon that the loop would spin."""
        at = self._office.run.leases.next_expiry()
        return float("inf") if at is None else max(at, now + 0.01)

    def _grant(self, node: NodeEntry, request: LeaseRequest, now: float) -> tuple[tuple[Lease, ...], str, float]:
        """Leases made durable for this node now; or none, why, and when to look again at the latest."""
        office = self._office
        run = office.run
        published = run.manifests.get(request.manifest_hash)
        if node.state in NO_LEASES:
            return (), NO_LEASES[node.state].format(node.state_reason), float("inf")
        if run.state in ENDED:
            return (), f"the run is {run.state}", float("inf")
        if run.state == "paused":
            return (), f"the run is paused: {run.reason}", float("inf")
        if run.current is None:
            return (), "no snapshot published yet", float("inf")
        if published is None:
            return (), "the snapshot you have is not of this run; wait for the heartbeat's news", float("inf")
        if run.learner_refused:
            return (), run.learner_refused, float("inf")
        if request.manifest_hash in run.leases.lost:
            return (), f"the learner has lost version {published.manifest.version}; wait for its next", float("inf")
        if now < node.rest_until:
            return (), f"resting {node.rest_until - now:.0f} s: {node.last_reason}", node.rest_until
        self.expire()
        holding = run.leases.held_by(node.peer)
        held_samples = sum(lease.span.count for lease in holding)
        allowed = self._samples_allowed(node, now)
        samples = min(request.samples_max, allowed - held_samples)
        if samples <= 0:
            return (), f"{held_samples} samples are out with you; {allowed} are half a step's work", float("inf")
        account = office.payroll.by_peer.get(node.peer)
        affordable = office.payroll.samples_max(account)
        samples = samples if affordable is None else min(samples, max(affordable, 1))
        proposal = self._propose(node, published.manifest.version, samples)
        if not proposal.spans:
            return (), proposal.reason, float("inf")
        wanted = sum(span.count for span in proposal.spans)
        refused = office.payroll.refusal(account, wanted, office.config.run.lease_seconds)
        if refused:
            return (), refused, float("inf")
        leases = self._record(node, proposal, published.manifest.version, request.manifest_hash, now)
        return leases, "", now

    def _samples_allowed(self, node: NodeEntry, now: float) -> int:
        """L = samples / mu_i <= 0.5 T_train, over all that the node holds; in probation never more than a group."""
        unmeasured = self._office.config.run.n
        allowed = capacity.lease_samples_max(
            mu=node.meter.rate(now), t_train=self._office.t_train(), samples_unmeasured=unmeasured
        )
        return min(allowed, unmeasured) if node.state == "probation" else allowed

    def _propose(self, node: NodeEntry, version: int, samples: int) -> Proposal:
        """What to lease, with prompts that fit the model's context; those that do not are given up, on record."""
        office = self._office
        run = office.run
        assert run.version is not None, "a snapshot is published"
        depth = office.pacing_depth()
        nodes = len(office.pool.counted(office.clock()))
        for _ in range(UNUSABLE_MAX):
            proposal = run.leases.propose(
                peer=node.peer, version=version, newest=run.version, samples_max=samples, depth=depth, nodes=nodes
            )
            fits = [self._tokens_max(proposal.kind, span.ordinal) >= 1 for span in proposal.spans]
            if all(fits):
                return proposal
            first = fits.index(False)
            if first:  # those before it can go out; it is met again at the front
                return Proposal(proposal.kind, proposal.spans[:first])
            self._give_up(proposal.kind, proposal.spans[0].ordinal, version)
        return proposal

    def _tokens_max(self, kind: Kind, ordinal: int) -> int:
        """Longest response to this prompt: a context that overflows is never valid, so it is never ordered."""
        return self._office.prompts.tokens_max(kind, ordinal, self._office.config.run.tokens_max)

    def _give_up(self, kind: Kind, ordinal: int, version: int) -> None:
        office, book = self._office, self._office.run.leases
        reason = "the prompt fills the model's context"
        with office.ledger.transaction() as connection:
            record(
                connection,
                [closed_groups(office.run.name, {ordinal: reason})] if kind == "train" else (),
                wall=office.wall(),
                actor="coordinator",
                action="prompt left out",
                subject=f"{kind} {ordinal}",
                reason=reason,
            )
        if kind == "train":
            book.close_group(ordinal)
        else:
            evaluation = book.evaluation_of(version)
            if evaluation is not None:
                evaluation.table.abandon(ordinal)

    def _record(
        self, node: NodeEntry, proposal: Proposal, version: int, manifest_hash: bytes, now: float
    ) -> tuple[Lease, ...]:
        office = self._office
        run, duration = office.run, office.config.run.lease_seconds
        entries: list[LeaseEntry] = []
        prompt_bytes = 0
        for span in proposal.spans[:SLICES_MAX]:
            prompt_bytes += len(office.prompts.tokens(proposal.kind, span.ordinal))
            if entries and prompt_bytes > REPLY_PROMPT_BYTES_MAX:
                break
            entries.append(
                LeaseEntry(
                    lease_id=office.entropy(LEASE_ID_BYTES),
                    peer=node.peer,
                    kind=proposal.kind,
                    span=span,
                    version=version,
                    manifest_hash=manifest_hash,
                    tokens_max=self._tokens_max(proposal.kind, span.ordinal),
                    granted_at=now,
                    expires_at=now + duration,
                    account=office.payroll.by_peer.get(node.peer),
                )
            )
        with office.ledger.transaction() as connection:
            record(
                connection,
                [new_leases(run.name, entries, duration_seconds=duration, wall=office.wall())],
                wall=office.wall(),
                actor=node.peer,
                action="leases granted",
                subject=run.name,
                kind="flow",
            )
        run.leases.grant(entries)
        office.measures.leases_granted[proposal.kind] += len(entries)
        granted = shorts(entry.lease_id for entry in entries)
        told = f"{len(entries)} leases of version {version} for {node.name}"
        tell(log, logging.INFO, "leases_granted", "%s", told, peer=node.peer, leases=granted)
        office.payroll.grant(entries, duration)
        if node.state == "probation":
            ids = [entry.lease_id for entry in entries]
            node.probation = node.probation.granted(ids, now, office.config.admission.warmup)
        office.note_holding(node.peer)
        return tuple(self._order(entry, duration) for entry in entries)

    def _order(self, entry: LeaseEntry, duration: float) -> Lease:
        prompts, span = self._office.prompts, entry.span
        return Lease(
            lease_id=entry.lease_id,
            kind=entry.kind,
            ordinal=span.ordinal,
            sample_first=span.first,
            sample_count=span.count,
            seed=prompts.seed(entry.kind, span.ordinal),
            manifest_hash=entry.manifest_hash,
            version=entry.version,
            prompt_tokens=prompts.tokens(entry.kind, span.ordinal),
            sampling=self._sampling(entry),
            duration_seconds=duration,
            sandbox=self._sandbox,
        )

    def _sampling(self, entry: LeaseEntry) -> Sampling:
        """As the run says; an evaluation is drawn at temperature 1, unfiltered, so that runs can be compared."""
        sampling = train_sampling(self._office)
        if entry.kind == "eval":
            return Sampling(temperature=1.0, tokens_max=entry.tokens_max, stop_ids=sampling.stop_ids)
        if entry.tokens_max == sampling.tokens_max:
            return sampling
        return sampling.model_copy(update={"tokens_max": entry.tokens_max})


def _sandboxed(office: Office) -> Sandboxed | None:
    """What a lease says of turns; None for a task of one."""
    prompts, run = office.prompts, office.config.run
    rules = prompts.episode_rules(run.tokens_max, run.turn_tokens_max)
    if rules is None:
        return None
    return Sandboxed(
        task=prompts.spec.name,
        options_json=prompts.spec.options_json,
        turns_max=rules.turns_max,
        turn_tokens_max=rules.turn_tokens_max,
        turn_prefix_tokens=pack_tokens(rules.turn_prefix),
        turn_suffix_tokens=pack_tokens(rules.turn_suffix),
    )
