"""TensorBoard for real, Weights & Biases by the contract of its package."""

import sys
import types
from pathlib import Path

import pytest

from echo2.learner.boards import TensorBoard, open_metrics
from echo2.learner.config import LearnerConfig
from echo2.p2p.errors import ConfigurationError
from echo2.p2p.identity import Identity
from echo2.p2p.messages import StepMetrics

PEER = Identity(b"c" * 32).peer_id


def step(number, reward=0.25):
    return StepMetrics(
        step=number, rollouts=8, groups=2, groups_without_spread=0, staleness=1, staleness_mean=0.5,
        reward_mean=reward, loss=0.1, ratio_mean=1.0, clip_share=0.0, kl_sampler_learner=0.001, entropy=0.5,
        response_tokens_mean=3.0, gradient_norm=1.0, train_seconds=2.0, idle_seconds=1.0,
    )  # fmt: skip


def config(home, **metrics):
    return LearnerConfig(
        home=home, model_dir=Path("m"), run="demo", coordinator=f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}", metrics=metrics
    )


def test_tensorboard_shows_each_step_once_after_a_crash(tmp_path):
    """Read back with TensorBoard's own reader: steps trained again replace those that were undone."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(tmp_path)
    for begin, rewards in ((0, {0: 0.0, 1: 0.1, 2: 0.9, 3: 0.9}), (2, {2: 0.2, 3: 0.3})):
        board.begin(begin)
        for number, reward in rewards.items():
            board.step(step(number, reward), epoch=0, wall_seconds=1000.0 + number)
    board.close()
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    assert {"reward_mean", "kl_sampler_learner", "staleness_mean", "idle_seconds"} <= set(found.Tags()["scalars"])
    assert [(event.step, round(event.value, 3)) for event in found.Scalars("reward_mean")] == [
        (0, 0.0), (1, 0.1), (2, 0.2), (3, 0.3),
    ]  # fmt: skip


class FakeRun:
    def __init__(self):
        self.logged, self.finished = {}, False

    def log(self, values, step):
        self.logged.setdefault(step, values)  # as wandb: a step below the last one is not taken

    def finish(self):
        self.finished = True


class FakeWandb(types.ModuleType):
    def __init__(self):
        super().__init__("wandb")
        self.asked, self.runs = [], {}

    def init(self, *, project, entity, name, id, resume, dir, config, mode=None):  # noqa: A002 - wandb's own names
        self.asked.append(
            {"project": project, "entity": entity, "name": name, "id": id, "resume": resume, "mode": mode}
            | {"config": config}
        )
        assert Path(dir).is_dir()
        return self.runs.setdefault(id, FakeRun())


@pytest.fixture
def wandb(monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_wandb_goes_on_with_the_same_run_after_a_restart(tmp_path, wandb):
    """The id follows from key and run; the mode is the package's own affair unless the settings name one."""
    settings = config(tmp_path, wandb={"project": "p"})
    for begin in (0, 1):
        log = open_metrics(settings, peer=PEER)
        log.begin(begin)
        for number in range(begin, 3):
            log.step(step(number, reward=begin), epoch=begin, wall_seconds=1.0)
        log.close()
    first, second = wandb.asked
    assert first == second
    assert (first["project"], first["name"], first["resume"], first["mode"]) == ("p", "demo", "allow", None)
    assert first["config"]["train"]["learning_rate"] == 2e-4
    (run,) = wandb.runs.values()
    assert run.finished
    assert {number: values["reward_mean"] for number, values in run.logged.items()} == {0: 0, 1: 0, 2: 0}


def test_wandb_is_offline_where_the_settings_say_so(tmp_path, wandb):
    """`mode` is handed on."""
    open_metrics(config(tmp_path, wandb={"project": "p", "mode": "offline"}), peer=PEER).close()
    assert wandb.asked[0]["mode"] == "offline"


def test_what_wandb_says_at_the_start_is_one_line_for_a_person(tmp_path, wandb):
    """No key, no network: said before training begins, with what to do."""

    def refuse(**_):
        raise RuntimeError("api_key not configured\n(no-tty)")

    wandb.init = refuse
    with pytest.raises(
        ConfigurationError, match=r"does not begin: api_key not configured \(no-tty\); log in .* WANDB_MODE"
    ):
        open_metrics(config(tmp_path, wandb={"project": "p"}), peer=PEER)


@pytest.mark.parametrize(
    ("package", "metrics"), [("tensorboard", {"tensorboard": True}), ("wandb", {"wandb": {"project": "p"}})]
)
def test_a_missing_package_is_said_before_anything_starts(tmp_path, monkeypatch, package, metrics):
    """With what to install."""
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigurationError, match=f"needs the package {package}, .*pip install {package}"):
        open_metrics(config(tmp_path, **metrics), peer=PEER)


def test_without_boards_there_is_the_file(tmp_path):
    """metrics.jsonl in the learner's home."""
    log = open_metrics(config(tmp_path), peer=PEER)
    log.begin(0)
    log.step(step(0), epoch=0, wall_seconds=1.0)
    log.close()
    assert (tmp_path / "metrics.jsonl").read_bytes().count(b"\n") == 1
