"""One worker's part of a train loader, where the workers are processes: batch j belongs to worker j mod W.

Owns the cut. All processes draw the same order, from a random stream that the run gives them and that nothing else
draws from; without that stream a worker's dropout or rank 0's validation would give it another order in the next epoch.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from lightning_blocktrain.strategies.worker_batches import WorkerBatchLoader


@dataclass(frozen=True)
class Shard:
    """Which part of the data is a worker's, and the random streams that follow from the run.

    Args:
        worker_id: Of the worker.
        num_workers: W.
        seed: Of the workers' own streams.
        order_state: Of the stream that the orders of the data are drawn from.
    """

    worker_id: int
    num_workers: int
    seed: int
    order_state: Tensor

    @property
    def part(self) -> int:
        """Which of the ``num_workers`` parts: in an open run ids may grow beyond the number of parts."""
        return self.worker_id % self.num_workers


def dealt(
    loader: Iterable[Any], num_workers: int, groups_trained: Callable[[], int], shard: Shard | None
) -> WorkerBatchLoader:
    """Return a train loader as the workers of this process need it.

    Args:
        loader: Any iterable of batches.
        num_workers: W.
        groups_trained: As ``WorkerBatchLoader`` takes it.
        shard: Of the one worker of this process; None: all workers are here.
    """
    if shard is None:
        return WorkerBatchLoader(loader, num_workers, groups_trained)
    return WorkerShardLoader(loader, shard, groups_trained)


class WorkerShardLoader(WorkerBatchLoader):
    """The batches of one worker, as ``WorkerBatchLoader`` would deal them to it.

    Of a ``DataLoader`` over a data set with a length only the worker's own batches are loaded. Anything else is
    iterated whole, and has to give the same batches in every process.

    Args:
        loader: Any iterable of batches.
        shard: Whose part.
        groups_trained: As ``WorkerBatchLoader`` takes it.
    """

    def __init__(self, loader: Iterable[Any], shard: Shard, groups_trained: Callable[[], int]) -> None:
        super().__init__(loader, shard.num_workers, groups_trained)
        self._part = shard.part
        self._order_state = shard.order_state
        # Worker 0 goes on with this stream in the first epoch, as it does where all workers share a process.
        self._shares_stream = shard.worker_id == 0
        self._is_cut = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
        if isinstance(loader, DataLoader) and self._is_cut:
            self.loader = _only_batches_of(loader, shard.part, shard.num_workers)

    @override
    def __len__(self) -> int:
        return len(self.loader) if self._is_cut else super().__len__()  # type: ignore[arg-type]

    @override
    def __iter__(self) -> Iterator[Any]:
        with self._order_stream():
            epoch = super().__iter__()
        return self._in_order(epoch)

    def _in_order(self, epoch: Iterator[Any]) -> Iterator[Any]:
        if self._resume is not None:
            self._order_state = self._resume.get("order_state", self._order_state)  # __iter__ has drawn from it
        with self._order_stream():  # the order itself is drawn with the first batch
            first = list(islice(epoch, 1))
        self._shares_stream = False
        yield from first
        yield from epoch

    @contextmanager
    def _order_stream(self) -> Iterator[None]:
        own = torch.get_rng_state()
        torch.set_rng_state(self._order_state)
        try:
            yield
        finally:
            self._order_state = torch.get_rng_state()
            if not self._shares_stream:
                torch.set_rng_state(own)

    @override
    def _groups(self, batches: Iterator[Any]) -> Iterator[Any]:
        if self._is_cut:
            yield from batches
        else:
            for group in super()._groups(batches):
                yield group[self._part]

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the position inside the epoch and the stream of the next orders."""
        return {**super().state_dict(), "order_state": self._order_state}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next epoch continue where ``state`` was taken, by any worker of the run."""
        super().load_state_dict(state)
        self._order_state = state.get("order_state", self._order_state)
        self._shares_stream = False  # the first epoch has begun long ago


class _EveryNth:
    """The items ``offset``, ``offset + step``, ... of a sampler of batches, as far as its groups of ``step`` are full.

    What else it shows, such as ``set_epoch``, is the sampler's.
    """

    def __init__(self, batches: Iterable[Any], offset: int, step: int) -> None:
        self._batches, self._offset, self._step = batches, offset, step

    def __getattr__(self, name: str) -> Any:
        if name == "_batches":  # not set yet, in a copy that is being made
            raise AttributeError(name)
        return getattr(self._batches, name)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._batches)
        while len(group := list(islice(batches, self._step))) == self._step:
            yield group[self._offset]

    def __len__(self) -> int:
        return len(self._batches) // self._step  # type: ignore[arg-type]


def _only_batches_of(loader: DataLoader[Any], part: int, num_workers: int) -> DataLoader[Any]:
    mine = copy.copy(loader)
    # Without a batch sampler each index of the sampler names a whole batch.
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    # A DataLoader refuses to be given another sampler; a copy that nobody has iterated can take it.
    vars(mine)[name] = _EveryNth(getattr(loader, name), part, num_workers)
    return mine
