"""Who of the pool works, for which run: equation 3 in a closed loop, slow to change its mind (DESIGN section 7). Pure.

`step` is called often (each few seconds) with what is measured now; the period only scales how long a deviation must
last. mu_pool is the sum over nodes that are assigned and available; mu_target = gamma mu_min. What is measured of a
node is smoothed once more, by two periods: a decision taken on one look would pick those that were lucky in it. That a
node is gone counts at once.

| deviation | measured                                                       | for       | then                       |
|-----------|----------------------------------------------------------------|-----------|----------------------------|
| empty     | no node that is assigned is available                          | -         | as starved, at once        |
| starved   | mu_pool < mu_min                                               | 1 period  | the cheapest standby nodes |
| lost      | mu_pool < mu_target since a node that worked has gone          | 1 period  | that fill the gap to       |
| short     | mu_pool < mu_target                                            | 3 periods | mu_target                  |
| surplus   | mu_pool without some paid node >= (1 + margin) mu_target       | 3 periods | the dearest that can be    |
|           |                                                                |           | spared are released        |
| saving    | a set that makes (1 + margin) mu_target costs 20 % less than   | 3 periods | its new members work; the  |
|           | what works now, and has members that stand by                  |           | others are then surplus    |

Rules beside it:

- **A loss is a fact**, no noise that passes: what is missing to mu_target then is as urgent as what is missing to
  mu_min. With two or three nodes left, 20 % noise on each is more than gamma covers, and mu_pool looks sufficient, or
  goes to and fro about mu_min, while it is not. The period is for who comes back within it, and for those that went
  together to be found gone together.
- **A mind is changed once in ten periods.** A paid node that was activated is not released, one that was released not
  activated again, for `hold_periods`: whatever the noise of mu. One exception, because a loss is no noise: after a
  working node has gone, nodes that were released before that may be called back when mu_pool would stay under mu_min.
- **Who goes away** keeps its place until that is given to others. Then it stands by when it comes back, and a paid one
  rests as if it had been released: one that comes and goes is not called each time.
- **Free nodes** (price 0, rho 0) work whenever they are available, however much that makes: they cost nothing, and what
  they could make too much pacing does not lease. Paid nodes are spare where free ones suffice. A free node is moved
  between runs only from one that has it to spare to one that is short.
- **Several runs** share by weight. Where the pool cannot make all targets, each run's is cut to its share (weighted
  max-min: none gets less than its weight's share of the pool, or all it asked for). A node works for one run at a time;
  the run that lacks the largest part of its target chooses first.
- **Unmeasured**: without T_train or T_bcast there is no mu_min. Then `mu_start` is the target, or, where that is not
  set, the one node of the lowest rho works until there is. Where no rate is enough (kappa T_train <= T_bcast) nothing
  is changed: more nodes would not help, and the reason says what would.
- A paid node of unknown mu has no rho and is no candidate: its benchmark in probation gives it one. Where those that
  are measured are not enough, the cheapest of the others are tried, as many as would do at the median mu, one where
  nothing is known; their terms are fixed once they are measured, and until then they count for nothing. One that made
  nothing in `hold_periods` is released.
- `nocost_seed` is the ablation: prices are not looked at, the order is a seeded shuffle, and there is no saving.
- mu and price are fixed at activation in `Assignment`: they are what the node is paid by (`pricing`).
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

from .activation_records import Assignment, Considered, Decision, Need, State
from .activation_targets import shared_targets, smoothed
from .money import dollars
from .selection import Cover, Offer, by_rho, cheapest_cover, in_order, mu_of, price_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .activation_records import Action, Cause, Look, Rules

CONSIDERED_MAX = 64
"""Candidates that a decision carries, those of the lowest rho: a record stays small in a pool of thousands."""

DEVIATIONS: tuple[Cause, ...] = ("lost", "starved", "short", "surplus", "saving")


def step(state: State, look: Look, now: float, rules: Rules) -> tuple[State, tuple[Decision, ...]]:
    """The state after a look, and what was decided. Changes nothing that it was given."""
    table = _Table(state, look, now, rules)
    table.end_runs()
    table.place_free()
    for need in table.by_need():
        table.decide(need)
    return table.state(), tuple(table.decisions)


class _Table:
    """One look being worked on."""

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
        gone = [peer for peer in state.present if peer not in self.candidates or not self.candidates[peer].available]
        self.lost_at = now if gone else state.lost_at
        for peer in gone:
            self.since.setdefault((state.assigned[peer].run, "lost"), now)
        self.targets = shared_targets(tuple(self.candidates.values()), look.needs, rules)
        self.ceiling = float("inf") if rules.price_ceiling is None else rules.price_ceiling

    @property
    def hold_seconds(self) -> float:
        return self.rules.hold_periods * self.rules.period_seconds

    def state(self) -> State:
        working = frozenset(peer for peer in self.assigned if self.candidates[peer].available)
        return State(
            self.assigned, self.changed, self.since, working, self.lost_at, self.standing, self.smooth, self.now
        )

    # measures

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

    def by_need(self) -> list[Need]:
        """The run that lacks most of its target first."""

        def lacking(need: Need) -> tuple[float, float, str]:
            target = self.targets[need.run][0]
            return (mu_of(self.working(need.run)) / target if target else 1.0), -need.weight, need.run

        return sorted(self.look.needs, key=lacking)

    # moves

    def end_runs(self) -> None:
        """Nodes of runs that are over stand by again; it was not the loop that changed its mind."""
        runs = {need.run for need in self.look.needs}
        for run in sorted({given.run for given in self.assigned.values()} - runs):
            peers = sorted(peer for peer, given in self.assigned.items() if given.run == run)
            offers = self.working(run)
            for peer in peers:
                del self.assigned[peer]
                self.changed.pop(peer, None)
            self.note(
                Need(run, None), "release", "over", peers, f"run {run} is over", mu_of(offers), offers, considered=()
            )
        self.since = {key: at for key, at in self.since.items() if key[0] in runs}
        self.standing = {run: cause for run, cause in self.standing.items() if run in runs}

    def place_free(self) -> None:
        """Free nodes that stand by work at once, each for the run that lacks most then."""
        if self.rules.nocost_seed is not None or not self.look.needs:
            return
        free = [
            each
            for each in self.candidates.values()
            if each.available and each.price == 0 and each.peer not in self.assigned
        ]
        placed: dict[str, list[str]] = {}
        level = {need.run: mu_of(self.working(need.run)) for need in self.look.needs}
        before = {need.run: self.working(need.run) for need in self.look.needs}
        for each in sorted(free, key=lambda one: (-(one.mu or 0.0), one.peer)):
            run = min(
                self.look.needs, key=lambda need: (self._level(level[need.run], need), -need.weight, need.run)
            ).run
            level[run] += each.mu or 0.0
            self.assigned[each.peer] = Assignment(run, self.now, each.mu or 0.0, 0)
            placed.setdefault(run, []).append(each.peer)
        for need in self.look.needs:
            peers = placed.get(need.run, [])
            if peers:
                words = f"{_nodes(peers)} free: rho 0, kept whatever the target is; pacing bounds what they are given"
                self.note(need, "activate", "free", peers, words, mu_of(before[need.run]), before[need.run])

    def _level(self, mu: float, need: Need) -> tuple[bool, float]:
        """How well a run is served: against its target, and beyond all targets against its weight."""
        target = self.targets[need.run][0] or 0.0
        return (mu >= target, mu / target if mu < target else mu / need.weight)

    def decide(self, need: Need) -> None:
        """One run's deviation, and what follows from it."""
        self.give_up_idle(need)
        target, working = self.targets[need.run][0], self.working(need.run)
        mu = mu_of(working)
        if target is None:
            self.begin_unmeasured(need, working)
            return
        spare = self.spare(need.run, target)
        slow = self.rules.slow_periods * self.rules.period_seconds
        if mu < target * (1 - 1e-9):
            self.clear(need.run, "surplus", "saving")
            self.fill_in_time(need, target, working)
        elif spare:
            self.clear(need.run, "lost", "starved", "short", "saving")
            lasted = self.lasting(need.run, "surplus")
            if lasted >= slow:
                self.release(need, target, working, spare, lasted)
        else:
            self.clear(need.run, "lost", "starved", "short", "surplus")
            self.save(need, target, working)

    def give_up_idle(self, need: Need) -> None:
        """Paid nodes that were tried, or went on after a restart, and made nothing: others get their chance."""
        blind = self.rules.nocost_seed is not None
        idle = [
            peer
            for peer, given in self.assigned.items()
            if given.run == need.run
            and not given.mu
            and (given.price or blind)
            and self.now - given.since >= self.hold_seconds
        ]
        if not idle:
            return
        before = self.working(need.run)
        for peer in idle:
            del self.assigned[peer]
            self.changed[peer] = self.now
        words = f"{_nodes(idle)} made nothing in {self.hold_seconds:.0f} s"
        self.note(need, "release", "idle", idle, words, mu_of(before), before)

    def fill_in_time(self, need: Need, target: float, working: Sequence[Offer]) -> None:
        """Below mu_min (or a target cut to the run's share) or after a loss it is urgent; else only mu's variation is
        at stake."""
        urgent = self.rules.urgent_periods * self.rules.period_seconds
        starving = mu_of(working) < target / self.rules.gamma
        if not starving:
            self.clear(need.run, "starved")
        short_seconds = self.lasting(need.run, "short")
        if not self.manned(need.run):
            self.fill(need, "empty", target, working)
        elif starving and self.lasting(need.run, "starved") >= urgent:
            self.fill(need, "starved", target, working)
        elif (need.run, "lost") in self.since and self.lasting(need.run, "lost") >= urgent:
            self.fill(need, "lost", target, working)
        elif not starving and short_seconds >= self.rules.slow_periods * self.rules.period_seconds:
            self.fill(need, "short", target, working)

    def lasting(self, run: str, cause: Cause) -> float:
        """For how long the deviation has been seen, from this look on if it is new."""
        return self.now - self.since.setdefault((run, cause), self.now)

    def clear(self, run: str, *causes: Cause) -> None:
        for cause in causes:
            self.since.pop((run, cause), None)

    def begin_unmeasured(self, need: Need, working: Sequence[Offer]) -> None:
        self.clear(need.run, *DEVIATIONS)
        cause: Cause = "infeasible" if need.infeasible else "unmeasured"
        if need.infeasible or self.manned(need.run):
            self.say_once(need, cause, need.infeasible or "T_train or T_bcast is not measured yet", working)
            return
        first = self.ordered(self.standby())[:1] or self.untried()[:1]
        words = "T_train or T_bcast is not measured yet: one node works until they are"
        self.activate(need, cause, Cover(tuple(first), reached=True), self.standby(), words, working, 0.0)

    def fill(self, need: Need, cause: Cause, target: float, working: Sequence[Offer]) -> None:
        """Equation 3 over those that stand by, for what is missing."""
        mu, lasted = mu_of(working), self.now - self.since.get((need.run, cause), self.now)
        offers = [*self.standby(), *self.movable(need.run)]
        if mu_of(offers) + mu < target / self.rules.gamma:
            offers = [*self.standby(recalled=True), *self.movable(need.run)]
        cover = self.within_ceiling(self.cover(offers, target - mu))
        if not cover.reached:
            cover = self.within_ceiling(Cover((*cover.chosen, *self.tried(target - mu - cover.mu)), reached=False))
        line = f"mu_min {target / self.rules.gamma:.4g}" if cause == "starved" else f"mu_target {target:.4g}"
        words = f"mu_pool {mu:.4g} is below {line}" + (f" for {lasted:.0f} s" if lasted else "")
        if not cover.reached:
            limit = "the spend ceiling leaves no more" if len(cover.chosen) < len(offers) else "no more can be had"
            words += f"; {target - mu - cover.mu:.4g} stay missing: {limit}"
        if cover.chosen:
            self.activate(need, cause, cover, offers, words, working, lasted)
        else:
            self.say_once(need, cause, words, working, offers)

    def release(
        self, need: Need, target: float, working: Sequence[Offer], spare: Sequence[Offer], lasted: float
    ) -> None:
        for offer in spare:
            del self.assigned[offer.peer]
            self.changed[offer.peer] = self.now
        words = (
            f"mu_pool {mu_of(working):.4g} is above mu_target {target:.4g} for {lasted:.0f} s: "
            f"{_nodes(spare)} can be spared with a margin of {self.rules.margin:.0%}"
        )
        self.clear(need.run, "surplus")
        peers = [offer.peer for offer in spare]
        self.note(need, "release", "surplus", peers, words, mu_of(working), working, working, lasted)

    def save(self, need: Need, target: float, working: Sequence[Offer]) -> None:
        """Whether other nodes would do it for much less: those that may not be released stay in the reckoning."""
        standby = self.standby() if self.rules.nocost_seed is None else []
        stay = [offer for offer in working if self.held(offer.peer) or offer.price == 0]
        go = [offer for offer in working if not self.held(offer.peer) and offer.price]
        price = price_of(working)
        best = (
            cheapest_cover([*go, *standby], target * (1 + self.rules.margin) - mu_of(stay)) if go and standby else None
        )
        new = () if best is None else tuple(offer for offer in best.chosen if offer.peer not in self.assigned)
        if best is None or not new or not best.reached or self.within_ceiling(Cover(new, reached=True)).chosen != new:
            self.clear(need.run, "saving")
            self.standing[need.run] = "steady"
            return
        cost = price_of(stay) + best.price
        if cost > (1 - self.rules.saving_min) * price:
            self.clear(need.run, "saving")
            self.standing[need.run] = "steady"
            return
        lasted = self.lasting(need.run, "saving")
        if lasted >= self.rules.slow_periods * self.rules.period_seconds:
            words = f"the same for {dollars(cost)} instead of {dollars(price)} an hour, for {lasted:.0f} s"
            self.activate(need, "saving", Cover(new, reached=True), standby, words, working, lasted)

    # choosing

    def ordered(self, offers: Iterable[Offer]) -> list[Offer]:
        """By rho, or in the ablation by a seeded shuffle that does not depend on who else is there."""
        seed = self.rules.nocost_seed
        return by_rho(offers) if seed is None else sorted(offers, key=lambda offer: _lot(seed, offer.peer))

    def cover(self, offers: Sequence[Offer], target: float) -> Cover:
        if self.rules.nocost_seed is None:
            return cheapest_cover(offers, target)
        return in_order(self.ordered(offers), target)

    def spare(self, run: str, target: float) -> tuple[Offer, ...]:
        """The dearest that the run can do without, none that was activated recently."""
        blind = self.rules.nocost_seed is not None
        working = self.working(run)
        go = [offer for offer in working if not self.held(offer.peer) and (blind or offer.price)]
        stay = mu_of(working) - mu_of(go)
        kept = self.cover(go, target * (1 + self.rules.margin) - stay)
        return tuple(offer for offer in go if offer.peer not in kept.peers) if kept.reached else ()

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
        if not cover.chosen:
            self.say_once(need, cause, f"{words}; nobody who could work stands by", working, offers)
            return
        lapsed = self.lapse(need.run)
        for offer in cover.chosen:
            self.assigned[offer.peer] = Assignment(need.run, self.now, offer.mu, offer.price)
            self.changed[offer.peer] = self.now
        self.clear(need.run, *DEVIATIONS)
        peers = [offer.peer for offer in cover.chosen]
        known = {offer.peer for offer in offers}
        offers = [*offers, *(offer for offer in cover.chosen if offer.peer not in known)]
        words += f"; {_nodes(lapsed)} that went away lost their place" if lapsed else ""
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

    # records

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


def _nodes(peers: Sequence[object]) -> str:
    return "1 node" if len(peers) == 1 else f"{len(peers)} nodes"
