"""The processes of a learner: places, helpers, and the end of all when one is lost."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest

from echo2.learner.batch import BatchArrays
from echo2.learner.launch import STORE_VARIABLE, Helpers, Place, first_place, place_in
from echo2.learner.orders import pack_step, unpack_step
from echo2.learner.team import Team, open_team
from echo2.p2p.errors import ConfigurationError


def test_places():
    """torchrun's variables, or none; one process is alone."""
    assert place_in({}) is None
    assert place_in({"RANK": "0", "WORLD_SIZE": "1"}) is None
    assert place_in({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}) == Place(3, 8, 1)
    assert place_in({"RANK": "1", "WORLD_SIZE": "2", STORE_VARIABLE: "/x"}) == Place(1, 2, 1, Path("/x"))


@pytest.mark.parametrize("environment", [{"RANK": "2", "WORLD_SIZE": "2"}, {"RANK": "a", "WORLD_SIZE": "2"}])
def test_a_place_that_makes_no_sense_is_told(environment):
    """Left over from something else, most likely: one line says which variables."""
    with pytest.raises(ConfigurationError, match="WORLD_SIZE"):
        place_in(environment)


def test_the_meeting_point_is_made_anew(tmp_path, monkeypatch):
    """What processes of before left in it would be taken for these ones' words."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    home = tmp_path / "home"
    store = first_place(2, home).store
    store.write_text("old")
    assert first_place(2, home) == Place(0, 2, 0, store)
    assert not store.exists()


@pytest.fixture
def helpers(tmp_path):
    made = []

    def start(code):
        script = tmp_path / "helper.py"
        script.write_text(textwrap.dedent(code))
        made.append(Helpers(Place(0, 3, 0, tmp_path / "store"), [sys.executable, str(script)]))
        return made[-1]

    yield start
    for one in made:
        one.kill()
        one.close()


def wait_until_lost(helpers):
    done = threading.Event()
    for _ in range(600):
        if (lost := helpers.lost()) is not None:
            return lost
        done.wait(0.05)
    raise AssertionError("none was lost")


def test_a_lost_helper_is_named_with_the_way_it_ended(helpers):
    """By its number, its pid and its signal or exit code."""
    code = "import os, sys\nif os.environ['RANK'] == '2': {}\nsys.stdin.buffer.read()\n"
    assert "process 2 of 3 (pid " in (lost := wait_until_lost(helpers(code.format("sys.exit(7)"))))
    assert lost.endswith("ended with exit code 7")
    assert wait_until_lost(helpers(code.format("os.kill(os.getpid(), 9)"))).endswith("was killed by SIGKILL")


def test_a_helper_ends_with_the_first_process(tmp_path):
    """However that went: the helper's stdin ends with it."""
    code = """
        import sys
        from echo2.learner.launch import Place, follow_first
        from pathlib import Path
        import threading
        follow_first(Place(1, 2, 1, Path("x")))
        print("here", flush=True)
        threading.Event().wait()
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"here\n"
    process.stdin.close()
    assert process.wait(60) == 1
    process.stdout.close()


def test_alone_a_turn_is_only_its_block():
    """No other process is started, met or told anything."""
    with open_team(None, 1, home=Path("nowhere"), arguments=[], seconds=1.0) as team:
        assert team.ranks is None
        with team.turn("step"):
            team.progress()
        with pytest.raises(ZeroDivisionError), team.turn("step"):
            raise ZeroDivisionError


def test_torchrun_and_processes_together_are_a_mistake():
    """Each would start its own."""
    with (
        pytest.raises(ConfigurationError, match="--processes"),
        open_team(Place(0, 2, 0), 2, home=Path("nowhere"), arguments=[], seconds=1.0),
    ):
        raise AssertionError


class FakeRanks:
    rank, size = 0, 2

    def __init__(self):
        self.sent = []

    def send(self, order, words, arrays):
        self.sent.append(order)


def test_a_turn_that_was_cut_short_lets_nobody_be_told_anything_more():
    """The others are somewhere inside it: a cancelled step is the end of this process, and theirs."""
    team = Team(seconds=60.0)
    team.ranks = ranks = FakeRanks()
    with team.turn("step"):
        pass
    with pytest.raises(KeyboardInterrupt), team.turn("step"):
        raise KeyboardInterrupt
    team.close()
    assert ranks.sent == ["step", "step"]


def test_the_others_are_told_of_the_end():
    """An orderly end needs no kill."""
    team = Team(seconds=60.0)
    team.ranks = ranks = FakeRanks()
    team.close()
    assert ranks.sent == ["end"]


class SlowRanks(FakeRanks):
    """The others are slow to hear a word; what is inside torch then cannot be told to stop."""

    def __init__(self, *place, **bounds):
        super().__init__()
        self.inside, self.heard = threading.Event(), threading.Event()

    def send(self, order, words, arrays):
        self.inside.set()
        assert self.heard.wait(30)
        super().send(order, words, arrays)


def test_no_thread_is_inside_torch_when_the_process_ends(monkeypatch):
    """An interpreter that ends beside such a thread aborts (exit code -6): the end waits for the word under way."""
    monkeypatch.setattr("echo2.learner.ranks.Ranks", SlowRanks)
    monkeypatch.setattr("echo2.learner.team.LOOK_SECONDS", 0.001)
    monkeypatch.setattr("echo2.learner.team.HEARD_SHARE", 0.0)
    before = set(threading.enumerate())
    team = Team(seconds=60.0)
    team.join(Place(0, 2, 0))
    (watcher,) = set(threading.enumerate()) - before
    assert team.ranks.inside.wait(30)
    closing = threading.Thread(target=team.close)
    closing.start()
    assert closing.is_alive()
    team.ranks.heard.set()
    closing.join(30)
    assert not watcher.is_alive()
    assert team.ranks.sent[-1] == "end"


def test_a_batch_travels_whole():
    """But for the names of nodes and leases, which a helper has no use for."""
    arrays = BatchArrays(
        tokens=np.arange(6).reshape(2, 3),
        mask=np.ones((2, 3), bool),
        sampler_logprobs=np.ones((2, 3), np.float32),
        advantages=np.ones(2, np.float32),
        temperature=np.ones(2, np.float32),
        group=np.arange(2),
        nodes=("a", "b"),
        keys=((b"l", 0), (b"l", 1)),
        groups_without_spread=1,
    )
    batch, minibatches = unpack_step(pack_step(arrays, [np.array([1]), np.array([0])]))
    assert [rows.tolist() for rows in minibatches] == [[1], [0]]
    assert all(np.array_equal(getattr(batch, name), getattr(arrays, name)) for name in pack_step(arrays, []))
    assert batch.nodes == batch.keys == ()
