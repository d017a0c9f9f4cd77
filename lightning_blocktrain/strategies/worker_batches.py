"""Deals a train loader's batches out to simulated workers: one Lightning batch is one batch for every worker."""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.apply_func import apply_to_collection

from lightning_blocktrain.errors import explain


class WorkerBatches(list[Any]):
    """One batch per worker, in the order of worker ids."""


def batch_of(dealt: Any, worker_id: int) -> Any:
    """Return worker ``worker_id``'s batch out of what the loader dealt (nested, if there are several loaders)."""
    return apply_to_collection(dealt, WorkerBatches, lambda batches: batches[worker_id])


class WorkerBatchLoader:
    """Groups ``num_workers`` consecutive batches: batch j of the epoch's order goes to worker j mod ``num_workers``.

    The last ``len(loader) % num_workers`` batches of an epoch are left out, so that all workers have taken the same
    number of steps; the next epoch's order deals other batches there.

    It can be resumed inside an epoch: the state holds the random state from which the epoch's order was drawn and how
    many groups were trained on.

    Args:
        loader: Any iterable of batches.
        num_workers: W.
        groups_trained: Returns how many groups of the current epoch have been trained on. Asked, not counted, since
            Lightning may fetch ahead.
    """

    def __init__(self, loader: Iterable[Any], num_workers: int, groups_trained: Callable[[], int]) -> None:
        self.loader = loader
        self.num_workers = num_workers
        self._groups_trained = groups_trained
        self._random_state = torch.get_rng_state()
        self._resume: dict[str, Any] | None = None
        length = sized_length(loader)
        if length is not None and length < num_workers:
            raise MisconfigurationException(
                explain(
                    "the train loader must hold at least one batch per worker",
                    f"batches={length}, workers={num_workers}",
                    "use smaller batches, more data or fewer replicas",
                )
            )

    @property
    def sampler(self) -> Any:
        """The wrapped loader's sampler, so that Lightning can tell it the epoch."""
        return getattr(self.loader, "sampler", None)

    @property
    def batch_sampler(self) -> Any:
        """The wrapped loader's batch sampler, so that Lightning can tell it the epoch."""
        return getattr(self.loader, "batch_sampler", None)

    def __len__(self) -> int:
        length = sized_length(self.loader)
        if length is None:
            raise TypeError("the wrapped loader has no length")
        return length // self.num_workers

    def __iter__(self) -> Iterator[WorkerBatches]:
        return self._epoch(iter(self.loader))

    def _epoch(self, batches: Iterator[Any]) -> Iterator[WorkerBatches]:
        """Deal one epoch; everything here happens at its first batch, when a checkpoint has long been loaded."""
        resume, self._resume = self._resume, None
        if resume is None:
            self._random_state = torch.get_rng_state()
            yield from self._groups(batches)
        elif resume["groups_trained"] == 0:
            # The iterator at hand drew from the stream of before the checkpoint was loaded.
            batches = iter(self.loader)
            self._random_state = torch.get_rng_state()
            yield from self._groups(batches)
        else:
            yield from self._resumed(resume)

    def _resumed(self, resume: dict[str, Any]) -> Iterator[WorkerBatches]:
        """Redraw the interrupted epoch's order and pass over the groups that were trained on."""
        now = torch.get_rng_state()
        groups = self._groups(iter(self.loader))
        self._random_state = resume["random_state"]
        torch.set_rng_state(self._random_state)
        for _ in islice(groups, resume["groups_trained"]):
            pass
        torch.set_rng_state(now)
        yield from groups

    def _groups(self, batches: Iterator[Any]) -> Iterator[WorkerBatches]:
        while len(group := WorkerBatches(islice(batches, self.num_workers))) == self.num_workers:
            yield group

    def state_dict(self) -> dict[str, Any]:
        """Return the position inside the epoch."""
        return {"groups_trained": self._groups_trained(), "random_state": self._random_state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next epoch continue where ``state`` was taken."""
        self._resume = state


def sized_length(loader: Iterable[Any]) -> int | None:
    """Return ``len(loader)``, or None if it has none (an iterable data set)."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None
