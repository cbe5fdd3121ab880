"""No-limit Texas hold'em against rule-based players: the paper's worked example of a sandbox (its section D).

One episode is one hand; the policy acts each time it is its turn. Who sits beside whom is fixed, the button and the
cards come from the seed. The reward is the policy's final chip change divided by its starting chips: -1 (all lost) to
the number of opponents (all won). `pokerkit` is the umpire: it knows the rules, and nothing here repeats them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from .dice import Dice
from .options import whole_number
from .poker_players import PLAYERS, RANKS, Choice, Spot
from .sandbox import EPISODES_MAX, SEED_BYTES, Observation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pokerkit import State

SMALL_BLIND, BIG_BLIND = 1, 2
STACK_CHIPS = 100
"""Fifty big blinds: enough for decisions on every street, few enough that one hand does not drown all others."""

RAISES_MAX = 3
"""By the opponents together on one street; then they call. So the policy is asked at most four times a street."""

STREETS = ("preflop", "flop", "turn", "river")
TURNS_MAX = (RAISES_MAX + 1) * len(STREETS)

DEALS_MAX = 1000
"""Hands dealt until the policy gets to act: everyone folding before it is rare, so many times in a row is a defect."""

PREFILL = "My action: I"
"""A model of a hundred million parameters rambles otherwise, and hardly ever names an action within a turn."""

PREFILL_CHARACTERS_MAX = 200

ACTION_CHARACTERS_MAX = 400
"""Only this much of the end of an action is read: what was decided stands last."""

_DECK = tuple(rank + suit for rank in RANKS for suit in "cdhs")

_ACTION = re.compile(
    r"\b(?:(?P<fold>fold)s?|(?P<check>check)s?|(?P<call>call)s?|(?P<all>all[ -]?in)|"
    r"(?P<raise>raise|bet)s?(?: to)?:?(?: ?\$?(?P<chips>[0-9]{1,9}))?)\b",
    re.IGNORECASE,
)

_AUTOMATIONS = (
    "ANTE_POSTING",
    "BET_COLLECTION",
    "BLIND_OR_STRADDLE_POSTING",
    "HOLE_CARDS_SHOWING_OR_MUCKING",
    "HAND_KILLING",
    "CHIPS_PUSHING",
    "CHIPS_PULLING",
)
"""pokerkit does all but deal the cards, which come from our own deck."""


def parse_action(text: str) -> Choice | None:
    """The last action named in any text; None when there is none. A raise without a number is the smallest one.

    A check is the `Choice` to call: whether it is free, the table knows. `raise_to` is bounded by the table.
    """
    named = list(_ACTION.finditer(text[-ACTION_CHARACTERS_MAX:]))
    if not named:
        return None
    found = named[-1]
    if found["fold"]:
        return Choice("fold")
    if found["all"]:
        return Choice("raise", 10**9)
    if found["raise"]:
        return Choice("raise", int(found["chips"] or 0))
    return Choice("call", -1 if found["check"] else 0)


class Poker:
    """The task. `opponents` are names of `poker_players.PLAYERS`, in the order of their seats, none twice."""

    name = "poker"
    turns_max = TURNS_MAX

    def __init__(
        self,
        *,
        opponents: Sequence[str] = ("rock", "maniac", "station"),
        prefill: str = PREFILL,
        train_size: int = 100_000,
        heldout_size: int = 256,
    ) -> None:
        """Raises ValueError, fit to show a person, when the options make no table."""
        known = ", ".join(PLAYERS)
        if isinstance(opponents, str) or not 1 <= len(opponents) <= len(PLAYERS):
            raise ValueError(f"opponents must be a list of 1 to {len(PLAYERS)} of {known}")
        for player in opponents:
            if player not in PLAYERS or list(opponents).count(player) > 1:
                raise ValueError(f"opponents must be different ones of {known}, not {str(player)[:64]!r}")
        if not isinstance(prefill, str) or len(prefill) > PREFILL_CHARACTERS_MAX:
            raise ValueError(f"prefill must be a text of at most {PREFILL_CHARACTERS_MAX} characters")
        self.prefill = prefill
        self.train_size = whole_number("train_size", train_size, low=1, high=EPISODES_MAX)
        self.heldout_size = whole_number("heldout_size", heldout_size, low=1, high=EPISODES_MAX)
        self._opponents = tuple(opponents)

    def prepare(self) -> None:
        """Play a hand to its end: what pokerkit loads late is loaded then. Raises ValueError when it is missing."""
        try:
            hand = self.sandbox()
            hand.reset(bytes(SEED_BYTES))
            hand.step("all in")
        except ImportError as error:
            raise ValueError(f"poker needs the library pokerkit ({error}); install echo2 with its extras") from error

    def sandbox(self) -> PokerHand:
        """A fresh table."""
        return PokerHand(self._opponents)


def _new_hand(players: int) -> State:
    from pokerkit import Automation, NoLimitTexasHoldem  # a library that a process which plays no poker can do without

    automations = tuple(Automation[name] for name in _AUTOMATIONS)
    blinds, stacks = (SMALL_BLIND, BIG_BLIND), (STACK_CHIPS,) * players
    return NoLimitTexasHoldem.create_state(automations, True, 0, blinds, BIG_BLIND, stacks, players)


class PokerHand:
    """One hand. Seat 0 is the policy; the others follow clockwise. pokerkit counts players from the small blind."""

    def __init__(self, opponents: Sequence[str]) -> None:
        self._names = ("you", *opponents)
        self._state: State | None = None

    def reset(self, seed: bytes) -> Observation:
        """See `sandbox.Sandbox.reset`. Hands in which everyone folds before the policy acts are dealt anew."""
        deal = Dice(seed, "deal")
        self._dice = {name: Dice(seed, name) for name in self._names[1:]}
        self._unreadable = 0
        for _ in range(DEALS_MAX):
            self._deal(deal)
            self._go_on()
            if self._actor() == 0:
                break
        else:
            raise RuntimeError(f"the policy was never asked in {DEALS_MAX} hands")
        places = ("small blind", "big blind") if len(self._names) > 2 else ("big blind", "small blind")
        seats = ", ".join(
            f"{self._name(player)} ({places[player]})" if player < 2 else self._name(player)
            for player in range(len(self._names))
        )
        return Observation(
            f"No-limit Texas hold'em, one hand. Blinds {SMALL_BLIND} and {BIG_BLIND}, {STACK_CHIPS} chips each.\n"
            f"Seats: {seats}.\n{self._asks()}"
        )

    def step(self, action: str) -> Observation:
        """See `sandbox.Sandbox.step`. What cannot be read, or a check of a bet, checks if that is free, else folds."""
        self._check_open()
        choice = parse_action(action)
        owed = self._owed()
        if choice is None or (choice.verb == "call" and choice.raise_to < 0 and owed):
            self._unreadable += 1
            choice = Choice("fold")
        self._act(choice)
        self._go_on()
        return Observation(self._asks()) if self._actor() == 0 else self._end()

    def truncate(self) -> Observation:
        """See `sandbox.Sandbox.truncate`. The hand is folded, or checked down; a pot won so pays nothing."""
        self._check_open()
        assert self._state is not None
        committed = STACK_CHIPS - self._state.stacks[self._player(0)]
        while self._actor() == 0:
            self._act(Choice("fold"))
            self._go_on()
        return self._end(at_most=-committed)

    # the table

    def _deal(self, dice: Dice) -> None:
        count = len(self._names)
        self._offset = dice.below(count)  # the seat of player 0
        self._deck = dice.shuffled(_DECK)
        self._state = _new_hand(count)
        self._holes: dict[int, tuple[str, str]] = {}
        self._board: list[str] = []
        self._raises = 0
        self._folded: set[int] = set()
        self._events: list[str] = []
        for player in range(count):
            hole = self._deck.pop(), self._deck.pop()
            self._holes[self._seat(player)] = hole
            self._state.deal_hole("".join(hole))

    def _go_on(self) -> None:
        """Cards and opponents, until the policy is asked or the hand is over."""
        state = self._state
        assert state is not None
        while state.status and self._actor() != 0:
            seat = self._actor()
            if seat is not None:
                name = self._names[seat]
                self._act(PLAYERS[name](self._spot(seat), self._dice[name]))
                continue
            state.burn_card(self._deck.pop())
            cards = [self._deck.pop() for _ in range(1 if self._board else 3)]
            state.deal_board("".join(cards))
            self._board += cards
            self._raises = 0
            self._events.append(f"{STREETS[len(self._board) - 2].capitalize()}: {' '.join(cards)}.")

    def _act(self, choice: Choice) -> None:
        """Carry out the actor's choice, brought into what the rules allow."""
        state, seat = self._state, self._actor()
        assert state is not None
        assert seat is not None
        owed, verb = self._owed(), choice.verb
        low, high = (
            state.min_completion_betting_or_raising_to_amount,
            state.max_completion_betting_or_raising_to_amount,
        )
        if verb == "raise" and (low is None or high is None or (seat and self._raises >= RAISES_MAX)):
            verb = "call"
        if verb == "fold" and not owed:
            verb = "call"
        says = "You" if seat == 0 else self._names[seat]
        ends = "" if seat == 0 else "s"
        if verb == "fold":
            state.fold()
            self._folded.add(seat)
            self._events.append(f"{says} fold{ends}.")
        elif verb == "call":
            state.check_or_call()
            self._events.append(f"{says} call{ends} {owed}." if owed else f"{says} check{ends}.")
        else:
            assert low is not None
            assert high is not None
            amount = min(max(choice.raise_to, low), high)
            first = not any(state.bets)
            state.complete_bet_or_raise_to(amount)
            self._raises += seat != 0
            what = f"bet{ends} {amount}" if first else f"raise{ends} to {amount}"
            self._events.append(f"{says} {what}{' (all in)' if amount == high else ''}.")

    def _spot(self, seat: int) -> Spot:
        state = self._state
        assert state is not None
        return Spot(
            hole=self._holes[seat],
            board=tuple(self._board),
            pot=state.total_pot_amount,
            to_call=self._owed(),
            stack=state.stacks[self._player(seat)],
            big_blind=BIG_BLIND,
        )

    def _owed(self) -> int:
        """What it costs the actor to stay."""
        assert self._state is not None
        return int(self._state.checking_or_calling_amount or 0)

    # what is said

    def _asks(self) -> str:
        """What happened since the policy last acted, and what it may do now."""
        state = self._state
        assert state is not None
        events, self._events = " ".join(self._events), []
        owed = self._owed()
        low, high = (
            state.min_completion_betting_or_raising_to_amount,
            state.max_completion_betting_or_raising_to_amount,
        )
        options = ["fold", "call"] if owed else ["check"]
        if low is not None:
            options += [f"{'raise to' if any(state.bets) else 'bet'} N ({low} to {high})", "all in"]
        board = " ".join(self._board) or "none"
        return (
            f"{events + chr(10) if events else ''}Your cards: {' '.join(self._holes[0])}. Board: {board}. "
            f"Pot: {state.total_pot_amount}. To call: {owed}. Your chips: {state.stacks[self._player(0)]}.\n"
            f"Reply with one action: {', '.join(options)}."
        )

    def _end(self, *, at_most: int | None = None) -> Observation:
        state = self._state
        assert state is not None
        chips = {seat: int(state.payoffs[self._player(seat)]) for seat in range(len(self._names))}
        reward = chips[0] if at_most is None else min(chips[0], at_most)
        details = {"chips": float(chips[0])}
        details |= {f"chips_{name}": float(chips[seat]) for seat, name in enumerate(self._names) if seat}
        details |= {
            "unreadable_actions": float(self._unreadable),
            "showdowns": float(len(self._names) - len(self._folded) > 1),
        }
        events, self._events, self._state = " ".join(self._events), [], None
        return Observation(
            f"{events}\nThe hand is over: {chips[0]:+d} chips.",
            done=True,
            reward=reward / STACK_CHIPS,
            details=details,
        )

    # seats and players

    def _seat(self, player: int) -> int:
        return (player + self._offset) % len(self._names)

    def _player(self, seat: int) -> int:
        return (seat - self._offset) % len(self._names)

    def _name(self, player: int) -> str:
        return self._names[self._seat(player)]

    def _actor(self) -> int | None:
        """The seat whose turn it is; None while cards are due or when the hand is over."""
        assert self._state is not None
        player = self._state.actor_index
        return None if player is None else self._seat(player)

    def _check_open(self) -> None:
        if self._state is None:
            raise ValueError("the hand is over, or was never dealt")
