"""Three opponents at the poker table, each a few rules that a person can read: the paper's rule-based players.

| player  | style            | before the flop                       | after it                                  |
|---------|------------------|---------------------------------------|-------------------------------------------|
| rock    | tight            | raises the best hands, calls few more | bets two pair or better, calls with pairs |
| maniac  | loose-aggressive | raises half of the time, folds seldom | bets half of the time, bluffs             |
| station | calling station  | calls nearly everything               | calls with a pair or by chance; no bets   |

They see what a player at the table sees: their two cards, the board, the pot, what it costs to stay.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .dice import Dice

RANKS = "23456789TJQKA"

Verb = Literal["fold", "call", "raise"]
"""`call` is a check where nothing is owed; `fold` is one too."""


@dataclass(frozen=True, slots=True)
class Spot:
    """What a player decides upon. Chips; `hole` and `board` are cards such as "Ah"."""

    hole: tuple[str, str]
    board: tuple[str, ...]
    pot: int
    to_call: int
    stack: int
    big_blind: int


@dataclass(frozen=True, slots=True)
class Choice:
    """What a player does; `raise_to` is the whole bet of this street, brought into its legal bounds by the table."""

    verb: Verb
    raise_to: int = 0


def hole_points(hole: tuple[str, str]) -> int:
    """How good two cards are before the flop: 0 .. 40, close to Chen's count, doubled to stay whole.

    The higher card's rank (ace 20, king 16, queen 14, jack 12, others their number); a pair doubles it, at least 10;
    4 for one suit; a gap of ranks costs 2, 4, 8 or 10.
    """
    high, low = sorted((RANKS.index(card[0]) for card in hole), reverse=True)
    points = {12: 20, 11: 16, 10: 14, 9: 12}.get(high, high + 2)
    if high == low:
        return max(10, 2 * points)
    suited = 4 if hole[0][1] == hole[1][1] else 0
    gap = high - low - 1
    return max(0, points + suited - (0, 2, 4, 8, 10)[min(gap, 4)])


def made(hole: tuple[str, str], board: Sequence[str]) -> int:
    """What the two cards make of the board: 0 nothing, 1 a pair, 2 two pairs, three alike, a straight, a flush or more.

    Cards that the board shows to everyone count for nothing: a pair on the board is not the player's.
    """
    cards = (*hole, *board)
    suits = Counter(card[1] for card in cards)
    ranks = {RANKS.index(card[0]) for card in cards}
    if 12 in ranks:
        ranks.add(-1)  # an ace is also the low end of a straight
    straight = any(all(low + step in ranks for step in range(5)) for low in range(-1, 9))
    if straight or max(suits.values()) >= 5:
        return 2
    on_board = Counter(card[0] for card in board)
    if hole[0][0] == hole[1][0]:
        return 2 if on_board[hole[0][0]] else 1
    alike = [on_board[card[0]] for card in hole]
    return 2 if max(alike) >= 2 or min(alike) >= 1 else max(alike)


def rock(spot: Spot, dice: Dice) -> Choice:  # noqa: ARG001 - it never rolls
    """Tight: see the table."""
    if not spot.board:
        points = hole_points(spot.hole)
        if points >= 24:  # tens or better, ace-king of one suit
            return Choice("raise", 3 * (spot.to_call + spot.big_blind))
        return Choice("call" if points >= 16 and spot.to_call <= 3 * spot.big_blind else "fold")
    strength = made(spot.hole, spot.board)
    if strength == 2:
        return Choice("raise", spot.pot + spot.to_call)
    return Choice("call" if strength and spot.to_call <= spot.pot // 2 else "fold")


def maniac(spot: Spot, dice: Dice) -> Choice:
    """Loose and aggressive: see the table."""
    if not spot.board:
        if dice.happens(50):
            return Choice("raise", 3 * (spot.to_call + spot.big_blind))
        return Choice("call" if hole_points(spot.hole) >= 6 or dice.happens(50) else "fold")
    if spot.to_call == 0:
        return Choice("raise", max(spot.pot // 2, spot.big_blind)) if dice.happens(50) else Choice("call")
    if made(spot.hole, spot.board):
        return Choice("raise", 3 * spot.to_call) if dice.happens(40) else Choice("call")
    if dice.happens(15):
        return Choice("raise", 3 * spot.to_call)
    return Choice("call" if dice.happens(25) else "fold")


def station(spot: Spot, dice: Dice) -> Choice:
    """Calls: see the table."""
    if not spot.board:
        return Choice("call" if spot.to_call <= 4 * spot.big_blind or hole_points(spot.hole) >= 12 else "fold")
    return Choice("call" if made(spot.hole, spot.board) or dice.happens(50) else "fold")


PLAYERS: dict[str, Callable[[Spot, Dice], Choice]] = {"rock": rock, "maniac": maniac, "station": station}
