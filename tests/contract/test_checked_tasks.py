"""`echo2 task check` on tasks that pay for the question, remember, hang, or write to the terminal."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from echo2.coordinator.task_check import Report, check_task, copies_of
from echo2.tasks.task import TaskSpec

TASK = """
    def prompts():
        return [{"prompt": f"Work out ${n} + 1$.", "n": n} for n in range(60)]

    def score(example, response):
        return float(response.strip() == str(example["n"] + 1))

    seen = 0
    def toggle():
        global seen
        seen += 1
        return float(seen % 2)

    first = []
    def remember(response):
        first.append(response)
        return float(len(first) < 40)
"""
RIGHT = 'float(response.strip() == str(example["n"] + 1))'


async def checked(folder: Path, old: str = "", new: str = "") -> tuple[Report, str]:
    path = folder / "own.py"
    assert old in TASK
    path.write_text(textwrap.dedent(TASK.replace(old, new) if old else TASK))
    lines: list[str] = []
    report = await check_task(TaskSpec("file", {"path": str(path)}), lines.append)
    return report, "\n".join(lines)


async def test_a_task_that_does_not_pay_for_its_question_is_told_so_by_silence(tmp_path):
    """No note, but a line that it was tried."""
    report, text = await checked(tmp_path)
    assert report.problems == []
    assert not any("repeats" in note for note in report.notes)
    assert "prompts given back as answers: 60, to 20 training prompts" in text


@pytest.mark.parametrize(
    ("new", "shown"),
    [
        ("float(response in f\"Work out ${example['n']} + 1$.\")", '"Work out $0 + 1$."'),
        ("float(response == f\"{example['n']} + 1\")", '"0 + 1"'),
        ("float(response == f\"\\\\boxed{{{example['n']} + 1}}\")", r'"\\boxed{0 + 1}"'),
    ],
)
async def test_a_task_that_pays_for_its_question_is_noted(tmp_path, new, shown):
    """The prompt, an expression of it, and that in a box are all tried."""
    report, _ = await checked(tmp_path, RIGHT, new)
    [note] = [note for note in report.notes if "only repeats something of the prompt" in note]
    assert "earns up to 1, at 20 of 20 prompts" in note
    assert shown in note


@pytest.mark.parametrize("new", ["toggle()", "remember(response)"])
async def test_a_reward_that_depends_on_what_was_scored_before_is_a_problem(tmp_path, new):
    """Every second call, or the first forty: the second process is asked in another order."""
    report, _ = await checked(tmp_path, RIGHT, new)
    assert any("kept from one call of score() to the next" in problem for problem in report.problems)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (RIGHT, "1 / 0 if not response else {}[chr(27) + '[2J' + chr(7)]"),
        ("seen = 0", "raise ValueError('\\x1b[2J\\r')"),
    ],
)
async def test_escape_bytes_of_a_task_never_reach_the_terminal(tmp_path, old, new):
    """Whether it raises as it is loaded or as it scores."""
    report, text = await checked(tmp_path, old, new)
    assert report.problems
    assert all(letter.isprintable() or letter == "\n" for letter in text)
    assert "x1b[2J" in text


def test_what_of_a_prompt_is_tried():
    """The whole, then its first formulas and sums, bare and in a box."""
    assert copies_of(r"From $a$ and \(b\), with 3 * (4 - 1), and 7.") == [
        *(r"From $a$ and \(b\), with 3 * (4 - 1), and 7.", "a", "b", "3 * (4 - 1)"),
        *(r"\boxed{a}", r"\boxed{b}", r"\boxed{3 * (4 - 1)}"),
    ]
    assert copies_of("47+8=") == ["47+8=", "47+8", r"\boxed{47+8}"]
