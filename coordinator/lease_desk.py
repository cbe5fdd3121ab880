"""Leases: what a node with room is given. `leases.LeaseBook` decides; here it is made durable, then sent."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from echo2.p2p.codec import pack_tokens
from echo2.p2p.log_lines import shorts, tell
from echo2.p2p.messages import SLICES_MAX, Lease, LeaseReply, Sampling, Sandboxed

from . import capacity
from .admission import train_sampling
from .lease_queue import Asker, LeaseQueue
from .leases import LeaseEntry, Proposal
from .office import WAIT_SECONDS_MAX
from .prompts import Unopened
from .records import closed_groups, new_leases, record
from .run_book import ENDED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from echo2.p2p.messages import LeaseRequest

    from .leases import Kind
    from .node_states import NodeState
    from .office import Office
    from .pool import NodeEntry
    from .run_book import Published

log = logging.getLogger(__name__)

LEASE_ID_BYTES = 16

RETRY_SECONDS = 1.0
"""When a node that could not wait should ask again."""

REPLY_PROMPT_BYTES_MAX = 6 << 20
"""Prompt bytes in one reply, below its frame bound."""

OPENED_AHEAD = 32
"""Episodes whose openings are fetched at once, in order of their ordinals: a fraction of a second of the worker."""

GRANTS_MAX = 64
"""Nodes served in one deal: its time is nobody else's."""

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


@dataclass(slots=True)
class _Look:
    """What holds for everybody while one deal lasts. `dry`: versions under which there is nothing, and why."""

    depth: int
    nodes: int
    now: float
    dry: dict[int, str] = field(default_factory=dict)


class LeaseDesk:
    """Answers lease requests and lets leases expire."""

    def __init__(self, office: Office) -> None:
        self._office = office
        self._sandbox = _sandboxed(office)
        self._queue = LeaseQueue(office.work, office.clock, self._deal, lambda: office.run.leases.next_expiry())

    async def lease(self, peer: str, request: LeaseRequest) -> LeaseReply:
        """Up to `samples_max` samples, waiting up to `wait_seconds` for work. Raises Refused."""
        office = self._office
        node = office.placed_node(peer, request.run)
        asker = Asker(node, request, office.clock() + min(request.wait_seconds, WAIT_SECONDS_MAX))
        self._queue.join(asker)
        try:
            while not asker.leases:
                if asker.unopened is not None:  # nothing was granted yet; those behind it come next
                    kind, ordinal = asker.unopened.kind, asker.unopened.ordinal
                    await office.open_prompts((kind, ordinal + ahead) for ahead in range(OPENED_AHEAD))
                    asker.fetched()
                    self._queue.deal()
                    continue
                left = asker.deadline - office.clock()
                if left <= 0 and asker.reason is not None and not asker.served:
                    break
                await asker.wait(left)
                node.seen_at = office.clock()
        finally:
            self._queue.leave(asker)
        now = office.clock()
        known = 0.0 if math.isinf(asker.retry_at) else asker.retry_at - now
        retry = 0.0 if asker.leases else max(RETRY_SECONDS, known)
        node.last_reason = "" if asker.leases else node.last_reason
        return LeaseReply(leases=asker.leases, retry_seconds=retry, reason=(asker.reason or "")[:512])

    async def run(self) -> None:
        """Deal whenever there may be something to lease. For ever."""
        await self._queue.run()

    def retire(self) -> None:
        """Another desk has taken over: whoever waits at this one asks again."""
        self._queue.retire()

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

    def _deal(self, askers: Sequence[Asker]) -> bool:
        """Give those who wait what there is, in the order they came: one commit for all of it.

        Whether it stopped before all of them were looked at.
        """
        office, duration = self._office, self._office.config.run.lease_seconds
        now = office.clock()
        self.expire()
        look = _Look(office.pacing_depth(), len(office.pool.counted(now)), now)
        grants: list[tuple[Asker, list[LeaseEntry]]] = []
        for asker in askers:
            if len(grants) >= GRANTS_MAX:
                break
            try:
                entries = self._decide(asker, look)
                if not entries and self._is_behind(asker):
                    asker.turn_away(now)
            except Unopened as error:
                asker.ask_for(error)
            except Exception as error:  # noqa: BLE001 - raised again at the asker: the others get theirs
                asker.fail(error)
            else:
                if entries:
                    office.run.leases.grant(entries)
                    office.payroll.grant(entries, duration)
                    grants.append((asker, entries))
        if grants:
            self._record(grants, now)
        return len(grants) >= GRANTS_MAX

    def _decide(self, asker: Asker, look: _Look) -> list[LeaseEntry]:
        """Leases for this node now; or none, and the asker knows why, and when to look again at the latest."""
        run, payroll, request = self._office.run, self._office.payroll, asker.request
        published = run.manifests.get(request.manifest_hash)
        version = published.manifest.version if published is not None else -1
        if asker.reason is not None and version in look.dry:
            return []
        reason, asker.retry_at = self._held_back(asker.node, request.manifest_hash, published, look.now)
        samples = 0
        if not reason:
            holding = run.leases.held_by(asker.node.peer)
            held_samples = sum(lease.span.count for lease in holding)
            allowed = self._samples_allowed(asker.node, look.now)
            samples = min(request.samples_max, allowed - held_samples)
            if samples <= 0:
                reason = f"{held_samples} samples are out with you; {allowed} are half a step's work"
        if not reason and version not in look.dry:
            account = payroll.by_peer.get(asker.node.peer)
            affordable = payroll.samples_max(account)
            samples = samples if affordable is None else min(samples, max(affordable, 1))
            proposal = self._propose(asker.node, version, samples, look)
            if proposal.spans:
                wanted = sum(span.count for span in proposal.spans)
                asker.reason = payroll.refusal(account, wanted, self._office.config.run.lease_seconds)
                if asker.reason:  # of this account alone
                    return []
                return self._entries(asker.node, proposal, version, request.manifest_hash, look.now)
            look.dry[version] = proposal.reason  # for this one as for any other
        asker.reason = reason or look.dry[version]
        return []

    def _is_behind(self, asker: Asker) -> bool:
        """Whether there is a newer snapshot than it asked with, or it works for another run now: there may be
        something for it there, and a node that waits here for half a minute would not load that snapshot before."""
        run = self._office.run
        if not self._office.pool.has(asker.node):
            return True
        published = run.manifests.get(asker.request.manifest_hash)
        return published is not None and run.version is not None and published.manifest.version < run.version

    def _held_back(
        self, node: NodeEntry, manifest_hash: bytes, published: Published | None, now: float
    ) -> tuple[str, float]:
        """Why this node gets nothing, whatever there is; empty when it may. And when to look again at the latest."""
        office, never = self._office, float("inf")
        run = office.run
        if not office.pool.has(node):
            return f"moved to the run {node.run}", never
        if node.state in NO_LEASES:
            return NO_LEASES[node.state].format(node.state_reason), never
        if run.state in ENDED:
            return f"the run is {run.state}", never
        if run.state == "paused":
            return f"the run is paused: {run.reason}", never
        if run.current is None:
            return "no snapshot published yet", never
        if published is None:
            return "the snapshot you have is not of this run; wait for the heartbeat's news", never
        if run.learner_refused:
            return run.learner_refused, never
        if manifest_hash in run.leases.lost:
            return f"the learner has lost version {published.manifest.version}; wait for its next", never
        if now < node.rest_until:
            return f"resting {node.rest_until - now:.0f} s: {node.last_reason}", node.rest_until
        return "", never

    def _samples_allowed(self, node: NodeEntry, now: float) -> int:
        """L = samples / mu_i <= 0.5 T_train, over all that the node holds; in probation never more than a group."""
        unmeasured = self._office.config.run.n
        allowed = capacity.lease_samples_max(
            mu=node.meter.rate(now), t_train=self._office.t_train(), samples_unmeasured=unmeasured
        )
        return min(allowed, unmeasured) if node.state == "probation" else allowed

    def _propose(self, node: NodeEntry, version: int, samples: int, look: _Look) -> Proposal:
        """What to lease, with prompts that fit the model's context; those that do not are given up, on record."""
        office = self._office
        run = office.run
        assert run.version is not None, "a snapshot is published"
        for _ in range(UNUSABLE_MAX):
            proposal = run.leases.propose(
                peer=node.peer,
                version=version,
                newest=run.version,
                samples_max=samples,
                depth=look.depth,
                nodes=look.nodes,
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

    def _entries(
        self, node: NodeEntry, proposal: Proposal, version: int, manifest_hash: bytes, now: float
    ) -> list[LeaseEntry]:
        """The proposal's leases, as many as one reply takes."""
        office = self._office
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
                    expires_at=now + office.config.run.lease_seconds,
                    account=office.payroll.by_peer.get(node.peer),
                )
            )
        return entries

    def _record(self, grants: Sequence[tuple[Asker, list[LeaseEntry]]], now: float) -> None:
        """Make them durable, then tell. The book and the payroll have them already: no two askers got the same, and no
        two were promised the same money."""
        office = self._office
        run, duration = office.run, office.config.run.lease_seconds
        everything = [entry for _, entries in grants for entry in entries]
        try:
            with office.ledger.transaction() as connection:
                record(
                    connection,
                    [new_leases(run.name, everything, duration_seconds=duration, wall=office.wall())],
                    wall=office.wall(),
                    actor=grants[0][0].node.peer if len(grants) == 1 else "coordinator",
                    action="leases granted",
                    subject=run.name,
                    kind="flow",
                )
        except Exception as error:  # noqa: BLE001 - raised again at those who asked
            run.leases.take_back(everything)
            for _, entries in grants:
                office.payroll.take_back(entries, duration)
            for asker, _ in grants:
                asker.fail(error)
            return
        for asker, entries in grants:
            asker.context.run(self._note, asker.node, entries, now)
            asker.give(tuple(self._order(entry, duration) for entry in entries))

    def _note(self, node: NodeEntry, entries: Sequence[LeaseEntry], now: float) -> None:
        """These are the node's, durably: figures, the log, its probation and its rate."""
        office = self._office
        office.measures.leases_granted[entries[0].kind] += len(entries)
        granted = shorts(entry.lease_id for entry in entries)
        told = f"{len(entries)} leases of version {entries[0].version} for {node.name}"
        tell(log, logging.INFO, "leases_granted", "%s", told, peer=node.peer, leases=granted)
        if node.state == "probation":
            ids = [entry.lease_id for entry in entries]
            node.probation = node.probation.granted(ids, now, office.config.admission.warmup)
        office.note_holding(node.peer)

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
