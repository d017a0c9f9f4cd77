"""A host of blocks as a process: loads what it serves, listens until a signal comes, leaves nothing behind.

Owns the signals. Owns no argument parsing.
"""

import asyncio
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from lightning_blocktrain.models.block_files import load_blocks
from lightning_blocktrain.serving.block_host import BlockHost
from lightning_blocktrain.serving.block_server import BlockServer, HostLimits
from lightning_blocktrain.transport.address import given_cafile
from lightning_blocktrain.transport.site import server_tls


@dataclass(frozen=True)
class HostSettings:
    """What a host serves, and how it is reached.

    Args:
        path: A folder of blocks, or a checkpoint.
        blocks: Their indices; None: all.
        token: What everyone who connects must know; in no message or representation.
        listen: Host and port; port 0 lets the system choose.
        dtype: Of weights and computation: ``fp32`` or ``bf16``.
        certfile: PEM certificate chain; with it the host speaks TLS.
        keyfile: PEM key of the certificate; None: in ``certfile``.
        max_sessions: Most texts at once.
        limits: What the server takes.
    """

    path: Path
    blocks: Sequence[int] | None
    token: str = field(repr=False)
    listen: tuple[str, int] = ("127.0.0.1", 0)
    dtype: str = "fp32"
    certfile: Path | None = None
    keyfile: Path | None = None
    max_sessions: int = 256
    limits: HostLimits = field(default_factory=HostLimits)


def open_server(settings: HostSettings) -> BlockServer:
    """Return a server of the blocks that settings name, loaded; it does not listen yet.

    Raises:
        CheckpointMismatchError: If there is no such model.
        ValueError: If it has no such block, or a certificate cannot be used.
    """
    given_cafile()  # other hosts are checked against it: refused here rather than when the first walk goes on
    tls = server_tls(settings.listen[0], settings.certfile, settings.keyfile)
    model, manifest = load_blocks(settings.path, settings.blocks, settings.dtype)
    blocks = range(manifest.num_blocks) if settings.blocks is None else settings.blocks
    host = BlockHost(model, manifest, blocks, settings.dtype, settings.max_sessions)
    return BlockServer(host, settings.token, settings.listen, tls, settings.limits)


def serve_blocks(settings: HostSettings, on_listening: Callable[[BlockServer], None] | None = None) -> None:
    """Serve until SIGINT or SIGTERM comes; in the main thread only.

    Args:
        settings: What and how.
        on_listening: Called as soon as walks are taken.

    Raises:
        PortInUseError: And the others of ``open_server``.
    """
    asyncio.run(until_signalled(open_server(settings), on_listening))


class Server(Protocol):
    """What listens from ``start`` to ``stop``."""

    async def start(self) -> None:
        """Listen."""
        ...

    async def stop(self) -> None:
        """End everything."""
        ...


S = TypeVar("S", bound=Server)


async def until_signalled(server: S, on_listening: Callable[[S], None] | None) -> None:
    """Start a server, wait for SIGINT or SIGTERM, and stop it."""
    signalled = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signalled.set)
    try:
        await server.start()
        if on_listening is not None:
            on_listening(server)
        await signalled.wait()
    finally:
        await server.stop()
