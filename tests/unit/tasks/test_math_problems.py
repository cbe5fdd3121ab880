"""Mathematical problems: the set that comes with the task, and files of one's own. Judging needs math-verify."""

from __future__ import annotations

import json
import re
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
    """A recipe's line is JSON of the two texts and the answer's form only."""
    line = Problem("k", "p", "a", "c", "set").line
    assert json.loads(line) == {"problem": "p", "answer": "a", "form": "set"}


def copies(problem: str) -> list[str]:
    """What of a problem may be given back as its answer: its formulas, as they are and altered a little."""
    found = []
    for formula in re.findall(r"\$([^$]+)\$", problem):
        swapped = re.sub(r"(.+) ([+-]) (.+)", r"\3 \2 \1", formula)
        found += [formula, formula.replace(r"\frac", r"\dfrac"), f"{formula} + 0", rf"1 \cdot {formula}", swapped]
        found += [rf"\left({formula}\right)", f"S = {formula}", rf"\frac{{{formula}}}{{1}}", f"{formula} = {formula}"]
        if plain := re.sub(r"\\frac\{(\d+)\}\{(\d+)\}", r"\1/\2", formula).replace(r"\sqrt", "sqrt"):
            found += [plain, f"{plain}+0"]
    return found


def test_no_part_of_a_problem_of_the_set_is_its_answer(judge):
    """Each formula of each problem, as it is, with 0 added, multiplied by 1, swapped, over 1, in brackets."""
    for split, size in (("train", judge.train_size), ("heldout", judge.heldout_size)):
        for index in range(size):
            prompt = judge.prompt(split, index)
            problem = prompt.text.removesuffix(INSTRUCTION)
            answers = [shape % text for text in copies(problem) for shape in (r"\boxed{%s}", "It is $%s$.")]
            for answer in (*answers, problem, prompt.text, rf"\boxed{{{problem}}}"):
                assert judge.score(prompt, answer).reward == 0.0, (problem, answer)


def test_an_expression_of_the_prompt_is_no_answer_where_no_form_is_known(file):
    """The set's own problems without their forms: no formula earns, in no way of writing it, and every answer does."""
    pytest.importorskip("math_verify")
    task = MathProblems(file(*({"problem": p.problem, "answer": p.answer} for p in RECIPE[::3])))
    task.prepare()
    for index in range(task.train_size):
        prompt = task.prompt("train", index)
        assert task.score(prompt, rf"\boxed{{{task.answer('train', index)}}}").reward == 1.0
        for formula in re.findall(r"\$([^$]+)\$", prompt.text):
            for text in (formula, formula.replace(r"\frac", r"\dfrac"), f"S = {formula}", rf"\left({formula}\right)"):
                assert task.score(prompt, rf"\boxed{{{text}}}").reward == 0.0, (prompt, text)


@pytest.mark.parametrize(
    ("problem", "answer", "response", "reward"),
    [
        ("What is $3 + 4$?", "7", r"\boxed{3+4}", 0.0),
        ("What is $3 + 4$?", "7", r"\boxed{3 + 4 = 7}", 1.0),
        ("What is 3 * 4?", "12", r"\boxed{3 \cdot 4}", 0.0),
        ("Write 0.5 as a fraction.", r"\frac{1}{2}", r"\boxed{0.5}", 0.0),
        ("Write 0.5 as a fraction.", r"\frac{1}{2}", r"\boxed{\frac12}", 1.0),
        (r"Which is larger, $\frac{1}{2}$ or $\frac{1}{3}$?", r"\frac{1}{2}", r"\boxed{1/2}", 1.0),
        ("How many of 7 are 7?", "7", r"\boxed{7}", 1.0),
        ("Which is larger, $3$ or $7$?", "7", "$7$", 1.0),
        ("Which is larger, $3$ or $7$?", "7", "Which is larger, $3$ or $7$?", 0.0),
        ("Reduce $(x+1)(x-1)/(x-1)$.", "x + 1", r"\boxed{x+1}", 1.0),
        ("Find $x$ where $2x + 3 = 5$.", "x = 1", r"\boxed{2x+3=5}", 0.0),
    ],
)
def test_what_stands_in_the_prompt_is_right_only_as_it_is_written_in_the_answer(
    file, problem, answer, response, reward
):
    """A question means the same as its answer; 1/2 and \\frac{1}{2} are the same way of writing it."""
    pytest.importorskip("math_verify")
    task = MathProblems(file(*({"problem": problem + " " * n, "answer": answer} for n in range(40))), heldout_share=0.5)
    task.prepare()
    assert task.score(task.prompt("train", 0), response).reward == reward


TWO_GUESSES = [
    "{a} or {b}",
    "the answer is {a} or {b}",
    "the answer is x = {a} or x = {b}",
    "${a}$, ${b}$",
    "${a}$ ${b}$",
    r"\boxed{{{a}|{b}}}",
    r"\boxed{{{a} \approx {b}}}",
    r"\boxed{{{a} = {b}}}",
    r"\boxed{{{a}; {b}}}",
    r"\boxed{{x = {a}, x = {b}}}",
    r"\boxed{{x = {a} \text{{ or }} x = {b}}}",
    r"\boxed{{{a}, {b}}}",
    r"\boxed{{{a} \text{{ or }} {b}}}",
    r"\boxed{{{a} \vee {b}}}",
    r"\boxed{{{a} \quad {b}}}",
    r"\boxed{{{a} \to {b}}}",
    r"\boxed{{{a} \ne {b}}}",
    r"\boxed{{{a}}}${b}$",
    r"$\boxed{{{a}}}$ ${b}$",
    r"$\boxed{{{a}}} \approx {b}$",
]


@pytest.mark.parametrize("form", ["", "number"])
@pytest.mark.parametrize("answer", ["12", r"\frac{1}{2}"])
def test_two_guesses_in_one_answer_earn_nothing(file, answer, form):
    """Whichever comes first, in a box and without."""
    pytest.importorskip("math_verify")
    lines = [{"problem": f"p{n}", "answer": answer, "form": form} for n in range(40)]
    task = MathProblems(file(*lines), heldout_share=0.5)
    task.prepare()
    for shape in TWO_GUESSES:
        for a, b in ((answer, "77"), ("77", answer)):
            assert task.score(task.prompt("train", 0), shape.format(a=a, b=b)).reward == 0.0, (shape, a, b)


@pytest.mark.parametrize("form", ["", "number"])
@pytest.mark.parametrize(
    ("response", "reward"),
    [
        (r"\boxed{77} no, \boxed{12}", 1.0),
        (r"\boxed{12} no, \boxed{77}", 0.0),
        (r"\boxed{12", 0.0),
        (r"\boxed{12} and then \boxed{77", 0.0),
        ("answer: 77\nanswer: 12", 1.0),
        (r"\boxed{12\%}", 0.0),
        (r"\boxed{12}\%", 0.0),
        (r"\boxed{1200\%}", 1.0),
        (r"\boxed{12 \approx 12.0}", 1.0),
        (r"So $\boxed{12}$ hours. Indeed $3 + 9 = 12$.", 1.0),
        (r"\[ \boxed{12\text{ hours}} \]", 1.0),
        ("It costs $12.", 1.0),
        (r"\boxed{12 \text{ min}}", 1.0),
        (r"\boxed{\min(12, 77)}", 0.0),
        (r"\boxed{12 \wedge 77}", 0.0),
        (r"\boxed{77 \wedge 12}", 0.0),
        (r"\boxed{12_{77}}", 0.0),
        (r"\boxed{12\text{77}}", 0.0),
        (r"\boxed{77 \not= 12}", 0.0),
        (r"\boxed{x=77 x=12}", 0.0),
        (r"\boxed{\boxed{12} 77}", 0.0),
    ],
)
def test_the_last_box_counts(file, response, reward, form):
    """One that is not closed is none, and 12% is not 12."""
    pytest.importorskip("math_verify")
    lines = [{"problem": f"p{n}", "answer": "12", "form": form} for n in range(40)]
    task = MathProblems(file(*lines), heldout_share=0.5)
    task.prepare()
    assert task.score(task.prompt("train", 0), response).reward == reward


@pytest.mark.parametrize(
    ("form", "answer", "message"),
    [("sum", "1", '"form" must be one of number, fraction,'), ("fraction", r"\frac{2}{4}", "is not in the form")],
)
def test_a_form_that_is_none_or_not_the_answers_own_names_its_line(file, form, answer, message):
    """Before a run, not in the middle of it."""
    with pytest.raises(ValueError, match=f"line 3 of own.jsonl.*{message}"):
        MathProblems(file(*own(2), {"problem": "x", "answer": answer, "form": form}))
