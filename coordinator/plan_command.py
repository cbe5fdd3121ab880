"""`echo2 plan`: the settings it reads, from flags and from a file, and the command."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import Field, model_validator

from echo2.p2p.errors import ConfigurationError
from echo2.p2p.settings import Settings, make_settings, read_toml

from .capacity import GAMMA
from .money import micro_dollars
from .planning import NodeClass, Setup, make_plan

if TYPE_CHECKING:
    from typing import Self

TABLE_TO = 8
"""Budgets shown unless said otherwise: beyond S of about 6 training has been seen to become unstable."""

CLASSES_MAX = 32
COUNT_MAX = 10_000


class NodeClassSettings(Settings):
    """`[[nodes]]`: nodes of one kind that may be had."""

    name: Annotated[str, Field(min_length=1, max_length=64, description="what you call them")]
    count: Annotated[int, Field(ge=1, le=COUNT_MAX, description="how many may be had")] = 100
    rollouts_per_second: Annotated[
        float | None, Field(gt=0, le=1e6, description="accepted rollouts per second of one node, mu_i")
    ] = None
    tokens_per_second: Annotated[
        float | None, Field(gt=0, le=1e9, description="of one node, instead; with response_tokens")
    ] = None
    price_hour: Annotated[float, Field(ge=0, le=1e6, description="dollars an hour for one; 0 = volunteers")] = 0.0


class PlanSettings(Settings):
    """The whole file."""

    train_seconds: Annotated[float, Field(gt=0, le=1e6, description="one training step, T_train")]
    broadcast_seconds: Annotated[
        float, Field(ge=0, le=1e6, description="publish until enough nodes can generate with it, T_bcast")
    ]
    S: Annotated[int, Field(ge=0, le=1000, description="staleness budget in steps; 0 = synchronous")] = 3
    kappa: Annotated[int | None, Field(ge=1, le=1000, description="steps between snapshots; S - 1 unless set")] = None
    R: Annotated[int, Field(ge=1, le=1_000_000, description="rollouts per training step, a multiple of n")] = 256
    n: Annotated[int, Field(ge=1, le=1024, description="rollouts per prompt")] = 8
    steps: Annotated[int, Field(ge=1, le=10_000_000, description="training steps; above 1 the whole run is priced")] = 1
    gamma: Annotated[float, Field(ge=1, le=10, description="mu_target = gamma mu_min")] = GAMMA
    price_learner_hour: Annotated[float, Field(ge=0, le=1e6, description="dollars for the learner's machine")] = 0.0
    response_tokens: Annotated[float | None, Field(gt=0, le=1e6, description="mean length of a response")] = None
    nodes: Annotated[
        tuple[NodeClassSettings, ...],
        Field(
            min_length=1, max_length=CLASSES_MAX, description="the kinds of nodes that may be had, tables of their own"
        ),
    ]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.R % self.n:
            raise ValueError(f"R = {self.R} must be a multiple of n = {self.n}: a step is made of whole groups")
        if self.kappa is not None and self.kappa > self.S + 1:
            raise ValueError(f"kappa = {self.kappa} must be at most S + 1 = {self.S + 1}")
        for kind in self.nodes:
            if self.rate(kind) is None:
                raise ValueError(
                    f"nodes {kind.name!r}: say rollouts_per_second, or tokens_per_second and response_tokens"
                )
        return self

    def rate(self, kind: NodeClassSettings) -> float | None:
        """mu_i of a class, stated or from tokens."""
        if kind.rollouts_per_second is not None:
            return kind.rollouts_per_second
        if kind.tokens_per_second is not None and self.response_tokens is not None:
            return kind.tokens_per_second / self.response_tokens
        return None

    def setup(self) -> Setup:
        """For the planner, with money in whole micro-dollars."""
        return Setup(
            train_seconds=self.train_seconds,
            broadcast_seconds=self.broadcast_seconds,
            R=self.R,
            n=self.n,
            classes=tuple(
                NodeClass(kind.name, kind.count, self.rate(kind) or 0.0, micro_dollars(kind.price_hour))
                for kind in self.nodes
            ),
            learner_price=micro_dollars(self.price_learner_hour),
            gamma=self.gamma,
            steps=self.steps,
        )


def plan(
    file: Annotated[Path | None, typer.Argument(metavar="[PLAN.TOML]", help="what is known; flags are over it")] = None,
    train_seconds: Annotated[float | None, typer.Option(help="one training step, T_train")] = None,
    broadcast_seconds: Annotated[float | None, typer.Option(help="until enough nodes have a snapshot, T_bcast")] = None,
    S: Annotated[int | None, typer.Option("--S", help="staleness budget in steps", show_default="3")] = None,  # noqa: N803
    kappa: Annotated[int | None, typer.Option(help="steps between snapshots", show_default="S - 1")] = None,
    R: Annotated[int | None, typer.Option("--R", help="rollouts a training step", show_default="256")] = None,  # noqa: N803
    n: Annotated[int | None, typer.Option("--n", help="rollouts a prompt", show_default="8")] = None,
    steps: Annotated[int | None, typer.Option(help="training steps, to price the whole run")] = None,
    node: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME:COUNT:MU:PRICE", help="nodes to be had, mu_i, dollars an hour; several times"),
    ] = None,
    learner_price: Annotated[float | None, typer.Option(help="dollars an hour for the learner's machine")] = None,
    table_to: Annotated[int, typer.Option(min=0, max=64, help="the table goes from S = 0 to this")] = TABLE_TO,
    as_json: Annotated[bool, typer.Option("--json", help="the plan as one JSON object")] = False,
) -> None:
    """Which nodes to rent for a run, what a step costs, how stale it gets, and how all that changes with S.

    Exit code 1 when the plan does not fit: it says which number to change.
    """
    flags = {
        "train_seconds": train_seconds,
        "broadcast_seconds": broadcast_seconds,
        "S": S,
        "kappa": kappa,
        "R": R,
        "n": n,
        "steps": steps,
        "price_learner_hour": learner_price,
        "nodes": tuple(_class(text) for text in node) if node else None,
    }
    settings = read_plan(file, {key: value for key, value in flags.items() if value is not None})
    report = make_plan(settings.setup(), S=settings.S, kappa=settings.kappa, table_to=table_to)
    if as_json:
        print(json.dumps(asdict(report)))
    else:
        from .plan_text import show

        show(report, sys.stdout)
    raise typer.Exit(0 if report.asked.enough and report.asked.feasible else 1)


def read_plan(file: Path | None, flags: dict[str, Any]) -> PlanSettings:
    """The file with the flags over it. Raises ConfigurationError."""
    values = {} if file is None else read_toml(file)
    missing = [name for name in ("train_seconds", "broadcast_seconds", "nodes") if name not in values | flags]
    if missing:
        names = {"nodes": "--node NAME:COUNT:MU:PRICE"}
        said = ", ".join(names.get(name, f"--{name.replace('_', '-')}") for name in missing)
        raise ConfigurationError(f"a plan needs {said}, as flags or in a file")
    return make_settings(values | flags, PlanSettings, source="the plan" if file is None else str(file))


def _class(text: str) -> dict[str, Any]:
    parts = text.rsplit(":", 3)
    try:
        name, count, mu, price = parts
        return {"name": name, "count": int(count), "rollouts_per_second": float(mu), "price_hour": float(price)}
    except ValueError as error:
        raise ConfigurationError(
            f"--node {text[:64]!r} is not NAME:COUNT:MU:PRICE, for example rtx4090:20:1.4:0.35"
        ) from error
