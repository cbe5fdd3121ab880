"""What the owner of the machine may set. `echo2-node run` fills it from the command line."""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated

from pydantic import Field

from echo2.p2p.guards import TransportLimits
from echo2.p2p.messages import PRICE_MICROS_MAX, SAMPLES_MAX, SLICES_MAX, Name
from echo2.p2p.settings import Multiaddr, Settings

from .engine import EngineOptions

BITS_IN_MBIT = 1_000_000

MICROS = 1_000_000


class NodeSettings(Settings):
    """Limits and habits of one node. No listen address: the node dials out only, and relays nothing."""

    name: Name = "node"
    listen: Annotated[tuple[Multiaddr, ...], Field(max_length=16)] = ()
    announce: Annotated[tuple[Multiaddr, ...], Field(max_length=16)] = ()

    upload_mbit: Annotated[
        float | None, Field(gt=0, le=1_000_000, description="most Mbit/s to send, all peers together; none: no cap")
    ] = None
    download_mbit: Annotated[
        float | None, Field(gt=0, le=1_000_000, description="most Mbit/s to receive; none: no cap")
    ] = None

    price_hour: Annotated[
        float, Field(ge=0, le=PRICE_MICROS_MAX / MICROS, description="dollars an hour to be paid; 0 = a volunteer")
    ] = 0.0

    threads: Annotated[int, Field(ge=1, le=1024, description="processor threads for generating")] = 1
    sequences: Annotated[int, Field(ge=1, le=256, description="samples generated side by side")] = 256
    cache_mib: Annotated[int, Field(ge=1, le=1_048_576, description="most MiB for the key-value cache")] = 512
    gpu_layers: Annotated[int, Field(ge=-1, le=100_000, description="model layers on the GPU; -1 = all")] = -1

    batch: Annotated[
        int, Field(ge=1, le=SLICES_MAX * SAMPLES_MAX, description="most samples in hand for one batch")
    ] = 1024
    batch_seconds: Annotated[float, Field(gt=0, le=3600, description="how long one batch should take")] = 4.0
    lease_wait_seconds: Annotated[
        float, Field(ge=0, le=60, description="how long the coordinator may hold a request for work")
    ] = 0.5
    receipts_seconds: Annotated[float, Field(gt=0, le=3600, description="pause between looks for receipts")] = 5.0
    statements_seconds: Annotated[float, Field(gt=0, le=86_400, description="pause between signed statements")] = 300.0
    status_seconds: Annotated[float, Field(gt=0, le=3600, description="pause between status updates")] = 1.0

    snapshots_kept: Annotated[int, Field(ge=1, le=16, description="snapshots kept on disk")] = 2
    finish_flush_seconds: Annotated[
        float, Field(ge=0, description="after `finish`: longest wait for the spool to be acknowledged")
    ] = 600.0
    finish_receipts_seconds: Annotated[
        float, Field(ge=0, description="after `finish`: longest wait for receipts still to come")
    ] = 30.0

    @property
    def price_micros_hour(self) -> int:
        """The price as it is told: whole millionths of a dollar."""
        return int((Decimal(str(self.price_hour)) * MICROS).to_integral_value())

    @property
    def engine(self) -> EngineOptions:
        """The part that the engine process is told."""
        return EngineOptions(
            threads=self.threads, sequences=self.sequences, cache_mib=self.cache_mib, gpu_layers=self.gpu_layers
        )

    @property
    def limits(self) -> TransportLimits:
        """The part that the transport is told."""
        return TransportLimits(
            upload_bits_per_second=None if self.upload_mbit is None else self.upload_mbit * BITS_IN_MBIT,
            download_bits_per_second=None if self.download_mbit is None else self.download_mbit * BITS_IN_MBIT,
        )
