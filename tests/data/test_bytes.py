import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_blocktrain.data.bytes import (
    ByteBatches,
    EpochBatches,
    epoch_starts,
    eval_starts,
    gather,
    num_eval_windows,
    num_train_windows,
)


def write_counting(path: Path, num_bytes: int) -> bytes:
    content = bytes(i % 251 for i in range(num_bytes))
    path.write_bytes(content)
    return content


@given(num_bytes=st.integers(0, 400), window_bytes=st.integers(1, 40))
def test_eval_windows_tile_the_split_and_predict_every_byte_at_most_once(num_bytes, window_bytes):
    starts = eval_starts(num_bytes, window_bytes)
    targets = [s + 1 + i for s in starts for i in range(window_bytes)]
    assert targets == list(range(1, 1 + len(targets)))
    assert num_bytes - 1 - len(targets) < window_bytes
    assert not targets or targets[-1] < num_bytes
    assert len(starts) == num_eval_windows(num_bytes, window_bytes)


@settings(max_examples=60)
@given(
    num_bytes=st.integers(0, 400),
    window_bytes=st.integers(1, 40),
    seed=st.integers(0, 9),
    epoch=st.integers(0, 9),
)
def test_train_windows_stay_inside_and_do_not_overlap(num_bytes, window_bytes, seed, epoch):
    starts = np.sort(epoch_starts(num_bytes, window_bytes, seed, epoch))
    assert len(starts) == num_train_windows(num_bytes, window_bytes)
    if len(starts):
        assert 0 <= starts[0] < window_bytes
        assert starts[-1] + window_bytes + 1 <= num_bytes
        assert (np.diff(starts) == window_bytes).all()


def test_epoch_order_same_seed_and_epoch_is_identical_and_differs_otherwise():
    first = epoch_starts(10_000, 16, 3, 0)
    assert (first == epoch_starts(10_000, 16, 3, 0)).all()
    assert (first != epoch_starts(10_000, 16, 3, 1)).any()
    assert (first != epoch_starts(10_000, 16, 4, 0)).any()


def test_epoch_offsets_over_many_epochs_cover_the_window():
    offsets = {int(epoch_starts(400, 4, 0, epoch).min()) for epoch in range(60)}
    assert offsets == {0, 1, 2, 3}


def test_gather_targets_are_the_bytes_after_the_inputs():
    data = np.arange(200, dtype=np.uint8)
    inputs, targets = gather(data, np.array([5, 100], dtype=np.int64), 8)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.tolist() == [list(range(5, 13)), list(range(100, 108))]
    assert (targets == inputs + 1).all()
    assert inputs.is_contiguous() and targets.is_contiguous()


def test_batches_of_one_epoch_hold_each_window_once(tmp_path):
    content = write_counting(tmp_path / "s.u8", 1000)
    batches = ByteBatches(tmp_path / "s.u8", 10, 4, seed=1)
    starts = epoch_starts(1000, 10, 1, 2)
    assert len(batches) == 99 // 4
    for batch_idx in range(len(batches)):
        inputs, targets = batches[(2, batch_idx)]
        for row in range(4):
            start = starts[batch_idx * 4 + row]
            assert bytes(inputs[row].tolist()) == content[start : start + 10]
            assert bytes(targets[row].tolist()) == content[start + 1 : start + 11]


def test_batches_plain_index_means_epoch_zero(tmp_path):
    write_counting(tmp_path / "s.u8", 500)
    batches = ByteBatches(tmp_path / "s.u8", 7, 3, seed=1)
    assert (batches[1][0] == batches[(0, 1)][0]).all()
    assert (batches[1][0] != batches[(1, 1)][0]).any()


def test_batches_for_evaluation_keep_the_smaller_last_batch(tmp_path):
    content = write_counting(tmp_path / "s.u8", 75)
    batches = ByteBatches(tmp_path / "s.u8", 10, 4, seed=None)
    rows = [row for batch_idx in range(len(batches)) for row in batches[batch_idx][1]]
    assert [len(batches[i][0]) for i in range(len(batches))] == [4, 3]
    assert bytes(torch.cat(rows).tolist()) == content[1:71]


def test_batches_index_past_the_end_raises_index_error(tmp_path):
    write_counting(tmp_path / "s.u8", 75)
    batches = ByteBatches(tmp_path / "s.u8", 10, 2, seed=0)
    with pytest.raises(IndexError):
        batches[len(batches)]


def test_batches_empty_split_has_no_batches(tmp_path):
    write_counting(tmp_path / "s.u8", 0)
    assert len(ByteBatches(tmp_path / "s.u8", 10, 2, seed=0)) == 0
    assert len(ByteBatches(tmp_path / "s.u8", 10, 2, seed=None)) == 0


def test_batches_pickled_after_use_carry_no_data(tmp_path):
    write_counting(tmp_path / "s.u8", 1_000_000)
    batches = ByteBatches(tmp_path / "s.u8", 10, 2, seed=0)
    expected = batches[3]
    sent = pickle.dumps(batches)
    assert len(sent) < 2000
    assert (pickle.loads(sent)[3][0] == expected[0]).all()


@pytest.mark.parametrize("num_shards", [1, 2, 3, 5])
def test_sampler_shards_are_disjoint_equal_and_batch_j_is_worker_j_mod_w(num_shards):
    shards = [list(EpochBatches(17, worker_idx, num_shards)) for worker_idx in range(num_shards)]
    for worker_idx, shard in enumerate(shards):
        assert len(shard) == 17 // num_shards
        assert all(batch_idx % num_shards == worker_idx for _, batch_idx in shard)
    taken = sorted(batch_idx for shard in shards for _, batch_idx in shard)
    assert taken == list(range(17 // num_shards * num_shards))


def test_sampler_set_epoch_is_passed_on_with_every_batch():
    sampler = EpochBatches(3)
    sampler.set_epoch(7)
    assert list(sampler) == [(7, 0), (7, 1), (7, 2)]


@pytest.mark.parametrize(("worker_idx", "num_shards"), [(2, 2), (-1, 2), (0, 0)])
def test_sampler_shard_out_of_range_is_refused(worker_idx, num_shards):
    with pytest.raises(ValueError, match="worker_idx must lie"):
        EpochBatches(10, worker_idx, num_shards)
