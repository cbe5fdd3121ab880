"""What the coordinator shows of itself: frozen records of plain JSON types, built on demand, never stored.

Every wait of the system has its reason in one of these (`RunView.waiting`, `NodeView.reason`, `PoolView.trouble`).
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

Health = Literal["healthy", "late", "dead"]


class View(BaseModel):
    """A frozen value to show."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class RolloutCounts(View):
    """Training rollouts of a run or node. submitted = the sum of all the others."""

    submitted: int = 0
    held: int = 0
    admitted: int = 0
    consumed: int = 0
    stale: int = 0
    withdrawn: int = 0
    rejected: int = 0
    duplicate: int = 0


class NodeView(View):
    """One node as the coordinator sees it: its verdict, not the node's belief."""

    peer: str
    name: str
    run: str = ""
    """That it works for; empty: it has not been placed in one since that was over or gone."""
    software: str
    addresses: tuple[str, ...]
    """Those at which it was dialled back: others may be told to fetch snapshots there."""
    reachable: bool = False
    """Whether there is one. If not it is a leaf: it receives snapshots and passes none on, and earns as any other."""
    state: Literal["applied", "probation", "standby", "active", "draining", "suspended", "banned", "left"]
    """See `node_states`."""
    state_reason: str
    state_since: float | None = None
    """Unix seconds; None where the ledger is older than the record of it."""
    state_expires: float | None = None
    """Unix seconds at which it ends by itself; None: it does not."""
    state_by: str = ""
    """Who put it into the state: the operator, the coordinator, the scheduler, or the node's own peer id."""
    warmup_returned: int = 0
    """In probation: of its first leases, how many came back valid in time."""
    warmup_failed: int = 0
    warmup_leases: int = 0
    """In probation: how many these are; else 0."""
    benchmark_rollouts_per_second: float | None = None
    """Of its first leases, by the coordinator's clock; None while unmeasured."""
    benchmark_tokens_per_second: float | None = None
    leases_judged: int = 0
    """Of its last 200 leases, those that ended since this coordinator started."""
    leases_unanswered: int = 0
    """And those of them that never came back."""
    health: Health
    last_seen_seconds: float | None
    """Since it was last heard of; None when not since this coordinator started."""
    node_says: str
    """The state the node's own heartbeat names."""
    epoch: int | None
    version: int | None
    version_lag: int | None
    """Published versions' distance in steps; 0 = has the newest."""
    price_hour: float = 0.0
    """Dollars: at which it works, or would if it were activated; 0 for a volunteer."""
    rho_dollars: float | None = None
    """Per rollout, for as long as it is activated; None for whoever is not, or was not measured yet."""
    balance_dollars: float = 0.0
    balance_credits: float = 0.0
    """What it was posted over all runs, less what it was paid out."""
    standby: bool = False
    """It has a price and is not activated."""
    mu: float | None
    """Accepted rollouts per second holding at least one lease."""
    tokens_per_second: float
    leases_held: int
    samples_held: int
    accepted: int
    """Train rollouts that passed intake."""
    rejected: int
    evaluated: int
    rollouts: RolloutCounts
    protocol_errors: int
    reason: str
    """The last refusal or rejection, or why it gets no leases; empty when all is well."""


class TransitionView(View):
    """One change of a node's state. Times are Unix seconds of the coordinator."""

    number: int
    """1, 2, 3, ... for each node."""
    event: str
    from_state: str
    """`new` before the first."""
    to_state: str
    actor: str
    reason: str
    wall_seconds: float
    expires_seconds: float | None
    """When the new state ends by itself; None: it does not."""


class PoolView(View):
    """The pool as a whole."""

    coordinator: str
    addresses: tuple[str, ...]
    nodes_healthy: int
    nodes_late: int
    nodes_dead: int
    nodes_suspended: int
    nodes_standby: int = 0
    """Live nodes with a price that are not activated."""
    nodes_applied: int = 0
    """Waiting for the operator, and heard of."""
    nodes_probation: int = 0
    """Live nodes in probation."""
    nodes_draining: int = 0
    nodes_banned: int = 0
    nodes_left: int = 0
    """They said goodbye, and are not dead."""
    mu_pool: float
    mu_min: float | None
    """Equation 2; None while unmeasured or when no rate is enough."""
    mu_target: float | None = None
    """gamma mu_min, with the gamma of `[activation]`."""
    t_bcast_seconds: float | None
    t_train_seconds: float | None
    refused: dict[str, int]
    """Rollouts that ended before consumption, by reason."""
    protocol_errors: int
    scorer_confinement: tuple[str, ...] = ()
    """Layers that hold around the process that computes rewards; empty where none does."""
    trouble: str
    """Why requests are being refused just now (a full disk, a dead scorer); empty when nothing is wrong."""


class EvaluationView(View):
    """Held-out prompts under one version, each answered `samples` times at T = 1; `mean` is avg@k, k = `samples`."""

    version: int
    purpose: Literal["baseline", "interim", "final"]
    size: int
    """Answers wanted."""
    count: int
    mean: float | None
    complete: bool
    samples: int = 1
    reason: str = ""
    """Why it ended before it was complete: then `mean` is of the first prompts only."""
    details: dict[str, float] = {}
    """Means of what its episodes measured beside the reward: final chips by opponent, actions that were no actions."""


class StepView(View):
    """One training step, as the learner reported it."""

    step: int
    reward_mean: float
    staleness: int
    staleness_mean: float
    kl: float
    ratio_mean: float
    clip_share: float
    entropy: float
    loss: float
    response_tokens_mean: float
    rollouts: int
    groups_without_spread: int
    train_seconds: float
    idle_seconds: float
    reward_std: float = 0.0
    gradient_norm: float = 0.0
    ratio_max: float = 0.0
    truncated_share: float = 0.0
    clip_share_low: float = 0.0
    clip_share_high: float = 0.0
    kl_reference: float | None = None
    """To the base model; None without a reference."""
    updates_skipped: tuple[str, ...] = ()
    """Why each update left out was."""
    staleness_counts: tuple[int, ...] = ()
    """Rollouts of staleness 0, 1, ..."""
    drops: dict[str, int] = {}
    """Rollouts the learner dropped since the step before, by reason and length."""


class RunView(View):
    """One run."""

    run: str
    task: str
    model: str
    state: Literal["ready", "running", "paused", "stopped", "finished"]
    state_reason: str
    weight: float = 1.0
    """Its share of the nodes is this over the sum of all open runs'."""
    nodes: int = 0
    """Live nodes that are placed in it."""
    mu_pool: float = 0.0
    """Accepted rollouts per second of those of them that work."""
    mu_min: float | None = None
    """Equation 2; None while unmeasured or when no rate is enough."""
    mu_target: float | None = None
    """gamma mu_min."""
    learner: str
    learner_connected: bool
    learner_status: str
    epoch: int | None
    version: int | None
    """The newest published version; None before the first."""
    snapshots_published: int = 0
    """Manifests accepted, over all epochs."""
    learner_version: int
    """Training steps finished, by the learner's last word."""
    steps: int
    staleness_max: int
    publish_period: int
    rollouts_per_step: int
    group_size: int
    waiting: str
    """Why nothing moves, or what is being waited for; empty while leases flow freely."""
    reserved: int
    """consumed + queued + outstanding + to be reissued: what pacing counts."""
    reserved_max: int | None
    """The bound on it under the newest version."""
    outstanding: int
    rollouts: RolloutCounts
    evaluated: int
    evaluations: tuple[EvaluationView, ...]
    series: tuple[StepView, ...]
    """The last steps, oldest first."""
    reward_mean: float | None
    staleness: int | None
    kl: float | None
    bubble: float | None
    """T_idle / (T_idle + T_train) over every reported step, without the wait before the first one."""
    t_train_seconds: float | None
    t_bcast_seconds: float | None
    """Median over the run's broadcasts."""
    staleness_estimate: int | None
    """Delta, that pacing uses; None while unmeasured."""
    spent_dollars: float = 0.0
    """Pay of its nodes so far."""
    committed_dollars: float = 0.0
    """What may still become due of what is out: with `spent_dollars` never above the budget."""
    budget_dollars: float | None = None
    cost_hour_dollars: float = 0.0
    """What the nodes that are activated ask together."""
    credits: float = 0.0
    """That its nodes earned."""


class EventView(View):
    """A line of the audit log."""

    id: int
    wall_seconds: float
    actor: str
    action: str
    subject: str
    reason: str


class AppealView(View):
    """A node's appeal, and what became of it."""

    id: int
    run: str
    peer: str
    name: str
    subject: str
    """A lease in hexadecimal digits, or `suspension`."""
    text: str
    state: Literal["open", "upheld", "refused"]
    answer: str
    posting: int | None
    """The adjustment that came of it."""
    created_seconds: float
    resolved_seconds: float | None
