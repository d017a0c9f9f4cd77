"""The options that give stages more credit: what is trained, when, and what survives a checkpoint."""

from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_blocktrain import BoundedHorizonStrategy
from lightning_blocktrain.callbacks.exits import evaluate_exits
from lightning_blocktrain.callbacks.pipeline import PipelineMonitor
from tests.strategies.conftest import (
    BACKENDS,
    DropoutLayers,
    RecordingLogger,
    UserModule,
    adam_steps,
    assert_same,
    fit,
    loader,
    seeded,
    weights,
)
from tests.strategies.test_bounded_horizon_checkpoints import Ordered, save_at

STARTS_PROCESSES = True


class TestCredit:
    @pytest.mark.parametrize("method", ["rgc", "broadcast", "live"])
    @pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}])
    def test_one_stage_equals_the_default_strategy_bit_for_bit(self, make_trainer, method, options):
        options = {"max_steps": 12, "max_epochs": -1, **options}
        plain = fit(seeded(UserModule), make_trainer("auto", **options))
        strategy = BoundedHorizonStrategy(method, num_stages=1, threads_per_stage=1, credit="next_stage")
        assert_same(fit(seeded(UserModule), make_trainer(strategy, **options)), plain)

    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize("micro_batches", [1, 2])
    def test_every_step_is_taken_with_accumulation_micro_batches_and_validation(
        self, make_trainer, backend, micro_batches
    ):
        strategy = BoundedHorizonStrategy(
            num_stages=4, backend=backend, credit="next_stage", micro_batches=micro_batches, threads_per_stage=1
        )
        logger = RecordingLogger()
        options: dict[str, Any] = {"accumulate_grad_batches": 2, "val_check_interval": 6, "logger": logger}
        trainer = make_trainer(strategy, max_epochs=2, gradient_clip_val=0.5, log_every_n_steps=1, **options)
        trainer.fit(seeded(UserModule), loader(), loader(8))
        assert trainer.global_step == 24
        assert adam_steps(trainer) == {24.0}
        assert len(logger.of("train/loss")) == 48
        assert len(logger.of("train/local_loss/stage0")) == 48

    def test_pinned_async_equals_serial_pipeline_bit_for_bit(self, make_trainer):
        def run(mode: str, lag: str) -> dict[str, torch.Tensor]:
            strategy = BoundedHorizonStrategy(num_stages=4, mode=mode, lag=lag, credit="next_stage")
            trainer = make_trainer(strategy, accumulate_grad_batches=2, gradient_clip_val=0.5)
            return fit(seeded(UserModule), trainer)

        first = run("async", "pinned")
        assert_same(run("serial", "pipeline"), first)
        assert any(not torch.equal(tensor, first[name]) for name, tensor in run("serial", "newest").items())

    def test_balanced_stages_go_on_learning(self, make_trainer):
        strategy = BoundedHorizonStrategy(num_stages=2, stage_split="auto", credit="next_stage", threads_per_stage=1)
        trainer = make_trainer(strategy, max_steps=40, max_epochs=-1)
        fit(seeded(UserModule), trainer)
        assert adam_steps(trainer) == {40.0}

    @pytest.mark.parametrize("lag", ["newest", "pipeline"])
    def test_serial_resume_equals_the_uninterrupted_run(self, make_trainer, tmp_path, lag):
        """A checkpoint drains: under ``pipeline`` both runs are cut there, so both save at the same steps."""

        def trainer(*callbacks: L.Callback) -> L.Trainer:
            strategy = BoundedHorizonStrategy(num_stages=4, mode="serial", credit="next_stage", lag=lag)
            return make_trainer(strategy, max_epochs=2, gradient_clip_val=0.5, callbacks=list(callbacks))

        whole = fit(seeded(DropoutLayers), trainer(*save_at(tmp_path, 9)), Ordered())
        module, resumed = DropoutLayers(), trainer()
        L.seed_everything(77, verbose=False)
        resumed.fit(module, Ordered(), ckpt_path=tmp_path / "9.ckpt")
        assert resumed.global_step == 48
        assert_same(weights(module), whole)


class ExitNorm(nn.Module):
    """A norm of its own in front of the shared unembedding."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, hidden, readout):
        return readout(self.norm(hidden))


class PrivateExits(UserModule):
    def __init__(self, num_layers: int = 4, width: int = 6, lr: float = 0.05, dropout: float = 0.0) -> None:
        super().__init__(num_layers, width, lr, dropout)
        self.exits = nn.ModuleList(ExitNorm(width) for _ in range(num_layers - 1))

    def stage_exits(self) -> nn.ModuleList:
        return self.exits


class TestExits:
    @pytest.mark.parametrize("backend", BACKENDS)
    def test_exits_where_stages_end_are_trained_saved_and_evaluated(self, make_trainer, tmp_path, backend):
        start = weights(seeded(PrivateExits))
        strategy = BoundedHorizonStrategy(num_stages=2, backend=backend, threads_per_stage=1)
        trainer, module = make_trainer(strategy, max_steps=20), seeded(PrivateExits)
        end = fit(module, trainer)
        moved = {name for name in end if not torch.equal(start[name], end[name]) and name.startswith("exits")}
        assert moved == {"exits.1.norm.weight", "exits.1.norm.bias"}
        trainer.save_checkpoint(tmp_path / "end.ckpt")
        loaded = PrivateExits.load_from_checkpoint(tmp_path / "end.ckpt")
        scores = evaluate_exits(loaded, list(loader(8, shuffle=False)), [2, 2])
        assert scores == evaluate_exits(module, list(loader(8, shuffle=False)), [2, 2])
        loaded.exits = nn.ModuleList(ExitNorm(6) for _ in range(3))
        untrained = evaluate_exits(loaded, list(loader(8, shuffle=False)), [2, 2])
        assert untrained[0].nats_per_token > scores[0].nats_per_token
        assert untrained[1] == scores[1]

    def test_checkpoint_goes_on_under_the_default_strategy_and_back(self, make_trainer, tmp_path):
        module = seeded(PrivateExits)
        options = {"max_epochs": -1}
        trainer = make_trainer(BoundedHorizonStrategy(num_stages=2, threads_per_stage=1), max_steps=5, **options)
        fit(module, trainer, Ordered())
        for name, strategy in (("a", "auto"), ("b", BoundedHorizonStrategy(num_stages=4, threads_per_stage=1))):
            trainer.save_checkpoint(tmp_path / f"{name}.ckpt")
            trainer = make_trainer(strategy, max_steps=trainer.global_step + 5, **options)
            trainer.fit(PrivateExits(), Ordered(), ckpt_path=tmp_path / f"{name}.ckpt")
        assert trainer.global_step == 15

    @pytest.mark.parametrize("method", ["bp", "live", "broadcast", "bp_groups"])
    def test_every_method_trains_a_module_with_exits(self, make_trainer, method):
        stages = {} if method == "bp" else {"num_stages": 2}
        trainer = make_trainer(BoundedHorizonStrategy(method, threads_per_stage=1, **stages), max_steps=5)
        start, end = weights(seeded(PrivateExits)), fit(seeded(PrivateExits), trainer)
        moved = {name for name in end if not torch.equal(start[name], end[name]) and name.startswith("exits")}
        assert moved == (set() if method.startswith("bp") else {"exits.1.norm.weight", "exits.1.norm.bias"})

    def test_exits_that_do_not_fit_are_refused_in_setup(self, make_trainer):
        module = PrivateExits()
        module.exits = module.exits[:1]
        with pytest.raises(MisconfigurationException, match="one entry per layer but the last; got 1 of them for num_"):
            fit(module, make_trainer("rgc"))


class TestSchedule:
    @staticmethod
    def strategy(**options: Any) -> BoundedHorizonStrategy:
        chosen = {"num_stages": 4, "mode": "serial", "schedule": "local_then_bp", "threads_per_stage": 1, **options}
        return BoundedHorizonStrategy(**chosen)

    def test_layers_learn_as_one_from_the_switch_on(self, make_trainer):
        """Against a fit of stages and a fit of ``bp`` that goes on from its checkpoint."""
        options = {"max_epochs": -1, "gradient_clip_val": 0.5}
        whole = fit(
            seeded(UserModule), make_trainer(self.strategy(switch_frac=0.4), max_steps=20, **options), Ordered()
        )
        module = seeded(UserModule)
        first = make_trainer(self.strategy(schedule="local"), max_steps=8, **options)
        fit(module, first, Ordered())
        path = first.default_root_dir + "/8.ckpt"
        first.save_checkpoint(path)
        second = make_trainer(BoundedHorizonStrategy("bp", threads_per_stage=1), max_steps=20, **options)
        module = UserModule()
        second.fit(module, Ordered(), ckpt_path=path)
        assert_same(weights(module), whole)

    @pytest.mark.parametrize("frac", [0.01, 0.99])
    def test_switch_at_either_end_is_bp_or_local_alone(self, make_trainer, frac):
        options = {"max_steps": 10, "gradient_clip_val": 0.5}
        other = BoundedHorizonStrategy("bp", threads_per_stage=1) if frac < 0.5 else self.strategy(schedule="local")
        ours = fit(seeded(UserModule), make_trainer(self.strategy(switch_frac=frac), **options))
        assert_same(ours, fit(seeded(UserModule), make_trainer(other, **options)))

    @pytest.mark.parametrize("options", [{}, {"credit": "next_stage", "lag": "pipeline"}, {"method": "live"}])
    def test_serial_resume_across_the_switch_equals_the_uninterrupted_run(self, make_trainer, tmp_path, options):
        """Saved before the switch, at it and after it; every layer draws random numbers."""

        def trainer(*callbacks: L.Callback) -> L.Trainer:
            return make_trainer(
                self.strategy(**options), max_epochs=-1, max_steps=40, gradient_clip_val=0.5, callbacks=list(callbacks)
            )

        whole = fit(seeded(DropoutLayers), trainer(*save_at(tmp_path, 9, 20, 30)), Ordered())
        for step in (9, 20, 30):
            module, resumed = DropoutLayers(), trainer(*save_at(tmp_path / "again", 20, 30))
            L.seed_everything(77, verbose=False)
            resumed.fit(module, Ordered(), ckpt_path=tmp_path / f"{step}.ckpt")
            assert resumed.global_step == 40
            assert_same(weights(module), whole)

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_async_run_takes_every_step_and_logs_every_batch(self, make_trainer, backend):
        logger, monitor = RecordingLogger(), PipelineMonitor(log_every_n_steps=2)
        strategy = self.strategy(mode="async", backend=backend, stage_split="auto", micro_batches=2)
        trainer = make_trainer(
            strategy,
            max_epochs=-1,
            max_steps=36,
            accumulate_grad_batches=2,
            logger=logger,
            log_every_n_steps=1,
            callbacks=[monitor],
        )
        fit(seeded(UserModule), trainer)
        assert trainer.global_step == 36
        assert adam_steps(trainer) == {36.0}
        assert len(logger.of("train/loss")) == 72
        local = logger.of("train/local_loss/stage0")
        assert [step for step, _ in local] == [step for step in range(18) for _ in range(2)]
        assert monitor.summary()["num_steps"] == 18
        assert list(monitor.summary()["lag_histogram"]) == [{0: 72}]

    def test_number_of_steps_that_is_not_known_is_refused_in_setup(self, make_trainer):
        message = "switches after a share of max_steps; got max_steps=-1; give the Trainer max_steps"
        with pytest.raises(MisconfigurationException, match=message):
            fit(UserModule(), make_trainer(self.strategy(), max_epochs=2))
