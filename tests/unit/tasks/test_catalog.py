"""Finding a task by its name."""

from __future__ import annotations

import pytest

from echo2.tasks.catalog import TASKS, get_task


@pytest.mark.parametrize("name", sorted(TASKS))
def test_each_task_is_found_by_its_own_name(name):
    """The key of the catalogue is the task's name, and the first prompt of each split exists."""
    task = get_task(name)
    assert task.name == name
    assert task.prompt("train", task.train_size - 1).text
    assert task.prompt("heldout", task.heldout_size - 1).text


def test_an_unknown_name_lists_the_known_and_suggests_one():
    """The message is all a person needs to mend a configuration."""
    with pytest.raises(ValueError, match=r"no task 'aritmetic'; did you mean 'arithmetic'\? Known tasks: arithmetic, "):
        get_task("aritmetic")


def test_a_name_near_nothing_gets_no_suggestion():
    """No guess is better than a wild one."""
    with pytest.raises(ValueError, match=r"no task 'zzz'\. Known tasks:"):
        get_task("zzz")
