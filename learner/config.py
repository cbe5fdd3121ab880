"""What the person who runs a learner sets: one frozen record, read from `learner.toml`.

What belongs to the run (S, kappa, R, n, steps, sampling) comes from the coordinator's signed descriptor, never from
here. Relative paths start at the file's own folder. Torch-free.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, PlainValidator, model_validator

from echo2.p2p.errors import BadSignature, ConfigurationError
from echo2.p2p.identity import check_peer_id
from echo2.p2p.join import SCHEME, parse_join_string
from echo2.p2p.messages import TOKENS_MAX, Name, PeerAddress
from echo2.p2p.settings import Multiaddr, Settings, SettingsPath, check_multiaddr, load_settings

if TYPE_CHECKING:
    from collections.abc import Mapping

IDENTITY_FILE = "identity.key"
CHECKPOINTS_FOLDER = "checkpoints"
SNAPSHOTS_FOLDER = "snapshots"
EXPORTS_FOLDER = "exports"
MODEL_DIR_FILE = "model-dir"
"""Where the learner last found its model, for whoever exports from its home."""

Beta = Annotated[float, Field(ge=0, lt=1, description="below 1")]
RATIO_CAP_MAX = 1000.0
"""Above it a single token outweighs a whole minibatch, and the update is stopped (`loss.RATIO_EXPLODED`)."""

Grouping = Literal["prompt", "initial_state", "batch"]
"""Among which rollouts a reward is compared; see `advantage.group_labels`."""
Aggregation = Literal["token", "sequence", "constant"]
"""How tokens are averaged; see `loss.token_scales`."""
AdapterTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def _ratio_cap(value: object) -> float | str:
    """Not a union: pydantic would tell a person of two mistakes."""
    if value == "off":
        return "off"
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= RATIO_CAP_MAX:
        return float(value)
    raise ValueError(f'must be a number above 0 and at most {RATIO_CAP_MAX:g}, or "off"')


class ObjectiveSettings(Settings):
    """`[objective]`: what a training step maximises (DESIGN section 10). Each part can be switched off by itself."""

    clip_low: Annotated[
        float, Field(gt=0, le=1, description="how far pi_theta / pi_learner,old counts below 1; 1 = no bound")
    ] = 0.2
    clip_high: Annotated[
        float, Field(gt=0, le=1000, description="how far pi_theta / pi_learner,old counts above 1")
    ] = 0.2
    ratio_cap: Annotated[
        float | Literal["off"],
        PlainValidator(_ratio_cap),
        Field(description='C, the bound on pi_learner,old / pi_sampler; "off" = not truncated'),
    ] = 2.0
    kl_weight: Annotated[float, Field(ge=0, le=100, description="beta, the weight of the KL to the reference")] = 0.0
    reference: Annotated[
        Literal["none", "base"],
        Field(description='"base": a frozen copy of the base model, for the KL; "none": no copy, no KL'),
    ] = "none"
    grouping: Annotated[
        Grouping, Field(description="among which rollouts a reward is compared: prompt, initial_state or batch")
    ] = "prompt"
    normalise_std: Annotated[
        bool, Field(description="whether advantages are divided by the standard deviation of their group")
    ] = True
    aggregation: Annotated[Aggregation, Field(description="how tokens are averaged: token, sequence or constant")] = (
        "token"
    )
    aggregation_tokens: Annotated[
        int | None,
        Field(ge=1, le=TOKENS_MAX, description='what aggregation = "constant" divides by; the run\'s tokens_max'),
    ] = None
    updates_per_step: Annotated[int, Field(ge=1, le=64, description="optimiser updates per training step")] = 2

    @model_validator(mode="after")
    def _parts_fit_together(self) -> Self:
        if self.kl_weight and self.reference == "none":
            raise ValueError(f'objective.kl_weight = {self.kl_weight:g} needs objective.reference = "base"')
        if self.aggregation == "constant" and self.aggregation_tokens is None:
            raise ValueError(
                'objective.aggregation = "constant" needs objective.aggregation_tokens, as a rule the run\'s tokens_max'
            )
        if self.aggregation != "constant" and self.aggregation_tokens is not None:
            raise ValueError('objective.aggregation_tokens is only for objective.aggregation = "constant"')
        return self

    @property
    def cap(self) -> float | None:
        """C; None when the ratio to the sampler is not truncated."""
        return None if self.ratio_cap == "off" else self.ratio_cap


class TrainSettings(Settings):
    """`[train]`: the optimiser, and how much of the work is held in memory at once."""

    learning_rate: Annotated[float, Field(ge=0, le=1, description="of AdamW; 0 changes nothing")] = 2e-4
    betas: Annotated[tuple[Beta, Beta], Field(description="AdamW's two decay rates")] = (0.9, 0.999)
    weight_decay: Annotated[float, Field(ge=0, le=1)] = 0.0
    gradient_clip: Annotated[float, Field(gt=0, le=1e6, description="largest norm of a gradient")] = 1.0
    micro_tokens: Annotated[int, Field(ge=16, le=10_000_000, description="tokens evaluated at once; bounds memory")] = (
        16_384
    )
    logprob_chunk_tokens: Annotated[
        int, Field(ge=1, le=1_000_000, description="tokens whose logits exist at once; bounds memory")
    ] = 1024
    dtype: Annotated[Literal["f32", "bf16"], Field(description="number format of matrix products")] = "f32"
    gradient_checkpointing: Annotated[
        bool, Field(description="compute activations twice instead of keeping them: slower, less memory")
    ] = False
    process_seconds: Annotated[
        float, Field(ge=5, le=86_400, description="how long the processes of one learner wait for each other")
    ] = 300.0


class AdapterSettings(Settings):
    """`[adapter]`: train a LoRA adapter instead of all weights. The table's presence switches it on."""

    rank: Annotated[int, Field(ge=1, le=1024, description="of each pair of matrices")] = 16
    alpha: Annotated[float, Field(gt=0, le=65_536, description="the adapter is scaled by alpha / rank")] = 32.0
    targets: Annotated[
        tuple[AdapterTarget, ...], Field(min_length=1, max_length=7, description="which matrices get one")
    ] = ("q_proj", "k_proj", "v_proj", "o_proj")


class WandbSettings(Settings):
    """`[metrics.wandb]`: where the package's own settings and environment do not already say it."""

    project: Annotated[str, Field(min_length=1, max_length=128, description="of Weights & Biases")]
    entity: Annotated[str, Field(min_length=1, max_length=128, description="whose project; your own")] | None = None
    mode: Annotated[
        Literal["online", "offline"] | None, Field(description="as WANDB_MODE, which decides when this is not set")
    ] = None


class MetricsSettings(Settings):
    """`[metrics]`: where each step's numbers go beside `metrics.jsonl`, which is always written."""

    tensorboard: Annotated[bool, Field(description="event files in the folder `tensorboard` of the home")] = False
    wandb: Annotated[
        WandbSettings | None, Field(description="a table with `project`; also `entity`, and `mode` (online or offline)")
    ] = None


class LearnerConfig(Settings):
    """Everything a learner is told by its owner. Defaults are those measured on the tiny model (DESIGN section 15)."""

    home: Annotated[SettingsPath, Field(description="folder for key, checkpoints, snapshots, lock and status")]
    coordinator: Annotated[
        str, Field(min_length=1, max_length=4096, description="a join string, or /ip4/1.2.3.4/tcp/4001/p2p/PEER")
    ]
    run: Annotated[Name | None, Field(description="the run's name; not needed with a join string")] = None
    model_dir: Annotated[SettingsPath, Field(description="the folder that `echo2-learner prepare` made")]
    listen: Annotated[tuple[Multiaddr, ...], Field(min_length=1, max_length=16)] = ("/ip4/0.0.0.0/tcp/4002",)
    announce: Annotated[tuple[Multiaddr, ...], Field(max_length=16)] = ()

    objective: ObjectiveSettings = ObjectiveSettings()
    train: TrainSettings = TrainSettings()
    adapter: AdapterSettings | None = None
    metrics: MetricsSettings = MetricsSettings()

    seed: Annotated[int, Field(ge=0, le=2**53, description="orders groups into minibatches")] = 0
    threads: Annotated[int, Field(ge=1, le=1024, description="torch's threads")] = 1
    domain: Annotated[
        Literal["f32", "f16", "bf16", "q8_0"], Field(description="number format of published snapshots")
    ] = "f16"
    checkpoints_kept: Annotated[int, Field(ge=2, le=1000, description="newest checkpoints kept, at least 2")] = 3
    partial_seconds: Annotated[
        float, Field(gt=0, le=86_400, description="wait for a group's missing samples before it trains without them")
    ] = 120.0

    @model_validator(mode="after")
    def _coordinator_is_known(self) -> Self:
        try:
            _, run = _parse_coordinator(self.coordinator)
        except ConfigurationError as error:
            raise ValueError(str(error)) from error
        if run is None and self.run is None:
            raise ValueError("'run' is missing: an address does not name the run, a join string would")
        if run is not None and self.run not in (None, run):
            raise ValueError(f"run = {self.run!r}, but the join string is for run {run!r}")
        return self

    @property
    def coordinator_address(self) -> PeerAddress:
        """Whom to dial, and the only key whose words are taken for the coordinator's."""
        return _parse_coordinator(self.coordinator)[0]

    @property
    def run_name(self) -> str:
        """The run, from `run` or from the join string."""
        run = self.run or _parse_coordinator(self.coordinator)[1]
        assert run is not None  # the validator saw to it
        return run

    @property
    def identity_path(self) -> Path:
        """The learner's key: the coordinator's run names its peer id as the only publisher."""
        return self.home / IDENTITY_FILE


def load_config(path: Path, *, overrides: Mapping[str, object] | None = None) -> LearnerConfig:
    """Read `learner.toml`. Raises ConfigurationError."""
    return load_settings(path, LearnerConfig, overrides=overrides)


def _parse_coordinator(text: str) -> tuple[PeerAddress, str | None]:
    if text.strip().startswith(SCHEME):
        join = parse_join_string(text)
        return join.coordinator, join.run
    address, mark, peer = text.strip().rpartition("/p2p/")
    if not mark or not address.startswith("/"):
        raise ConfigurationError(
            f"coordinator = {text[:64]!r} is neither a join string (echo2://...) nor an address like "
            "/ip4/1.2.3.4/tcp/4001/p2p/PEER"
        )
    try:
        check_peer_id(peer)
        check_multiaddr(address)
    except (BadSignature, ValueError) as error:
        raise ConfigurationError(f"coordinator = {text[:64]!r}: {error}") from error
    return PeerAddress(peer=peer, addresses=(address,)), None
