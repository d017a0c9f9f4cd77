"""Which versions talk to each other."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version

PROTOCOL = 1
"""Grows when a worker of one version can no longer talk to a coordinator of another."""


@cache
def package_version() -> str:
    """Return the version of the installed package; ``unknown`` where only its files are there."""
    try:
        return version("lightning-blocktrain")
    except PackageNotFoundError:
        return "unknown"
