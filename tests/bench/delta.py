"""What a publish costs as a delta: `python tests/bench/delta.py --folder DIR [--quick]`. The last line is JSON.

The files are ten publishes of real GRPO on SmolLM2-135M (`delta_publishes.py`), kept in DIR: made once, measured often.
Each is coded against the one before it, in bf16 and q8_0, and decoded again; what comes out is compared byte by byte.

| figure       | meaning                                                                                       |
|--------------|-----------------------------------------------------------------------------------------------|
| share        | the delta's length in per cent of the snapshot's; `first` is publish 1, which is not in the others |
| encode, decode | MB of snapshot per second of CPU time, one thread; files read, hashed, written and synced; medians |
| peak_MiB     | resident memory above that of the idle process, which has all modules loaded; the highest     |
| anchor_share | the last publish against the first: nine at once                                              |

Publish 1 is apart because the base model's weights are a 4-bit file's: many lie exactly between two numbers of bf16,
and the first touch tips them over. Beside ours, of the same files: XOR, byte shuffle and zstd -3 (what DESIGN names),
and of the last publish plain zstd -3 and `zstd --patch-from`; left out where there is no `zstd` command.

`--quick` takes two small synthetic files, normal weights moved at random, and says nothing of a real run.
"""

from __future__ import annotations

import argparse
import filecmp
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from delta_publishes import DOMAINS, KAPPA, make_publishes, snapshot_path
from learner_worker import MIB, _status_bytes

PUBLISHES = 10
QUICK_SHAPE = (4096, 4096)
WIDTHS = {"bf16": 2, "q8_0": 34}


def measure(base: Path, new: Path, work: Path, what: str) -> None:
    """In a process of its own: one delta made, or read and compared. Prints JSON."""
    from echo2.p2p.delta import decode_delta, encode_delta, read_head

    delta, out = work / "delta", work / "out"
    Path("/proc/self/clear_refs").write_text("5")  # the kernel's high-water mark starts again
    idle = _status_bytes("VmRSS")
    start = time.process_time()
    if what == "encode":
        encode_delta(base, new, delta)
    else:
        with delta.open("rb") as file:
            head = read_head(file)
            file.seek(0)
            decode_delta(base, file, out, sha256=head.new_sha256, length_bytes=head.new_bytes)
    seconds = time.process_time() - start
    peak = _status_bytes("VmHWM") - idle
    length = new.stat().st_size
    print(json.dumps({f"{what}_MBps": length / 1e6 / seconds, f"{what}_peak_MiB": peak / MIB}))


def measured(base: Path, new: Path) -> dict[str, float]:
    """One pair: its share, and what both ways cost."""
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=new.parent) as work:
        for what in ("encode", "decode"):
            command = [sys.executable, __file__, "--measure", str(base), str(new), work, what]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            figures |= json.loads(done.stdout)
        if not filecmp.cmp(Path(work) / "out", new, shallow=False):
            raise SystemExit(f"the delta of {new} does not give it back")
        figures["share"] = 100 * (Path(work) / "delta").stat().st_size / new.stat().st_size
    return figures


def zstd_bytes(arguments: list[str], data: bytes | None = None) -> int:
    """How much comes out of the command."""
    done = subprocess.run(["zstd", "-q", "-3", "-c", *arguments], input=data, stdout=subprocess.PIPE, check=True)
    return len(done.stdout)


def xor_share(base: Path, new: Path, width: int) -> float:
    """XOR, byte shuffle over the whole file at the width of its matrices' elements, zstd -3."""
    changed = np.fromfile(base, np.uint8) ^ np.fromfile(new, np.uint8)
    whole = len(changed) // width * width
    shuffled = changed[:whole].reshape(-1, width).T.tobytes() + changed[whole:].tobytes()
    return 100 * zstd_bytes(["-"], shuffled) / len(changed)


def bench(paths: list[Path], domain: str) -> dict[str, Any]:
    """The figures of one domain from its snapshots, oldest first; with only two there is no first one apart."""
    zstd = shutil.which("zstd") is not None
    found = []
    for base, new in itertools.pairwise(paths):
        figures = measured(base, new)
        if zstd:
            figures["xor_share"] = xor_share(base, new, WIDTHS[domain])
        found.append(figures)
        print(f"{domain} {new.name}: {json.dumps({k: round(v, 3) for k, v in figures.items()})}", flush=True)
    later = found[1:] or found
    shares = [each["share"] for each in later]
    told = {
        "share_max": max(shares),
        "share_median": statistics.median(shares),
        "share_first": found[0]["share"],
        "encode_MBps": statistics.median(each["encode_MBps"] for each in later),
        "decode_MBps": statistics.median(each["decode_MBps"] for each in later),
        "peak_MiB": max(each[key] for each in found for key in ("encode_peak_MiB", "decode_peak_MiB")),
    }
    if len(paths) > 2:
        told["anchor_share"] = measured(paths[1], paths[-1])["share"]
    if zstd:
        told["xor_share_max"] = max(each["xor_share"] for each in later)
        told["xor_share_median"] = statistics.median(each["xor_share"] for each in later)
        told["xor_share_first"] = found[0]["xor_share"]
        length = paths[-1].stat().st_size
        told["zstd_share"] = 100 * zstd_bytes([str(paths[-1])]) / length
        told["patch_from_share"] = 100 * zstd_bytes(["--long=29", f"--patch-from={paths[-2]}", str(paths[-1])]) / length
    return {key: float(f"{value:.4g}") for key, value in told.items()}


def make_synthetic(folder: Path) -> None:
    """Two files of one normal matrix, the second a few steps of training's size away."""
    import gguf
    import torch

    from echo2.learner.gguf_export import StoredTensor, write_gguf
    from echo2.learner.quantise import encoding_of

    generator = torch.Generator().manual_seed(0)
    base = torch.randn(QUICK_SHAPE, generator=generator) * 0.05
    moved = base + 2e-6 * torch.randn(QUICK_SHAPE, generator=generator)
    for domain in DOMAINS:
        for version, weight in ((0, base), (KAPPA, moved)):
            writer = gguf.GGUFWriter(None, "llama")
            tensor = StoredTensor("t", weight.shape, encoding_of(weight.shape, domain), lambda weight=weight: weight)
            write_gguf(writer, [tensor], snapshot_path(folder, version, domain))


def main() -> None:
    parser = argparse.ArgumentParser(description="Deltas between published snapshots.")
    parser.add_argument("--quick", action="store_true", help="two synthetic files: shows that all parts work")
    parser.add_argument("--folder", type=Path, help="where the ten publishes are kept; made there if missing")
    parser.add_argument("--publishes", type=int, default=PUBLISHES, help="so many; default ten")
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        *paths, what = arguments.measure
        measure(*map(Path, paths), what)
        return
    with tempfile.TemporaryDirectory() as scratch:
        if arguments.quick:
            folder, publishes = Path(scratch), 1
            make_synthetic(folder)
        elif arguments.folder:
            folder, publishes = arguments.folder.absolute(), arguments.publishes
            folder.mkdir(parents=True, exist_ok=True)
            make_publishes(folder, publishes)
        else:
            raise SystemExit("--folder says where the publishes are kept: about 7 GB; or take --quick")
        versions = [KAPPA * number for number in range(publishes + 1)]
        results: dict[str, Any] = {
            domain: bench([snapshot_path(folder, version, domain) for version in versions], domain)
            for domain in DOMAINS
        }
    if arguments.quick:
        results["synthetic"] = True
    print(json.dumps(results))


if __name__ == "__main__":
    main()
