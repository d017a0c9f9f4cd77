"""Bad input gets one clear error: at construction, as the Trainer is built, in setup, or with the first batch."""

import math
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn

from lightning_blocktrain import BoundedHorizonStrategy
from lightning_blocktrain.models import DiffusionBlocks
from tests.strategies.conftest import UserModule, fit, loader


def broken(**attributes: Any) -> type[UserModule]:
    """Return a ``UserModule`` class with other attributes, named Broken."""
    return type("Broken", (UserModule,), attributes)


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"method": "sgd"}, "method must be known; got method='sgd'; choose one of 'bp', 'live'"),
            ({"mode": "parallel"}, "mode must be known; got mode='parallel'"),
            ({"backend": "mpi"}, "backend must be known; got backend='mpi'"),
            ({"lag": "none"}, "lag must be known; got lag='none'"),
            ({"ring_slots": 0}, "ring_slots must be at least 1, a whole number; got ring_slots=0"),
            ({"num_stages": 0}, "num_stages must be at least 1"),
            ({"num_stages": 2.0}, "num_stages must be at least 1, a whole number; got num_stages=2.0"),
            ({"threads_per_stage": 0}, "threads_per_stage must be at least 1"),
            ({"snapshot_every": True}, "snapshot_every must be at least 1, a whole number"),
            ({"micro_batches": "2"}, "micro_batches must be at least 1, a whole number; got micro_batches='2'"),
            ({"clip": -1.0}, "clip must be finite and above 0; got clip=-1.0"),
            ({"clip": math.nan}, "clip must be finite and above 0; got clip=nan"),
            ({"stage_timeout_s": math.inf}, "stage_timeout_s must be finite and above 0"),
            ({"stage_split": "odd"}, "stage_split must be known; got stage_split='odd'"),
            ({"stage_split": [2, 0]}, r"stage_split must be 'even', 'auto' or the number .* got stage_split=\[2, 0\]"),
            ({"stage_split": []}, "stage_split must be 'even', 'auto' or the number"),
            ({"stage_split": [2, 2], "num_stages": 4}, "stage_split must have one number per stage"),
            ({"consensus_weights": "last"}, "consensus_weights must be"),
            ({"credit": "all"}, "credit must be known; got credit='all'; choose one of 'local', 'next_stage'"),
            ({"schedule": "bp"}, "schedule must be known; got schedule='bp'"),
            ({"switch_frac": 0.5}, "schedule='local' has no switch"),
            ({"method": "bp", "credit": "next_stage"}, "its layers learn from the final loss already"),
            ({"method": "broadcast", "consensus_weights": "depth"}, "has no consensus to weigh"),
            ({"method": "live", "mode": "async"}, "options must go together: method='live' does not overlap batches"),
            ({"method": "live", "backend": "processes"}, "shares one gradient in one process"),
            ({"method": "bp_groups", "micro_batches": 2}, "its groups cut each batch already"),
            ({"method": "bp", "stage_split": [4]}, "method='bp' has no stages"),
            ({"mode": "serial", "stage_split": "auto"}, "only stages that run at the same time"),
            ({"lag": "pinned", "snapshot_every": 2}, "it needs method 'rgc' or 'broadcast' and snapshot_every=1"),
        ],
    )
    def test_a_wrong_option_is_refused_at_construction(self, options, message):
        with pytest.raises(ValueError, match=message):
            BoundedHorizonStrategy(**options)

    def test_an_unknown_option_is_refused_at_construction(self):
        with pytest.raises(TypeError, match="ring_slot"):
            BoundedHorizonStrategy(ring_slot=3)


class TestTrainers:
    @pytest.mark.parametrize(
        ("topology", "message"),
        [
            ({"num_nodes": 2}, "num_nodes must be 1; got num_nodes=2; use strategy='blocktrain'"),
            ({"sync_batchnorm": True}, "sync_batchnorm must be off"),
        ],
    )
    def test_a_topology_that_stages_cannot_honour_is_refused_as_the_trainer_is_built(
        self, make_trainer, topology, message
    ):
        with pytest.raises(MisconfigurationException, match=message):
            make_trainer("rgc", **topology)

    def test_an_accelerator_is_refused_as_the_trainer_is_built(self, make_trainer, monkeypatch):
        """A machine without one can only pretend that Lightning found two."""
        gpus = [torch.device("cuda", 0), torch.device("cuda", 1)]
        monkeypatch.setattr(
            BoundedHorizonStrategy, "parallel_devices", property(lambda self: gpus, lambda self, devices: None), False
        )
        with pytest.raises(MisconfigurationException, match="run on the CPU of one host; got accelerator='cuda'; use"):
            make_trainer("rgc")

    def test_devices_that_disagree_with_num_stages_are_refused_as_the_trainer_is_built(self, make_trainer):
        message = "must agree; got num_stages=4, devices=2; give one of them"
        with pytest.raises(MisconfigurationException, match=message):
            make_trainer(BoundedHorizonStrategy(num_stages=4), devices=2)

    def test_devices_that_disagree_with_a_split_are_refused(self, make_trainer):
        with pytest.raises(MisconfigurationException, match="must agree; got num_stages=3, devices=2"):
            fit(UserModule(), make_trainer(BoundedHorizonStrategy(stage_split=[1, 1, 2]), devices=2))

    @pytest.mark.parametrize("precision", ["16-true", "bf16-true", "64-true"])
    def test_a_precision_that_changes_the_default_type_is_refused_for_threads(self, make_trainer, precision):
        message = f"which stages in threads share; got precision={precision}; use 'bf16-mixed', backend='processes' or"
        for alias in ("rgc", "bp_groups"):
            with pytest.raises(MisconfigurationException, match=message):
                fit(UserModule(), make_trainer(alias, precision=precision))

    def test_weight_averaging_is_refused_while_batches_overlap(self, make_trainer):
        message = "may not read the weights of every batch while stages change them; got WeightAveraging; use mode='se"
        with pytest.raises(MisconfigurationException, match=message):
            fit(UserModule(), make_trainer("rgc", callbacks=[WeightAveraging()]))


class TestLayers:
    @pytest.mark.parametrize(
        ("options", "devices", "message"),
        [
            ({"num_stages": 5}, 1, "num_stages must not exceed the number of layers; got num_stages=5, num_layers=4"),
            ({}, 6, "num_stages must not exceed the number of layers; got num_stages=6, num_layers=4; use at most 4"),
            ({"num_stages": 3}, 1, "num_stages must divide num_layers .* choose one of 1, 2, 4, or stage_split='auto'"),
            ({"stage_split": [3, 2]}, 1, r"must add up to num_layers; got stage_split=\[3, 2\], num_layers=4"),
            ({"consensus_weights": [1, 1, 1]}, 1, "one finite number of at least 0 per stage.* for num_stages=4"),
            ({"consensus_weights": [1, 0], "num_stages": 2}, 1, "per stage, the final one above 0; got"),
        ],
    )
    def test_stages_that_do_not_fit_the_layers_are_refused_in_setup(self, make_trainer, options, devices, message):
        with pytest.raises((MisconfigurationException, ValueError), match=message):
            fit(UserModule(), make_trainer(BoundedHorizonStrategy(**options), devices=devices))

    def test_uneven_stages_need_no_divisor_under_auto(self, make_trainer):
        trainer = make_trainer(BoundedHorizonStrategy(num_stages=3, stage_split="auto"), max_steps=1)
        fit(UserModule(), trainer)
        assert trainer.global_step == 1

    def test_tied_embedding_and_readout_are_refused_by_name(self, make_trainer):
        module = UserModule()
        module.readout.weight = module.embed.weight
        message = r"got tied embed.weight = readout.weight; untie embedding and readout, or train with one stage"
        with pytest.raises(MisconfigurationException, match=message):
            fit(module, make_trainer("rgc"))

    @pytest.mark.parametrize("strategy", [BoundedHorizonStrategy(num_stages=1), "bp_groups"])
    def test_tied_embedding_and_readout_train_where_nothing_is_cut(self, make_trainer, strategy):
        module = UserModule()
        module.readout.weight = module.embed.weight
        fit(module, make_trainer(strategy, max_steps=2))
        assert module.readout.weight is module.embed.weight

    def test_tied_layers_of_two_stages_are_refused_by_name(self, make_trainer):
        module = UserModule()
        module.layers[3].linear.weight = module.layers[0].linear.weight
        with pytest.raises(MisconfigurationException, match=r"layers.0.linear.weight = layers.3.linear.weight"):
            fit(module, make_trainer("rgc"))

    def test_a_layer_that_takes_two_tensors_is_refused_with_the_way_out(self, make_trainer):
        module = UserModule()
        module.layers[2] = nn.Bilinear(6, 6, 6)
        message = r"layer 2 \(Bilinear\) must take one tensor; got forward\(input1, input2\); .* stage_kwargs"
        with pytest.raises(MisconfigurationException, match=message):
            fit(module, make_trainer("rgc"))

    def test_a_layer_that_does_not_take_the_keywords_is_refused(self, make_trainer):
        module = broken(stage_kwargs=lambda self, batch, hidden: {"mask": torch.ones(5)})()
        message = r"layer 0 \(Residual\) must take one tensor and the keywords of stage_kwargs; got .*mask"
        with pytest.raises(MisconfigurationException, match=message):
            fit(module, make_trainer("rgc"))

    @pytest.mark.parametrize("output", [lambda x: {"hidden": x}, lambda x: x.long(), lambda x: (None, x)])
    def test_a_layer_that_returns_no_tensor_of_numbers_is_refused(self, make_trainer, output):
        class Odd(nn.Module):
            def forward(self, x):
                return output(x)

        module = UserModule()
        module.layers[1] = Odd()
        with pytest.raises(MisconfigurationException, match=r"layer 1 \(Odd\) must return one floating-point tensor"):
            fit(module, make_trainer("rgc"))


class TestModules:
    @pytest.mark.parametrize(
        ("hook", "form"),
        [
            ("configure_blocks", r"configure_blocks\(self\)"),
            ("stage_embed", r"stage_embed\(self, batch\)"),
            ("stage_loss", r"stage_loss\(self, logits, batch\)"),
        ],
    )
    def test_a_module_without_a_hook_is_refused_with_its_signature(self, make_trainer, hook, form):
        with pytest.raises(MisconfigurationException, match=rf"{form}, which returns .* got Broken without {hook}"):
            fit(broken(**{hook: None})(), make_trainer("rgc"))

    def test_a_plain_lightning_module_is_told_the_first_hook(self, make_trainer):
        with pytest.raises(MisconfigurationException, match="configure_blocks"):
            make_trainer("rgc").fit(BoringModel())

    def test_a_module_of_separate_blocks_is_sent_to_the_right_strategy(self, make_trainer):
        module = DiffusionBlocks(num_layers=2, num_blocks=2, width=16, num_heads=2, window_bytes=8)
        message = "the blocks of this module have inputs of their own; got DiffusionBlocks; use strategy='blocktrain'"
        with pytest.raises(MisconfigurationException, match=message):
            make_trainer("rgc").fit(module, loader())

    def test_manual_optimization_is_refused(self, make_trainer):
        module = UserModule()
        module.automatic_optimization = False
        with pytest.raises(MisconfigurationException, match="automatic optimization"):
            fit(module, make_trainer("rgc"))

    def test_a_module_that_takes_the_loaders_iterator_is_refused(self, make_trainer):
        module = broken(training_step=lambda self, dataloader_iter: None)()
        with pytest.raises(MisconfigurationException, match=r"training_step must take batch; got .*dataloader_iter"):
            fit(module, make_trainer("rgc"))

    @pytest.mark.parametrize("hook", ["configure_gradient_clipping", "backward"])
    def test_an_overridden_hook_that_stages_do_not_call_is_refused(self, make_trainer, hook):
        module = broken(**{hook: lambda self, *args, **options: None})()
        with pytest.raises(MisconfigurationException, match=f"{hook} must not be overridden"):
            fit(module, make_trainer("rgc"))

    @pytest.mark.parametrize(
        ("embed", "message"),
        [
            (
                lambda self, batch: batch[0],
                "stage_embed must return one floating-point tensor; got a tensor of torch.i",
            ),
            (lambda self, batch: (self.embed(batch[0]),), "stage_embed must return one floating-point tensor; got tup"),
        ],
    )
    def test_an_embedding_that_is_not_one_tensor_is_refused(self, make_trainer, embed, message):
        with pytest.raises(MisconfigurationException, match=message):
            fit(broken(stage_embed=embed)(), make_trainer("rgc"))

    @pytest.mark.parametrize(
        "loss",
        [
            lambda self, logits, batch: F.cross_entropy(logits.flatten(0, -2), batch[1].flatten(), reduction="none"),
            lambda self, logits, batch: {"nll": logits.mean()},
            lambda self, logits, batch: None,
        ],
        ids=["per sample", "without loss", "none"],
    )
    def test_a_loss_that_is_not_a_scalar_is_refused(self, make_trainer, loss):
        with pytest.raises(MisconfigurationException, match="stage_loss must return a scalar loss, or a mapping"):
            fit(broken(stage_loss=loss)(), make_trainer("rgc"))

    @pytest.mark.parametrize("alias", ["rgc", "rgc_serial"])
    def test_a_loss_that_trains_another_stage_s_parameter_is_refused_by_name(self, make_trainer, alias):
        def loss(self, logits, batch):
            return F.cross_entropy(logits.flatten(0, -2), batch[1].flatten()) + self.embed.weight.square().mean()

        message = r"the loss of stage \d may train its own layers and the readout only; got a gradient in embed.weight"
        with pytest.raises(MisconfigurationException, match=message):
            fit(broken(stage_loss=loss)(), make_trainer(alias))

    def test_a_layer_parameter_without_gradient_is_refused_by_name(self, make_trainer):
        module = UserModule()
        module.layers[2].spare = nn.Parameter(torch.zeros(3))
        with pytest.raises(
            MisconfigurationException, match=r"every parameter of its layers; got no gradient in layers"
        ):
            fit(module, make_trainer("rgc"))

    def test_keywords_with_a_trainable_parameter_are_refused(self, make_trainer):
        module = broken(stage_kwargs=lambda self, batch, hidden: {"scale": self.embed.weight * 2})()
        with pytest.raises(
            MisconfigurationException, match=r"stage_kwargs may not use trainable parameters.* in scale"
        ):
            fit(module, make_trainer("rgc"))

    def test_a_stage_that_logs_is_told_to_return_its_values(self, make_trainer):
        """An alias has no Trainer; Lightning would otherwise log under the hook that the driver is in."""

        def loss(self, logits, batch):
            value = F.cross_entropy(logits.flatten(0, -2), batch[1].flatten())
            self.log("mine", value)
            return value

        module, trainer = broken(stage_loss=loss)(), make_trainer("rgc", max_steps=2)
        with pytest.warns(UserWarning, match="self.log"):
            fit(module, trainer)
        assert "mine" not in trainer.callback_metrics

    @pytest.mark.parametrize("alias", ["rgc", "bp_groups"])
    @pytest.mark.parametrize("before", [True, False])
    def test_a_parameter_frozen_or_unfrozen_inside_a_fit_is_refused_by_name(self, make_trainer, before, alias):
        class Toggle(L.Callback):
            def on_train_batch_end(self, trainer, pl_module, *args):
                pl_module.embed.requires_grad_(not before)

        module = UserModule()
        module.embed.requires_grad_(before)
        with pytest.raises(MisconfigurationException, match=r"requires_grad changed of embed\.weight"):
            fit(module, make_trainer(alias, callbacks=[Toggle()]))


class TestOptimizers:
    def test_lbfgs_is_refused(self, make_trainer):
        module = broken(configure_optimizers=lambda self: torch.optim.LBFGS(self.parameters()))()
        with pytest.raises(MisconfigurationException, match="must step without a closure; got LBFGS; use for example"):
            fit(module, make_trainer("rgc"))

    def test_several_optimizers_are_refused(self, make_trainer):
        def two(self):
            return [torch.optim.SGD(self.embed.parameters(), 0.1), torch.optim.SGD(self.layers.parameters(), 0.1)]

        with pytest.raises(
            MisconfigurationException, match=r"exactly one automatic optimizer.* got .* gave several; put all"
        ):
            fit(broken(configure_optimizers=two)(), make_trainer("rgc"))

    def test_no_optimizer_is_refused(self, make_trainer):
        with pytest.raises(MisconfigurationException, match=r"exactly one automatic optimizer.* got .* gave 0"):
            fit(broken(configure_optimizers=lambda self: None)(), make_trainer("rgc"))

    def test_parameters_that_no_group_holds_stay(self, make_trainer):
        def layers_alone(self):
            return torch.optim.SGD(self.layers.parameters(), lr=0.1)

        module = broken(configure_optimizers=layers_alone)()
        before = module.readout.weight.detach().clone()
        fit(module, make_trainer("rgc", max_steps=2))
        assert torch.equal(module.readout.weight, before)


def test_teardown_before_connect_and_twice_is_harmless():
    strategy = BoundedHorizonStrategy()
    L.Trainer(strategy=strategy, accelerator="cpu", logger=False, enable_checkpointing=False)
    strategy.teardown()
    strategy.teardown()
    assert strategy.accounts == () and list(strategy.finished_batches) == []
