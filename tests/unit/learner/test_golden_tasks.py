"""Mask, returns and advantages of a small batch of every kind of task, worked by hand from text to numbers.

Each case is one group of rollouts as the coordinator would admit them: the rewards are the task's own, the advantages
are (r - mean) / standard deviation (of the population), broadcast over the tokens that were drawn.
"""

from __future__ import annotations

import textwrap

import numpy as np
import pytest

from echo2.learner.batch import collate, fault
from echo2.learner.interfaces import Batch, Group
from echo2.p2p.codec import pack_logprobs, pack_tokens
from echo2.p2p.messages import AdmittedRollout
from echo2.tasks.arithmetic import Arithmetic
from echo2.tasks.catalog import CLASSES
from echo2.tasks.file_task import FileTask
from echo2.tasks.math_problems import INSTRUCTION, MathProblems
from echo2.tasks.poker import Poker
from echo2.tasks.race import Race
from echo2.tasks.reasoning_gym_task import ReasoningGymTask
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


def training_prompt(task, text):
    return next(p for p in (task.prompt("train", i) for i in range(task.train_size)) if p.text == text)


def test_math_by_hand():
    """8/6 - 4/7 = 56/42 - 24/42 = 16/21 in lowest terms; 32/42 is not. Two right of five: 1.22474, -0.81650.

    Mean 0.4, deviation sqrt(0.4 * 0.6) = 0.48990; all that a response says is drawn, its reasoning too.
    """
    pytest.importorskip("math_verify")
    task = MathProblems()
    task.prepare()
    prompt = training_prompt(task, r"Compute $\frac{8}{6} - \frac{4}{7}$ as a fraction in lowest terms." + INSTRUCTION)
    responses = (
        r"\boxed{\frac{16}{21}}",
        r"So \boxed{16/21}.",
        r"\boxed{\frac{4}{1}}",
        "I do not know.",
        "",
    )
    rewards = [task.score(prompt, response).reward for response in responses]
    assert rewards == [1.0, 1.0, 0.0, 0.0, 0.0]
    ids = ([3, 12], [4, 5, 3, 12], [3, 12], [4, 12], [12])
    made = arrays(*(admitted(number, [7, 7], each, rewards[number]) for number, each in enumerate(ids)))
    assert [spelled(row) for row in made.mask] == ["..xx..", "..xxxx", "..xx..", "..xx..", "..x..."]
    assert made.advantages.tolist() == pytest.approx([1.22474, 1.22474, -0.81650, -0.81650, -0.81650], abs=1e-4)


def test_reasoning_gym_by_hand():
    """42 - 25 = 17: said plainly 1; among five characters, two of which it is, 2/5; not said, 0.

    Mean 1.4/3, squares of the distances 0.28444, 0.00444, 0.21778, deviation sqrt(0.50667/3) = 0.41096.
    """
    pytest.importorskip("reasoning_gym")
    digits = {"min_digits": 2, "max_digits": 2, "min_terms": 2, "max_terms": 2}
    task = ReasoningGymTask("chain_sum", digits, train_size=8, heldout_size=2)
    task.prepare()
    prompt = training_prompt(task, "State the final answer to the following arithmetic problem: 42 - 25 =")
    rewards = [task.score(prompt, response).reward for response in (" 17", "is 17", "no")]
    assert rewards == [1.0, 0.4, 0.0]
    made = arrays(
        admitted(0, [7, 7, 7], [9, 12], rewards[0]),
        admitted(1, [7, 7, 7], [5, 9, 12], rewards[1]),
        admitted(2, [7, 7, 7], [6, 12], rewards[2]),
    )
    assert [spelled(row) for row in made.mask] == ["...xx.", "...xxx", "...xx."]
    assert made.advantages.tolist() == pytest.approx([1.29777, -0.16222, -1.13555], abs=1e-4)


def test_file_by_hand(tmp_path):
    """Right 1, one off 0.5, else -1.5; how the answer begins is prompt, so no loss acts on it.

    Mean 0, squares of the distances 1, 0.25, 2.25, deviation sqrt(3.5/3) = 1.08012: 0.92582, 0.46291, -1.38873.
    """
    path = tmp_path / "own.py"
    path.write_text(
        textwrap.dedent("""
            def prompts():
                return [{"prompt": f"{n}+{n}", "prefill": "=", "heldout": n > 2, "answer": 2 * n} for n in range(4)]

            def score(example, response):
                away = abs(int(response) - example["answer"]) if response.isdigit() else 9
                return {0: 1, 1: 0.5}.get(away, -1.5)
        """)
    )
    task = FileTask(str(path))
    task.prepare()
    prompt = task.prompt("train", 2)
    assert (prompt.text, prompt.prefill) == ("2+2", "=")
    rewards = [task.score(prompt, response).reward for response in ("4", "5", "four")]
    assert rewards == [1.0, 0.5, -1.5]
    ids = [2, 10, 2, 11]  # 2+2 and, begun for the policy, =
    made = arrays(
        admitted(0, ids, [4, 12], rewards[0]),
        admitted(1, ids, [5, 12], rewards[1]),
        admitted(2, ids, [6, 8, 9, 3, 12], rewards[2]),
    )
    assert [spelled(row) for row in made.mask] == ["....xx...", "....xx...", "....xxxxx"]
    assert made.advantages.tolist() == pytest.approx([0.92582, 0.46291, -1.38873], abs=1e-4)


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


def test_every_task_of_the_catalogue_has_a_case():
    """A new task needs its golden numbers too."""
    assert {f"test_{name.replace('-', '_')}_by_hand" for name in CLASSES} <= set(globals())


def test_spans_that_do_not_cover_the_response_are_no_batch():
    """Checked again here, as everything is that would move the mask."""
    good = admitted(0, [7], [1, 12, 8, 2, 12], 1.0, (2, 1, 2))
    assert fault(good, vocabulary_size=20, context_tokens=32) is None
    for spans in ((2, 1, 1), (2, 3), (5, 0, 1)):
        bad = good.model_copy(update={"spans": spans})
        assert "spans" in fault(bad, vocabulary_size=20, context_tokens=32)
