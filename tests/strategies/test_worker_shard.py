from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

from lightning_blocktrain.strategies.worker_batches import WorkerBatchLoader
from lightning_blocktrain.strategies.worker_shard import Shard, WorkerShardLoader

NUM_WORKERS = 3


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(24))


class WholeBatches(Sampler[list[int]]):
    """Names whole batches, in an order that follows the epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 11

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(self.epoch)
        return ([int(idx), int(idx) + 11] for idx in torch.randperm(11, generator=generator))


def shuffled(**options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(23)), batch_size=2, shuffle=True, **options)


LOADERS: dict[str, Callable[[], Any]] = {
    "shuffled": shuffled,
    "dropping": lambda: shuffled(drop_last=True),
    "own generator": lambda: shuffled(generator=torch.Generator().manual_seed(8)),
    "whole batches": lambda: DataLoader(TensorDataset(torch.arange(22)), sampler=WholeBatches(), batch_size=None),
    "iterable": lambda: DataLoader(Numbers(), batch_size=2),
    "no loader": lambda: [torch.tensor([number]) for number in range(10)],
}


def shard_of(loader: Any, worker_id: int, state: Tensor, trained: int = 0) -> WorkerShardLoader:
    return WorkerShardLoader(loader, Shard(worker_id, NUM_WORKERS, 0, state), lambda: trained)


def listed(batches: Any) -> list[Any]:
    return [batch[0].tolist() if isinstance(batch, list) else batch.tolist() for batch in batches]


@pytest.mark.parametrize("kind", LOADERS)
def test_worker_shard_epochs_are_what_the_simulator_deals_each_worker(kind: str) -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    dealer = WorkerBatchLoader(LOADERS[kind](), NUM_WORKERS, lambda: 0)
    expected = [[listed([group[w] for group in epoch]) for w in range(NUM_WORKERS)] for epoch in [[*dealer], [*dealer]]]
    for worker_id in range(NUM_WORKERS):
        torch.manual_seed(100 + worker_id)  # the processes' own streams have nothing to do with it
        mine = shard_of(LOADERS[kind](), worker_id, state)
        for epoch in expected:
            got = listed(mine)
            torch.rand(worker_id)  # nor has what a worker draws in between
            assert got == epoch[worker_id]
        if kind != "iterable":
            assert len(mine) == len(dealer)


def test_worker_shard_loads_its_own_batches_only() -> None:
    asked: list[int] = []

    class Watched(TensorDataset):
        def __getitem__(self, index: int) -> tuple[Tensor, ...]:
            asked.append(index)
            return super().__getitem__(index)

    loader = DataLoader(Watched(torch.arange(24)), batch_size=2)
    assert len(list(shard_of(loader, 1, torch.get_rng_state()))) == 4
    assert asked == [2, 3, 8, 9, 14, 15, 20, 21]


def test_worker_shard_first_epoch_leaves_worker_0_in_the_shared_stream_and_others_in_their_own() -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    list(shuffled())
    after = torch.get_rng_state()
    for worker_id, expected in ((0, after), (1, state)):
        torch.set_rng_state(state)
        list(shard_of(shuffled(), worker_id, state))
        assert torch.equal(torch.get_rng_state(), expected)


def test_worker_shard_passes_the_epoch_on_to_the_sampler() -> None:
    mine = shard_of(LOADERS["whole batches"](), 0, torch.get_rng_state())
    first = listed(mine)
    mine.sampler.set_epoch(1)
    assert listed(mine) != first


def test_worker_shard_resumes_inside_an_epoch_from_any_workers_state() -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    whole = [listed(shard_of(shuffled(), w, state)) for w in range(NUM_WORKERS)]
    first = shard_of(shuffled(), 0, state, trained=2)
    epoch = iter(first)
    next(epoch), next(epoch)
    saved = first.state_dict()
    for worker_id in range(NUM_WORKERS):
        torch.manual_seed(9)
        resumed = shard_of(shuffled(), worker_id, torch.get_rng_state())
        resumed.load_state_dict(saved)
        assert listed(resumed) == whole[worker_id][2:]


@pytest.mark.parametrize("kind", ["shuffled", "own generator"])
def test_worker_shard_resumes_between_two_epochs(kind: str) -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = shard_of(LOADERS[kind](), 0, state)
    list(first)
    saved = first.state_dict()
    expected = listed(first)
    torch.manual_seed(9)
    now = torch.get_rng_state()
    resumed = shard_of(LOADERS[kind](), 0, now)
    resumed.load_state_dict(saved)
    epoch = iter(resumed)
    batches = [next(epoch)]
    assert torch.equal(torch.get_rng_state(), now)  # the stream of worker 0 is not the one of the orders any more
    assert listed([*batches, *epoch]) == expected


def test_shard_of_an_id_beyond_the_number_of_parts_is_one_of_them() -> None:
    state = torch.get_rng_state()
    assert [Shard(worker_id, 3, 0, state).part for worker_id in (0, 2, 3, 4000)] == [0, 2, 0, 1]
