"""What the person who runs a learner sets: one frozen record, read from `learner.toml`.

What belongs to the run (S, kappa, R, n, steps, sampling) comes from the coordinator's signed descriptor, never from
here. Relative paths start at the file's own folder. Torch-free.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from echo2.p2p.errors import BadSignature, ConfigurationError
from echo2.p2p.identity import check_peer_id
from echo2.p2p.join import SCHEME, parse_join_string
from echo2.p2p.messages import Name, PeerAddress
from echo2.p2p.settings import Multiaddr, Settings, SettingsPath, check_multiaddr, load_settings

if TYPE_CHECKING:
    from collections.abc import Mapping

IDENTITY_FILE = "identity.key"
CHECKPOINTS_FOLDER = "checkpoints"
SNAPSHOTS_FOLDER = "snapshots"
EXPORTS_FOLDER = "exports"

Beta = Annotated[float, Field(ge=0, lt=1, description="below 1")]


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

    lr: Annotated[float, Field(ge=0, le=1, description="learning rate of AdamW; 0 changes nothing")] = 2e-4
    betas: Annotated[tuple[Beta, Beta], Field(description="AdamW's two decay rates")] = (0.9, 0.999)
    weight_decay: Annotated[float, Field(ge=0, le=1)] = 0.0
    clip: Annotated[
        tuple[Annotated[float, Field(gt=0, lt=1)], Annotated[float, Field(gt=0, le=10)]],
        Field(description="how far pi_theta / pi_learner,old may go below and above 1"),
    ] = (0.2, 0.2)
    ratio_cap: Annotated[float, Field(gt=0, le=1000, description="C, the bound on pi_learner,old / pi_sampler")] = 2.0
    kl_weight: Annotated[float, Field(ge=0, le=100, description="beta; 0 keeps no reference model")] = 0.0
    divide_by_std: Annotated[bool, Field(description="whether advantages are divided by the group's spread")] = True
    minibatches: Annotated[int, Field(ge=1, le=64, description="optimiser updates per training step")] = 2
    micro_tokens: Annotated[
        int, Field(ge=16, le=10_000_000, description="padded tokens evaluated at once; bounds memory")
    ] = 16_384
    gradient_clip: Annotated[float, Field(gt=0, le=1e6, description="largest norm of a gradient")] = 1.0

    seed: Annotated[int, Field(ge=0, le=2**53, description="orders groups into minibatches")] = 0
    threads: Annotated[int, Field(ge=1, le=1024, description="torch's threads")] = 1
    domain: Annotated[Literal["f32", "f16"], Field(description="number format of published snapshots")] = "f16"
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
