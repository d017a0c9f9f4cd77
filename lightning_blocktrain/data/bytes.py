"""Windows over a split: which bytes each batch of each epoch holds, and the loaders' dataset and sampler.

Owns the arithmetic of windows and the order of training. Everything about an epoch is a pure function of
``(num_bytes, window_bytes, seed, epoch)``; the global random state is neither read nor changed.

A window of T bytes needs T + 1: inputs are bytes s ... s + T - 1, targets bytes s + 1 ... s + T.

* Evaluation tiles a split: window k starts at k * T. Every byte but the first is a target at most once; a tail
  shorter than a window is dropped.
* Training tiles it too, but each epoch draws one common offset in [0, T) and the order of the windows. The number
  of windows is the same in every epoch, ``num_bytes // T - 1``: what the largest offset leaves room for.

Shapes: B sequences, T bytes per window.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from lightning_blocktrain.errors import explain

Batch = tuple[Tensor, Tensor]
BatchKey = int | tuple[int, int]
"""Batch index of epoch 0, or ``(epoch, batch index)``."""


def num_eval_windows(num_bytes: int, window_bytes: int) -> int:
    """Return how many whole windows tile a split from its first byte."""
    return max(0, num_bytes - 1) // window_bytes


def num_train_windows(num_bytes: int, window_bytes: int) -> int:
    """Return how many windows every training epoch has, whatever its offset."""
    return max(0, num_bytes // window_bytes - 1)


def eval_starts(num_bytes: int, window_bytes: int) -> NDArray[np.int64]:
    """Return the first bytes of the evaluation windows in order, shape (num_eval_windows,)."""
    return np.arange(num_eval_windows(num_bytes, window_bytes), dtype=np.int64) * window_bytes


def epoch_starts(num_bytes: int, window_bytes: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the first bytes of an epoch's training windows in the order they are trained on.

    Args:
        num_bytes: Bytes of the split.
        window_bytes: T.
        seed: Seed of the run, not negative.
        epoch: Epoch, from 0.

    Returns:
        Starts, shape (num_train_windows,); the windows do not overlap and share one offset in [0, T).
    """
    generator = np.random.default_rng([seed, epoch])
    offset = generator.integers(window_bytes)
    order = generator.permutation(num_train_windows(num_bytes, window_bytes))
    return offset + order.astype(np.int64) * window_bytes


def open_split(path: Path) -> NDArray[np.uint8]:
    """Return the bytes of a split as a read-only memory map (an empty split as an empty array)."""
    if path.stat().st_size == 0:
        return np.zeros(0, dtype=np.uint8)
    return np.memmap(path, dtype=np.uint8, mode="r")


def gather(data: NDArray[np.uint8], starts: NDArray[np.int64], window_bytes: int) -> Batch:
    """Return the windows at ``starts`` as inputs and targets.

    Args:
        data: Bytes of the split, shape (num_bytes,).
        starts: First byte of each window, shape (B,).
        window_bytes: T.

    Returns:
        Inputs and targets, both int64 of shape (B, T) with values 0 to 255; ``targets[:, i]`` is the byte after
        ``inputs[:, i]``. Both own their memory.
    """
    bytes_ = data[starts[:, None] + np.arange(window_bytes + 1)].astype(np.int64)  # (B, T + 1)
    windows = torch.from_numpy(bytes_)
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


class ByteBatches(Dataset[Batch]):
    """A split as a sequence of whole batches, fetched by index; for a loader with ``batch_size=None``.

    The memory map is opened on first use in each process, so that the object is small to send to a loader's
    workers. A plain index means epoch 0, which keeps the dataset usable under another sampler than ours.

    Args:
        path: File of the split.
        window_bytes: T.
        batch_size: B.
        seed: Seed of the training order; None tiles the split in order for evaluation, where the last batch
            may be smaller. Training drops what does not fill a batch.
    """

    def __init__(self, path: Path, window_bytes: int, batch_size: int, seed: int | None) -> None:
        self.path = path
        self.window_bytes = window_bytes
        self.batch_size = batch_size
        self.seed = seed
        self.num_bytes = path.stat().st_size
        self._data: NDArray[np.uint8] | None = None
        self._starts: tuple[int, NDArray[np.int64]] | None = None  # of the epoch asked for last

    def __len__(self) -> int:
        if self.seed is None:
            return -(-num_eval_windows(self.num_bytes, self.window_bytes) // self.batch_size)
        return num_train_windows(self.num_bytes, self.window_bytes) // self.batch_size

    def __getitem__(self, key: BatchKey) -> Batch:
        epoch, batch_idx = key if isinstance(key, tuple) else (0, key)
        if not 0 <= batch_idx < len(self):
            raise IndexError(f"batch {batch_idx} of {len(self)}")
        if self._data is None:
            self._data = open_split(self.path)
        first = batch_idx * self.batch_size
        starts = self._epoch_starts(epoch)[first : first + self.batch_size]
        return gather(self._data, starts, self.window_bytes)

    def __getstate__(self) -> dict[str, object]:
        # A memory map is pickled as a copy of its bytes: the receiver opens its own.
        return {**self.__dict__, "_data": None, "_starts": None}

    def _epoch_starts(self, epoch: int) -> NDArray[np.int64]:
        if self._starts is None or self._starts[0] != epoch:
            if self.seed is None:
                starts = eval_starts(self.num_bytes, self.window_bytes)
            else:
                starts = epoch_starts(self.num_bytes, self.window_bytes, self.seed, epoch)
            self._starts = (epoch, starts)
        return self._starts[1]


class EpochBatches(Sampler[BatchKey]):
    """The batches of an epoch that belong to one worker: batch j is worker j mod W's.

    Every worker has the same number of batches; up to W - 1 at the end of an epoch belong to nobody.

    Args:
        num_batches: Batches of an epoch over all workers.
        worker_idx: This worker, in [0, num_shards).
        num_shards: W.

    Raises:
        ValueError: ``worker_idx`` is out of range or ``num_shards`` is below 1.
    """

    def __init__(self, num_batches: int, worker_idx: int = 0, num_shards: int = 1) -> None:
        if num_shards < 1 or not 0 <= worker_idx < num_shards:
            raise ValueError(
                explain(
                    "worker_idx must lie in [0, num_shards) and num_shards be at least 1",
                    f"worker_idx={worker_idx}, num_shards={num_shards}",
                    "number the workers from 0",
                )
            )
        self.num_batches = num_batches
        self.worker_idx = worker_idx
        self.num_shards = num_shards
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration follows; Lightning calls this before each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.num_batches // self.num_shards

    def __iter__(self) -> Iterator[BatchKey]:
        for round_idx in range(len(self)):
            yield self.epoch, round_idx * self.num_shards + self.worker_idx
