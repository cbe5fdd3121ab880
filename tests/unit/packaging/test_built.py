"""What is built holds the files that are no Python: the web page, the tasks' and the learner's data."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("setuptools", reason="no setuptools here to build with: pip install 'setuptools>=77'")

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("node", "coordinator", "p2p", "learner", "tasks")
BUILD = """
import sys
from setuptools import build_meta
out = sys.argv[1]  # setuptools puts its own there
build_meta.build_sdist(out)
build_meta.build_wheel(out)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The names of the files in the sdist and in the wheel, built from a copy."""
    copy = tmp_path_factory.mktemp("tree")
    for name in (*PACKAGES, "packaging"):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    out = tmp_path_factory.mktemp("dist")
    done = subprocess.run([sys.executable, "-c", BUILD, out], cwd=copy, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    with tarfile.open(next(out.glob("*.tar.gz"))) as sdist:
        in_sdist = {member.name.partition("/")[2] for member in sdist.getmembers() if member.isfile()}
    with zipfile.ZipFile(next(out.glob("*.whl"))) as wheel:
        in_wheel = set(wheel.namelist())
    return in_sdist, in_wheel


def files(folder):
    return {path.name for path in (ROOT / folder).iterdir() if path.is_file() and path.suffix != ".pyc"}


@pytest.mark.parametrize("folder", ["coordinator/web", "learner/data", "tasks/data"])
def test_every_file_of_data_is_built_in(built, folder):
    """In the sdist beside its package, in the wheel inside it."""
    in_sdist, in_wheel = built
    assert files(folder)
    assert {f"{folder}/{name}" for name in files(folder)} <= in_sdist
    assert {f"echo2/{folder}/{name}" for name in files(folder)} <= in_wheel
