import math
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, WeightAveraging
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn

from lightning_blocktrain import BlockTrainStrategy
from lightning_blocktrain.errors import CheckpointMismatchError, NonFiniteError
from lightning_blocktrain.models import ByteTransformer, DiffusionBlocks
from lightning_blocktrain.rounds import OuterSGD
from tests.strategies.conftest import OneBlock, TwoBlocks, UserModule, assert_same, loader, weights

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"gradient_clip_val": 0.1},
    "accumulated": {"accumulate_grad_batches": 3},
    "bf16-mixed": {"precision": "bf16-mixed"},
}


def fit(module: L.LightningModule, trainer: L.Trainer, train: Any = None, **options: Any) -> dict[str, Tensor]:
    L.seed_everything(5, verbose=False)
    trainer.fit(module, loader() if train is None else train, **options)
    return weights(module)


def seeded(make: Any, *args: Any, **options: Any) -> L.LightningModule:
    L.seed_everything(3, verbose=False)
    return make(*args, **options)


class TestOneWorker:
    @pytest.mark.parametrize("variant", VARIANTS)
    def test_one_worker_equals_the_default_strategy_bit_for_bit(self, make_trainer, variant):
        options = {"max_epochs": 2, **VARIANTS[variant]}
        plain = fit(seeded(OneBlock, dropout=0.2), make_trainer("auto", **options))
        ours = fit(seeded(OneBlock, dropout=0.2), make_trainer(BlockTrainStrategy(sync_every=5), **options))
        assert_same(ours, plain)

    @pytest.mark.parametrize("model", [ByteTransformer, DiffusionBlocks])
    def test_one_worker_of_our_models_equals_the_default_strategy(self, make_trainer, model):
        def build() -> L.LightningModule:
            return seeded(model, num_layers=2, num_blocks=1, width=16, num_heads=2, window_bytes=8)

        plain = fit(build(), make_trainer("auto", max_epochs=2, gradient_clip_val=1.0))
        ours = fit(build(), make_trainer("blocktrain", max_epochs=2, gradient_clip_val=1.0))
        assert_same(ours, plain)


class TestRounds:
    def test_lockstep_masters_are_the_mean_of_separately_trained_replicas(self, make_trainer):
        """Oracle: each worker alone, in a loop of our own, then the mean per block and of the interface."""
        data = list(loader(shuffle=False, batch_size=2))  # 24 batches, 4 workers, 6 steps, 2 rounds of 3
        module = seeded(TwoBlocks)
        reference = seeded(TwoBlocks)
        expected = weights(reference)
        locals_: dict[int, Any] = dict.fromkeys(range(4))
        optimizers = {}
        for w in range(4):
            copy = seeded(TwoBlocks)
            for block in {0, 1} - {w % 2}:
                copy.layers[2 * block : 2 * block + 2].requires_grad_(False)
            locals_[w] = copy
            optimizers[w] = copy.configure_optimizers()
        for round_idx in range(2):
            for w, copy in locals_.items():
                copy.load_state_dict(expected)
                optimizer, scheduler = optimizers[w]["optimizer"], optimizers[w]["lr_scheduler"]["scheduler"]
                for step in range(3 * round_idx, 3 * round_idx + 3):
                    optimizer.zero_grad()
                    block = w % 2
                    copy._loss(data[4 * step + w], copy.layers[2 * block : 2 * block + 2]).backward()
                    optimizer.step()
                    scheduler.step()
            for name in expected:
                owners = [w for w in range(4) if not name.startswith("layers") or int(name.split(".")[1]) // 2 == w % 2]
                expected[name] = torch.stack([locals_[w].state_dict()[name] for w in owners]).mean(0)
        trainer = make_trainer(BlockTrainStrategy(replicas=2, sync_every=3))
        trainer.fit(module, loader(shuffle=False, batch_size=2))
        assert trainer.global_step == 6
        for name, tensor in weights(module).items():
            # Sums of two or four fp32 values in another order.
            torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-7)

    def test_between_batches_the_module_shows_masters_and_they_move_at_round_ends_only(self, make_trainer):
        seen: list[dict[str, Tensor]] = []

        class Watch(L.Callback):
            def on_train_batch_end(self, trainer, pl_module, *args):
                seen.append(weights(pl_module))

        fit(seeded(TwoBlocks), make_trainer(BlockTrainStrategy(sync_every=4), max_steps=8, callbacks=[Watch()]))
        for before, after, step in zip(seen, seen[1:], range(2, 9), strict=False):
            moved = any(not torch.equal(before[name], after[name]) for name in before)
            assert moved == (step % 4 == 0), step

    def test_counters_count_what_one_worker_would_see(self, make_trainer):
        strategy = BlockTrainStrategy(replicas=2, sync_every=2)
        trainer = make_trainer(strategy, max_epochs=2)
        fit(seeded(TwoBlocks), trainer)  # 24 batches, 4 workers: 6 steps an epoch
        assert trainer.global_step == 12
        assert strategy.num_rounds_closed == 6
        assert strategy.worker_steps == 48
        assert strategy.worker_tokens == strategy.accepted_tokens == 2 * 24 * 2 * 5

    def test_batch_j_goes_to_worker_j_mod_w(self, make_trainer):
        dealt: list[tuple[int, int]] = []

        class Record(TwoBlocks):
            def block_training_step(self, batch, batch_idx, block_idx):
                dealt.append((int(batch[0][0, 0]), block_idx))
                return super().block_training_step(batch, batch_idx, block_idx)

        data = list(loader(num_sequences=20, batch_size=2, shuffle=False))
        fit(seeded(Record), make_trainer(BlockTrainStrategy(replicas=2)), loader(20, shuffle=False))
        assert dealt == [(int(data[j][0][0, 0]), j % 4 % 2) for j in range(8)]  # the last 2 of 10 batches are left out

    def test_offline_leaves_the_weights_as_they_were(self, make_trainer):
        module = seeded(TwoBlocks)
        before = weights(module)
        strategy = BlockTrainStrategy(network="offline", sync_every=2)
        assert_same(fit(module, make_trainer(strategy)), before)
        assert strategy.accepted_tokens == 0 < strategy.worker_tokens

    def test_interface_every_two_rounds_moves_the_interface_half_as_often(self, make_trainer):
        seen: list[Tensor] = []

        class Watch(L.Callback):
            def on_train_batch_end(self, trainer, pl_module, *args):
                seen.append(pl_module.readout.weight.detach().clone())

        strategy = BlockTrainStrategy(sync_every=2, interface_every=2)
        fit(seeded(TwoBlocks), make_trainer(strategy, max_steps=8, callbacks=[Watch()]))
        moved = [step for step in range(2, 9) if not torch.equal(seen[step - 2], seen[step - 1])]
        assert moved == [4, 8]

    def test_a_run_that_ends_inside_a_round_merges_what_it_has(self, make_trainer):
        module = seeded(TwoBlocks)
        before = weights(module)
        strategy = BlockTrainStrategy(sync_every=100)
        after = fit(module, make_trainer(strategy, max_steps=5))
        assert strategy.num_rounds_closed == 1
        assert all(not torch.equal(before[n], after[n]) for n in before)

    def test_a_run_stopped_by_a_callback_inside_a_round_merges_what_it_has(self, make_trainer):
        class Stop(L.Callback):
            def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
                trainer.should_stop = batch_idx == 2

        strategy = BlockTrainStrategy(sync_every=100)
        fit(seeded(TwoBlocks), make_trainer(strategy, callbacks=[Stop()]))
        assert strategy.num_rounds_closed == 1 and strategy.accepted_tokens == strategy.worker_tokens

    @pytest.mark.parametrize("rule", ["keep", "reset", "average"])
    def test_inner_state_rules_differ_after_two_rounds(self, make_trainer, rule):
        kept = fit(seeded(TwoBlocks), make_trainer(BlockTrainStrategy(replicas=2, sync_every=2), max_steps=4))
        other = BlockTrainStrategy(replicas=2, sync_every=2, inner_state=rule)
        got = fit(seeded(TwoBlocks), make_trainer(other, max_steps=4))
        assert all(torch.equal(kept[n], got[n]) for n in kept) == (rule == "keep")

    def test_outer_momentum_moves_the_masters_further(self, make_trainer):
        def run(outer: OuterSGD | None) -> dict[str, Tensor]:
            strategy = BlockTrainStrategy(sync_every=1, outer_optimizer=outer)
            return fit(seeded(TwoBlocks), make_trainer(strategy, max_steps=1))

        start, plain = weights(seeded(TwoBlocks)), run(None)
        nesterov = run(OuterSGD(lr=0.5, momentum=0.9, nesterov=True))
        for name in plain:  # first step of Nesterov SGD: lr * (1 + momentum) times the pseudogradient
            torch.testing.assert_close(nesterov[name] - start[name], 0.95 * (plain[name] - start[name]))


class TestReproducibility:
    @pytest.mark.parametrize("network", ["lockstep", "wan"])
    def test_the_same_seed_gives_the_same_weights_bit_for_bit(self, make_trainer, network):
        def run() -> dict[str, Tensor]:
            strategy = BlockTrainStrategy(replicas=2, sync_every=2, network=network)
            return fit(seeded(TwoBlocks, dropout=0.3), make_trainer(strategy, max_epochs=2))

        assert_same(run(), run())

    def test_workers_draw_from_different_random_streams(self, make_trainer):
        draws: list[float] = []

        class Draw(TwoBlocks):
            def block_training_step(self, batch, batch_idx, block_idx):
                draws.append(float(torch.rand(())))
                return super().block_training_step(batch, batch_idx, block_idx)

        fit(seeded(Draw), make_trainer(BlockTrainStrategy(replicas=2), max_steps=3))
        assert len(set(draws)) == len(draws) == 12


class TestCheckpoints:
    @pytest.mark.parametrize(
        "save_step", [4, 5, 6, 12], ids=["round end", "in a round", "epoch end", "second epoch end"]
    )
    @pytest.mark.parametrize("network", ["lockstep", "wan"])
    def test_resume_equals_the_uninterrupted_run(self, make_trainer, tmp_path, save_step, network):
        """24 batches, 4 workers: 6 steps an epoch; rounds of 4 steps, so epochs end inside rounds."""

        def trainer(**options: Any) -> L.Trainer:
            strategy = BlockTrainStrategy(replicas=2, sync_every=4, interface_every=2, network=network)
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


class TestLightningFeatures:
    def test_validation_early_stopping_best_checkpoint_and_monitors_work(self, make_trainer, tmp_path):
        best = ModelCheckpoint(tmp_path, monitor="val_loss", save_last=True)
        stop = EarlyStopping("val_loss", patience=2, min_delta=10.0)
        trainer = make_trainer(
            max_epochs=9,
            enable_checkpointing=True,
            callbacks=[best, stop, LearningRateMonitor("step")],
            logger=L.pytorch.loggers.CSVLogger(tmp_path),
        )
        module = seeded(TwoBlocks)
        L.seed_everything(1, verbose=False)
        trainer.fit(module, loader(), loader(8, shuffle=False))
        assert trainer.current_epoch == 3  # one epoch that improves on nothing, then the patience of two
        assert TwoBlocks.load_from_checkpoint(best.best_model_path).lr == module.lr
        assert (tmp_path / "last.ckpt").exists()
        assert trainer.validate(module, loader(8, shuffle=False), verbose=False)[0]["val_loss"] > 0

    def test_a_second_trainer_and_a_second_fit_in_one_script_work(self, make_trainer):
        module = seeded(TwoBlocks)
        first = fit(module, make_trainer(max_steps=3))
        trainer = make_trainer(max_steps=3)
        second = fit(module, trainer)
        trainer.fit_loop.max_epochs = 2
        trainer.fit_loop.epoch_loop.max_steps = 6
        third = fit(module, trainer)
        assert any(not torch.equal(first[n], second[n]) for n in first)
        assert any(not torch.equal(second[n], third[n]) for n in first)
        plain = make_trainer("auto", max_steps=2)
        plain.fit(module, loader())
        assert plain.global_step == 2

    def test_flags_and_modes_are_as_before_the_fit_and_frozen_tensors_do_not_move(self, make_trainer):
        module = seeded(TwoBlocks)
        module.layers[1].linear.bias.requires_grad_(False)
        module.embed.requires_grad_(False)
        module.readout.eval()
        flags = {name: p.requires_grad for name, p in module.named_parameters()}
        frozen = {name: p.detach().clone() for name, p in module.named_parameters() if not p.requires_grad}
        fit(module, make_trainer(BlockTrainStrategy(outer_optimizer=OuterSGD(momentum=0.9)), max_steps=3))
        assert {name: p.requires_grad for name, p in module.named_parameters()} == flags
        assert not module.readout.training and module.layers.training
        assert all(torch.equal(dict(module.named_parameters())[name], value) for name, value in frozen.items())

    def test_buffers_are_merged_and_integer_counters_stay_integers(self, make_trainer):
        class Normed(TwoBlocks):
            def __init__(self) -> None:
                super().__init__()
                for layer in self.layers:
                    layer.norm = nn.BatchNorm1d(6)
                    layer.forward = lambda x, layer=layer: x + layer.norm(layer.linear(x).mT).mT

        module = seeded(Normed)
        fit(module, make_trainer(BlockTrainStrategy(replicas=2, sync_every=2), max_steps=4))
        for layer in module.layers:
            assert layer.norm.num_batches_tracked.dtype == torch.int64
            assert int(layer.norm.num_batches_tracked) == 4
            assert bool((layer.norm.running_var > 0).all()) and not torch.equal(layer.norm.running_mean, torch.zeros(6))

    def test_buffers_that_the_module_assigns_anew_stay_each_worker_s_own(self, make_trainer):
        class Counting(TwoBlocks):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("seen", torch.zeros(()))

            def block_training_step(self, batch, batch_idx, block_idx):
                self.seen = self.seen + 1
                return super().block_training_step(batch, batch_idx, block_idx)

        module = seeded(Counting)
        fit(module, make_trainer(BlockTrainStrategy(replicas=2, sync_every=2), max_steps=4))
        assert float(module.seen) == 4  # the mean over four workers of four steps each

    def test_a_frozen_prefix_leaves_the_buffers_of_its_blocks_alone_inside_a_round(self, make_trainer):
        class Prefixed(TwoBlocks):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.ModuleList(
                    nn.Sequential(nn.Linear(6, 6), nn.Flatten(0, 1), nn.BatchNorm1d(6), nn.Unflatten(0, (2, 5)))
                    for _ in range(4)
                )

            def configure_blocks(self):
                return {**super().configure_blocks(), "prefix": "frozen"}

            def block_training_step(self, batch, batch_idx, block_idx):
                with torch.no_grad():
                    hidden = nn.Sequential(self.embed, *self.layers[: 2 * block_idx])(batch[0])
                hidden = nn.Sequential(*self.layers[2 * block_idx : 2 * block_idx + 2], self.readout)(hidden)
                return nn.functional.cross_entropy(hidden.flatten(0, -2), batch[1].flatten())

        seen: list[int] = []

        class Watch(L.Callback):
            def on_train_batch_end(self, trainer, pl_module, *args):
                seen.append(int(pl_module.layers[0][2].num_batches_tracked))

        fit(seeded(Prefixed), make_trainer(BlockTrainStrategy(sync_every=3), max_steps=6, callbacks=[Watch()]))
        assert seen == [0, 0, 3, 3, 3, 6]

    def test_bf16_true_merges_in_fp32_and_casts_once(self, make_trainer):
        module = seeded(TwoBlocks)
        strategy = BlockTrainStrategy(replicas=2, sync_every=2)
        fit(module, make_trainer(strategy, max_steps=4, precision="bf16-true"))
        assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
        assert all(torch.isfinite(p).all() for p in module.parameters())

    def test_transfer_hooks_see_single_batches(self, make_trainer):
        seen: list[int] = []

        class Hooked(TwoBlocks):
            def on_after_batch_transfer(self, batch, dataloader_idx):
                seen.append(len(batch[0]))
                return batch

        fit(seeded(Hooked), make_trainer(BlockTrainStrategy(replicas=2), max_steps=2))
        assert seen == [2] * 8

    def test_logged_values_reach_the_trainer(self, make_trainer):
        trainer = make_trainer(max_steps=3)
        fit(seeded(TwoBlocks), trainer)
        assert 0 < float(trainer.callback_metrics["local"]) < 10

    def test_an_iterable_loader_without_length_trains(self, make_trainer):
        class Stream(torch.utils.data.IterableDataset):
            def __iter__(self):
                yield from (tuple(pair) for pair in zip(*loader(shuffle=False).dataset.tensors, strict=True))

        trainer = make_trainer(max_epochs=2)
        fit(seeded(TwoBlocks), trainer, torch.utils.data.DataLoader(Stream(), batch_size=2))
        assert trainer.global_step == 24

    def test_the_tuner_finds_a_learning_rate_and_gives_everything_back(self, make_trainer, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        module = seeded(TwoBlocks)
        before = weights(module)
        trainer = make_trainer(max_epochs=2)
        found = Tuner(trainer).lr_find(module, loader(), num_training=20, update_attr=False)
        assert len(found.results["loss"]) >= 15
        assert_same(weights(module), before)
        trainer.fit(module, loader())
        assert trainer.global_step == 24

    def test_several_train_loaders_deal_a_batch_of_each_to_every_worker(self, make_trainer):
        class TwoLoaders(TwoBlocks):
            def block_training_step(self, batch, batch_idx, block_idx):
                layers = self.layers[2 * block_idx : 2 * block_idx + 2]
                return self._loss(batch["a"], layers) + self._loss(batch["b"], layers)

        trainer = make_trainer()
        fit(seeded(TwoLoaders), trainer, {"a": loader(), "b": loader(24)})
        assert trainer.global_step == 12

    def test_an_optimizer_that_evaluates_its_batch_many_times_counts_it_once(self, make_trainer):
        class Lbfgs(TwoBlocks):
            def configure_optimizers(self):
                return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)

        strategy = BlockTrainStrategy()
        fit(seeded(Lbfgs), make_trainer(strategy, max_steps=3))
        assert strategy.worker_steps == 6 and strategy.worker_tokens == 6 * 10

    def test_a_callback_that_averages_weights_every_batch_sees_masters(self, make_trainer):
        callback = WeightAveraging()
        fit(seeded(TwoBlocks), make_trainer(BlockTrainStrategy(sync_every=4), callbacks=[callback], max_steps=8))
        assert callback._average_model.n_averaged > 0

    def test_weights_that_a_callback_leaves_at_the_end_of_a_stopped_run_stay(self, make_trainer):
        class StopInsideRound(L.Callback):
            def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
                trainer.should_stop = batch_idx == 5

        average = WeightAveraging(avg_fn=lambda averaged, current, num_averaged: averaged)
        module = seeded(TwoBlocks)
        fit(module, make_trainer(BlockTrainStrategy(sync_every=4), callbacks=[average, StopInsideRound()]))
        assert_same(weights(module), weights(average._average_model.module))

    def test_sparse_gradients_train(self, make_trainer):
        class Sparse(TwoBlocks):
            def __init__(self) -> None:
                super().__init__()
                self.embed = nn.Embedding(16, 6, sparse=True)

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.1)

        module = seeded(Sparse)
        before = weights(module)["embed.weight"]
        assert not torch.equal(fit(module, make_trainer(max_steps=2))["embed.weight"], before)

    def test_a_loss_of_none_skips_the_batch(self, make_trainer):
        class Skipping(TwoBlocks):
            def block_training_step(self, batch, batch_idx, block_idx):
                return None if batch_idx == 0 else super().block_training_step(batch, batch_idx, block_idx)

        module = seeded(Skipping)
        before = weights(module)
        assert_same(fit(module, make_trainer(max_steps=1)), before)
        after = fit(module, make_trainer(max_steps=2))
        assert not torch.equal(after["layers.0.linear.weight"], before["layers.0.linear.weight"])

    def test_a_training_step_without_batch_idx_and_the_loader_s_data_set_are_no_obstacle(self, make_trainer):
        seen: list[tuple[int, int]] = []

        class Short(TwoBlocks):
            def training_step(self, batch):
                return self._loss(batch, self.layers)

            def block_training_step(self, batch, batch_idx, block_idx):
                seen.append((batch_idx, len(self.trainer.train_dataloader.dataset)))
                return super().block_training_step(batch, batch_idx, block_idx)

        fit(seeded(Short), make_trainer(max_steps=2))
        assert seen == [(0, 48), (0, 48), (1, 48), (1, 48)]

    def test_an_interrupted_step_leaves_masters_flags_and_hooks_as_they_were(self, make_trainer):
        class Interrupted(TwoBlocks):
            def block_training_step(self, batch, batch_idx, block_idx):
                if (batch_idx, block_idx) == (2, 1):
                    raise KeyboardInterrupt
                return super().block_training_step(batch, batch_idx, block_idx)

        module = seeded(Interrupted)
        masters = fit(seeded(TwoBlocks), make_trainer(BlockTrainStrategy(sync_every=2), max_steps=2))
        with pytest.raises(SystemExit):
            fit(module, make_trainer(BlockTrainStrategy(sync_every=2)))
        assert_same(weights(module), masters)
        assert all(p.requires_grad and p.grad is None for p in module.parameters())
        assert not any(layer._forward_hooks for layer in module.layers)

    @pytest.mark.parametrize("preset", ["lockstep", "mild"])
    def test_training_lowers_the_loss_of_every_model(self, make_trainer, preset):
        strategy = BlockTrainStrategy(replicas=2, sync_every=3, network=preset)
        module = seeded(TwoBlocks)
        trainer = make_trainer(strategy, max_epochs=12)
        trainer.validate(module, loader(shuffle=False), verbose=False)
        before = float(trainer.callback_metrics["val_loss"])
        fit(module, trainer)
        trainer.validate(module, loader(shuffle=False), verbose=False)
        assert float(trainer.callback_metrics["val_loss"]) < before - 0.1


class TestBadInput:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"sync_every": 0}, "sync_every must be at least 1; got sync_every=0"),
            ({"replicas": 0}, "replicas must be at least 1"),
            ({"num_blocks": -1}, "num_blocks must be at least 1"),
            ({"interface_every": 0}, "interface_every must be at least 1"),
            ({"network": "moon"}, "network must be a known preset; got network='moon'"),
            ({"deadline_s": math.inf}, "deadline_s"),
            ({"inner_state": "forget"}, "inner_state must be"),
            ({"merge": "median"}, "merge"),
        ],
    )
    def test_a_wrong_option_is_refused_at_construction(self, options, message):
        with pytest.raises(ValueError, match=message):
            BlockTrainStrategy(**options)

    def test_an_unknown_option_is_refused_at_construction(self):
        with pytest.raises(TypeError, match="sync_evry"):
            BlockTrainStrategy(sync_evry=3)

    @pytest.mark.parametrize("topology", [{"devices": 2}, {"num_nodes": 2}, {"sync_batchnorm": True}])
    def test_a_topology_of_several_processes_is_refused_as_the_trainer_is_built(self, make_trainer, topology):
        with pytest.raises(MisconfigurationException, match=next(iter(topology))):
            make_trainer(**topology)

    def test_num_blocks_that_do_not_divide_the_layers_are_refused(self, make_trainer):
        with pytest.raises(MisconfigurationException, match="num_blocks must divide num_layers; got num_blocks=3"):
            fit(UserModule(), make_trainer(BlockTrainStrategy(num_blocks=3)))

    @pytest.mark.parametrize("hook", ["configure_blocks", "block_training_step"])
    def test_a_module_without_a_hook_is_refused_with_its_signature(self, make_trainer, hook):
        class Bare(UserModule):
            pass

        setattr(Bare, hook, None)
        with pytest.raises(MisconfigurationException, match=rf"{hook}\(self.*Bare without {hook}"):
            fit(Bare(), make_trainer())

    def test_tied_weights_across_blocks_are_refused_by_name(self, make_trainer):
        module = TwoBlocks()
        module.layers[3].linear.weight = module.layers[0].linear.weight
        with pytest.raises(MisconfigurationException, match=r"tied layers.0.linear.weight = layers.3.linear.weight"):
            fit(module, make_trainer())

    def test_a_loss_that_runs_another_block_is_refused_by_name(self, make_trainer):
        class Reaching(TwoBlocks):
            def block_training_step(self, batch, batch_idx, block_idx):
                return self.training_step(batch, batch_idx)

        with pytest.raises(MisconfigurationException, match="loss of block 0 may not run the layers of block 1"):
            fit(Reaching(), make_trainer())

    def test_a_frozen_prefix_that_receives_gradient_is_refused(self, make_trainer):
        class Leaking(TwoBlocks):
            def configure_blocks(self):
                return {**super().configure_blocks(), "prefix": "frozen"}

            def block_training_step(self, batch, batch_idx, block_idx):
                return self._loss(batch, self.layers[: 2 * (block_idx + 1)])

        with pytest.raises(MisconfigurationException, match="block 1 may not send gradient into the layers of block 0"):
            fit(Leaking(), make_trainer())

    def test_a_block_parameter_without_gradient_is_refused_by_name(self, make_trainer):
        module = TwoBlocks()
        module.layers[2].spare = nn.Parameter(torch.zeros(3))
        with pytest.raises(MisconfigurationException, match=r"block 1; got no gradient in layers.2.spare"):
            fit(module, make_trainer())

    def test_manual_optimization_is_refused(self, make_trainer):
        module = TwoBlocks()
        module.automatic_optimization = False
        with pytest.raises(MisconfigurationException, match="automatic optimization"):
            fit(module, make_trainer())

    def test_no_optimizer_is_refused(self, make_trainer):
        class Nothing(TwoBlocks):
            def configure_optimizers(self):
                return None

        with pytest.raises(MisconfigurationException, match="configure_optimizers gave 0"):
            fit(Nothing(), make_trainer())

    def test_two_optimizers_are_refused(self, make_trainer):
        class Two(TwoBlocks):
            def configure_optimizers(self):
                return [torch.optim.SGD(self.embed.parameters(), 0.1), torch.optim.SGD(self.layers.parameters(), 0.1)]

        with pytest.raises(RuntimeError, match="multiple optimizers"):  # Lightning's own words
            fit(Two(), make_trainer())

    def test_a_loader_with_fewer_batches_than_workers_is_refused(self, make_trainer):
        with pytest.raises(MisconfigurationException, match="batches=1, workers=2"):
            fit(TwoBlocks(), make_trainer(), loader(2))

    @pytest.mark.parametrize("where", ["loss", "gradient"])
    def test_a_non_finite_step_stops_before_the_update_and_names_block_and_step(self, make_trainer, where):
        class Breaking(TwoBlocks):
            def block_training_step(self, batch, batch_idx, block_idx):
                loss = super().block_training_step(batch, batch_idx, block_idx)
                if batch_idx < 2 or block_idx == 0:
                    return loss
                if where == "loss":
                    return loss * math.nan
                zero = (self.layers[2].linear.weight * 0).sum()
                return loss + zero.sqrt()  # finite value, infinite slope

        module = seeded(Breaking)
        reference = fit(seeded(TwoBlocks), make_trainer(BlockTrainStrategy(sync_every=1), max_steps=2))
        with pytest.raises(NonFiniteError, match=rf"the {where} must be finite; got .* at step 2, block 1, worker 1"):
            fit(module, make_trainer(BlockTrainStrategy(sync_every=1), max_steps=9))
        assert_same(weights(module), reference)

    def test_a_validation_interval_off_the_rounds_warns(self, make_trainer):
        with pytest.warns(UserWarning, match="val_check_interval=2 is not a multiple of the 4 batches of a round"):
            options = {"val_check_interval": 2, "accumulate_grad_batches": 2}
            trainer = make_trainer(BlockTrainStrategy(sync_every=2), **options)
            trainer.fit(TwoBlocks(), loader(), loader(8, shuffle=False))

    def test_a_closure_that_the_module_calls_itself_is_refused_with_the_right_call(self, make_trainer):
        class Calling(TwoBlocks):
            def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
                optimizer_closure()

        with pytest.raises(MisconfigurationException, match=r"call optimizer.step\(closure=optimizer_closure\)"):
            fit(Calling(), make_trainer())

    @pytest.mark.parametrize("before", [True, False])
    def test_a_parameter_frozen_or_unfrozen_inside_a_fit_is_refused_by_name(self, make_trainer, before):
        class Toggle(L.Callback):
            def on_train_batch_end(self, trainer, pl_module, *args):
                pl_module.embed.requires_grad_(not before)

        module = TwoBlocks()
        module.embed.requires_grad_(before)
        with pytest.raises(MisconfigurationException, match=r"requires_grad changed of embed\.weight"):
            fit(module, make_trainer(callbacks=[Toggle()]))

    def test_teardown_before_connect_and_twice_is_harmless(self):
        strategy = BlockTrainStrategy()
        L.Trainer(strategy=strategy, accelerator="cpu", logger=False, enable_checkpointing=False)
        strategy.teardown()
        strategy.teardown()
        assert strategy.num_rounds_closed == 0
