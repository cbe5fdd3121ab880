"""What an operator sets: one frozen record, read from `coordinator.toml`.

Names follow DESIGN section 2 (S, kappa, R, n). Paths are taken from the file's own folder.
"""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from echo2.p2p.errors import BadSignature
from echo2.p2p.identity import check_peer_id
from echo2.p2p.messages import SAMPLES_MAX, TOKENS_MAX, Name, PeerId
from echo2.p2p.settings import Multiaddr, Port, Settings, SettingsPath, load_settings
from echo2.tasks.catalog import with_absolute_path
from echo2.tasks.task import TaskSpec, canonical_json

from .activation_records import Rules
from .admission_limits import Limits
from .capacity import GAMMA
from .money import micro_dollars
from .pricing import Budget, CreditRates
from .probation import WarmupRules

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

IDENTITY_FILE = "identity.key"
LEDGER_FILE = "ledger.sqlite3"
OPERATOR_TOKEN_FILE = "operator-token.sha256"  # noqa: S105 - the name of a file that holds only a hash
LOCAL_TOKEN_FILE = "local-token"  # noqa: S105 - the name of a file; beside the key, and as private

TOKEN_USES_MAX = 10_000
TOKEN_HOURS_MAX = 24 * 366.0
"""A join token for a whole pool for a year; more is a mistake."""

RUNS_MAX = 32
"""Runs of one pool: each has a scorer's process and its books in memory."""

LOOPBACK_HOSTS = frozenset({"127.0.0.1", "::1", "localhost"})


class RestConfig(Settings):
    """Where REST and the web page listen. Off loopback all data need a token, and tokens never go in the clear."""

    host: Annotated[str, Field(min_length=1, description="an IP address or name to listen on")] = "127.0.0.1"
    port: Port = 8080
    public_page: Annotated[
        bool, Field(description="everybody may see /public/RUN: progress, reward and contributions, without a token")
    ] = False
    certificate: Annotated[
        SettingsPath | None, Field(description="PEM: the certificate and those between it and its root; makes it HTTPS")
    ] = None
    key: Annotated[SettingsPath | None, Field(description="PEM: the certificate's key")] = None
    behind_proxy: Annotated[bool, Field(description="a proxy with TLS of its own is in front")] = False
    proxy_address: Annotated[
        str, Field(description="the proxy's IP address as seen from here: only it may connect")
    ] = ""

    @field_validator("certificate", "key", mode="before")
    @classmethod
    def _no_file(cls, path: object) -> object:
        return None if path == "" else path

    @model_validator(mode="after")
    def _never_in_the_clear(self) -> Self:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("rest.certificate and rest.key go together: set both, or neither")
        if self.behind_proxy and self.certificate is not None:
            raise ValueError("rest.behind_proxy and rest.certificate exclude each other: one of the two speaks TLS")
        if self.behind_proxy != bool(self.proxy_address):
            raise ValueError("rest.behind_proxy and rest.proxy_address go together: set both, or neither")
        if self.proxy_address:
            try:
                ipaddress.ip_address(self.proxy_address)
            except ValueError as error:
                raise ValueError(f"rest.proxy_address = {self.proxy_address!r} is not an IP address") from error
        if not (self.loopback or self.certificate or self.behind_proxy):
            raise ValueError(
                f"rest.host = {self.host!r} is not loopback, and tokens would cross the network in the clear: set "
                "rest.certificate and rest.key, or rest.behind_proxy and rest.proxy_address, or go back to 127.0.0.1 "
                "(from afar: ssh -L 8080:127.0.0.1:8080)"
            )
        return self

    @property
    def loopback(self) -> bool:
        """True when only processes of this machine can connect."""
        return self.host in LOOPBACK_HOSTS

    @property
    def open_reads(self) -> bool:
        """True when reading needs no token: whoever can connect is on this machine, and no proxy is."""
        return self.loopback and not self.behind_proxy

    @property
    def url(self) -> str:
        """Where a command on this machine finds it, if the port is a fixed one."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)  # noqa: S104 - compared, not bound
        scheme = "http" if self.certificate is None else "https"
        return f"{scheme}://[{host}]:{self.port}" if ":" in host else f"{scheme}://{host}:{self.port}"


class ActivationConfig(Settings):
    """Which nodes of a price work, and what they may cost (equation 3). Volunteers, without a price, always work."""

    prices: dict[PeerId, Annotated[float, Field(ge=0, le=1e6)]] = Field(
        default_factory=dict,
        description="dollars an hour by peer id: what a node that names no price is paid, the most for one that does",
    )
    period_seconds: Annotated[
        float, Field(ge=1, le=86_400, description="a loss is answered after one period, a surplus after three")
    ] = 60.0
    gamma: Annotated[float, Field(ge=1, le=10, description="mu_target = gamma mu_min: room for mu_pool to vary")] = (
        GAMMA
    )
    mu_start: Annotated[
        float, Field(ge=0, le=1e6, description="rollouts a second to aim at before a step was timed; 0 = one node")
    ] = 0.0
    price_ceiling_hour: Annotated[
        float, Field(ge=0, le=1e6, description="dollars an hour; no node that asks more works; 0 = any")
    ] = 0.0
    spend_ceiling_hour: Annotated[
        float, Field(ge=0, le=1e6, description="dollars an hour that all working nodes may cost; 0 = any")
    ] = 0.0
    order: Annotated[
        Literal["price", "shuffle"], Field(description="shuffle = prices are not looked at, for comparison")
    ] = "price"
    shuffle_seed: Annotated[int, Field(ge=0, le=2**53, description="of that shuffle")] = 0

    def rules(self) -> Rules:
        """For the loop, with money in whole micro-dollars."""
        return Rules(
            period_seconds=self.period_seconds,
            gamma=self.gamma,
            price_ceiling=micro_dollars(self.price_ceiling_hour) or None,
            spend_ceiling=micro_dollars(self.spend_ceiling_hour) or None,
            nocost_seed=self.shuffle_seed if self.order == "shuffle" else None,
        )

    def price(self, peer: str, asked: int = 0) -> int:
        """What a node that asks so much would be paid, in micro-dollars an hour; 0 for a volunteer.

        A node named in `prices` gets what it asks, at most what stands there, and that when it asks for nothing.
        """
        if peer not in self.prices:
            return asked
        most = micro_dollars(self.prices[peer])
        return min(asked, most) if asked else most


class AdmissionConfig(Settings):
    """Who may take part, what a new node has to show, and how much of the pool one place may be."""

    mode: Annotated[
        Literal["open", "token", "hand"], Field(description="open = anyone; hand = the operator admits each new node")
    ] = "token"
    applied_max: Annotated[
        int, Field(ge=1, le=10_000, description="nodes that wait for the operator; those long silent make room")
    ] = 200
    warmup_leases: Annotated[
        int, Field(ge=0, le=1000, description="leases of a new node's probation; 0 = no probation")
    ] = 10
    warmup_returned: Annotated[
        float, Field(gt=0, le=1, description="share of them that must come back valid in time")
    ] = 0.8
    benchmark_tokens_per_second_min: Annotated[
        float, Field(ge=0, le=1e9, description="of a new node's first leases, by our clock; 0 = any")
    ] = 0.0
    expired_share_max: Annotated[
        float, Field(gt=0, le=1, description="of a node's last 200 leases; more unanswered ones suspend it; 1 = never")
    ] = 0.05
    suspension_seconds: Annotated[
        float, Field(ge=1, le=1e8, description="of a suspension that the coordinator decides by itself")
    ] = 3600.0
    nodes_per_address: Annotated[int, Field(ge=1, le=10_000, description="live nodes of one IPv4, or IPv6 /64")] = 32
    nodes_per_network: Annotated[int, Field(ge=1, le=10_000, description="live nodes of one /24, or IPv6 /48")] = 128
    new_keys_per_hour: Annotated[
        int, Field(ge=1, le=100_000, description="keys never seen before of one address; of one network 4 times that")
    ] = 32

    @property
    def warmup(self) -> WarmupRules:
        """For `probation`."""
        return WarmupRules(self.warmup_leases, self.warmup_returned, self.benchmark_tokens_per_second_min)

    @property
    def limits(self) -> Limits:
        """For `admission_limits`."""
        return Limits(self.nodes_per_address, self.nodes_per_network, self.new_keys_per_hour)


def _peer_of_a_key(text: str) -> str:
    try:
        return check_peer_id(text)
    except BadSignature as error:
        raise ValueError("this is the peer id of no key; copy it again, whole") from error


class RunConfig(Settings):
    """One training job (DESIGN section 2). `learner` is the only peer whose snapshots are obeyed."""

    name: Annotated[Name, Field(description="letters, digits, '.', '_' and '-'")]
    task: Annotated[Name, Field(description="a task of the catalogue, for example arithmetic")]
    task_options: dict[str, Any] = Field(default_factory=dict, description="the task's own settings")
    model_dir: Annotated[SettingsPath, Field(description="the folder that `echo2-learner prepare` made")]
    learner: Annotated[
        PeerId, AfterValidator(_peer_of_a_key), Field(description="the peer id that `echo2-learner identity` prints")
    ]
    steps: Annotated[int, Field(ge=1, le=10_000_000, description="training steps of the whole run")]
    budget: Annotated[
        float, Field(ge=0, le=1e9, description="dollars that nodes may be paid for this run; 0 = no bound")
    ] = 0.0
    weight: Annotated[
        float, Field(ge=0.001, le=1000, description="share of the nodes, over the sum of the weights of all open runs")
    ] = 1.0
    seed: Annotated[int, Field(ge=0, le=2**53, description="orders the prompts")] = 0

    S: Annotated[int, Field(ge=0, le=1000, description="staleness budget in steps; 0 = synchronous")] = 3
    kappa: Annotated[int, Field(ge=1, le=1000, description="steps between snapshots; 1 to S + 1, S - 1 unless set")] = 2
    R: Annotated[int, Field(ge=1, le=1_000_000, description="rollouts per training step, a multiple of n")] = 256
    n: Annotated[int, Field(ge=1, le=SAMPLES_MAX, description="rollouts per prompt")] = 8

    tokens_max: Annotated[int, Field(ge=1, le=TOKENS_MAX, description="longest response in tokens")] = 512
    turn_tokens_max: Annotated[
        int, Field(ge=1, le=TOKENS_MAX, description="longest turn of a task of several turns, in tokens")
    ] = 64
    temperature: Annotated[float, Field(gt=0, le=100, description="above 0")] = 1.0
    top_k: Annotated[int, Field(ge=0, le=1_000_000, description="0 = off")] = 0
    top_p: Annotated[float, Field(gt=0, le=1, description="1.0 = off")] = 1.0
    min_p: Annotated[float, Field(ge=0, lt=1, description="0.0 = off")] = 0.0

    slice_samples_max: Annotated[
        int, Field(ge=1, le=SAMPLES_MAX, description="most samples in one lease; whole groups cap the pool near R / n")
    ] = 2
    lease_seconds: Annotated[
        float, Field(gt=0, le=86_400, description="time a node has for a lease before the slice is given to another")
    ] = 60.0
    broadcast: Annotated[Literal["auto", "star", "chain"], Field(description="how snapshots reach the nodes")] = "auto"

    eval_every: Annotated[
        int, Field(ge=0, le=10_000_000, description="versions between held-out evaluations under way; 0 = none")
    ] = 0
    eval_samples: Annotated[int, Field(ge=1, le=SAMPLES_MAX, description="answers per held-out prompt, k of avg@k")] = 1
    eval_share: Annotated[
        float, Field(gt=0, le=0.5, description="most that an evaluation under way takes of the pool from training")
    ] = 0.1

    @model_validator(mode="before")
    @classmethod
    def _default_kappa(cls, values: object) -> object:
        if isinstance(values, dict) and "kappa" not in values:
            budget = values.get("S", 3)
            values = values | {"kappa": max(1, budget - 1) if isinstance(budget, int) else 1}
        return values

    @field_validator("task_options")
    @classmethod
    def _options_are_plain(cls, options: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        """What JSON can hold; a `path` is taken from the file's own folder, as every other."""
        canonical_json(options)  # raises ValueError in words
        folder = (info.context or {}).get("folder")
        return options if folder is None else dict(with_absolute_path(TaskSpec("options", options), folder).options)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.R % self.n:
            raise ValueError(f"run.R = {self.R} must be a multiple of run.n = {self.n}: a step is made of whole groups")
        if self.kappa > self.S + 1:
            raise ValueError(
                f"run.kappa = {self.kappa} must be at most S + 1 = {self.S + 1}: "
                "a snapshot is up to kappa - 1 steps old before the next one comes"
            )
        return self

    @property
    def spec(self) -> TaskSpec:
        """The task with its options."""
        return TaskSpec(self.task, self.task_options)

    @property
    def spending(self) -> Budget:
        """What nodes may be paid."""
        return Budget(micro_dollars(self.budget) or None)

    @property
    def slice_samples(self) -> int:
        """Samples of a full slice: never more than a group has."""
        return min(self.slice_samples_max, self.n)


def check_apart(runs: Iterable[RunConfig]) -> None:
    """Raise ValueError unless each run has a name and a learner of its own: both are what requests are known by."""
    names: set[str] = set()
    learners: dict[str, str] = {}
    for run in runs:
        if run.name in names:
            raise ValueError(f"two runs are called {run.name!r}; each needs a name of its own")
        if run.learner in learners:
            raise ValueError(
                f"the runs {learners[run.learner]!r} and {run.name!r} have one learner; each needs a learner with a "
                "key of its own (another --home)"
            )
        names.add(run.name)
        learners[run.learner] = run.name


class CreditConfig(Settings):
    """What a node is credited for, in millionths of a credit."""

    consumed_micros: Annotated[
        int, Field(ge=0, le=10**12, description="for each rollout that is trained on, or answers a held-out prompt")
    ] = 1_000_000
    stale_micros: Annotated[
        int, Field(ge=0, le=10**12, description="for each that came in time and was not used, by no fault of its node")
    ] = 500_000
    relayed_gib_micros: Annotated[
        int, Field(ge=0, le=10**12, description="for each GiB of snapshots passed on as planned and acknowledged")
    ] = 1_000_000

    def rates(self) -> CreditRates:
        """As `pricing` takes them."""
        return CreditRates(self.consumed_micros, self.stale_micros, self.relayed_gib_micros)


class StatePlace(Settings):
    """Where the coordinator keeps what it knows. Commands that need only this read only this: the rest may be unset."""

    model_config = ConfigDict(extra="ignore")

    state_dir: Annotated[SettingsPath, Field(description="folder for key, ledger, lock and status")] = Path("state")

    @property
    def identity_path(self) -> Path:
        """The coordinator's key: its peer id is pinned in every join string."""
        return self.state_dir / IDENTITY_FILE

    @property
    def operator_token_path(self) -> Path:
        """SHA-256 of the operator's token, hexadecimal."""
        return self.state_dir / OPERATOR_TOKEN_FILE

    @property
    def local_token_path(self) -> Path:
        """The token of this machine's own commands, while the coordinator runs."""
        return self.state_dir / LOCAL_TOKEN_FILE


class RestPlace(StatePlace):
    """Where the coordinator's REST is, and the token for it: what a command on its machine needs."""

    rest: RestConfig = RestConfig()


class CoordinatorConfig(StatePlace):
    """Everything the coordinator is told by its operator."""

    model_config = ConfigDict(extra="forbid")

    database: Annotated[
        str, Field(description="postgresql+psycopg://USER@HOST/NAME; left out: SQLite in the state folder")
    ] = ""
    database_password_file: Annotated[
        SettingsPath | None, Field(description="its first line is the database's password; else libpq's own passfile")
    ] = None
    listen: Annotated[tuple[Multiaddr, ...], Field(min_length=1, max_length=16)] = ("/ip4/0.0.0.0/tcp/4001",)
    announce: Annotated[tuple[Multiaddr, ...], Field(max_length=16)] = ()
    heartbeat_seconds: Annotated[float, Field(gt=0, le=3600, description="a node is dead after three missed ones")] = (
        10.0
    )
    score_seconds_max: Annotated[float, Field(gt=0, le=60, description="one reward's time; then it is 0")] = 2.0
    rest: RestConfig = RestConfig()
    activation: ActivationConfig = ActivationConfig()
    admission: AdmissionConfig = AdmissionConfig()
    credit: CreditConfig = CreditConfig()
    run: RunConfig = Field(default=None, validate_default=False)  # type: ignore[assignment] # the validator below sees to it
    """The first one: there always is one, in `[run]` or as the first of `[[runs]]`."""
    runs: Annotated[tuple[RunConfig, ...], Field(max_length=RUNS_MAX, description="runs that share the pool")] = ()
    """Those beside `run`."""

    @model_validator(mode="after")
    def _runs_are_told_apart(self) -> Self:
        if "run" not in self.model_fields_set:
            if not self.runs:
                raise ValueError("'run' is missing: a table [run], or several tables [[runs]] that share the pool")
            self.__dict__.update(run=self.runs[0], runs=self.runs[1:])  # before anybody has seen it
        check_apart(self.all_runs)
        return self

    @property
    def all_runs(self) -> tuple[RunConfig, ...]:
        """Every run of the settings, the first one first."""
        return (self.run, *self.runs)

    def named(self, name: str) -> RunConfig | None:
        """The run of this name; None when the settings have none."""
        return next((run for run in self.all_runs if run.name == name), None)

    def for_run(self, run: RunConfig) -> CoordinatorConfig:
        """The same settings, seen from one of the runs."""
        return self.model_copy(update={"run": run})

    @field_validator("database_password_file", mode="before")
    @classmethod
    def _no_file(cls, path: object) -> object:
        return None if path == "" else path

    @model_validator(mode="after")
    def _database_is_ours(self) -> Self:
        """Of the whole, not of the key: an error about a key repeats what was written, and that may hold a password."""
        if self.database:
            from .database import check_database_url  # a quarter of a second, which most commands need not spend

            check_database_url(self.database)
        return self

    @property
    def ledger_path(self) -> Path:
        """The SQLite file that records every rollout, node, token and decision, unless `database` says otherwise."""
        return self.state_dir / LEDGER_FILE

    @property
    def ledger_url(self) -> str:
        """Where all of that is recorded."""
        return self.database or f"sqlite:///{self.ledger_path}"


def load_config(path: Path, *, overrides: Mapping[str, object] | None = None) -> CoordinatorConfig:
    """Read `coordinator.toml`. Raises ConfigurationError."""
    return load_settings(path, CoordinatorConfig, overrides=overrides)
