"""What each method trains, against Lightning's default strategy and against one another."""

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_blocktrain import BoundedHorizonStrategy
from lightning_blocktrain.models import ByteTransformer
from tests.strategies.conftest import DropoutLayers, UserModule, assert_same, fit, loader, seeded, weights

STARTS_PROCESSES = True

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"gradient_clip_val": 0.1},
    "clipped by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "accumulated and clipped": {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1},
    "bf16-mixed": {"precision": "bf16-mixed"},
}

ONE_STAGE: dict[str, dict[str, Any]] = {
    "rgc": {"method": "rgc", "num_stages": 1},
    "rgc serial": {"method": "rgc", "num_stages": 1, "mode": "serial"},
    "broadcast": {"method": "broadcast", "num_stages": 1},
    "live": {"method": "live", "num_stages": 1},
    "bp": {"method": "bp"},
}

FAST = {"plain", "accumulated and clipped"}
MATRIX = [
    pytest.param(method, variant, marks=() if method == "rgc" or variant in FAST else pytest.mark.slow)
    for method in ONE_STAGE
    for variant in VARIANTS
]


def rounding(ours: dict[str, Tensor], other: dict[str, Tensor], bound: float) -> None:
    assert ours.keys() == other.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], other[name], rtol=bound, atol=bound)


class TestOneStage:
    """20 steps with a learning-rate schedule; the tests' one thread is every arm's."""

    @pytest.mark.parametrize(("method", "variant"), MATRIX)
    def test_one_stage_equals_the_default_strategy_bit_for_bit(self, make_trainer, method, variant):
        options = {"max_steps": 20, "max_epochs": -1, **VARIANTS[variant]}
        plain = fit(seeded(UserModule), make_trainer("auto", **options))
        strategy = BoundedHorizonStrategy(**ONE_STAGE[method], threads_per_stage=1)
        assert_same(fit(seeded(UserModule), make_trainer(strategy, **options)), plain)

    def test_one_stage_draws_the_random_numbers_of_the_default_strategy(self, make_trainer):
        plain = fit(seeded(DropoutLayers), make_trainer("auto", max_epochs=2))
        strategy = BoundedHorizonStrategy(num_stages=1, threads_per_stage=1)
        assert_same(fit(seeded(DropoutLayers), make_trainer(strategy, max_epochs=2)), plain)

    def test_one_stage_of_our_model_equals_the_default_strategy(self, make_trainer):
        def build() -> L.LightningModule:
            return seeded(ByteTransformer, num_layers=2, num_blocks=1, width=16, num_heads=2, window_bytes=8)

        options = {"max_steps": 20, "gradient_clip_val": 1.0}
        plain = fit(build(), make_trainer("auto", **options))
        strategy = BoundedHorizonStrategy(num_stages=1, threads_per_stage=1)
        assert_same(fit(build(), make_trainer(strategy, **options)), plain)

    @pytest.mark.slow
    def test_one_stage_in_a_process_equals_the_default_strategy_bit_for_bit(self, make_trainer):
        options = {"max_steps": 20, "gradient_clip_val": 0.1, "accumulate_grad_batches": 2, "max_epochs": -1}
        plain = fit(seeded(UserModule), make_trainer("auto", **options))
        strategy = BoundedHorizonStrategy(num_stages=1, backend="processes", threads_per_stage=1)
        assert_same(fit(seeded(UserModule), make_trainer(strategy, **options)), plain)


class TestSeveralStages:
    @pytest.mark.parametrize("clip", [pytest.param(None, marks=pytest.mark.slow), 0.1])
    def test_serial_rgc_follows_live_supervision_for_50_steps_without_lag(self, make_trainer, clip):
        """The two add S readout gradients in another order: 1e-7 a step, which 50 steps of Adam may amplify."""

        def run(alias: str) -> dict[str, Tensor]:
            trainer = make_trainer(alias, max_steps=50, max_epochs=-1, gradient_clip_val=clip)
            return fit(seeded(UserModule), trainer)

        start, live, rgc = weights(seeded(UserModule)), run("live"), run("rgc_serial")
        rounding(rgc, live, 1e-4)
        assert min(float((live[name] - start[name]).abs().max()) for name in start) > 1e-2

    def test_broadcast_and_rgc_differ_in_the_readout_s_teacher(self, make_trainer):
        """After one step the layers agree; the readout of ``broadcast`` learnt from the final stage alone."""
        first = {
            alias: fit(seeded(UserModule), make_trainer(alias, max_steps=1))
            for alias in ("rgc_serial", "broadcast_serial", "live")
        }
        rgc, broadcast, live = first["rgc_serial"], first["broadcast_serial"], first["live"]
        same = [name for name in rgc if torch.equal(rgc[name], broadcast[name])]
        assert same == [name for name in rgc if not name.startswith("readout")]
        rounding(rgc, live, 1e-6)

    def test_stages_learn_from_their_own_loss_alone(self, make_trainer):
        """Oracle: autograd in a loop of our own; plain SGD shows the gradients."""

        class Sgd(UserModule):
            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.1)

        batch = next(iter(loader(shuffle=False)))
        reference = seeded(Sgd)
        hidden, losses = reference.stage_embed(batch), []
        for stage_idx in range(2):
            for layer in reference.layers[2 * stage_idx : 2 * stage_idx + 2]:
                hidden = layer(hidden)
            losses.append(reference.stage_loss(reference.readout(hidden), batch))
            hidden = hidden.detach()
        sum(losses).backward()
        expected = {}
        for name, parameter in reference.named_parameters():
            share = 0.5 if name.startswith("readout") else 1.0
            expected[name] = (parameter - 0.1 * share * parameter.grad).detach()
        strategy = BoundedHorizonStrategy(num_stages=2, mode="serial")
        module = seeded(Sgd)
        make_trainer(strategy, max_steps=1).fit(module, loader(shuffle=False))
        rounding(weights(module), expected, 1e-6)  # the same sums, in fp32

    @pytest.mark.parametrize("variant", VARIANTS)
    def test_bp_groups_follow_the_default_strategy(self, make_trainer, variant):
        """Gradients of two half batches are added: rounding, amplified by Adam where a gradient is near 0."""
        options = {"max_steps": 20, "max_epochs": -1, **VARIANTS[variant]}
        plain = fit(seeded(UserModule), make_trainer("auto", **options))
        strategy = BoundedHorizonStrategy("bp_groups", num_stages=2)
        ours = fit(seeded(UserModule), make_trainer(strategy, **options))
        rounding(ours, plain, 2e-2 if variant == "bf16-mixed" else 1e-3)

    def test_bp_groups_take_a_batch_smaller_than_the_groups(self, make_trainer):
        strategy = BoundedHorizonStrategy("bp_groups", num_stages=4)
        train = loader(num_sequences=7, batch_size=6, shuffle=False)
        plain = fit(seeded(UserModule), make_trainer("auto", max_epochs=2), train)
        rounding(fit(seeded(UserModule), make_trainer(strategy, max_epochs=2), train), plain, 1e-3)

    @pytest.mark.parametrize("method", ["rgc", "broadcast"])
    def test_two_runs_with_pinned_lag_agree_bit_for_bit(self, make_trainer, method):
        def run(mode: str, lag: str) -> dict[str, Tensor]:
            strategy = BoundedHorizonStrategy(method, num_stages=4, mode=mode, lag=lag)
            trainer = make_trainer(strategy, accumulate_grad_batches=2, gradient_clip_val=0.5)
            return fit(seeded(UserModule), trainer)

        first = run("async", "pinned")
        assert_same(run("async", "pinned"), first)
        assert_same(run("serial", "pipeline"), first)
        assert any(not torch.equal(tensor, first[name]) for name, tensor in run("serial", "newest").items())

    def test_consensus_weights_favour_the_final_stage(self, make_trainer):
        """All weight on the final stage is ``broadcast``; uniform weights given as numbers are ``uniform``."""

        def run(method: str, consensus: Any) -> dict[str, Tensor]:
            strategy = BoundedHorizonStrategy(method, num_stages=2, mode="serial", consensus_weights=consensus)
            return fit(seeded(UserModule), make_trainer(strategy, max_steps=10))

        uniform = run("rgc", "uniform")
        assert_same(run("rgc", [2.0, 2.0]), uniform)
        assert_same(run("rgc", [0, 1]), run("broadcast", "uniform"))
        depth = run("rgc", "depth")
        rounding(run("rgc", [1, 2]), depth, 1e-6)
        assert not torch.equal(depth["readout.weight"], uniform["readout.weight"])

    def test_micro_batches_follow_whole_batches(self, make_trainer):
        """A mean over two halves: rounding, amplified by Adam."""

        def run(micro_batches: int) -> dict[str, Tensor]:
            strategy = BoundedHorizonStrategy(num_stages=2, mode="serial", micro_batches=micro_batches)
            return fit(seeded(UserModule), make_trainer(strategy, max_steps=20, gradient_clip_val=0.1))

        rounding(run(2), run(1), 1e-3)

    def test_a_snapshot_every_third_step_is_not_the_newest(self, make_trainer):
        lags: list[int] = []

        class Watch(L.Callback):
            def on_train_batch_end(self, trainer, *args):
                lags.extend(batch.stages[0].lag for batch in trainer.strategy.finished_batches)

        strategy = BoundedHorizonStrategy(num_stages=2, mode="serial", snapshot_every=3)
        fit(seeded(UserModule), make_trainer(strategy, max_steps=7, callbacks=[Watch()]))
        assert lags == [0, 1, 2, 0, 1, 2, 0]

    @pytest.mark.parametrize("alias", ["rgc", pytest.param("broadcast", marks=pytest.mark.slow)])
    def test_training_lowers_the_loss(self, make_trainer, alias):
        module = seeded(UserModule, lr=0.05)
        trainer = make_trainer(alias, max_epochs=6)
        trainer.validate(module, loader(shuffle=False), verbose=False)
        before = float(trainer.callback_metrics["val_loss"])
        fit(module, trainer)
        trainer.validate(module, loader(shuffle=False), verbose=False)
        assert float(trainer.callback_metrics["val_loss"]) < before - 0.1

    @pytest.mark.slow
    def test_serial_stages_in_processes_equal_those_in_threads_bit_for_bit(self, make_trainer):
        def run(backend: str) -> dict[str, Tensor]:
            strategy = BoundedHorizonStrategy(num_stages=2, mode="serial", backend=backend, threads_per_stage=1)
            trainer = make_trainer(strategy, max_epochs=2, accumulate_grad_batches=2, gradient_clip_val=0.5)
            return fit(seeded(DropoutLayers), trainer)

        assert_same(run("processes"), run("threads"))
