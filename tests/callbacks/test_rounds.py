import csv
import math
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch.utils.data import DataLoader

from lightning_blocktrain import callbacks
from lightning_blocktrain.callbacks.rounds import REFUSALS, ReportsRounds, RoundMonitor, round_counts, round_row
from lightning_blocktrain.rounds.verdicts import RoundReport, Verdict


def make_report(entry="block0", **changes):
    fields = {
        "entry": entry,
        "round_idx": 0,
        "version": 1,
        "expected": (0, 1, 2),
        "accepted": (0, 2),
        "refused": (),
        "missing": (1,),
        "counts": {Verdict.ACCEPTED: 2, Verdict.LATE: 1},
        "merged": True,
        "note": "",
        "accepted_tokens": 20,
        "accepted_steps": 4,
        "mean_delta_norm": 0.5,
        "merged_delta_norm": 0.25,
        "opened_at": 0.0,
        "closed_at": 1.0,
    }
    return RoundReport(**{**fields, **changes})


class FakeRounds(SingleDeviceStrategy):
    """Two workers, rounds of two steps; the second round loses everything."""

    def __init__(self, rounds, last_at_end=()):
        super().__init__(device="cpu")
        self.rounds = list(rounds)
        self.last_at_end = list(last_at_end)
        self.num_rounds_closed = 0
        self.round_reports = ()
        self.worker_steps = 0
        self.worker_tokens = 0
        self.accepted_tokens = 0
        self.sent_bytes = 0

    def close(self, reports):
        self.num_rounds_closed += 1
        self.round_reports = reports
        self.accepted_tokens += sum(report.accepted_tokens for report in reports if report.entry != "interface")

    def optimizer_step(self, *args, **kwargs):
        result = super().optimizer_step(*args, **kwargs)
        self.worker_steps += 2
        self.worker_tokens += 2 * 2**24 + 2
        if self.worker_steps % 4 == 0 and self.rounds:
            self.close(self.rounds.pop(0))
        return result

    def on_train_end(self):
        if self.last_at_end:
            self.close(self.last_at_end.pop(0))


class Tiny(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch.float()).mean()
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(tmp_path, monitors, strategy="auto", logger=None, **options):
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        max_steps=options.pop("max_steps", 4),
        logger=logger if logger is not None else CSVLogger(tmp_path, name="", version="run"),
        callbacks=monitors,
        log_every_n_steps=options.pop("log_every_n_steps", 1),
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **options,
    )
    trainer.fit(Tiny(), DataLoader(torch.ones(16, 2, dtype=torch.int64), batch_size=2))
    return trainer


def read_rows(tmp_path):
    with Path(tmp_path, "run", "metrics.csv").open() as file:
        return list(csv.DictReader(file))


LOST = make_report(
    accepted=(),
    missing=(0, 1, 2),
    merged=False,
    accepted_tokens=0,
    mean_delta_norm=0.0,
    merged_delta_norm=0.0,
    counts={Verdict.STALE: 2, Verdict.LATE: 1},
)


def test_round_counts_of_two_blocks_adds_them_and_passes_the_interface_over():
    reports = [make_report("block0"), make_report("block1", expected=(3,), accepted=(3,), missing=())]
    with_interface = [*reports, make_report("interface", counts={Verdict.NONFINITE: 9})]
    counts = round_counts(with_interface)
    assert counts == round_counts(reports)
    assert (counts["expected"], counts["accepted"], counts["missing"], counts["late"]) == (4, 3, 1, 2)
    assert counts["merged"] == 2
    assert set(counts) >= {f"refused/{verdict}" for verdict in REFUSALS}


def test_round_counts_each_verdict_is_counted_exactly_once():
    report = make_report(counts=dict.fromkeys(Verdict, 1), accepted=(0,))
    counts = round_counts([report])
    told = counts["accepted"] + counts["late"] + sum(counts[f"refused/{verdict}"] for verdict in REFUSALS)
    assert told == len(Verdict)


def test_round_row_worker_that_joined_in_mid_round_does_not_lift_participation():
    row = round_row([make_report(expected=(0, 1), accepted=(0, 7), missing=(1,))])
    assert row["rounds/participation"] == 0.5
    assert row["rounds/accepted"] == 2


def test_round_row_nobody_expected_participation_is_nan():
    assert math.isnan(round_row([make_report(expected=(), accepted=(), missing=())])["rounds/participation"])


def test_round_row_interface_is_told_apart():
    row = round_row([make_report(), make_report("interface", accepted=(0,), mean_delta_norm=3.0)])
    assert row["rounds/participation"] == pytest.approx(2 / 3)
    assert row["rounds/interface/participation"] == pytest.approx(1 / 3)
    assert row["rounds/interface/not_accepted"] == 1
    assert row["rounds/delta_norm/interface"] == 3.0
    assert row["rounds/delta_norm/block0"] == 0.5
    assert row["rounds/merged_delta_norm/block0"] == 0.25


def test_round_row_keys_do_not_depend_on_what_happened():
    assert round_row([make_report()]).keys() == round_row([LOST]).keys()


def test_fake_strategy_is_a_round_reporter_and_the_default_is_not():
    assert isinstance(FakeRounds([]), ReportsRounds)
    assert not isinstance(SingleDeviceStrategy(device="cpu"), ReportsRounds)


def test_round_monitor_logs_each_round_once_at_the_step_it_ended(tmp_path):
    fit(tmp_path, [RoundMonitor()], FakeRounds([(make_report(),), (LOST,)]), log_every_n_steps=3)
    rounds = [row for row in read_rows(tmp_path) if row["rounds/round"]]
    assert [(row["step"], row["rounds/round"]) for row in rounds] == [("1", "1"), ("3", "2")]
    assert [row["rounds/accepted"] for row in rounds] == ["2", "0"]
    assert [row["rounds/missing"] for row in rounds] == ["1", "3"]
    assert [row["rounds/refused/stale"] for row in rounds] == ["0", "2"]
    assert [row["rounds/refused/outlier"] for row in rounds] == ["0", "0"]
    assert float(rounds[0]["rounds/participation"]) == pytest.approx(2 / 3)
    # More than float32 can count exactly.
    assert rounds[0]["blocktrain/worker_tokens"] == str(2 * (2 * 2**24 + 2))


def test_round_monitor_steps_agree_with_those_of_self_log(tmp_path):
    fit(tmp_path, [RoundMonitor()], FakeRounds([(make_report(),), (LOST,)]))
    rows = read_rows(tmp_path)
    loss_steps = [row["step"] for row in rows if row["train/loss"]]
    assert loss_steps == ["0", "1", "2", "3"]
    assert {row["step"] for row in rows if row["rounds/round"]} == {"1", "3"}


def test_round_monitor_newest_round_is_in_callback_metrics(tmp_path):
    trainer = fit(tmp_path, [RoundMonitor()], FakeRounds([(make_report(),)]))
    assert trainer.callback_metrics["rounds/accepted"].item() == 2
    assert trainer.callback_metrics["rounds/round"].item() == 1
    assert trainer.callback_metrics["blocktrain/worker_tokens"].item() == 2 * (2 * 2**24 + 2)


def test_round_monitor_summary_sums_all_rounds(tmp_path):
    monitor = RoundMonitor()
    fit(tmp_path, [monitor], FakeRounds([(make_report(),), (LOST,)]))
    summary = monitor.summary()
    assert (summary["rounds"], summary["rounds_reported"]) == (2, 2)
    assert (summary["accepted"], summary["late"], summary["missing"], summary["refused/stale"]) == (2, 2, 4, 2)
    assert summary["participation"] == pytest.approx(2 / 6)
    assert (summary["accepted_tokens"], summary["worker_steps"]) == (20, 8)


def test_round_monitor_round_closed_at_the_end_is_logged_too(tmp_path):
    monitor = RoundMonitor()
    fit(tmp_path, [monitor], FakeRounds([(make_report(),)], last_at_end=[(LOST,)]), max_steps=3)
    rounds = [row for row in read_rows(tmp_path) if row["rounds/round"]]
    assert [(row["step"], row["rounds/round"]) for row in rounds] == [("1", "1"), ("2", "2")]
    assert monitor.summary()["rounds"] == 2


def test_round_monitor_second_fit_starts_new_totals(tmp_path):
    monitor = RoundMonitor()
    fit(tmp_path / "a", [monitor], FakeRounds([(make_report(),), (LOST,)]))
    fit(tmp_path / "b", [monitor], FakeRounds([(make_report(),)]))
    assert monitor.summary()["rounds"] == 1
    assert monitor.summary()["accepted"] == 2


def test_round_monitor_strategy_without_rounds_warns_once_and_logs_nothing(tmp_path):
    monitor = RoundMonitor()
    with pytest.warns(UserWarning, match="RoundMonitor has nothing to report: SingleDeviceStrategy") as caught:
        fit(tmp_path, [monitor])
    assert sum("RoundMonitor" in str(warning.message) for warning in caught) == 1
    assert not any(key.startswith(("rounds/", "blocktrain/")) for key in read_rows(tmp_path)[0])
    assert monitor.summary() == {}


def test_round_monitor_tensorboard_shows_the_same_tags(tmp_path):
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    logger = TensorBoardLogger(tmp_path, name="", version="run")
    fit(tmp_path, [RoundMonitor()], FakeRounds([(make_report(), make_report("interface"))]), logger=logger)
    events = accumulators.EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    row = round_row([make_report(), make_report("interface")])
    assert set(events.Tags()["scalars"]) >= {*row, "rounds/round", "blocktrain/worker_steps", "train/loss"}
    assert [event.step for event in events.Scalars("rounds/delta_norm/block0")] == [1]


def test_namespace_documents_every_round_key():
    row = round_row([make_report(), make_report("interface")])
    for key in row:
        documented = key.replace("block0", "block{b}")
        if key.startswith("rounds/refused/"):
            documented = "rounds/refused/<verdict>"
            assert f"``{key.rpartition('/')[2]}``" in callbacks.__doc__
        assert f"``{documented}``" in callbacks.__doc__
