"""Who of the pool works, for which run: equation 3 in a closed loop, slow to change its mind (DESIGN section 7). Pure.

`step` is called often (each few seconds) with what is measured now; the period only scales how long a deviation must
last. mu_pool is the sum over nodes that are assigned and available; mu_target = gamma mu_min. What is measured of a
node is smoothed once more, by two periods: a decision taken on one look would pick those that were lucky in it. That a
node is gone counts at once.

| deviation  | measured                                                      | for       | then                       |
|------------|---------------------------------------------------------------|-----------|----------------------------|
| impossible | all that can be had do not make mu_min                        | -         | everybody works, at once   |
| empty      | no node that is assigned is available                         | -         | as starved, at once        |
| starved    | mu_pool < mu_min                                              | 1 period  | the cheapest standby nodes |
| lost       | mu_pool < mu_target, or not surely mu_min, since a node that  | 1 period  | that fill the gap to       |
|            | worked has gone                                               |           | mu_target; after a loss,   |
| short      | mu_pool < mu_target                                           | 3 periods | that surely make mu_min    |
| surplus    | mu_pool without some paid node >= (1 + margin) mu_target      | 3 periods | the dearest that can be    |
|            |                                                               |           | spared are released        |
| saving     | a set that makes (1 + margin) mu_target costs 20 % less than  | 3 periods | its new members work; the  |
|            | what works now, and has members that stand by                 |           | others are then surplus    |

Rules beside it:

- **A loss is a fact**, no noise that passes: what is missing to mu_target then is as urgent as what is missing to
  mu_min. With two or three nodes left, 20 % noise on each is more than gamma covers, and mu_pool looks sufficient, or
  goes to and fro about mu_min, while it is not. The period is for who comes back within it, and for those that went
  together to be found gone together. It is over when all are back, or when what is left has looked sufficient for
  three periods.
- **Surely** is what is seen less `doubt` of it over the root of how many there are (`activation_targets.surely`). The
  cheapest set that just reaches the target is made of those that look faster than they are: after a loss it would be
  seen at 1.11 mu_min, be 0.99, and nothing but the slow rule would find out. From nine equal nodes on gamma covers it.
- **Where it is impossible** there is nothing to choose and nothing to wait for; nor after a loss where all that can be
  had do not make mu_target. It is said once, until they do. Nobody who is away loses its place meanwhile, unless the
  spend ceiling wants it. While somebody is unmeasured it is not known. While nodes are still being heard of, as after
  a restart or a cut line, it is as starved: after a period.
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

import math
from typing import TYPE_CHECKING

from .activation_records import Assignment, Need
from .activation_table import CONSIDERED_MAX, DEVIATIONS, Table, nodes
from .activation_targets import surely
from .money import dollars
from .selection import SLACK, Cover, Offer, cheapest_cover, mu_of, price_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .activation_records import Cause, Decision, Look, Rules, State

__all__ = ["CONSIDERED_MAX", "DEVIATIONS", "step"]


def step(state: State, look: Look, now: float, rules: Rules) -> tuple[State, tuple[Decision, ...]]:
    """The state after a look, and what was decided. Changes nothing that it was given."""
    table = _Loop(state, look, now, rules)
    table.end_runs()
    table.place_free()
    for need in table.by_need():
        table.decide(need)
    return table.state(), tuple(table.decisions)


class _Loop(Table):
    """What follows from one look: a run's deviation, and what is done about it."""

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
        self.missing = {peer: run for peer, run in self.missing.items() if run in runs}
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
                words = f"{nodes(peers)} free: rho 0, kept whatever the target is; pacing bounds what they are given"
                self.note(need, "activate", "free", peers, words, mu_of(before[need.run]), before[need.run])

    def _level(self, mu: float, need: Need) -> tuple[bool, float]:
        """How well a run is served: against its target, and beyond all targets against its weight."""
        target = self.targets[need.run][0] or 0.0
        return (mu >= target, mu / target if mu < target else mu / need.weight)

    def decide(self, need: Need) -> None:
        """One run's deviation, and what follows from it."""
        self.give_up_idle(need)
        target, working = self.targets[need.run][0], self.working(need.run)
        if target is None:
            self.begin_unmeasured(need, working)
            return
        slow = self.rules.slow_periods * self.rules.period_seconds
        enough = mu_of(working) >= target * (1 - SLACK)
        if enough and ((need.run, "lost") not in self.since or self.made_up(need, target, working, slow)):
            self.clear(need.run, "lost", "starved", "short")
            spare = self.spare(need.run, target)
            if not spare:
                self.clear(need.run, "surplus")
                self.save(need, target, working)
                return
            self.clear(need.run, "saving")
            lasted = self.lasting(need.run, "surplus")
            if lasted >= slow:
                self.release(need, target, working, spare, lasted)
        else:
            self.clear(need.run, "surplus", "saving")
            self.fill_in_time(need, target, working, slow)

    def made_up(self, need: Need, target: float, working: Sequence[Offer], slow: float) -> bool:
        """Whether what is left after a loss makes mu_min for sure, or has been seen to make the target for long."""
        sure = surely(working, self.rules.doubt) >= target / self.rules.gamma
        return sure or self.lasting(need.run, "lost") > slow

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
        words = f"{nodes(idle)} made nothing in {self.hold_seconds:.0f} s"
        self.note(need, "release", "idle", idle, words, mu_of(before), before)

    def fill_in_time(self, need: Need, target: float, working: Sequence[Offer], slow: float) -> None:
        """Below mu_min (or a target cut to the run's share) or after a loss it is urgent; else only mu's variation is
        at stake. Where everybody is needed there is nothing to choose, and nothing to wait for."""
        urgent = self.rules.urgent_periods * self.rules.period_seconds
        starving = mu_of(working) < target / self.rules.gamma
        short = mu_of(working) < target * (1 - SLACK)
        if not starving:
            self.clear(need.run, "starved")
        if not short:
            self.clear(need.run, "short")
        short_seconds = self.lasting(need.run, "short") if short else 0.0
        waited = starving and self.lasting(need.run, "starved") >= urgent
        lost_seconds = self.lasting(need.run, "lost") if (need.run, "lost") in self.since else -1.0
        most = self.most(need.run)
        if most < self.possible_from(need.run, target) and (waited or self.settled(need.run)):
            self.fill(need, "impossible", target, working)
        elif not self.manned(need.run):
            self.fill(need, "empty", target, working)
        elif waited:
            self.fill(need, "starved", target, working)
        elif lost_seconds >= (0.0 if most < target and self.settled(need.run) else urgent):
            self.fill(need, "lost", target, working)
        elif not starving and short_seconds >= slow:
            self.fill(need, "short", target, working)

    def most(self, run: str) -> float:
        """What all that can be had would make, resting or not; no bound while somebody is unmeasured."""
        return math.inf if self.unknown(run) else mu_of(self.everyone(run)) * (1 + SLACK)

    def possible_from(self, run: str, target: float) -> float:
        """mu_min; once it was said that this is impossible, mu_target, or noise would have it said again and again."""
        return target if self.standing.get(run) == "impossible" else target / self.rules.gamma

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
        """Equation 3 over those that stand by, for what is missing; after a loss, with room for what mu is worth."""
        mu, floor, lasted = (
            mu_of(working),
            target / self.rules.gamma,
            self.now - self.since.get((need.run, cause), self.now),
        )
        lost = (need.run, "lost") in self.since
        offers = [*self.standby(), *self.movable(need.run)]
        if mu + mu_of(offers) < floor:
            offers = [*self.standby(recalled=True), *self.movable(need.run)]
        found = self.sure_cover(offers, working, target) if lost else self.cover(offers, target - mu)
        cover = self.within_ceiling(found)
        if not cover.reached:
            cover = self.within_ceiling(Cover((*cover.chosen, *self.tried(target - mu - cover.mu)), reached=False))
        words = self.gap(need.run, cause, target, working) + (f" for {lasted:.0f} s" if lasted else "")
        if not cover.reached:
            limit = "the spend ceiling leaves no more" if len(cover.chosen) < len(offers) else "no more can be had"
            words += f"; {target - mu - cover.mu:.4g} stay missing: {limit}"
        if cover.chosen:
            self.activate(need, cause, cover, offers, words, working, lasted)
        else:
            self.say_once(need, cause, words, working, offers)

    def gap(self, run: str, cause: Cause, target: float, working: Sequence[Offer]) -> str:
        """What is missing, in words."""
        mu, floor = mu_of(working), target / self.rules.gamma
        if cause == "impossible":
            most = mu_of(self.everyone(run))
            line = f"mu_min {floor:.4g}" if most < floor else f"mu_target {target:.4g}"
            return f"mu_pool {mu:.4g}, and {most:.4g} with all that can be had, is below {line}: everybody works"
        if mu >= target:
            least = surely(working, self.rules.doubt)
            return f"since a loss mu_pool {mu:.4g} may be no more than {least:.4g}, below mu_min {floor:.4g}"
        line = f"mu_min {floor:.4g}" if cause == "starved" else f"mu_target {target:.4g}"
        return f"mu_pool {mu:.4g} is below {line}"

    def release(
        self, need: Need, target: float, working: Sequence[Offer], spare: Sequence[Offer], lasted: float
    ) -> None:
        for offer in spare:
            del self.assigned[offer.peer]
            self.changed[offer.peer] = self.now
        words = (
            f"mu_pool {mu_of(working):.4g} is above mu_target {target:.4g} for {lasted:.0f} s: "
            f"{nodes(spare)} can be spared with a margin of {self.rules.margin:.0%}"
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

    def spare(self, run: str, target: float) -> tuple[Offer, ...]:
        """The dearest that the run can do without, none that was activated recently."""
        blind = self.rules.nocost_seed is not None
        working = self.working(run)
        go = [offer for offer in working if not self.held(offer.peer) and (blind or offer.price)]
        stay = mu_of(working) - mu_of(go)
        kept = self.cover(go, target * (1 + self.rules.margin) - stay)
        return tuple(offer for offer in go if offer.peer not in kept.peers) if kept.reached else ()
