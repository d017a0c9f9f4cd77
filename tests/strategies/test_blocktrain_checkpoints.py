from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_blocktrain import BlockTrainStrategy, Codec
from lightning_blocktrain.errors import CheckpointMismatchError
from lightning_blocktrain.rounds import OuterSGD
from tests.strategies.conftest import TwoBlocks, assert_same, fit, loader, seeded, weights

EXCHANGES: dict[str, dict[str, Any]] = {
    "lockstep": {},
    "wan": {"network": "wan"},
    "topk": {"codec": Codec("topk", top_frac=0.1)},
    "stale_weighted": {"network": "wan", "late": "stale_weighted", "deadline_quantile": 0.9},
    "until_deadline": {"network": "wan", "local_steps": "until_deadline"},
}


class TestCheckpoints:
    @pytest.mark.parametrize(
        "save_step", [4, 5, 6, 12], ids=["round end", "in a round", "epoch end", "second epoch end"]
    )
    @pytest.mark.parametrize("exchange", EXCHANGES)
    def test_resume_equals_the_uninterrupted_run(self, make_trainer, tmp_path, save_step, exchange):
        """24 batches, 4 workers: 6 steps an epoch; rounds of 4 steps, so epochs end inside rounds."""

        def trainer(**options: Any) -> L.Trainer:
            strategy = BlockTrainStrategy(replicas=2, sync_every=4, interface_every=2, **EXCHANGES[exchange])
            save = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=save_step, save_top_k=-1)
            return make_trainer(strategy, max_epochs=3, enable_checkpointing=True, callbacks=[save], **options)

        whole = fit(seeded(TwoBlocks, dropout=0.3), trainer())
        resumed_module = TwoBlocks(dropout=0.3)
        resumed = trainer()
        L.seed_everything(77, verbose=False)  # everything must come from the checkpoint
        resumed.fit(resumed_module, loader(), ckpt_path=tmp_path / f"step={save_step}.ckpt")
        assert resumed.global_step == 18
        assert_same(weights(resumed_module), whole)

    def test_resume_while_gradients_accumulate_equals_the_uninterrupted_run(self, make_trainer, tmp_path):
        class Save(L.Callback):
            def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
                if batch_idx == 2 and trainer.current_epoch == 0:
                    trainer.save_checkpoint(tmp_path / "mid.ckpt")

        def trainer(*callbacks: L.Callback) -> L.Trainer:
            strategy = BlockTrainStrategy(sync_every=2)
            return make_trainer(strategy, max_epochs=2, accumulate_grad_batches=2, callbacks=list(callbacks))

        whole = fit(seeded(TwoBlocks), trainer(Save()))
        module = TwoBlocks()
        trainer().fit(module, loader(), ckpt_path=tmp_path / "mid.ckpt")
        assert_same(weights(module), whole)

    def test_a_checkpoint_holds_masters_and_loads_plainly(self, make_trainer, tmp_path):
        module = seeded(TwoBlocks)
        trainer = make_trainer(BlockTrainStrategy(replicas=2, sync_every=3), max_steps=5)
        fit(module, trainer)
        trainer.save_checkpoint(tmp_path / "x.ckpt")
        stored = torch.load(tmp_path / "x.ckpt", weights_only=True)
        assert_same(stored["state_dict"], weights(module))
        assert_same(weights(TwoBlocks.load_from_checkpoint(tmp_path / "x.ckpt")), weights(module))

    def test_a_checkpoint_written_in_fit_resumes_under_the_default_strategy_and_back(self, make_trainer, tmp_path):
        save = ModelCheckpoint(tmp_path, "ours", every_n_train_steps=4)
        ours = make_trainer(BlockTrainStrategy(sync_every=4), max_steps=4, enable_checkpointing=True, callbacks=[save])
        fit(seeded(TwoBlocks), ours)
        plain = make_trainer("auto", max_steps=6)
        module = TwoBlocks()
        plain.fit(module, loader(), ckpt_path=tmp_path / "ours.ckpt")
        assert plain.global_step == 6
        states = plain.optimizers[0].state_dict()["state"]
        assert {float(state["step"]) for state in states.values()} == {6.0}
        plain.save_checkpoint(tmp_path / "plain.ckpt")
        strategy = BlockTrainStrategy(sync_every=4)
        back = make_trainer(strategy, max_steps=8, max_epochs=2)
        back.fit(TwoBlocks(), loader(), ckpt_path=tmp_path / "plain.ckpt")
        assert back.global_step == 8 and strategy.worker_steps == 4

    def test_a_checkpoint_saved_after_the_fit_resumes_as_one_saved_at_its_last_step(self, make_trainer, tmp_path):
        def trainer(**options: Any) -> L.Trainer:
            strategy = BlockTrainStrategy(sync_every=4, outer_optimizer=OuterSGD(momentum=0.9))
            return make_trainer(strategy, **options)

        def resumed(name: str) -> dict[str, Tensor]:
            module = TwoBlocks(dropout=0.3)
            L.seed_everything(77, verbose=False)
            trainer(max_epochs=2).fit(module, loader(), ckpt_path=tmp_path / name)
            return weights(module)

        save = ModelCheckpoint(tmp_path, "inside", every_n_train_steps=12)
        first = trainer(enable_checkpointing=True, callbacks=[save])
        fit(seeded(TwoBlocks, dropout=0.3), first)
        first.save_checkpoint(tmp_path / "after.ckpt")
        inside, after = (torch.load(tmp_path / f"{name}.ckpt", weights_only=True) for name in ("inside", "after"))
        assert after["optimizer_states"][0]["state"].keys() == inside["optimizer_states"][0]["state"].keys() != set()
        assert_same(resumed("after.ckpt"), resumed("inside.ckpt"))

    def test_a_checkpoint_between_steps_holds_no_spent_gradients(self, make_trainer, tmp_path):
        save = ModelCheckpoint(tmp_path, "ours", every_n_train_steps=2)
        fit(seeded(TwoBlocks), make_trainer(max_steps=2, enable_checkpointing=True, callbacks=[save]))
        stored = torch.load(tmp_path / "ours.ckpt", weights_only=True)["blocktrain"]["workers"]
        assert [worker["gradients"] for worker in stored.values()] == [{}, {}]

    def test_resume_with_other_trained_tensors_names_them(self, make_trainer, tmp_path):
        save = ModelCheckpoint(tmp_path, "ours", every_n_train_steps=2)
        fit(seeded(TwoBlocks), make_trainer(max_steps=2, enable_checkpointing=True, callbacks=[save]))
        module = TwoBlocks()
        module.embed.requires_grad_(False)
        with pytest.raises(CheckpointMismatchError, match=r"embed\.weight stored=.* here=None"):
            make_trainer(max_steps=4).fit(module, loader(), ckpt_path=tmp_path / "ours.ckpt")

    def test_resume_with_other_counts_names_every_difference(self, make_trainer, tmp_path):
        save = ModelCheckpoint(tmp_path, "ours", every_n_train_steps=2)
        fit(seeded(TwoBlocks), make_trainer(max_steps=2, enable_checkpointing=True, callbacks=[save]))
        other = make_trainer(BlockTrainStrategy(replicas=2, sync_every=7), max_steps=4)
        with pytest.raises(CheckpointMismatchError, match=r"replicas: saved 1, now 2; sync_every: saved 20, now 7"):
            other.fit(TwoBlocks(), loader(), ckpt_path=tmp_path / "ours.ckpt")
