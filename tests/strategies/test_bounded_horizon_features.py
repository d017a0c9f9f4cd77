"""Lightning's features under stages: counters, logging, validation, callbacks, schedules, splits."""

import warnings
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, WeightAveraging
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn

import lightning_blocktrain.pipeline.settings
import lightning_blocktrain.strategies.pipeline_run as pipeline_run
from lightning_blocktrain import BoundedHorizonStrategy
from lightning_blocktrain.pipeline.base import FinishedBatch
from tests.strategies.conftest import (
    BACKENDS,
    DropoutLayers,
    RecordingLogger,
    UserModule,
    assert_same,
    fit,
    loader,
    seeded,
    weights,
)

STARTS_PROCESSES = True

S4 = {"num_stages": 4}


class Finished(L.Callback):
    """Keeps what the stages report, and under which training step."""

    def __init__(self) -> None:
        self.batches: list[FinishedBatch] = []

    def on_train_batch_end(self, trainer, *args):
        self.batches += trainer.strategy.finished_batches


class Counting(torch.optim.SGD):
    """Every step adds 1 to every parameter."""

    def step(self, closure=None):
        loss = closure() if closure is not None else None
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.add_(1)
        return loss


class Counted(UserModule):
    def configure_optimizers(self):
        nn.utils.vector_to_parameters(torch.zeros(sum(p.numel() for p in self.parameters())), self.parameters())
        return Counting(self.parameters(), lr=0.0)

    def stage_loss(self, logits, batch):
        return super().stage_loss(logits * 1e-3, batch)


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
        assert steps_of(trainer) == {float(max_steps)}

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


def steps_of(trainer: L.Trainer) -> set[float]:
    """Return the step counters in the optimizer's state, which the fit has gathered."""
    return {float(state["step"]) for state in trainer.optimizers[0].state.values()}


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
        assert steps_of(trainer) == {7.0}

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


class TestValidation:
    @pytest.mark.parametrize("backend", BACKENDS)
    def test_validation_sees_all_stages_at_the_same_step(self, make_trainer, backend):
        """As every step adds 1 to every parameter, a consistent cut holds one number."""

        seen: list[tuple[int, set[float]]] = []

        class Watch(L.Callback):
            def on_validation_epoch_start(self, trainer, pl_module):
                self.look(trainer, pl_module)

            def on_train_epoch_end(self, trainer, pl_module):
                self.look(trainer, pl_module)

            def look(self, trainer, module):
                values = nn.utils.parameters_to_vector(module.parameters())
                seen.append((trainer.global_step, set(values.tolist())))

        trainer = make_trainer(
            BoundedHorizonStrategy(num_stages=2, backend=backend),
            max_epochs=5,
            limit_train_batches=9,
            val_check_interval=4,
            num_sanity_val_steps=0,
            callbacks=[Watch()],
        )
        trainer.fit(Counted(), loader(), loader(4, shuffle=False))
        # Validation fires on whole multiples of the interval in each epoch; the epoch's end is looked at too.
        assert [step for step, _ in seen] == [9 * epoch + step for epoch in range(5) for step in (4, 8, 9)]
        assert all(values == {float(step)} for step, values in seen)

    def test_early_stopping_best_and_last_checkpoints_and_monitors_work(self, make_trainer, tmp_path):
        best = ModelCheckpoint(tmp_path, monitor="val_loss", save_last=True, save_top_k=-1)
        stop = EarlyStopping("val_loss", patience=2, min_delta=10.0)
        trainer = make_trainer(
            "rgc",
            max_epochs=9,
            enable_checkpointing=True,
            callbacks=[best, stop, LearningRateMonitor("step")],
            logger=L.pytorch.loggers.CSVLogger(tmp_path),
        )
        module = seeded(UserModule)
        L.seed_everything(1, verbose=False)
        trainer.fit(module, loader(), loader(8, shuffle=False))
        assert trainer.current_epoch == 3  # one epoch that improves on nothing, then the patience of two
        assert UserModule.load_from_checkpoint(best.best_model_path).lr == module.lr
        last = torch.load(tmp_path / "last.ckpt", weights_only=True)
        assert_same(last["state_dict"], weights(module))
        assert trainer.validate(module, loader(8, shuffle=False), verbose=False)[0]["val_loss"] > 0

    def test_early_stopping_on_the_training_loss_sees_the_epoch_s_mean(self, make_trainer):
        stop = EarlyStopping("train/loss_epoch", patience=1, min_delta=10.0, check_on_train_epoch_end=True)
        trainer = make_trainer("rgc", max_epochs=9, callbacks=[stop])
        fit(seeded(UserModule), trainer)
        assert trainer.current_epoch == 2

    def test_validate_test_and_predict_work_after_a_fit(self, make_trainer):
        class Whole(UserModule):
            def test_step(self, batch, batch_idx):
                self.log("test_loss", self._loss(batch, self.layers))

            def predict_step(self, batch, batch_idx):
                return self._loss(batch, self.layers)

        module = seeded(Whole)
        trainer = make_trainer("rgc", max_steps=3)
        fit(module, trainer)
        data = loader(8, shuffle=False)
        with torch.no_grad():
            expected = float(sum(module._loss(batch, module.layers) for batch in data) / 4)
        assert trainer.validate(module, data, verbose=False)[0]["val_loss"] == pytest.approx(expected)
        assert trainer.test(module, data, verbose=False)[0]["test_loss"] == pytest.approx(expected)
        assert float(sum(trainer.predict(module, data)) / 4) == pytest.approx(expected)

    def test_validate_before_any_fit_works_without_stage_hooks(self, make_trainer):
        class Bare(UserModule):
            stage_embed = stage_loss = None

        assert make_trainer("rgc").validate(Bare(), loader(8), verbose=False)[0]["val_loss"] > 0


class TestSchedules:
    @pytest.mark.parametrize("alias", ["rgc", "rgc_serial", "live", "bp_groups"])
    def test_each_stage_steps_at_the_driver_s_learning_rate(self, make_trainer, alias):
        used: dict[int, list[float]] = {}

        class Recording(torch.optim.AdamW):
            def step(self, closure=None):
                loss = super().step(closure)
                if any(p.grad is not None for group in self.param_groups for p in group["params"]):
                    used.setdefault(id(self), []).append(self.param_groups[0]["lr"])
                return loss

        class Recorded(UserModule):
            def configure_optimizers(self):
                optimizer = Recording(self.parameters(), lr=0.1)
                schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
                return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

        monitor, logger = LearningRateMonitor("step"), RecordingLogger()
        trainer = make_trainer(alias, max_steps=12, callbacks=[monitor], logger=logger, log_every_n_steps=1)
        fit(seeded(Recorded), trainer)
        driver = [value for _, value in logger.of("lr-Recording")]
        assert driver == pytest.approx([0.1 / (1 + step) for step in range(12)])
        assert len(used) == 4 if alias != "bp_groups" else used
        assert all(rates == driver for rates in used.values())

    def test_groups_with_rates_of_their_own_keep_them_in_every_stage(self, make_trainer):
        """A frozen group moves nothing, wherever its parameters live."""

        class Groups(UserModule):
            def configure_optimizers(self):
                biases = [p for p in self.parameters() if p.dim() == 1]
                matrices = [p for p in self.parameters() if p.dim() == 2]
                groups = [{"params": biases, "lr": 0.0}, {"params": matrices, "lr": 0.1}]
                return torch.optim.AdamW(groups, weight_decay=0.0)

        module = seeded(Groups)
        before, after = weights(module), fit(module, make_trainer("rgc", max_steps=5))
        assert all(torch.equal(before[name], after[name]) == name.endswith("bias") for name in before)

    def test_a_plateau_schedule_works(self, make_trainer):
        class Plateau(UserModule):
            def configure_optimizers(self):
                optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
                schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0, factor=0.5)
                return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}

        def rate(strategy: str) -> float:
            trainer = make_trainer(strategy, max_epochs=2, limit_train_batches=6)
            trainer.fit(seeded(Plateau), loader(), loader(8, shuffle=False))
            return float(trainer.optimizers[0].param_groups[0]["lr"])

        assert rate("rgc") == rate("auto") < 0.1


class TestClippingAndPrecision:
    def test_the_norm_is_clipped_per_stage(self, make_trainer):
        """Plain SGD at rate 1: the update is the clipped gradient, and every stage's own norm is at the limit."""

        class Sgd(UserModule):
            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=1.0)

        def moved(**options: Any) -> dict[int, float]:
            module = seeded(Sgd)
            before = weights(module)
            strategy = BoundedHorizonStrategy(num_stages=2, clip=options.pop("clip", None))
            after = fit(module, make_trainer(strategy, max_steps=1, **options))
            stage = {name: int(name.startswith(("layers.2", "layers.3", "readout"))) for name in before}
            squares = {
                s: sum(float(((after[n] - before[n]) ** 2).sum()) for n in stage if stage[n] == s) for s in (0, 1)
            }
            return {s: square**0.5 for s, square in squares.items()}

        assert min(moved().values()) > 0.02
        # Norms of updates of about .01 on weights of about 1: fp32 rounding of the weights, not of the gradient.
        assert moved(gradient_clip_val=0.01) == pytest.approx({0: 0.01, 1: 0.01}, rel=1e-3)
        assert moved(gradient_clip_val=5.0, clip=0.02) == pytest.approx({0: 0.02, 1: 0.02}, rel=1e-3)

    def test_values_are_clipped(self, make_trainer):
        class Sgd(UserModule):
            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=1.0)

        module = seeded(Sgd)
        before = weights(module)
        options = {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}
        after = fit(module, make_trainer("rgc", max_steps=1, **options))
        largest = max(float((after[name] - before[name]).abs().max()) for name in before)
        assert largest == pytest.approx(1e-3, rel=1e-3)

    @pytest.mark.parametrize("alias", ["rgc", "rgc_serial"])
    def test_bf16_mixed_runs_layers_in_bf16_and_keeps_fp32_weights(self, make_trainer, alias):
        seen: set[torch.dtype] = set()

        class Watch(UserModule):
            def stage_loss(self, logits, batch):
                seen.add(logits.dtype)
                return super().stage_loss(logits, batch)

        module = seeded(Watch)
        fit(module, make_trainer(alias, max_steps=3, precision="bf16-mixed"))
        assert seen == {torch.bfloat16}
        assert {p.dtype for p in module.parameters()} == {torch.float32}

    def test_true_half_precision_trains_in_serial_mode(self, make_trainer):
        module = seeded(UserModule)
        fit(module, make_trainer("rgc_serial", max_steps=2, precision="bf16-true"))
        assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
        assert torch.get_default_dtype() == torch.float32


class TestAfterTheFit:
    @pytest.mark.parametrize("backend", BACKENDS)
    def test_flags_modes_and_memory_are_as_before_and_frozen_tensors_do_not_move(self, make_trainer, backend):
        module = seeded(UserModule)
        module.layers[1].linear.bias.requires_grad_(False)
        module.embed.requires_grad_(False)
        module.readout.bias.requires_grad_(False)
        module.readout.eval()
        flags = {name: p.requires_grad for name, p in module.named_parameters()}
        before = weights(module)
        after = fit(module, make_trainer(BoundedHorizonStrategy(num_stages=2, backend=backend), max_steps=3))
        assert {name: p.requires_grad for name, p in module.named_parameters()} == flags
        assert not module.readout.training and module.layers.training
        assert {name for name in before if not torch.equal(before[name], after[name])} == {
            name for name, flag in flags.items() if flag
        }
        assert all(p.grad is None and not p.is_shared() for p in module.parameters())

    def test_a_second_fit_and_a_second_trainer_in_one_script_work(self, make_trainer):
        module = seeded(UserModule)
        first = fit(module, make_trainer("rgc", max_steps=3))
        trainer = make_trainer("rgc", max_steps=3)
        second = fit(module, trainer)
        trainer.fit_loop.max_epochs = 2
        trainer.fit_loop.epoch_loop.max_steps = 6
        third = fit(module, trainer)
        assert trainer.global_step == 6
        assert any(not torch.equal(first[n], second[n]) for n in first)
        assert any(not torch.equal(second[n], third[n]) for n in first)
        plain = make_trainer("auto", max_steps=2)
        plain.fit(module, loader())
        assert plain.global_step == 2

    def test_the_tuner_finds_a_learning_rate_and_gives_everything_back(self, make_trainer, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        module = seeded(UserModule)
        before = weights(module)
        trainer = make_trainer("rgc", max_epochs=2)
        found = Tuner(trainer).lr_find(module, loader(), num_training=20, update_attr=False)
        assert len(found.results["loss"]) >= 15
        assert_same(weights(module), before)
        trainer.fit(module, loader())
        assert trainer.global_step == 48

    def test_weight_averaging_sees_every_step_in_serial_mode(self, make_trainer):
        """Oracle: the mean of the weights that a drained module shows after each step."""
        seen: list[dict[str, Tensor]] = []

        class Watch(L.Callback):
            def on_train_batch_end(self, trainer, pl_module, *args):
                seen.append(weights(pl_module))

        callback, module = WeightAveraging(), seeded(UserModule)
        fit(module, make_trainer("rgc_serial", callbacks=[callback, Watch()], max_steps=8))
        for name, tensor in weights(module).items():  # the callback leaves the averaged weights in the module
            torch.testing.assert_close(tensor, torch.stack([step[name] for step in seen]).mean(0))

    def test_buffers_follow_the_stages_and_counters_stay_integers(self, make_trainer):
        class Normed(UserModule):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.ModuleList(
                    nn.Sequential(nn.Linear(6, 6), nn.Flatten(0, 1), nn.BatchNorm1d(6), nn.Unflatten(0, (-1, 5)))
                    for _ in range(4)
                )

        module = seeded(Normed)
        fit(module, make_trainer("rgc", max_steps=4))
        for layer in module.layers:
            assert layer[2].num_batches_tracked.dtype == torch.int64
            assert int(layer[2].num_batches_tracked) == 4

    def test_public_drain_gives_a_consistent_module_at_any_time(self, make_trainer):
        seen: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []

        class Watch(L.Callback):
            def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
                if batch_idx == 5:
                    trainer.strategy.drain()
                    seen.append((weights(pl_module), trainer.strategy.lightning_module_state_dict()))

        strategy = BoundedHorizonStrategy(num_stages=4, lag="pinned")
        module = seeded(UserModule)
        fit(module, make_trainer(strategy, max_steps=6, callbacks=[Watch()]))
        assert_same(seen[0][0], weights(module))


class TestSplits:
    def test_a_list_says_how_many_layers_each_stage_has(self, make_trainer):
        cuts: list[tuple[int, ...]] = []

        class Watch(L.Callback):
            def on_train_start(self, trainer, pl_module):
                cuts.append(trainer.strategy.cut.sizes)

        for options in ({"stage_split": [1, 3]}, {"stage_split": (2, 1, 1), "lag": "pinned"}, {"num_stages": 2}, {}):
            fit(
                seeded(UserModule),
                make_trainer(BoundedHorizonStrategy(**options), max_steps=3, callbacks=[Watch()]),
            )
        assert cuts == [(1, 3), (2, 1, 1), (2, 2), (1, 1, 1, 1)]

    def test_devices_count_stages_and_change_no_world_size(self, make_trainer):
        strategy = BoundedHorizonStrategy()
        trainer = make_trainer(strategy, max_steps=2, devices=2)
        sizes = []
        trainer.callbacks.append(CutSizes(sizes))
        fit(seeded(UserModule), trainer)
        assert sizes == [(2, 2)] and trainer.world_size == 1

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_auto_moves_layers_off_the_heavy_stage_logs_it_and_loses_no_batch(self, make_trainer, backend, monkeypatch):
        """The last layer repeats its work 60 times: its stage measures about all work, spread over three layers."""

        said: list[str] = []
        monkeypatch.setattr(pipeline_run, "rank_zero_info", said.append)
        monkeypatch.setattr(pipeline_run, "SETTLE_STEPS", 2)
        monkeypatch.setattr(pipeline_run, "BALANCE_STEPS", 6)

        def run(split: Any) -> tuple[list[tuple[int, ...]], list[int | None]]:
            sizes, logger = CutSizes([]), RecordingLogger()
            strategy = BoundedHorizonStrategy(
                num_stages=2 if split == "auto" else None, backend=backend, stage_split=split, threads_per_stage=1
            )
            trainer = make_trainer(
                strategy, max_steps=40, max_epochs=-1, callbacks=[sizes], logger=logger, log_every_n_steps=1
            )
            fit(seeded(Heavy), trainer)
            assert steps_of(trainer) == {40.0}
            return sizes.seen, [step for step, _ in logger.of("train/loss")]

        sizes, steps = run("auto")
        assert sizes == [(3, 3), (4, 2)]
        assert steps == list(range(40))
        assert len(said) == 1 and "stage_split=[4, 2] starts a run with this cut" in said[0]
        assert run([4, 2]) == ([(4, 2)], list(range(40)))

    def test_more_stages_than_cores_warn_once_and_threads_are_capped(self, make_trainer, monkeypatch):
        for where in (lightning_blocktrain.pipeline.settings, pipeline_run):
            monkeypatch.setattr(where, "num_cores", lambda: 3)
        strategy = BoundedHorizonStrategy(num_stages=4, threads_per_stage=2)
        threads: set[int] = set()

        class Watch(UserModule):
            def stage_loss(self, logits, batch):
                threads.add(torch.get_num_threads())
                return super().stage_loss(logits, batch)

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(seeded(Watch), make_trainer(strategy, max_steps=3))
        texts = [str(warning.message) for warning in caught]
        assert sum("4 stages share 3 cores" in text for text in texts) == 1
        assert sum("threads_per_stage=2, 4 at the same time on 3 cores: using 1" in text for text in texts) == 1
        assert threads == {1}


class CutSizes(L.Callback):
    """Keeps every new cut."""

    def __init__(self, seen: list[tuple[int, ...]]) -> None:
        self.seen = seen

    def on_train_batch_end(self, trainer, *args):
        if self.seen[-1:] != [trainer.strategy.cut.sizes]:
            self.seen.append(trainer.strategy.cut.sizes)


class Repeated(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(60):
            x = x + torch.tanh(self.linear(x))
        return x / 60


class Heavy(UserModule):
    def __init__(self) -> None:
        super().__init__(num_layers=6, width=16)
        self.layers[-1] = Repeated(16)


@pytest.mark.slow
class TestGrowingBatches:
    def test_a_batch_that_outgrows_the_rings_of_processes_loses_neither_gradients_nor_reports(self, make_trainer):
        """Oracle: the same in threads, whose queues hold batches of any size."""
        texts = [
            torch.randint(16, (2, length + 1), generator=torch.Generator().manual_seed(length))
            for length in (3, 4, 4, 9, 2, 12, 12, 5)
        ]
        batches = [[text[:, :-1], text[:, 1:]] for text in texts]

        def run(backend: str) -> tuple[dict[str, Tensor], list[tuple[int | None, float]]]:
            logger = RecordingLogger()
            strategy = BoundedHorizonStrategy(num_stages=2, mode="serial", backend=backend, threads_per_stage=1)
            trainer = make_trainer(strategy, accumulate_grad_batches=2, logger=logger, log_every_n_steps=1)
            fit(seeded(UserModule), trainer, torch.utils.data.DataLoader(batches, batch_size=None))
            return weights(trainer.lightning_module), logger.of("train/loss")

        threads, processes = run("threads"), run("processes")
        assert_same(processes[0], threads[0])
        assert processes[1] == threads[1]


def test_a_module_with_random_layers_repeats_itself_in_serial_mode(make_trainer):
    first = fit(seeded(DropoutLayers), make_trainer("rgc_serial", max_steps=10))
    assert_same(fit(seeded(DropoutLayers), make_trainer("rgc_serial", max_steps=10)), first)
