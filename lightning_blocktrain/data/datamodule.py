"""The LightningDataModule over a byte corpus.

Owns the wiring only: what the arguments mean is decided in ``corpora``, where the bytes are kept in ``cache``,
which bytes a batch holds in ``bytes``. Hyper-parameters are not saved into checkpoints: they would carry local
paths, and could collide with the model's own names; ``corpus_info`` says what was loaded.
"""

from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.utilities.types import EVAL_DATALOADERS, TRAIN_DATALOADERS
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_blocktrain.data.bytes import (
    Batch,
    ByteBatches,
    EpochBatches,
    num_eval_windows,
    num_train_windows,
)
from lightning_blocktrain.data.cache import CorpusInfo, Split, default_cache_dir, ensure_entry, split_path
from lightning_blocktrain.data.corpora import resolve
from lightning_blocktrain.errors import CorpusError, explain


class ByteDataModule(L.LightningDataModule):
    """Serve a corpus as batches ``(inputs, targets)`` of raw bytes.

    Both are int64 of shape (B, T) with values 0 to 255; ``targets[:, i]`` is the byte after ``inputs[:, i]``.
    Training windows are non-overlapping tiles whose common offset and order follow ``(seed, epoch)``; evaluation
    windows tile the split from its first byte, the tail shorter than a window dropped. No window crosses a split.

    A corpus is read once and kept as raw bytes in a cache keyed by its content; local files are hashed each time,
    so that a changed file is noticed.

    Args:
        corpus: A name of ``NAMED_CORPORA``, or a local file, glob, directory, or list of them; None is
            ``"python-docs"``, the embedded corpus, unless ``train`` is given. A name wins over a file called so.
        window_bytes: T, bytes per window, at least 1.
        batch_size: B, windows per training batch, at least 1.
        train: Training files, instead of ``corpus``.
        val: Validation files (local corpora only).
        test: Test files (local corpora only).
        val_fraction: Fraction in [0, 1) of the training files' bytes that is cut off as val, from before test.
            None is 0.05, or 0 as soon as ``val`` or ``test`` is given. 0 leaves the split empty.
        test_fraction: The same for test, cut off the very end.
        text_column: Column to read from ``.jsonl`` and ``.parquet`` files.
        seed: Seed of the training order, not negative; the global random state is left alone.
        eval_batch_size: Windows per evaluation batch; None is ``batch_size``. The last batch may be smaller.
        num_workers: Loader processes, each of which fetches whole batches.
        cache_dir: Where prepared corpora are kept; None is ``$BLOCKTRAIN_CACHE``, or else
            ``~/.cache/lightning_blocktrain``.
        worker_idx: Which shard of the training batches this process takes: batch j is worker j mod W's.
        num_shards: W, number of shards. Evaluation is not sharded.

    Raises:
        CorpusError: An argument is out of range, or the arguments name no corpus.
    """

    def __init__(
        self,
        corpus: str | list[str] | None = None,
        window_bytes: int = 256,
        batch_size: int = 16,
        *,
        train: str | list[str] | None = None,
        val: str | list[str] | None = None,
        test: str | list[str] | None = None,
        val_fraction: float | None = None,
        test_fraction: float | None = None,
        text_column: str = "text",
        seed: int = 0,
        eval_batch_size: int | None = None,
        num_workers: int = 0,
        cache_dir: str | None = None,
        worker_idx: int = 0,
        num_shards: int = 1,
    ) -> None:
        super().__init__()
        self.window_bytes = _at_least("window_bytes", window_bytes, 1)
        self.batch_size = _at_least("batch_size", batch_size, 1)
        self.eval_batch_size = (
            self.batch_size if eval_batch_size is None else _at_least("eval_batch_size", eval_batch_size, 1)
        )
        self.seed = _at_least("seed", seed, 0)
        self.num_workers = _at_least("num_workers", num_workers, 0)
        self.num_shards = _at_least("num_shards", num_shards, 1)
        self.worker_idx = worker_idx
        EpochBatches(0, worker_idx, num_shards)  # refuses a shard that does not exist, before anything is read
        self.cache_dir = Path(cache_dir).expanduser() if cache_dir is not None else default_cache_dir()
        self.source = resolve(
            corpus,
            train=train,
            val=val,
            test=test,
            val_fraction=val_fraction,
            test_fraction=test_fraction,
            text_column=text_column,
        )
        self._loaded: tuple[Path, CorpusInfo] | None = None

    @property
    def corpus_info(self) -> CorpusInfo:
        """What is loaded: name, SHA-256 and bytes per split; reads the corpus if ``setup`` has not yet run."""
        return self._ensure_loaded()[1]

    @override
    def prepare_data(self) -> None:
        self._ensure_loaded()

    @override
    def setup(self, stage: str) -> None:
        """Find the corpus in the cache (build it where ``prepare_data`` ran elsewhere) and check its lengths.

        Raises:
            CorpusError: The corpus cannot be read or is too short for ``window_bytes`` and ``batch_size``.
        """
        self._ensure_loaded()
        if stage == "fit":
            self._check_train_length()
        if stage in ("fit", "validate"):
            self._check_eval_length("val", may_be_empty=stage == "fit")
        if stage in ("test", "predict"):
            self._check_eval_length("test", may_be_empty=False)

    @override
    def train_dataloader(self) -> TRAIN_DATALOADERS:
        self._check_train_length()
        batches = self._batches("train")
        return self._loader(batches, EpochBatches(len(batches), self.worker_idx, self.num_shards))

    @override
    def val_dataloader(self) -> EVAL_DATALOADERS:
        """Return the loader of val, or no loader if the split is empty: then ``fit`` skips validation."""
        self._check_eval_length("val", may_be_empty=True)
        return self._loader(self._batches("val"), None) if self.corpus_info.split_bytes["val"] else []

    @override
    def test_dataloader(self) -> EVAL_DATALOADERS:
        self._check_eval_length("test", may_be_empty=False)
        return self._loader(self._batches("test"), None)

    @override
    def predict_dataloader(self) -> EVAL_DATALOADERS:
        """Return the loader of test: predictions are made for its windows."""
        return self.test_dataloader()

    def _ensure_loaded(self) -> tuple[Path, CorpusInfo]:
        if self._loaded is None:
            source = self.source
            self._loaded = ensure_entry(self.cache_dir, source.content_key(), source.name, source.read)
        return self._loaded

    def _batches(self, split: Split) -> ByteBatches:
        train = split == "train"
        batch_size = self.batch_size if train else self.eval_batch_size
        path = split_path(self._ensure_loaded()[0], split)
        return ByteBatches(path, self.window_bytes, batch_size, self.seed if train else None)

    def _loader(self, batches: ByteBatches, sampler: EpochBatches | None) -> DataLoader[Batch]:
        return DataLoader(
            batches,
            batch_size=None,
            sampler=sampler,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            # Without a generator of its own a loader draws from the global random state on every iteration.
            generator=torch.Generator().manual_seed(self.seed),
        )

    def _check_train_length(self) -> None:
        num_bytes = self.corpus_info.split_bytes["train"]
        needed = self.batch_size * self.num_shards
        num_windows = num_train_windows(num_bytes, self.window_bytes)
        if num_windows < needed:
            raise CorpusError(
                explain(
                    f"the train split of {self.corpus_info.name!r} must hold batch_size * num_shards windows",
                    f"{num_bytes} bytes = {num_windows} windows, window_bytes={self.window_bytes}, "
                    f"batch_size={self.batch_size}, num_shards={self.num_shards}",
                    f"pass at least {(needed + 1) * self.window_bytes} bytes, or lower window_bytes or batch_size",
                )
            )

    def _check_eval_length(self, split: Split, *, may_be_empty: bool) -> None:
        """Refuse a split shorter than one window, unless it is empty and may be."""
        num_bytes = self.corpus_info.split_bytes[split]
        empty_on_purpose = may_be_empty and num_bytes == 0
        if not empty_on_purpose and not num_eval_windows(num_bytes, self.window_bytes):
            raise CorpusError(
                explain(
                    f"the {split} split of {self.corpus_info.name!r} must hold one window and its next byte",
                    f"{num_bytes} bytes, window_bytes={self.window_bytes}",
                    f"pass {split}=, raise {split}_fraction (0 switches the split off), or lower window_bytes",
                )
            )


def _at_least(name: str, value: int, minimum: int) -> int:
    """Return ``value``, refusing one below ``minimum``."""
    if value < minimum:
        raise CorpusError(explain(f"{name} must be at least {minimum}", f"{name}={value}", "raise it"))
    return value
