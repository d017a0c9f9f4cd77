import copy
import threading

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_blocktrain.pipeline.alias import make_alias, snapshot_of, stage_optimizer
from tests.pipeline.tiny import adam, batches, differing, sgd, state_of, tiny


def test_alias_shares_every_value_and_no_parameter_object():
    module = tiny()
    module.layers[0].register_buffer("seen", torch.zeros(2))
    alias = make_alias(module)
    pairs = zip(module.named_parameters(), alias.named_parameters(), strict=True)
    for (name, live), (alias_name, mine) in pairs:
        assert name == alias_name
        assert mine is not live
        assert mine.data_ptr() == live.data_ptr()
    assert alias.layers[0].seen.data_ptr() == module.layers[0].seen.data_ptr()
    with torch.no_grad():
        alias.embed.weight.add_(1)
    assert differing(state_of(module), state_of(alias)) == []


def test_alias_has_gradients_modes_and_hooks_of_its_own():
    module = tiny(dropout=0.1)
    module.layers[0].linear.weight.requires_grad_(False)
    alias = make_alias(module)
    assert not alias.layers[0].linear.weight.requires_grad
    module.eval()
    assert alias.training
    alias.loss(batches(1)[0]).backward()
    assert all(p.grad is None for p in module.parameters())
    module.layers[0].register_forward_hook(lambda *args: pytest.fail("a hook of the live module ran"))
    alias.loss(batches(1)[0])


def test_alias_keeps_ties():
    module = tiny()
    module.layers[1].linear.weight = module.layers[0].linear.weight
    alias = make_alias(module)
    assert alias.layers[1].linear.weight is alias.layers[0].linear.weight


def test_alias_belongs_to_no_trainer(make_trainer):
    module = tiny()
    module.trainer = make_trainer()
    alias = make_alias(module)
    assert alias._trainer is None
    assert module._trainer is not None


def test_alias_with_a_snapshot_holds_that_in_the_place_of_the_readout():
    module = tiny()
    replaced = snapshot_of(module.readout, learns=True)
    alias = make_alias(module, replaced)
    with torch.no_grad():
        module.readout[1].weight.add_(1)
    assert torch.equal(alias.readout[1].weight + 1, module.readout[1].weight)
    assert alias.readout[1].weight is replaced[module.readout[1].weight]
    assert alias.layers[0].linear.weight.data_ptr() == module.layers[0].linear.weight.data_ptr()


@pytest.mark.parametrize(("learns", "expected"), [(True, [True, False]), (False, [False, False])])
def test_snapshot_learns_what_the_readout_learns(learns, expected):
    readout = nn.Linear(2, 2)
    readout.bias.requires_grad_(False)
    snapshot = snapshot_of(readout, learns)
    assert [tensor.requires_grad for tensor in snapshot.values()] == expected


def split_optimizer(optimizer, module):
    """Return optimizers for two halves of the parameters, by live parameter."""
    aliases = {p: nn.Parameter(p.detach()) for p in module.parameters()}
    live = list(aliases)
    halves = [dict(list(aliases.items())[: len(live) // 2]), dict(list(aliases.items())[len(live) // 2 :])]
    return [(stage_optimizer(optimizer, half), half) for half in halves]


@pytest.mark.parametrize("make", [sgd, adam, lambda m: torch.optim.AdamW(m.parameters(), amsgrad=True)])
def test_stage_optimizers_step_like_the_one_they_came_from(make):
    module = tiny()
    optimizer = make(module)
    for batch in batches(2):  # state before the split
        optimizer.zero_grad()
        module.loss(batch).backward()
        optimizer.step()
    reference = copy.deepcopy(module)
    theirs = make(reference)
    theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    generator = torch.Generator().manual_seed(5)
    gradients = [torch.randn(p.shape, generator=generator) for p in module.parameters()]
    for (stage, _), half in split_optimizer(optimizer, module):
        for live, alias in half.items():
            alias.grad = gradients[[p is live for p in module.parameters()].index(True)]
        stage.step()
    for parameter, gradient in zip(reference.parameters(), gradients, strict=True):
        parameter.grad = gradient
    theirs.step()
    assert differing(state_of(module), state_of(reference)) == []
    assert optimizer.state == {}


def test_stage_optimizer_takes_the_groups_that_it_has_a_part_of():
    module = tiny()
    groups = [
        {"params": list(module.embed.parameters()), "lr": 0.1},
        {"params": list(module.layers.parameters()), "lr": 0.2},
        {"params": list(module.readout.parameters()), "lr": 0.3},
    ]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    mine = {p: nn.Parameter(p.detach()) for p in [module.layers[0].linear.weight, *module.readout.parameters()]}
    stage, origins = stage_optimizer(optimizer, mine)
    assert origins == (1, 2)
    assert [group["lr"] for group in stage.param_groups] == [0.2, 0.3]
    assert [len(group["params"]) for group in stage.param_groups] == [1, 4]
    assert len(optimizer.param_groups) == 3
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(module.parameters()))


class Remembering(torch.optim.SGD):
    """Keeps something that its ``__init__`` made."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.scale = 0.5

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(parameter.grad, alpha=-self.scale * group["lr"])


def test_stage_optimizer_keeps_what_a_custom_one_computed_and_not_a_schedulers_wrapper():
    module = nn.Linear(1, 1, bias=False)
    optimizer = Remembering(module.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    alias = nn.Parameter(module.weight.detach())
    stage, _ = stage_optimizer(optimizer, {module.weight: alias})
    before = module.weight.item()
    alias.grad = torch.ones(1, 1)
    stage.step()
    assert module.weight.item() == pytest.approx(before - 0.5)
    assert stage.param_groups[0]["params"][0] is alias
    assert scheduler.optimizer is optimizer
    assert "step" not in vars(stage) or vars(stage)["step"] is not vars(optimizer)["step"]


def test_alias_of_a_module_that_cannot_be_copied_is_refused_with_the_cause():
    module = tiny()
    module.lock = threading.Lock()
    with pytest.raises(MisconfigurationException, match=r"copies of the module.*cannot pickle '_thread.lock'"):
        make_alias(module)
