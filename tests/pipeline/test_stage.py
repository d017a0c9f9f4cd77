import contextlib

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_blocktrain.errors import NonFiniteError
from lightning_blocktrain.pipeline.orders import Clip, StepOrder
from lightning_blocktrain.pipeline.stage import build_groups, finite_norm, plain_state, run_layers, split_loss
from lightning_blocktrain.protocols import BlockLayout
from tests.pipeline.tiny import Layer, Tiny, adam, batches, differing, hyper, sgd, stages_of, state_of, tiny


def learnt(stage, batch, hidden=None, divisor=1.0):
    output = stage.forward(batch, hidden)
    return stage.learn(batch, output, divisor)


def test_stages_own_every_parameter_once_under_its_name():
    module = tiny()
    stages = stages_of(module, (1, 2, 1))
    names = [name for stage in stages for name in stage.owned]
    assert sorted(names) == sorted(name for name, _ in module.named_parameters())
    assert [stage.stage_idx for stage in stages] == [0, 1, 2]
    assert [(stage.is_first, stage.is_final) for stage in stages] == [(True, False), (False, False), (False, True)]
    for stage in stages:
        assert {id(p) for p in stage.stepped} == {id(p) for p in stage.owned.values()}


@pytest.mark.parametrize(
    ("method", "publishes", "reads", "weights"),
    [
        ("rgc", [True, False], [True, False], [None, (0.5, 0.5)]),
        ("broadcast", [False, False], [True, False], [None, None]),
        ("live", [False, False], [False, False], [None, (0.5,)]),
    ],
)
def test_method_decides_who_publishes_reads_and_agrees(method, publishes, reads, weights):
    stages = stages_of(tiny(), method=method)
    assert [stage.publishes for stage in stages] == publishes
    assert [stage.reads_snapshot for stage in stages] == reads
    assert [stage.weights for stage in stages] == weights


@pytest.mark.parametrize("method", ["rgc", "broadcast", "live"])
def test_single_stage_learns_from_its_own_loss_alone(method):
    (stage,) = stages_of(tiny(), (4,), method)
    assert (stage.publishes, stage.reads_snapshot, stage.weights) == (False, False, None)


def test_live_stages_share_one_readout_and_others_do_not():
    module = tiny()
    first, last = stages_of(module, method="live")
    assert all(ours is theirs for ours, theirs in zip(first.snapshot, last.snapshot, strict=True))
    first, last = stages_of(module, method="rgc")
    assert not any(o.data_ptr() == t.data_ptr() for o, t in zip(first.snapshot, last.snapshot, strict=True))
    assert last.snapshot[0].data_ptr() == module.readout[0].weight.data_ptr()


def test_learn_adds_gradients_divided_by_the_divisor():
    first, second = batches(2)
    (whole,) = stages_of(tiny(), (4,))
    (halves,) = stages_of(tiny(), (4,))
    learnt(whole, first)
    kept = {name: p.grad.clone() for name, p in whole.owned.items()}
    whole.forget_gradients()
    learnt(whole, second)
    for batch in (first, second):
        learnt(halves, batch, divisor=2.0)
    for name, parameter in halves.owned.items():
        # The mean of two, in another order.
        torch.testing.assert_close(parameter.grad, (kept[name] + whole.owned[name].grad) / 2, rtol=1e-5, atol=1e-7)


def test_learn_returns_the_undivided_loss_and_the_extras():
    module, (batch,) = tiny(), batches(1)
    (stage,) = stages_of(module, (4,))
    value, extras = learnt(stage, batch, divisor=8.0)
    assert value == module.loss(batch).item()
    assert set(extras) == {"top"}
    assert isinstance(extras["top"], float)


def test_step_moves_its_own_tensors_only_and_forgets_the_gradients():
    module, (batch,) = tiny(), batches(1)
    optimizer = sgd(module)
    stages = stages_of(module, optimizer=optimizer)
    before = state_of(module)
    learnt(stages[0], batch)
    stages[0].step(StepOrder(0, hyper(optimizer), None))
    assert set(differing(before, state_of(module))) == set(stages[0].owned)
    assert all(p.grad is None for p in stages[0].owned.values())


@pytest.mark.parametrize("clip", [Clip(0.01), Clip(0.001, "value"), Clip(1e6)])
def test_step_clips_like_torch_does(clip):
    module, (batch,) = tiny(), batches(1)
    reference = tiny()
    optimizer = sgd(module)
    (stage,) = stages_of(module, (4,), optimizer=optimizer)
    learnt(stage, batch)
    stage.step(StepOrder(0, hyper(optimizer), clip))
    theirs = sgd(reference)
    reference.loss(batch).backward()
    function = nn.utils.clip_grad_norm_ if clip.algorithm == "norm" else nn.utils.clip_grad_value_
    function(reference.parameters(), clip.value)
    theirs.step()
    assert differing(state_of(module), state_of(reference)) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_step_with_a_gradient_that_is_not_finite_updates_nothing(value):
    module, (batch,) = tiny(), batches(1)
    optimizer = sgd(module)
    (stage,) = stages_of(module, (4,), optimizer=optimizer)
    learnt(stage, batch)
    next(iter(stage.owned.values())).grad.view(-1)[0] = value
    before = state_of(module)
    with pytest.raises(NonFiniteError, match="the gradient must be finite; got norm="):
        stage.step(StepOrder(0, hyper(optimizer), Clip(1.0)))
    assert differing(before, state_of(module)) == []


def test_norm_of_gradients_is_that_of_all_together():
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(3))]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0])
    assert float(finite_norm(parameters)) == 5
    assert float(finite_norm([])) == 0


def test_norm_of_a_sparse_gradient_sums_the_rows_of_one_token_first():
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1, 1, 1])).sum().backward()
    assert float(finite_norm([embedding.weight])) == pytest.approx(3 * 2**0.5)


def test_frozen_parameters_get_no_gradient_and_do_not_move():
    module, (batch,) = tiny(), batches(1)
    module.layers[0].linear.weight.requires_grad_(False)
    module.readout[1].bias.requires_grad_(False)
    optimizer = sgd(module)
    stages, before = stages_of(module, optimizer=optimizer), state_of(module)
    hidden = stages[0].forward(batch, None)
    stages[0].learn(batch, hidden, 1.0)
    learnt(stages[1], batch, hidden.detach())
    stages[1].agree([stages[0].take_readout_gradients()])
    for stage in stages:
        stage.step(StepOrder(0, hyper(optimizer), None))
    still = [name for name in before if name not in differing(before, state_of(module))]
    assert still == ["layers.0.linear.weight", "readout.1.bias"]


def test_taking_readout_gradients_forgets_them():
    (batch,), (first, _) = batches(1), stages_of(tiny())
    learnt(first, batch)
    taken = first.take_readout_gradients()
    assert all(gradient.abs().sum() > 0 for gradient in taken)
    assert first.take_readout_gradients() == [None] * 4


def test_optimizer_state_goes_into_the_stages_and_back_by_name():
    module = tiny()
    optimizer = adam(module)
    module.loss(batches(1)[0]).backward()
    optimizer.step()
    before = {name: optimizer.state[p]["exp_avg"].clone() for name, p in module.named_parameters()}
    stages = stages_of(module, (1, 2, 1), optimizer=optimizer)
    assert optimizer.state == {}
    states = [stage.optimizer_state() for stage in stages]
    assert [set(state) for state in states] == [set(stage.owned) for stage in stages]
    back = plain_state(states, module)
    after = {name: back[p]["exp_avg"] for name, p in module.named_parameters()}
    assert differing(before, after) == []


def test_drawing_uses_and_advances_a_stream_of_its_own():
    (stage,) = stages_of(tiny(), (4,))
    stage.set_random_state(torch.Generator().manual_seed(7).get_state())
    outside, expected = torch.get_rng_state(), torch.rand(4, generator=torch.Generator().manual_seed(7))
    with stage.drawing():
        first = torch.rand(2)
    torch.rand(1)
    with stage.drawing():
        second = torch.rand(2)
    assert torch.equal(torch.cat([first, second]), expected)
    torch.set_rng_state(outside)
    with pytest.raises(LookupError), stage.drawing():
        torch.rand(1)
        raise LookupError
    assert torch.equal(torch.get_rng_state(), outside)


def test_drawing_without_a_stream_uses_the_process_own():
    (stage,) = stages_of(tiny(), (4,))
    expected = torch.rand(2, generator=torch.Generator().manual_seed(1234))
    torch.manual_seed(1234)
    with stage.drawing():
        assert torch.equal(torch.rand(2), expected)
    assert stage.random_state() is None


class Masked(Tiny):
    def stage_kwargs(self, batch, hidden):
        return {"scale": float(batch["x"].shape[0]), "width": hidden.shape[-1]}


class Scaling(nn.Module):
    def forward(self, hidden, scale, width):
        return hidden * scale + width, "attention weights"


def test_layers_get_the_keywords_and_of_a_tuple_the_first_counts():
    module = Masked([Scaling(), Scaling()])
    hidden = torch.ones(1, 3, 6)
    output = run_layers(module, module.layers, hidden, batches(1, size=2)[0])
    assert output.eq((1 * 2 + 6) * 2 + 6).all()


def test_loss_is_a_tensor_or_a_mapping_with_more_scalars():
    loss = torch.tensor(2.0)
    assert split_loss(loss) == (loss, {})
    assert split_loss({"loss": loss, "acc": torch.tensor(0.5)}) == (loss, {"acc": 0.5})


def test_check_of_reach_comes_once_and_frees_what_others_own():
    module, (batch,) = tiny(), batches(1)
    first, last = stages_of(module)
    hidden = first.forward(batch, None)
    first.learn(batch, hidden, 1.0)
    foreign = [name for name, p in first.alias.named_parameters() if not p.requires_grad]
    assert foreign == [name for name in last.owned if not name.startswith("readout")]
    assert all(p.requires_grad for p in module.parameters())


def test_in_place_change_of_the_input_is_refused_and_of_the_embedding_is_not():
    class InPlace(Layer):
        def forward(self, hidden):
            return super().forward(hidden.mul_(2.0))

    (batch,) = batches(1)
    first, last = stages_of(tiny(layers=[InPlace(), InPlace()]), (1, 1))
    hidden = first.forward(batch, None).detach()
    with pytest.raises(MisconfigurationException, match="stage 1 may not change their input in place"):
        last.forward(batch, hidden)


def test_groups_share_the_weights_and_step_every_parameter_once():
    module = tiny()
    layout = BlockLayout(**module.configure_blocks())
    groups = build_groups(module, layout, 3, sgd(module), contextlib.nullcontext)
    names = [name for group in groups for name in group.owned]
    assert sorted(names) == sorted(name for name, _ in module.named_parameters())
    for group in groups:
        assert len(group.parameters) == len(names)
        assert all(p.data_ptr() == dict(module.named_parameters())[n].data_ptr() for n, p in group.parameters.items())
    sizes = [len(group.owned) for group in groups]
    assert max(sizes) - min(sizes) <= 1
