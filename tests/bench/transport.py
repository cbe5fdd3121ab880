"""What our transport costs: `python tests/bench/transport.py [--quick]`. The last line is JSON.

| measure | what runs                                                                                              |
|---------|--------------------------------------------------------------------------------------------------------|
| stream  | one process sends, another reads and throws away: one stream, writes of 1 MiB                          |
| copy    | a process in the middle takes a stream from the first and sends it to the last: its CPU seconds per GB |
| hop     | the process in the middle receives chunks, verifies, stores on disk, forwards: its CPU seconds per GB  |
| control | small requests beside a bulk stream that fills a line of 2 Mbit/s (a proxy that both share)            |

`ours` hops as a node does (`Broadcaster`, `DiskStore`); `stock` (py-libp2p as it comes) and `tls` (trio's, without
libp2p) hop with the shortest loop that does the same. A GB is 10^9 bytes. Repetitions alternate between the kinds and
the measures, so that a slow minute of the machine hits all of them; medians are reported, of `ratio` that of each
repetition's hop over its copy.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

KINDS = ("ours", "stock", "tls")
MIB = 1 << 20
FULL, QUICK = (256 * MIB, 5, 12.0), (64 * MIB, 2, 3.0)
"""Bytes of one measure, repetitions, seconds of control requests."""

LINE_BYTES_PER_SECOND = 250_000
"""2 Mbit/s, a home uplink."""


def touch_memory(folder: Path, count: int) -> None:
    """Have `count` bytes of page cache at hand.

    A virtual machine gives memory that was free for two seconds back to its host, and then pays a fault of the host for
    each page of it: about 0.8 CPU seconds per GB of files, which no machine of a volunteer pays.
    """
    path = folder / "touched"
    with path.open("wb", buffering=0) as file:
        os.posix_fallocate(file.fileno(), 0, count)
        for _ in range(0, count, MIB):
            file.write(bytes(MIB))
    path.unlink()


class Process:
    """A worker and its orders."""

    def __init__(self, kind: str, seed: int, folder: Path) -> None:
        folder.mkdir()
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("worker.py")), kind, str(seed), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ready(self) -> str:
        self.address: str = self.answer()
        return self.address

    def tell(self, order: str, **details: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"order": order, **details}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a worker died; its error is above")
        return json.loads(line)

    def do(self, order: str, **details: Any) -> Any:
        self.tell(order, **details)
        return self.answer()

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Trio:
    """Source, middle and sink of one kind."""

    def __init__(self, kind: str, folder: Path, *measures: str) -> None:
        folder.mkdir()
        self.folder = folder
        self.kind = kind
        self.measures = measures
        self.all = [Process(kind, seed, folder / str(seed)) for seed in (1, 2, 3)]
        self.source, self.middle, self.sink = self.all
        self.version = 0

    def ready(self) -> None:
        for process in self.all:
            process.ready()
        self.middle.do("upstream", address=self.source.address)
        if self.kind == "ours" and "hop" in self.measures:
            for process in self.all:
                process.do("broadcast")

    def measure(self, what: str, count: int) -> dict[str, float]:
        if what == "stream":
            return self.stream(count)
        return self.through("copy", count) if what == "copy" else self.hop(count)

    def stream(self, count: int) -> dict[str, float]:
        before = self.source.do("cpu"), self.sink.do("cpu")
        seconds = self.sink.do("pull", address=self.source.address, service="stream", bytes=count)
        return {
            "MBps": count / 1e6 / seconds,
            "send_cpu": (self.source.do("cpu") - before[0]) / count * 1e9,
            "receive_cpu": (self.sink.do("cpu") - before[1]) / count * 1e9,
        }

    def through(self, service: str, count: int) -> dict[str, float]:
        touch_memory(self.folder, 2 * count)
        before = self.middle.do("cpu")
        seconds = self.sink.do("pull", address=self.middle.address, service=service, bytes=count)
        return {"MBps": count / 1e6 / seconds, "cpu": (self.middle.do("cpu") - before) / count * 1e9}

    def hop(self, count: int) -> dict[str, float]:
        if self.kind != "ours":
            return self.through("hop", count)
        manifest = self.source.do("publish", bytes=count, version=self.version)
        chunk_bytes = min(max(-(-count // 256), 64 * 1024), 4 * MIB)
        order = {
            "manifest": manifest,
            "chain": [process.address for process in self.all],
            "chunks": -(-count // chunk_bytes),
            "version": self.version,
        }
        self.version += 1
        touch_memory(self.folder, 2 * count)
        before = self.middle.do("cpu")
        self.sink.tell("fetch", **order)
        self.middle.do("fetch", **order)
        seconds = self.sink.answer()
        cpu = self.middle.do("cpu") - before
        for process in self.all:
            process.do("discard")
        return {"MBps": count / 1e6 / seconds, "cpu": cpu / count * 1e9}

    def end(self) -> None:
        for process in self.all:
            process.end()


def main() -> int:
    """See the module."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="small and few, under a minute")
    options.add_argument("--kind", action="append", choices=KINDS, help="only these")
    chosen = options.parse_args()
    count, repetitions, seconds = QUICK if chosen.quick else FULL
    kinds = chosen.kind or list(KINDS)
    samples: dict[tuple[str, str], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        # Of ours `chunks` carries plain streams or the broadcaster's, so the two have processes of their own.
        benches = [Trio(kind, Path(folder, kind), "stream", "copy", *["hop"] * (kind != "ours")) for kind in kinds]
        benches += [Trio(kind, Path(folder, f"{kind}-hop"), "hop") for kind in kinds if kind == "ours"]
        for bench in benches:
            bench.ready()
        for measure in ("stream", *["copy", "hop"] * repetitions):
            for bench in benches:
                if measure in bench.measures:
                    for _ in range(repetitions if measure == "stream" else 1):
                        samples.setdefault((bench.kind, measure), []).append(bench.measure(measure, count))
        for bench in benches:
            bench.end()
        p99 = control_p99(Path(folder), seconds) if "ours" in kinds else float("nan")
    medians = {
        key: {name: statistics.median(sample[name] for sample in found) for name in found[0]}
        for key, found in samples.items()
    }
    show(medians, repetitions, count)
    hops, copies = samples.get(("ours", "hop"), []), samples.get(("ours", "copy"), [])
    ratios = [hop["cpu"] / copy["cpu"] for hop, copy in zip(hops, copies, strict=True)]
    print(json.dumps(summary(medians, ratios, p99)))
    return 0


def control_p99(folder: Path, seconds: float) -> float:
    """99th percentile of a request's round trip, in milliseconds, beside bulk on a slow line."""
    near, far = Process("ours", 4, folder / "near"), Process("ours", 5, folder / "far")
    near.ready()
    peer, address = far.ready().split()
    line = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("line.py")), address.split("/")[-1], str(LINE_BYTES_PER_SECOND)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert line.stdout is not None
    port = line.stdout.readline().strip()
    through = f"{peer} /ip4/127.0.0.1/tcp/{port}"
    trips = near.do("control", address=through, warm_seconds=2.0, seconds=seconds)
    line.kill()
    line.wait()
    line.stdout.close()
    near.end()
    far.end()
    return 1e3 * sorted(trips)[int(0.99 * len(trips))]


def show(medians: dict[tuple[str, str], dict[str, float]], repetitions: int, count: int) -> None:
    print(f"medians of {repetitions} x {count / 1e6:.0f} MB on {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
    for (kind, measure), found in sorted(medians.items()):
        print(f"{kind:6}{measure:8}" + "  ".join(f"{name} {value:.2f}" for name, value in found.items()))


def summary(
    medians: dict[tuple[str, str], dict[str, float]], ratios: list[float], p99: float
) -> dict[str, float | None]:
    def of(kind: str, measure: str, name: str) -> float | None:
        found = medians.get((kind, measure))
        return round(found[name], 3) if found else None

    return {
        "hop_cpu_s_per_GB": of("ours", "hop", "cpu"),
        "copy_cpu_s_per_GB": of("ours", "copy", "cpu"),
        "ratio": round(statistics.median(ratios), 3) if ratios else None,
        "stream_MBps": of("ours", "stream", "MBps"),
        "stock_MBps": of("stock", "stream", "MBps"),
        "control_p99_ms_under_bulk": round(p99, 1),
    }


if __name__ == "__main__":
    sys.exit(main())
