"""Episodes played again: a node's word on several turns is taken for nothing until our own sandbox says the same.

| code   | the rollout is rejected when                                                                            |
|--------|---------------------------------------------------------------------------------------------------------|
| replay | given the turns that were drawn, the environment answers otherwise, or ends elsewhere, than it claims   |
| reward | the reward the node's sandbox gave is not ours, to 1e-6                                                 |

The environment is deterministic and its seed is the coordinator's, so an honest node cannot fail either. Where our own
environment fails (a crash, a time-out) the rollout is worth 0, with the reason, as with every scorer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from echo2.tasks.episode import actions_of, replay
from echo2.tasks.scorer import PlayItem

from .intake import claim_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from echo2.tasks.episode import Claim, EpisodeRules
    from echo2.tasks.scorer import Play, Scorer

    from .config import RunConfig
    from .prompts import PromptBook
    from .records import Details, RolloutEntry

REWARD_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class Judged:
    """What a rollout is worth. `rejected`: why not even that; `reason`: why the reward is not plainly earned."""

    reward: float
    reason: str = ""
    details: Details | None = None
    rejected: str = ""


@dataclass(slots=True)
class _Case:
    """One rollout under judgement."""

    entry: RolloutEntry
    claim: Claim
    rules: EpisodeRules
    seed: bytes
    actions: tuple[str, ...]

    def item(self, prompts: PromptBook, *, truncated: bool = False, played: int | None = None) -> PlayItem:
        """All of its actions, or the first `played`."""
        actions = self.actions if played is None else self.actions[: max(played, 0)]
        return PlayItem(prompts.spec, self.seed, actions, truncated)


async def judge(entries: Sequence[RolloutEntry], prompts: PromptBook, scorer: Scorer, run: RunConfig) -> list[Judged]:
    """One judgement a rollout, in order. `tasks.episode.fault` found none in any, and their openings are at hand.

    Raises ScorerUnavailable.

    At most three rounds: the actions as claimed; the cut at the turn limit, which no claim tells from an end; and,
    where our environment failed, whether the game had ended before.
    """
    cases = []
    for entry in entries:
        claim = claim_of(entry)
        tokens_max = prompts.tokens_max(entry.kind, entry.ordinal, run.tokens_max)
        rules = prompts.episode_rules(tokens_max, run.turn_tokens_max)
        assert rules is not None, "a run of several turns"
        actions = tuple(actions_of(claim, rules, prompts.text))
        cases.append(_Case(entry, claim, rules, prompts.environment(entry.kind, entry.ordinal), actions))
    plays = await scorer.play([case.item(prompts, truncated=case.claim.finish == "length") for case in cases])
    again = [
        place
        for place, (case, play) in enumerate(zip(cases, plays, strict=True))
        if not play.reason and not play.done and len(case.actions) == case.rules.turns_max
    ]
    if again:
        cut = await scorer.play([cases[place].item(prompts, truncated=True) for place in again])
        for place, play in zip(again, cut, strict=True):
            plays[place] = play
    failed = [place for place, play in enumerate(plays) if play.reason]
    ended: dict[int, Play] = {}
    if failed:
        items = [cases[place].item(prompts, played=len(plays[place].observations) - 1) for place in failed]
        ended = dict(zip(failed, await scorer.play(items), strict=True))
    judged = zip(cases, plays, strict=True)
    return [_judged(case, play, ended.get(place), prompts) for place, (case, play) in enumerate(judged)]


def _judged(case: _Case, play: Play, ended: Play | None, prompts: PromptBook) -> Judged:
    if play.reason:
        if ended is not None and ended.done and not ended.reason:
            return Judged(0.0, rejected="replay: it goes on after the end of the game")
        return Judged(0.0, play.reason)
    count = len(case.actions)
    answers = play.observations[1 : 1 + count]
    was_cut = len(play.observations) > 1 + count
    played = replay(case.claim, case.rules, prompts.text, answers, done=play.done and not was_cut)
    if isinstance(played, str):
        return Judged(0.0, rejected=f"replay: {played}")
    if played.truncated is not was_cut or not play.done:
        return Judged(0.0, rejected="replay: it does not end where the game does")
    claimed = case.entry.claimed_reward
    if claimed is None or not abs(claimed - play.reward) <= REWARD_TOLERANCE:
        return Judged(0.0, rejected=f"reward: the node's sandbox says {claimed}, ours {play.reward}")
    return Judged(play.reward, details=play.details or None)
