"""A researcher's own file."""

from __future__ import annotations

import textwrap

import pytest

from echo2.tasks.file_task import FileTask, FunctionsTask, task_of
from echo2.tasks.scorer import InlineScorer, ScoreItem, TaskUnusable, open_scorer
from echo2.tasks.task import Prompt, Score, TaskSpec

FUNCTIONS = """
    def prompts():
        for n in range(100):
            yield {"prompt": f"{n}+1=", "answer": n + 1}

    def score(example, response):
        return response.strip() == str(example["answer"])

    def samples(example):
        return [(str(example["answer"]), 1.0), ("x", 0)]
"""

OBJECT = """
    from echo2.tasks.task import Prompt, Score

    class Greeting:
        name = "greeting"
        train_size = 2
        heldout_size = 1

        def prompt(self, split, index):
            return Prompt(split, index, f"Say hello ({split} {index}): ", prefill="H")

        def score(self, prompt, response):
            return Score(float("ello" in response))

    task = Greeting()
"""


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> TaskSpec:
        path = tmp_path / "own.py"
        path.write_text(textwrap.dedent(text))
        return TaskSpec("file", {"path": str(path)})

    return write


def loaded(spec: TaskSpec) -> FileTask:
    task = FileTask(**spec.options)
    task.prepare()
    return task


def test_two_functions_are_a_task(write):
    """One in ten examples is held out, by a hash of its prompt; numbers and booleans are rewards."""
    task = loaded(write(FUNCTIONS))
    assert task.train_size + task.heldout_size == 100
    assert 3 <= task.heldout_size <= 20
    prompt = task.prompt("train", 0)
    assert prompt == Prompt("train", 0, prompt.text)
    [(right, _), (wrong, _)] = task.samples(prompt)
    assert (task.score(prompt, right), task.score(prompt, wrong)) == (Score(1.0), Score(0.0))


def test_an_object_is_a_task(write):
    """Its prompts may be begun for the model."""
    task = loaded(write(OBJECT))
    assert (task.train_size, task.heldout_size) == (2, 1)
    assert task.prompt("heldout", 0).prefill == "H"
    assert task.score(task.prompt("train", 1), "ello!") == Score(1.0)
    assert task.samples(task.prompt("train", 1)) == []


def test_examples_may_say_themselves_what_is_held_out():
    """Then nothing else is."""
    examples = [{"prompt": "a", "heldout": True}, {"prompt": "b"}, "c"]
    task = FunctionsTask(lambda: examples, lambda _example, _response: 1)
    assert (task.train_size, task.heldout_size) == (2, 1)
    assert task.prompt("heldout", 0).text == "a"
    assert [task.prompt("train", index).text for index in range(2)] == ["b", "c"]
    with pytest.raises(IndexError):
        task.prompt("train", -1)


def test_the_split_does_not_move_when_examples_are_added():
    """A prompt's side depends on its text alone."""

    def heldout(count):
        task = FunctionsTask(lambda: [f"question {n}" for n in range(count)], lambda _example, _response: 1)
        return [task.prompt("heldout", index).text for index in range(task.heldout_size)]

    assert heldout(200)[: len(heldout(100))] == heldout(100)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({}, "lacks prompts, score"),
        ({"prompts": list}, "lacks score"),
        ({"task": object()}, "`task` lacks train_size"),
        ({"task": FileTask}, "is the class FileTask, not an object"),
        ({"task": type("Played", (), {"sandbox": None})()}, "nodes run no code"),
        ({"prompts": lambda: [1], "score": print}, "example 0 of prompts"),
        ({"prompts": lambda: [{"prompt": 1}], "score": print}, "example 0 of prompts"),
        ({"prompts": lambda: ["a", {"prompt": "b", "heldout": 1}], "score": print}, "example 1 of prompts"),
        ({"prompts": list, "score": print}, "gave 0 examples, of which none is for training"),
        ({"prompts": lambda: [{"prompt": "b", "heldout": True}], "score": print}, "none is for training"),
        ({"prompts": lambda: [{"prompt": "b", "heldout": False}], "score": print}, "none is for evaluation"),
    ],
)
def test_a_file_that_makes_no_task_says_what_it_lacks(names, message):
    """ValueError, fit to show its author."""
    with pytest.raises(ValueError, match=message):
        task_of(names)


def test_nothing_is_loaded_outside_the_worker(write):
    """Not even its sizes are known."""
    task = FileTask(**write("raise SystemExit").options)
    with pytest.raises(RuntimeError, match="scorer's process only"):
        _ = task.train_size


async def test_the_worker_loads_it_and_this_process_does_not(write, tmp_path):
    """The file runs in another process; its own folder can be read from there."""
    (tmp_path / "data.txt").write_text("\n".join(map(str, range(50))))
    spec = write("""
        import os
        from pathlib import Path

        numbers = Path(__file__).with_name("data.txt").read_text().split()
        process = os.getpid()

        def prompts():
            return [f"{number}, process {process}?" for number in numbers]

        def score(example, response):
            return 0.25
    """)
    async with open_scorer(spec) as scorer:
        [prompt] = await scorer.prompts(spec, "train", 0, 1)
        assert prompt.text.startswith("0, process ")
        assert await scorer.score([ScoreItem(spec, "train", 0, "")]) == [Score(0.25)]
    [score] = await InlineScorer().score([ScoreItem(spec, "train", 0, "")])
    assert (score.reward, "scorer's process only" in score.reason) == (0.0, True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "must define either an object `task` or the functions"),
        ("import nothing_of_this_name", "ModuleNotFoundError: No module named 'nothing_of_this_name'"),
        ("def f(:", "SyntaxError"),
        ("import sys; sys.exit('no')", "SystemExit: no"),
        ("1 / 0", "ZeroDivisionError"),
        ("import socket; socket.create_connection(('127.0.0.1', 9), 1)", "OSError|PermissionError|unreachable"),
        ("import pathlib; pathlib.Path('/tmp/echo2-own-task').write_text('x')", "OSError|Read-only|PermissionError"),
    ],
)
async def test_a_file_that_does_not_load_says_why(write, text, message):
    """The author sees the file's own error; what loading must not do is refused."""
    with pytest.raises(TaskUnusable, match=message):
        async with open_scorer(write(text)):
            pass


async def test_a_file_that_is_not_there_is_named():
    """And nothing is scored."""
    with pytest.raises(TaskUnusable, match=r"there is no file '/no/such\.py'"):
        async with open_scorer(TaskSpec("file", {"path": "/no/such.py"})):
            pass
