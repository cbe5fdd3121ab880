"""From settings and ledger to a house with its offices: at the start, after a commit of which nobody knows whether it
holds, and when a run is created under way."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from echo2.p2p.errors import ConfigurationError
from echo2.tasks.catalog import make_task

from .counters import Numbers
from .house import House
from .ledger import SECRET_BYTES
from .loading import load_pay, load_pool, load_run
from .node_life import NodeLife
from .office import Office
from .placement import Placement
from .pool import Tally
from .prompts import FolderText, PromptBook
from .scheduling import Scheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from echo2.p2p.identity import Identity
    from echo2.p2p.transport import Transport
    from echo2.tasks.sandbox import SandboxTask
    from echo2.tasks.scorer import Scorer
    from echo2.tasks.task import Task, TaskSpec
    from echo2.tasks.token_text import ModelText

    from .config import CoordinatorConfig, RunConfig
    from .ledger import Ledger
    from .measures import Measures


@dataclass(frozen=True, slots=True)
class RunTools:
    """What a run works with beside the ledger: who computes its rewards, its prompts, its model's tokeniser."""

    scorer: Scorer
    task: Task | SandboxTask
    text: ModelText


@dataclass(frozen=True, slots=True)
class Served:
    """A run that is served. `settings`: what it was created with over REST, as JSON; None: it is in the settings."""

    config: RunConfig
    tools: RunTools
    settings: str | None = None


@dataclass(frozen=True, slots=True)
class Opener:
    """Makes houses. `proved` picks, of the addresses that a node claims, those that it was found at."""

    config: CoordinatorConfig
    identity: Identity
    transport: Transport
    ledger: Ledger
    clock: Callable[[], float]
    wall: Callable[[], float]
    entropy: Callable[[int], bytes]
    measures: Measures
    proved: Callable[[str, tuple[str, ...]], tuple[str, ...]] | None

    def open(self, runs: Mapping[str, Served]) -> tuple[House, NodeLife, Placement, dict[str, Scheduler]]:
        """All that the ledger holds of these runs. Raises ConfigurationError and LedgerUnavailable."""
        ledger = self.ledger
        secret = ledger.secret(self.entropy(SECRET_BYTES))
        house = House(
            self.config, ledger, self.clock, self.wall, load_pool(ledger, self.config, runs.keys()), Numbers()
        )
        for served in runs.values():
            self._add(house, served, secret)
        life = NodeLife(house, self.transport)
        placement = Placement(house, life)
        return house, life, placement, {office.run.name: Scheduler(office, life) for office in house}

    def open_another(self, house: House, life: NodeLife, served: Served) -> Scheduler:
        """One run more, in an open house. Raises ConfigurationError and LedgerUnavailable: then it is not there."""
        office = self._add(house, served, self.ledger.secret(self.entropy(SECRET_BYTES)))
        try:
            return Scheduler(office, life)
        except BaseException:
            del house.offices[office.run.name]
            raise

    def _add(self, house: House, served: Served, secret: bytes) -> Office:
        config, tools = self.config.for_run(served.config), served.tools
        name, now, wall = config.run.name, self.clock(), self.wall()
        prompts = PromptBook(
            run=name,
            task=tools.task,
            spec=config.run.spec,
            text=tools.text,
            seed=config.run.seed,
            secret=secret,
        )
        tally, pool = Tally(), house.pool.of(name)
        run = load_run(
            self.ledger, config, prompts, pool, tally, house.numbers, now=now, wall=wall, settings=served.settings
        )
        pay = load_pay(self.ledger, config, pool, run, now=now, wall=wall)
        office = Office(
            config, self.identity, self.ledger, self.clock, self.wall, self.entropy, prompts, pool, run, tally,
            tools.scorer, pay,
        )  # fmt: skip
        office.measures = self.measures
        if house.offices:
            office.complaints, office.balances = house.first.complaints, house.first.balances
        if self.proved is not None:
            office.proved = self.proved
        office.runs = house.offices.keys()
        office.spent_elsewhere = partial(house.spent_beside, name)
        house.offices[name] = office
        return office


def tools_of(run: RunConfig, scorer: Scorer, task: Task | SandboxTask | None, text: ModelText | None) -> RunTools:
    """With the catalogue's task and the model folder's tokeniser where none is given. Raises ConfigurationError."""
    return RunTools(scorer, task or _task(run.spec), text or FolderText(run.model_dir))


def _task(spec: TaskSpec) -> Task | SandboxTask:
    try:
        return make_task(spec)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
