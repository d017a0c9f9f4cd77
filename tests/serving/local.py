"""Servers of blocks in threads of this process, for tests: each has an event loop of its own."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from lightning_blocktrain.models.block_files import describe, entries_of
from lightning_blocktrain.models.loading import Model
from lightning_blocktrain.serving.block_host import BlockHost
from lightning_blocktrain.serving.block_server import BlockServer, HostLimits
from lightning_blocktrain.transport.loop import LoopThread

TOKEN = "a-token"


class Running:
    """A server that can be stopped like one that dies."""

    def __init__(self, server: BlockServer, host: BlockHost) -> None:
        self.server = server
        self.host = host
        self._loop = LoopThread("test-blocks")
        self._loop.run(server.start)

    @property
    def address(self) -> str:
        return str(self.server.address)

    def stop(self) -> None:
        self._loop.close(self.server.stop)


def host_of(model: Model, blocks: Sequence[int], **options: int) -> BlockHost:
    return BlockHost(model, describe(model, entries_of(model)), blocks, **options)


@contextmanager
def serving(model: Model, *blocks: Sequence[int], limits: HostLimits | None = None) -> Iterator[list[Running]]:
    """Serve these blocks of a model, one server for each entry."""
    with ExitStack() as stack:
        servers = []
        for own in blocks:
            host = host_of(model, own)
            running = Running(BlockServer(host, TOKEN, limits=limits), host)
            stack.callback(running.stop)
            servers.append(running)
        yield servers


def route_of(servers: Sequence[Running]) -> str:
    return ",".join(running.address for running in servers)
