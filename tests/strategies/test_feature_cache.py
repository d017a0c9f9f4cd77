"""Features on disk: the same run with fewer frozen layers, in a folder that stays small and whole."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_blocktrain import BlockTrainStrategy
from lightning_blocktrain.strategies.feature_cache import FeatureCache, digest_of
from tests.strategies.conftest import TwoBlocks, assert_same, fit, loader, seeded, weights
from tests.strategies.test_prefix import Stacked

MIB = 2**20


class Featured(Stacked):
    """Says what a block reads of a batch."""

    def block_features(self, batch: list[Tensor], block_idx: int) -> Tensor | tuple[Tensor, ...]:
        with torch.no_grad():
            return self.features(batch, block_idx)

    def read(self, features: Any) -> Tensor:
        return features

    def block_loss(self, batch: list[Tensor], block_idx: int) -> Tensor:
        hidden = self.features(batch, 0) if block_idx == 0 else self.read(self.block_features(batch, block_idx))
        for layer in self.layers[2 * block_idx : 2 * block_idx + 2]:
            hidden = layer(hidden)
        return torch.nn.functional.cross_entropy(self.readout(hidden).flatten(0, -2), batch[1].flatten())


class FeaturedPairs(Featured):
    """The same, where a block reads several tensors, one of them of integers."""

    def block_features(self, batch: list[Tensor], block_idx: int) -> tuple[Tensor, ...]:
        return super().block_features(batch, block_idx), batch[0]

    def read(self, features: Any) -> Tensor:
        hidden, inputs = features
        assert inputs.dtype == torch.int64 and isinstance(features, tuple)
        return hidden


def train(make_trainer: Any, make: Any = Featured, epochs: int = 4, **options: Any) -> tuple[Any, BlockTrainStrategy]:
    """Train three workers on two batches each, which come again in every epoch."""
    module = seeded(make)
    strategy = BlockTrainStrategy(**{"sync_every": 2, "prefix_every": 4, **options})
    fit(module, make_trainer(strategy, max_epochs=epochs), loader(12, shuffle=False))
    return module, strategy


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("make", [Featured, FeaturedPairs])
def test_run_with_exact_features_on_disk_is_the_same_run_bit_for_bit(
    make_trainer: Any, tmp_path: Path, make: Any
) -> None:
    plain, without = train(make_trainer, make)
    cached, strategy = train(make_trainer, make, prefix_cache=tmp_path / "cache", prefix_cache_dtype="fp32")
    assert_same(weights(cached), weights(plain))
    assert strategy.prefix_cache_hits == 2 * 2 * 3  # two workers read features of two batches in epochs 2, 3 and 4
    assert strategy.prefix_tokens == without.prefix_tokens // 4
    assert without.prefix_cache_hits == 0
    assert "block_features" not in vars(cached)


def test_run_with_rounded_features_ends_near_the_exact_run(make_trainer: Any, tmp_path: Path) -> None:
    plain, _ = train(make_trainer)
    cached, strategy = train(make_trainer, prefix_cache=tmp_path)
    assert strategy.prefix_cache_hits > 0
    for name, tensor in weights(cached).items():
        assert torch.allclose(tensor, weights(plain)[name], atol=0.1)  # steps of .05, as many as 8


def test_features_of_older_prefixes_are_deleted(make_trainer: Any, tmp_path: Path) -> None:
    _, strategy = train(make_trainer, prefix_every=1, prefix_cache=tmp_path)
    assert strategy.prefix_cache_hits == 0  # every batch comes once between two fetches
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 2  # blocks 1 and 2
    assert len(files_in(tmp_path)) == 2 * 2


def test_features_of_another_fit_on_the_same_folder_are_found_where_the_prefix_is_the_same(
    make_trainer: Any, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"prefix_every": 100, "prefix_cache": tmp_path, "prefix_cache_dtype": "fp32"}
    first, _ = train(make_trainer, **options)
    again, strategy = train(make_trainer, **options)
    assert strategy.prefix_cache_hits == 2 * 2 * 4
    assert_same(weights(again), weights(first))


def made(value: float) -> Tensor:
    return torch.full((64, 64), float(value))  # 16 KiB in fp32


def test_folder_stays_below_its_size_and_the_oldest_go_first(tmp_path: Path) -> None:
    cache = FeatureCache(tmp_path, MIB, "fp32")
    for idx in range(100):
        cache.features([torch.tensor(idx)], "prefix", 1, lambda idx=idx: made(idx))
        assert sum(path.stat().st_size for path in files_in(tmp_path)) <= MIB
    assert 40 < len(files_in(tmp_path)) < 64
    assert cache.features([torch.tensor(99)], "prefix", 1, lambda: made(0.0))[1]


def test_features_that_are_larger_than_the_folder_are_not_kept(tmp_path: Path) -> None:
    cache = FeatureCache(tmp_path, 1000, "fp32")
    assert not cache.features([torch.tensor(1)], "prefix", 1, lambda: made(1.0))[1]
    assert files_in(tmp_path) == []


@pytest.mark.parametrize("left", ["nothing", "half", "garbage", "temporary"])
def test_file_that_a_killed_process_left_is_a_miss_and_is_replaced(tmp_path: Path, left: str) -> None:
    cache, batch = FeatureCache(tmp_path, MIB, "fp32"), [torch.arange(3)]
    cache.features(batch, "prefix", 1, lambda: made(1.0))
    [path] = files_in(tmp_path)
    whole = path.read_bytes()
    kept = {"nothing": b"", "half": whole[: len(whole) // 2], "garbage": b"\xff" * 100, "temporary": whole}[left]
    path.write_bytes(kept)
    if left == "temporary":
        path.rename(path.with_suffix(".tmp"))
    found, is_hit = FeatureCache(tmp_path, MIB, "fp32").features(batch, "prefix", 1, lambda: made(2.0))
    assert not is_hit and torch.equal(found, made(2.0))
    assert cache.features(batch, "prefix", 1, lambda: made(3.0))[1]


def test_caches_that_share_a_folder_do_not_disturb_each_other(tmp_path: Path) -> None:
    def work(worker_idx: int) -> int:
        cache = FeatureCache(tmp_path, MIB, "fp32")
        hits = 0
        for idx in range(120):
            number, prefix = idx % 20, f"prefix{idx // 60}"
            found, is_hit = cache.features([torch.tensor(number)], prefix, 1, lambda number=number: made(number))
            assert torch.equal(found, made(number))
            hits += is_hit
        return hits

    with ThreadPoolExecutor(4) as pool:
        hits = list(pool.map(work, range(4)))
    assert sum(hits) > 0
    assert not list(tmp_path.rglob("*.tmp"))
    assert [path.name for path in tmp_path.iterdir() if files_in(path)] == ["prefix1"]


def test_digest_sees_values_shapes_dtypes_and_plain_values() -> None:
    zeros = torch.zeros(4)
    batches: list[Any] = [
        [zeros],
        [torch.ones(4)],
        [zeros.view(2, 2)],
        [zeros.to(torch.float64)],
        [zeros, zeros],
        [zeros, "text"],
        {"x": zeros, "n": 3},
        [zeros.int()],
    ]
    assert len({digest_of(batch)[0] for batch in batches}) == len(batches)
    assert digest_of({"x": torch.zeros(4)})[0] == digest_of([zeros])[0]
    assert digest_of(["text", 3])[1] is None


def test_digest_sees_the_precision_that_is_computed_in() -> None:
    batch = [torch.zeros(4)]
    with torch.autocast("cpu", torch.bfloat16):
        inside = digest_of(batch)[0]
    assert inside != digest_of(batch)[0]


@pytest.mark.parametrize(
    ("make", "got"),
    [(TwoBlocks, "prefix='none', block_features missing in TwoBlocks"), (Stacked, "block_features missing in Stacked")],
)
def test_modules_that_have_nothing_to_keep_are_refused(make_trainer: Any, tmp_path: Path, make: Any, got: str) -> None:
    with pytest.raises(MisconfigurationException, match=f"prefix_cache is for modules with .*{got}"):
        fit(seeded(make), make_trainer(BlockTrainStrategy(prefix_cache=tmp_path)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefix_cache_gib": 0}, "prefix_cache_gib must be finite and above 0; got prefix_cache_gib=0"),
        ({"prefix_cache_dtype": "int8"}, "prefix_cache_dtype must be 'fp32' or 'bf16'; got prefix_cache_dtype='int8'"),
    ],
)
def test_options_out_of_range_are_refused_at_construction(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BlockTrainStrategy(**options)
