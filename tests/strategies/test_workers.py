"""What the process of a worker holds of the model: its block and the interface, and the whole after its run."""

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor, nn

from lightning_blocktrain import BlockTrainStrategy
from lightning_blocktrain.coordinator.desk import Desk
from lightning_blocktrain.partition import partition as cut
from lightning_blocktrain.rounds import INTERFACE, Receipt
from lightning_blocktrain.strategies.block_guard import BlockGuard, declared_layout
from lightning_blocktrain.strategies.worker_run import masters_of
from lightning_blocktrain.strategies.workers import SimulatedWorkers
from lightning_blocktrain.transport import Submission, WorkerFacts
from lightning_blocktrain.transport.http import HttpTransport
from tests.strategies.conftest import TwoBlocks, assert_same, loader, seeded
from tests.strategies.test_worker_run import SEED, Fleet, OnFrozenPrefix, ThreeBlocks, batches
from tests.transport.lines import served


class NormalisedBlocks(ThreeBlocks):
    """Every layer begins with batch norm: it writes to its buffers, and counts in a tensor that is not floating."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.linear = nn.Sequential(nn.BatchNorm1d(5), layer.linear)


def one_round(fleet: Fleet) -> None:
    for w, batch in enumerate(batches(3)):
        fleet.step(w, batch)
    for run in fleet.runs:
        run.send_round()
    for run in fleet.runs:
        run.take_round()


def mem_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of memory behind tensors, shared memory once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def value_bytes(module: nn.Module, names: Iterable[str]) -> int:
    state = module.state_dict()
    return sum(state[name].numel() * state[name].element_size() for name in names)


def test_worker_of_one_block_holds_a_base_and_a_replica_of_its_block_and_the_interface() -> None:
    fleet = Fleet([0, 1, 2])
    run, module = fleet.runs[1], fleet.modules[1]
    mine = [*fleet.cut.block_names[1], *fleet.cut.interface_names]
    own = value_bytes(module, mine)
    held = [*module.parameters(), *run.workers.merged.values(), *run.worker.local.values()]
    num_released = sum(len(fleet.cut.block_names[block_idx]) for block_idx in (0, 2))
    assert mem_bytes(held) == 2 * own + 4 * num_released
    assert run.workers.merged.keys() == run.worker.local.keys() == set(mine)


def test_released_tensors_keep_object_shape_and_flag_and_are_nan() -> None:
    fleet = Fleet([0, 1, 2])
    module, like = fleet.modules[1], seeded(ThreeBlocks)
    for name in (*fleet.cut.block_names[0], *fleet.cut.block_names[2]):
        released, fresh = module.get_parameter(name), like.get_parameter(name)
        assert (released.shape, released.dtype, released.requires_grad) == (fresh.shape, fresh.dtype, True)
        assert released.isnan().all()
    in_optimizer = {id(p) for group in fleet.optimizers[1].param_groups for p in group["params"]}
    assert in_optimizer == {id(p) for p in module.parameters()}


def test_worker_on_a_frozen_prefix_holds_the_blocks_before_it_in_the_version_of_the_round() -> None:
    fleet = Fleet([0, 1, 2], OnFrozenPrefix)
    one_round(fleet)
    assert fleet.ledgers["block0"].version == 1
    for run in fleet.runs[1:]:
        before = range(run.worker.block_idx)
        assert run.workers.frozen.versions == dict.fromkeys(before, 1)
        mine = fleet.cut.block_names[run.worker.block_idx]
        others = {name for names in fleet.cut.block_names for name in names} - set(mine)
        assert run.workers.released == others
        masters = [fleet.ledgers[f"block{b}"].master for b in before]
        num_values = sum(tensor.numel() for master in masters for tensor in master.values())
        assert run.workers.frozen.mem_bytes == 2 * num_values


def test_rank_zero_that_assembles_releases_nothing() -> None:
    fleet = Fleet([0, 1, 2])
    assert not fleet.runs[0].workers.released
    assert fleet.runs[0].workers.merged.keys() == fleet.modules[0].state_dict().keys()


@pytest.mark.parametrize("make", [ThreeBlocks, NormalisedBlocks])
def test_loss_that_runs_a_released_block_is_refused_by_name(make: type[ThreeBlocks]) -> None:
    fleet = Fleet([0, 1, 2], make)
    module = fleet.modules[1]
    guard = BlockGuard(module, cut(module, declared_layout(module), 3), fleet.runs[1].workers.tensors)
    [batch] = batches(1)
    rule = "the loss of block 1 may not run the layers of block 2"
    with guard.watch(1), pytest.raises(MisconfigurationException, match=rule):
        module._loss(batch, module.layers[1:])
    guard.remove()


def test_frozen_parameters_are_released_only_where_nobody_uses_the_module_afterwards() -> None:
    for for_good in (False, True):
        module = seeded(ThreeBlocks)
        module.layers[2].linear.weight.requires_grad_(False)
        before = module.layers[2].linear.weight.detach().clone()
        parts = cut(module, declared_layout(module), 3)
        SimulatedWorkers(module, parts, 0, SEED, {1: 1}, {1}, for_good)
        assert bool(module.layers[2].linear.weight.isnan().all()) is for_good
        assert for_good or torch.equal(module.layers[2].linear.weight, before)
        assert module.layers[2].linear.bias.isnan().all()


def test_update_is_sent_from_the_replica_itself() -> None:
    fleet = Fleet([0, 1, 2])
    run, line = fleet.runs[1], fleet.lines[1]
    sent: dict[str, Mapping[str, Tensor]] = {}
    submit = line.submit

    def recording(entry: str, submission: Submission) -> Receipt:
        sent[entry] = submission.tensors
        return submit(entry, submission)

    line.submit = recording  # type: ignore[method-assign]
    [batch] = batches(1)
    fleet.step(1, batch)
    run.send_round()
    assert sent.keys() == {"block1", INTERFACE}
    tensors = {name: tensor for params in sent.values() for name, tensor in params.items()}
    assert {name: t.data_ptr() for name, t in tensors.items()} == {n: t.data_ptr() for n, t in run.worker.local.items()}


def test_masters_of_a_module_take_no_memory() -> None:
    module = seeded(ThreeBlocks)
    masters = masters_of(module, cut(module, declared_layout(module), 3))
    copies = [tensor for kept in masters.values() for tensor in kept.values()]
    assert mem_bytes([*copies, *module.parameters()]) == mem_bytes(module.parameters())


@pytest.mark.parametrize("make", [ThreeBlocks, NormalisedBlocks])
@pytest.mark.parametrize("stopped", [False, True])
def test_module_is_whole_after_the_run_with_the_newest_masters(make: type[ThreeBlocks], stopped: bool) -> None:
    fleet = Fleet([0, 1, 2], make)
    one_round(fleet)
    if stopped:
        fleet.lines[0].stop("enough")
    fleet.runs[1].make_whole()
    assert_same(dict(fleet.modules[1].state_dict()), fleet.masters())
    assert not fleet.runs[1].workers.released


def test_module_is_nan_and_says_so_where_the_coordinator_is_gone() -> None:
    fleet = Fleet([0, 1, 2])
    fleet.lines[1].close()
    with pytest.warns(UserWarning, match="does not hold block0, block2: .*The transport is closed.*from a checkpoint"):
        fleet.runs[1].make_whole()
    module, whole = fleet.modules[1], seeded(ThreeBlocks)
    assert module.layers[0].linear.weight.isnan().all()
    assert not module.layers[1].linear.weight.isnan().any()
    module.load_state_dict(whole.state_dict())
    assert_same(dict(module.state_dict()), dict(whole.state_dict()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fleet.runs[1].make_whole()


def test_run_that_lost_its_line_fails_on_the_released_blocks_not_silently() -> None:
    fleet = Fleet([0, 1, 2])
    run = fleet.runs[2]
    run.detach()
    with pytest.warns(UserWarning, match="block0, block1: .*the line is closed"):
        run.make_whole()
    [batch] = batches(1)
    assert fleet.modules[2].training_step(batch, 0).isnan()


class BuiltLate(TwoBlocks):
    """Builds its layers in ``configure_model``, as modules do that are sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList()

    def configure_model(self) -> None:
        if not self.layers:
            self.layers = TwoBlocks().layers


class SeesMemory(L.Callback):
    """Notes which parameters are NaN once training runs."""

    def __init__(self) -> None:
        self.released: set[str] = set()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        self.released = {name for name, p in pl_module.named_parameters() if p.isnan().all()}


@pytest.mark.parametrize("make", [TwoBlocks, BuiltLate])
def test_process_that_joins_trains_one_block_and_validates_all_after_the_fit(
    make: type[TwoBlocks], joining: None, make_trainer: Any
) -> None:
    desk, seen = Desk("run", "token"), SeesMemory()
    with served(desk) as server:
        strategy = BlockTrainStrategy(
            coordinator=server.url, sync_every=2, deadline_s=0.5, interface_every=1000, join_timeout_s=30.0
        )
        trainer = make_trainer(strategy, max_steps=4, callbacks=[seen, Companion(server.url)])
        module = seeded(make)
        trainer.fit(module, loader())
        [scores] = trainer.validate(module, loader(shuffle=False), verbose=False)
    masters = {name: tensor for ledger in desk.service.ledgers.values() for name, tensor in ledger.master.items()}
    assert_same(dict(module.state_dict()), masters)
    assert seen.released == {n for n, _ in module.named_parameters() if n.startswith(("layers.2", "layers.3"))}
    assert scores["val_loss"] > 0
    assert all(parameter.requires_grad for parameter in module.parameters())


@pytest.fixture
def joining(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process know the secret of a run; whoever joins one makes itself silent as a rank that is not 0."""
    monkeypatch.setenv("BLOCKTRAIN_TOKEN", "token")
    monkeypatch.setenv("BLOCKTRAIN_RUN_ID", "run")
    monkeypatch.setattr(rank_zero_only, "rank", 0)


class Companion(L.Callback):
    """Takes the other block of the run, and does nothing for it."""

    def __init__(self, url: str) -> None:
        self.line = HttpTransport(url, "run", "token")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        welcome = self.line.join(WorkerFacts())
        assert welcome.block_idx == 1

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.line.close()


def test_fit_that_fails_does_not_leave_a_module_that_looks_sound(joining: None, make_trainer: Any) -> None:

    class Failing(TwoBlocks):
        def block_training_step(self, *args: Any) -> Tensor:
            raise ZeroDivisionError("the user's own fault")

    module = seeded(Failing)
    with served(Desk("run", "token")) as server:
        trainer = make_trainer(BlockTrainStrategy(coordinator=server.url, join_timeout_s=30.0))
        with pytest.raises(ZeroDivisionError), pytest.warns(UserWarning, match="does not hold block1"):
            trainer.fit(module, loader())
    assert module.layers[3].linear.weight.isnan().all()
    assert not module.layers[0].linear.weight.isnan().any()
