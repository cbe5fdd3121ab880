"""`echo2 demo`: one coordinator, one learner and N nodes as separate processes on this machine, watched to the end.

The demo starts processes and looks at them through REST and their status files, as any operator could. Each wait has a
bound and is shown with what is waited for.
"""

from __future__ import annotations

import os
import re
import signal
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import httpx
import trio

from echo2.p2p.daemon import EXIT_FAILED, lock_state_dir
from echo2.p2p.errors import Echo2Error
from echo2.p2p.identity import load_or_create_identity

from .config import load_config
from .demo_options import clear, coordinator_settings, free_ports, learner_settings
from .demo_process import Children, command, last_line
from .demo_report import check_sums, summary, write_metrics, write_report
from .demo_watch import REQUEST_SECONDS, Watch
from .operator_token import make_operator_token

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from .demo_options import DemoOptions, Places
    from .demo_screen import ScreenState

    Show = Callable[[ScreenState], None]

LOOK_SECONDS = 0.5
"""Between two looks. Also how precisely the training time is known."""

PREPARE_SECONDS = 600.0
COMMAND_SECONDS = 120.0
COORDINATOR_SECONDS = 90.0
SNAPSHOT_SECONDS = 300.0
NODES_SECONDS = 180.0
FINISH_SECONDS = 60.0
"""Bounds of the waits, each generous for a machine of two cores that does everything at once."""


class DemoFailed(Echo2Error):
    """The run did not come to its end; the text says why."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a demo ended: exit code, what to say about it, and the summary (None when it was interrupted)."""

    code: int
    words: tuple[str, ...] = ()
    summary: Mapping[str, Any] | None = None


def run_demo(options: DemoOptions, places: Places, show: Show, tell: Callable[[str], None]) -> Outcome:
    """Run the demo to its end. `show` is handed the screen twice a second, `tell` each event.

    Raises ConfigurationError when the folder cannot be used.
    """
    with lock_state_dir(places.out):
        clear(places)
        return trio.run(partial(_run, options, places, show, tell), restrict_keyboard_interrupt_to_checkpoints=True)


async def _run(options: DemoOptions, places: Places, show: Show, tell: Callable[[str], None]) -> Outcome:
    demo = Demo(options, places, show, tell)
    stopped_by: list[int] = []
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with trio.open_nursery() as nursery:
            work = trio.CancelScope()
            nursery.start_soon(_watch_signals, signals, work, stopped_by, demo)
            with work:
                await demo.run()
            nursery.cancel_scope.cancel()
    if stopped_by:
        ended = ", ".join(demo.interrupted) or "nothing was running"
        return Outcome(128 + stopped_by[0], (f"interrupted; stopped: {ended}; logs: {places.logs}",))
    return demo.conclude()


async def _watch_signals(
    signals: AsyncIterator[int], work: trio.CancelScope, stopped_by: list[int], demo: Demo
) -> None:
    async for number in signals:
        if stopped_by:
            demo.children.kill_all()
            os._exit(128 + number)
        stopped_by.append(number)
        demo.interrupted = demo.children.alive
        demo.tell(f"{signal.Signals(number).name}: stopping every process")
        work.cancel()


class Demo:
    """One demo. `run` never leaves a process behind, however it ends."""

    def __init__(self, options: DemoOptions, places: Places, show: Show, tell: Callable[[str], None]) -> None:
        self._options = options
        self._places = places
        self._show = show
        self._tell = tell
        self._notes: list[str] = []
        self._phase = "starting"
        self._waiting_for = ""
        self._title = (
            f"{options.model} on {options.preset.task}, {options.nodes} nodes, S = {options.S}, kappa = {options.kappa}"
        )
        self._names = [f"node-{number}" for number in range(1, options.nodes + 1)]
        self._failure = ""
        self.interrupted: list[str] = []
        """What ran when a person broke it off."""
        self.children = Children(self.tell)
        self.watch = Watch(options, places, self._names, trio.current_time)

    def tell(self, event: str) -> None:
        """Something happened that the person should know of."""
        self._notes.append(event)
        self._tell(event)

    async def run(self) -> None:
        """Start everything, wait for the end of the run, stop everything. A failure is kept for `conclude`."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._draw)
                await self._train(nursery)
                nursery.cancel_scope.cancel()
        except* Echo2Error as group:
            error: BaseException = group
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            self._failure = str(error)
        finally:
            self._enter("stopping", "the processes to end")
            self._show(self._screen())
            await self.children.stop_all()

    async def _train(self, nursery: trio.Nursery) -> None:
        places, options = self._places, self._options
        self._enter("preparing", "echo2-learner to write the model folder and its key")
        prepare = command("echo2-learner", "prepare", "--model", options.model, "--out", str(places.model))
        async with trio.open_nursery() as preparing:
            preparing.start_soon(self._finish, "prepare", prepare, PREPARE_SECONDS)
            rest, token = await self._write_settings()

        coordinator = ["serve", "--config", str(places.coordinator / "coordinator.toml")]
        nursery.start_soon(self._keep, "coordinator", command("echo2-coordinator", *coordinator))
        learner = ["run", "--config", str(places.learner / "learner.toml")]
        nursery.start_soon(self._keep, "learner", command("echo2-learner", *learner))
        async with httpx.AsyncClient(base_url=rest, timeout=REQUEST_SECONDS) as client, trio.open_nursery() as looking:
            looking.start_soon(self._look, client)
            self._enter("starting", "the coordinator to answer")
            await self._until(lambda: not self.watch.silent, COORDINATOR_SECONDS)
            joins = [await self._join_string(client, token, name) for name in self._names]
            for number, (name, join) in enumerate(zip(self._names, joins, strict=True)):
                nursery.start_soon(self._keep, name, self._node_command(number, name, join))
            await self._follow()
            await self._finish_nodes(client)
            looking.cancel_scope.cancel()
        if self.watch.run is None or self.watch.run.state != "finished":
            state = self.watch.run.state if self.watch.run else "unknown"
            raise DemoFailed(f"the run ended in state {state}")

    async def _follow(self) -> None:
        """From the first snapshot to the end of the run."""
        stall_seconds = self._options.preset.stall_seconds
        self._enter("starting", "the learner to publish its first snapshot")
        await self._until(lambda: self._version() is not None, SNAPSHOT_SECONDS)
        self._enter("starting", "every node to install the first snapshot")
        await self._until(self._all_installed, NODES_SECONDS)
        self._enter("measuring the base model", "")
        await self._until(lambda: self._begun() or self._over(), stall_seconds, while_moving=True)
        self._enter("training", "")
        await self._until(self._trained, stall_seconds, while_moving=True)
        self._enter("measuring the result", "")
        await self._until(self._over, stall_seconds, while_moving=True)

    async def _write_settings(self) -> tuple[str, str]:
        """Keys and settings of coordinator and learner; returns the REST address and the operator's token."""
        options, places = self._options, self._places
        home = places.learner / "home"
        printed = await self._finish("identity", command("echo2-learner", "identity", "--home", str(home)))
        learner_peer = printed.split()[-1] if printed.split() else ""
        coordinator_port, learner_port, rest_port, *self._node_ports = free_ports(3 + options.nodes)
        places.coordinator.mkdir(parents=True)
        config_path = places.coordinator / "coordinator.toml"
        text = coordinator_settings(options, places, learner=learner_peer, port=coordinator_port, rest=rest_port)
        config_path.write_text(text, encoding="utf-8")
        config = load_config(config_path)
        peer = load_or_create_identity(config.identity_path).peer_id
        token = make_operator_token(config.operator_token_path)
        address = f"/ip4/127.0.0.1/tcp/{coordinator_port}/p2p/{peer}"
        (places.learner / "learner.toml").write_text(
            learner_settings(options, places, coordinator=address, port=learner_port), encoding="utf-8"
        )
        return f"http://127.0.0.1:{rest_port}", token

    async def _join_string(self, client: httpx.AsyncClient, token: str, name: str) -> str:
        body = {"uses": 1, "expires_hours": 24.0, "reason": f"demo: {name}"}
        try:
            answer = await client.post("/v1/tokens", json=body, headers={"Authorization": f"Bearer {token}"})
            return str(answer.raise_for_status().json()["join"])
        except httpx.HTTPError as error:
            raise DemoFailed(f"the coordinator made no join string: {error}") from error

    def _node_command(self, number: int, name: str, join: str) -> list[str]:
        listen = f"/ip4/127.0.0.1/tcp/{self._node_ports[number]}"
        home = str(self._places.node(name))
        place = self._places.join_file(name)
        descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(join)  # not on the command line, where every user of the machine could read the token
        arguments = ["run", "--join", f"@{place}", "--home", home, "--name", name, "--listen", listen, "--threads", "1"]
        return command("echo2-node", *arguments)

    async def _finish_nodes(self, client: httpx.AsyncClient) -> None:
        """As a volunteer would: `finish` each node, so that it hands in what it has and fetches its receipts."""
        self._enter("finishing", "the nodes to hand in what they have")
        async with trio.open_nursery() as telling:
            for name in self._names:
                self.children[name].ending = True
                argv = command("echo2-node", "finish", "--home", str(self._places.node(name)))
                telling.start_soon(self._finish, f"finish-{name}", argv)
        await self._until(lambda: not any(self.children.running(name) for name in self._names), FINISH_SECONDS)
        await self.watch.look(client)

    # waiting

    async def _until(self, done: Callable[[], bool], seconds: float, *, while_moving: bool = False) -> None:
        """Wait for `done`, at most `seconds`, or as long as anything moved within `seconds`. Raises DemoFailed."""
        begun = trio.current_time()
        while not done():
            waited = self.watch.still_seconds if while_moving else trio.current_time() - begun
            if waited > seconds and trio.current_time() - begun > seconds:
                what = self._waiting_for or self.watch.waiting_for or self._phase
                raise DemoFailed(f"nothing moved for {seconds:.0f} s while waiting for: {what}{self._log_hint()}")
            await trio.sleep(LOOK_SECONDS / 2)

    def _log_hint(self) -> str:
        lines = {name: last_line(self._places.log(name)) for name in ("coordinator", "learner")}
        told = "; ".join(f"last line of {name}: {line}" for name, line in lines.items() if line)
        return f" ({told})" if told else ""

    def _version(self) -> int | None:
        return self.watch.run.version if self.watch.run else None

    def _all_installed(self) -> bool:
        return sum(node.version is not None for node in self.watch.nodes.values()) >= self._options.nodes

    def _begun(self) -> bool:
        return bool(self.watch.heldout())

    def _trained(self) -> bool:
        return len(self.watch.steps) >= self._options.steps or self._over()

    def _over(self) -> bool:
        return self.watch.run is not None and self.watch.run.state in {"finished", "stopped"}

    # children and the screen

    async def _keep(self, name: str, argv: list[str]) -> None:
        await self.children.keep(name, argv, self._places.log(name))

    async def _finish(self, name: str, argv: list[str], seconds: float = COMMAND_SECONDS) -> str:
        return await self.children.finish(name, argv, self._places.log(name), seconds=seconds)

    async def _look(self, client: httpx.AsyncClient) -> None:
        while True:
            await self.watch.look(client)
            await trio.sleep(LOOK_SECONDS)

    async def _draw(self) -> None:
        while True:
            self._show(self._screen())
            await trio.sleep(LOOK_SECONDS)

    def _enter(self, phase: str, waiting_for: str) -> None:
        self._phase, self._waiting_for = phase, waiting_for

    def _screen(self) -> ScreenState:
        return self.watch.screen(
            title=self._title,
            phase=self._phase,
            waiting_for=self._waiting_for,
            restarts=self.children.restarts,
            notes=self._notes,
        )

    def conclude(self) -> Outcome:
        """Write metrics.jsonl, reward.png and report.md, and check the sums."""
        from .demo_plot import draw_reward  # matplotlib is slow to load, and only the end needs it

        record, out = self.watch.record(restarts=self._daemon_restarts(), failure=self._failure), self._places.out
        wrong = check_sums(record)
        write_metrics(out / "metrics.jsonl", record.steps)
        draw_reward(out / "reward.png", record)
        write_report(out / "report.md", record, wrong)
        words = [f"the run did not finish: {self._failure}"] if self._failure else []
        words += [f"the sums do not agree: {item}" for item in wrong]
        code = EXIT_FAILED if words else 0
        words.append(f"{'' if words else 'the sums agree; '}report: {out / 'report.md'}")
        return Outcome(code, tuple(words), summary(record))

    def _daemon_restarts(self) -> Mapping[str, int]:
        daemons = re.compile(r"coordinator|learner|node-\d+")
        return {name: count for name, count in self.children.restarts.items() if daemons.fullmatch(name)}
