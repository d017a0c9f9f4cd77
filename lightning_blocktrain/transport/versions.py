"""What both sides of a line must agree on before they talk: the version, and the names in HTTP's headers."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version

PROTOCOL = 3
"""Grows when a worker of one version can no longer talk to a coordinator of another."""
RUN_HEADER = "BlockTrain-Run"
"""The run that a request is for."""
WORKER_HEADER = "BlockTrain-Worker"
"""Who sends it: id and incarnation, with a slash between them."""
FRAME_TYPE = "application/x-blocktrain-frame"
"""Content type of a message of ``wire.py``."""


@cache
def package_version() -> str:
    """Return the version of the installed package; ``unknown`` where only its files are there."""
    try:
        return version("lightning-blocktrain")
    except PackageNotFoundError:
        return "unknown"
