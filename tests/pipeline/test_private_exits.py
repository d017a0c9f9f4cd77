"""Private exits: who owns them, what they do to the gradients of the shared readout, and what is refused."""

import copy

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_blocktrain.models import ByteTransformer
from lightning_blocktrain.pipeline.exits import exit_after, exits_of, read_out
from lightning_blocktrain.pipeline.orders import Clip
from lightning_blocktrain.pipeline.split import cut_stages
from lightning_blocktrain.pipeline.threads import TurnsPipeline
from lightning_blocktrain.pipeline.worker import Pace
from lightning_blocktrain.protocols import BlockLayout
from tests.pipeline.tiny import (
    WIDTH,
    Layer,
    Tiny,
    adam,
    batches,
    differing,
    open_backend,
    sgd,
    slow,
    stages_of,
    state_of,
    train,
)


class ExitNorm(nn.Module):
    """A norm of its own in front of the shared unembedding."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, hidden, readout):
        return readout[1](self.norm(hidden))


class Private(Tiny):
    def __init__(self, num_layers=4):
        super().__init__([Layer() for _ in range(num_layers)])
        self.exits = nn.ModuleList(ExitNorm() for _ in range(num_layers - 1))
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            with torch.no_grad():
                parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.3)

    def stage_exits(self):
        return self.exits


SIZES = (2, 1, 1)
USED = ("exits.1.", "exits.2.")
"""Exits after layers 1 and 2, where stages 0 and 1 end."""


def expected_gradients(module, batch, credit="local"):
    """Return each parameter's gradient, the readout's as the mean over the stages that use it."""
    named, found, sums = dict(module.named_parameters()), {}, {}
    hidden = module.stage_embed(batch)
    start = 0
    for stage_idx, size in enumerate(SIZES):
        names = [n for n in named if any(n.startswith(f"layers.{k}.") for k in range(start, start + size))]
        names += ["embed.weight"] * (stage_idx == 0) + [n for n in named if n.startswith(f"exits.{start + size - 1}.")]
        for layer in module.layers[start : start + size]:
            hidden = layer(hidden)
        start += size
        loss = loss_at(module, hidden, start, batch)
        readout = [n for n in named if n.startswith("readout")]
        for name, gradient in zip(
            readout,
            torch.autograd.grad(loss, [named[n] for n in readout], retain_graph=True, allow_unused=True),
            strict=True,
        ):
            sums.setdefault(name, []).extend([gradient] if gradient is not None else [])
        if credit == "next_stage" and stage_idx + 1 < len(SIZES):
            after = hidden
            for layer in module.layers[start : start + SIZES[stage_idx + 1]]:
                after = layer(after)
            loss = loss + loss_at(module, after, start + SIZES[stage_idx + 1], batch)
        gradients = torch.autograd.grad(loss, [named[n] for n in names])
        found.update(zip(names, gradients, strict=True))
        hidden = hidden.detach()
    return {**found, **{name: sum(parts) / len(parts) for name, parts in sums.items()}}


def loss_at(module, hidden, depth, batch):
    readout = module.readout if depth == len(module.layers) else lambda h: module.exits[depth - 1](h, module.readout)
    return module.stage_loss(readout(hidden), batch)["loss"]


@pytest.mark.parametrize("credit", ["local", "next_stage"])
@pytest.mark.parametrize("method", ["rgc", "live"])
def test_step_moves_every_tensor_by_its_own_gradient(method, credit):
    """SGD shows the gradients; the readout's norm learns from the final stage alone, undiluted by the others."""
    module, (batch,) = Private().double(), batches(1)
    before, expected = copy.deepcopy(module), expected_gradients(module, batch, credit)
    optimizer = sgd(module)
    stages = stages_of(module, SIZES, method, optimizer, credit=credit)
    pipeline = TurnsPipeline(stages, Pace(serial=True), 0, 60.0, None)
    train(pipeline, optimizer, [batch])
    pipeline.close()
    for name, parameter in module.named_parameters():
        if name.startswith("exits") and not name.startswith(USED):
            assert torch.equal(parameter, before.get_parameter(name))
        else:
            step = (before.get_parameter(name) - parameter) / 0.5
            torch.testing.assert_close(step, expected[name], rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("batches_per_step", [1, 2])
def test_live_over_several_batches_follows_serial_rgc(batches_per_step):
    """Two ways to the same mean: sums that autograd made, and gradients that were sent."""
    ends = []
    for method in ("rgc", "live"):
        module = Private().double()
        optimizer = sgd(module)
        pipeline = open_backend("turns", module, sizes=SIZES, method=method, optimizer=optimizer)
        train(pipeline, optimizer, batches(6), None, batches_per_step)
        ends.append(state_of(module))
    for name, tensor in ends[0].items():
        torch.testing.assert_close(tensor, ends[1][name], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("backend", ["threads", slow("processes")])
@pytest.mark.parametrize("credit", ["local", "next_stage"])
def test_pinned_lag_gives_every_backend_the_weights_of_turns_bit_for_bit(launch, backend, credit):
    """An exit's gradient belongs to its batch's step, also where the step comes one batch late."""
    ends = []
    for name in ("turns", backend):
        module = Private()
        optimizer = adam(module)
        pipeline = launch(name, module, sizes=SIZES, lag="pinned", optimizer=optimizer, credit=credit)
        train(pipeline, optimizer, batches(6), Clip(0.5))
        pipeline.close()
        ends.append(state_of(module))
    assert differing(*ends) == []


def test_gradient_of_an_exit_is_in_the_step_of_its_own_batch():
    """Delayed by one batch: after two batches and one step the second batch's gradient is still to come."""
    data, rate = batches(2), 0.5
    module = Private().double()
    first = expected_gradients(module, data[0], "next_stage")["exits.1.norm.weight"]
    before = module.exits[1].norm.weight.detach().clone()
    optimizer = sgd(module)
    stages = stages_of(module, SIZES, "rgc", optimizer, credit="next_stage")
    pipeline = TurnsPipeline(stages, Pace(serial=True, lag="pinned"), 0, 60.0, None)
    pipeline.learn(data[0], 1.0)
    pipeline.step(({"lr": rate},), None)
    assert torch.equal(module.exits[1].norm.weight, before)
    pipeline.learn(data[1], 1.0)
    torch.testing.assert_close(module.exits[1].norm.weight, before - rate * first, rtol=1e-10, atol=1e-13)
    pipeline.close()


def test_stage_owns_the_exits_after_its_layers():
    module = Private()
    cut = cut_stages(module, BlockLayout(**module.configure_blocks()), SIZES)
    homes = [{n.split(".")[1] for n in names if n.startswith("exits")} for names in cut.names]
    assert homes == [{"0", "1"}, {"2"}, set()]
    assert sorted(n for names in cut.names for n in names) == sorted(n for n, _ in module.named_parameters())


def test_exit_after_the_last_layer_and_without_exits_is_the_readout_alone():
    module = Private()
    assert exit_after(module.exits, 3) is module.exits[2]
    assert exit_after(module.exits, 4) is None
    assert exit_after(None, 1) is None
    hidden = torch.rand(1, 2, WIDTH)
    assert torch.equal(read_out(hidden, module.readout, None), module.readout(hidden))
    assert exits_of(nn.Linear(1, 1), 3) is None


class Bad(Private):
    def __init__(self, exits):
        super().__init__()
        self.given = exits

    def stage_exits(self):
        return self.given(self)


@pytest.mark.parametrize(
    ("exits", "message"),
    [
        (lambda m: m.exits[:2], "one entry per layer but the last; got 2 of them for num_layers=4"),
        (lambda m: list(m.exits), "one entry per layer but the last; got list for num_layers=4"),
        (lambda m: nn.ModuleList(ExitNorm() for _ in range(3)), "must return submodules of the LightningModule"),
    ],
)
def test_exits_that_do_not_fit_are_refused(exits, message):
    with pytest.raises(MisconfigurationException, match=message):
        exits_of(Bad(exits), 4)


def test_module_may_say_that_it_has_none():
    assert exits_of(Bad(lambda m: None), 4) is None


def test_exits_of_two_stages_may_not_share_weights():
    module = Private()
    module.exits[2].norm.weight = module.exits[1].norm.weight
    with pytest.raises(MisconfigurationException, match=r"norm\.weight in several exits; give each exit its own"):
        stages_of(module, SIZES)


def test_exits_within_one_stage_may_share_weights():
    module = Private()
    module.exits[1] = module.exits[0]
    cut = cut_stages(module, BlockLayout(**module.configure_blocks()), SIZES)
    assert [n for n in cut.names[0] if n.startswith("exits")] == ["exits.0.norm.weight", "exits.0.norm.bias"]


@pytest.mark.parametrize(("num_stages", "owned"), [(4, [0, 1, 2]), (2, [0, 0, 1])])
def test_exits_of_blocks_belong_to_the_stages_that_end_with_them(num_stages, owned):
    model = ByteTransformer(num_layers=8, num_blocks=4, width=16, num_heads=2, window_bytes=8, exits="norm")
    cut = cut_stages(model, model.configure_blocks(), [8 // num_stages] * num_stages)
    homes = [next(s for s, names in enumerate(cut.names) if f"exits.{idx}.norm.weight" in names) for idx in range(3)]
    assert homes == owned


def test_stages_that_end_within_one_block_are_refused_with_a_way_out():
    model = ByteTransformer(num_layers=8, num_blocks=2, width=16, num_heads=2, window_bytes=8, exits="norm")
    with pytest.raises(MisconfigurationException, match="has as many exits as num_blocks"):
        cut_stages(model, model.configure_blocks(), [2, 2, 2, 2])
