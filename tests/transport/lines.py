"""Coordinators for tests, in memory and on HTTP, with a clock that the test sets."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_blocktrain.coordinator.desk import Desk
from lightning_blocktrain.coordinator.server import CoordinatorServer
from lightning_blocktrain.rounds import OuterSGD, Params, RoundRules
from lightning_blocktrain.transport.base import Submission, Transport, Welcome, WorkerFacts
from lightning_blocktrain.transport.http import HttpTransport
from lightning_blocktrain.transport.loop import LoopThread
from lightning_blocktrain.transport.memory import MemoryHub, MemoryTransport
from lightning_blocktrain.transport.shared import SharedTransport
from lightning_blocktrain.transport.terms import RunTerms

RUN, TOKEN = "run-1", "s3cret-token"
RULES = RoundRules(deadline_s=1000.0)


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Line:
    """One coordinator and the transports opened to it."""

    def __init__(self, kind: str, desk: Desk, clock: Clock, stack: ExitStack) -> None:
        self.kind = kind
        self.desk = desk
        self.clock = clock
        self.url = ""
        self._stack = stack
        self._hub: MemoryHub | None = None
        if kind == "http":
            self.url = stack.enter_context(served(desk, clock)).url
        else:
            self._hub = MemoryHub(desk, clock)

    def open(self, run_id: str = RUN, token: str = TOKEN) -> Transport:
        if self._hub is not None:
            line: Transport = MemoryTransport(self._hub, run_id, token)
        else:
            line = HttpTransport(self.url, run_id, token, reconnect_timeout_s=10.0, stall_timeout_s=10.0)
        return self._stack.enter_context(SharedTransport({"all": line}) if self.kind == "shared" else line)

    def join(self, worker_id: int | None = None, **facts: Any) -> tuple[Transport, Welcome]:
        line = self.open()
        return line, line.join(WorkerFacts(worker_id, **facts))


@contextmanager
def served(desk: Desk, clock: Clock | None = None, **options: Any) -> Iterator[CoordinatorServer]:
    """Serve a desk from a thread of its own."""
    thread = LoopThread("test-server")

    async def start() -> CoordinatorServer:
        server = CoordinatorServer(desk, **({} if clock is None else {"clock": clock}), **options)
        await server.start()
        return server

    server = thread.run(start)
    try:
        yield server
    finally:
        thread.run(server.stop)
        thread.close(server.stop)


@contextmanager
def line_of(kind: str, **desk_options: Any) -> Iterator[Line]:
    with ExitStack() as stack:
        yield Line(kind, Desk(RUN, TOKEN, **desk_options), Clock(), stack)


def make_masters(num_blocks: int = 2, interface: bool = True) -> dict[str, Params]:
    generator = torch.Generator().manual_seed(7)
    masters: dict[str, Params] = {
        f"block{b}": {"layer.w": torch.randn(5, 3, generator=generator), "layer.n": torch.tensor(b)}
        for b in range(num_blocks)
    }
    return {**masters, "interface": {"embed": torch.randn(4, generator=generator)}} if interface else masters


def make_terms(num_blocks: int = 2, **changes: Any) -> RunTerms:
    return RunTerms(**{"num_blocks": num_blocks, "sync_every": 5, "rules": RULES, "outer": OuterSGD(), **changes})


def begin(line: Line, block_of_worker: Sequence[int], **changes: Any) -> list[tuple[Transport, Welcome]]:
    """Found a run and let workers join as ids 0, 1, ... for these blocks."""
    num_blocks = max(block_of_worker) + 1
    interface = bool(changes.pop("interface", False))
    terms = make_terms(num_blocks, **{"num_workers": len(block_of_worker), **changes})
    with line.open() as founder:
        founder.found(terms, make_masters(num_blocks, interface))
    return [line.join(w, block_idx=block_idx) for w, block_idx in enumerate(block_of_worker)]


def moved(params: Mapping[str, Tensor], seed: int) -> Params:
    """Return parameters as after some local steps."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + torch.randn(tensor.shape, generator=generator) if tensor.is_floating_point() else tensor + 1
        for name, tensor in params.items()
    }


def submission(base: int, tensors: Mapping[str, Tensor], **changes: Any) -> Submission:
    return Submission(**{"base_version": base, "num_steps": 5, "num_tokens": 40, "tensors": tensors, **changes})


def same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    """Tell whether tensors are equal bit for bit and of equal dtype."""
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )
