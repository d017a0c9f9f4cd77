"""Ranks of a job in one process: lines of ``exchange="collective"`` over a store in memory, one thread each to meet."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed

from lightning_blocktrain.partition import partition as cut
from lightning_blocktrain.strategies.block_guard import declared_layout
from lightning_blocktrain.strategies.cluster import Board, ClusterPlace
from lightning_blocktrain.strategies.collective_run import CollectiveLine
from lightning_blocktrain.strategies.worker_run import WorkerRun, masters_of
from lightning_blocktrain.transport import RunTerms, WorkerFacts
from tests.strategies.conftest import seeded

TIMEOUT_S = 60.0


def place_of(rank: int, num_ranks: int) -> ClusterPlace:
    return ClusterPlace(rank, num_ranks, rank, 0, 1, "127.0.0.1", 1, "collective")


def nothing() -> None:
    pass


class Ranks:
    """Lines of all ranks, and what they do at the same time."""

    def __init__(
        self,
        num_ranks: int,
        look_up: Callable[[], None] = nothing,
        read_by: Callable[[int], Collection[int]] = lambda block_idx: (),
        timeout_s: float = 30.0,
    ) -> None:
        store = distributed.HashStore()
        self.boards = [Board(place_of(rank, num_ranks), 0, timeout_s, store) for rank in range(num_ranks)]
        self.lines = [CollectiveLine(board, torch.device("cpu"), read_by, look_up, timeout_s) for board in self.boards]
        self._pool = ThreadPoolExecutor(num_ranks)

    def all(self, act: Callable[[int], Any]) -> list[Any]:
        """Call ``act`` with every rank at once; return the results, or the exceptions in their place."""
        pending = [self._pool.submit(act, rank) for rank in range(len(self.lines))]
        return [future.exception(TIMEOUT_S) or future.result() for future in pending]

    def join(self, terms: RunTerms, masters: Mapping[str, Mapping[str, Tensor]]) -> list[Any]:
        self.lines[0].found(terms, masters)
        return self.all(lambda rank: self.lines[rank].join(WorkerFacts(rank, identity=terms.full_identity)))

    def close(self) -> None:
        for line in self.lines:
            line.close()
        self._pool.shutdown()


@contextmanager
def ranks(num_ranks: int, **options: Any) -> Iterator[Ranks]:
    opened = Ranks(num_ranks, **options)
    try:
        yield opened
    finally:
        opened.close()


def runs_of(
    opened: Ranks, make: Any, terms: RunTerms, settings: Any, seed: int
) -> tuple[Sequence[Any], list[WorkerRun]]:
    """Return a module and a run for every rank, which have begun."""
    modules = [seeded(make) for _ in opened.lines]
    parts = [cut(module, declared_layout(module), terms.num_blocks) for module in modules]
    welcomes = opened.join(terms, masters_of(modules[0], parts[0]))
    runs = [
        WorkerRun(module, part, settings, rank, welcome.block_idx, seed, assembles=rank == 0)
        for rank, (module, part, welcome) in enumerate(zip(modules, parts, welcomes, strict=True))
    ]
    began = opened.all(lambda rank: runs[rank].begin(opened.lines[rank], welcomes[rank]))
    assert began == [None] * len(runs)
    return modules, runs
