"""The demo's eyes: REST of the coordinator and the daemons' status files, gathered into what is shown and reported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx

from echo2.p2p.daemon import STATUS_FILE, read_status

from .demo_options import RUN
from .demo_report import TERMINAL_STATES, DemoRecord, NodeTally
from .demo_screen import NodeRow, ScreenState
from .views import NodeView, PoolView, RunView

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from .demo_options import DemoOptions, Places

REQUEST_SECONDS = 10.0
"""For one answer of the coordinator, on a machine that is busy training."""


class Watch:
    """What is known of the run. `look` refreshes it; everything else reads."""

    def __init__(self, options: DemoOptions, places: Places, names: Sequence[str], clock: Callable[[], float]) -> None:
        self._options = options
        self._names = names
        self._places = places
        self._clock = clock
        self._started = clock()
        self.run: RunView | None = None
        self.pool: PoolView | None = None
        self.nodes: dict[str, NodeView] = {}
        self.steps: dict[int, dict[str, Any]] = {}
        self.own: dict[str, dict[str, Any]] = {}
        """Status files: of each node by name, and of the learner."""

        self.silent = "the coordinator has not answered yet"
        """Why REST cannot be read just now; "" when it can."""

        self._first_step_at: float | None = None
        self._last_step_at = 0.0
        self._moved_at = clock()
        self._shape: tuple[object, ...] = ()

    async def look(self, client: httpx.AsyncClient) -> None:
        """One round of questions. A coordinator that does not answer is noted, not raised."""
        try:
            self.pool = PoolView.model_validate_json(await _get(client, "/v1/pool"))
            self.run = RunView.model_validate_json(await _get(client, f"/v1/runs/{RUN}"))
            nodes = (await client.get("/v1/nodes")).raise_for_status().json()
            self.nodes = {node["peer"]: NodeView.model_validate(node) for node in nodes}
            self.silent = ""
        except httpx.HTTPError as error:
            self.silent = f"the coordinator does not answer: {type(error).__name__}"
        homes = {"learner": self._places.learner / "home"} | {name: self._places.node(name) for name in self._names}
        for name, home in homes.items():
            status = read_status(home / STATUS_FILE)
            if status is not None:
                self.own[name] = status
        self._note()

    def _note(self) -> None:
        run, now = self.run, self._clock()
        if run is None:
            return
        for step in run.series:
            if step.step not in self.steps:
                if self._first_step_at is None:
                    self._first_step_at = now - step.train_seconds
                self._last_step_at = now
            self.steps[step.step] = step.model_dump()
        shape = (
            run.state, run.version, run.learner_version, run.evaluated, run.rollouts,
            *(node.version for node in self.nodes.values()),
            *(status.get("state") for status in self.own.values()),
        )  # fmt: skip
        if shape != self._shape:
            self._shape, self._moved_at = shape, now

    @property
    def still_seconds(self) -> float:
        """How long nothing has moved."""
        return self._clock() - self._moved_at

    @property
    def seconds(self) -> float:
        """From the first step's start to the last one's end, as precise as the looking was frequent."""
        return 0.0 if self._first_step_at is None else self._last_step_at - self._first_step_at

    @property
    def waiting_for(self) -> str:
        """What the run waits for: the first one that says so."""
        if self.silent:
            return self.silent
        pool = self.pool.trouble if self.pool else ""
        run = self.run.waiting if self.run else ""
        return pool or run or str(self.own.get("learner", {}).get("waiting_for") or "")

    def rollouts(self) -> dict[str, int]:
        """Counts by state; `left` are those held or admitted."""
        if self.run is None:
            return {}
        counts = self.run.rollouts
        known = {key: int(getattr(counts, key)) for key in ("submitted", *TERMINAL_STATES)}
        return known | {"left": counts.held + counts.admitted}

    def heldout(self) -> list[tuple[int, float]]:
        """(version, mean) of complete held-out evaluations."""
        marks = self.run.evaluations if self.run else ()
        return [(mark.version, mark.mean) for mark in marks if mark.complete and mark.mean is not None]

    def measures(self) -> list[tuple[int, Mapping[str, float]]]:
        """(version, means of what its episodes measured) of complete held-out evaluations of several turns."""
        marks = self.run.evaluations if self.run else ()
        return [(mark.version, mark.details) for mark in marks if mark.complete and mark.details]

    def series(self) -> list[dict[str, Any]]:
        """Every step seen, in order."""
        return [self.steps[step] for step in sorted(self.steps)]

    def screen(
        self, *, title: str, phase: str, waiting_for: str, restarts: Mapping[str, int], notes: Sequence[str]
    ) -> ScreenState:
        """What to show now. `waiting_for` is the demo's own; the run's is shown when there is none."""
        run, series = self.run, self.series()
        learner = self.own.get("learner", {})
        return ScreenState(
            title=title,
            phase=phase,
            waiting_for=waiting_for or self.waiting_for,
            seconds=self._clock() - self._started,
            step=len(series),
            steps=self._options.steps,
            rewards=[step["reward_mean"] for step in series],
            heldout=self.heldout(),
            staleness=series[-1]["staleness"] if series else None,
            S=self._options.S,
            bubble=run.bubble if run else None,
            t_bcast_seconds=run.t_bcast_seconds if run else None,
            t_train_seconds=run.t_train_seconds if run else None,
            rollouts=self.rollouts(),
            nodes=[self._row(name, restarts.get(name, 0)) for name in self._names],
            learner=str(learner.get("state", "")),
            notes=notes,
        )

    def _row(self, name: str, restarts: int) -> NodeRow:
        own = self.own.get(name, {})
        seen = self.nodes.get(str(own.get("peer", "")))
        waiting = own.get("waiting_for") or (seen.reason if seen else "")
        return NodeRow(
            name=name,
            state=str(own.get("state", "")),
            version=own.get("version"),
            rate=seen.mu if seen else None,
            submitted=int(own.get("rollouts_submitted") or 0),
            installs=int(own.get("installs") or 0),
            restarts=restarts,
            waiting_for=str(waiting or ""),
        )

    def record(self, *, restarts: Mapping[str, int], failure: str) -> DemoRecord:
        """Everything, for the report."""
        options, preset, run = self._options, self._options.preset, self.run
        tallies = []
        for name in self._names:
            own = self.own.get(name, {})
            peer = str(own.get("peer", ""))
            seen = self.nodes.get(peer)
            tallies.append(
                NodeTally(
                    name=name,
                    peer=peer,
                    installs=int(own.get("installs") or 0),
                    submitted=int(own.get("rollouts_submitted") or 0),
                    submitted_by_coordinator=seen.rollouts.submitted if seen else 0,
                )
            )
        return DemoRecord(
            run=RUN,
            model=options.model,
            task=preset.task,
            seed=options.seed,
            steps_wanted=options.steps,
            S=options.S,
            kappa=options.kappa,
            R=preset.R,
            n=preset.n,
            learning_rate=options.learning_rate,
            steps=self.series(),
            seconds=self.seconds,
            heldout=self.heldout(),
            rollouts=self.rollouts(),
            nodes=tallies,
            learner_consumed=int(self.own.get("learner", {}).get("consumed") or 0),
            snapshots_published=run.snapshots_published if run else 0,
            t_bcast_seconds=run.t_bcast_seconds if run else None,
            restarts=restarts,
            failure=failure,
            measures=self.measures(),
        )


async def _get(client: httpx.AsyncClient, path: str) -> bytes:
    return (await client.get(path)).raise_for_status().content
