import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, WeightAveraging
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn

from lightning_blocktrain import BlockTrainStrategy
from lightning_blocktrain.rounds import OuterSGD
from lightning_blocktrain.strategies.simulated_run import SimulatedRun
from tests.strategies.conftest import TwoBlocks, assert_same, fit, loader, seeded, weights


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

    def test_bf16_true_merges_in_fp32_and_casts_once(self, make_trainer, monkeypatch):
        expected: dict[str, Tensor] = {}
        finish_round = SimulatedRun.finish_round

        def watch(run: SimulatedRun, final: bool = False) -> None:
            for name in run.workers.tensors:
                replicas = [worker.local[name].float() for worker in run.workers if name in worker.local]
                expected[name] = (sum(replicas) / len(replicas)).bfloat16()
            finish_round(run, final)

        monkeypatch.setattr(SimulatedRun, "finish_round", watch)
        module = seeded(TwoBlocks)
        strategy = BlockTrainStrategy(replicas=3, sync_every=2)
        fit(module, make_trainer(strategy, max_steps=4, precision="bf16-true"))
        assert_same(weights(module), expected)
        assert {p.dtype for p in module.parameters()} == {torch.bfloat16}

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
