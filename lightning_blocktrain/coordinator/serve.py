"""A coordinator as a process: opens what it needs, serves until the run ends or a signal comes, leaves nothing behind.

Owns the signals and the exit code. Owns no argument parsing.
"""

import asyncio
import logging
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_blocktrain.coordinator.desk import Desk
from lightning_blocktrain.coordinator.server import CoordinatorServer, ServerLimits
from lightning_blocktrain.coordinator.storage import Storage
from lightning_blocktrain.errors import explain
from lightning_blocktrain.heap import keep_heap
from lightning_blocktrain.rounds import INTERFACE, block_entry
from lightning_blocktrain.rounds.verdicts import is_count
from lightning_blocktrain.transport.site import server_tls, tls_context
from lightning_blocktrain.transport.terms import RunTerms

log = logging.getLogger(__name__)

KEPT_HEAP_BYTES = 2**28
"""Of a replaced master, kept for the next one: with fresh pages a merge takes some times as long."""


@dataclass(frozen=True)
class ServeSettings:
    """How a coordinator is reached and what it keeps.

    Args:
        run_id: Names the run.
        token: Its secret; in no message or representation.
        host: Address to listen on; the default is reachable from this machine only.
        port: 0 lets the system choose.
        state_dir: Keeps the state; a run stored there goes on. None keeps nothing.
        certfile: PEM certificate chain; with it the server speaks HTTPS.
        keyfile: PEM key of the certificate; None: in ``certfile``.
        spool_dir: Where long messages wait; None: ``state_dir``, else the system's temporary folder.
        linger_s: How long workers have after the end of the run to fetch what is left and leave; None: until a signal
            comes, whoever is left.
        limits: What the server takes.
        num_workers: Workers that the first round waits for; None: as the founder of the run says.
        max_rounds: Rounds after which the run ends; None: as the founder of the run says.
        blocks: The blocks it is for, where several coordinators share a run; None: the whole run, and the interface.
        interface: Whether it is, of several, the one that merges the interface and gives out ids and blocks.
        kept_versions: Newest versions of each entry whose files stay in ``state_dir``, 1 or more.
    """

    run_id: str
    token: str = field(repr=False)
    host: str = "127.0.0.1"
    port: int = 0
    state_dir: Path | None = None
    certfile: Path | None = None
    keyfile: Path | None = None
    spool_dir: Path | None = None
    linger_s: float | None = 30.0
    limits: ServerLimits = field(default_factory=ServerLimits)
    num_workers: int | None = None
    max_rounds: int | None = None
    blocks: tuple[int, ...] | None = None
    interface: bool = False
    kept_versions: int = 1

    def __post_init__(self) -> None:
        tls_context(self.certfile, self.keyfile)  # refused here rather than when it listens
        if self.blocks is not None:
            _check_blocks(self.blocks, self.interface)
        elif self.interface:
            rule = "interface says which one of several coordinators merges it, so it needs blocks"
            raise ValueError(explain(rule, "interface=True, blocks=None", "leave it out, or name the blocks"))

    @property
    def serves(self) -> tuple[str, ...] | None:
        """The entries of the run that it is for; None: all."""
        if self.blocks is None:
            return None
        entries = tuple(block_entry(block_idx) for block_idx in sorted(self.blocks))
        return (*entries, INTERFACE) if self.interface else entries

    @property
    def fixed_terms(self) -> dict[str, Any]:
        """The terms that hold whatever the founder of the run says."""
        named = {"num_workers": self.num_workers, "max_rounds": self.max_rounds}
        return {name: value for name, value in named.items() if value is not None}


def _check_blocks(blocks: tuple[int, ...], interface: bool) -> None:
    if len(set(blocks)) < len(blocks) or not all(is_count(block_idx) for block_idx in blocks):
        raise ValueError(explain("blocks must be different numbers from 0 on", f"blocks={blocks}", "correct them"))
    if not blocks and not interface:
        rule = "a coordinator must be for a block or the interface"
        raise ValueError(explain(rule, f"blocks={blocks}, interface=False", "name a block"))


@asynccontextmanager
async def serving(
    settings: ServeSettings,
    founding: tuple[RunTerms, Mapping[str, Mapping[str, Tensor]]] | None = None,
) -> AsyncIterator[CoordinatorServer]:
    """Serve inside the block.

    Args:
        settings: How.
        founding: Terms and first masters, if the run is not stored; None: the first worker brings them.

    Raises:
        PortInUseError: If the address is taken.
        StateError: If another process uses the state folder, or it is damaged.
        CheckpointMismatchError: If the state folder holds another run.
        ValueError: If certificate and key cannot be read, or do not belong together.
    """
    # First: a wrong certificate opens nothing.
    tls = server_tls(settings.host, settings.certfile, settings.keyfile)
    storage = None if settings.state_dir is None else Storage(settings.state_dir, settings.kept_versions)
    try:
        desk = Desk(settings.run_id, settings.token, storage, settings.fixed_terms, settings.serves)
        if not desk.resume(time.monotonic()) and founding is not None:
            desk.found(*founding, time.monotonic())
        server = CoordinatorServer(
            desk,
            settings.host,
            settings.port,
            tls,
            settings.limits,
            settings.spool_dir or settings.state_dir,
        )
        await server.start()
    except BaseException:
        if storage is not None:
            storage.close()
        raise
    try:
        yield server
    finally:
        await server.stop()


def serve(settings: ServeSettings, on_listening: Callable[[str], None] | None = None) -> int:
    """Serve until the run has ended and ``linger_s`` is over, or SIGINT or SIGTERM comes; in the main thread only.

    Args:
        settings: How.
        on_listening: Called with the URL as soon as requests are answered.

    Returns:
        The exit code: 0 after a finished or stopped run or a signal, 1 after a run that was given up.

    Raises:
        PortInUseError: And the others of ``serving``.
    """
    settle_process()
    return asyncio.run(_serve(settings, on_listening))


def settle_process() -> None:
    """Set up a process that is a coordinator and nothing else, before it starts threads.

    Merging is bound by memory: a second thread gains little on an idle machine, and where workers share the cores it
    loses many times that, since each of many small operations would wait for it.
    """
    torch.set_num_threads(1)
    keep_heap(KEPT_HEAP_BYTES)


async def _serve(settings: ServeSettings, on_listening: Callable[[str], None] | None) -> int:
    signalled = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signalled.set)
    async with serving(settings) as server:
        log.info("run %s: listening on %s", settings.run_id, server.url)
        if on_listening is not None:
            on_listening(server.url)
        waits: list[asyncio.Task[Any]] = [asyncio.create_task(signalled.wait())]
        if settings.linger_s is not None:
            waits.append(asyncio.create_task(server.wait_for_end(settings.linger_s)))
        done, left = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in left:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        for task in done:
            task.result()  # raises what ended the wait, if it was no event
        return 1 if server.phase == "failed" else 0
