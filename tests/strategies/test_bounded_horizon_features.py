"""Lightning's features under stages: validation, callbacks, schedules, clipping, and what a fit leaves behind."""

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, WeightAveraging
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn

from lightning_blocktrain import BoundedHorizonStrategy
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


def test_a_module_with_random_layers_repeats_itself_in_serial_mode(make_trainer):
    first = fit(seeded(DropoutLayers), make_trainer("rgc_serial", max_steps=10))
    assert_same(fit(seeded(DropoutLayers), make_trainer("rgc_serial", max_steps=10)), first)
