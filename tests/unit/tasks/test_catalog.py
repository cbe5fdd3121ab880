"""Making a task from its name and options."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from echo2.tasks.catalog import CLASSES, TASKS, get_task, is_sandbox_task, make_task, with_absolute_path
from echo2.tasks.task import TaskSpec

WITHOUT_OPTIONS = sorted(set(CLASSES) - {"file", "reasoning_gym"})


@pytest.mark.parametrize("name", WITHOUT_OPTIONS)
def test_each_task_is_found_by_its_own_name(name):
    """The key of the catalogue is the task's name, and the first and last prompt of each split exist."""
    task = make_task(name)
    assert task.name == name
    if not is_sandbox_task(task):
        assert get_task(name).name == name
        assert task.prompt("train", task.train_size - 1).text
        assert task.prompt("heldout", task.heldout_size - 1).text


def test_tasks_without_options_are_made_once():
    """What runs without options were, they are."""
    assert make_task("arithmetic") is TASKS["arithmetic"]


def test_an_unknown_name_lists_the_known_and_suggests_one():
    """The message is all a person needs to mend a configuration."""
    with pytest.raises(ValueError, match=r"no task 'aritmetic'; did you mean 'arithmetic'\? Known tasks: arithmetic, "):
        get_task("aritmetic")


def test_a_name_near_nothing_gets_no_suggestion():
    """No guess is better than a wild one."""
    with pytest.raises(ValueError, match=r"no task 'zzz'\. Known tasks:"):
        get_task("zzz")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("math", {"heldout_shar": 0.5}, "no option 'heldout_shar'; did you mean 'heldout_share'?"),
        ("arithmetic", {"seed": 1}, "'arithmetic' has no option 'seed' \\(it has none\\)"),
        ("reasoning_gym", {}, "needs the option 'dataset'"),
        ("reasoning_gym", {"dataset": "ab", "seed": -1}, "seed = -1 must be a whole number from 0"),
        ("reasoning_gym", {"dataset": "ab", "train_size": True}, "train_size = True must be a whole number"),
        ("reasoning_gym", {"dataset": "ab", "dataset_options": {"seed": 3}}, "dataset_options.seed is set by"),
        ("reasoning_gym", {"dataset": ""}, "dataset = '' must be a text"),
        ("file", {"path": "relative.py"}, "must be an absolute path"),
        ("math", {"heldout_share": 1}, "heldout_share = 1 must be a number between 0 and 1"),
        ("math", {"path": "/no/such/file"}, "cannot be read"),
    ],
)
def test_a_mistake_in_the_options_is_named(name, options, message):
    """With the task, the option and what it may be."""
    with pytest.raises(ValueError, match=message):
        make_task(TaskSpec(name, options))


def test_paths_are_taken_from_the_settings_own_folder():
    """A relative one; an absolute one stays."""
    folder = Path("/etc/echo2")
    assert with_absolute_path(TaskSpec("file", {"path": "a/b.py"}), folder).options["path"] == "/etc/echo2/a/b.py"
    assert with_absolute_path(TaskSpec("file", {"path": "/x.py"}), folder).options["path"] == "/x.py"
    assert with_absolute_path(TaskSpec("math"), folder) == TaskSpec("math")


def test_making_tasks_imports_nothing_heavy():
    """The coordinator and the node make tasks and never import what only the scorer's worker needs."""
    program = (
        "import sys\n"
        "from echo2.tasks import scorer, materialised\n"
        "from echo2.tasks.catalog import make_task\n"
        "from echo2.tasks.task import TaskSpec\n"
        f"for name in {WITHOUT_OPTIONS!r}: make_task(name)\n"
        "make_task(TaskSpec('reasoning_gym', {'dataset': 'ab'}))\n"
        "make_task(TaskSpec('file', {'path': '/no/such.py'}))\n"
        "heavy = {'sympy', 'math_verify', 'reasoning_gym', 'pokerkit', 'torch', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
