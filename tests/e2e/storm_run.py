"""One run of a kill storm: the demo's daemons, a supervisor, the strikes of a plan, and what was wrong afterwards."""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import trio
from e2e.storm_check import what_differs
from e2e.storm_processes import Daemon, Processes
from e2e.storm_schedule import (
    CHECKPOINT,
    END,
    FINISHING,
    PHASE_SECONDS,
    RESTART_SECONDS_MAX,
    TRAINING,
    Plan,
    kind_of,
    names_of,
)

from echo2.coordinator.config import load_config
from echo2.coordinator.demo_options import (
    PRESETS,
    RUN,
    DemoOptions,
    Places,
    coordinator_settings,
    free_ports,
    learner_settings,
)
from echo2.coordinator.demo_process import command
from echo2.coordinator.demo_report import check_sums, summary
from echo2.coordinator.demo_watch import Watch
from echo2.coordinator.ledger import open_ledger, sqlite_url
from echo2.coordinator.operator_token import make_operator_token
from echo2.coordinator.tokens import issue_token
from echo2.node.commands import FileCommands
from echo2.node.main import KEY_FILE
from echo2.p2p.daemon import STATUS_FILE
from echo2.p2p.identity import load_or_create_identity
from echo2.p2p.join import JoinString

PRESET = replace(PRESETS["tiny"], R=128, lease_seconds=20)
"""The demo's small model with half its batch, and leases that a killed node does not hold for long."""

STEPS = 16
STEP_SECONDS = 0.6
"""One step, about: where within it a strike falls."""

LOOK_SECONDS = 0.2
CHECKPOINT_LOOK_SECONDS = 0.003
"""Writing one takes some hundredths of a second."""

APPEAR_SECONDS = 20.0
"""How long a strike waits for its process to be there: it may be restarting, or not needed any more."""

STALL_SECONDS = 240.0
"""Nothing at all moving for so long: the longest honest wait is a lease that has to run out."""

END_SECONDS = 240.0
"""From the run's end until every node has handed in what it has, restarts included."""


@dataclass
class Outcome:
    """What came of one run."""

    kills: Counter[str] = field(default_factory=Counter)
    phases: Counter[str] = field(default_factory=Counter)
    missed: int = 0
    wrong: list[str] = field(default_factory=list)
    numbers: dict = field(default_factory=dict)
    marks: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0


class StormRun:
    """`pace` stretches every time of the plan and every bound, for a machine that is slow or busy."""

    def __init__(self, plan: Plan, model: Path, out: Path, *, pace: float, say, steps: int = STEPS):
        self.plan = plan
        self.names = names_of(plan.nodes)
        self.places = Places(out)
        self.options = DemoOptions(
            model="tiny", preset=PRESET, nodes=plan.nodes, steps=steps, S=PRESET.S, kappa=PRESET.kappa,
            learning_rate=PRESET.learning_rate, seed=plan.seed, out=out, screen=False,
        )  # fmt: skip
        self.outcome = Outcome()
        self._model = model
        self._pace = pace
        self._say = say
        self._processes = Processes()
        self._rng = random.Random(f"{plan.seed}:{plan.run}:restarts")
        self._finishing = False

    async def run(self) -> Outcome:
        self._began = trio.current_time()
        self._watch = Watch(self.options, self.places, self.names, trio.current_time)
        rest = self._make_daemons()
        outcome, settled = self.outcome, False
        try:
            async with httpx.AsyncClient(base_url=rest, timeout=10.0) as client, trio.open_nursery() as nursery:
                nursery.start_soon(self._processes.watch_orphans)
                for daemon in self._processes.daemons.values():
                    nursery.start_soon(daemon.keep, self._pause, self._before_restart)
                nursery.start_soon(self._look, client)
                strikes = trio.CancelScope()
                nursery.start_soon(self._strike_all, strikes)
                if await self._until(self._over, "the end of the run"):
                    self._mark("run over")
                    await self._finish_nodes()
                strikes.cancel()
                if not outcome.wrong:
                    what = "coordinator and learner to be settled"
                    settled = await self._until(self._settled, what, seconds=END_SECONDS)
                self._mark("settled")
                await self._processes.stop(["learner", "coordinator", *self.names])
                nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                await self._processes.sweep()
        outcome.wrong += self._processes.wrong
        if settled:
            outcome.wrong += self._sums()
        outcome.seconds = trio.current_time() - self._began
        return outcome

    # before

    def _make_daemons(self) -> str:
        """Folders, keys, settings, tokens; the daemons, not started. Returns the REST address."""
        places, options = self.places, self.options
        places.logs.mkdir(parents=True)
        places.model.symlink_to(self._model)
        places.coordinator.mkdir()
        learner = load_or_create_identity(places.learner / "home" / "identity.key").peer_id
        port, learner_port, rest_port, *ports = free_ports(3 + options.nodes)
        config_path = places.coordinator / "coordinator.toml"
        config_path.write_text(coordinator_settings(options, places, learner=learner, port=port, rest=rest_port))
        config = load_config(config_path)
        self._coordinator = load_or_create_identity(config.identity_path).peer_id
        make_operator_token(config.operator_token_path)
        address = f"/ip4/127.0.0.1/tcp/{port}"
        (places.learner / "learner.toml").write_text(
            learner_settings(options, places, coordinator=f"{address}/p2p/{self._coordinator}", port=learner_port)
        )
        self._add("coordinator", "echo2-coordinator", "serve", "--config", str(config_path))
        self._add("learner", "echo2-learner", "run", "--config", str(places.learner / "learner.toml"))
        ledger = open_ledger(sqlite_url(config.ledger_path))
        for name, node_port in zip(self.names, ports, strict=True):
            token = issue_token(
                ledger, uses=1, expires_seconds=None, wall=time.time(), entropy=os.urandom, actor="storm", reason=name
            )
            places.join_file(name).write_text(str(JoinString(self._coordinator, (address,), token, RUN)))
            self._add(
                name, "echo2-node", "run", "--join", f"@{places.join_file(name)}", "--home", str(places.node(name)),
                "--name", name, "--listen", f"/ip4/127.0.0.1/tcp/{node_port}", "--threads", "1",
            )  # fmt: skip
        ledger.close()
        return f"http://127.0.0.1:{rest_port}"

    def _add(self, name: str, *argv: str) -> None:
        self._processes.daemons[name] = Daemon(name, command(*argv), self.places.log(name))

    # the supervisor

    def _pause(self) -> float:
        return self._rng.uniform(0.1, RESTART_SECONDS_MAX)

    def _before_restart(self) -> None:
        """A node killed just after it wrote that its `finish` is done would go on: it is told once more."""
        if self._finishing:
            self._tell_to_finish()

    def _tell_to_finish(self) -> None:
        for name in self.names:
            if not self._processes.daemons[name].ended.is_set():
                FileCommands(self.places.node(name)).write("finish")

    # the strikes

    async def _strike_all(self, scope: trio.CancelScope) -> None:
        with scope:
            async with trio.open_nursery() as nursery:
                for strike in self.plan.strikes:
                    nursery.start_soon(self._strike, strike)

    async def _strike(self, strike) -> None:
        self.outcome.missed += len(strike.targets) + (strike.again is not None)  # taken back by each that hits
        await self._moment(strike.phase, strike.part)
        with trio.move_on_after(APPEAR_SECONDS * self._pace):
            while not all(self._processes.helper(target) for target in strike.targets):  # noqa: ASYNC110
                await trio.sleep(LOOK_SECONDS / 4)
        struck = {target: self._processes.helper(target) for target in strike.targets}
        for target in strike.targets:
            self._hit(target, strike)
        first = strike.targets[0]
        if strike.again is None or struck[first] is None:
            return
        with trio.move_on_after(APPEAR_SECONDS * self._pace):
            while self._processes.helper(first) in (None, struck[first]):  # noqa: ASYNC110
                await trio.sleep(LOOK_SECONDS / 4)
        await trio.sleep(strike.again * self._pace)
        self._hit(first, strike)

    def _hit(self, target: str, strike) -> None:
        if self._processes.strike(target):
            self.outcome.missed -= 1
            self.outcome.kills[kind_of(target)] += 1
            self.outcome.phases[strike.phase] += 1
            self._say(f"{self._now():6.1f} s, version {self._version()}: kill -9 {target}")
        else:
            self._say(f"{self._now():6.1f} s, version {self._version()}: {target} is not there")

    async def _moment(self, phase: str, part: float) -> None:
        step, rest = divmod(part * self.options.steps, 1)
        if phase == TRAINING:
            await self._version_is(int(step))
            await trio.sleep(rest * STEP_SECONDS * self._pace)
        elif phase == CHECKPOINT:
            await self._version_is(int(step))
            while not list((self.places.learner / "home" / "checkpoints").glob("*.partial")):  # noqa: ASYNC110
                await trio.sleep(CHECKPOINT_LOOK_SECONDS)
        else:
            if phase == END:
                await self._version_is(self.options.steps)
            while phase == FINISHING and not self._finishing:  # noqa: ASYNC110
                await trio.sleep(LOOK_SECONDS / 4)
            await trio.sleep(part * PHASE_SECONDS[phase] * self._pace)

    async def _version_is(self, version: int) -> None:
        while self._version() < version or not self._watch.heldout():  # noqa: ASYNC110
            await trio.sleep(LOOK_SECONDS / 4)

    # looking and waiting

    async def _look(self, client: httpx.AsyncClient) -> None:
        while True:
            await self._watch.look(client)
            await trio.sleep(LOOK_SECONDS)

    def _now(self) -> float:
        return trio.current_time() - self._began

    def _mark(self, what: str) -> None:
        self.outcome.marks[what] = round(self._now(), 1)

    def _version(self) -> int:
        return int(self._watch.own.get("learner", {}).get("version") or 0)

    def _over(self) -> bool:
        if self._watch.heldout():
            self.outcome.marks.setdefault("baseline measured", round(self._now(), 1))
        if self._version() >= self.options.steps:
            self.outcome.marks.setdefault("trained", round(self._now(), 1))
        return self._watch.run is not None and self._watch.run.state in {"finished", "stopped"}

    def _settled(self) -> bool:
        """Coordinator and learner are up, neither owes the other anything, every rollout is decided.

        A status of before a kill is none, so it is read here: what was looked at last may be the killed process's.
        """
        watch = self._watch
        with (self.places.learner / "home" / STATUS_FILE).open() as file:
            learner, written_at = json.load(file), os.fstat(file.fileno()).st_mtime
        return (
            not watch.silent
            and watch.run is not None
            and watch.run.learner_connected
            and self._processes.daemons["learner"].pid is not None
            and written_at > self._processes.daemons["learner"].started_at
            and learner["state"] == "finished"
            and learner["unreported"] == 0
            and learner["consumed"] == watch.own["learner"].get("consumed")
            and not watch.rollouts()["left"]
        )

    async def _until(self, done, what: str, *, seconds: float | None = None) -> bool:
        """Wait for `done`, at most `seconds`, or as long as anything moves. False, and wrong, if it never came."""
        began = trio.current_time()
        while not done():
            given_up = [daemon for daemon in self._processes.daemons.values() if daemon.given_up]
            if given_up:
                self.outcome.wrong.append(f"waited for {what}: {given_up[0].own_ends[-1]}, again and again")
                return False
            waited = trio.current_time() - began
            still = min(waited, self._watch.still_seconds) if seconds is None else waited
            if still > (seconds or STALL_SECONDS) * self._pace:
                reasons = {name: status.get("waiting_for") for name, status in self._watch.own.items()}
                self.outcome.wrong.append(
                    f"waited for {what}: nothing came for {still:.0f} s; {self._watch.waiting_for}; {reasons}"
                )
                return False
            await trio.sleep(LOOK_SECONDS)
        return True

    async def _finish_nodes(self) -> None:
        self._finishing = True
        self._tell_to_finish()
        daemons = [self._processes.daemons[name] for name in self.names]
        for daemon in daemons:
            daemon.ending = True
        await self._until(lambda: all(d.ended.is_set() for d in daemons), "the nodes to finish", seconds=END_SECONDS)
        self._mark("nodes finished")

    # after

    def _sums(self) -> list[str]:
        restarts = {name: daemon.starts - 1 for name, daemon in self._processes.daemons.items()}
        record = self._watch.record(restarts=restarts, failure="")
        self.outcome.numbers = summary(record) | {"restarts": restarts}
        peers = {name: load_or_create_identity(self.places.node(name) / KEY_FILE).peer_id for name in self.names}
        return check_sums(record) + what_differs(
            self.places,
            steps=self.options.steps,
            names=self.names,
            staleness_max=self.options.S,
            coordinator=self._coordinator,
            peers=peers,
        )
