"""What a stage learns under ``credit="next_stage"``, against autograd; when it learns it; and what its graph keeps."""

import copy

import pytest
import torch
from torch import nn

from lightning_blocktrain.errors import StageError
from lightning_blocktrain.pipeline.account import StageClock
from lightning_blocktrain.pipeline.credit import WeightStash
from lightning_blocktrain.pipeline.orders import Clip
from lightning_blocktrain.pipeline.threads import Exchange, ThreadLinks, ThreadPipeline, TurnsPipeline
from lightning_blocktrain.pipeline.worker import Pace, credit_of
from tests.pipeline.test_propositions import PRECISIONS, SIZES, cut, layer_names
from tests.pipeline.tiny import (
    BACKENDS,
    Gated,
    Layer,
    Sabotage,
    adam,
    batches,
    differing,
    hyper,
    open_backend,
    raises,
    sgd,
    slow,
    stages_of,
    state_of,
    tiny,
    train,
)


def learnt_through(backend, module, data, method="rgc", divisor=1.0):
    """Return the stages after a pipeline has learnt from batches, before any step."""
    stages = stages_of(module, SIZES, method, credit="next_stage")
    if backend == "turns":
        pipeline = TurnsPipeline(stages, Pace(serial=True), 0, 60.0, None)
    else:
        pipeline = ThreadPipeline(stages, Pace(serial="serial" in backend), 0, 60.0, 2, 1)
    for batch in data:
        pipeline.learn(batch, divisor)
    pipeline.drain()
    pipeline.close()
    return stages


def horizon_gradients(module, batch):
    """Return the gradient of ``l_s + l_(s+1)`` by parameter name, from one autograd graph per stage."""
    found, hidden, parts = {}, module.stage_embed(batch), cut(module)
    named = dict(module.named_parameters())

    def loss_at(state):
        return module.stage_loss(module.readout(state), batch)["loss"]

    for stage_idx, part in enumerate(parts):
        for layer in part:
            hidden = layer(hidden)
        loss, after = loss_at(hidden), hidden
        for layer in parts[stage_idx + 1] if stage_idx + 1 < len(parts) else ():
            after = layer(after)
        if after is not hidden:
            loss = loss + loss_at(after)
        names = layer_names(module, stage_idx)
        found.update(zip(names, torch.autograd.grad(loss, [named[name] for name in names]), strict=True))
        hidden = hidden.detach()
    return found


@pytest.mark.parametrize("method", ["rgc", "broadcast", "live"])
@pytest.mark.parametrize("backend", ["turns", "threads serial", "threads"])
@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
def test_stage_gradient_is_that_of_its_own_and_the_next_loss(dtype, tolerance, backend, method):
    module, (batch,) = tiny().to(dtype), batches(1)
    expected = horizon_gradients(module, batch)
    stages = learnt_through(backend, module, [batch], method)
    local = horizon_gradients_of_own_loss(module, batch)
    for stage in stages:
        for name in layer_names(module, stage.stage_idx):
            ours = stage.owned[name].grad
            assert (ours - expected[name]).norm() <= tolerance * expected[name].norm(), name
            differs = (ours - local[name]).norm() > 1e-2 * local[name].norm()
            assert differs == (not stage.is_final), name  # the credit is a part of it, and the final stage has none


def horizon_gradients_of_own_loss(module, batch):
    hidden, names = module.stage_embed(batch), []
    named, found = dict(module.named_parameters()), {}
    for stage_idx, part in enumerate(cut(module)):
        for layer in part:
            hidden = layer(hidden)
        names = layer_names(module, stage_idx)
        loss = module.stage_loss(module.readout(hidden), batch)["loss"]
        found.update(zip(names, torch.autograd.grad(loss, [named[name] for name in names]), strict=True))
        hidden = hidden.detach()
    return found


def test_two_stages_learn_as_deep_supervision_with_one_graph_does():
    """With two stages a horizon of two reaches the end: the gradient of the sum of both losses."""
    module, (batch,) = tiny(), batches(1)
    stages = stages_of(module, credit="next_stage")
    pipeline = TurnsPipeline(stages, Pace(serial=True), 0, 60.0, None)
    pipeline.learn(batch, 1.0)
    middle = module.layers[1](module.layers[0](module.stage_embed(batch)))
    final = module.layers[3](module.layers[2](middle))
    total = sum(module.stage_loss(module.readout(state), batch)["loss"] for state in (middle, final))
    total.backward()
    for name, parameter in stages[0].owned.items():
        torch.testing.assert_close(parameter.grad, module.get_parameter(name).grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("backend", ["turns", "threads"])
def test_gradients_of_several_batches_add_up_divided(backend):
    module, data = tiny().double(), batches(3)
    expected = [horizon_gradients(module, batch) for batch in data]
    for stage in learnt_through(backend, module, data, divisor=3.0):
        for name in layer_names(module, stage.stage_idx):
            mean = sum(gradients[name] for gradients in expected) / 3
            torch.testing.assert_close(stage.owned[name].grad, mean, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("method", ["rgc", "broadcast", "live"])
def test_single_stage_neither_gives_nor_awaits_credit(method):
    (stage,) = stages_of(tiny(), (4,), method, credit="next_stage")
    assert (stage.gives_credit, stage.awaits_credit) == (False, False)
    first, middle, last = stages_of(tiny(), SIZES, method, credit="next_stage")
    assert [(s.gives_credit, s.awaits_credit) for s in (first, middle, last)] == [
        (False, True),
        (True, True),
        (True, False),
    ]


@pytest.mark.parametrize("backend", ["turns", "threads", "processes"])
def test_stage_that_goes_on_steps_one_batch_late_with_gradients_of_its_older_weights(launch, backend):
    """Against a loop of our own over copies of the module: SGD, two stages, natural lag of the snapshot."""
    data, rate = batches(5), 0.5
    states = [tiny().double()]  # after k steps of both stages
    for step, batch in enumerate(data):
        early, now = copy.deepcopy(states[max(0, step - 1)]), copy.deepcopy(states[step])
        hidden = early.layers[1](early.layers[0](early.stage_embed(batch)))
        own = early.stage_loss(early.readout(hidden), batch)["loss"]
        final = now.stage_loss(now.readout(now.layers[3](now.layers[2](hidden))), batch)["loss"]
        (own + final).backward()
        after = copy.deepcopy(states[step])
        with torch.no_grad():
            for name, parameter in after.named_parameters():
                if name.startswith(("embed", "layers.0", "layers.1")):
                    gradient = early.get_parameter(name).grad
                elif name.startswith("readout"):
                    gradient = (early.get_parameter(name).grad + now.get_parameter(name).grad) / 2
                else:
                    gradient = now.get_parameter(name).grad
                parameter -= rate * gradient
        states.append(after)
    module = tiny().double()
    pipeline = launch(backend, module, lag="pinned", credit="next_stage")
    train(pipeline, sgd(module), data)
    for name, tensor in state_of(module).items():
        torch.testing.assert_close(tensor, states[-1].state_dict()[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize("batches_per_step", [1, slow(2)])
def test_pinned_lag_gives_every_backend_the_weights_of_turns_bit_for_bit(launch, backend, batches_per_step):
    ends = []
    for name in ("turns", backend):
        module = tiny(dropout=0.3 if "threads" not in backend else 0.0)
        optimizer = adam(module)
        options = {"sizes": (2, 1, 1), "lag": "pinned", "optimizer": optimizer, "credit": "next_stage"}
        pipeline = launch(name, module, random=True, **options)
        for seed in (1, 2):  # with a drain between
            train(pipeline, optimizer, batches(6, seed=seed), Clip(0.1), batches_per_step)
        reports = pipeline.drain(with_state=True)
        steps = {float(s["step"]) for report in reports for s in report.optimizer_state.values()}
        assert steps == {12.0 / batches_per_step}
        pipeline.close()
        ends.append(state_of(module))
    assert differing(*ends) == []


@pytest.mark.parametrize("backend", [slow("processes serial"), "threads serial"])
def test_serial_stages_draw_the_numbers_of_turns(launch, backend):
    ends = []
    for name in ("turns", backend):
        module = tiny(dropout=0.3)
        pipeline = launch(name, module, random=True, credit="next_stage", sizes=(2, 1, 1))
        train(pipeline, sgd(module), batches(4))
        pipeline.close()
        ends.append(state_of(module))
    assert differing(*ends) == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_batch_is_reported_once_and_every_step_taken(launch, backend):
    module = tiny()
    optimizer = adam(module)
    pipeline = launch(backend, module, optimizer=optimizer, sizes=(2, 1, 1), credit="next_stage")
    finished = train(pipeline, optimizer, batches(7))
    assert [batch.batch_idx for batch in finished] == list(range(7))
    assert {account.num_steps for account in pipeline.accounts} == {7}
    assert {account.num_batches for account in pipeline.accounts} == {7}


def test_frozen_first_stage_stays_and_the_others_learn():
    module = tiny()
    for name in layer_names(module, 0):
        module.get_parameter(name).requires_grad_(False)
    before = state_of(module)
    pipeline = open_backend("turns", module, sizes=SIZES, credit="next_stage")
    train(pipeline, sgd(module), batches(2))
    assert differing(before, state_of(module)) == [n for n in before if n not in layer_names(module, 0)]


@pytest.mark.parametrize("backend", ["turns", "threads", slow("processes")])
@pytest.mark.parametrize("where", [1, 3])
def test_failure_behind_a_stage_that_waits_for_credit_is_told_with_its_cause(launch, backend, where):
    layers = [Layer() for _ in range(4)]
    layers[where] = Sabotage(raises, on_pass=2)
    module = tiny(layers=layers)
    pipeline = launch(backend, module, sizes=(1, 1, 1, 1), credit="next_stage")
    with pytest.raises(StageError, match=f"stage {where} failed at step 2: LookupError: this layer is broken"):
        train(pipeline, sgd(module), batches(6))


def test_stage_takes_the_next_batch_while_its_credit_is_held_up(launch, make_gate):
    """The first stage has its second batch's loss reported before the final stage has seen the first batch."""
    gate, entered = make_gate("threads"), make_gate("threads")
    module = tiny(layers=[Layer(), Gated(gate, entered)])
    before = state_of(module)
    pipeline = launch("threads", module, sizes=(1, 1), credit="next_stage")
    for batch in batches(2):
        pipeline.learn(batch, 1.0)
        pipeline.step(hyper(sgd(module)), None)
    entered.wait()
    assert differing(before, state_of(module)) == []  # no step without its credit
    gate.open()
    pipeline.drain()
    assert {account.num_steps for account in pipeline.accounts} == {2}


def test_credit_of_another_batch_is_refused():
    exchange = Exchange(2, 1, 0)
    first, last = (ThreadLinks(exchange, idx, StageClock()) for idx in (0, 1))
    last.send_credit(4, torch.ones(1))
    with pytest.raises(RuntimeError, match="the credit is that of batch 4, not 5"):
        first.receive_credit(5)
    assert credit_of((3, torch.ones(2)), 3).sum() == 2


class Wide(nn.Module):
    """Saves its weights transposed, in pieces and as they are."""

    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(3, 6), nn.Parameter(torch.rand(3))

    def forward(self, x):
        left, right = self.linear.weight.chunk(2)
        return (torch.tanh(self.linear(x)) @ torch.cat([left, right]) * self.scale) @ left.t() @ right


def wide():
    torch.manual_seed(0)
    return Wide()


@pytest.mark.parametrize("shared", [False, True])
def test_stash_gives_a_graph_the_weights_from_before_a_step(shared):
    module, x = wide(), torch.rand(2, 3, requires_grad=True)
    if shared:  # all parameters in one piece of memory, as processes have them
        memory = torch.zeros(64)
        start = 5
        for parameter in module.parameters():
            view = memory[start : start + parameter.numel()].view_as(parameter)
            parameter.data = view.copy_(parameter.data)
            start += parameter.numel()
    expected = torch.autograd.grad(module(x).square().sum(), [x, *module.parameters()])
    stash = WeightStash(module.parameters())
    with stash.saving():
        loss = module(x).square().sum()
    stash.keep()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(3.0).add_(1.0)
    stash.keep()  # a second step changes nothing
    for _ in range(2):
        found = torch.autograd.grad(loss, [x, *module.parameters()], retain_graph=True)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def test_stash_copies_nothing_without_a_step(monkeypatch):
    module, x = wide(), torch.rand(2, 3)
    stash = WeightStash(module.parameters())
    with stash.saving():
        loss = module(x).sum()
    monkeypatch.setattr("torch.Tensor.clone", lambda tensor: pytest.fail("a weight was copied"))
    torch.autograd.grad(loss, list(module.parameters()))


def test_stash_refuses_what_was_changed_in_place():
    module, x = wide(), torch.rand(2, 3)
    with WeightStash(module.parameters()).saving():
        loss = module(x).sum()
    x.mul_(2)
    with pytest.raises(RuntimeError, match="was changed in place after it was saved"):
        loss.backward()
