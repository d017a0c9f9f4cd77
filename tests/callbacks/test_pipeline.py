import csv
from collections import Counter
from dataclasses import replace
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader, TensorDataset

from lightning_blocktrain import BoundedHorizonStrategy, ByteTransformer, callbacks
from lightning_blocktrain.callbacks.pipeline import (
    PARTS,
    AccountSums,
    LagCounts,
    PipelineMonitor,
    ReportsStages,
    lag_row,
    time_row,
)
from lightning_blocktrain.pipeline.account import TimeAccount
from lightning_blocktrain.pipeline.base import FinishedBatch
from lightning_blocktrain.pipeline.orders import BatchReport
from lightning_blocktrain.strategies import pipeline_run

ACCOUNT = TimeAccount(
    busy_s=4.0,
    wait_in_s=2.0,
    wait_out_s=1.0,
    copy_s=0.5,
    optimizer_s=1.5,
    work_cpu_s=3.0,
    wall_s=10.0,
    num_batches=6,
    num_steps=3,
)


def finished(batch_idx, *lags):
    stages = (BatchReport(stage_idx, batch_idx, 1.0, {}, lag, ACCOUNT) for stage_idx, lag in enumerate(lags))
    return FinishedBatch(batch_idx, tuple(stages))


def byte_model(num_layers=4):
    return ByteTransformer(num_layers=num_layers, width=16, num_heads=2, window_bytes=8)


def windows(num_windows=32):
    text = torch.randint(256, (num_windows, 9), generator=torch.Generator().manual_seed(0))
    return TensorDataset(text[:, :-1], text[:, 1:])


def fit(tmp_path, monitor, strategy, validate=False, **options):
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=strategy,
        max_epochs=options.pop("max_epochs", 1),
        logger=CSVLogger(tmp_path, name="", version="run"),
        callbacks=[monitor, *options.pop("callbacks", [])],
        log_every_n_steps=options.pop("log_every_n_steps", 1),
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **options,
    )
    loaders = [DataLoader(windows(), batch_size=4)] + [DataLoader(windows(4), batch_size=4)] * validate
    trainer.fit(byte_model(), *loaders)
    return trainer


def rows_with(tmp_path, key):
    with Path(tmp_path, "run", "metrics.csv").open() as file:
        return [row for row in csv.DictReader(file) if row.get(key)]


def test_time_row_is_the_shares_of_the_wall_time():
    row = time_row([ACCOUNT], num_threads=1)
    shares = {part: row[f"pipeline/{part}_frac/stage0"] for part in PARTS}
    assert shares == {"busy": 0.4, "wait_in": 0.2, "wait_out": 0.1, "copy": 0.05, "optimizer": 0.15}
    assert row["pipeline/closure_error"] == pytest.approx(0.1)


@pytest.mark.parametrize(("num_threads", "work_s"), [(1, 3.0 / 3), (2, (4.0 + 0.5 + 1.5) / 3)])
def test_time_row_work_is_cpu_time_of_one_thread_and_clock_time_of_several(num_threads, work_s):
    assert time_row([ACCOUNT], num_threads)["pipeline/work_s/stage0"] == work_s


def test_time_row_parallelism_is_all_work_over_that_of_the_busiest():
    stages = [replace(ACCOUNT, work_cpu_s=seconds) for seconds in (3.0, 6.0, 3.0)]
    assert time_row(stages, 1)["pipeline/parallelism"] == 2.0
    assert time_row([ACCOUNT] * 4, 1)["pipeline/parallelism"] == 4.0


def test_time_row_closure_error_of_overlapping_parts_is_a_size():
    stages = [ACCOUNT, replace(ACCOUNT, busy_s=7.0)]
    assert time_row(stages, 1)["pipeline/closure_error"] == pytest.approx(0.2)


def test_lag_row_is_mean_and_maximum():
    row = lag_row([Counter({0: 1, 3: 2}), Counter({0: 3})])
    assert row == {
        "pipeline/lag/stage0": 2.0,
        "pipeline/lag_max/stage0": 3,
        "pipeline/lag/stage1": 0.0,
        "pipeline/lag_max/stage1": 0,
    }


def test_account_sums_add_up_over_a_restart_and_leave_a_pause_out():
    sums = AccountSums()
    sums.count([TimeAccount(wait_in_s=1.0, wall_s=4.0, num_batches=2)])
    sums.count([TimeAccount(wait_in_s=2.0, wall_s=6.0, num_batches=3)])
    sums.count([TimeAccount()])
    sums.count([TimeAccount(wait_in_s=0.5, wall_s=1.0, num_batches=1)])
    sums.skip([TimeAccount(wait_in_s=50.5, wall_s=51.0, num_batches=1)])
    sums.count([TimeAccount(wait_in_s=51.0, wall_s=52.0, num_batches=2)])
    assert sums.totals == (TimeAccount(wait_in_s=3.0, wall_s=8.0, num_batches=5),)


def test_account_sums_restart_of_one_stage_before_the_other_reports_counts_both_anew():
    sums = AccountSums()
    sums.count([TimeAccount(wall_s=5.0, num_batches=5), TimeAccount(wall_s=1.0, num_batches=1)])
    sums.count([TimeAccount(wall_s=1.0, num_batches=1), TimeAccount(wall_s=2.0, num_batches=1)])
    assert [account.wall_s for account in sums.totals] == [6.0, 3.0]


def test_account_sums_and_lag_counts_of_another_number_of_stages_begin_anew():
    sums, lags = AccountSums(), LagCounts()
    sums.count([TimeAccount(wall_s=5.0, num_batches=5), TimeAccount(wall_s=1.0, num_batches=1)])
    lags.add([finished(0, 1, 0)])
    earlier = sums.totals
    sums.count([TimeAccount(wall_s=7.0, num_batches=2)])
    lags.add([finished(1, 3)])
    assert sums.totals == sums.since(earlier) == (TimeAccount(wall_s=7.0, num_batches=2),)
    assert lags.all == lags.window == [Counter({3: 1})]


def test_lag_counts_batch_that_is_shown_twice_counts_once():
    lags, shown = LagCounts(), [finished(0, 0, 0)]
    lags.add(shown)
    shown.append(finished(1, 1, 0))
    lags.add(shown)
    lags.next_window()
    lags.add([finished(2, 2, 0)])
    assert lags.all == [Counter({0: 1, 1: 1, 2: 1}), Counter({0: 3})]
    assert lags.window == [Counter({2: 1}), Counter({0: 1})]


class FakeStages(SingleDeviceStrategy):
    """Two stages; in each step they work for 1 and 2 s and wait for the rest of 4; between two drains pass 100 s."""

    def __init__(self, **options):
        super().__init__(device="cpu")
        self.settings = BoundedHorizonStrategy(threads_per_stage=1, **options).settings
        self.accounts = ()
        self.finished_batches = ()
        self.num_drains = 0

    def drain(self):
        self.num_drains += 1
        if self.num_drains % 2 == 0:
            waited = ((a, a.wait_in_s + 100.0, a.wall_s + 100.0) for a in self.accounts)
            self.accounts = tuple(replace(a, wait_in_s=wait_s, wall_s=wall_s) for a, wait_s, wall_s in waited)

    def optimizer_step(self, *args, **kwargs):
        result = super().optimizer_step(*args, **kwargs)
        step = self.accounts[0].num_steps + 1 if self.accounts else 1
        base = [a.wait_in_s - (a.num_steps * (3 - idx)) for idx, a in enumerate(self.accounts)] or [0.0, 0.0]
        self.accounts = tuple(
            TimeAccount(
                busy_s=step * (idx + 1),
                wait_in_s=pause_s + step * (3 - idx),
                work_cpu_s=0.5 * step,
                wall_s=pause_s + 4.0 * step,
                num_batches=step,
                num_steps=step,
            )
            for idx, pause_s in enumerate(base)
        )
        self.finished_batches = (finished(step - 1, min(step - 1, 1), 0),)
        return result


def test_bounded_horizon_strategy_is_a_stage_reporter_and_the_default_is_not():
    assert isinstance(BoundedHorizonStrategy(), ReportsStages)
    assert isinstance(FakeStages(), ReportsStages)
    assert not isinstance(SingleDeviceStrategy(device="cpu"), ReportsStages)


def test_pipeline_monitor_logs_every_n_steps_of_its_own(tmp_path):
    fit(tmp_path, PipelineMonitor(log_every_n_steps=3), FakeStages(), log_every_n_steps=1)
    rows = rows_with(tmp_path, "pipeline/parallelism")
    assert [row["step"] for row in rows] == ["2", "5"]
    assert [float(row["pipeline/lag/stage0"]) for row in rows] == [pytest.approx(2 / 3), 1.0]
    assert [float(row["pipeline/busy_frac/stage1"]) for row in rows] == [0.5, 0.5]
    assert [float(row["pipeline/work_s/stage1"]) for row in rows] == [0.5, 0.5]


def test_pipeline_monitor_follows_the_trainers_log_every_n_steps(tmp_path):
    trainer = fit(tmp_path, PipelineMonitor(), FakeStages(), log_every_n_steps=4)
    assert [row["step"] for row in rows_with(tmp_path, "pipeline/parallelism")] == ["3", "7"]
    assert trainer.callback_metrics["pipeline/busy_frac/stage0"].item() == 0.25


def test_pipeline_monitor_validation_takes_no_time_of_the_stages(tmp_path):
    strategy, monitor = FakeStages(), PipelineMonitor()
    fit(tmp_path, monitor, strategy, validate=True, val_check_interval=2)
    assert strategy.accounts[0].wall_s == 4 * 100 + 8 * 4.0
    assert monitor.summary()["pipeline/busy_frac/stage0"] == 0.25
    shares = [float(row["pipeline/wait_in_frac/stage0"]) for row in rows_with(tmp_path, "pipeline/parallelism")]
    assert shares == [0.75] * 8


def test_pipeline_monitor_groups_work_is_time_on_the_clock(tmp_path):
    monitor = PipelineMonitor()
    fit(tmp_path, monitor, FakeStages(method="bp_groups"))
    assert monitor.summary()["pipeline/work_s/stage1"] == 2.0


def test_pipeline_monitor_summary_covers_the_whole_fit(tmp_path):
    monitor = PipelineMonitor(log_every_n_steps=5)
    fit(tmp_path, monitor, FakeStages())
    summary = monitor.summary()
    assert (summary["num_steps"], summary["num_batches"]) == (8, 8)
    assert summary["lag_histogram"] == ({0: 1, 1: 7}, {0: 8})
    assert summary["pipeline/lag/stage0"] == 7 / 8
    assert summary.keys() - {"num_steps", "num_batches", "lag_histogram"} == {
        key for key in rows_with(tmp_path, "pipeline/parallelism")[0] if key.startswith("pipeline/")
    }


def test_pipeline_monitor_second_fit_starts_anew(tmp_path):
    monitor = PipelineMonitor()
    fit(tmp_path / "a", monitor, FakeStages())
    fit(tmp_path / "b", monitor, FakeStages(), max_steps=3)
    assert monitor.summary()["num_steps"] == 3
    assert monitor.summary()["lag_histogram"] == ({0: 1, 1: 2}, {0: 3})


def test_pipeline_monitor_strategy_without_stages_warns_once_and_logs_nothing(tmp_path):
    monitor = PipelineMonitor()
    with pytest.warns(UserWarning, match="PipelineMonitor has nothing to report: SingleDeviceStrategy") as caught:
        fit(tmp_path, monitor, "auto", validate=True)
    assert sum("PipelineMonitor" in str(warning.message) for warning in caught) == 1
    assert not any(key.startswith("pipeline/") for key in rows_with(tmp_path, "train/loss")[0])
    assert monitor.summary() == {}


@pytest.mark.parametrize("steps", [0, -1])
def test_pipeline_monitor_no_steps_between_rows_raises(steps):
    with pytest.raises(ValueError, match=f"log_every_n_steps must be at least 1; got log_every_n_steps={steps}"):
        PipelineMonitor(steps)


class Accounts(L.Callback):
    """Keeps the accounts and the cut that the stages end with."""

    def on_train_end(self, trainer, pl_module):
        trainer.strategy.drain()
        self.accounts, self.sizes = trainer.strategy.accounts, trainer.strategy.cut.sizes


@pytest.mark.parametrize("backend", ["threads", pytest.param("processes", marks=pytest.mark.slow)])
def test_pipeline_monitor_rgc_tells_every_batch_and_where_the_time_went(tmp_path, backend):
    monitor, seen = PipelineMonitor(log_every_n_steps=2), Accounts()
    strategy = BoundedHorizonStrategy(num_stages=2, backend=backend, threads_per_stage=1)
    fit(tmp_path, monitor, strategy, callbacks=[seen], max_epochs=2, validate=True)
    summary = monitor.summary()
    assert (summary["num_batches"], summary["num_steps"]) == (16, 16)
    assert [sum(histogram.values()) for histogram in summary["lag_histogram"]] == [16, 16]
    # The owner of the readout is never late, and stage 0 at most by the orders that fit between them.
    assert summary["lag_histogram"][1] == {0: 16}
    assert max(summary["lag_histogram"][0]) <= 2 + 2 + 1
    # All work is told, but for the snapshots that are published while the validation has the stages stand still.
    for stage_idx, account in enumerate(seen.accounts):
        assert 0.5 < summary[f"pipeline/work_s/stage{stage_idx}"] / (account.work_cpu_s / 16) < 1 + 1e-9
    rows = rows_with(tmp_path, "pipeline/closure_error")
    assert len(rows) >= 2
    for row in [*rows, summary]:
        gaps = [abs(1 - sum(float(row[f"pipeline/{part}_frac/stage{s}"]) for part in PARTS)) for s in range(2)]
        assert float(row["pipeline/closure_error"]) == pytest.approx(max(gaps), abs=1e-9)
        assert 1 <= float(row["pipeline/parallelism"]) <= 2


def test_pipeline_monitor_pinned_lag_is_that_of_the_stages_place(tmp_path):
    monitor = PipelineMonitor()
    fit(tmp_path, monitor, BoundedHorizonStrategy(num_stages=4, lag="pinned", threads_per_stage=1))
    # From 0 up to S - 1 - s.
    assert monitor.summary()["lag_histogram"] == (
        {0: 1, 1: 1, 2: 1, 3: 5},
        {0: 1, 1: 1, 2: 6},
        {0: 1, 1: 7},
        {0: 8},
    )


def test_pipeline_monitor_validation_between_resets_the_pinned_lag(tmp_path):
    monitor = PipelineMonitor()
    strategy = BoundedHorizonStrategy(num_stages=2, lag="pinned", threads_per_stage=1)
    fit(tmp_path, monitor, strategy, validate=True, val_check_interval=4)
    assert monitor.summary()["lag_histogram"] == ({0: 2, 1: 6}, {0: 8})


def test_pipeline_monitor_serial_accumulation_counts_batches_and_steps(tmp_path):
    monitor = PipelineMonitor()
    fit(tmp_path, monitor, "rgc_serial", accumulate_grad_batches=2)
    summary = monitor.summary()
    assert (summary["num_batches"], summary["num_steps"]) == (8, 4)
    assert summary["lag_histogram"] == ({0: 8},) * 4
    assert [row["step"] for row in rows_with(tmp_path, "pipeline/closure_error")] == ["1", "2", "3"]


def test_pipeline_monitor_stages_that_start_again_are_added_up(tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline_run, "balanced_sizes", lambda sizes, busy_s: (1, 3))
    monitor, seen = PipelineMonitor(), Accounts()
    strategy = BoundedHorizonStrategy(num_stages=2, stage_split="auto", threads_per_stage=1)
    fit(tmp_path, monitor, strategy, callbacks=[seen], max_epochs=5)
    assert seen.sizes == (1, 3)
    assert max(account.num_batches for account in seen.accounts) < 20  # of the new stages alone
    summary = monitor.summary()
    assert [sum(histogram.values()) for histogram in summary["lag_histogram"]] == [40, 40]
    # What the stages had not reported before the restart: S (ring_slots + 1) + 1 orders at most, and one step's.
    assert 40 - 5 <= summary["num_batches"] <= 40


def test_namespace_documents_every_pipeline_key():
    for key in time_row([ACCOUNT], 1) | lag_row([Counter({0: 1})]):
        assert f"``{key.replace('stage0', 'stage{s}')}``" in callbacks.__doc__
