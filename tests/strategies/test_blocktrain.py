from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_blocktrain import BlockTrainStrategy
from lightning_blocktrain.models import ByteTransformer, DiffusionBlocks
from lightning_blocktrain.rounds import OuterSGD
from tests.strategies.conftest import OneBlock, TwoBlocks, assert_same, fit, loader, seeded, weights

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"gradient_clip_val": 0.1},
    "accumulated": {"accumulate_grad_batches": 3},
    "bf16-mixed": {"precision": "bf16-mixed"},
}


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

    def test_an_interface_tensor_that_one_block_trains_takes_full_steps(self, make_trainer):
        """The embedding of a causal model learns from block 0 alone; the other worker's zeros do not halve it."""
        module = seeded(ByteTransformer, num_layers=2, num_blocks=2, width=16, num_heads=2, window_bytes=5, lr=0.5)
        before = weights(module)
        strategy = BlockTrainStrategy(sync_every=1)
        fit(module, make_trainer(strategy, max_steps=1))
        step = (weights(module)["embed.weight"] - before["embed.weight"]).abs().max()
        assert float(step) == pytest.approx(0.5 / 50, rel=0.1)  # Adam's first step is its learning rate, in warm-up

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
