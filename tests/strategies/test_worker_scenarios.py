"""What users put into modules, and the end of their data, through workers' rounds; without Lightning or processes."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_blocktrain.partition import partition as cut
from lightning_blocktrain.rounds import INTERFACE, OuterSGD, RoundRules
from lightning_blocktrain.strategies.block_guard import declared_layout
from lightning_blocktrain.strategies.worker_run import masters_of
from lightning_blocktrain.strategies.workers import buffer_names
from tests.strategies.conftest import assert_same, seeded
from tests.strategies.test_worker_run import RULES, SYNC_EVERY, Fleet, ThreeBlocks, batches


class Tied(ThreeBlocks):
    """Embedding and readout are one parameter, in the interface."""

    def __init__(self) -> None:
        super().__init__()
        self.readout.weight = self.embed.weight


class PartlyFrozen(ThreeBlocks):
    """The embedding and a bias of block 1 are not trained."""

    frozen = ("embed.weight", "layers.1.linear.bias")

    def __init__(self) -> None:
        super().__init__()
        for name in self.frozen:
            self.get_parameter(name).requires_grad_(False)


class Normed(ThreeBlocks):
    """Batch norm in the readout, with statistics that start far from those of the data."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6, momentum=0.5)

    def _loss(self, batch: list[Tensor], layers: nn.ModuleList) -> Tensor:
        inputs, targets = batch
        hidden = self.norm(0.01 * self.embed(inputs).flatten(0, 1))
        for layer in layers:
            hidden = layer(hidden)
        return nn.functional.cross_entropy(self.readout(hidden), targets.flatten())


def train_round(fleet: Fleet, data: Any, num_steps: Mapping[int, int] | None = None) -> None:
    """Let every worker train and send; the round has closed then, and nobody has taken it yet."""
    for w, run in enumerate(fleet.runs):
        for _ in range((num_steps or {}).get(w, SYNC_EVERY)):
            fleet.step(w, next(data))
        run.send_round()


def take_round(fleet: Fleet, workers: Sequence[int] | None = None) -> None:
    for w, run in enumerate(fleet.runs):
        if workers is None or w in workers:
            run.take_round()


def mean_of(fleet: Fleet, name: str, weights: Sequence[int]) -> Tensor:
    holders = [run.worker.local[name] for run in fleet.runs if name in run.worker.local]
    total = sum(tensor * weight for tensor, weight in zip(holders, weights, strict=True))
    return total / sum(weights)  # type: ignore[return-value, operator]


def test_scenario_27_tied_weights_are_sent_and_averaged_once_and_stay_tied() -> None:
    fleet = Fleet([0, 1, 2], Tied, outer=OuterSGD())
    assert [name for name in fleet.ledgers[INTERFACE].master if name.endswith("weight")] == ["embed.weight"]
    train_round(fleet, batches(6))
    expected = mean_of(fleet, "embed.weight", [1, 1, 1])
    take_round(fleet)
    for module in fleet.modules:
        assert module.readout.weight is module.embed.weight
        assert torch.equal(module.readout.weight, expected)
    fresh = Tied()
    fresh.load_state_dict(fleet.modules[0].state_dict())
    assert fresh.readout.weight is fresh.embed.weight
    assert torch.equal(fresh.embed.weight, expected)


def test_scenario_28_frozen_parameters_are_neither_sent_nor_changed() -> None:
    before = dict(seeded(PartlyFrozen).state_dict())
    fleet = Fleet([0, 0, 1, 2], PartlyFrozen, outer=OuterSGD(0.7, 0.9))
    data = batches(40)
    for _ in range(3):
        train_round(fleet, data)
        take_round(fleet)
    sent = {name for ledger in fleet.ledgers.values() for name in ledger.state_dict()["master"]}
    assert sent.isdisjoint(PartlyFrozen.frozen)
    assert sent | set(PartlyFrozen.frozen) == set(before)
    fleet.runs[0].assemble()
    after = fleet.modules[0].state_dict()
    for name in PartlyFrozen.frozen:  # AdamW would decay it, and the outer momentum move it
        assert torch.equal(after[name], before[name])
    assert not any(torch.equal(after[name], before[name]) for name in sent)
    for run in fleet.runs:
        assert run.workers.named_state(run.worker).keys().isdisjoint(PartlyFrozen.frozen)
    assert [p.requires_grad for n, p in fleet.modules[1].named_parameters() if n in PartlyFrozen.frozen] == [False] * 2


def test_scenario_29_batch_norm_is_averaged_by_weight_and_its_variance_stays_positive() -> None:
    rules = RoundRules(deadline_s=RULES.deadline_s, weighting="tokens")
    module = seeded(Normed)
    buffers = buffer_names(module, cut(module, declared_layout(module), 3))
    fleet = Fleet([0, 1, 2], Normed, rules=rules, outer=OuterSGD(0.7, 0.9, spared=buffers))
    data = batches(40)
    train_round(fleet, data, {0: 1})
    tokens = [run.worker.num_tokens for run in fleet.runs]
    assert tokens == [10, 20, 20]
    expected = {name: mean_of(fleet, f"norm.{name}", tokens) for name in ("running_mean", "running_var")}
    take_round(fleet)
    for name, value in expected.items():
        torch.testing.assert_close(fleet.modules[0].get_buffer(f"norm.{name}"), value)  # sums in another order
    for _ in range(4):  # a variance that falls to its true value in a few rounds: momentum would carry it below zero
        train_round(fleet, data)
        take_round(fleet)
        assert (fleet.modules[0].norm.running_var > 0).all()
    counter = fleet.modules[0].norm.num_batches_tracked
    assert (counter.dtype, int(counter)) == (torch.int64, 1 + 9)


def test_scenario_31_worker_out_of_data_sends_what_it_has_and_nobody_waits_for_it() -> None:
    rules = RoundRules(deadline_s=RULES.deadline_s, weighting="tokens")
    fleet = Fleet([0, 0, 1, 2], rules=rules, outer=OuterSGD())
    data = batches(40)
    train_round(fleet, data, {1: 1})
    expected = mean_of(fleet, "layers.0.linear.weight", [2, 1])
    take_round(fleet)
    torch.testing.assert_close(fleet.ledgers["block0"].master["layers.0.linear.weight"], expected)
    [report] = [report for report in fleet.hub.desk.service.reports if report.entry == "block0"]
    assert (report.accepted_steps, report.accepted_tokens) == (SYNC_EVERY + 1, 10 * (SYNC_EVERY + 1))
    fleet.runs[1].finish()
    fleet.lines[1].leave()
    others = [0, 2, 3]
    for w in others:
        for _ in range(SYNC_EVERY):
            fleet.step(w, next(data))
        fleet.runs[w].send_round()
    take_round(fleet, others)  # the clock stands still: no deadline has helped
    assert {ledger.version for ledger in fleet.ledgers.values()} == {2}


@pytest.mark.parametrize("make", [Tied, PartlyFrozen, Normed])
def test_masters_are_every_trained_tensor_once(make: type[ThreeBlocks]) -> None:
    module = seeded(make)
    fleet = Fleet([0, 1, 2], make)
    masters = masters_of(module, fleet.cut)
    assert_same({name: t for kept in masters.values() for name, t in kept.items()}, fleet.masters())
