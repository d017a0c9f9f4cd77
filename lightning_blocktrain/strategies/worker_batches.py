"""Deals a train loader's batches out to simulated workers: one Lightning batch is one batch for every worker."""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_blocktrain.errors import explain


class WorkerBatches(list[Any]):
    """One batch per worker, in the order of worker ids."""


def batch_of(dealt: Any, worker_id: int) -> Any:
    """Return worker ``worker_id``'s batch out of what the loader dealt (nested, if there are several loaders)."""
    return apply_to_collection(dealt, WorkerBatches, lambda batches: batches[worker_id])


def is_dealt(batch: Any) -> bool:
    """Return whether ``batch`` holds one batch per worker."""
    found: list[bool] = []
    apply_to_collection(batch, WorkerBatches, lambda _: found.append(True))
    return bool(found)


class WorkerBatchLoader:
    """Groups ``num_workers`` consecutive batches: batch j of the epoch's order goes to worker j mod ``num_workers``.

    The last ``len(loader) % num_workers`` batches of an epoch are left out, so that all workers have taken the same
    number of steps; the next epoch's order deals other batches there.

    It can be resumed inside an epoch: the state holds the random states from which the epoch's order was drawn (the
    process's, and those of the loader's and the sampler's own generators) and how many groups were trained on. The rest
    of the epoch is drawn anew for a loader with ``persistent_workers``, and for one that is cycled beside a longer one.

    What else it shows, such as ``dataset``, is the wrapped loader's.

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
        parts = (loader, getattr(loader, "sampler", None))
        own = dict.fromkeys(getattr(part, "generator", None) for part in parts)
        self._own_generators = [generator for generator in own if isinstance(generator, torch.Generator)]
        # Loader processes are sent their first indices as the iterator is made; without them the order is drawn later.
        self._drawn_from = {"at_iter": self._random_states(), "at_first_batch": self._random_states()}
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

    def __getattr__(self, name: str) -> Any:
        """Show the wrapped loader's attributes: Lightning tells the sampler the epoch, users look at the data set."""
        if name == "loader":  # not set yet, in a copy that is being made
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        length = sized_length(self.loader)
        if length is None:
            raise TypeError("the wrapped loader has no length")
        return length // self.num_workers

    def __iter__(self) -> Iterator[WorkerBatches]:
        at_iter = self._random_states()
        return self._epoch(iter(self.loader), at_iter)

    def _epoch(self, batches: Iterator[Any], at_iter: list[Tensor]) -> Iterator[WorkerBatches]:
        """Deal one epoch; everything here happens at its first batch, when a checkpoint has long been loaded."""
        resume, self._resume = self._resume, None
        if resume is not None:
            # The iterator at hand drew from the streams of before the checkpoint was loaded.
            del batches
            if resume["groups_trained"]:
                yield from self._resumed(resume)
                return
            for generator, state in zip(self._own_generators, resume["own_generators"], strict=False):
                generator.set_state(state)
            at_iter = self._random_states()
            batches = iter(self.loader)
        self._drawn_from = {"at_iter": at_iter, "at_first_batch": self._random_states()}
        yield from self._groups(batches)

    def _resumed(self, resume: dict[str, Any]) -> Iterator[WorkerBatches]:
        """Redraw the interrupted epoch's order and pass over the groups that were trained on."""
        now = torch.get_rng_state()
        self._drawn_from = resume["drawn_from"]
        self._set_random_states(self._drawn_from["at_iter"])
        groups = self._groups(iter(self.loader))
        self._set_random_states(self._drawn_from["at_first_batch"])
        for _ in islice(groups, resume["groups_trained"]):
            pass
        torch.set_rng_state(now)
        yield from groups

    def _random_states(self) -> list[Tensor]:
        return [generator.get_state() for generator in (torch.default_generator, *self._own_generators)]

    def _set_random_states(self, states: list[Tensor]) -> None:
        for generator, state in zip((torch.default_generator, *self._own_generators), states, strict=False):
            generator.set_state(state)

    def _groups(self, batches: Iterator[Any]) -> Iterator[WorkerBatches]:
        while len(group := WorkerBatches(islice(batches, self.num_workers))) == self.num_workers:
            yield group

    def state_dict(self) -> dict[str, Any]:
        """Return the position inside the epoch."""
        return {
            "groups_trained": self._groups_trained(),
            "drawn_from": self._drawn_from,
            "own_generators": [generator.get_state() for generator in self._own_generators],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next epoch continue where ``state`` was taken."""
        self._resume = state


def sized_length(loader: Iterable[Any]) -> int | None:
    """Return ``len(loader)``, or None if it has none (an iterable data set)."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None
