"""What is counted and what is logged: steps, epochs, and every finished batch exactly once."""

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_blocktrain import BoundedHorizonStrategy
from lightning_blocktrain.pipeline.base import FinishedBatch
from tests.strategies.conftest import (
    RecordingLogger,
    UserModule,
    adam_steps,
    fit,
    loader,
    seeded,
)

STARTS_PROCESSES = True

S4 = {"num_stages": 4}


class Finished(L.Callback):
    """Keeps what the stages report, and under which training step."""

    def __init__(self) -> None:
        self.batches: list[FinishedBatch] = []

    def on_train_batch_end(self, trainer, *args):
        self.batches += trainer.strategy.finished_batches


class TestCounters:
    @pytest.mark.parametrize("alias", ["rgc", "rgc_serial", "live", "bp_groups"])
    def test_steps_and_epochs_count_as_under_the_default_strategy(self, make_trainer, alias):
        """7 batches, the last a half one; every second steps, and the last of each epoch."""

        def count(strategy: str) -> tuple[int, int, list[Tensor]]:
            trainer = make_trainer(strategy, max_epochs=5, accumulate_grad_batches=2)
            fit(seeded(UserModule), trainer, loader(13))
            return trainer.global_step, trainer.current_epoch, trainer.optimizers[0].param_groups[0]["lr"]

        assert count(alias) == count("auto") == (20, 5, pytest.approx(0.05 * 0.8**6))

    @pytest.mark.parametrize("max_steps", [1, 7])
    def test_max_steps_ends_inside_an_epoch_with_every_stage_at_that_step(self, make_trainer, max_steps):
        trainer = make_trainer(BoundedHorizonStrategy(**S4), max_steps=max_steps)
        fit(seeded(UserModule), trainer)
        assert trainer.global_step == max_steps
        assert adam_steps(trainer) == {float(max_steps)}

    def test_fast_dev_run_and_limited_batches_end(self, make_trainer):
        trainer = make_trainer("rgc", fast_dev_run=2)
        fit(seeded(UserModule), trainer)
        assert trainer.global_step == 2
        trainer = make_trainer("rgc", limit_train_batches=5, max_epochs=2)
        fit(seeded(UserModule), trainer)
        assert trainer.global_step == 10

    def test_an_iterable_loader_without_length_trains_every_batch(self, make_trainer):
        class Stream(torch.utils.data.IterableDataset):
            def __iter__(self):
                yield from (tuple(pair) for pair in zip(*loader(shuffle=False).dataset.tensors, strict=True))

        trainer, logger = make_trainer("auto"), RecordingLogger()
        trainer = make_trainer("rgc", max_epochs=2, logger=logger, log_every_n_steps=1)
        fit(seeded(UserModule), trainer, torch.utils.data.DataLoader(Stream(), batch_size=2))
        assert [step for step, _ in logger.of("train/loss")] == list(range(48))


class TestLogging:
    @pytest.mark.parametrize(
        ("strategy", "options"),
        [
            ({}, {}),
            ({"ring_slots": 5}, {"max_steps": 14}),
            ({"micro_batches": 2}, {}),
            ({}, {"accumulate_grad_batches": 3}),
            ({"micro_batches": 2}, {"accumulate_grad_batches": 2, "max_steps": 7}),
            pytest.param(
                {"micro_batches": 2, "backend": "processes"},
                {"accumulate_grad_batches": 2, "max_steps": 7},
                marks=pytest.mark.slow,
            ),
        ],
        ids=["plain", "max_steps", "micro_batches", "accumulation", "all", "all in processes"],
    )
    def test_every_finished_batch_is_logged_exactly_once(self, make_trainer, strategy, options):
        """9 batches, the last a half one. Oracle: what the stages report, and the epoch's mean over samples."""
        logger, finished = RecordingLogger(), Finished()
        trainer = make_trainer(
            BoundedHorizonStrategy(num_stages=2, **strategy),
            **{"max_epochs": 3, "max_steps": -1, **options},
            logger=logger,
            log_every_n_steps=1,
            callbacks=[finished],
        )
        fit(seeded(UserModule), trainer, loader(17))
        every = options.get("accumulate_grad_batches", 1)
        steps_an_epoch = -(-9 // every)
        ordered = [(batch // every) + epoch * steps_an_epoch for epoch in range(3) for batch in range(9)]
        ordered = [step for step in ordered if step < options.get("max_steps", 1000)]
        rows = logger.of("train/loss")
        assert [step for step, _ in rows] == ordered
        sizes = ([2] * 8 + [1]) * 3
        assert sum(value for _, value in rows) == pytest.approx(
            whole_losses(finished.batches, sizes[: len(rows)], strategy.get("micro_batches", 1))
        )
        for epoch, (_, mean) in enumerate(logger.of("train/loss_epoch")):
            losses = [value for _, value in rows[9 * epoch : 9 * epoch + 9]]
            weighted = [value * size for value, size in zip(losses, sizes, strict=False)]
            assert mean == pytest.approx(sum(weighted) / sum(sizes[: len(losses)]))
        assert epoch == len(rows[:-1]) // 9

    def test_batches_in_flight_when_a_callback_stops_the_fit_are_logged(self, make_trainer):
        class Stop(L.Callback):
            def on_train_batch_end(self, trainer, *args):
                trainer.should_stop = trainer.global_step == 7

        logger = RecordingLogger()
        trainer = make_trainer(
            BoundedHorizonStrategy(**S4, ring_slots=8), logger=logger, log_every_n_steps=1, callbacks=[Stop()]
        )
        fit(seeded(UserModule), trainer)
        assert trainer.global_step == 7
        assert [step for step, _ in logger.of("train/loss")] == list(range(7))
        assert adam_steps(trainer) == {7.0}

    @pytest.mark.parametrize("every", [0, 5])
    def test_log_every_n_steps_thins_the_rows(self, make_trainer, every):
        logger = RecordingLogger()
        fit(seeded(UserModule), make_trainer("rgc", logger=logger, log_every_n_steps=every))
        assert [step for step, _ in logger.of("train/loss")] == ([] if every == 0 else [4, 9, 14, 19])
        assert all(row["epoch"] == 0 for step, row in logger.rows if "train/loss" in row)

    @pytest.mark.parametrize("micro_batches", [1, 2])
    def test_local_losses_and_extras_are_logged_under_their_stage(self, make_trainer, micro_batches):
        class Extras(UserModule):
            def stage_loss(self, logits, batch):
                return {"loss": super().stage_loss(logits, batch), "width": logits.shape[-1], "rows": len(logits)}

        logger = RecordingLogger()
        strategy = BoundedHorizonStrategy(num_stages=2, mode="serial", micro_batches=micro_batches)
        trainer = make_trainer(strategy, max_steps=3, logger=logger, log_every_n_steps=1)
        fit(seeded(Extras), trainer)
        rows = [row for _, row in logger.rows if "train/loss" in row]
        upstream = {"train/local_loss/stage0", "width/stage0", "rows/stage0"}
        assert all(row.keys() == {"train/loss", "width", "rows", "epoch", *upstream} for row in rows)
        assert [(row["width"], row["rows"], row["rows/stage0"]) for row in rows] == [
            (16, 2 / micro_batches, 2 / micro_batches)
        ] * 3
        assert all(row["train/loss"] != row["train/local_loss/stage0"] for row in rows)
        metrics = trainer.callback_metrics
        assert float(metrics["train/local_loss/stage0"]) == pytest.approx(rows[-1]["train/local_loss/stage0"])
        assert float(trainer.logged_metrics["train/loss"]) == pytest.approx(rows[-1]["train/loss"])

    def test_serial_losses_are_those_of_the_default_strategy_with_one_stage(self, make_trainer):
        class Logged(UserModule):
            def training_step(self, batch, batch_idx):
                loss = super().training_step(batch, batch_idx)
                self.log("train/loss", loss)
                return loss

        def rows(strategy: Any) -> list[tuple[int | None, float]]:
            logger = RecordingLogger()
            trainer = make_trainer(strategy, logger=logger, log_every_n_steps=3)
            fit(seeded(Logged), trainer)
            return logger.of("train/loss")

        assert rows(BoundedHorizonStrategy(num_stages=1)) == rows("auto")

    def test_a_step_s_outputs_hold_the_loss_of_the_newest_finished_batch(self, make_trainer):
        seen: list[tuple[float, float]] = []

        class Watch(L.Callback):
            def on_train_batch_end(self, trainer, pl_module, outputs, *args):
                seen.append((float(outputs["loss"]), trainer.strategy.finished_batches[-1].stages[-1].loss))

        fit(seeded(UserModule), make_trainer("rgc_serial", max_steps=5, callbacks=[Watch()]))
        assert len(seen) == 5 and all(loss == pytest.approx(report) for loss, report in seen)


def whole_losses(batches: list[FinishedBatch], sizes: list[int], micro_batches: int) -> float:
    """Return the sum of the losses of batches of these sizes, whose parts are of one sample each."""
    parts, total = iter([batch.stages[-1].loss for batch in batches]), 0.0
    for size in sizes:
        num_parts = min(size, micro_batches)
        total += sum(next(parts) for _ in range(num_parts)) / num_parts
    assert next(parts, None) is None
    return total
