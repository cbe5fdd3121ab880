"""A researcher's run file: the `[run]` of the coordinator and the tables of the learner in one TOML file.

| table                                      | becomes                                                                 |
|--------------------------------------------|-------------------------------------------------------------------------|
| `[run]`, `[run.task_options]`              | those of `coordinator.toml`; `learner` may be missing: then it is made  |
| `[objective]` `[train]` `[adapter]` `[metrics]` | those of `learner.toml`                                            |
| `[learner]`                                | the other keys of `learner.toml` that are the run's: `domain`, `seed`   |
| `[coordinator]`                            | the other keys of `coordinator.toml`: `listen`, `announce`, `[rest]`    |
| `[forecast]`                               | what is known of speed and price; not written anywhere                  |

The learner's tables are judged by the learner's own program (`echo2-learner check`), which alone knows them.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from echo2.p2p.errors import ConfigurationError
from echo2.p2p.settings import Settings, make_settings, read_toml

from .config import RunConfig

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

LEARNER_TABLES = ("objective", "train", "adapter", "metrics")

Table = dict[str, Any]


class ForecastSettings(Settings):
    """`[forecast]`: what `--dry-run` reckons with. Seconds are taken from the coordinator's pool where it is named."""

    nodes: Annotated[int | None, Field(ge=1, le=100_000, description="nodes of the pool")] = None
    node_rollouts_per_second: Annotated[
        float | None, Field(gt=0, le=1e6, description="accepted rollouts per second of one node, mu_i")
    ] = None
    node_tokens_per_second: Annotated[
        float | None, Field(gt=0, le=1e9, description="of one node, over all it generates side by side")
    ] = None
    response_tokens: Annotated[
        float | None, Field(gt=0, le=1e6, description="mean length of a response; with node_tokens_per_second")
    ] = None
    train_seconds: Annotated[float | None, Field(gt=0, le=1e6, description="one training step, T_train")] = None
    broadcast_seconds: Annotated[
        float | None, Field(ge=0, le=1e6, description="publish until enough nodes can generate with it, T_bcast")
    ] = None
    price_node_hour: Annotated[float | None, Field(ge=0, le=1e6, description="dollars asked for one node")] = None
    price_learner_hour: Annotated[
        float | None, Field(ge=0, le=1e6, description="dollars for the learner's machine")
    ] = None

    @property
    def rate(self) -> float | None:
        """mu_i, stated or from tokens; None when neither."""
        if self.node_rollouts_per_second is not None:
            return self.node_rollouts_per_second
        if self.node_tokens_per_second is not None and self.response_tokens is not None:
            return self.node_tokens_per_second / self.response_tokens
        return None


class RunFile(Settings):
    """The file as a whole."""

    run: RunConfig
    objective: Table = Field(default_factory=dict, description="a table of learner.toml")
    train: Table = Field(default_factory=dict, description="a table of learner.toml")
    adapter: Table | None = Field(default=None, description="a table of learner.toml")
    metrics: Table = Field(default_factory=dict, description="a table of learner.toml")
    learner: Table = Field(default_factory=dict, description="other keys of learner.toml")
    coordinator: Table = Field(default_factory=dict, description="other keys of coordinator.toml")
    forecast: ForecastSettings = ForecastSettings()


@dataclass(frozen=True, slots=True)
class Submission:
    """A run file that is in order, the values it was made from, and which of them came from flags."""

    path: Path
    file: RunFile
    values: Mapping[str, Any]
    flags: frozenset[str]

    def learner_values(self) -> Table:
        """What `learner.toml` says of this run, beside where it lives and whom it dials."""
        tables = {name: self.values[name] for name in LEARNER_TABLES if name in self.values}
        return {**self.file.learner, **tables}

    def origin(self, key: str) -> str:
        """Where the value of a dotted key comes from: flag, file or default."""
        if any(key == flag or key.startswith(f"{flag}.") for flag in self.flags):
            return "flag"
        found: Any = self.values
        for part in key.split("."):
            if not isinstance(found, Mapping) or part not in found:
                return "default"
            found = found[part]
        return "file"


def load_run_file(path: Path, flags: Sequence[str], *, learner: str) -> Submission:
    """Read a run file, with `KEY=VALUE` flags over it. `learner`: the peer id where the file names none.

    Raises ConfigurationError, one line, for anything a person must put right.
    """
    return load_values(read_toml(path), path, flags, learner=learner, folder=path.parent)


def load_values(
    values: Table, path: Path, flags: Sequence[str] = (), *, learner: str, folder: Path | None = None
) -> Submission:
    """The same of values that were read. Paths are taken from `folder`. Raises ConfigurationError."""
    keys = frozenset(_set(values, flag) for flag in flags)
    run = values.get("run")
    filled = values | {"run": {"learner": learner, **run}} if isinstance(run, dict) else values
    with blaming(path, flags):
        file = make_settings(filled, RunFile, source=str(path), folder=folder)
    return Submission(path, file, values, keys)


@contextmanager
def blaming(path: Path, flags: Sequence[str]) -> Iterator[None]:
    """Around what judges the values of `path` with `flags` over it: a mistake of a flag is not said to be the file's.

    An error that begins with a flag's key is that flag's; any other may come of the two together.
    """
    try:
        yield
    except ConfigurationError as error:
        found = re.match(rf"{re.escape(str(path))}(?: \[(\w+)\])?: (.*)", str(error), re.DOTALL)
        if not flags or found is None:
            raise
        table, text = found.groups()
        named = re.match(r"(?:unknown key )?'?([\w.-]+)", text)
        key = f"{table}.{named[1]}" if table and named else named[1] if named else ""
        for flag in flags:
            given = flag.partition("=")[0].strip()
            if key == given or key.startswith(f"{given}.") or given.startswith(f"{key}."):
                raise ConfigurationError(f"--set {_short(flag)}: {text}") from error
        beside = f" [{table}]" if table else ""
        over = " ".join(f"--set {_short(flag)}" for flag in flags)
        raise ConfigurationError(f"{path}{beside} with {over}: {text}") from error


def _short(flag: str) -> str:
    return flag if len(flag) <= 64 else flag[:61] + "..."


def _set(values: Table, flag: str) -> str:
    key, mark, text = flag.partition("=")
    key = key.strip()
    if not mark or not all(key.split(".")):
        raise ConfigurationError(f"--set {flag[:64]!r} is not KEY=VALUE, for example --set run.S=6")
    if key not in RunFile.model_fields and key in RunConfig.model_fields:
        raise ConfigurationError(f"--set {_short(flag)}: write run.{_short(flag)}")
    try:
        value = tomllib.loads(f"x = {text}")["x"]
    except ValueError:
        value = text.strip()  # a word needs no quotes
    table: Any = values
    *path, last = key.split(".")
    for part in path:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigurationError(f"--set {key}: {part!r} is a value in the file, not a table")
    table[last] = value
    return key


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and their values; an empty table is a value."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{key}.")
        else:
            yield key, value


def toml_text(values: Mapping[str, Any], name: str = "") -> str:
    """TOML of a table of plain values and tables; what is None is left out."""
    plain = {key: value for key, value in values.items() if value is not None and not isinstance(value, Mapping)}
    lines = [f"{_key(key)} = {_value(value)}" for key, value in plain.items()]
    parts = [(f"[{name}]\n" if name else "") + "\n".join(lines) + "\n"] if lines or name else []
    for key, value in values.items():
        if isinstance(value, Mapping):
            parts.append(toml_text(value, f"{name}.{_key(key)}" if name else _key(key)))
    return "\n".join(parts)


def _key(name: str) -> str:
    bare = name.isascii() and name.replace("-", "").replace("_", "").isalnum()
    return name if bare else _quoted(name)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")  # which JSON takes as it is


def _value(value: object) -> str:
    """As JSON has it, but for tables inside lists: TOML's have '=' in them."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    if isinstance(value, bool | int):
        return json.dumps(value)
    return repr(value) if isinstance(value, float) else _quoted(str(value))
