"""A rollout of several turns, token by token. Pure: the node builds with it, the coordinator replays with it.

What lies behind the prompt is drawn and inserted in turn:

    drawn_1, inserted_1, drawn_2, inserted_2, ... drawn_k          inserted_i = prefix + encode(observation_i) + suffix

| the last turn drawn                       | the episode                                                  | finish |
|-------------------------------------------|--------------------------------------------------------------|--------|
| ends with a stop id, and the game is over | is over                                                      | stop   |
| ends with a stop id, as turn `turns_max`  | is truncated                                                 | stop   |
| ends with a stop id, and the answer would | is truncated; the answer is not inserted                     | length |
| leave no room for one more token          |                                                              |        |
| has none, and is as long as it may be     | is truncated; what was drawn is no action                    | length |

A turn may be min(`turn_tokens_max`, what is left of `tokens_max`) long; `tokens_max` counts everything behind the
prompt. A stop id ends a turn, so it stands nowhere else in one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence


class Text(Protocol):
    """The two directions of a tokeniser (`token_text.ModelText`)."""

    def encode_plain(self, text: str) -> Sequence[int]:
        """Token ids of an environment's text."""

    def decode(self, tokens: Sequence[Sequence[int]]) -> list[str]:
        """The texts of several turns, special tokens left out."""


@dataclass(frozen=True, slots=True)
class EpisodeRules:
    """What the lease says of turns."""

    tokens_max: int
    turns_max: int
    turn_tokens_max: int
    stop_ids: tuple[int, ...]
    turn_prefix: tuple[int, ...] = ()
    turn_suffix: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Claim:
    """An episode as a node tells it. `spans`: lengths of what was drawn, inserted, drawn ...; () when all was drawn."""

    tokens: tuple[int, ...]
    spans: tuple[int, ...]
    finish: Literal["stop", "length"]

    @property
    def drawn(self) -> list[tuple[int, ...]]:
        """The turns, in order. Only as sound as `spans` are."""
        parts, start = [], 0
        for number, length in enumerate(self.spans or (len(self.tokens),)):
            if number % 2 == 0:
                parts.append(self.tokens[start : start + length])
            start += length
        return parts


class Episode:
    """One rollout while it is played: `said`, `answered`, `said`, ... until `finish` is set.

    `truncated`: the environment has yet to be told that the episode was cut off.
    """

    def __init__(self, rules: EpisodeRules, text: Text) -> None:
        self._rules = rules
        self._text = text
        self.tokens: list[int] = []
        self.actions: list[str] = []
        self.finish: Literal["stop", "length"] | None = None
        self.truncated = False
        self._spans: list[int] = []

    @property
    def room(self) -> int:
        """Tokens that the next turn may have."""
        return min(self._rules.turn_tokens_max, self._rules.tokens_max - len(self.tokens))

    @property
    def drawn_count(self) -> int:
        """Tokens drawn so far, over all turns: the t of the next one (DESIGN section 9)."""
        return sum(self._spans[::2])

    @property
    def spans(self) -> tuple[int, ...]:
        """As in `Claim`: one turn alone has none."""
        return tuple(self._spans) if len(self._spans) > 1 else ()

    def said(self, drawn: Sequence[int]) -> str | None:
        """The policy's turn: its action, or None when it was cut off. Raises ValueError when it is no turn."""
        if self.finish is not None or len(self._spans) % 2:
            raise ValueError("it is not the policy's turn")
        stop_ids = self._rules.stop_ids
        stopped = bool(drawn) and drawn[-1] in stop_ids
        if not drawn or len(drawn) > self.room:
            raise ValueError(f"turn {len(self.actions) + 1} has {len(drawn)} tokens, not 1 to {self.room}")
        if any(token in stop_ids for token in drawn[:-1]):
            raise ValueError(f"a stop token comes before the end of turn {len(self.actions) + 1}")
        if not stopped and len(drawn) < self.room:
            raise ValueError(f"turn {len(self.actions) + 1} ends without a stop token, {self.room} tokens were free")
        self.tokens += drawn
        self._spans.append(len(drawn))
        if not stopped:
            self._cut("length")
            return None
        (action,) = self._text.decode([list(drawn)])
        self.actions.append(action)
        return action

    def answered(self, observation: str, *, done: bool) -> tuple[int, ...]:
        """The environment's answer to the last action: the tokens inserted for it, none when the episode is over."""
        if self.finish is not None or len(self._spans) % 2 == 0:
            raise ValueError("it is not the environment's turn")
        if done:
            self.finish = "stop"
            return ()
        if len(self.actions) >= self._rules.turns_max:
            self._cut("stop")
            return ()
        rules = self._rules
        inserted = (*rules.turn_prefix, *self._text.encode_plain(observation), *rules.turn_suffix)
        if len(self.tokens) + len(inserted) >= rules.tokens_max:
            self._cut("length")
            return ()
        self.tokens += inserted
        self._spans.append(len(inserted))
        return inserted

    def _cut(self, finish: Literal["stop", "length"]) -> None:
        self.finish = finish
        self.truncated = True


def fault(claim: Claim, rules: EpisodeRules) -> str | None:
    """What can be seen to be wrong without playing: the first fault, or None. `actions_of` needs this to hold."""
    spans = claim.spans or (len(claim.tokens),)
    if len(claim.spans) == 1 or len(spans) % 2 == 0:
        return f"{len(claim.spans)} spans: an episode begins and ends with a turn, and one turn has no spans"
    if min(spans) < 0 or sum(spans) != len(claim.tokens):
        return f"the spans cover {sum(spans)} of {len(claim.tokens)} tokens"
    if len(claim.tokens) > rules.tokens_max:
        return f"{len(claim.tokens)} tokens, at most {rules.tokens_max} were ordered"
    turns = claim.drawn
    if len(turns) > rules.turns_max:
        return f"{len(turns)} turns, at most {rules.turns_max} were ordered"
    for number, turn in enumerate(turns, 1):
        if not 1 <= len(turn) <= rules.turn_tokens_max:
            return f"turn {number} has {len(turn)} tokens, not 1 to {rules.turn_tokens_max}"
        if any(token in rules.stop_ids for token in turn[:-1]):
            return f"a stop token comes before the end of turn {number}"
        if turn[-1] not in rules.stop_ids and (number < len(turns) or claim.finish == "stop"):
            return f"turn {number} does not end with a stop token"
    return None


def actions_of(claim: Claim, rules: EpisodeRules, text: Text) -> list[str]:
    """What the policy did: the turns that end with a stop id, as text."""
    return text.decode([list(turn) for turn in claim.drawn if turn[-1] in rules.stop_ids])


def replay(claim: Claim, rules: EpisodeRules, text: Text, observations: Sequence[str], *, done: bool) -> Episode | str:
    """The claimed episode played again, or why it is not what happened.

    `observations` answer the actions, in order; `done`: the last of them ended the game. Given the turns drawn, all
    else must come out as claimed: inserted tokens, spans, where and why it ended.
    """
    episode = Episode(rules, text)
    for number, turn in enumerate(claim.drawn):
        if episode.finish is not None:
            return f"it goes on after its end in turn {number}"
        try:
            action = episode.said(turn)
        except ValueError as error:
            return str(error)
        if action is None:
            continue
        if number >= len(observations):
            return f"the environment did not answer turn {number + 1}"
        episode.answered(observations[number], done=done and number + 1 == len(observations))
    if episode.finish is None:
        return f"it stops after turn {len(episode.actions)}, before its end"
    if tuple(episode.tokens) != claim.tokens or episode.spans != claim.spans:
        return f"other tokens were inserted than the environment's answers are ({_difference(episode, claim)})"
    if episode.finish != claim.finish:
        return f"it says {claim.finish}, it ended with {episode.finish}"
    return episode


def _difference(episode: Episode, claim: Claim) -> str:
    for place, (ours, theirs) in enumerate(zip(episode.tokens, claim.tokens, strict=False)):
        if ours != theirs:
            return f"token {place} is {theirs}, should be {ours}"
    return f"{len(claim.tokens)} tokens, should be {len(episode.tokens)}"
