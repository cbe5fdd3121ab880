"""Data sets of reasoning_gym, in this process where that is harmless and in the worker where it is not."""

from __future__ import annotations

import pytest

from echo2.tasks.reasoning_gym_task import ReasoningGymTask, is_arithmetic
from echo2.tasks.scorer import SPECS_MAX, ScoreItem, TaskUnusable, open_scorer
from echo2.tasks.task import TaskSpec

UNUSABLE = {"composite": "Must specify at least one dataset"}
"""Data sets that do not load without options, and what they say."""


def spec_of(dataset: str, **options) -> TaskSpec:
    return TaskSpec("reasoning_gym", {"dataset": dataset, "train_size": 6, "heldout_size": 3, **options})


def names() -> list[str]:
    factory = pytest.importorskip("reasoning_gym.factory")
    return sorted(factory.DATASETS)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1 + 2*(3 - 4)",
        "24",
        "x**2/2 + C",
        "exp(-2*x)*sin(3*x)",
        "1.5e-3*x",
        "-.5",
        "2^3",
        "Rational(1, 2)",
        "x = 3",
        "x**2*y**3 - 4*x**(1/2)",
    ],
)
def test_arithmetic_passes(text):
    """Numbers, operators, one-letter variables, known functions."""
    assert is_arithmetic(text)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "exec(chr(49))",
        "x.__class__",
        "x .free_symbols",
        "(1).real",
        "1..real",
        "[1]",
        "{x}",
        "'a'",
        '"a"',
        "lambda: 1",
        "x; y",
        "a:=1",
        "open(1)",
        "eval(x)",
        "sympify(x)",
        "\u2113",
        "1\\\n",
        "1 #",
        "`x`",
        "getattr(x, y)",
        "1 if x else 2",
        "@",
        "9**9**9",
        "9**(9**9)",
        "2^-2^9",
        "1+" * 3000 + "1",
    ],
)
def test_code_does_not(text):
    """Attributes, other names, texts, lists, statements, other scripts."""
    assert not is_arithmetic(text)


def test_training_and_heldout_entries_follow_one_another_and_do_not_move():
    """Held-out entry k is entry train_size + k of the library's data set with the same seed."""
    gym = pytest.importorskip("reasoning_gym")
    task = ReasoningGymTask("chain_sum", {"max_terms": 3}, seed=7, train_size=6, heldout_size=3)
    task.prepare()
    library = gym.create_dataset("chain_sum", seed=7, size=9, max_terms=3)
    texts = [task.prompt("train", i).text for i in range(6)] + [task.prompt("heldout", i).text for i in range(3)]
    assert texts == [library[i]["question"] for i in range(9)]
    [(answer, _)] = task.samples(task.prompt("heldout", 2))
    assert answer == library[8]["answer"]
    assert task.score(task.prompt("heldout", 2), f" {answer}\n").reward == 1.0
    for split, index in (("train", 6), ("heldout", 3), ("train", -1)):
        with pytest.raises(IndexError):
            task.prompt(split, index)


def test_a_data_set_whose_scorer_takes_anything_gets_another():
    """The entry's own answer, and nothing else."""
    pytest.importorskip("reasoning_gym")
    task = ReasoningGymTask("game_of_life_halting", train_size=2, heldout_size=1)
    task.prepare()
    prompt = task.prompt("train", 0)
    [(answer, _)] = task.samples(prompt)
    assert [task.score(prompt, text).reward for text in (answer, "True!", "")] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        ("chain_summ", {}, "no data set 'chain_summ'; did you mean 'chain_sum'"),
        ("chain_sum", {"max_term": 3}, "has no option 'max_term'; did you mean 'max_terms'"),
        ("chain_sum", {"min_terms": -1}, "refuses its options: "),
        ("chain_sum", {"min_terms": "many"}, "refuses its options: "),
    ],
)
def test_a_wrong_name_or_option_is_named(dataset, options, message):
    """By the task, or by the library."""
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ValueError, match=message):
        ReasoningGymTask(dataset, options).prepare()


def test_shots_are_further_entries_with_their_answers_and_every_answer_begins_alike():
    """Neither trained on nor held out; the response still is the bare answer."""
    pytest.importorskip("reasoning_gym")
    plain, shown = (
        ReasoningGymTask("chain_sum", {"max_terms": 2}, train_size=3, heldout_size=2, **more)
        for more in ({}, {"shots": 2, "prefill": "Answer:"})
    )
    for task in (plain, shown):
        task.prepare()
    for split, index in (("train", 0), ("train", 2), ("heldout", 1)):
        bare, prompt = plain.prompt(split, index), shown.prompt(split, index)
        examples = [shown._at(5), shown._at(6)]
        before = "".join(f"{entry['question']}\nAnswer: {entry['answer']}\n\n" for entry in examples)
        assert (bare.prefill, prompt.prefill, prompt.text) == ("", "Answer:", before + bare.text)
        [(answer, _)] = shown.samples(prompt)
        assert [(answer, 1.0)] == plain.samples(bare)
        assert shown.score(prompt, f" {answer}").reward == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shots": 17}, "shots = 17 must be a whole number from 0 to 16"),
        ({"shots": True}, "shots = True must be"),
        ({"prefill": "x" * 257}, "prefill = .* must be a text of 1 to 256"),
        ({"prefill": 3}, "prefill = '3' must be a text"),
    ],
)
def test_wrong_shots_and_prefills_are_refused(options, message):
    """Before anything is loaded."""
    with pytest.raises(ValueError, match=message):
        ReasoningGymTask("chain_sum", **options)


def test_a_data_set_without_answers_has_nothing_to_show():
    """It says which option to leave out."""
    pytest.importorskip("reasoning_gym")
    task = ReasoningGymTask("countdown", shots=1)
    task.prepare()
    task._entries = [{"question": "?", "answer": None}] * 3000
    with pytest.raises(ValueError, match="leave shots out"):
        task._shot(0)


def test_nothing_is_made_before_the_library_is_there():
    """The coordinator cannot make or score a puzzle by mistake."""
    task = ReasoningGymTask("chain_sum")
    with pytest.raises(RuntimeError, match="scorer's process only"):
        task.prompt("train", 0)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 106, SPECS_MAX))
async def test_every_data_set_loads_in_the_worker(first):
    """Prompts of both splits, the right answer's reward and a wrong one's: the same in a second process, as a restarted
    worker must have them, and nothing asks for a file once the worker is confined."""
    specs = [spec_of(name) for name in names() if name not in UNUSABLE][first : first + SPECS_MAX]
    seen = []
    for _ in range(2):
        async with open_scorer(*specs, item_seconds=20, wrap=False) as scorer:
            seen.append([await look(scorer, spec) for spec in specs])
    assert seen[0] == seen[1]
    for spec, (prompts, samples, scores) in zip(specs, seen[0], strict=True):
        name = spec.options["dataset"]
        assert all(prompt.text for prompt in prompts), name
        earned = [score.reward for score in scores]
        assert earned[:-1] == [reward for _, (_, reward) in samples], (name, samples, scores)
        assert earned[-1] < 1 or not samples, (name, scores)
        assert not any("Error" in score.reason for score in scores[:-1]), (name, scores)
        assert not any("Permission" in score.reason for score in scores), (name, scores)


async def look(scorer, spec):
    prompts = await scorer.prompts(spec, "train", 0, 6) + await scorer.prompts(spec, "heldout", 0, 3)
    samples = [(index, sample) for index in range(4) for sample in await scorer.samples(spec, "train", index)]
    items = [ScoreItem(spec, "train", index, text) for index, (text, _) in samples]
    return prompts, samples, await scorer.score([*items, ScoreItem(spec, "train", 0, "no idea")])


@pytest.mark.slow
def test_there_are_as_many_data_sets_as_the_test_above_tries():
    """A new release of the library is noticed."""
    assert len(names()) == 106


@pytest.mark.slow
@pytest.mark.parametrize("name", UNUSABLE)
async def test_a_data_set_that_does_not_load_says_why(name):
    """In the library's own words."""
    with pytest.raises(TaskUnusable, match=UNUSABLE[name]):
        async with open_scorer(spec_of(name)):
            pass
