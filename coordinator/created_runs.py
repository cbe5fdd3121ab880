"""Runs that were created over REST: the ledger keeps their settings, so that they are there after a restart.

The settings file comes first: a created run whose name or learner it has is served as the file says, or not at all.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING

import sqlalchemy as sa

from echo2.p2p.errors import ConfigurationError
from echo2.p2p.settings import make_settings

from . import schema
from .config import RunConfig, check_apart

if TYPE_CHECKING:
    from .config import CoordinatorConfig
    from .ledger import Ledger

log = logging.getLogger(__name__)


def kept_settings(run: RunConfig) -> str:
    """As the ledger keeps them."""
    return run.model_copy(update={"model_dir": run.model_dir.absolute()}).model_dump_json()


def created_runs(ledger: Ledger) -> dict[str, str]:
    """By name, in the order of creation. Raises LedgerUnavailable."""
    table = schema.runs
    query = sa.select(table.c.run, table.c.settings).where(table.c.settings.is_not(None)).order_by(table.c.created)
    with ledger.reading() as connection:
        return {row.run: row.settings for row in connection.execute(query)}


def is_known(ledger: Ledger, run: str) -> bool:
    """Whether the ledger has ever had a run of this name. Raises LedgerUnavailable."""
    with ledger.reading() as connection:
        return connection.scalar(sa.select(schema.runs.c.run).where(schema.runs.c.run == run)) is not None


def with_created(config: CoordinatorConfig, created: dict[str, str]) -> CoordinatorConfig:
    """The settings with the created runs beside those of the file. One that cannot be beside them is left out."""
    runs = list(config.runs)
    for name, text in created.items():
        if any(run.name == name for run in (config.run, *runs)):
            continue
        try:
            made = make_settings(json.loads(text), RunConfig, source=f"the ledger's run {name}")
            check_apart([config.run, *runs, made])
        except (ConfigurationError, ValueError) as error:
            log.warning("the run %s, created over REST, is not served: %s", name, error)
            continue
        runs.append(made)
    return config.model_copy(update={"runs": tuple(runs)})
