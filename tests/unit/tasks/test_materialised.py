"""Prompts that the worker made, held as text."""

from __future__ import annotations

import pytest

from echo2.tasks import materialised
from echo2.tasks.catalog import TASKS
from echo2.tasks.materialised import MaterialisedTask, materialise
from echo2.tasks.scorer import ScoreItem, TaskSizes, TaskUnusable, open_scorer
from echo2.tasks.task import Prompt, TaskSpec

SPEC = TaskSpec("file", {"path": "/own.py"})


class FakeScorer:
    """Says the texts it is given."""

    def __init__(self, train, heldout):
        self.texts = {"train": train, "heldout": heldout}
        self.asked = []

    async def sizes(self, spec):
        return TaskSizes(len(self.texts["train"]), len(self.texts["heldout"]))

    async def prompts(self, spec, split, first, count):
        self.asked.append((split, first, count))
        return [Prompt(split, i, self.texts[split][i]) for i in range(first, first + count)]


def numbered(start: int, count: int) -> list[str]:
    return [f"prompt {number}" for number in range(start, start + count)]


async def test_every_prompt_is_asked_for_once_in_pieces():
    """Both splits, in order."""
    scorer = FakeScorer(numbered(0, 100), numbered(1000, 10))
    task = await materialise(scorer, SPEC)
    assert scorer.asked == [("train", 0, 64), ("train", 64, 36), ("heldout", 0, 10)]
    assert (task.name, task.train_size, task.heldout_size) == ("file", 100, 10)
    assert task.prompt("train", 99) == Prompt("train", 99, "prompt 99")
    for index in (-1, 100):
        with pytest.raises(IndexError):
            task.prompt("train", index)
    with pytest.raises(RuntimeError, match="scorer's process"):
        task.score(task.prompt("train", 0), "")


async def test_heldout_prompts_that_are_trained_on_are_left_out():
    """The others keep the index under which the worker scores them."""
    task = await materialise(FakeScorer(numbered(0, 5), numbered(4, 3)), SPEC)
    assert (task.heldout_size, task.left_out) == (2, 1)
    assert [task.prompt("heldout", place).index for place in range(2)] == [1, 2]


async def test_a_task_without_a_heldout_prompt_of_its_own_is_refused():
    """An evaluation on training prompts would be none."""
    with pytest.raises(TaskUnusable, match="each of the 3 held-out prompts of file is a training prompt"):
        await materialise(FakeScorer(numbered(0, 5), numbered(0, 3)), SPEC)


@pytest.mark.parametrize(
    ("limit", "value", "message"), [("PROMPTS_MAX", 9, "10 prompts"), ("PROMPTS_BYTES_MAX", 50, "bytes")]
)
async def test_count_and_bytes_are_bounded(monkeypatch, limit, value, message):
    """A task file cannot fill the coordinator's memory."""
    monkeypatch.setattr(materialised, limit, value)
    with pytest.raises(TaskUnusable, match=message):
        await materialise(FakeScorer(numbered(0, 5), numbered(5, 5)), SPEC)


async def test_tasks_of_the_catalogue_are_held_as_they_are():
    """Nothing is asked of the worker."""
    assert await materialise(FakeScorer([], []), TaskSpec("arithmetic")) is TASKS["arithmetic"]


async def test_materialised_prompts_are_scored_by_the_worker(tmp_path):
    """The whole way of a person's file: sizes, prompts, rewards."""
    path = tmp_path / "own.py"
    path.write_text(
        "def prompts():\n    return [{'prompt': f'{n}+1=', 'n': n} for n in range(60)]\n"
        "def score(example, response):\n    return response == str(example['n'] + 1)\n"
    )
    spec = TaskSpec("file", {"path": str(path)})
    async with open_scorer(spec) as scorer:
        task = await materialise(scorer, spec)
        assert isinstance(task, MaterialisedTask)
        assert task.train_size + task.heldout_size == 60
        prompts = [task.prompt("heldout", place) for place in range(task.heldout_size)]
        answers = [str(int(prompt.text.split("+")[0]) + 1) for prompt in prompts]
        items = [ScoreItem(spec, p.split, p.index, answer) for p, answer in zip(prompts, answers, strict=True)]
        assert {score.reward for score in await scorer.score(items)} == {1.0}
