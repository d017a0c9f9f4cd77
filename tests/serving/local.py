"""Servers of blocks in threads of this process, for tests: each has an event loop of its own."""

import asyncio
import ssl
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from lightning_blocktrain.models.block_files import describe, entries_of
from lightning_blocktrain.models.loading import Model
from lightning_blocktrain.serving.block_host import BlockHost
from lightning_blocktrain.serving.block_server import BlockServer, HostLimits
from lightning_blocktrain.transport.loop import LoopThread

TOKEN = "a-token"
WAIT_S = 20.0


class Running:
    """A server that can be stopped like one that dies, frozen, and started again at its address."""

    def __init__(self, host: BlockHost, limits: HostLimits | None, tls: ssl.SSLContext | None = None) -> None:
        self.host = host
        self._limits = limits
        self._tls = tls
        self._start(0)

    def _start(self, port: int) -> None:
        self._loop = LoopThread("test-blocks")
        self.server = BlockServer(self.host, TOKEN, ("127.0.0.1", port), self._tls, self._limits)
        self._loop.run(self.server.start)
        self._stopped = False

    @property
    def address(self) -> str:
        return str(self.server.address)

    def run(self, make: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run something in the server's loop."""
        self._loop.run(make)

    def stop(self) -> None:
        if not self._stopped:
            self._stopped = True
            self._loop.run(self.server.stop)
            self._loop.close()

    def restart(self, host: BlockHost | None = None) -> None:
        """Stop and start again at the same address, with another host's blocks if one is given."""
        assert self.server.address is not None
        port = self.server.address.port
        self.stop()
        self.host = host or self.host
        self._start(port)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Have the server answer nothing inside the block, though its connections stay."""
        thaw, held = threading.Event(), threading.Event()

        async def hold() -> None:
            held.set()
            thaw.wait(WAIT_S)

        future = self._loop.start(hold)
        assert held.wait(WAIT_S)
        try:
            yield
        finally:
            thaw.set()
            future.result(WAIT_S)

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Return when a condition holds that the server's own loop brings about."""
        end = time.monotonic() + WAIT_S

        async def step() -> None:
            await asyncio.sleep(0)

        while not holds():
            assert time.monotonic() < end
            self._loop.run(step)


def host_of(model: Model, blocks: Sequence[int], **options: int) -> BlockHost:
    return BlockHost(model, describe(model, entries_of(model)), blocks, **options)


@contextmanager
def serving(
    model: Model | BlockHost,
    *blocks: Sequence[int],
    limits: HostLimits | None = None,
    tls: ssl.SSLContext | None = None,
    **options: int,
) -> Iterator[list[Running]]:
    """Serve these blocks of a model, one server for each entry; or one host, as it is."""
    with ExitStack() as stack:
        servers = []
        hosts = [model] if isinstance(model, BlockHost) else [host_of(model, own, **options) for own in blocks]
        for host in hosts:
            running = Running(host, limits, tls)
            stack.callback(running.stop)
            servers.append(running)
        yield servers


def route_of(servers: Sequence[Running]) -> str:
    return ",".join(running.address for running in servers)


def all_forgotten(servers: Sequence[Running]) -> bool:
    """Tell whether every server forgets all sessions, which it hears of without an answer."""
    for running in servers:
        running.wait_until(lambda running=running: running.host.num_sessions == 0)  # type: ignore[misc]
    return True
