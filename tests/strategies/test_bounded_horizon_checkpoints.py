"""Checkpoints of a pipeline: a consistent cut that every strategy, and no package of ours, can read."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint

from lightning_blocktrain import BoundedHorizonStrategy
from lightning_blocktrain.strategies.pipeline_run import PipelineRun
from tests.strategies.conftest import BACKENDS, DropoutLayers, UserModule, assert_same, fit, loader, seeded, weights

STARTS_PROCESSES = True

READER = """
import sys
sys.path.insert(0, sys.argv[2])
sys.modules["lightning_blocktrain"] = None  # its import is an error from here on
import torch
import lightning as L

class Residual(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

class Reader(L.LightningModule):
    def __init__(self, num_layers=4, width=6, lr=0.05, dropout=0.0):
        super().__init__()
        self.embed = torch.nn.Embedding(16, width)
        self.layers = torch.nn.ModuleList(Residual(width) for _ in range(num_layers))
        self.readout = torch.nn.Linear(width, 16)

module = Reader.load_from_checkpoint(sys.argv[1])
print(sum(float(p.detach().double().sum()) for p in module.parameters()))
"""


class Ordered(torch.utils.data.DataLoader):
    """A loader that resumes inside an epoch, as Lightning asks for it."""

    def __init__(self) -> None:
        super().__init__(loader().dataset, batch_size=2)
        self.given, self.skip = 0, 0

    def __iter__(self):
        skip, self.skip = self.skip, 0
        for batch_idx, batch in enumerate(super().__iter__()):
            if batch_idx >= skip:
                self.given = batch_idx + 1
                yield batch
        self.given = 0

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skip = state["given"] % len(self)


def save_at(directory: Path, *steps: int) -> list[L.Callback]:
    class Save(L.Callback):
        def on_train_batch_end(self, trainer, *args):
            if trainer.global_step in steps:
                trainer.save_checkpoint(directory / f"{trainer.global_step}.ckpt")

    return [Save()]


def steps_of(states: Any) -> set[float]:
    return {float(state["step"]) for state in states.values()}


class TestResume:
    @pytest.mark.parametrize(
        "options",
        [
            {"num_stages": 4, "mode": "serial"},
            {"num_stages": 2, "method": "broadcast", "mode": "serial"},
            {"num_stages": 2, "method": "live"},
            {"method": "bp"},
            pytest.param(
                {"num_stages": 2, "mode": "serial", "backend": "processes", "threads_per_stage": 1},
                marks=pytest.mark.slow,
            ),
        ],
        ids=["rgc", "broadcast", "live", "bp", "processes"],
    )
    def test_serial_resume_equals_the_uninterrupted_run(self, make_trainer, tmp_path, options):
        """24 batches an epoch; saved inside and at the end of the first. Every layer draws random numbers."""

        def trainer(*callbacks: L.Callback) -> L.Trainer:
            strategy = BoundedHorizonStrategy(**options)
            return make_trainer(strategy, max_epochs=2, gradient_clip_val=0.5, callbacks=list(callbacks))

        whole = fit(seeded(DropoutLayers), trainer(*save_at(tmp_path, 9, 24)), Ordered())
        for step in (9, 24):
            module, resumed = DropoutLayers(), trainer()
            L.seed_everything(77, verbose=False)  # everything must come from the checkpoint
            resumed.fit(module, Ordered(), ckpt_path=tmp_path / f"{step}.ckpt")
            assert resumed.global_step == 48
            assert_same(weights(module), whole)

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_async_resume_continues_from_a_consistent_cut(self, make_trainer, tmp_path, backend):
        def strategy() -> BoundedHorizonStrategy:
            return BoundedHorizonStrategy(num_stages=4, backend=backend, threads_per_stage=1)

        fit(seeded(UserModule), make_trainer(strategy(), max_steps=12, callbacks=save_at(tmp_path, 5, 10)), Ordered())
        stored = torch.load(tmp_path / "10.ckpt", weights_only=True)
        assert steps_of(stored["optimizer_states"][0]["state"]) == {10.0}
        assert stored["optimizer_states"][0]["state"].keys() == set(range(len(list(UserModule().parameters()))))
        module, resumed = UserModule(), make_trainer(strategy(), max_steps=14)
        resumed.fit(module, Ordered(), ckpt_path=tmp_path / "10.ckpt")
        assert resumed.global_step == 14
        assert steps_of(resumed.optimizers[0].state) == {14.0}
        assert resumed.lr_scheduler_configs[0].scheduler.last_epoch == 14
        assert resumed.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.05 * 0.8**4)

    def test_async_resume_with_pinned_lag_equals_the_run_that_drained_there(self, make_trainer, tmp_path):
        """Saving drains, and a drain resets the lag: both runs go on alike."""

        def trainer(*callbacks: L.Callback) -> L.Trainer:
            strategy = BoundedHorizonStrategy(num_stages=4, lag="pinned")
            return make_trainer(strategy, max_steps=20, callbacks=list(callbacks))

        whole = fit(seeded(UserModule), trainer(*save_at(tmp_path, 9)), Ordered())
        module = UserModule()
        trainer().fit(module, Ordered(), ckpt_path=tmp_path / "9.ckpt")
        assert_same(weights(module), whole)

    @pytest.mark.parametrize(
        ("writer", "reader"),
        [
            ("rgc", BoundedHorizonStrategy(num_stages=2)),
            ("rgc", BoundedHorizonStrategy(stage_split=[1, 3], mode="serial")),
            ("rgc", "bp_groups"),
            ("rgc", "live"),
            ("rgc", "auto"),
            ("bp_groups", "rgc"),
            ("auto", "rgc"),
            ("auto", "rgc_serial"),
        ],
        ids=["other S", "other split", "groups", "live", "default", "from groups", "from default", "serial"],
    )
    def test_a_checkpoint_resumes_under_another_strategy(self, make_trainer, tmp_path, writer, reader):
        """One epoch of each; the first step after the resume continues Adam's state: its counter shows it."""
        module = seeded(UserModule)
        first = make_trainer(writer, max_steps=6, callbacks=save_at(tmp_path, 4))
        fit(module, first, Ordered())
        stored = torch.load(tmp_path / "4.ckpt", weights_only=True)
        continued, trainer = UserModule(), make_trainer(reader, max_steps=6)
        trainer.fit(continued, Ordered(), ckpt_path=tmp_path / "4.ckpt")
        assert trainer.global_step == 6
        assert steps_of(trainer.optimizers[0].state) == {6.0}
        after = weights(continued)
        assert all(not torch.equal(after[name], stored["state_dict"][name]) for name in after)

    def test_one_stage_resumes_the_default_strategy_s_run_bit_for_bit_and_back(self, make_trainer, tmp_path):
        def one() -> BoundedHorizonStrategy:
            return BoundedHorizonStrategy(num_stages=1, threads_per_stage=1)

        options = {"max_steps": 16, "gradient_clip_val": 0.1}
        whole = fit(seeded(UserModule), make_trainer("auto", **options), Ordered())
        for writer, reader in (("auto", one()), (one(), "auto")):
            callbacks = save_at(tmp_path, 8)
            fit(seeded(UserModule), make_trainer(writer, **{**options, "max_steps": 8}, callbacks=callbacks), Ordered())
            module = UserModule()
            make_trainer(reader, **options).fit(module, Ordered(), ckpt_path=tmp_path / "8.ckpt")
            assert_same(weights(module), whole)

    def test_resume_while_gradients_are_in_flight_of_an_accumulation_counts_as_the_default_strategy(
        self, make_trainer, tmp_path
    ):
        save = ModelCheckpoint(tmp_path, "x", every_n_train_steps=3)
        options = {"accumulate_grad_batches": 2, "max_steps": 7, "max_epochs": 2}
        fit(
            seeded(UserModule),
            make_trainer("rgc", enable_checkpointing=True, callbacks=[save], **{**options, "max_steps": 4}),
            Ordered(),
        )
        trainer = make_trainer("rgc", **options)
        trainer.fit(UserModule(), Ordered(), ckpt_path=tmp_path / "x.ckpt")
        assert steps_of(trainer.optimizers[0].state) == {7.0} == {float(trainer.global_step)}


class TestFiles:
    def test_a_checkpoint_holds_the_weights_and_loads_plainly(self, make_trainer, tmp_path):
        module = seeded(UserModule)
        trainer = make_trainer("rgc", max_steps=5)
        fit(module, trainer)
        trainer.save_checkpoint(tmp_path / "x.ckpt")
        stored = torch.load(tmp_path / "x.ckpt", weights_only=True)
        assert_same(stored["state_dict"], weights(module))
        assert steps_of(stored["optimizer_states"][0]["state"]) == {5.0}
        assert_same(weights(UserModule.load_from_checkpoint(tmp_path / "x.ckpt")), weights(module))

    def test_a_checkpoint_saved_after_a_serial_fit_resumes_as_one_saved_at_its_last_step(self, make_trainer, tmp_path):
        def strategy() -> BoundedHorizonStrategy:
            return BoundedHorizonStrategy(num_stages=2, mode="serial")

        trainer = make_trainer(strategy(), max_steps=7, callbacks=save_at(tmp_path, 7))
        fit(seeded(DropoutLayers), trainer, Ordered())
        trainer.save_checkpoint(tmp_path / "after.ckpt")
        inside, after = (torch.load(tmp_path / f"{name}.ckpt", weights_only=True) for name in ("7", "after"))
        assert_same(after["state_dict"], inside["state_dict"])
        streams = [stored["bounded_horizon"]["random_states"] for stored in (inside, after)]
        assert len(streams[0]) == 2 and all(torch.equal(a, b) for a, b in zip(*streams, strict=True))
        moments = [stored["optimizer_states"][0]["state"] for stored in (inside, after)]
        assert all(torch.equal(moments[0][idx]["exp_avg"], moments[1][idx]["exp_avg"]) for idx in moments[0])

    def test_a_checkpoint_of_weights_alone_has_no_state_of_stages(self, make_trainer, tmp_path):
        save = ModelCheckpoint(tmp_path, "x", every_n_train_steps=3, save_weights_only=True)
        trainer = make_trainer("rgc_serial", max_steps=5, enable_checkpointing=True, callbacks=[save])
        fit(seeded(UserModule), trainer)
        stored = torch.load(tmp_path / "x.ckpt", weights_only=True)
        assert "bounded_horizon" not in stored and "optimizer_states" not in stored
        assert steps_of(trainer.optimizers[0].state) == {5.0}

    def test_a_save_inside_the_fit_changes_nothing_in_serial_mode(self, make_trainer, tmp_path):
        saved = fit(seeded(DropoutLayers), make_trainer("rgc_serial", max_steps=8, callbacks=save_at(tmp_path, 3)))
        assert_same(fit(seeded(DropoutLayers), make_trainer("rgc_serial", max_steps=8)), saved)

    @pytest.mark.slow  # a fresh interpreter imports all of lightning
    def test_a_checkpoint_loads_where_the_package_cannot_be_imported(self, make_trainer, tmp_path):
        module = seeded(UserModule)
        fit(module, make_trainer("rgc", max_steps=5, callbacks=save_at(tmp_path, 5)))
        command = [sys.executable, "-c", READER, str(tmp_path / "5.ckpt"), str(tmp_path)]
        out = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
        expected = sum(float(p.detach().double().sum()) for p in module.parameters())
        assert float(out.stdout.split()[-1]) == expected


@pytest.mark.parametrize("options", [{"mode": "serial"}, {"lag": "pinned"}])
def test_a_fit_after_the_learning_rate_finder_equals_one_that_starts_with_what_it_found(make_trainer, options):
    """The finder trains and then restores weights and optimizer inside one fit."""

    class Plain(UserModule):
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=self.lr)

    module, finder = seeded(Plain), LearningRateFinder(num_training_steps=20, early_stop_threshold=None)
    trainer = make_trainer(BoundedHorizonStrategy(num_stages=2, **options), callbacks=[finder], max_steps=4)
    found = fit(module, trainer, loader(shuffle=False))
    again = seeded(Plain, lr=module.lr)
    trainer = make_trainer(BoundedHorizonStrategy(num_stages=2, **options), max_steps=4)
    assert_same(fit(again, trainer, loader(shuffle=False)), found)


def test_a_learning_rate_that_is_a_tensor_is_that_of_the_step_when_it_was_ordered(make_trainer, monkeypatch):
    """A scheduler changes such a tensor in place, while the order that holds it is on its way."""
    ordered: list[Any] = []
    step = PipelineRun.step

    def spy(self, groups, clip):
        ordered.append(groups[0]["lr"])
        step(self, groups, clip)

    class Scheduled(UserModule):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=torch.tensor(1.0))
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step_idx: 0.5**step_idx)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    monkeypatch.setattr(PipelineRun, "step", spy)
    fit(seeded(Scheduled), make_trainer("rgc", max_steps=3))
    assert [float(rate) for rate in ordered] == [1.0, 0.5, 0.25]
