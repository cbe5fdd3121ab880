"""Which of the coordinator's addresses a volunteer can be told to dial."""

from __future__ import annotations

from typing import TYPE_CHECKING

from echo2.p2p.daemon import STATUS_FILE, read_status
from echo2.p2p.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .config import CoordinatorConfig

ANY_HOSTS = ("/ip4/0.0.0.0/", "/ip6/::/")
"""Listening on every interface: no address that a volunteer could dial."""


def dialable(config: CoordinatorConfig, listening: Sequence[str]) -> tuple[str, ...]:
    """Addresses for a join string, each once. Raises ConfigurationError when no one outside could dial any of them."""
    addresses = config.announce or tuple(
        address for address in listening if not address.startswith(ANY_HOSTS) and not address.endswith("/tcp/0")
    )
    if not addresses:
        raise ConfigurationError(
            'no address for volunteers is known: set announce = ["/dns/HOST/tcp/PORT"] in the settings, '
            "or start the coordinator first"
        )
    return tuple(dict.fromkeys(addresses))


def known_addresses(config: CoordinatorConfig) -> tuple[str, ...]:
    """As `dialable`, without being the running coordinator: from the settings, or from its status file."""
    status = read_status(config.state_dir / STATUS_FILE) or {}
    return dialable(config, (*config.listen, *map(str, status.get("addresses", ()))))
