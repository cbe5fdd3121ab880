"""Make or refresh .venv for this checkout: `python3 packaging/bootstrap.py EXTRA[,EXTRA...]`. Standard library only.

Says what is missing before anything fails, shows that it is alive while compilers run, and does nothing when the
environment already matches pyproject.toml and the constraints.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "packaging" / "constraints.txt"
ENVIRONMENT = ROOT / ".venv"
STAMP = ENVIRONMENT / "echo2-installed"
PYTHON_MIN = (3, 11)
DISK_GIB_MIN = 4
"""torch's CPU build and the rest take about 2.5 GiB, building llama.cpp another 1."""


def main() -> int:
    """Bring .venv in line with the project; 0 when it is, 2 when something must be installed by hand."""
    extras = sorted(set((sys.argv[1] if len(sys.argv) > 1 else "coordinator,learner,node").split(",")))
    wanted = _fingerprint()
    installed = STAMP.read_text().split() if STAMP.exists() else []
    if installed[:1] == [wanted] and set(extras) <= set(installed[1:]):
        return 0
    if installed[:1] == [wanted]:
        extras = sorted({*extras, *installed[1:]})
    missing = _missing()
    if missing:
        print("This machine lacks something the set-up needs:", file=sys.stderr)
        for line in missing:
            print(f"  - {line}", file=sys.stderr)
        return 2
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        _run("making .venv", [sys.executable, "-m", "venv", str(ENVIRONMENT)])
        _run("updating pip", [str(python), "-m", "pip", "install", "--quiet", "--upgrade", "pip"])
    pip = [str(python), "-m", "pip", "install", "--quiet", "--constraint", str(CONSTRAINTS)]
    # torch by exact version first: a range lets pip look for another, far larger build.
    torch = next(line for line in CONSTRAINTS.read_text().splitlines() if line.startswith("torch=="))
    if "learner" in extras:
        _run(f"installing {torch}", [*pip, torch])
    note = (
        " (llama.cpp and fastecdsa are compiled: about 4 minutes on 2 cores the first time)" if "node" in extras else ""
    )
    _run(f"installing echo2[{','.join(extras)}]{note}", [*pip, "--editable", f"{ROOT}[{','.join(extras)}]"])
    STAMP.write_text(" ".join([wanted, *extras]))
    return 0


def _fingerprint() -> str:
    parts = [(ROOT / "pyproject.toml").read_bytes(), CONSTRAINTS.read_bytes(), sys.version.encode(), str(ROOT).encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _missing() -> list[str]:
    """What a person must install first, each with the Debian package that has it."""
    missing = []
    if sys.version_info < PYTHON_MIN:
        missing.append(
            f"Python {PYTHON_MIN[0]}.{PYTHON_MIN[1]} or newer (this is {sys.version.split()[0]}); set PYTHON="
        )
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if compiler is None:
        missing.append("a C compiler (Debian: apt-get install gcc g++ make)")
    elif shutil.which(os.environ.get("CXX", "c++")) is None and shutil.which("g++") is None:
        missing.append("a C++ compiler (Debian: apt-get install g++)")
    else:
        include = sysconfig.get_paths()["include"]
        if not _compiles(compiler, "Python.h", include):
            missing.append("the headers of Python (Debian: apt-get install python3-dev)")
        if not _compiles(compiler, "gmp.h", include):
            missing.append("the headers of GMP, for fastecdsa, which libp2p needs (Debian: apt-get install libgmp-dev)")
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401 -- Debian ships it apart
    except ImportError:
        missing.append("the venv module (Debian: apt-get install python3-venv)")
    free = shutil.disk_usage(ROOT).free / 2**30
    if free < DISK_GIB_MIN:
        missing.append(f"disk: {DISK_GIB_MIN} GiB free in {ROOT} ({free:.1f} GiB now)")
    return missing


def _compiles(compiler: str, header: str, include: str) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.c"
        source.write_text(f"#include <{header}>\nint main(void) {{ return 0; }}\n")
        command = [compiler, "-fsyntax-only", f"-I{include}", str(source)]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _run(what: str, command: list[str]) -> None:
    """Run, saying that it still runs; on failure print its output and stop."""
    print(f"-- {what}", file=sys.stderr, flush=True)
    started = time.monotonic()
    said = started
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        while True:
            try:
                code = process.wait(timeout=1)
                break
            except subprocess.TimeoutExpired:
                now = time.monotonic()
                if sys.stderr.isatty():
                    print(f"\r   {now - started:4.0f} s", end="", file=sys.stderr, flush=True)
                elif now - said >= 15:
                    said = now
                    print(f"   still at it, {now - started:.0f} s", file=sys.stderr, flush=True)
            except BaseException:
                process.terminate()
                process.wait()
                raise
        if sys.stderr.isatty():
            print("\r", end="", file=sys.stderr)
        if code:
            output.seek(0)
            sys.stderr.write(output.read()[-8000:].decode(errors="replace"))
            print(f"failed: {' '.join(command)}", file=sys.stderr)
            raise SystemExit(1)
    print(f"   done in {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
