"""What the horizon removes from the gradient, and what the snapshot's age adds: the method's propositions."""

import copy

import pytest
import torch
from torch import Tensor, nn

from lightning_blocktrain.pipeline.orders import StepOrder
from lightning_blocktrain.pipeline.stage import Stage
from tests.pipeline.tiny import (
    Batch,
    Tiny,
    batches,
    differing,
    hyper,
    open_backend,
    sgd,
    stages_of,
    state_of,
    tiny,
    train,
)

SIZES = (2, 1, 1)
PRECISIONS = [(torch.float32, 1e-5), (torch.float64, 1e-12)]
"""With the relative error of sums in another order, and room for the cancellation in a difference of gradients."""


def cut(module: Tiny) -> list[nn.ModuleList]:
    return [module.layers[0:2], module.layers[2:3], module.layers[3:4]]


def learnt(module: Tiny, batch: Batch, method: str = "rgc") -> list[Stage]:
    """Return stages after one batch, before any step."""
    stages, hidden = stages_of(module, SIZES, method), None
    for stage in stages:
        output = stage.forward(batch, hidden)
        stage.learn(batch, output, 1.0)
        hidden = output.detach()
    return stages


def gradients(stage: Stage, part: str) -> dict[str, Tensor]:
    """Return the gradients of the alias's tensors whose name begins with ``part``."""
    named = stage.alias.named_parameters()
    return {name: p.grad for name, p in named if name.startswith(part) and p.grad is not None}


def boundaries(module: Tiny, batch: Batch) -> list[Tensor]:
    """Return the hidden state after every stage, in one graph."""
    hidden, states, start = module.stage_embed(batch), [], 0
    for size in SIZES:
        for layer in module.layers[start : start + size]:
            hidden = layer(hidden)
        start += size
        states.append(hidden)
    return states


def layer_names(module: Tiny, stage_idx: int) -> list[str]:
    start = sum(SIZES[:stage_idx])
    return [
        name
        for name, _ in module.named_parameters()
        if any(name.startswith(f"layers.{idx}.") for idx in range(start, start + SIZES[stage_idx]))
        or (stage_idx == 0 and name.startswith("embed"))
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_stage_gradient_equals_autograd_of_its_own_loss_alone_bit_for_bit(dtype):
    module, batch = tiny().to(dtype), batches(1)[0]
    stages = learnt(module, batch)
    reference = copy.deepcopy(module)
    named, hidden = dict(reference.named_parameters()), reference.stage_embed(batch)
    for stage, part in zip(stages, cut(reference), strict=True):
        for layer in part:
            hidden = layer(hidden)
        loss = reference.stage_loss(reference.readout(hidden), batch)["loss"]
        names = layer_names(module, stage.stage_idx)
        alone = dict(zip(names, torch.autograd.grad(loss, [named[name] for name in names]), strict=True))
        ours = {name: gradient for name, gradient in gradients(stage, "").items() if not name.startswith("readout")}
        assert differing(ours, alone) == []
        hidden = hidden.detach()


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
def test_end_to_end_minus_local_is_the_product_of_the_downstream_losses(dtype, tolerance):
    """The sum of all local losses, differentiated end to end, against what each stage computes."""
    module, batch = tiny().to(dtype), batches(1)[0]
    stages = learnt(module, batch)
    named = dict(module.named_parameters())
    states = boundaries(module, batch)
    losses = [module.stage_loss(module.readout(state), batch)["loss"] for state in states]
    for stage in stages[:-1]:
        names = layer_names(module, stage.stage_idx)
        mine = [named[name] for name in names]
        whole = torch.autograd.grad(sum(losses), mine, retain_graph=True)
        # dL/dh_s of the stages after s alone, pulled back through stage s: a product with its Jacobian.
        downstream = sum(losses[stage.stage_idx + 1 :])
        direction = torch.autograd.grad(downstream, states[stage.stage_idx], retain_graph=True)
        product = torch.autograd.grad(states[stage.stage_idx], mine, direction, retain_graph=True)
        local = gradients(stage, "")
        assert max(float(part.norm()) for part in product) > 1e-4  # the horizon removes something here
        for name, total, removed in zip(names, whole, product, strict=True):
            error = (total - local[name] - removed).norm() / total.norm()
            assert error < tolerance, name


@pytest.mark.parametrize("method", ["rgc", "broadcast", "live"])
def test_boundary_lets_nothing_flow_back(method):
    module, batch = tiny(), batches(1)[0]
    stages = stages_of(module, SIZES, method)
    hidden = stages[0].forward(batch, None).detach()
    stages[1].learn(batch, stages[1].forward(batch, hidden), 1.0)
    assert hidden.grad is None
    assert gradients(stages[0], "layers") == {}
    assert gradients(stages[0], "embed") == {}
    assert {name.split(".")[1] for name in gradients(stages[1], "layers")} == {"2"}


def test_live_module_gets_no_gradient_and_keeps_its_weights():
    module = tiny()
    before = state_of(module)
    learnt(module, batches(1)[0])
    assert [name for name, p in module.named_parameters() if p.grad is not None] == []
    assert differing(before, state_of(module)) == []


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
def test_zero_lag_readout_gradient_is_that_of_live_deep_supervision(dtype, tolerance):
    """Two oracles: autograd of the mean of the local losses, and the method ``live``."""
    module, batch = tiny().to(dtype), batches(1)[0]
    agreed = agree(learnt(module, batch))
    losses, hidden = [], module.stage_embed(batch)
    for part in cut(module):
        for layer in part:
            hidden = layer(hidden)
        losses.append(module.stage_loss(module.readout(hidden.detach()), batch)["loss"])
        hidden = hidden.detach()
    expected = torch.autograd.grad(sum(losses) / len(losses), list(module.readout.parameters()))
    live = agree(learnt(module, batch, "live"))
    for ours, theirs, supervised in zip(agreed, expected, live, strict=True):
        assert (ours - theirs).norm() <= tolerance * theirs.norm()  # sums in another order
        assert (ours - supervised).norm() <= tolerance * theirs.norm()


def agree(stages: list[Stage]) -> list[Tensor]:
    """Return the readout gradient that the final stage would step with."""
    upstream = [stage.take_readout_gradients() for stage in stages[:-1] if stage.publishes]
    stages[-1].agree(upstream)
    return [p.grad.clone() for p in stages[-1].readout.parameters()]


def readout_gradient(offset: float, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return the consensus where upstream snapshots are off by ``offset`` in a fixed direction of length 1."""
    module, batch = tiny().to(dtype), batches(1)[0]
    stages, hidden = stages_of(module, SIZES), None
    generator = torch.Generator().manual_seed(3)
    directions = [torch.randn(t.shape, generator=generator).to(dtype) for t in stages[0].snapshot]
    length = torch.cat([d.flatten() for d in directions]).norm()
    for stage in stages:
        if stage.reads_snapshot:
            with torch.no_grad():
                for tensor, direction in zip(stage.snapshot, directions, strict=True):
                    tensor.add_(direction / length, alpha=offset)
        output = stage.forward(batch, hidden)
        stage.learn(batch, output, 1.0)
        hidden = output.detach()
    return torch.cat([gradient.flatten() for gradient in agree(stages)])


def test_lag_bound_deviation_is_zero_at_lag_zero_and_linear_in_the_perturbation():
    fresh = readout_gradient(0.0)
    assert torch.equal(fresh, readout_gradient(0.0))
    deviation = [(readout_gradient(offset) - fresh).norm() for offset in (1e-4, 2e-4, 4e-4)]
    assert deviation[0] > 0
    # The second-order part is of relative size 1e-4, like the offset.
    assert float(deviation[1] / deviation[0]) == pytest.approx(2, rel=1e-3)
    assert float(deviation[2] / deviation[0]) == pytest.approx(4, rel=1e-3)


def test_lag_bound_deviation_is_that_of_the_upstream_members_over_the_number_of_stages():
    """Against the Jacobian of each upstream readout gradient, to first order in the perturbation."""
    offset = 1e-3
    fresh, off = readout_gradient(0.0), readout_gradient(offset)
    module, batch = tiny().double(), batches(1)[0]
    states = [state.detach() for state in boundaries(module, batch)]
    parameters = dict(module.readout.named_parameters())
    generator = torch.Generator().manual_seed(3)
    directions = {name: torch.randn(p.shape, generator=generator).double() for name, p in parameters.items()}
    length = torch.cat([d.flatten() for d in directions.values()]).norm()
    tangents = {name: offset * direction / length for name, direction in directions.items()}

    def gradient_at(state: Tensor):
        def loss(values: dict[str, Tensor]) -> Tensor:
            return module.stage_loss(torch.func.functional_call(module.readout, values, state), batch)["loss"]

        return torch.func.grad(loss)

    moved = [torch.func.jvp(gradient_at(state), (parameters,), (tangents,))[1] for state in states[:-1]]
    expected = sum(torch.cat([part[name].flatten() for name in parameters]) for part in moved) / len(SIZES)
    assert (off - fresh - expected).norm() < 1e-2 * expected.norm()


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.AdamW])
def test_one_stage_follows_global_backpropagation_for_twenty_steps_bit_for_bit(optimizer_class):
    data = batches(20)
    plain, ours = tiny(), tiny()
    optimizer = optimizer_class(plain.parameters(), lr=0.1)
    for batch in data:
        optimizer.zero_grad()
        plain.loss(batch).backward()
        optimizer.step()
    theirs = optimizer_class(ours.parameters(), lr=0.1)
    pipeline = open_backend("turns", ours, sizes=(4,), optimizer=theirs)
    train(pipeline, theirs, data)
    pipeline.close()
    assert differing(state_of(ours), state_of(plain)) == []


def test_final_stage_without_consensus_learns_the_readout_from_its_own_loss():
    module, batch = tiny(), batches(1)[0]
    stages = learnt(module, batch, "broadcast")
    assert stages[0].take_readout_gradients() == [None] * 4
    own = [p.grad.clone() for p in stages[-1].readout.parameters()]
    expected = [p - 0.5 * gradient for p, gradient in zip(module.readout.parameters(), own, strict=True)]
    stages[-1].step(StepOrder(0, hyper(sgd(module)), None))
    for parameter, value in zip(module.readout.parameters(), expected, strict=True):
        assert torch.equal(parameter, value)
