from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from echo2.coordinator.demo_options import (
    PRESETS,
    DemoOptions,
    Places,
    clear,
    coordinator_settings,
    learner_settings,
    preset_of,
)
from echo2.coordinator.demo_plot import draw_reward, moving_mean
from echo2.coordinator.demo_report import (
    DemoRecord,
    NodeTally,
    bubble,
    check_sums,
    summary,
    write_metrics,
    write_report,
)
from echo2.coordinator.demo_screen import NodeRow, ScreenState, chart, plain_line, render
from echo2.p2p.errors import ConfigurationError


def step(number, *, reward=0.5, idle=0.1, staleness=1):
    return {
        "step": number, "reward_mean": reward, "staleness": staleness, "kl": 0.001, "rollouts": 4,
        "train_seconds": 0.3, "idle_seconds": idle,
    }  # fmt: skip


RECORD = DemoRecord(
    run="demo", model="tiny", task="arithmetic", seed=0, steps_wanted=10, S=3, kappa=2, R=4, n=2, learning_rate=2e-4,
    steps=[step(number, reward=number / 10, idle=5.0 if number == 0 else 0.1) for number in range(10)],
    seconds=3.9, heldout=[(10, 0.9), (0, 0.25)],
    rollouts={"submitted": 47, "consumed": 40, "rejected": 1, "stale": 1, "withdrawn": 1, "duplicate": 1, "left": 3},
    nodes=[NodeTally("node-1", "P1", 6, 30, 30), NodeTally("node-2", "P2", 5, 17, 17)],
    learner_consumed=40, snapshots_published=6, t_bcast_seconds=0.25,
)  # fmt: skip


def test_the_report_has_a_table_of_what_episodes_measured(tmp_path):
    """One row a measure, one column an evaluation; a task of one turn has none."""
    write_report(tmp_path / "one.md", RECORD, [])
    assert "episodes" not in (tmp_path / "one.md").read_text()
    measures = [(10, {"chips_rock": 1.5, "chips": -0.5}), (0, {"chips_rock": 2.0, "chips": -3.25})]
    write_report(tmp_path / "several.md", replace(RECORD, measures=measures), [])
    report = (tmp_path / "several.md").read_text()
    assert "| mean of | version 0 | version 10 |" in report
    assert "| chips | -3.250 | -0.500 |\n| chips_rock | 2.000 | 1.500 |" in report


def test_another_task_is_one_word(tmp_path):
    """`--task race`: the settings differ in the task and in how long its turns may be; an unknown one is refused."""
    assert preset_of("tiny", "") == preset_of("tiny", "arithmetic") == PRESETS["tiny"]
    assert preset_of("tiny", "race") == replace(PRESETS["tiny"], task="race", tokens_max=45, turn_tokens_max=4)
    from echo2.coordinator.config import load_config
    from echo2.p2p.identity import Identity

    options = DemoOptions("smollm2", preset_of("smollm2", "poker"), 1, 2, 3, 2, 1e-6, 0, tmp_path, screen=False)
    text = coordinator_settings(options, Places(tmp_path), learner=Identity(b"\x01" * 32).peer_id, port=1, rest=2)
    (tmp_path / "coordinator.toml").write_text(text)
    assert load_config(tmp_path / "coordinator.toml").run.spec.options == {"heldout_size": 64}
    for model, task in (("tiny", "poker"), ("huge", "")):
        with pytest.raises(ConfigurationError, match="there is no demo of"):
            preset_of(model, task)


def test_summary_has_exactly_the_promised_keys():
    """The summary is the object that others read: these keys, in this order, worked by hand."""
    assert summary(RECORD) == {
        "reward_first": pytest.approx(0.2),
        "reward_last": pytest.approx(0.7),
        "heldout_first": 0.25,
        "heldout_last": 0.9,
        "steps": 10,
        "seconds": 3.9,
        "nodes": 2,
        "snapshots_published": 6,
        "installs_per_node": [6, 5],
        "staleness_max": 1,
        "S": 3,
        "kappa": 2,
        "rollouts": {
            "submitted": 47, "consumed": 40, "rejected": 1, "stale": 1, "withdrawn": 1, "duplicate": 1, "left": 3,
        },
        "bubble": pytest.approx(0.9 / 3.9),
        "t_bcast_s_median": 0.25,
        "kl_sampler_learner": pytest.approx(0.001),
    }  # fmt: skip


def test_a_run_that_never_began_has_nulls():
    """A broken-off demo still prints a valid object."""
    record = replace(RECORD, steps=[], heldout=[], rollouts={}, nodes=[], t_bcast_seconds=None, learner_consumed=0)
    numbers = json.loads(json.dumps(summary(record)))
    assert numbers["reward_first"] is None
    assert numbers["bubble"] is None
    assert numbers["rollouts"]["submitted"] == 0
    assert check_sums(record) == []


def test_bubble_leaves_out_the_wait_before_the_first_step():
    """Nothing could overlap with the first wait; the others count."""
    assert bubble([step(0, idle=100.0)]) == 0.0
    assert bubble([]) is None


def test_sums_that_agree():
    """Nothing is said when every count is the same everywhere."""
    assert check_sums(RECORD) == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rollouts": dict(RECORD.rollouts, left=2)}, "submitted 47 is not 40 consumed + 1 rejected + 1 stale"),
        ({"nodes": [NodeTally("node-1", "P1", 6, 31, 30), RECORD.nodes[1]]}, "node-1 says it submitted 31 rollouts"),
        ({"nodes": [NodeTally("node-1", "P1", 6, 31, 31), RECORD.nodes[1]]}, "the nodes say they submitted 48"),
        ({"learner_consumed": 36}, "the learner consumed 36 rollouts, the coordinator has 40"),
        ({"steps": RECORD.steps[1:]}, "a training step is missing"),
        ({"steps": [*RECORD.steps[:-1], step(9, staleness=4)]}, "steps [9] trained on rollouts staler than S = 3"),
    ],
)
def test_sums_that_do_not_agree_say_which(changes, says):
    """Each lost or doubled rollout shows in the sentence about the count that is off."""
    assert any(says in item for item in check_sums(replace(RECORD, **changes)))


@pytest.mark.parametrize("record", [RECORD, replace(RECORD, steps=[], heldout=[], failure="no node came")])
def test_files(tmp_path, record):
    """Picture, report and metrics are written for a whole run and for a broken-off one."""
    write_metrics(tmp_path / "metrics.jsonl", record.steps)
    write_report(tmp_path / "report.md", record, ["one is lost"])
    draw_reward(tmp_path / "reward.png", record)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [item["step"] for item in record.steps]
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
    report = (tmp_path / "report.md").read_text()
    assert "**No**: one is lost." in report
    assert record.failure in report


@given(st.lists(st.floats(0, 1), max_size=300))
def test_chart_always_fits(values):
    """Whatever the number of steps, the chart has its rows and columns, and a mark for each step shown."""
    rows = chart(values, columns=40, rows=3)
    assert [len(row) for row in rows] == [40] * 3
    assert rows[-1].rstrip() == "" if not values else len(rows[-1].rstrip()) == min(40, len(values))


def test_moving_mean():
    """Each point is the mean of itself and up to four before it."""
    assert moving_mean([1, 2, 3, 4, 5, 11]) == [1, 1.5, 2, 2.5, 3, 5]


@pytest.mark.parametrize("width", [60, 80, 120, 200])
@pytest.mark.parametrize("begun", [True, False])
def test_screen_fits_its_terminal(width, begun):
    """No line is wider than the terminal, before the first step and in the middle of a run."""
    state = ScreenState(
        title="tiny on arithmetic", phase="training", waiting_for="the learner" * 20, seconds=61, step=3, steps=10,
        rewards=[0.1, 0.5, 0.9] if begun else [], heldout=[(0, 0.25)] if begun else [], staleness=1 if begun else None,
        S=3, bubble=0.1 if begun else None, t_bcast_seconds=0.2 if begun else None, t_train_seconds=None,
        rollouts={"submitted": 5} if begun else {},
        nodes=[NodeRow("node-1", "generating", 2, 1.5, 5, 2, 1, "a lease " * 30)] if begun else [],
        notes=["node-1 was killed by SIGKILL; restart 1 of 3 in 1 s: " + "x" * 200],
    )  # fmt: skip
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(render(state, width=width))
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert "step 3 of 10" in "\n".join(lines)
    assert plain_line(state).startswith("[1:01] training  step 3/10")


def drawn(width, height, **changes):
    node = NodeRow("node-1", "", None, None, 0, 0, 0, "")
    state = ScreenState(
        title="tiny", phase="training", waiting_for="", seconds=61, step=5, steps=10, rewards=[0.5] * 5, heldout=[],
        staleness=1, S=3, bubble=0.1, t_bcast_seconds=0.2, t_train_seconds=0.3, rollouts={"left": 77},
        nodes=[node] * 3, notes=["first", "second", "third", "fourth", "the last thing that happened"],
    )  # fmt: skip
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(render(replace(state, **changes), width=width, height=height))
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 24), (120, 40), (200, 50)])
@pytest.mark.parametrize("nodes", [1, 3, 64])
def test_screen_cuts_nothing_off(width, height, nodes):
    """One line is left to the terminal, and the last note and every number are there, however many nodes there are."""
    row = NodeRow("node-1", "working", 4, 1.0, 5, 1, 0, "")
    lines = drawn(width, height, nodes=[row] * nodes)
    assert len(lines) <= height - 1
    shown = "\n".join(lines)
    for word in ("the last thing that happened", "duplicate", "training step", "broadcast: T_bcast"):
        assert word in shown, word
    assert (f"and {nodes - sum('node-1' in line for line in lines)} more" in shown) is (nodes == 64)


def test_screen_is_read_without_colour():
    """How far it is, and what a node does that has not spoken yet; rollouts without a state are undecided."""
    shown = "\n".join(drawn(80, 24))
    assert "█" * 15 + "░" * 15 in shown
    assert shown.count("starting") == 4, "three nodes and the learner"
    assert "undecided" in shown
    assert "left" not in shown


def options(tmp_path):
    return DemoOptions(
        model="tiny", preset=PRESETS["tiny"], nodes=2, steps=5, S=3, kappa=2, learning_rate=2e-4, seed=1,
        out=tmp_path, screen=False,
    )  # fmt: skip


def test_settings_files_are_what_the_daemons_read(tmp_path):
    """The coordinator's own loader accepts what the demo writes for it; strings survive quoting."""
    from echo2.coordinator.config import load_config
    from echo2.p2p.identity import Identity

    places = Places(tmp_path / 'odd "name" \\ ü')
    places.out.mkdir()
    learner = Identity(b"\x01" * 32).peer_id
    text = coordinator_settings(options(tmp_path), places, learner=learner, port=1234, rest=1235)
    (places.out / "c.toml").write_text(text, encoding="utf-8")
    config = load_config(places.out / "c.toml")
    assert config.run.model_dir == places.model
    assert (config.run.S, config.run.kappa, config.run.steps, config.rest.port) == (3, 2, 5, 1235)
    assert "/p2p/X" in learner_settings(options(tmp_path), places, coordinator="/ip4/127.0.0.1/tcp/1/p2p/X", port=2)


def test_only_a_demos_folder_is_cleared(tmp_path):
    """A folder with someone's files is refused; a demo's own is made ready again."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.md").write_text("x")
    with pytest.raises(ConfigurationError, match="choose another folder with --out"):
        clear(Places(tmp_path / "mine"))
    places = Places(tmp_path / "demo")
    clear(places)
    (places.work / "old").touch()
    (places.out / "report.md").touch()
    (places.out / "notes.txt").touch()
    clear(places)
    assert not (places.work / "old").exists()
    assert sorted(entry.name for entry in places.out.iterdir()) == [".echo2-demo", "notes.txt", "work"]
