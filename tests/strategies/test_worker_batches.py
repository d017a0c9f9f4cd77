import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler

from lightning_blocktrain.strategies.worker_batches import WorkerBatches, WorkerBatchLoader, batch_of, sized_length


def deal(loader, num_workers=2, trained=0):
    return WorkerBatchLoader(loader, num_workers, lambda: trained)


def test_loader_deals_consecutive_batches_and_leaves_out_the_incomplete_group():
    assert list(deal(range(7), 3)) == [[0, 1, 2], [3, 4, 5]]
    assert len(deal(range(7), 3)) == 2


def test_batch_of_picks_inside_a_collection_of_loaders():
    dealt = {"a": WorkerBatches([1, 2]), "b": WorkerBatches([3, 4])}
    assert batch_of(dealt, 1) == {"a": 2, "b": 4}


def test_loader_without_length_has_none():
    dealt = deal(iter(range(4)))
    assert sized_length(dealt) is None
    assert list(dealt) == [[0, 1], [2, 3]]


def plain():
    return DataLoader(torch.arange(20), batch_size=2, shuffle=True)


def with_process():
    return DataLoader(torch.arange(20), batch_size=2, shuffle=True, num_workers=1)


def with_generator():
    return DataLoader(torch.arange(20), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(3))


def with_sampler():
    sampler = RandomSampler(range(20), generator=torch.Generator().manual_seed(3))
    return DataLoader(torch.arange(20), batch_size=2, sampler=sampler)


@pytest.mark.parametrize(
    ("loader", "trained"),
    [(plain, 0), (plain, 2), (plain, 5), (with_process, 2), (with_generator, 2), (with_sampler, 2)],
)
def test_resumed_epoch_of_a_shuffled_loader_continues_with_the_same_order(loader, trained):
    torch.manual_seed(1)
    first = deal(loader(), trained=trained)
    torch.rand(3)
    before = torch.get_rng_state()
    whole = [torch.stack(group) for group in first]
    state = first.state_dict()
    resumed = deal(loader())
    resumed.load_state_dict(state)
    if trained == 0:
        torch.set_rng_state(before)
    rest = [torch.stack(group) for group in resumed]
    if trained:  # inside an epoch the order comes from the state alone
        assert len(rest) == 5 - trained and all(map(torch.equal, rest, whole[trained:]))
    else:  # between epochs the next order is drawn afresh from the process's stream
        assert len(rest) == 5


def test_next_epoch_of_a_loader_with_a_generator_continues_its_stream():
    first = deal(with_generator())
    list(first)
    state = first.state_dict()
    expected = [torch.stack(group) for group in first]
    resumed = deal(with_generator())
    resumed.load_state_dict(state)
    assert all(map(torch.equal, [torch.stack(group) for group in resumed], expected))


def test_loader_shows_the_attributes_of_the_wrapped_one():
    wrapped = plain()
    dealt = deal(wrapped)
    assert dealt.dataset is wrapped.dataset and dealt.batch_sampler is wrapped.batch_sampler
    with pytest.raises(AttributeError, match="nothing"):
        _ = dealt.nothing


def test_resuming_leaves_the_process_stream_where_it_was():
    first = deal(DataLoader(torch.arange(20), batch_size=2, shuffle=True), trained=2)
    list(first)
    resumed = deal(DataLoader(torch.arange(20), batch_size=2, shuffle=True))
    resumed.load_state_dict(first.state_dict())
    batches = iter(resumed)
    torch.manual_seed(9)
    next(batches)
    after = torch.rand(())
    torch.manual_seed(9)
    assert torch.equal(after, torch.rand(()))
