"""`echo2 task check`: what it says of good and bad tasks."""

from __future__ import annotations

import textwrap

import pytest
from typer.testing import CliRunner

from echo2.coordinator.cli import app
from echo2.coordinator.task_check import BAD_ANSWERS, Report, _tell_times, check_task, spec_of
from echo2.p2p.errors import ConfigurationError
from echo2.tasks import bubblewrap
from echo2.tasks.task import TaskSpec

GOOD = """
    def prompts():
        return [{"prompt": f"{n}+1=", "n": n} for n in range(60)]

    def score(example, response):
        return response.strip() == str(example["n"] + 1)

    def samples(example):
        return [(str(example["n"] + 1), 1.0), ("no", 0.0)]
"""


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> TaskSpec:
        path = tmp_path / "own.py"
        path.write_text(textwrap.dedent(text))
        return TaskSpec("file", {"path": str(path)})

    return write


async def checked(spec):
    lines: list[str] = []
    report = await check_task(spec, lines.append)
    return report, "\n".join(lines)


async def test_a_good_task_is_fit_for_a_run(write):
    """Sizes, prompts, samples, time, bad answers and determinism are all told."""
    report, text = await checked(write(GOOD))
    assert report.problems == []
    assert "for training" in text
    assert '"0+1="' in text
    assert "sample answers: " in text
    assert "time of a reward: median" in text
    assert all(name in text for name in BAD_ANSWERS)
    assert text.endswith("fit for a run")
    assert "seccomp" in text or "without seccomp" in text


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('"prompt": f"{n}+1="', '"prompt": f"{n}+1={sorted({str(hash(str(n)))})}"', "differ between two processes"),
        ("return response.strip() ==", 'return hash("x") % 1000 / 1000 or', "differ between two processes"),
        ('(example["n"] + 1), 1.0)', '(example["n"] + 2), 1.0)', "should earn 1 and earns 0"),
        ("return response.strip()", "return 1 / 0", "division by zero"),
        ("return response.strip() ==", "return None or None and", "not a float"),
        ("    def score", "    def skore", "lacks score"),
        ('f"{n}+1="', 'f"{n}+1=" if n else " "', "a prompt is empty"),
    ],
)
async def test_what_would_spoil_a_run_is_a_problem(write, old, new, problem):
    """Each named in words."""
    assert old in GOOD
    report, text = await checked(write(GOOD.replace(old, new)))
    assert any(problem in found for found in report.problems), report.problems
    assert "not fit for a run: " in text


@pytest.mark.parametrize(
    ("seconds", "problems", "notes"),
    [((0.01, 0.02), 0, 0), ((0.01, 0.01, 1.0), 0, 1), ((0.6, 0.7, 0.01), 1, 0)],
)
def test_a_slow_reward_is_told(seconds, problems, notes):
    """An ordinary one over a quarter of its limit is a problem: it will be cut off on a busy machine."""
    lines = []
    report = Report(lines.append)
    _tell_times(report, seconds, 2.0)
    assert (len(report.problems), len(report.notes), bool(report)) == (problems, notes, not problems)


async def test_what_is_only_odd_is_a_note(write):
    """A bad answer that earns something, and held-out prompts that are trained on."""
    odd = GOOD.replace("return response.strip() ==", "return not response or response.strip() ==").replace(
        "for n in range(60)]", 'for n in range(60)] + [{"prompt": "0+1=", "n": 0, "heldout": True}]'
    )
    report, text = await checked(write(odd))
    assert report.problems == []
    assert "note: bad answers earn up to 1: is that meant?" in text
    assert "1 are training prompts, too" in text


async def test_without_bubblewrap_it_says_what_is_missing_and_what_protects(write, monkeypatch):
    """And goes on."""
    monkeypatch.setattr(bubblewrap, "missing", lambda: "the program bwrap is not installed (package: bubblewrap)")
    report, text = await checked(write(GOOD))
    assert report.problems == []
    assert "note: not under bubblewrap, so the file can read what you can while it is loaded: the program bwrap" in text


async def test_a_task_of_several_turns_is_played():
    """Openings, times, bad actions, determinism."""
    report, text = await checked(TaskSpec("poker"))
    assert report.problems == []
    assert "turns at most" in text
    assert "opening:" in text


def test_the_target_is_a_file_or_a_name(tmp_path):
    """Options are JSON where they can be, and text where not."""
    (tmp_path / "own.py").touch()
    assert spec_of("own.py", [], tmp_path) == TaskSpec("file", {"path": str(tmp_path / "own.py")})
    wanted = TaskSpec("reasoning_gym", {"dataset": "ab", "train_size": 3, "dataset_options": {"length": 4}})
    assert spec_of("reasoning_gym", ["dataset=ab", "train_size=3", 'dataset_options={"length": 4}'], tmp_path) == wanted


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("none.py", [], "there is no file none.py"),
        ("arithmetik", [], "did you mean 'arithmetic'"),
        ("arithmetic", ["seed=1"], "has no option 'seed'"),
        ("math", ["heldout_share"], "must be KEY=VALUE"),
    ],
)
def test_a_wrong_command_line_is_a_configuration_error(tmp_path, target, options, message):
    """One line, exit 2."""
    with pytest.raises(ConfigurationError, match=message):
        spec_of(target, options, tmp_path)


def test_the_exit_code_says_whether_the_task_is_fit(write):
    """0 or 1; the report is on standard output."""
    good = CliRunner().invoke(app, ["task", "check", write(GOOD).options["path"]])
    assert (good.exit_code, good.output.splitlines()[-1]) == (0, "fit for a run")
    bad = CliRunner().invoke(app, ["task", "check", write("x = 1").options["path"]])
    assert (bad.exit_code, bad.output.splitlines()[-1]) == (1, "not fit for a run: 1 problem")
