"""Mathematical problems: the set that comes with the task, and files of one's own. Judging needs math-verify."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from echo2.tasks.math_problems import INSTRUCTION, OWN_FILE, MathProblems
from echo2.tasks.math_recipe import KINDS, PER_KIND, Problem, problems

RECIPE = list(problems())


@pytest.fixture(scope="module")
def judge():
    pytest.importorskip("math_verify")
    task = MathProblems()
    task.prepare()
    return task


def test_the_file_is_what_the_recipe_makes():
    """Every line, in order; no two problems have the same text."""
    assert OWN_FILE.read_text(encoding="utf-8") == "".join(problem.line + "\n" for problem in RECIPE)
    assert len({problem.problem for problem in RECIPE}) == len(RECIPE) == len(KINDS) * PER_KIND >= 200
    assert set(Counter(problem.kind for problem in RECIPE).values()) == {PER_KIND}


@pytest.mark.parametrize("kind", KINDS)
def test_every_answer_is_what_a_symbolic_algebra_system_makes_of_the_problem(kind):
    """The answer in the file means the same as the expression of the problem's own numbers, worked out by sympy."""
    sympy = pytest.importorskip("sympy")
    math_verify = pytest.importorskip("math_verify")
    names = {**vars(sympy), "x": sympy.Symbol("x", real=True), "y": sympy.Symbol("y", real=True)}

    for problem in RECIPE:
        if problem.kind == kind:
            worked_out = sympy.sympify(eval(problem.check, names))
            read = math_verify.parse(f"${problem.answer}$", [math_verify.LatexExtractionConfig()])
            assert read, problem
            assert math_verify.verify([worked_out], read), (problem, worked_out, read)


def test_hand_worked_problems_of_the_recipe():
    """A few answers by hand, so that recipe and check cannot be wrong in the same way."""
    known = {problem.problem: problem.answer for problem in RECIPE}
    assert known[r"Compute $\frac{8}{6} - \frac{4}{7}$ as a fraction in lowest terms."] == r"\frac{16}{21}"
    assert known["Expand $(x + 2)(3x - 8)$."] == "3x^2 - 2x - 16"
    assert known["In how many ways can 3 of 9 different books be chosen?"] == "84"
    assert known["What is the sum of the first 12 terms of the arithmetic sequence 4, 6, 8, ...?"] == "180"


def test_the_splits_do_not_meet_and_do_not_move():
    """About a fifth is held out, of many kinds; a problem stays where it is when others leave."""
    task = MathProblems()
    train = {task.prompt("train", i).text for i in range(task.train_size)}
    heldout = {task.prompt("heldout", i).text for i in range(task.heldout_size)}
    assert not train & heldout
    assert len(train) + len(heldout) == len(RECIPE)
    assert 0.1 < len(heldout) / len(RECIPE) < 0.3
    kinds = {problem.kind for problem in RECIPE if problem.problem + INSTRUCTION in heldout}
    assert len(kinds) >= len(KINDS) - 3
    with pytest.raises(IndexError):
        task.prompt("heldout", -1)


@pytest.fixture
def file(tmp_path):
    def file(*lines: object):
        path = tmp_path / "own.jsonl"
        path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
        return str(path)

    return file


def own(count: int) -> list[dict[str, str]]:
    return [{"problem": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(count)]


def test_a_file_of_ones_own_is_split_by_its_texts(file):
    """A larger share holds out more, and everything that a smaller one does; blank lines and other keys are passed."""
    sizes = [MathProblems(file(*own(100)), heldout_share=share).heldout_size for share in (0.1, 0.5, 0.9)]
    assert sizes == sorted(sizes)
    assert 0 < sizes[0] < 25 < sizes[1] < 75 < sizes[2] < 100
    task = MathProblems(file("", {**own(1)[0], "level": 5}, "", *own(40)[1:]), heldout_share=0.5)
    assert task.train_size + task.heldout_size == 40


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 3 of own.jsonl is not JSON"),
        ("[" * 100_000, "line 3 of own.jsonl is not JSON"),
        ("[]", 'line 3 of own.jsonl is not an object with "problem" and "answer"'),
        ({"problem": "x"}, 'line 3 of own.jsonl: "answer" must be a text'),
        ({"problem": "", "answer": "1"}, 'line 3 of own.jsonl: "problem" must be a text'),
        ({"problem": "x", "answer": 1}, 'line 3 of own.jsonl: "answer" must be a text'),
        ({"problem": "x", "answer": "1" * 5000}, 'line 3 of own.jsonl: "answer" must be a text'),
    ],
)
def test_a_mistake_in_the_file_names_its_line(file, line, message):
    """And what it should be."""
    with pytest.raises(ValueError, match=message):
        MathProblems(file(*own(2), line))


def test_a_file_that_leaves_a_split_empty_is_refused(file):
    """One problem cannot be both."""
    with pytest.raises(ValueError, match=r"no problem of own\.jsonl is in the"):
        MathProblems(file(*own(1)))


@pytest.mark.parametrize(
    ("answer", "response", "reward"),
    [
        (r"\frac{1}{2}", r"\boxed{0.5}", 1.0),
        (r"\frac{1}{2}", r"It is $\frac{2}{4}$.", 1.0),
        (r"\frac{1}{2}", r"First $\frac{1}{2}$, no: \boxed{\frac{1}{3}}", 0.0),
        (r"2\sqrt{3}", r"\boxed{\sqrt{12}}", 1.0),
        (r"\{1, 2\}", r"\boxed{\{2, 1\}}", 1.0),
        (r"\{1, 2\}", r"\boxed{\{1\}}", 0.0),
        (r"(-\infty, 2] \cup [3, \infty)", r"$\boxed{(-\infty, 2] \cup [3, \infty)}$", 1.0),
        (r"(-\infty, 2]", r"$\boxed{(-\infty, 2)}$", 0.0),
        ("x = 3", r"\boxed{3}", 1.0),
        ("(1, 2)", r"\boxed{(2, 1)}", 0.0),
        ("3x^2 + 1", r"\boxed{1 + 3x^2}", 1.0),
        ("270", "The new price is 270 dollars.", 1.0),
        ("270", "", 0.0),
        ("270", "no idea", 0.0),
    ],
)
def test_answers_are_judged_by_meaning(file, answer, response, reward):
    """Other ways to write the same thing are right."""
    pytest.importorskip("math_verify")
    lines = [{"problem": f"{n}", "answer": answer} for n in range(40)]
    task = MathProblems(file(*lines), heldout_share=0.5)
    task.prepare()
    assert task.score(task.prompt("train", 0), response).reward == reward


def test_only_the_end_of_a_response_is_read(judge):
    """An answer far before the end is none."""
    answer = judge.answer("train", 0)
    assert judge.score(judge.prompt("train", 0), rf"\boxed{{{answer}}}" + " and so on" * 10_000).reward == 0.0


def test_each_sample_earns_what_it_says(judge):
    """The task's own samples, over every problem of the held-out split."""
    for index in range(judge.heldout_size):
        prompt = judge.prompt("heldout", index)
        for response, reward in judge.samples(prompt):
            assert judge.score(prompt, response).reward == reward, prompt


def test_nothing_is_scored_before_the_judge_is_there():
    """The coordinator cannot score by mistake."""
    task = MathProblems()
    with pytest.raises(RuntimeError, match="scorer's process only"):
        task.score(task.prompt("train", 0), "1")


def test_problems_are_frozen_records():
    """A recipe's line is JSON of the two texts only."""
    assert json.loads(Problem("k", "p", "a", "c").line) == {"problem": "p", "answer": "a"}
