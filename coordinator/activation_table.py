"""One look of the activation loop being worked on: what is known of the pool, who may be moved, and moving them. Pure.

Nothing is decided here: `activation` says when, and towards what.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

from .activation_records import Assignment, Considered, Decision, Need, State
from .activation_targets import shared_targets, smoothed, surely
from .selection import SLACK, Cover, Offer, by_rho, cheapest_cover, in_order, mu_of, price_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .activation_records import Action, Cause, Look, Rules

CONSIDERED_MAX = 64
"""Candidates that a decision carries, those of the lowest rho: a record stays small in a pool of thousands."""

SURE_ROUNDS = 16
"""In each the gap grows by what lacks, so what lacks shrinks to `doubt` of it at most: two or three rounds do."""

DEVIATIONS: tuple[Cause, ...] = ("lost", "starved", "short", "surplus", "saving")


class Table:
    """The pool and the runs as they are now, the changes made so far in this look, and the decisions recorded."""

    def __init__(self, state: State, look: Look, now: float, rules: Rules) -> None:
        self.before, self.look, self.now, self.rules = state, look, now, rules
        self.smooth = smoothed(state, look, now, rules)
        self.candidates = {each.peer: replace(each, mu=self.smooth.get(each.peer)) for each in look.candidates}
        self.assigned = {
            peer: given if given.mu else replace(given, mu=self.smooth.get(peer, 0.0))
            for peer, given in state.assigned.items()
            if peer in self.candidates
        }
        self.changed = {peer: at for peer, at in state.changed.items() if now - at < self.hold_seconds}
        self.since: dict[tuple[str, Cause], float] = dict(state.since)
        self.standing = dict(state.standing)
        self.decisions: list[Decision] = []
        self.here = here = frozenset(peer for peer, each in self.candidates.items() if each.available)
        gone = {peer: state.assigned[peer].run for peer in state.present - here if peer in state.assigned}
        self.lost_at = now if gone else state.lost_at
        back = here & self.assigned.keys()
        self.missing = {peer: run for peer, run in {**state.missing, **gone}.items() if peer not in back}
        for run in gone.values():
            self.since.setdefault((run, "lost"), now)
        for run, cause in [key for key in self.since if key[1] == "lost" and key[0] not in self.missing.values()]:
            self.clear(run, cause)
        self.targets = shared_targets(tuple(self.candidates.values()), look.needs, rules)
        self.ceiling = float("inf") if rules.price_ceiling is None else rules.price_ceiling

    @property
    def hold_seconds(self) -> float:
        """How long a mind that was changed stays."""
        return self.rules.hold_periods * self.rules.period_seconds

    def state(self) -> State:
        """What is remembered of all this."""
        working = frozenset(peer for peer in self.assigned if self.candidates[peer].available)
        return State(
            self.assigned,
            self.changed,
            self.since,
            working,
            self.lost_at,
            self.standing,
            self.smooth,
            self.now,
            self.missing,
            self.here,
        )

    def working(self, run: str) -> list[Offer]:
        """The run's available nodes at their present mu (that of activation while it has none) and their terms."""
        return [
            Offer(peer, self.candidates[peer].mu or given.mu, given.price)
            for peer, given in self.assigned.items()
            if given.run == run and self.candidates[peer].available and (self.candidates[peer].mu or given.mu) > 0
        ]

    def manned(self, run: str) -> bool:
        """Whether anyone works for the run, measured or not."""
        return any(given.run == run and self.candidates[peer].available for peer, given in self.assigned.items())

    def spend(self) -> int:
        """Micro-dollars an hour of all that work."""
        return sum(given.price for peer, given in self.assigned.items() if self.candidates[peer].available)

    def held(self, peer: str) -> bool:
        """Whether its mind was changed too recently."""
        return peer in self.changed

    def standby(self, *, recalled: bool = False) -> list[Offer]:
        """Who could be activated; with `recalled`, those too that were released before a working node was lost."""
        return [
            Offer(each.peer, each.mu, each.price)
            for each in self.candidates.values()
            if each.peer not in self.assigned
            and each.available
            and each.mu is not None
            and each.mu > 0
            and each.price <= self.ceiling
            and (not self.held(each.peer) or (recalled and self.changed[each.peer] < self.lost_at))
        ]

    def everyone(self, run: str) -> list[Offer]:
        """All that could work for the run now if nobody rested; others' nodes only where they have them to spare."""
        rest = [
            Offer(each.peer, each.mu, each.price)
            for each in self.candidates.values()
            if each.peer not in self.assigned and each.available and each.mu and each.price <= self.ceiling
        ]
        return [*self.working(run), *rest, *self.movable(run)]

    def settled(self, run: str) -> bool:
        """Whether nobody has just come, and whoever is away from the run was seen to go.

        Else a coordinator that was restarted or cut off would take those whom it hears first for all there are.
        """
        away = {peer for peer, given in self.assigned.items() if given.run == run and peer not in self.here}
        return self.here <= self.before.here and away <= self.missing.keys()

    def unknown(self, run: str) -> bool:
        """Whether somebody works for the run, or could, of whom nothing is measured yet."""
        tried = any(
            given.run == run and not given.mu and self.candidates[peer].available
            for peer, given in self.assigned.items()
        )
        return tried or bool(self.untried())

    def by_need(self) -> list[Need]:
        """The run that lacks most of its target first."""

        def lacking(need: Need) -> tuple[float, float, str]:
            target = self.targets[need.run][0]
            return (mu_of(self.working(need.run)) / target if target else 1.0), -need.weight, need.run

        return sorted(self.look.needs, key=lacking)

    def lasting(self, run: str, cause: Cause) -> float:
        """For how long the deviation has been seen, from this look on if it is new."""
        return self.now - self.since.setdefault((run, cause), self.now)

    def clear(self, run: str, *causes: Cause) -> None:
        """These deviations are not seen any more."""
        for cause in causes:
            self.since.pop((run, cause), None)
        if "lost" in causes:
            self.missing = {peer: of for peer, of in self.missing.items() if of != run or peer in self.assigned}

    def ordered(self, offers: Iterable[Offer]) -> list[Offer]:
        """By rho, or in the ablation by a seeded shuffle that does not depend on who else is there."""
        seed = self.rules.nocost_seed
        return by_rho(offers) if seed is None else sorted(offers, key=lambda offer: _lot(seed, offer.peer))

    def cover(self, offers: Sequence[Offer], target: float) -> Cover:
        """Equation 3, or in the ablation whoever comes first."""
        if self.rules.nocost_seed is None:
            return cheapest_cover(offers, target)
        return in_order(self.ordered(offers), target)

    def sure_cover(self, offers: Sequence[Offer], working: Sequence[Offer], target: float) -> Cover:
        """The cheapest that fill the gap to the target, and with which even `surely` mu_min is made; else all."""
        floor, missing = target / self.rules.gamma, target - mu_of(working)
        for _ in range(SURE_ROUNDS):
            cover = self.cover(offers, missing)
            lacking = floor - surely([*working, *cover.chosen], self.rules.doubt)
            if lacking <= 0 or len(cover.chosen) == len(offers):
                break
            missing = max(missing, cover.mu) + lacking
        return Cover(cover.chosen, reached=mu_of(working) + cover.mu >= target * (1 - SLACK))

    def movable(self, run: str) -> list[Offer]:
        """Free nodes that other runs have to spare."""
        if self.rules.nocost_seed is not None:
            return []
        found: list[Offer] = []
        for other in self.look.needs:
            target = self.targets[other.run][0]
            if other.run == run or target is None:
                continue
            left = mu_of(self.working(other.run))
            for offer in sorted(self.working(other.run), key=lambda each: (-each.mu, each.peer)):
                spare = left - offer.mu >= target * (1 + self.rules.margin)
                if offer.price == 0 and spare and not self.held(offer.peer):
                    found.append(offer)
                    left -= offer.mu
        return found

    def untried(self) -> list[Offer]:
        """Available paid nodes that stand by and were never measured, the cheapest first; they count for nothing."""
        found = [
            Offer(each.peer, 0.0, each.price)
            for each in self.candidates.values()
            if each.mu is None
            and each.available
            and each.price <= self.ceiling
            and each.peer not in self.assigned
            and not self.held(each.peer)
        ]
        return sorted(found, key=lambda offer: (offer.price, offer.peer))

    def tried(self, missing: float) -> list[Offer]:
        """As many of them as would do if they were like the others."""
        known = [mu for mu in self.smooth.values() if mu > 0]
        return self.untried()[: math.ceil(missing / median(known)) if known else 1]

    def within_ceiling(self, cover: Cover) -> Cover:
        """Without what the spend ceiling does not allow: in order of rho, as far as the money goes."""
        if self.rules.spend_ceiling is None:
            return cover
        left, taken = self.rules.spend_ceiling - self.spend(), []
        for offer in self.ordered(cover.chosen):
            if offer.price <= left:
                left -= offer.price
                taken.append(offer)
        whole = len(taken) == len(cover.chosen)
        return cover if whole else Cover(tuple(taken), reached=False)

    def activate(
        self,
        need: Need,
        cause: Cause,
        cover: Cover,
        offers: Sequence[Offer],
        words: str,
        working: Sequence[Offer],
        lasted: float,
    ) -> None:
        """They work from now on; who was away loses its place to them, unless everybody is needed and can be paid."""
        if not cover.chosen:
            self.say_once(need, cause, f"{words}; nobody who could work stands by", working, offers)
            return
        whole = price_of(cover.chosen) + sum(given.price for given in self.assigned.values())
        keep = cause == "impossible" and whole <= (self.rules.spend_ceiling or math.inf)
        lapsed = [] if keep else self.lapse(need.run)
        for offer in cover.chosen:
            self.assigned[offer.peer] = Assignment(need.run, self.now, offer.mu, offer.price)
            self.changed[offer.peer] = self.now
        self.clear(need.run, *(each for each in DEVIATIONS if (each, cause) != ("lost", "impossible")))
        peers = [offer.peer for offer in cover.chosen]
        known = {offer.peer for offer in offers}
        offers = [*offers, *(offer for offer in cover.chosen if offer.peer not in known)]
        words += f"; {nodes(lapsed)} that went away lost their place" if lapsed else ""
        self.note(need, "activate", cause, peers, words, mu_of(working), working, offers, lasted, lapsed)

    def lapse(self, run: str) -> list[str]:
        """Nodes whose place is given to others while they are away; a paid one that comes and goes then rests too."""
        gone = [
            peer for peer, given in self.assigned.items() if given.run == run and not self.candidates[peer].available
        ]
        for peer in gone:
            if self.assigned.pop(peer).price or self.rules.nocost_seed is not None:
                self.changed[peer] = self.now
        return gone

    def say_once(
        self, need: Need, cause: Cause, words: str, working: Sequence[Offer], offers: Sequence[Offer] = ()
    ) -> None:
        """Why nothing is done, when that is new."""
        if self.standing.get(need.run) != cause:
            self.note(need, "none", cause, [], words, mu_of(working), working, offers)

    def note(
        self,
        need: Need,
        action: Action,
        cause: Cause,
        chosen: Sequence[str],
        words: str,
        mu_pool: float,
        before: Sequence[Offer],
        considered: Sequence[Offer] = (),
        lasted: float = 0.0,
        lapsed: Sequence[str] = (),
    ) -> None:
        """Record a decision, once it is carried out."""
        self.standing[need.run] = cause
        target, share = self.targets.get(need.run, (None, 1.0))
        after = self.working(need.run)
        picked = frozenset(chosen)
        shown = self.ordered(considered)[:CONSIDERED_MAX]
        self.decisions.append(
            Decision(
                at=self.now,
                run=need.run,
                action=action,
                cause=cause,
                chosen=tuple(chosen),
                reason=words,
                mu_pool=mu_pool,
                mu_min=need.mu_min,
                mu_target=target,
                mu_after=mu_of(after),
                price_before=price_of(before),
                price_after=price_of(after),
                gamma=self.rules.gamma,
                share=share,
                deviation_seconds=lasted,
                considered=tuple(
                    Considered(each.peer, each.mu, each.price, each.rho if each.mu else None, each.peer in picked)
                    for each in shown
                ),
                considered_count=len(considered),
                lapsed=tuple(lapsed),
            )
        )


def _lot(seed: int, peer: str) -> bytes:
    return hashlib.blake2b(peer.encode(), key=seed.to_bytes(8, "little"), digest_size=8).digest()


def nodes(peers: Sequence[object]) -> str:
    """In words."""
    return "1 node" if len(peers) == 1 else f"{len(peers)} nodes"
