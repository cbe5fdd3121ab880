"""Mask, returns and advantages of a small batch of every kind of task, worked by hand from text to numbers.

Each case is one group of rollouts as the coordinator would admit them: the rewards are the task's own, the advantages
are (r - mean) / standard deviation (of the population), broadcast over the tokens that were drawn.
"""

from __future__ import annotations

import numpy as np
import pytest

from echo2.learner.batch import collate, fault
from echo2.learner.interfaces import Batch, Group
from echo2.p2p.codec import pack_logprobs, pack_tokens
from echo2.p2p.messages import AdmittedRollout
from echo2.tasks.arithmetic import Arithmetic
from echo2.tasks.poker import Poker
from echo2.tasks.race import Race
from echo2.tasks.word_problems import WordProblems

PEER = "1" * 52


def admitted(sample, prompt, tokens, reward, spans=()):
    """Token ids are written out by the case; a drawn token's log-probability is -1, an inserted one's 0."""
    drawn = np.repeat(np.arange(len(spans) or 1) % 2 == 0, spans or (len(tokens),))
    return AdmittedRollout(
        sequence=sample + 1,
        lease_id=bytes(16),
        ordinal=0,
        sample=sample,
        peer=PEER,
        version=0,
        prompt_tokens=pack_tokens(prompt),
        tokens=pack_tokens(tokens),
        logprobs=pack_logprobs(np.where(drawn, -1.0, 0.0)),
        finish="stop",
        temperature=1.0,
        reward=reward,
        spans=spans,
    )


def arrays(*rollouts):
    return collate(Batch(step=0, groups=(Group(ordinal=0, rollouts=rollouts),)))


def spelled(mask):
    """A row of the mask as text: x where the loss acts."""
    return "".join("x" if each else "." for each in mask)


def test_arithmetic_by_hand():
    """`12+2=`: 14 is right, 16 is wrong, `1` is wrong. Mean 1/3, deviation sqrt(2)/3: +1.4142, -0.7071, -0.7071."""
    task = Arithmetic()
    prompt = next(p for p in (task.prompt("train", i) for i in range(task.train_size)) if p.text == "12+2=")
    rewards = [task.score(prompt, response).reward for response in ("14", "16", "1")]
    assert rewards == [1.0, 0.0, 0.0]
    ids = [1, 2, 10, 2, 11]  # one a character
    made = arrays(
        admitted(0, ids, [1, 4, 12], rewards[0]),
        admitted(1, ids, [1, 6, 12], rewards[1]),
        admitted(2, ids, [1, 12], rewards[2]),
    )
    assert [spelled(row) for row in made.mask] == [".....xxx", ".....xxx", ".....xx."]
    assert made.advantages.tolist() == pytest.approx([2**0.5, -(2**-0.5), -(2**-0.5)], abs=1e-3)


def test_word_problems_by_hand():
    """The answer is begun for the model; the last number counts. Two right of four: +1, +1, -1, -1."""
    task = WordProblems()
    prompt = task.prompt("train", 0)
    answer = task.answer("train", 0)
    rewards = [task.score(prompt, text).reward for text in (f" {answer}.", f" {answer}.0", " 1", "")]
    assert rewards == [1.0, 1.0, 0.0, 0.0]
    made = arrays(*(admitted(number, [7, 7], [5, 12], reward) for number, reward in enumerate(rewards)))
    assert [spelled(row) for row in made.mask] == ["..xx"] * 4
    assert made.advantages.tolist() == pytest.approx([1, 1, -1, -1], abs=1e-3)


def play(game, seed, actions):
    """Texts and rewards of an episode."""
    said = [game.reset(seed)]
    for action in actions:
        said.append(game.step(action))
    return said


def test_race_by_hand():
    """A win in two turns, a loss by the rules, a broken rule: 1, 0.2, 0; only what the policy said carries loss.

    Mean 0.4, deviation sqrt((0.36 + 0.04 + 0.16) / 3) = 0.43205: +1.38873, -0.46291, -0.92582.
    """
    seed = bytes([8]) * 32
    win, loss, broken = (play(Race().sandbox(), seed, actions) for actions in (["25", "29"], ["26"], ["24"]))
    assert [said.text for said in win[:2]] == ["21+3=", "25+3="]
    returns = [sum(each.reward for each in said) for said in (win, loss, broken)]
    assert returns == [1.0, 0.2, 0.0]
    prompt = [2, 1, 10, 3, 11]
    made = arrays(
        admitted(0, prompt, [2, 5, 12, 2, 5, 10, 3, 11, 2, 9, 12], returns[0], (3, 5, 3)),
        admitted(1, prompt, [2, 6, 12], returns[1]),
        admitted(2, prompt, [2, 4, 12], returns[2]),
    )
    assert [spelled(row) for row in made.mask] == [".....xxx.....xxx", ".....xxx........", ".....xxx........"]
    assert made.advantages.tolist() == pytest.approx([1.38873, -0.46291, -0.92582], abs=1e-3)
    assert made.sampler_logprobs[0].tolist() == [0.0] * 5 + [-1.0] * 3 + [0.0] * 5 + [-1.0] * 3


def test_poker_by_hand():
    """Folding at once costs nothing (0), raising to 8 and folding costs 8 of 100 chips (-0.08): +1 and -1."""
    seed = bytes(32)
    folded, raised = (play(Poker().sandbox(), seed, actions) for actions in (["fold"], ["raise to 8", "fold"]))
    returns = [sum(each.reward for each in said) for said in (folded, raised)]
    assert returns == [0.0, -0.08]
    assert dict(raised[-1].details)["chips_maniac"] == 10.0
    made = arrays(
        admitted(0, [7, 7, 7], [1, 12], returns[0]),
        admitted(1, [7, 7, 7], [2, 2, 12, 8, 8, 8, 8, 1, 12], returns[1], (3, 4, 2)),
    )
    assert [spelled(row) for row in made.mask] == ["...xx.......", "...xxx....xx"]
    assert made.advantages.tolist() == pytest.approx([1, -1], abs=5e-2)


def test_spans_that_do_not_cover_the_response_are_no_batch():
    """Checked again here, as everything is that would move the mask."""
    good = admitted(0, [7], [1, 12, 8, 2, 12], 1.0, (2, 1, 2))
    assert fault(good, vocabulary_size=20, context_tokens=32) is None
    for spans in ((2, 1, 1), (2, 3), (5, 0, 1)):
        bad = good.model_copy(update={"spans": spans})
        assert "spans" in fault(bad, vocabulary_size=20, context_tokens=32)
