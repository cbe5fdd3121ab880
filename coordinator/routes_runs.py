"""REST: the run, what came of its steps, what is done to it, and run files judged before they cost anything."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import HTTPException, Query, Request, Response

from echo2.p2p.errors import ConfigurationError
from echo2.p2p.join import NO_TOKEN

from .estimate import Forecast, Supply
from .preview import Seen
from .rest_guard import Asker, Body, Limit, Reason, RunPath, link_next, make_router
from .run_file import RunFile
from .submit import learner_toml
from .views import RunView, StepView, View

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from fastapi import APIRouter

    from .rest_guard import Rooms

STARTED = frozenset({"ready", "running"})
"""A run that is, needs no start: it begins with the learner's first snapshot."""


class WhyPerhaps(Body):
    """Why a run is started, paused, resumed or stopped."""

    reason: Reason = "asked over REST"


NO_REASON = WhyPerhaps()
"""What a request without a body means."""


class SettingView(View):
    """One key of a run file, its value, and whether it is the file's, a default or made by `echo2 submit`."""

    key: str
    value: Any
    origin: str


class ValidationView(View):
    """Whether a run file is in order; `problem` says what is not, and `settings` has every key if all is."""

    valid: bool
    problem: str
    settings: tuple[SettingView, ...]


class EstimateView(View):
    """What a run would be: time, price, staleness, by the file's `[forecast]` and then by the pool's own measures."""

    forecast: Forecast | None
    """None while not all is known that it needs: see `missing`."""
    missing: tuple[str, ...]
    supply: Supply | None
    warnings: tuple[str, ...]
    nodes_see: Seen
    settings: tuple[SettingView, ...]


START_LEARNER = (
    "the run waits for its learner: put its learner.toml into the home folder of the key that the run names, set "
    "model_dir in it to that machine's folder of the same model, then start it there: echo2-learner run --config "
    "learner.toml. Nothing has to be restarted."
)


class RunCreated(View):
    """A new run, and what its learner starts with."""

    run: RunView
    learner_toml: str
    next: str
    """What is left to be done, and by whom."""


TOML_TYPES = ("application/toml", "text/plain")

RUN_FILE: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "description": "a run file as `echo2 submit` takes it, in TOML, or the same tables in JSON",
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "properties": {name: {} for name in RunFile.model_fields},
                    "required": ["run"],
                }
            },
            **{kind: {"schema": {"type": "string", "maxLength": 32768}} for kind in TOML_TYPES},
        },
    }
}


def run_routes(rooms: Rooms) -> APIRouter:
    """List, create, get, metrics; validate, estimate; start, pause, resume, stop."""
    router, desk = make_router("runs"), rooms.desk

    @router.get("/v1/runs")
    async def runs() -> list[RunView]:
        """Every run, the first of the settings first."""
        return list(desk.runs_view())

    @router.post("/v1/runs", status_code=HTTPStatus.CREATED, openapi_extra=RUN_FILE)
    async def create(
        request: Request,
        who: Asker,
        reason: Annotated[Reason, Query(description="kept in the audit log")] = "asked over REST",
    ) -> RunCreated:
        """A run of a run file that is in order, on this coordinator's model. It is there after a restart."""
        content = await _run_file(request)
        try:
            submission = await rooms.judge.submission(content)
            learner = learner_toml(submission, rooms.join(NO_TOKEN))
            made = await desk.create_run(submission.file.run, actor=who.name, reason=reason)
        except ConfigurationError as error:
            raise HTTPException(HTTPStatus.UNPROCESSABLE_ENTITY, str(error)) from error
        return RunCreated(run=made, learner_toml=learner, next=START_LEARNER)

    @router.post("/v1/runs/validate", openapi_extra=RUN_FILE)
    async def validate(request: Request) -> ValidationView:
        """Whether a run file is in order, by the settings of coordinator and learner. Nothing is kept."""
        judged = await rooms.judge.validate(await _run_file(request))
        return ValidationView(valid=not judged.problem, problem=judged.problem, settings=_settings(judged.resolved))

    @router.post("/v1/runs/estimate", openapi_extra=RUN_FILE)
    async def estimate(request: Request) -> EstimateView:
        """What the run would be on this pool, with this coordinator's model. Nothing is kept."""
        content = await _run_file(request)
        try:
            shown = await rooms.judge.estimate(content)
        except ConfigurationError as error:
            raise HTTPException(HTTPStatus.UNPROCESSABLE_ENTITY, str(error)) from error
        return EstimateView(
            forecast=shown.forecast,
            missing=shown.missing,
            supply=shown.supply,
            warnings=shown.warnings,
            nodes_see=shown.seen,
            settings=_settings(shown.resolved),
        )

    @router.get("/v1/runs/{run}")
    async def run(run: RunPath) -> RunView:
        """One run: its state, what is waited for, rollouts by state, the last steps, evaluations."""
        return _known(rooms, run)

    @router.get("/v1/runs/{run}/metrics")
    async def metrics(
        request: Request,
        response: Response,
        run: RunPath,
        limit: Limit = 1000,
        after: Annotated[int, Query(ge=-1, le=2**53, description="only steps behind this one")] = -1,
    ) -> list[StepView]:
        """Every training step as the learner reported it, in order."""
        _known(rooms, run)
        steps = desk.steps_view(run, after=after, limit=limit)
        if len(steps) == limit:
            link_next(request, response, after=steps[-1].step)
        return steps

    def change(run: str, act: Callable[..., None], who: Asker, body: WhyPerhaps) -> RunView:
        _known(rooms, run)
        act(run, actor=who.name, reason=body.reason)
        return _known(rooms, run)

    @router.post("/v1/runs/{run}/start")
    async def start(run: RunPath, who: Asker, body: WhyPerhaps = NO_REASON) -> RunView:
        """Let leases flow. A run that is not paused is started already, and stays as it is."""
        found = _known(rooms, run)
        return found if found.state in STARTED else change(run, desk.resume_run, who, body)

    @router.post("/v1/runs/{run}/pause")
    async def pause(run: RunPath, who: Asker, body: WhyPerhaps = NO_REASON) -> RunView:
        """No new leases until resumed; what is out is still taken, scored and trained on."""
        return change(run, desk.pause_run, who, body)

    @router.post("/v1/runs/{run}/resume")
    async def resume(run: RunPath, who: Asker, body: WhyPerhaps = NO_REASON) -> RunView:
        """Leases of a paused run flow again."""
        return change(run, desk.resume_run, who, body)

    @router.post("/v1/runs/{run}/stop")
    async def stop(run: RunPath, who: Asker, body: WhyPerhaps = NO_REASON) -> RunView:
        """For good: no new leases, the learner ends its step and says what it trained on."""
        return change(run, desk.stop_run, who, body)

    return router


async def _run_file(request: Request) -> str | Mapping[str, Any]:
    """TOML as text, or tables. Raises HTTPException."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    body = await request.body()
    try:
        if kind in TOML_TYPES:
            return body.decode()
        if kind == "application/json":
            found = json.loads(body)
            if isinstance(found, dict):
                return found
            raise ValueError("it is not an object")
    except (ValueError, RecursionError) as error:
        raise HTTPException(HTTPStatus.UNPROCESSABLE_ENTITY, f"body: not a run file: {error}"[:300]) from error
    said = f"send a run file with the header Content-Type: {TOML_TYPES[0]}, or its tables as application/json"
    raise HTTPException(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, said)


def _settings(rows: tuple[tuple[str, Any, str], ...]) -> tuple[SettingView, ...]:
    return tuple(SettingView(key=key, value=value, origin=origin) for key, value, origin in rows)


def _known(rooms: Rooms, run: str) -> RunView:
    try:
        return rooms.desk.run_view(run)
    except KeyError as error:
        raise HTTPException(HTTPStatus.NOT_FOUND, f"there is no run {run}") from error
