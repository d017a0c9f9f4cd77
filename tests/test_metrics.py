import copy
import math
import pickle
import warnings
from collections import UserDict

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_blocktrain.metrics import BitsPerToken, bits_per_token, count_tokens


def test_bits_per_token_uniform_over_256_is_eight_bits():
    metric = BitsPerToken()
    metric.update(torch.zeros(2, 5, 256), torch.randint(256, (2, 5)))
    assert metric.compute().dtype == torch.float64
    # float32 logarithm of 256: the relative error of one rounding.
    assert metric.compute().item() == pytest.approx(8.0, rel=1e-6)
    assert bits_per_token(10 * math.log(256), 10) == pytest.approx(8.0, rel=1e-15)


def test_bits_per_token_uneven_batches_weighs_tokens_not_batches():
    torch.manual_seed(0)
    metric = BitsPerToken()
    batches = [(torch.randn(n, 256), torch.randint(256, (n,))) for n in (1, 7, 200)]
    for logits, targets in batches:
        metric.update(logits, targets)
    nats = sum(F.cross_entropy(x.double(), y, reduction="sum").item() for x, y in batches)
    # The logits are scored in float32: about 1e-7 a token.
    assert metric.compute().item() == pytest.approx(nats / 208 / math.log(2), rel=1e-6)
    assert metric.num_tokens.item() == 208


def test_bits_per_token_underflowing_probability_stays_finite():
    logits = torch.tensor([[0.0, -1e4]])
    metric = BitsPerToken()
    metric.update(logits, torch.tensor([1]))
    assert metric.compute().item() == pytest.approx(1e4 / math.log(2))


def test_bits_per_token_more_than_2_to_the_24_tokens_still_counts():
    metric = BitsPerToken()
    metric.update_nats(torch.tensor(float(2**24)), 2**24)
    metric.update_nats(torch.tensor(1.0), 1)
    assert metric.num_tokens.item() == 2**24 + 1
    assert metric.nats.item() == 2**24 + 1


def test_bits_per_token_loss_per_token_is_summed_in_float64():
    metric = BitsPerToken()
    # A float32 sum of these two rounds the second away.
    metric.update_nats(torch.tensor([float(2**24), 1.0]), 2)
    assert metric.nats.item() == 2**24 + 1


def test_bits_per_token_ignored_targets_are_neither_scored_nor_counted():
    logits, targets = torch.randn(4, 256), torch.tensor([3, -100, 7, -100])
    masked, kept = BitsPerToken(), BitsPerToken()
    masked.update(logits, targets)
    kept.update(logits[[0, 2]], targets[[0, 2]])
    assert masked.num_tokens.item() == 2
    assert masked.compute().item() == kept.compute().item()


class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        self.metric = BitsPerToken()


@pytest.mark.parametrize(
    "cast", [lambda m: m.half(), lambda m: m.bfloat16(), lambda m: m.to(torch.bfloat16), lambda m: m.float()]
)
def test_bits_per_token_cast_with_its_module_keeps_exact_sums(cast):
    holder = Holder()
    holder.metric.update_nats(torch.tensor(1000.0), 1001)
    holder = cast(holder)
    holder.metric.update_nats(torch.tensor(1.0, dtype=torch.bfloat16), 2)
    assert holder.metric.nats.dtype == torch.float64
    assert holder.metric.num_tokens.dtype == torch.int64
    assert holder.metric.compute().item() == pytest.approx(1001 / 1003 / math.log(2), rel=1e-15)
    holder.metric.reset()
    assert holder.metric.nats.dtype == torch.float64
    assert holder.metric.nats.item() == 0


def test_bits_per_token_moved_to_another_device_takes_its_sums_along():
    metric = BitsPerToken().to("meta")
    assert (metric.nats.device.type, metric.num_tokens.device.type) == ("meta", "meta")
    metric.reset()
    assert (metric.nats.device.type, metric.nats.dtype) == ("meta", torch.float64)


def test_bits_per_token_update_nats_after_compute_drops_the_cached_value():
    metric = BitsPerToken()
    metric.update_nats(torch.tensor([1.0, 1.0]), 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert metric.compute().item() == pytest.approx(1 / math.log(2))
    metric.update_nats(torch.tensor(8.0), 3)
    assert metric.compute().item() == pytest.approx(2 / math.log(2))


def test_bits_per_token_forward_returns_the_batch_and_accumulates_all():
    metric = BitsPerToken()
    first, second = torch.randn(3, 256), torch.randn(9, 256)
    targets = torch.zeros(9, dtype=torch.int64)
    metric(first, targets[:3])
    alone = metric(second, targets)
    nats = [F.cross_entropy(x, targets[: len(x)], reduction="sum").item() for x in (first, second)]
    assert alone.item() == pytest.approx(nats[1] / 9 / math.log(2), rel=1e-6)
    assert metric.compute().item() == pytest.approx(sum(nats) / 12 / math.log(2), rel=1e-6)


def test_bits_per_token_without_tokens_is_nan_and_warns():
    with pytest.warns(UserWarning, match="before the ``update`` method"):
        assert math.isnan(BitsPerToken().compute().item())


def test_bits_per_token_two_processes_sums_both():
    other = {torch.float64: torch.tensor(9.0, dtype=torch.float64), torch.int64: torch.tensor(3)}
    metric = BitsPerToken()
    metric.distributed_available_fn = lambda: True
    metric.dist_sync_fn = lambda state, group=None: [state, other[state.dtype]]
    metric.update_nats(torch.tensor(1.0), 2)
    assert metric.compute().item() == pytest.approx(10 / 5 / math.log(2))
    assert metric.num_tokens.item() == 2


def test_bits_per_token_copied_or_pickled_keeps_its_sums():
    metric = BitsPerToken()
    metric.update_nats(torch.tensor(6.0), 2)
    for twin in (copy.deepcopy(metric), pickle.loads(pickle.dumps(metric))):
        assert twin.compute().item() == pytest.approx(3 / math.log(2))


@pytest.mark.parametrize("shape", [(2, 4), (2, 3, 1), (6,)])
def test_bits_per_token_shapes_differ_raises_naming_both(shape):
    with pytest.raises(ValueError, match=r"logits must have the shape of targets.*\(2, 3, 256\)"):
        BitsPerToken().update(torch.zeros(2, 3, 256), torch.zeros(shape, dtype=torch.int64))


def test_bits_per_token_negative_count_raises():
    with pytest.raises(ValueError, match="num_tokens must be at least 0; got num_tokens=-1"):
        BitsPerToken().update_nats(torch.tensor(1.0), -1)


class Lit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 256)
        self.bits = BitsPerToken()

    def validation_step(self, batch, batch_idx):
        self.bits.update(self.head(torch.ones(len(batch), 4, dtype=self.head.weight.dtype)), batch)
        self.log("val/bits_per_byte", self.bits)


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_bits_per_token_logged_by_lightning_agrees_with_the_sum_over_tokens(precision):
    module = Lit()
    nn.init.zeros_(module.head.weight)
    nn.init.zeros_(module.head.bias)
    trainer = L.Trainer(
        accelerator="cpu", precision=precision, logger=False, enable_progress_bar=False, enable_model_summary=False
    )
    loader = DataLoader(torch.randint(256, (10,)), batch_size=4)
    values = trainer.validate(module, loader, verbose=False)[0]
    assert values["val/bits_per_byte"] == pytest.approx(8.0, rel=1e-6)
    assert module.bits.nats.dtype == torch.float64


class Counting(nn.Module):
    def count_tokens(self, batch):
        return 7


IDS = torch.ones(2, 5, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("batch", "num_tokens"),
    [
        (IDS, 10),
        ((torch.zeros(2, 3), IDS), 10),
        (UserDict(labels=torch.zeros(4, dtype=torch.int64), ids=[IDS]), 10),
        ((torch.zeros(6, 3), torch.zeros(6, dtype=torch.int64)), 6),
        ("text", 1),
    ],
)
def test_count_tokens_without_the_modules_help_counts_ids_else_samples(batch, num_tokens):
    assert count_tokens(nn.Module(), batch) == num_tokens


def test_count_tokens_module_that_counts_is_believed():
    assert count_tokens(Counting(), IDS) == 7
