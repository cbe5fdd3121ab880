"""`echo2 submit`: a run file judged before anything is spent, and the settings of both daemons made from it.

Submitting a run means to write `coordinator.toml` and `learner.toml`, with keys for both, into a folder; with them the
run is started in a pool of its own. `--dry-run` writes nothing. Into a pool that is there a run goes by
`echo2-coordinator runs create`, which makes the learner's settings with `learner_toml`.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echo2.p2p.errors import ConfigurationError
from echo2.p2p.identity import Identity, load_or_create_identity
from echo2.p2p.join import parse_join_string
from echo2.p2p.settings import make_settings, refuse_used

from .config import IDENTITY_FILE, OPERATOR_TOKEN_FILE, CoordinatorConfig, RestConfig, RunConfig
from .demo_process import command
from .estimate import Forecast, Plan, Supply, forecast
from .operator_token import make_operator_token
from .run_file import LEARNER_TABLES, Submission, blaming, flat, load_run_file, toml_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from .preview import Seen
    from .views import PoolView

    LearnerCheck = Callable[[Mapping[str, Any], str], Mapping[str, Any]]

CHECK_SECONDS = 120.0
"""For the learner's program to judge a settings file, on a machine that is busy training."""

UNKNOWN_PEER = Identity(b"\0" * 32).peer_id
"""Stands for the peer ids of keys that are not made in a dry run."""

DEFAULT_REST_PORT = RestConfig().port

MADE = "made by submit"

LEARNER_RESERVED = {
    "home": "submit makes it",
    "coordinator": "submit makes it",
    "run": "run.name names the run",
    "model_dir": "run.model_dir names the folder",
    **dict.fromkeys(LEARNER_TABLES, "it is a table of its own"),
}
COORDINATOR_RESERVED = {"state_dir": "submit makes it", "run": "[run] is a table of its own"}
"""Keys of the two settings files that a run file has no say in, and why."""

PORT = "/tcp/"


@dataclass(frozen=True, slots=True)
class Report:
    """Everything `--dry-run` shows. `resolved`: dotted key, value, origin. `missing`: what a forecast still needs."""

    resolved: tuple[tuple[str, Any, str], ...]
    seen: Seen
    supply: Supply | None
    forecast: Forecast | None
    missing: tuple[str, ...]
    warnings: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "resolved": {key: {"value": value, "from": origin} for key, value, origin in self.resolved},
            "nodes_see": asdict(self.seen),
            "supply": None if self.supply is None else asdict(self.supply),
            "forecast": None if self.forecast is None else asdict(self.forecast),
            "missing": list(self.missing),
            "warnings": list(self.warnings),
        }


def read_submission(path: Path, flags: Sequence[str], *, check: LearnerCheck) -> tuple[Submission, Mapping[str, Any]]:
    """The run file, and every setting of the learner's with its value. Raises ConfigurationError."""
    submission = load_run_file(path, flags, learner=UNKNOWN_PEER)
    with blaming(path, flags):
        coordinator_config(submission)
        learner = learner_settings(submission, coordinator=f"/ip4/127.0.0.1/tcp/1/p2p/{UNKNOWN_PEER}")
        return submission, check(learner, str(path))


def coordinator_config(submission: Submission) -> CoordinatorConfig:
    """The coordinator's settings as a whole. Raises ConfigurationError."""
    run = submission.file.run.model_dump(mode="json")
    source = f"{submission.path} [coordinator]"
    _reserved(submission.path, "coordinator", submission.file.coordinator, COORDINATOR_RESERVED)
    return make_settings({**submission.file.coordinator, "run": run}, CoordinatorConfig, source=source)


def learner_settings(submission: Submission, *, coordinator: str) -> dict[str, Any]:
    """The values of `learner.toml`."""
    run = submission.file.run
    _reserved(submission.path, "learner", submission.file.learner, LEARNER_RESERVED)
    return {
        "home": "home",
        "coordinator": coordinator,
        "run": run.name,
        "model_dir": str(run.model_dir.absolute()),
        **submission.learner_values(),
    }


def learner_toml(submission: Submission, join: str) -> str:
    """The file `learner.toml` for a run of a coordinator that is there; `join`: a join string of its. Raises
    ConfigurationError."""
    coordinator = parse_join_string(join)
    address = f"{coordinator.addresses[0]}/p2p/{coordinator.peer}"
    return toml_text({**learner_settings(submission, coordinator=address), "home": "."})


def _reserved(path: Path, table: str, given: Mapping[str, Any], reserved: Mapping[str, str]) -> None:
    for key, why in reserved.items():
        if key in given:
            raise ConfigurationError(f"{path}: {table}.{key} cannot be set here: {why}")


def ask_learner(settings: Mapping[str, Any], source: str, *, seconds: float = CHECK_SECONDS) -> Mapping[str, Any]:
    """Every setting of the learner's with its value, from its own program. Raises ConfigurationError."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "learner.toml"
        path.write_text(toml_text(settings), encoding="utf-8")
        try:
            done = subprocess.run(  # noqa: S603 - our own program
                command("echo2-learner", "check", "--config", str(path)), capture_output=True, text=True,
                timeout=seconds, check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigurationError(f"echo2-learner cannot judge the learner's tables: {error}") from error
    if done.returncode:
        words = done.stderr.strip().splitlines()[-1:] or ["it says nothing"]
        raise ConfigurationError(words[0].removeprefix("error: ").replace(str(path), source))
    found: Mapping[str, Any] = json.loads(done.stdout)
    return found


def resolve(submission: Submission, learner: Mapping[str, Any]) -> tuple[tuple[str, Any, str], ...]:
    """Every key of the run and of training with its value and where it comes from."""
    run = submission.file.run.model_dump(mode="json")
    tables: dict[str, Any] = {"run": run} | {name: learner.get(name) for name in LEARNER_TABLES}
    tables["learner"] = {
        key: learner[key] for key in ("domain", "seed", "threads", "checkpoints_kept", "partial_seconds")
    }
    tables["forecast"] = submission.file.forecast.model_dump(mode="json")
    rows = [(key, value, submission.origin(key)) for key, value in flat(tables)]
    return tuple((key, None, MADE) if value == UNKNOWN_PEER else (key, value, origin) for key, value, origin in rows)


def report(submission: Submission, learner: Mapping[str, Any], seen: Seen, pool: PoolView | None) -> Report:
    """What is to be said of a run before it begins."""
    run = submission.file.run
    supply, missing = known_supply(submission, pool)
    found = None if supply is None else forecast(plan_of(run, seen.heldout), supply)
    return Report(
        resolved=resolve(submission, learner),
        seen=seen,
        supply=supply,
        forecast=found,
        missing=missing,
        warnings=tuple(warnings(run, learner, seen, supply, found)),
    )


def plan_of(run: RunConfig, heldout: int) -> Plan:
    """The numbers that a forecast needs of a run."""
    return Plan(
        S=run.S, kappa=run.kappa, R=run.R, n=run.n, steps=run.steps, slice_samples=run.slice_samples,
        lease_seconds=run.lease_seconds, heldout=heldout, eval_every=run.eval_every, eval_samples=run.eval_samples,
        eval_share=run.eval_share,
    )  # fmt: skip


def known_supply(submission: Submission, pool: PoolView | None) -> tuple[Supply | None, tuple[str, ...]]:
    """What the run will have, from `[forecast]` and then from a pool's own measures; or what is not known."""
    stated = submission.file.forecast
    nodes = stated.nodes or (pool.nodes_healthy if pool is not None else None) or None
    rate = stated.rate
    if rate is None and pool is not None and pool.mu_pool > 0 and pool.nodes_healthy:
        rate = pool.mu_pool / pool.nodes_healthy
    train = stated.train_seconds or (pool.t_train_seconds if pool is not None else None)
    broadcast = stated.broadcast_seconds
    if broadcast is None and pool is not None:
        broadcast = pool.t_bcast_seconds
    found = {
        "nodes": nodes,
        "node_rollouts_per_second (or node_tokens_per_second and response_tokens)": rate,
        "train_seconds": train,
        "broadcast_seconds": broadcast,
    }
    missing = tuple(f"forecast.{name}" for name, value in found.items() if value is None)
    if nodes is None or rate is None or train is None or broadcast is None:
        return None, missing
    return Supply(nodes, rate, train, broadcast, stated.price_node_hour, stated.price_learner_hour), ()


def warnings(
    run: RunConfig, learner: Mapping[str, Any], seen: Seen, supply: Supply | None, found: Forecast | None
) -> list[str]:
    """What a run like this will show too late, in words."""
    said = list(seen.problems)
    if seen.longest_prompt_tokens + run.tokens_max > seen.context_tokens:
        left = seen.context_tokens - seen.longest_prompt_tokens
        said.append(
            f"prompts of up to {seen.longest_prompt_tokens} tokens leave {left} of the model's {seen.context_tokens}: "
            f"run.tokens_max = {run.tokens_max} is cut for them"
        )
    if run.n == 1:
        said.append("run.n = 1: a group of one has no advantage, and nothing is learned")
    if run.temperature != 1 or run.top_k or run.top_p < 1 or run.min_p:
        said.append(
            "filters change what is sampled and not the log-probabilities that the importance ratio is of; evaluations "
            "are drawn at temperature 1 without filters"
            if run.top_k or run.top_p < 1 or run.min_p
            else "evaluations are drawn at temperature 1, whatever run.temperature is"
        )
    if learner["train"]["learning_rate"] == 0:
        said.append("train.learning_rate = 0 changes nothing: this is a test of the loop")
    if run.R // run.n < learner["objective"]["updates_per_step"]:
        said.append(
            f"a step has R / n = {run.R // run.n} groups for {learner['objective']['updates_per_step']} updates: "
            "some updates are empty"
        )
    if seen.train < run.R // run.n:
        said.append(f"the task has {seen.train} training prompts, a step takes {run.R // run.n}: it repeats them")
    if supply is None or found is None:
        return said
    return said + _of_forecast(run, supply, found)


def _of_forecast(run: RunConfig, supply: Supply, found: Forecast) -> list[str]:
    said = []
    if not found.overlap:
        least = (
            f"{found.nodes_needed} nodes like these would"
            if found.nodes_needed is not None
            else "no pool would, with this T_bcast"
        )
        said.append(f"the pool does not keep the learner busy (equation 1): {least}")
    if not found.feasible:
        said.append(
            "T_bcast + L + R / mu_pool is above (S - kappa + 1) T_train: the staleness budget makes the learner wait. "
            f"Any one of these mends it: {'; '.join(found.advice)}"
        )
    if found.lease_seconds > run.lease_seconds / 2:
        said.append(
            f"a lease takes a node about {found.lease_seconds:.0f} s of run.lease_seconds = {run.lease_seconds:g}: "
            "slow nodes will be too late"
        )
    if supply.nodes * run.slice_samples > run.R:
        said.append(
            f"{supply.nodes} nodes with {run.slice_samples} samples at a time are more than R = {run.R}: "
            "some will find no work; lower run.slice_samples_max"
        )
    if found.eval_answered < found.eval_answers:
        said.append(
            f"an evaluation under way wants {found.eval_answers} answers, and about {found.eval_answered} come before "
            "the pool moves on: each ends early, with the first prompts' mean. Raise run.eval_share, or lower "
            "run.eval_samples"
        )
    return said


# writing


@dataclass(frozen=True, slots=True)
class Written:
    """The folder made, and what to do next. `token` is the operator's, shown only now."""

    commands: tuple[str, ...]
    notes: tuple[str, ...]
    token: str


def write_folder(out: Path, path: Path, flags: Sequence[str], shown: Report) -> Written:
    """Make the settings of both daemons. Raises ConfigurationError, and then nothing of an older folder is changed."""
    refuse_used(out, "nothing was changed")
    state, home = out / "coordinator" / "state", out / "learner" / "home"
    try:
        for folder in (state, home):
            folder.mkdir(parents=True, mode=0o700)
        coordinator = load_or_create_identity(state / IDENTITY_FILE).peer_id
        named = load_run_file(path, flags, learner=UNKNOWN_PEER).file.run.learner != UNKNOWN_PEER
        made = UNKNOWN_PEER if named else load_or_create_identity(home / IDENTITY_FILE).peer_id
        submission = load_run_file(path, flags, learner=made)
        run = {**submission.values["run"], "learner": submission.file.run.learner}
        run["model_dir"] = str(submission.file.run.model_dir.absolute())
        if "task_options" in run:
            run["task_options"] = submission.file.run.task_options
        address = _address(coordinator_config(submission))
        learner = learner_settings(submission, coordinator=f"{address}/p2p/{coordinator}")
        settings = {**submission.file.coordinator, "run": run}
        (out / "coordinator" / "coordinator.toml").write_text(toml_text(settings), encoding="utf-8")
        (out / "learner" / "learner.toml").write_text(toml_text(learner), encoding="utf-8")
        (out / "report.json").write_text(json.dumps(shown.as_json(), indent=1) + "\n", encoding="utf-8")
        token = make_operator_token(state / OPERATOR_TOKEN_FILE)
    except OSError as error:
        raise ConfigurationError(f"cannot write to {out}: {error.strerror}") from error
    notes = []
    if named:
        notes.append(f"the key of {submission.file.run.learner} belongs into {home}; it is not made here")
    if address.startswith("/ip4/127.0.0.1/"):
        notes.append("learner.toml dials this machine; where the learner is another, set its 'coordinator' address")
    notes.append(
        f"learner.toml names the model {run['model_dir']}; where the learner is another machine, copy that folder "
        "there and set 'model_dir' to its place"
    )
    config = out / "coordinator" / "coordinator.toml"
    return Written(
        commands=(
            f"echo2-coordinator serve --config {config}",
            f"echo2-learner run --config {out / 'learner' / 'learner.toml'}",
            f"echo2-coordinator token create --config {config} --uses 10",
            f"echo2 watch {submission.file.run.name}{_where(coordinator_config(submission))}",
        ),
        notes=tuple(notes),
        token=token,
    )


def _address(config: CoordinatorConfig) -> str:
    """Where the learner dials the coordinator: as announced, else on this machine. Raises ConfigurationError."""
    if config.announce:
        return config.announce[0]
    for address in config.listen:
        port = int(address.rpartition(PORT)[2])
        if port:
            return f"/ip4/127.0.0.1{PORT}{port}"
    raise ConfigurationError("coordinator.listen has no fixed port: the learner could not find the coordinator again")


def _where(config: CoordinatorConfig) -> str:
    port = config.rest.port
    return "" if port in (0, DEFAULT_REST_PORT) else f" --coordinator http://127.0.0.1:{port}"
