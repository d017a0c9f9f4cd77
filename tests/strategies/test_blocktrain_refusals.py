import math
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_blocktrain import BlockTrainStrategy
from lightning_blocktrain.errors import NonFiniteError
from lightning_blocktrain.strategies.block_guard import refuse_scaled_accumulation
from tests.strategies.conftest import TwoBlocks, UserModule, assert_same, fit, loader, seeded, weights


class TestBadInput:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"sync_every": 0}, "sync_every must be at least 1, a whole number; got sync_every=0"),
            ({"replicas": 0}, "replicas must be at least 1"),
            ({"num_blocks": -1}, "num_blocks must be at least 1"),
            ({"interface_every": 0}, "interface_every must be at least 1"),
            ({"network": "moon"}, "network must be a known preset; got network='moon'"),
            ({"deadline_s": math.inf}, "deadline_s"),
            ({"inner_state": "forget"}, "inner_state must be"),
            ({"merge": "median"}, "merge"),
            ({"sync_every": 1.5}, "sync_every must be at least 1, a whole number; got sync_every=1.5"),
            ({"replicas": "two"}, "replicas must be at least 1, a whole number; got replicas='two'"),
            ({"interface_every": True}, "interface_every must be at least 1, a whole number"),
            ({"deadline_s": "1"}, "deadline_s must be finite and above 0; got deadline_s='1'"),
            ({"outer_optimizer": "sgd"}, "outer_optimizer must be an OuterSGD; got outer_optimizer='sgd'"),
        ],
    )
    def test_a_wrong_option_is_refused_at_construction(self, options, message):
        with pytest.raises(ValueError, match=message):
            BlockTrainStrategy(**options)

    def test_an_unknown_option_is_refused_at_construction(self):
        with pytest.raises(TypeError, match="sync_evry"):
            BlockTrainStrategy(sync_evry=3)

    @pytest.mark.parametrize("topology", [{"num_nodes": 2}, {"sync_batchnorm": True}])
    def test_a_topology_that_no_mode_has_is_refused_as_the_trainer_is_built(self, make_trainer, topology):
        with pytest.raises(MisconfigurationException, match=next(iter(topology))):
            make_trainer(**topology)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"replicas": 2}, "replicas is for simulated workers"),
            ({"network": "wan"}, "network is for simulated workers"),
            ({"inner_state": "average"}, "inner_state must be 'keep' or 'reset'"),
        ],
    )
    def test_what_only_simulated_workers_have_is_refused_with_several_devices(self, make_trainer, options, message):
        with pytest.raises(MisconfigurationException, match=message):
            make_trainer(BlockTrainStrategy(**options), devices=2)

    def test_fewer_devices_than_blocks_are_refused_before_a_process_is_started(self, make_trainer):
        with pytest.raises(MisconfigurationException, match="devices must be at least num_blocks; got devices=2"):
            fit(UserModule(), make_trainer(BlockTrainStrategy(num_blocks=4), devices=2))

    def test_a_run_is_joined_with_its_token_and_on_one_device(self, make_trainer, monkeypatch):
        url = "http://127.0.0.1:9"
        with pytest.raises(ValueError, match="needs its token in the environment variable BLOCKTRAIN_TOKEN"):
            make_trainer(BlockTrainStrategy(coordinator=url))
        monkeypatch.setenv("BLOCKTRAIN_TOKEN", "secret")
        with pytest.raises(MisconfigurationException, match="devices must be 1; got devices=2"):
            make_trainer(BlockTrainStrategy(coordinator=url), devices=2)

    @pytest.mark.parametrize(
        ("option", "message"),
        [
            ({"join_timeout_s": 0}, "join_timeout_s must be finite and above 0; got join_timeout_s=0"),
            ({"reconnect_timeout_s": math.inf}, "reconnect_timeout_s must be finite"),
            ({"on_missing_block": "wait"}, "on_missing_block must be 'warn' or 'fail'"),
        ],
    )
    def test_a_wrong_limit_of_waiting_is_refused_at_construction(self, option, message):
        with pytest.raises(ValueError, match=message):
            BlockTrainStrategy(**option)

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

    @pytest.mark.parametrize("prefix", ["none", "frozen"])
    def test_a_loss_that_runs_a_part_of_another_block_is_refused_by_name(self, make_trainer, prefix):
        class Borrowing(TwoBlocks):
            def configure_blocks(self):
                return {**super().configure_blocks(), "prefix": prefix}

            def block_training_step(self, batch, batch_idx, block_idx):
                other = self.layers[2].linear if block_idx == 0 else torch.nn.Identity()
                own = self.layers[2 * block_idx : 2 * block_idx + 2]
                return self._loss(batch, nn.ModuleList([other, *own]))

        with pytest.raises(
            MisconfigurationException, match=r"layers of block 1; got a call of layers.2.linear \(Linear"
        ):
            fit(Borrowing(), make_trainer())

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

    def test_a_module_that_takes_the_loaders_iterator_is_refused(self, make_trainer):
        class Iterating(TwoBlocks):
            def training_step(self, dataloader_iter):
                return super().training_step(next(dataloader_iter)[0], 0)

        with pytest.raises(MisconfigurationException, match="deals out single batches"):
            fit(Iterating(), make_trainer())

    @pytest.mark.parametrize(("scaler", "batches"), [(object(), 1), (None, 4)])
    def test_a_gradient_scaler_or_accumulation_alone_is_fine(self, scaler, batches):
        assert refuse_scaled_accumulation(SimpleNamespace(scaler=scaler, precision="16-mixed"), batches) is None

    def test_a_gradient_scaler_with_accumulation_is_refused(self):
        with pytest.raises(MisconfigurationException, match="accumulate_grad_batches=2 with precision 16-mixed"):
            refuse_scaled_accumulation(SimpleNamespace(scaler=object(), precision="16-mixed"), 2)

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

        with pytest.raises(
            MisconfigurationException, match="got configure_optimizers gave several; put all parameters"
        ):
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
