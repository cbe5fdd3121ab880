"""What a demo is asked to do, what that means for the three daemons, and the settings files it writes for them."""

from __future__ import annotations

import json
import shutil
import socket
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from echo2.p2p.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping

RUN = "demo"
MARK = ".echo2-demo"
"""In a folder a demo made: only such a folder, or an empty one, is cleared for the next demo."""

RESULT_FILES = ("metrics.jsonl", "reward.png", "report.md")


@dataclass(frozen=True, slots=True)
class Preset:
    """What suits one model. `stall_seconds`: nothing at all moving for so long is a failure."""

    task: str
    S: int
    kappa: int
    R: int
    n: int
    learning_rate: float
    domain: str
    micro_tokens: int
    steps: int
    tokens_max: int
    slice_samples_max: int
    lease_seconds: float
    stall_seconds: float
    turn_tokens_max: int = 64
    task_options: Mapping[str, object] = field(default_factory=dict)


PRESETS: Mapping[str, Preset] = {
    "tiny": Preset(
        task="arithmetic", S=3, kappa=2, R=256, n=8, learning_rate=2e-4, domain="f32", micro_tokens=16_384, steps=60,
        tokens_max=8, slice_samples_max=8, lease_seconds=60, stall_seconds=180,
    ),
    "smollm2": Preset(
        task="word-problems", S=3, kappa=2, R=64, n=8, learning_rate=5e-6, domain="f16", micro_tokens=1024, steps=10,
        tokens_max=16, slice_samples_max=4, lease_seconds=600, stall_seconds=1200,
    ),
}  # fmt: skip

GAMES: Mapping[tuple[str, str], Preset] = {
    ("tiny", "race"): replace(PRESETS["tiny"], task="race", tokens_max=45, turn_tokens_max=4),
    ("smollm2", "poker"): replace(
        PRESETS["smollm2"], task="poker", task_options={"heldout_size": 64}, tokens_max=600, turn_tokens_max=16,
        slice_samples_max=8,
    ),
}  # fmt: skip
"""Tasks that a model can be shown at beside its own: the task is another one, all else is as it was."""


def preset_of(model: str, task: str) -> Preset:
    """What `--model` and `--task` mean. Raises ConfigurationError."""
    preset = PRESETS.get(model)
    if preset is None:
        raise ConfigurationError(f"there is no demo of {model!r}; choose one of {', '.join(PRESETS)}")
    if task in ("", preset.task):
        return preset
    if (model, task) not in GAMES:
        known = [preset.task, *(game for name, game in GAMES if name == model)]
        raise ConfigurationError(f"there is no demo of {task!r} with {model}; choose one of {', '.join(known)}")
    return GAMES[model, task]


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The command line, with the preset filled in."""

    model: str
    preset: Preset
    nodes: int
    steps: int
    S: int
    kappa: int
    learning_rate: float
    seed: int
    out: Path
    screen: bool


@dataclass(frozen=True, slots=True)
class Places:
    """Where everything of one demo lies."""

    out: Path

    @property
    def work(self) -> Path:
        """Everything but the results."""
        return self.out / "work"

    @property
    def model(self) -> Path:
        """The model folder."""
        return self.work / "model"

    @property
    def coordinator(self) -> Path:
        """The coordinator's settings and state."""
        return self.work / "coordinator"

    @property
    def learner(self) -> Path:
        """The learner's settings and home."""
        return self.work / "learner"

    @property
    def logs(self) -> Path:
        """One log a process."""
        return self.work / "logs"

    def node(self, name: str) -> Path:
        """A node's home."""
        return self.work / name

    def join_file(self, name: str) -> Path:
        """A node's join string."""
        return self.work / f"{name}.join"

    def log(self, name: str) -> Path:
        """A process's log."""
        return self.logs / f"{name}.log"


def clear(places: Places) -> None:
    """Make the folder of a demo, clearing what an earlier demo left. Raises ConfigurationError for anyone else's."""
    out = places.out
    try:
        out.mkdir(parents=True, exist_ok=True)
        if any(entry.name != "lock" for entry in out.iterdir()) and not (out / MARK).exists():
            raise ConfigurationError(f"{out} is not empty and not from a demo; choose another folder with --out")
        (out / MARK).touch()
        if places.work.exists():
            shutil.rmtree(places.work)
        for name in RESULT_FILES:
            (out / name).unlink(missing_ok=True)
        places.logs.mkdir(parents=True)
    except OSError as error:
        raise ConfigurationError(f"cannot write to the folder {out}: {error.strerror}") from error


def free_ports(count: int) -> list[int]:
    """Distinct ports that were free on loopback just now. Fixed ones, so that a restarted daemon is found again."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(held.getsockname()[1]) for held in sockets]
    for held in sockets:
        held.close()
    return ports


def coordinator_settings(options: DemoOptions, places: Places, *, learner: str, port: int, rest: int) -> str:
    """The text of coordinator.toml."""
    preset = options.preset
    top = {"state_dir": "state", "listen": [f"/ip4/127.0.0.1/tcp/{port}"], "heartbeat_seconds": 5}
    run = {
        "name": RUN,
        "task": preset.task,
        "model_dir": str(places.model.resolve()),
        "learner": learner,
        "steps": options.steps,
        "seed": options.seed,
        "S": options.S,
        "kappa": options.kappa,
        "R": preset.R,
        "n": preset.n,
        "tokens_max": preset.tokens_max,
        "turn_tokens_max": preset.turn_tokens_max,
        "temperature": 1.0,
        "slice_samples_max": preset.slice_samples_max,
        "lease_seconds": preset.lease_seconds,
    }
    tables = {"": top, "rest": {"host": "127.0.0.1", "port": rest}, "run": run}
    return toml(tables | ({"run.task_options": preset.task_options} if preset.task_options else {}))


def learner_settings(options: DemoOptions, places: Places, *, coordinator: str, port: int) -> str:
    """The text of learner.toml. `coordinator` is its address with its peer id: no token is needed."""
    settings = {
        "home": "home",
        "coordinator": coordinator,
        "run": RUN,
        "model_dir": str(places.model.resolve()),
        "listen": [f"/ip4/127.0.0.1/tcp/{port}"],
        "domain": options.preset.domain,
        "seed": options.seed,
    }
    train = {"learning_rate": options.learning_rate, "micro_tokens": options.preset.micro_tokens}
    return toml({"": settings, "train": train})


def toml(tables: Mapping[str, Mapping[str, object]]) -> str:
    """TOML of tables of strings, numbers and lists of strings, all of which JSON writes the same way."""
    parts = []
    for name, values in tables.items():
        parts += [f"[{name}]"] if name else []
        parts += [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]
        parts.append("")
    return "\n".join(parts)
