import csv
import math
from pathlib import Path

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch.utils.data import DataLoader

from lightning_blocktrain import callbacks
from lightning_blocktrain.callbacks import throughput
from lightning_blocktrain.callbacks.throughput import (
    AcceptedThroughput,
    Mark,
    TrainClock,
    Window,
    per_second,
)


def test_per_second_is_the_difference_quotient():
    rates = per_second(Mark(1.0, 10, 100, 50), Mark(3.0, 14, 300, 50))
    assert rates == {"steps_per_s": 2.0, "worker_tokens_per_s": 100.0, "accepted_tokens_per_s": 0.0}


def test_per_second_without_time_is_nan():
    mark = Mark(1.0, 1, 1, 1)
    assert all(math.isnan(rate) for rate in per_second(mark, mark).values())


def test_train_clock_counts_batches_and_gaps_but_not_interrupted_gaps():
    clock = TrainClock()
    clock.start(100.0)
    clock.batch_start(101.0)
    clock.batch_end(103.0)
    clock.interrupt()
    clock.batch_start(150.0)
    clock.batch_end(151.0)
    clock.batch_start(151.5)
    clock.batch_end(152.0)
    assert clock.seconds == (1 + 2) + 1 + (0.5 + 0.5)


def test_train_clock_interrupt_inside_a_batch_changes_nothing():
    clock = TrainClock()
    clock.start(0.0)
    clock.batch_start(1.0)
    clock.interrupt()
    clock.batch_end(3.0)
    clock.batch_start(4.0)
    assert clock.seconds == 4.0


def test_window_spans_the_newest_steps_only():
    window = Window(2, Mark(0.0, 0, 0, 0))
    for step, seconds in enumerate((10.0, 11.0, 12.0), start=1):
        window.add(Mark(seconds, step, step * 100, step * 100), round_ended=True)
    assert window.rates() == {
        "throughput/steps_per_s": 1.0,
        "throughput/worker_tokens_per_s": 100.0,
        "throughput/accepted_tokens_per_s": 100.0,
    }


def test_window_accepted_rate_is_cut_at_the_ends_of_rounds():
    window = Window(2, Mark(0.0, 0, 0, 0))
    seen = []
    for step in range(1, 13):
        ended = step % 4 == 0
        window.add(Mark(float(step), step, step * 10, step // 4 * 40), round_ended=ended)
        seen.append(window.rates().get("throughput/accepted_tokens_per_s"))
    assert seen[:3] == [None] * 3
    assert seen[3:] == [10.0] * 9


def test_window_rounds_that_accept_nothing_bring_the_rate_to_zero():
    window = Window(1, Mark(0.0, 0, 0, 0))
    window.add(Mark(1.0, 1, 10, 10), round_ended=True)
    window.add(Mark(2.0, 2, 20, 10), round_ended=True)
    assert window.rates()["throughput/accepted_tokens_per_s"] == 0.0
    assert window.rates()["throughput/worker_tokens_per_s"] == 10.0


class Tiny(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch.float()).mean()

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.layer(batch.float()).mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Counting(Tiny):
    def count_tokens(self, batch):
        return 7


class TwoWorkers(SingleDeviceStrategy):
    """Rounds of two steps; of two workers' ten tokens a step, one worker's are accepted."""

    def __init__(self):
        super().__init__(device="cpu")
        self.num_rounds_closed = 0
        self.round_reports = ()
        self.worker_steps = 0
        self.worker_tokens = 0
        self.accepted_tokens = 0
        self.sent_bytes = 0

    def optimizer_step(self, *args, **kwargs):
        result = super().optimizer_step(*args, **kwargs)
        self.worker_steps += 2
        self.worker_tokens += 20
        if self.worker_steps % 4 == 0:
            self.num_rounds_closed += 1
            self.accepted_tokens += 20
        return result

    def on_train_end(self):
        self.accepted_tokens += 1


class Ticks:
    """A clock that tells the next second whenever it is read."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        self.now += 1.0
        return self.now


def fit(tmp_path, monitor, module=None, strategy="auto", **options):
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        max_steps=options.pop("max_steps", 4),
        logger=CSVLogger(tmp_path, name="", version="run"),
        callbacks=[monitor, *options.pop("callbacks", [])],
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=options.pop("enable_checkpointing", False),
        **options,
    )
    train = DataLoader(torch.ones(32, 3, dtype=torch.int64), batch_size=4)
    trainer.fit(module or Tiny(), train, DataLoader(torch.ones(4, 3, dtype=torch.int64), batch_size=4))
    return trainer


def read_column(tmp_path, key):
    with Path(tmp_path, "run", "metrics.csv").open() as file:
        return {int(row["step"]): float(row[key]) for row in csv.DictReader(file) if row.get(key)}


def test_accepted_throughput_default_strategy_accepts_what_it_processed(tmp_path, monkeypatch):
    monkeypatch.setattr(throughput, "time", Ticks())
    monitor = AcceptedThroughput()
    fit(tmp_path, monitor, limit_val_batches=0)
    # Start, then two readings a batch: a batch and the gap before it take one second each.
    steps = {0: 0.5, 1: 0.5, 2: 0.5, 3: 0.5}
    assert read_column(tmp_path, "throughput/steps_per_s") == steps
    for name in ("accepted", "worker"):
        assert read_column(tmp_path, f"throughput/{name}_tokens_per_s") == {k: 12 * v for k, v in steps.items()}
    summary = monitor.summary()
    assert (summary["steps"], summary["worker_tokens"], summary["accepted_tokens"]) == (4, 48, 48)
    assert (summary["train_s"], summary["accepted_tokens_per_s"]) == (8.0, 6.0)


def test_accepted_throughput_rounds_counts_the_strategys_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr(throughput, "time", Ticks())
    monitor = AcceptedThroughput()
    trainer = fit(tmp_path, monitor, strategy=TwoWorkers(), limit_val_batches=0)
    assert read_column(tmp_path, "throughput/worker_tokens_per_s") == {0: 10.0, 1: 10.0, 2: 10.0, 3: 10.0}
    assert read_column(tmp_path, "throughput/accepted_tokens_per_s") == {1: 5.0, 2: 5.0, 3: 5.0}
    assert trainer.callback_metrics["throughput/accepted_tokens_per_s"].item() == 5.0
    # The last token was accepted when the strategy ended the training.
    assert monitor.summary()["accepted_tokens"] == 41
    assert monitor.summary()["worker_tokens"] == 80


def test_accepted_throughput_module_that_counts_is_believed(tmp_path):
    monitor = AcceptedThroughput()
    fit(tmp_path, monitor, Counting(), limit_val_batches=0)
    assert monitor.summary()["worker_tokens"] == 4 * 7


def test_accepted_throughput_accumulation_counts_every_batch_and_logs_every_step(tmp_path):
    monitor = AcceptedThroughput()
    fit(tmp_path, monitor, limit_val_batches=0, max_steps=2, accumulate_grad_batches=3)
    assert monitor.summary()["steps"] == 2
    assert monitor.summary()["worker_tokens"] == 2 * 3 * 12
    assert set(read_column(tmp_path, "throughput/worker_tokens_per_s")) == {0, 1}


class Tick(L.Callback):
    """Let a hundred seconds pass in validation and a thousand in the saving of a checkpoint."""

    def __init__(self, ticks):
        self.ticks = ticks

    def on_validation_batch_end(self, *args, **kwargs):
        self.ticks.now += 100.0

    def on_save_checkpoint(self, *args, **kwargs):
        self.ticks.now += 1000.0


def test_accepted_throughput_validation_and_checkpoints_take_no_training_time(tmp_path, monkeypatch):
    ticks = Ticks()
    monkeypatch.setattr(throughput, "time", ticks)
    monitor = AcceptedThroughput()
    saver = ModelCheckpoint(dirpath=tmp_path / "ckpt", every_n_train_steps=3, save_top_k=-1)
    fit(
        tmp_path,
        monitor,
        callbacks=[Tick(ticks), saver],
        val_check_interval=2,
        num_sanity_val_steps=1,
        enable_checkpointing=True,
    )
    assert len(list((tmp_path / "ckpt").iterdir())) == 1
    # Eight seconds, less the gap after step 2 (validation) and the one after step 3 (checkpoint).
    assert monitor.summary()["train_s"] == 6.0
    assert monitor.summary()["worker_tokens"] == 48


def test_accepted_throughput_second_fit_starts_anew(tmp_path):
    monitor = AcceptedThroughput()
    fit(tmp_path / "a", monitor, limit_val_batches=0)
    fit(tmp_path / "b", monitor, limit_val_batches=0, max_steps=2)
    assert monitor.summary()["worker_tokens"] == 24
    assert monitor.summary()["steps"] == 2


@pytest.mark.slow
def test_accepted_throughput_two_ranks_sums_their_tokens(tmp_path):
    monitor = AcceptedThroughput()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp_spawn",
        max_steps=2,
        logger=CSVLogger(tmp_path, name="", version="run"),
        callbacks=[monitor, SaveSummary(tmp_path)],
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(Tiny(), DataLoader(torch.ones(32, 3, dtype=torch.int64), batch_size=4))
    for rank in range(2):
        assert Path(tmp_path, f"tokens{rank}").read_text() == "48"


class SaveSummary(L.Callback):
    def __init__(self, folder):
        self.folder = folder

    def on_fit_end(self, trainer, pl_module):
        monitor = next(c for c in trainer.callbacks if isinstance(c, AcceptedThroughput))
        Path(self.folder, f"tokens{trainer.global_rank}").write_text(str(monitor.summary()["worker_tokens"]))

    def teardown(self, trainer, pl_module, stage):
        dist.destroy_process_group()  # a rank that ends with gloo's threads alive may abort


@pytest.mark.parametrize("window_steps", [0, -3])
def test_accepted_throughput_empty_window_raises(window_steps):
    with pytest.raises(ValueError, match=f"window_steps must be at least 1; got window_steps={window_steps}"):
        AcceptedThroughput(window_steps)


def test_namespace_documents_every_throughput_key():
    window = Window(1, Mark(0.0, 0, 0, 0))
    window.add(Mark(1.0, 1, 1, 1), round_ended=True)
    for key in window.rates():
        assert f"``{key}``" in callbacks.__doc__
