"""A whole run that trains a LoRA adapter: coordinator, learner and nodes as processes, the last node a late one."""

import json
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import trio

from echo2.coordinator.config import load_config
from echo2.coordinator.demo_options import free_ports
from echo2.coordinator.operator_token import make_operator_token
from echo2.p2p.disk_store import DiskStore
from echo2.p2p.identity import load_or_create_identity

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

STEPS = 6

COORDINATOR = """
state_dir = "state"
listen = ["/ip4/127.0.0.1/tcp/{port}"]
heartbeat_seconds = 5
[rest]
host = "127.0.0.1"
port = {rest}
[run]
name = "lora"
task = "arithmetic"
model_dir = "{model}"
learner = "{learner}"
steps = {steps}
S = 3
kappa = 2
R = 64
n = 8
tokens_max = 8
slice_samples_max = 8
lease_seconds = 60
"""

LEARNER = """
home = "home"
run = "lora"
coordinator = "/ip4/127.0.0.1/tcp/{port}/p2p/{coordinator}"
model_dir = "{model}"
listen = ["/ip4/127.0.0.1/tcp/{own}"]
domain = "q8_0"
[train]
learning_rate = 1e-3
[adapter]
rank = 8
alpha = 16.0
targets = ["q_proj", "v_proj", "down_proj"]
"""


class Processes:
    """Started by this test, and ended by it."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.running: dict[str, subprocess.Popen] = {}

    def start(self, name: str, *argv: str) -> None:
        log = (self.folder / f"{name}.log").open("wb")
        self.running[name] = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        log.close()

    def words(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-1500:] for path in sorted(self.folder.glob("*.log")))


@contextmanager
def processes(folder: Path):
    held = Processes(folder)
    try:
        yield held
    finally:
        for process in held.running.values():
            process.send_signal(signal.SIGTERM)
        for process in held.running.values():
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def script(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def call(*argv: str) -> str:
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout


def status(home: Path) -> dict:
    try:
        return json.loads((home / "status.json").read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return {}


async def until(holds, what: str, held: Processes, *, seconds: float = 300) -> None:
    with trio.move_on_after(seconds):
        while not holds():
            for name, process in held.running.items():
                assert process.poll() is None, f"{name} ended before {what}: {held.words()}"
            await trio.sleep(0.2)
        return
    raise AssertionError(f"{what} did not come within {seconds} s: {held.words()}")


async def answers(client: httpx.AsyncClient, held: Processes) -> None:
    while True:
        try:
            await client.get("/healthz")
            return
        except httpx.HTTPError:
            assert held.running["coordinator"].poll() is None, held.words()
            await trio.sleep(0.2)


async def test_an_adapter_is_trained_by_a_pool_and_exported(tmp_path: Path):
    """Adapters go out on the base in q8_0, a node that comes late gets both, and the end is a Hugging Face folder."""
    model, home = tmp_path / "model", tmp_path / "home"
    call(script("echo2-learner"), "prepare", "--model", "tiny", "--out", str(model))
    learner = call(script("echo2-learner"), "identity", "--home", str(home)).split()[-1]
    port, own, rest, *nodes = free_ports(5)
    (tmp_path / "coordinator.toml").write_text(
        COORDINATOR.format(port=port, rest=rest, model=model, learner=learner, steps=STEPS)
    )
    config = load_config(tmp_path / "coordinator.toml")
    peer = load_or_create_identity(config.identity_path).peer_id
    token = make_operator_token(config.operator_token_path)
    (tmp_path / "learner.toml").write_text(LEARNER.format(port=port, coordinator=peer, model=model, own=own))

    with processes(tmp_path) as held:
        held.start("coordinator", script("echo2-coordinator"), "serve", "--config", str(tmp_path / "coordinator.toml"))
        held.start("learner", script("echo2-learner"), "run", "--config", str(tmp_path / "learner.toml"))
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{rest}", timeout=10) as client:
            with trio.fail_after(120):
                await answers(client, held)

            async def add_node(number: int) -> Path:
                body = {"uses": 1, "expires_hours": 1.0, "reason": "test"}
                reply = await client.post("/v1/tokens", json=body, headers={"Authorization": f"Bearer {token}"})
                join = tmp_path / f"node-{number}.join"
                join.write_text(reply.raise_for_status().json()["join"])
                folder = tmp_path / f"node-{number}"
                argv = [
                    "run",
                    "--join",
                    f"@{join}",
                    "--home",
                    str(folder),
                    "--name",
                    f"node-{number}",
                    "--threads",
                    "1",
                ]
                listen = f"/ip4/127.0.0.1/tcp/{nodes[number]}"
                held.start(f"node-{number}", script("echo2-node"), *argv, "--listen", listen)
                return folder

            first = await add_node(0)
            await until(lambda: (status(home).get("published_version") or 0) >= 2, "version 2", held)
            late = await add_node(1)
            await until(lambda: (status(late).get("version") or 0) >= 2, "the late node's install", held)
            await until(lambda: status(home).get("state") == "finished", "the run's end", held)
            await until(lambda: status(first).get("version") == STEPS, "the last version on a node", held)
    for folder in (first, late):
        (snapshots,) = (path for path in folder.iterdir() if (path / "whole").is_dir())
        kinds = [snapshot.manifest.kind for snapshot in DiskStore(snapshots).snapshots()]
        assert kinds[0] == "full"
        assert set(kinds[1:]) == {"adapter"}
    published = DiskStore(home / "snapshots").snapshots()
    assert [snapshot.manifest.domain for snapshot in published] == ["q8_0"] * len(published)
    assert published[0].manifest.length_bytes > 3 * published[-1].manifest.length_bytes
    said = call(script("echo2-learner"), "export-hf", str(home), "--out", str(tmp_path / "out"))
    assert f"version {STEPS} of the run lora" in said
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > 3_000_000
