"""The packaging facts that no tool checks by itself."""

import importlib.metadata
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = {"node", "coordinator", "p2p", "learner", "tasks"}


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_top_level_package_folder_is_mapped_and_no_other():
    """The folders that hold an __init__.py are exactly the packages setuptools is told of."""
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    mapping = project()["tool"]["setuptools"]["package-dir"]
    assert folders == PACKAGES
    assert mapping == {"echo2": "packaging/namespace/echo2"} | {f"echo2.{name}": name for name in PACKAGES}
    assert set(project()["tool"]["setuptools"]["packages"]) == set(mapping)


def test_type_checkers_see_each_package_through_a_relative_link():
    """The links under packaging/namespace point at the real folders, from wherever the clone lies."""
    for name in PACKAGES:
        link = ROOT / "packaging" / "namespace" / "echo2" / name
        assert link.is_symlink()
        assert not Path(link.readlink()).is_absolute()
        assert link.resolve() == ROOT / name


def test_packages_are_flat():
    """No package has a package inside it, so the mapping misses no module."""
    assert not [path for name in PACKAGES for path in (ROOT / name).glob("*/__init__.py")]


def test_names_that_would_shadow_others_do_not_exist():
    """`packaging` stays PyPI's, and tests are no package."""
    assert not (ROOT / "packaging" / "__init__.py").exists()
    assert not (ROOT / "tests" / "__init__.py").exists()


def test_the_four_commands_are_installed():
    """Each console script resolves to a callable."""
    scripts = {
        entry.name: entry
        for entry in importlib.metadata.entry_points(group="console_scripts")
        if "echo2" in entry.value
    }
    assert set(scripts) == {"echo2", "echo2-coordinator", "echo2-learner", "echo2-node"}
    assert all(callable(entry.load()) for entry in scripts.values())


def test_torch_is_pinned_where_make_installs_from():
    """The constraints name one exact torch, the one the set-up asks for first."""
    lines = (ROOT / "packaging" / "constraints.txt").read_text().splitlines()
    assert [line for line in lines if line.startswith("torch==")] == ["torch==2.13.0"]
