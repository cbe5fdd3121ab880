"""Which release this is."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as package_version


def software_version() -> str:
    """The installed release."""
    try:
        return package_version("echo2")
    except PackageNotFoundError:
        return "0"
