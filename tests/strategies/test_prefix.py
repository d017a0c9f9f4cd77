"""The frozen prefix: lent layer by layer, as old as the terms say, and never trained."""

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_blocktrain import BlockTrainStrategy, RoundMonitor
from lightning_blocktrain.coordinator.desk import Desk
from lightning_blocktrain.coordinator.storage import Storage
from lightning_blocktrain.errors import TransportError
from lightning_blocktrain.partition import partition as cut
from lightning_blocktrain.rounds import Verdict
from lightning_blocktrain.rounds.codecs import Codec
from lightning_blocktrain.rounds.values import decode_values, encode_values
from lightning_blocktrain.strategies.block_guard import declared_layout
from lightning_blocktrain.strategies.frozen_blocks import FrozenBlocks
from lightning_blocktrain.strategies.workers import SimulatedWorkers, trained_tensors
from tests.strategies.conftest import (
    RecordingLogger,
    Residual,
    TwoBlocks,
    UserModule,
    assert_same,
    fit,
    loader,
    seeded,
    weights,
)
from tests.strategies.test_worker_run import RULES, Fleet, OnFrozenPrefix, OnFrozenStem, batches, train_fleet
from tests.transport.lines import served

BF16, INT8, FP32 = Codec("bf16"), Codec("int8", block=16), Codec("fp32")


class Stacked(UserModule):
    """Six layers in three blocks; a block reads the frozen layers and the frozen embedding before it."""

    forgets_no_grad = False

    def __init__(self, num_layers: int = 6, **options: Any) -> None:
        super().__init__(num_layers, **options)

    def configure_blocks(self) -> Mapping[str, Any]:
        return {**super().configure_blocks(), "num_blocks": 3, "prefix": "frozen", "stem": self.embed}

    def block_training_step(self, batch: list[Tensor], batch_idx: int, block_idx: int) -> Tensor:
        loss = self.block_loss(batch, block_idx)
        self.log("local", loss)
        return loss

    def features(self, batch: list[Tensor], block_idx: int) -> Tensor:
        hidden = F.dropout(self.embed(batch[0]), self.dropout, self.training)
        for layer in self.layers[: 2 * block_idx]:
            hidden = layer(hidden)
        return hidden

    def block_loss(self, batch: list[Tensor], block_idx: int) -> Tensor:
        with torch.set_grad_enabled(block_idx == 0 or self.forgets_no_grad):
            hidden = self.features(batch, block_idx)
        for layer in self.layers[2 * block_idx : 2 * block_idx + 2]:
            hidden = layer(hidden)
        return F.cross_entropy(self.readout(hidden).flatten(0, -2), batch[1].flatten())


class Normalised(Residual):
    """Batch norm, which counts and writes to its buffers, and a table that no checkpoint holds."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("table", torch.linspace(0.9, 1.1, width), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x)) * self.table


class StackedNorms(Stacked):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.layers = nn.ModuleList(Normalised(6) for _ in range(6))


class Lent:
    """A module with the workers of a process in front of it, and copies of what the last block, or another, reads."""

    def __init__(
        self,
        make: Callable[[], L.LightningModule] = Stacked,
        codec: Codec = FP32,
        alone: bool = True,
        block_idx: int = 2,
    ) -> None:
        self.module = seeded(make)
        self.like = seeded(make)
        self.parts = cut(self.module, declared_layout(self.module), 3)
        read = self.parts.read_by(block_idx)
        masters = {b: {n: self.like.state_dict()[n] for n in self.parts.block_names[b]} for b in read}
        options = {"block_of": {block_idx: block_idx}, "kept_blocks": {block_idx}} if alone else {}
        self.workers = SimulatedWorkers(self.module, self.parts, 1, 3, **options)
        for b, master in masters.items():
            self.workers.frozen.take_values(b, 0, codec, master)
        self.worker = next(worker for worker in self.workers if worker.block_idx == block_idx)
        self.optimizer = torch.optim.AdamW(self.module.parameters())
        self.names = [name for b in read for name in self.parts.block_names[b]]

    def decoded(self, codec: Codec) -> L.LightningModule:
        """Return a module that holds the copies."""
        state = {name: self.like.state_dict()[name] for name in self.names}
        self.like.load_state_dict(decode_values(codec, encode_values(codec, state), state), strict=False)
        return self.like

    def acting(self) -> Any:
        return self.workers.acting(self.worker, self.optimizer)

    def wide(self) -> set[str]:
        """Return the parameters of the prefix that hold values at this moment."""
        parameters = dict(self.module.named_parameters())
        return {n for n in self.names if n in parameters and not parameters[n].isnan().any()}


@pytest.fixture
def batch() -> list[Tensor]:
    return next(batches(1))


# Lending


@pytest.mark.parametrize("alone", [True, False])
def test_prefix_one_layer_at_a_time_holds_values_and_none_between_calls(alone: bool, batch: list[Tensor]) -> None:
    lent = Lent(alone=alone)
    seen: dict[str, set[str]] = {}
    for name, layer in [("embed", lent.module.embed), *((f"layers.{n}", lent.module.layers[n]) for n in range(4))]:
        layer.register_forward_hook(lambda *_, name=name: None)
        layer.register_forward_pre_hook(lambda *_, name=name: seen.update({name: lent.wide()}))
    with lent.acting():
        assert lent.wide() == set()
        lent.module.block_loss(batch, 2).backward()
        assert lent.wide() == set()
    assert seen == {
        "embed": {"embed.weight"},
        **{f"layers.{n}": {f"layers.{n}.linear.weight", f"layers.{n}.linear.bias"} for n in range(4)},
    }
    assert (lent.wide() == set()) is alone  # where all workers live here, the module shows the masters again


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("codec", [FP32, BF16, INT8], ids=["fp32", "bf16", "int8"])
def test_prefix_features_are_those_of_the_decoded_masters(alone: bool, codec: Codec, batch: list[Tensor]) -> None:
    lent = Lent(StackedNorms, codec, alone)
    with torch.no_grad():
        expected = lent.decoded(codec).features(batch, 2)
        with lent.acting():
            found = lent.module.features(batch, 2)
    assert torch.equal(found, expected)


def test_prefix_buffers_are_lent_as_copies_and_what_nobody_trains_stays(batch: list[Tensor]) -> None:
    lent = Lent(StackedNorms)
    first = lent.module.layers[0]
    with lent.acting():
        lent.module.block_loss(batch, 2)
        assert first.norm.num_batches_tracked == 1
        moved = first.norm.running_mean.clone()
    assert moved.abs().sum() > 0
    with lent.acting():
        assert not first.norm.running_mean.any() and first.norm.num_batches_tracked == 0
    assert first.norm.running_mean.isnan().all()
    assert torch.equal(first.table, lent.like.layers[0].table)


def test_prefix_frozen_parameters_stay_though_nobody_uses_the_module_afterwards(batch: list[Tensor]) -> None:
    module = seeded(Stacked)
    module.layers[0].linear.weight.requires_grad_(False)
    before = module.layers[0].linear.weight.detach().clone()
    parts = cut(module, declared_layout(module), 3)
    SimulatedWorkers(module, parts, 0, 3, {1: 1}, {1}, for_good=True)
    assert torch.equal(module.layers[0].linear.weight, before)
    assert module.layers[0].linear.bias.isnan().all()


class CallsTwice(Stacked):
    def features(self, batch: list[Tensor], block_idx: int) -> Tensor:
        return self.layers[0](super().features(batch, block_idx)) if block_idx else super().features(batch, block_idx)


class CallsInside(Stacked):
    """Runs a submodule of a frozen layer on its own, and a layer inside another one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].register_forward_hook(lambda layer, args, output: self.layers[1].linear(output))
        self.layers[2].register_forward_hook(lambda layer, args, output: self.layers[3](output))


class Compiled(Stacked):
    def __init__(self) -> None:
        super().__init__()
        self.layers[0] = torch.compile(self.layers[0], backend="eager")


class CompiledInPlace(Stacked):
    def __init__(self) -> None:
        super().__init__()
        self.layers[0].compile(backend="eager")


@pytest.mark.parametrize("make", [CallsTwice, CallsInside, Compiled, CompiledInPlace])
def test_prefix_layers_may_be_called_in_any_way(make: type[Stacked], batch: list[Tensor]) -> None:
    lent = Lent(make)
    with torch.no_grad():
        expected = lent.like.features(batch, 2)
    for _ in range(2):
        with lent.acting(), torch.no_grad():
            assert torch.equal(lent.module.features(batch, 2), expected)
            assert lent.wide() == set()


def test_prefix_layer_that_raises_is_released_and_runs_again(batch: list[Tensor]) -> None:
    lent = Lent()
    with lent.acting(), torch.no_grad():
        with pytest.raises(RuntimeError, match="shapes"):
            lent.module.layers[1](torch.zeros(2, 7))
        assert lent.wide() == set()
        assert torch.equal(lent.module.features(batch, 2), lent.like.features(batch, 2))
    with pytest.raises(ZeroDivisionError), lent.acting():
        lent.module.layers[1].linear.register_forward_hook(lambda *_: 1 // 0)
        lent.module.layers[1](torch.zeros(2, 6))
    assert lent.wide() == set()


def test_prefix_message_of_another_model_is_refused() -> None:
    lent = Lent()
    other = {name: torch.zeros(2) for name in lent.names[:3]}
    with pytest.raises(ValueError, match=r"embed\.weight must have shape"):
        lent.workers.frozen.take_values(0, 1, BF16, other)


def test_prefix_without_anything_new_is_only_a_newer_version() -> None:
    lent = Lent()
    before = lent.workers.frozen.mem_bytes
    lent.workers.frozen.take_values(0, 7, FP32, {})
    assert lent.workers.frozen.versions == {0: 7, 1: 0}
    assert lent.workers.frozen.mem_bytes == before


@pytest.mark.parametrize(("codec", "most"), [(BF16, 2.0), (Codec("int8"), 1.2), (FP32, 4.0)])
def test_prefix_bytes_are_those_of_its_codec(codec: Codec, most: float) -> None:
    module = seeded(Stacked, width=64)
    parts = cut(module, declared_layout(module), 3)
    tensors = trained_tensors(module, parts)
    prefix = FrozenBlocks(parts, tensors, range(2))
    for block_idx in (0, 1):
        prefix.take_values(block_idx, 0, codec, {n: tensors[n].detach() for n in parts.block_names[block_idx]})
    num_values = sum(tensors[n].numel() for names in parts.block_names[:2] for n in names)
    assert most * num_values * 0.8 < prefix.mem_bytes <= most * num_values


# Blocks after a worker's own.


class LookingAhead(StackedNorms):
    """A block's loss is read at the end of the next block."""

    declared = 1

    def configure_blocks(self) -> Mapping[str, Any]:
        return {**super().configure_blocks(), "lookahead": self.declared}

    def block_loss(self, batch: list[Tensor], block_idx: int) -> Tensor:
        with torch.set_grad_enabled(block_idx == 0):
            hidden = self.features(batch, block_idx)
        for layer in self.layers[2 * block_idx : 2 * block_idx + 4]:
            hidden = layer(hidden)
        return F.cross_entropy(self.readout(hidden).flatten(0, -2), batch[1].flatten())


@pytest.mark.parametrize("alone", [True, False])
def test_blocks_after_are_wide_while_a_worker_acts_and_take_no_gradient(alone: bool, batch: list[Tensor]) -> None:
    lent = Lent(LookingAhead, INT8, alone, block_idx=1)
    parameters = dict(lent.module.named_parameters())
    after = {name for name in lent.parts.block_names[2] if name in parameters}
    before = {name: tensor.clone() for name, tensor in lent.module.state_dict().items()}
    with lent.acting():
        assert lent.wide() == after
        loss = lent.module.block_loss(batch, 1)
        loss.backward()
        assert lent.wide() == after  # the backward pass has read them
        gradients = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
    like = lent.decoded(INT8)
    expected = like.block_loss(batch, 1)
    expected.backward()
    assert torch.equal(loss, expected)
    assert gradients.keys() == lent.worker.local.keys() & parameters.keys()
    assert_same(gradients, {name: like.get_parameter(name).grad for name in gradients})
    shown = lent.module.state_dict()
    others = before.keys() - lent.worker.local.keys()
    assert all(torch.equal(shown[name].nan_to_num(7.0), before[name].nan_to_num(7.0)) for name in others)


def test_loss_that_runs_a_later_block_than_it_declares_is_refused_by_name(make_trainer: Any) -> None:
    class Hides(LookingAhead):
        declared = 0

    class Overruns(LookingAhead):
        def block_loss(self, batch: list[Tensor], block_idx: int) -> Tensor:
            hidden = self.features(batch, 3)
            return F.cross_entropy(self.readout(hidden).flatten(0, -2), batch[1].flatten())

    words = "with prefix='frozen' the loss of block 0 may not run the layers of block 1.*or declare lookahead=1"
    with pytest.raises(MisconfigurationException, match=words):
        fit(seeded(Hides), make_trainer())
    words = "with prefix='frozen' and lookahead=1 the loss of block 0 may not run .* block 2.*or declare lookahead=2"
    with pytest.raises(MisconfigurationException, match=words):
        fit(seeded(Overruns), make_trainer())


# Under Trainer


class Watching(L.Callback):
    """Notes the versions that workers read, and what they read, at every step."""

    def __init__(self) -> None:
        self.versions: list[set[int]] = []
        self.copies: list[dict[str, Any]] = []

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        run = trainer.strategy.run
        self.versions.append(set(run.workers.frozen.versions.values()))
        self.copies.append({b: kept["tensors"] for b, kept in run.workers.frozen.state_dict().items()})


@pytest.mark.parametrize("network", ["lockstep", "wan"])
@pytest.mark.parametrize("prefix_every", [1, 3])
@pytest.mark.parametrize("average_decay", [None, 0.0])
def test_simulated_workers_read_the_averages_of_every_nth_round(
    make_trainer: Any, network: str, prefix_every: int, average_decay: float | None
) -> None:
    watching = Watching()
    masters: list[Any] = []
    averages: list[Any] = []

    class Masters(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
            masters.append(trainer.strategy.run.coordinator.masters)
            averages.append(trainer.strategy.run.coordinator.averages)

    strategy = BlockTrainStrategy(
        sync_every=1, replicas=2, network=network, prefix_every=prefix_every, average_decay=average_decay
    )
    trainer = make_trainer(strategy, max_steps=8, callbacks=[watching, Masters()])
    fit(seeded(Stacked), trainer, loader(96))
    assert watching.versions == [{step - step % prefix_every} for step in range(8)]
    for step, copies in enumerate(watching.copies):
        fetched = averages[step - step % prefix_every]
        for block_idx, tensors in copies.items():
            assert_same(tensors, encode_values(BF16, fetched[f"block{block_idx}"]).tensors)
    is_master = [
        torch.equal(a["block0"][n], m["block0"][n]) for a, m in zip(averages, masters, strict=True) for n in m["block0"]
    ]
    assert all(is_master) if average_decay == 0.0 else not all(is_master[-2:])


def test_fp32_prefix_of_every_round_is_the_run_on_the_live_masters(
    make_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train() -> dict[str, Tensor]:
        strategy = BlockTrainStrategy(sync_every=2, replicas=2, network="mild", prefix_codec="fp32")
        return fit(seeded(Stacked, dropout=0.1), make_trainer(strategy), loader(96))

    lent = train()
    monkeypatch.setattr(FrozenBlocks, "lent", lambda *_: nullcontext())
    assert_same(lent, train())


def test_loss_that_sends_gradient_into_the_prefix_is_refused_by_name(make_trainer: Any) -> None:
    class Forgets(Stacked):
        forgets_no_grad = True

        def configure_blocks(self) -> Mapping[str, Any]:
            return {**super().configure_blocks(), "stem": None}

    with pytest.raises(MisconfigurationException, match="block 1 may not send gradient into the layers of block 0"):
        fit(seeded(Forgets), make_trainer())


def test_prefix_is_not_trained_by_the_blocks_after_it(make_trainer: Any) -> None:
    module = seeded(Stacked)

    class Frozen(L.Callback):
        def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
            worker = trainer.strategy._acting
            for block_idx, names in enumerate(trainer.strategy.partition.block_names):
                for name in names:
                    has_gradient = pl_module.get_parameter(name).grad is not None
                    assert has_gradient is (block_idx == worker.block_idx)

    fit(module, make_trainer(BlockTrainStrategy(sync_every=2), max_steps=4, callbacks=[Frozen()]))


@pytest.mark.parametrize("network", ["lockstep", "wan"])
@pytest.mark.parametrize("save_step", [4, 5, 6])
def test_resume_with_a_stale_prefix_equals_the_uninterrupted_run(
    make_trainer: Any, tmp_path: Any, save_step: int, network: str
) -> None:
    def trainer() -> L.Trainer:
        strategy = BlockTrainStrategy(sync_every=1, prefix_every=4, network=network)
        save = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=save_step, save_top_k=-1)
        return make_trainer(strategy, max_epochs=2, enable_checkpointing=True, callbacks=[save])

    whole = fit(seeded(Stacked, dropout=0.3), trainer())
    path = tmp_path / f"step={save_step}.ckpt"
    saved = torch.load(path, weights_only=True)["blocktrain"]
    assert ("prefix" in saved) is (save_step % 4 > 0)  # else it follows from the masters
    module, resumed = Stacked(dropout=0.3), trainer()
    L.seed_everything(77, verbose=False)
    resumed.fit(module, loader(), ckpt_path=path)
    assert_same(weights(module), whole)


def test_what_a_prefix_costs_is_counted_and_logged(make_trainer: Any) -> None:
    module, logger = seeded(Stacked), RecordingLogger()
    strategy = BlockTrainStrategy(sync_every=2, prefix_every=2, replicas=1)
    trainer = make_trainer(strategy, max_steps=8, logger=logger, callbacks=[RoundMonitor()])
    fit(module, trainer, loader(96))
    block = [sum(p.numel() for p in layers.parameters()) for layers in (module.layers[0:2], module.layers[2:4])]
    stem = module.embed.weight.numel()
    num_fetches = 3  # at versions 0, 2 and 4
    assert strategy.prefix_bytes == num_fetches * 2 * (2 * (block[0] + stem) + block[1])
    assert strategy.prefix_tokens == 8 * 10 * (2 + 4)  # block 1 runs two frozen layers, block 2 four
    assert strategy.prefix_s > 0.0
    for name in ("prefix_bytes", "prefix_tokens", "prefix_s", "prefix_cache_hits"):
        assert logger.of(f"blocktrain/{name}")[-1][1] == getattr(strategy, name)


def test_layouts_without_a_prefix_cost_nothing(make_trainer: Any) -> None:
    strategy = BlockTrainStrategy(sync_every=2)
    fit(seeded(TwoBlocks), make_trainer(strategy, max_steps=4))
    assert (strategy.prefix_bytes, strategy.prefix_tokens, strategy.prefix_s) == (0, 0, 0.0)


@pytest.mark.parametrize("options", [{"prefix_codec": "topk"}, {"prefix_codec": "zip"}, {"prefix_every": 0}])
def test_options_that_no_prefix_can_have_are_refused_at_construction(options: dict[str, Any]) -> None:
    [(name, value)] = options.items()
    with pytest.raises(ValueError, match=f"{name} must be .*got {name}={value!r}"):
        BlockTrainStrategy(**options)


# On a line


def test_worker_that_was_late_reads_its_old_prefix_until_the_next_is_due() -> None:
    fleet = Fleet([0, 1, 2, 2], OnFrozenPrefix, prefix_every=4)
    late, data = fleet.runs[3], batches(100)
    assert late.workers.frozen.versions == {0: 0, 1: 0}

    def run_round(worker_ids: tuple[int, ...]) -> None:
        for w in worker_ids:
            fleet.step(w, next(data))
            fleet.runs[w].send_round()
        fleet.clock.now += RULES.deadline_s + 1
        for w in worker_ids:
            fleet.runs[w].take_round()

    for _ in range(2):
        run_round((0, 1, 2))
    run_round((0, 1, 2, 3))
    assert late.version == 3 and late.workers.frozen.versions == {0: 0, 1: 0}
    fleet.step(3, next(data))
    assert all(tensor.isfinite().all() for tensor in late.worker.local.values())
    for _ in range(2):
        run_round((0, 1, 2))
    late.send_round()
    late.take_round()
    assert late.version == 5 and late.workers.frozen.versions == {0: 5, 1: 5}
    expected = encode_values(BF16, fleet.ledgers["block1"].master).tensors
    assert_same(late.workers.frozen.state_dict()["1"]["tensors"], expected)


def test_worker_reads_its_stale_prefix_on_when_its_coordinator_has_come_back(tmp_path: Any) -> None:
    data = list(batches(9))
    with ExitStack() as lines:
        first = Desk("run", "token", Storage(tmp_path))
        with served(first) as server:
            fleet = Fleet(
                [0, 1, 2], OnFrozenPrefix, kind="http", stack=lines, desk=first, url=server.url, prefix_every=4
            )
            train_fleet(fleet, data[:6], 1)
        copies = fleet.runs[2].workers.frozen.state_dict()["1"]["tensors"]
        again = Desk("run", "token", Storage(tmp_path))
        assert again.resume(time.monotonic())
        with served(again, port=int(server.url.rpartition(":")[2])):
            train_fleet(fleet, data[:6], 1)
            assert again.service.versions["block1"] == fleet.runs[2].version == 2
            assert fleet.runs[2].workers.frozen.versions == {0: 0, 1: 0}
            assert_same(fleet.runs[2].workers.frozen.state_dict()["1"]["tensors"], copies)
            assert not any(verdict is not Verdict.ACCEPTED for _, verdict in again.service.counts)
            train_fleet(fleet, data[:6], 1)
            train_fleet(fleet, data[:6], 1)
            assert fleet.runs[2].workers.frozen.versions == {0: 4, 1: 4}


def test_worker_on_a_block_that_lags_reads_on_and_asks_again() -> None:
    fleet = Fleet([0, 1, 2], OnFrozenPrefix, interface_every=100, max_rounds=100)
    data = batches(100)
    for _ in range(3):  # block 0 is still in its first round
        for w in (1, 2):
            fleet.step(w, next(data))
            fleet.runs[w].send_round()
        for w in (1, 2):
            fleet.runs[w].take_round()
    assert fleet.runs[1].workers.frozen.versions == {0: 0}
    assert fleet.runs[2].workers.frozen.versions == {0: 0, 1: 3}
    fleet.step(0, next(data))
    fleet.runs[0].send_round()
    fleet.step(1, next(data))
    fleet.runs[1].send_round()
    fleet.runs[1].take_round()
    assert fleet.runs[1].workers.frozen.versions == {0: 1}


def test_worker_of_a_coordinator_without_its_prefix_fails() -> None:
    fleet = Fleet([0, 1, 2], OnFrozenPrefix)
    run, line = fleet.runs[2], fleet.lines[2]
    run._reader._frozen._copies.clear()
    run._reader._served.clear()
    line.fetch = lambda *_: None  # type: ignore[method-assign]
    with pytest.raises(TransportError, match="block0 is read as a frozen block; got no answer in time"):
        run._renew_prefix(0.0)


@pytest.mark.parametrize("make", [OnFrozenPrefix, OnFrozenStem])
def test_worker_without_a_base_is_the_same_run_and_the_module_is_whole_after_it(make: Any) -> None:
    data, found = list(batches(18)), []
    for drops_base in (False, True):
        fleet = Fleet([0, 1, 2], make, drops_base=drops_base, interface_every=2)
        train_fleet(fleet, data, 3)
        assert [run.workers.holds_base for run in fleet.runs] == [True, not drops_base, not drops_base]
        fleet.runs[2].make_whole()
        assert_same(dict(fleet.modules[2].state_dict()), fleet.masters())
        found.append(fleet.masters())
    assert_same(*found)


def test_worker_with_a_lossy_codec_keeps_its_base() -> None:
    fleet = Fleet([0, 1, 2], OnFrozenPrefix, drops_base=True, codec=BF16)
    assert all(run.workers.holds_base for run in fleet.runs)


def test_worker_without_a_base_whose_run_ends_inside_a_round_shows_the_masters() -> None:
    fleet = Fleet([0, 1, 2], drops_base=True)
    fleet.step(1, next(batches(1)))
    assert_differs(fleet)
    fleet.lines[0].stop("enough")
    fleet.runs[1].finish()
    fleet.runs[1].make_whole()
    assert_same(dict(fleet.modules[1].state_dict()), fleet.masters())


def assert_differs(fleet: Fleet) -> None:
    shown, master = fleet.modules[1].state_dict(), fleet.ledgers["block1"].master
    assert not all(torch.equal(shown[name], tensor) for name, tensor in master.items())


# Averages, taken up again.


@pytest.mark.parametrize("codec", ["fp32", "int8"])
@pytest.mark.parametrize(("before", "after"), [(0.9, 0.0), (0.0, 0.9)])
def test_resumed_run_goes_on_from_the_masters_whatever_became_of_the_average(
    make_trainer: Any, tmp_path: Any, codec: Any, before: float, after: float
) -> None:
    """Without an average the masters would be the same; only what others read of them differs."""

    def trainer(average_decay: float, max_steps: int) -> L.Trainer:
        strategy = BlockTrainStrategy(sync_every=2, codec=codec, average_decay=average_decay)
        save = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=4, save_top_k=-1)
        return make_trainer(
            strategy, max_steps=max_steps, max_epochs=-1, enable_checkpointing=True, callbacks=[save, seen]
        )

    class Seen(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
            run = trainer.strategy.run
            merged = run.workers.merged
            masters = {name: t for entry in run.coordinator.masters.values() for name, t in entry.items()}
            assert_same({name: merged[name] for name in masters}, masters)
            shown = trainer.lightning_module.state_dict()
            averages = {name: t for entry in run.coordinator.averages.values() for name, t in entry.items()}
            assert_same({name: shown[name] for name in averages}, averages)

    seen = Seen()
    fit(seeded(Stacked), trainer(before, 4), loader())
    resumed = trainer(after, 7)  # ends inside a round, which is merged
    resumed.fit(Stacked(), loader(), ckpt_path=tmp_path / "step=4.ckpt")
    assert resumed.strategy.num_rounds_closed == 4


@pytest.mark.parametrize("codec", ["fp32", "bf16"])
def test_what_a_step_writes_to_a_block_after_its_own_ends_with_it(codec: Any, batch: list[Tensor]) -> None:
    lent = Lent(LookingAhead, Codec(codec), alone=False, block_idx=1)
    name = next(n for n in lent.parts.block_names[2] if n.endswith("weight"))
    with lent.acting(), torch.no_grad():
        before = lent.module.get_parameter(name).clone()
        lent.module.get_parameter(name).mul_(2)
    with lent.acting():
        assert torch.equal(lent.module.get_parameter(name), before)
