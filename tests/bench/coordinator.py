"""What a coordinator carries: `python tests/bench/coordinator.py [--quick]`. The last line is JSON.

The real `echo2-coordinator serve`, and around it as many node clients as asked for, over real libp2p, several to a
process: no engine, but the hellos, held heartbeats, lease requests and submissions of a node, two rollouts of 2048
tokens (16 KB each) at a time. A learner without weights consumes what is admitted and publishes; a poller asks REST for
the pool, the nodes, the runs, the metrics and the events, each once a second.

| figure                    | is                                                                                     |
|---------------------------|----------------------------------------------------------------------------------------|
| rollouts_per_s            | acknowledged, so durable, in the measured time, while `--rate` were offered            |
| most_per_s                | the same while every node submits as soon as it can                                    |
| rest_p99_ms               | of all requests of the poller at the offered rate                                      |
| rss_MiB, rss_growth_MiB   | of the coordinator at the end, and since the first quarter of the measured time        |
| heartbeats_missed_wrongly | times that the list of nodes had one late or dead whose last heartbeat was sent in time |
| cpu_ms_per_rollout        | coordinator's CPU, all of it (heartbeats too), over rollouts                           |
| cpu_idle                  | its CPU seconds a second with the nodes there and no rollouts                          |
| ceiling_per_s             | the same rows by bare SQL into the same kind of database, a commit a submission        |
| http_json_per_s           | what one would write in an afternoon: JSON over HTTP, FastAPI, a commit for each POST  |

Everything runs on the machine's cores at once. Nodes have machines of their own in truth: their processes are
`NODES_NICE` nicer than the coordinator, so that they take what it leaves, and what they took is told too.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import trio

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.coordinator_limits import bare_rate, http_rate
from e2e.coordinator_process import RUN, CoordinatorProcess
from e2e.light_learner import LightLearner
from postgresql import Server, programs

from echo2.p2p.identity import Identity
from echo2.p2p.libp2p_transport import open_libp2p_transport
from echo2.p2p.messages import PeerAddress

TOKENS = 2048
SAMPLES = 2
HEARTBEAT_SECONDS = 10.0
JOIN_SECONDS = 600.0
CALM_SECONDS, FLAT_OUT_SECONDS = 10.0, 20.0
POLL_SECONDS = 1.0
NODES_NICE = 5
IN_TIME_SECONDS = 1.0
"""Before it is judged by: a heartbeat needs some time on its way."""

LEARNER = Identity(b"\x4c" * 32)
MIB = 1 << 20


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Helper:
    """A process that answers a line of JSON to each line of input."""

    def __init__(self, script: str, *arguments: str, nice: int = 0) -> None:
        path = Path(__file__).resolve().parents[1] / script
        self.process = subprocess.Popen(
            [sys.executable, str(path), *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        if nice:
            os.setpriority(os.PRIO_PROCESS, self.process.pid, os.getpriority(os.PRIO_PROCESS, 0) + nice)

    def tell(self, **order: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    async def answer(self, seconds: float = 120.0) -> Any:
        assert self.process.stdout is not None
        with trio.fail_after(seconds):
            line = await trio.to_thread.run_sync(self.process.stdout.readline, abandon_on_cancel=True)
        if not line:
            raise SystemExit("a helper died; its error is above")
        return json.loads(line)

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


class Load:
    """The pool around one coordinator."""

    def __init__(self, arguments: argparse.Namespace, coordinator: CoordinatorProcess, folder: Path) -> None:
        self._arguments, self._coordinator, self._folder = arguments, coordinator, folder
        self._hosts: list[Helper] = []
        self._pace = SAMPLES * arguments.nodes / arguments.rate if arguments.rate else 0.0

    async def join(self, stack: ExitStack) -> float:
        """Every node is in the pool. Seconds that it took."""
        arguments, began = self._arguments, time.monotonic()
        join = self._coordinator.token(arguments.nodes)
        share = -(-arguments.nodes // arguments.processes)
        for first in range(0, arguments.nodes, share):
            host = Helper("e2e/light_host.py", nice=NODES_NICE)
            stack.callback(host.end)
            host.tell(
                coordinator={"peer": join.peer, "addresses": join.addresses},
                run=RUN,
                token=join.token,
                first=first,
                count=min(share, arguments.nodes - first),
                tokens=TOKENS,
                samples=SAMPLES,
            )
            self._hosts.append(host)
        for host in self._hosts:
            await host.answer(JOIN_SECONDS)
        return time.monotonic() - began

    async def pace(self, seconds: float | None) -> None:
        for host in self._hosts:
            host.tell(pace=seconds)
        for host in self._hosts:
            await host.answer()

    async def offered(self) -> None:
        await self.pace(self._pace)

    def cpu_seconds(self) -> float:
        return sum(host.cpu_seconds() for host in self._hosts)

    async def records(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for number, host in enumerate(self._hosts):
            path = self._folder / f"nodes-{number}.json"
            host.tell(report=str(path))
            await host.answer()
            found += json.loads(path.read_text())
        return found


class Watch:
    """Memory of the coordinator, sampled."""

    def __init__(self, coordinator: CoordinatorProcess) -> None:
        self._coordinator = coordinator
        self.samples: list[tuple[float, float]] = []

    async def run(self) -> None:
        while True:
            self.samples.append((time.monotonic(), self._coordinator.resident_bytes() / MIB))
            await trio.sleep(1.0)


async def measure(arguments: argparse.Namespace, coordinator: CoordinatorProcess, folder: Path) -> dict[str, Any]:
    with ExitStack() as stack:
        load = Load(arguments, coordinator, folder)
        async with open_libp2p_transport(LEARNER, []) as transport, trio.open_nursery() as nursery:
            address = f"/ip4/127.0.0.1/tcp/{coordinator.port}"
            learner = LightLearner(
                identity=LEARNER,
                transport=transport,
                coordinator=PeerAddress(peer=coordinator.peer_id, addresses=(address,)),
                run=RUN,
                rollouts_per_step=arguments.R,
                kappa=2,
                staleness_max=3,
                steps=arguments.steps,
                wall=time.time,
            )
            nursery.start_soon(learner.run)
            joined = await load.join(stack)
            say(f"{arguments.nodes} nodes are in after {joined:.0f} s")
            result = await phases(arguments, coordinator, load, nursery, stack)
            result["join_s"] = round(joined, 1)
            result["steps_trained"] = learner.version
            result["troubles"] = dict(learner.troubles) | result["troubles"]
            nursery.cancel_scope.cancel()
    return result


async def phases(
    arguments: argparse.Namespace,
    coordinator: CoordinatorProcess,
    load: Load,
    nursery: trio.Nursery,
    stack: ExitStack,
) -> dict[str, Any]:
    await load.offered()
    while True:  # the baseline evaluation comes first, and is not what is measured
        run = (await trio.to_thread.run_sync(coordinator.get, "/v1/runs"))[0]
        if any(each["complete"] for each in run["evaluations"]) and run["rollouts"]["submitted"] > arguments.nodes:
            break
        await trio.sleep(0.5)
    say("the baseline is measured: load begins")
    watch = Watch(coordinator)
    nursery.start_soon(watch.run)
    poller = Helper("bench/rest_poller.py", str(coordinator.rest_port), str(POLL_SECONDS))
    stack.callback(poller.end)
    await trio.sleep(5.0)

    began, cpu, clients = time.monotonic(), coordinator.cpu_seconds(), load.cpu_seconds()
    await trio.sleep(arguments.seconds)
    ended = time.monotonic()
    cpu, clients = coordinator.cpu_seconds() - cpu, load.cpu_seconds() - clients
    poller.tell()
    polled = await poller.answer()
    say("flat out")
    await load.pace(0.0)
    await trio.sleep(2.0)
    most_began, most_cpu = time.monotonic(), coordinator.cpu_seconds()
    await trio.sleep(arguments.flat_out)
    most_ended, most_cpu = time.monotonic(), coordinator.cpu_seconds() - most_cpu
    flat_out = (await trio.to_thread.run_sync(coordinator.get, "/v1/runs"))[0]
    await load.pace(None)
    await trio.sleep(5.0)
    calm_cpu = coordinator.cpu_seconds()
    await trio.sleep(CALM_SECONDS)
    calm_cpu = coordinator.cpu_seconds() - calm_cpu

    records = await load.records()
    done = rollouts_in(records, began, ended)
    most = rollouts_in(records, most_began, most_ended)
    quarter = [mib for at, mib in watch.samples if at <= began + arguments.seconds / 4]
    run = (await trio.to_thread.run_sync(coordinator.get, "/v1/runs"))[0]
    latencies = {path: [s for at, s in of if began <= at <= ended] for path, of in polled["latencies"].items()}
    everything = sorted(seconds for of in latencies.values() for seconds in of)
    waits = sorted(seconds for record in records for seconds in record["submit_seconds"])
    troubles: Counter[str] = Counter(polled["errors"])
    for record in records:
        troubles.update(record["troubles"])
    return {
        "nodes": arguments.nodes,
        "rollouts_per_s": round(done / (ended - began), 1),
        "most_per_s": round(most / (most_ended - most_began), 1),
        "rest_p99_ms": milliseconds(everything, 0.99),
        "rest_median_ms": milliseconds(everything, 0.5),
        "rest_p99_ms_by_path": {path: milliseconds(sorted(of), 0.99) for path, of in latencies.items()},
        "rss_MiB": round(watch.samples[-1][1]),
        "rss_growth_MiB": round(watch.samples[-1][1] - quarter[-1], 1) if quarter else None,
        "heartbeats_missed_wrongly": missed_wrongly(records, polled["judged"]),
        "heartbeats_judged_missed": len(polled["judged"]),
        "heartbeats_per_s": round(
            sum(began <= at <= ended for r in records for at in r["answered"]) / (ended - began), 1
        ),
        "submit_p99_ms": milliseconds(waits, 0.99),
        "seconds": round(ended - began),
        "cpu_share": round(cpu / (ended - began), 3),
        "cpu_ms_per_rollout": round(cpu / max(done, 1) * 1000, 2),
        "cpu_ms_per_rollout_flat_out": round(most_cpu / max(most, 1) * 1000, 2),
        "flat_out": {name: flat_out[name] for name in ("waiting", "reserved", "outstanding", "version")},
        "cpu_idle": round(calm_cpu / CALM_SECONDS, 3),
        "clients_cpu_share": round(clients / (ended - began), 3),
        "rollouts": run["rollouts"],
        "troubles": dict(troubles),
    }


def rollouts_in(records: list[dict[str, Any]], began: float, ended: float) -> int:
    return sum(count for record in records for at, count in record["acknowledged_at"] if began <= at <= ended)


def milliseconds(values: list[float], share: float) -> float | None:
    return round(values[min(len(values) - 1, int(len(values) * share))] * 1000, 1) if values else None


def missed_wrongly(records: list[dict[str, Any]], judged: list[tuple[float, str, str]]) -> int:
    """Judgements against nodes whose last heartbeat was sent within one and a half periods, by their own record."""
    sent = {record["peer"]: record["sent"] for record in records}
    wrong = 0
    for at, peer, _ in judged:
        before = [when for when in sent[peer] if when <= at - IN_TIME_SECONDS]
        wrong += bool(before) and at - before[-1] <= 1.5 * HEARTBEAT_SECONDS
    return wrong


def run_real(arguments: argparse.Namespace, folder: Path, stack: ExitStack) -> dict[str, Any]:
    database = ""
    if arguments.database == "postgresql":
        found = programs()
        if found is None:
            raise SystemExit("no PostgreSQL here")
        server = Server(found)
        stack.callback(server.stop)
        server.start()
        database = server.database()
    coordinator = CoordinatorProcess(
        folder / "coordinator",
        learner=LEARNER.peer_id,
        context_tokens=2 * TOKENS,
        heartbeat_seconds=HEARTBEAT_SECONDS,
        database=database,
        steps=arguments.steps,
        S=3,
        kappa=2,
        R=arguments.R,
        n=8,
        tokens_max=TOKENS,
        slice_samples_max=SAMPLES,
    )
    stack.callback(coordinator.stop)
    if arguments.profile:
        coordinator.before = [sys.executable, str(Path(__file__).with_name("sampled.py")), arguments.profile]
    coordinator.start()
    coordinator.wait_until_it_serves()
    return trio.run(measure, arguments, coordinator, folder) | {"database": arguments.database}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=600.0, help="of the measured time")
    parser.add_argument("--rate", type=float, default=170.0, help="rollouts a second that are offered")
    parser.add_argument("--processes", type=int, default=4, help="of node clients")
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--memory-nodes", type=int, default=10_000, help="of the variant in memory; 0 = without it")
    parser.add_argument("--quick", action="store_true", help="100 nodes, half a minute, 1000 nodes in memory")
    parser.add_argument("--profile", default="", help="a file for the coordinator's profile, sampled")
    arguments = parser.parse_args()
    arguments.flat_out = FLAT_OUT_SECONDS
    if arguments.quick:
        arguments.nodes, arguments.seconds, arguments.rate = min(arguments.nodes, 100), 15.0, 100.0
        arguments.processes, arguments.flat_out = 2, 5.0
        arguments.memory_nodes = min(arguments.memory_nodes, 1000)
    arguments.R = max(64, 4 * arguments.nodes // 8 * 8)
    arguments.steps = 100_000
    folder = Path(tempfile.mkdtemp(prefix="bench-coordinator-"))
    try:
        with ExitStack() as stack:
            limits = {
                "ceiling_per_s": round(bare_rate(folder / "bare", arguments.database, SAMPLES, TOKENS), 1),
                "http_json_per_s": round(http_rate(folder / "http", SAMPLES, TOKENS), 1),
            }
            say(json.dumps(limits))
            result = run_real(arguments, folder, stack) | limits
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if arguments.memory_nodes:
        script = Path(__file__).with_name("coordinator_memory.py")
        done = subprocess.run(
            [sys.executable, str(script), str(arguments.memory_nodes), "10" if arguments.quick else "60"],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        result["in_memory"] = json.loads(done.stdout.splitlines()[-1])
    result["load_average"] = round(statistics.fmean(os.getloadavg()), 1)
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
