"""The real `echo2-coordinator serve`, started as a supervisor would and killed at will, with a model it never runs."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

from echo2.coordinator.config import IDENTITY_FILE, OPERATOR_TOKEN_FILE
from echo2.coordinator.demo_process import child_environment, command
from echo2.coordinator.operator_token import make_operator_token
from echo2.coordinator.simulated_model import simulated_text
from echo2.p2p.identity import load_or_create_identity
from echo2.p2p.join import parse_join_string
from echo2.tasks.model_card import TOKENIZER_FILE, write_model_card

START_SECONDS = 60.0
LOOK_SECONDS = 0.02
RUN = "r1"

CONFIG = """\
state_dir = "state"
{database}
listen = ["/ip4/127.0.0.1/tcp/{port}"]
heartbeat_seconds = {heartbeat_seconds}
[admission]
warmup_leases = 0
expired_share_max = 1
[rest]
port = {rest_port}
[run]
name = "{run}"
task = "arithmetic"
model_dir = "model"
learner = "{learner}"
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def write_model(folder: Path, context_tokens: int) -> None:
    """Digits, plus and equals: a tokeniser and its card, and no weights, which a coordinator has no use for."""
    folder.mkdir(parents=True)
    text = simulated_text()
    (folder / TOKENIZER_FILE).write_bytes(text._tokenizer.to_str().encode())
    write_model_card(folder, text.card.model_copy(update={"context_tokens": context_tokens}))


class CoordinatorProcess:
    """One coordinator's folder, and its process while there is one. The ports stay, whoever has to find it again.

    Nodes have nothing to prove, and are not suspended for leases that never reached them: kills lose a lot of those.
    """

    def __init__(self, folder: Path, *, learner, context_tokens=64, heartbeat_seconds=10.0, database="", **run):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        write_model(folder / "model", context_tokens)
        self.port, self.rest_port = free_port(), free_port()
        self.database = database or f"sqlite:///{folder / 'state' / 'ledger.sqlite3'}"
        text = CONFIG.format(
            database=f'database = "{database}"' if database else "",
            port=self.port,
            rest_port=self.rest_port,
            heartbeat_seconds=heartbeat_seconds,
            run=RUN,
            learner=learner,
        )
        self.config = folder / "coordinator.toml"
        self.config.write_text(text + "".join(f"{name} = {value}\n" for name, value in run.items()))
        (folder / "state").mkdir(mode=0o700)
        self.peer_id = load_or_create_identity(folder / "state" / IDENTITY_FILE).peer_id
        make_operator_token(folder / "state" / OPERATOR_TOKEN_FILE)
        self.process: subprocess.Popen[bytes] | None = None
        self.starts = 0
        self.before: list[str] = []
        """What its command is put behind: a profiler."""

    def token(self, uses: int):
        """A join string for so many nodes, parsed."""
        argv = command("echo2-coordinator", "token", "create", "--config", str(self.config), "--uses", str(uses))
        done = subprocess.run(argv, capture_output=True, text=True, check=True, env=child_environment())
        return parse_join_string(done.stdout)

    def start(self) -> None:
        argv = [*self.before, *command("echo2-coordinator", "serve", "--config", str(self.config))]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=child_environment()
            )
        self.starts += 1

    def must_live(self) -> None:
        assert self.process is not None
        assert self.process.poll() is None, (self.folder / "log").read_text()[-3000:]

    def listens(self) -> bool:
        """Whether somebody takes connections at the port. Raises AssertionError when the process is no more."""
        self.must_live()
        with socket.socket() as probe:
            probe.settimeout(0.5)
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def wait_until_it_serves(self) -> None:
        """Until REST answers. Blocks the thread."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            self.must_live()
            try:
                self.get("/healthz")
                return
            except OSError:
                time.sleep(LOOK_SECONDS)
        raise AssertionError(f"the coordinator does not serve after {START_SECONDS} s")

    def get(self, path: str):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.rest_port}{path}", timeout=30.0) as answer:
            return json.load(answer)

    def kill(self) -> None:
        """`kill -9`."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.kill()

    def cpu_seconds(self) -> float:
        """Of the coordinator itself, so far, its scorer aside."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def resident_bytes(self) -> int:
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(text.partition("VmRSS:")[2].split()[0]) * 1024
