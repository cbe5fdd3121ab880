"""A rollout of several turns: what the builder makes the replayer accepts, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from echo2.tasks.episode import Claim, Episode, EpisodeRules, actions_of, fault, replay

STOP = 0


class Letters:
    """A token a character; the stop token is no text."""

    def encode_plain(self, text):
        return [ord(letter) for letter in text]

    def decode(self, tokens):
        return ["".join(chr(token) for token in turn if token != STOP) for turn in tokens]


def drawn(text, *, stop=True):
    return [*map(ord, text), *([STOP] if stop else [])]


def rules(**changes):
    known = {"tokens_max": 30, "turns_max": 4, "turn_tokens_max": 6, "stop_ids": (STOP,)}
    return EpisodeRules(**known | {"turn_prefix": (60,), "turn_suffix": (62,)} | changes)


def built(episode):
    return Claim(tuple(episode.tokens), episode.spans, episode.finish)


# Worked by hand.


def test_two_turns_by_hand():
    """Turn, prefix + answer + suffix, turn; the game is over: finish stop, three spans, t counts drawn tokens only."""
    episode = Episode(rules(), Letters())
    assert episode.said(drawn("hi")) == "hi"
    assert episode.drawn_count == 3
    assert episode.answered("ok", done=False) == (60, 111, 107, 62)
    assert episode.room == 6
    assert episode.said(drawn("bye")) == "bye"
    assert episode.answered("", done=True) == ()
    assert episode.tokens == [104, 105, 0, 60, 111, 107, 62, 98, 121, 101, 0]
    assert (episode.spans, episode.finish, episode.truncated) == ((3, 4, 4), "stop", False)
    assert episode.drawn_count == 7
    assert episode.actions == ["hi", "bye"]


def test_one_turn_has_no_spans():
    """So a single-turn rollout and an episode of one turn look the same."""
    episode = Episode(rules(), Letters())
    episode.said(drawn("x"))
    episode.answered("", done=True)
    assert built(episode) == Claim((120, 0), (), "stop")


def test_a_turn_that_is_as_long_as_it_may_be_is_cut_off():
    """It is no action; the environment is to be told."""
    episode = Episode(rules(), Letters())
    assert episode.said(drawn("abcdef", stop=False)) is None
    assert (episode.actions, episode.finish, episode.truncated) == ([], "length", True)


def test_the_last_turn_allowed_is_truncated_unless_the_game_ends():
    """turns_max reached: finish stop, for the last token is a stop token."""
    episode = Episode(rules(turns_max=1), Letters())
    episode.said(drawn("x"))
    assert episode.answered("more", done=False) == ()
    assert (episode.finish, episode.truncated) == ("stop", True)


@pytest.mark.parametrize(("tokens_max", "goes_on"), [(6, False), (7, True)])
def test_an_answer_that_leaves_no_token_to_draw_is_not_inserted(tokens_max, goes_on):
    """Two tokens drawn, four to insert: with six in all nothing is left, with seven one."""
    episode = Episode(rules(tokens_max=tokens_max), Letters())
    episode.said(drawn("x"))
    assert bool(episode.answered("ok", done=False)) is goes_on
    assert (episode.finish, episode.truncated) == ((None, False) if goes_on else ("length", True))
    assert not goes_on or episode.room == 1


@pytest.mark.parametrize(
    ("turn", "why"),
    [
        ([], "0 tokens"),
        (drawn("abcdef"), "7 tokens"),
        ([97, STOP, STOP], "before the end"),
        (drawn("ab", stop=False), "without a stop token"),
    ],
)
def test_what_is_no_turn(turn, why):
    """Empty, too long, a stop token inside, or cut short."""
    with pytest.raises(ValueError, match=why):
        Episode(rules(), Letters()).said(turn)


def test_nobody_speaks_out_of_turn():
    """Neither twice in a row, nor after the end."""
    episode = Episode(rules(), Letters())
    with pytest.raises(ValueError, match="environment's turn"):
        episode.answered("x", done=False)
    episode.said(drawn("x"))
    with pytest.raises(ValueError, match="policy's turn"):
        episode.said(drawn("x"))
    episode.answered("x", done=True)
    with pytest.raises(ValueError, match="environment's turn"):
        episode.answered("x", done=True)


# Built and replayed.


class Echo:
    """An environment whose answer tells the action's length, and which is over after `turns`."""

    def __init__(self, turns, padding):
        self.turns, self.padding = turns, padding

    def answer(self, number, action):
        return f"{len(action)}{self.padding}", number + 1 >= self.turns

    def play(self, actions):
        answers = [self.answer(number, action) for number, action in enumerate(actions)]
        for number, (_, done) in enumerate(answers):
            if done:
                return [text for text, _ in answers[: number + 1]], True
        return [text for text, _ in answers], False


@st.composite
def episodes(draw):
    """Rules, an environment, and an episode that was built with them."""
    allowed = rules(
        tokens_max=draw(st.integers(1, 40)), turns_max=draw(st.integers(1, 5)), turn_tokens_max=draw(st.integers(1, 8))
    )
    environment = Echo(draw(st.integers(1, 6)), draw(st.text("xy", max_size=3)))
    episode = Episode(allowed, Letters())
    while episode.finish is None:
        letters = draw(st.text("abc", max_size=episode.room))
        turn = drawn(letters, stop=len(letters) < episode.room)
        action = episode.said(turn)
        if action is not None:
            text, done = environment.answer(len(episode.actions) - 1, action)
            episode.answered(text, done=done)
    return allowed, environment, episode


def judged(claim, allowed, environment):
    """As the coordinator does it: what is seen at once, then the replay. None when it is accepted."""
    found = fault(claim, allowed)
    if found is not None:
        return found
    observations, done = environment.play(actions_of(claim, allowed, Letters()))
    again = replay(claim, allowed, Letters(), observations, done=done)
    return again if isinstance(again, str) else None


@given(episodes())
def test_what_the_builder_makes_the_replayer_accepts(made):
    """With the same actions, end and truncation."""
    allowed, environment, episode = made
    claim = built(episode)
    assert judged(claim, allowed, environment) is None
    actions = actions_of(claim, allowed, Letters())
    assert actions == episode.actions
    observations, done = environment.play(actions)
    again = replay(claim, allowed, Letters(), observations, done=done)
    assert (again.tokens, again.spans, again.finish, again.truncated) == (
        episode.tokens,
        episode.spans,
        episode.finish,
        episode.truncated,
    )


@given(episodes(), st.data())
def test_any_other_inserted_token_is_refused(made, data):
    """The policy must have seen what the environment said, to the token."""
    allowed, environment, episode = made
    spans = episode.spans or (len(episode.tokens),)
    starts = [sum(spans[:number]) for number in range(len(spans))]
    places = [p for n, start in enumerate(starts) if n % 2 for p in range(start, start + spans[n])]
    assume(places)
    place = data.draw(st.sampled_from(places))
    tokens = list(episode.tokens)
    tokens[place] = data.draw(st.integers(1, 200).filter(lambda token: token != tokens[place]))
    reason = judged(Claim(tuple(tokens), episode.spans, episode.finish), allowed, environment)
    assert reason
    assert "inserted" in reason


@given(episodes(), st.data())
def test_any_other_span_is_refused(made, data):
    """One length changed, one taken away, one more, or one said where none is due."""
    allowed, environment, episode = made
    spans = list(episode.spans)
    change = data.draw(st.sampled_from(["length", "drop", "add", "move"] if spans else ["add"]))
    place = data.draw(st.integers(0, max(len(spans) - 1, 0)))
    if change == "length":
        spans[place] = data.draw(st.integers(0, 50).filter(lambda length: length != spans[place]))
    elif change == "drop":
        del spans[place]
    elif change == "add":
        spans.insert(place, data.draw(st.integers(0, 50)))
    else:
        other = data.draw(st.integers(0, len(spans) - 1).filter(lambda index: index != place))
        assume(spans[place] > 0)
        spans[place] -= 1
        spans[other] += 1
    assert judged(Claim(tuple(episode.tokens), tuple(spans), episode.finish), allowed, environment)


@given(episodes())
def test_the_other_finish_is_refused(made):
    """Why an episode ended is not a matter of opinion."""
    allowed, environment, episode = made
    other = "stop" if episode.finish == "length" else "length"
    assert judged(Claim(tuple(episode.tokens), episode.spans, other), allowed, environment)


@given(episodes(), st.data())
def test_an_episode_cut_short_or_drawn_out_is_refused(made, data):
    """Turns left out at the end, a turn more, a token more or less."""
    allowed, environment, episode = made
    tokens, spans = list(episode.tokens), list(episode.spans)
    change = data.draw(st.sampled_from(["shorter", "longer", "turn less", "turn more"]))
    whole = spans or [len(tokens)]
    if change == "shorter":
        tokens, whole = tokens[:-1], [*whole[:-1], whole[-1] - 1]
    elif change == "longer":
        tokens, whole = [*tokens, 97], [*whole[:-1], whole[-1] + 1]
    elif change == "turn less":
        assume(len(whole) > 1)
        whole = whole[:-2]
        tokens = tokens[: sum(whole)]
    else:
        tokens, whole = [*tokens, 60, 62, 97, STOP], [*whole, 2, 2]
    spans = whole if len(whole) > 1 else []
    assert judged(Claim(tuple(tokens), tuple(spans), episode.finish), allowed, environment)


def test_a_fault_is_named():
    """What can be seen without playing is said in words."""
    ok = (104, 0, 60, 62, 105, 0)
    assert fault(Claim(ok, (2, 2, 2), "stop"), rules()) is None
    for claim, words in (
        (Claim(ok, (2, 2), "stop"), "begins and ends with a turn"),
        (Claim(ok, (6,), "stop"), "one turn has no spans"),
        (Claim(ok, (2, 2, 1), "stop"), "cover 5 of 6"),
        (Claim(ok, (1, 3, 2), "stop"), "turn 1 does not end with a stop token"),
        (Claim((104, 0, 60, 0, 0, 0), (2, 2, 2), "stop"), "before the end of turn 2"),
        (Claim((97,) * 7, (), "length"), "turn 1 has 7 tokens"),
        (Claim((97,) * 31, (), "length"), "at most 30"),
        (Claim(ok * 3, (2, 2) * 4 + (2,), "stop"), "at most 4"),
    ):
        assert words in fault(claim, rules())
