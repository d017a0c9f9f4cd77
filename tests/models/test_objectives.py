"""What every objective teaches a block: its gradients, its values by hand, and runs of blocks that learn at once."""

from collections.abc import Iterable
from itertools import product
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_blocktrain import BlockTrainStrategy
from lightning_blocktrain.edm import sample_sigma, weight
from lightning_blocktrain.models import ByteTransformer, DiffusionBlocks, diffusion_blocks
from lightning_blocktrain.models.block_model import UNKNOWN
from lightning_blocktrain.models.diffusion_blocks import P_MEAN, P_STD
from lightning_blocktrain.models.loading import Model
from lightning_blocktrain.partition import partition
from tests.models.cases import CAUSAL, NOISY, READS_PREFIX, T, causal, lively, noisy, random_batch

# Without a Trainer ``self.log`` warns that it has nowhere to log to.
pytestmark = pytest.mark.filterwarnings("ignore:You are trying to `self.log")

CASES = [*CAUSAL, *NOISY]
OBJECTIVES = [objective for _, objective in NOISY]
Gradients = dict[str, Tensor]


def gradients(model: torch.nn.Module, loss: Tensor) -> Gradients:
    """Return the gradient of every parameter that the loss reaches."""
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {name: gradient for name, gradient in zip(named, found, strict=True) if gradient is not None}


def assert_close(one: Gradients, other: Gradients, names: Iterable[str]) -> None:
    for name in names:
        torch.testing.assert_close(one[name], other[name], rtol=1e-4, atol=1e-6, msg=name)


def taught(model: Model, block_idx: int) -> set[str]:
    """Return what the loss of a block may change: its own tensors and the interface, but no frozen table."""
    cut = partition(model, model.configure_blocks())
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    return {*cut.block_names[block_idx], *cut.interface_names} - frozen


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# Gradients.


@pytest.mark.parametrize("block_idx", [0, 1, 2])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_block_loss_reaches_its_block_and_the_interface_only(case: tuple[str, str], block_idx: int) -> None:
    model = lively(*case, p_span=0.5)
    reached = gradients(model, model.block_training_step(random_batch(), 0, block_idx))
    assert set(reached) == taught(model, block_idx)
    assert all(bool(gradient.any()) for gradient in reached.values())
    stem = {name for name in reached if name.startswith(("embed.", "context."))}
    # What runs before the layers is taught by block 0; where nothing is frozen, by every block.
    assert bool(stem) == (block_idx == 0 or case[1] not in READS_PREFIX)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_loss_of_the_whole_walk_reaches_every_block(case: tuple[str, str]) -> None:
    """The control: a walk has a graph, so that it is the training that cuts it."""
    model, (inputs, targets) = lively(*case), random_batch()
    noise = model.draw_noise(inputs.shape, torch.Generator().manual_seed(0))
    reached = gradients(model, cross_entropy(model.exit_logits(inputs, None, noise), targets))
    assert set(reached) >= set().union(*(taught(model, block_idx) for block_idx in range(3)))


@pytest.mark.parametrize("block_idx", [1, 2])
@pytest.mark.parametrize("objective", ["features", "residual"])
def test_causal_block_loss_by_hand_and_without_the_cut_it_would_reach_the_blocks_before(
    objective: str, block_idx: int
) -> None:
    model, (inputs, targets) = causal(objective, p_span=0.0), random_batch()

    def by_hand(cut: bool) -> Tensor:
        hidden, logits = model.embed(inputs), 0.0
        for layer_idx in range(block_idx + 1):
            if cut and layer_idx == block_idx:
                hidden = hidden.detach()
                logits = logits.detach() if isinstance(logits, Tensor) else logits
            hidden = model.layers[layer_idx](hidden)
            own = model.readout(hidden)
            logits = own + logits if objective == "residual" else own
        return cross_entropy(logits, targets)

    loss = model.block_training_step((inputs, targets), 0, block_idx)
    expected, live = by_hand(cut=True), by_hand(cut=False)
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    own, hand, reached = (gradients(model, value) for value in (loss, expected, live))
    assert set(own) == set(hand) == taught(model, block_idx)
    assert_close(own, hand, own)
    assert {"embed.weight", "layers.0.mlp.up.weight"} <= set(reached)
    if objective == "residual":  # the logits before it move the readout too, were they not frozen
        difference = (own["readout.unembed.weight"] - reached["readout.unembed.weight"]).abs().max()
        assert float(difference) > 1e-3


def drawn(model: DiffusionBlocks, block_idx: int, shape: torch.Size, seed: int) -> tuple[Tensor, Tensor]:
    """Return noise levels and noise in the order in which a loss draws them, p_span and p_drop_z being 0."""
    torch.manual_seed(seed)
    sigma = sample_sigma(torch.rand(shape[0]), *model.bands[block_idx], P_MEAN, P_STD)
    return sigma, torch.randn(*shape, model.width)


def noisy_block(model: DiffusionBlocks, block_idx: int, hidden: Tensor, z: Tensor, sigma: Tensor) -> tuple[Tensor, ...]:
    """Return the hidden state after one layer and ``u``, from EDM's formulas with sigma_data = 0.5."""
    sigma = sigma[:, None, None]
    total = sigma**2 + 0.25
    entering = model.z_gate * model.norm_z(model.z_in(z / total.sqrt()))
    after = model.layers[block_idx](hidden + model.noise_embedding(sigma.log() / 4) + entering)
    return after, 0.5 * sigma / total.sqrt() * after + 0.25 / total * z


@pytest.mark.parametrize("block_idx", [0, 1, 2])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_noisy_block_loss_by_hand_and_without_the_cut_it_would_reach_the_blocks_before(
    objective: str, block_idx: int
) -> None:
    model, (inputs, targets) = noisy(objective, p_span=0.0), random_batch()

    def by_hand(cut: bool) -> Tensor:
        y = model.target_table[targets]
        sigma, eps = drawn(model, block_idx, targets.shape, seed=7)
        hidden = model.context(inputs)
        for earlier in range(block_idx) if objective == "denoise_features" else ():
            level = torch.full((len(inputs),), model.sweep_sigmas[earlier])
            hidden, _ = noisy_block(model, earlier, hidden, y + level[:, None, None] * eps, level)
        hidden = hidden.detach() if cut and objective == "denoise_features" and block_idx else hidden
        _, u = noisy_block(model, block_idx, hidden, y + sigma[:, None, None] * eps, sigma)
        read = u.detach() if cut and objective == "mse" else u
        nats = F.cross_entropy(model.readout(read).mT, targets, reduction="none").mean(1)
        squared = ((u - y) ** 2).sum(-1).mean(1) if objective == "mse" else 0.0
        return ((sigma**2 + 0.25) / (0.5 * sigma) ** 2 * (squared + nats)).mean()

    torch.manual_seed(7)
    loss = model.block_training_step((inputs, targets), 0, block_idx)
    expected = by_hand(cut=True)
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-4)
    own, hand = gradients(model, loss), gradients(model, expected)
    assert set(own) == set(hand) == taught(model, block_idx)
    for name, gradient in own.items():
        torch.testing.assert_close(gradient, hand[name], rtol=1e-3, atol=1e-4, msg=name)
    reached = gradients(model, by_hand(cut=False))
    if objective == "denoise_features" and block_idx:
        assert {"context.0.weight", "layers.0.mlp.up.weight"} <= set(reached) - set(own)
    if objective == "mse":  # the cross entropy would move the block, did it reach it
        name = f"layers.{block_idx}.mlp.up.weight"
        assert float((own[name] - reached[name]).abs().max()) > 1e-3


@pytest.mark.parametrize("weighted", [True, False])
def test_mse_teaches_the_block_by_its_squared_error_alone_and_the_readout_by_its_cross_entropy(weighted: bool) -> None:
    model, (inputs, targets) = noisy("mse", p_span=0.0, weighted=weighted), random_batch()
    torch.manual_seed(7)
    own = gradients(model, model.block_training_step((inputs, targets), 0, 1))
    sigma, eps = drawn(model, 1, targets.shape, seed=7)
    y = model.target_table[targets]
    _, u = noisy_block(model, 1, model.context(inputs), y + sigma[:, None, None] * eps, sigma)
    share = weight(sigma) if weighted else torch.ones_like(sigma)
    squared = gradients(model, (share * ((u - y) ** 2).sum(-1).mean(1)).mean())
    nats = F.cross_entropy(model.readout(u.detach()).mT, targets, reduction="none").mean(1)
    read = gradients(model, (share * nats).mean())
    assert set(own) == set(squared) | set(read)
    assert {name for name in own if name.startswith("readout.")} == set(read)
    for name, gradient in own.items():
        torch.testing.assert_close(gradient, {**squared, **read}[name], rtol=1e-3, atol=1e-4, msg=name)
    assert not model.target_rows.requires_grad and not set(squared) & set(read)


# What the blocks before a block hand on.


@pytest.mark.parametrize("exits", ["shared", "own"])
@pytest.mark.parametrize("objective", ["features", "residual"])
def test_block_features_are_the_blocks_before_by_hand_without_graph(objective: str, exits: str) -> None:
    model, batch = causal(objective, num_layers=6, exits=exits), random_batch()
    hidden, logits, after = model.embed(batch[0]), torch.zeros(()), []
    for block_idx in range(3):
        features = model.block_features(batch, block_idx)
        assert not any(tensor.requires_grad for tensor in features)
        expected = after if objective == "residual" else [hidden]
        assert len(features) == len(expected)
        for one, other in zip(features, expected, strict=True):
            torch.testing.assert_close(one, other)
        if block_idx:
            state = model.before(features)
            assert not any(tensor.requires_grad for tensor in state)
            torch.testing.assert_close(state[0], hidden)
            if objective == "residual":
                torch.testing.assert_close(state[1], logits)
        for layer in model.layers[2 * block_idx : 2 * block_idx + 2]:
            hidden = layer(hidden)
        after.append(hidden)
        own = model.readout if model.exits is None or block_idx == 2 else model.exits[block_idx]
        logits = logits + own(hidden)


@pytest.mark.parametrize("objective", ["features", "residual"])
def test_block_features_are_a_function_of_the_bytes_and_the_blocks_before(objective: str) -> None:
    model, (inputs, targets) = causal(objective), random_batch()
    first, state = model.block_features((inputs, targets), 2), torch.get_rng_state()
    with torch.no_grad():
        for parameter in model.layers[2].parameters():
            parameter.add_(1.0)
    again = model.block_features((inputs, targets.flip(1)), 2)
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    with torch.no_grad():
        model.readout.unembed.weight.add_(1.0)  # nobody's prefix: what is kept on disk must not depend on it
    again = model.block_features((inputs, targets), 2)
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    with torch.no_grad():
        model.layers[1].mlp.down.bias.add_(1.0)  # type: ignore[union-attr, operator]
    assert not torch.equal(model.block_features((inputs, targets), 2)[-1], first[-1])


def test_noisy_features_have_no_graph_and_are_a_function_of_their_arguments() -> None:
    model, (inputs, targets) = noisy("denoise_features"), random_batch()
    y, eps = model.target_table[targets], torch.randn(4, T, model.width)
    assert model.features(0, inputs, y, eps).requires_grad
    first, state = model.features(2, inputs, y, eps), torch.get_rng_state()
    assert not first.requires_grad
    assert torch.equal(model.features(2, inputs, y, eps), first) and torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(model.features(2, inputs, y, eps + 1), first)


@pytest.mark.parametrize("objective", ["denoise", "mse"])
def test_features_of_objectives_without_prefix_are_the_context(objective: str) -> None:
    model, (inputs, targets) = noisy(objective), random_batch()
    y, eps = model.target_table[targets], torch.randn(4, T, model.width)
    for block_idx in range(3):
        assert torch.equal(model.features(block_idx, inputs, y, eps), model.context(inputs))


@pytest.mark.parametrize("block_idx", [0, 1, 2])
@pytest.mark.parametrize("p_span", [0.0, 1.0])
@pytest.mark.parametrize("objective", ["features", "residual"])
def test_hidden_bytes_are_hidden_from_the_blocks_before_too(
    objective: str, p_span: float, block_idx: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, (inputs, targets) = causal(objective), random_batch()
    model.p_span = p_span
    seen: list[Tensor] = []
    real = model.start
    monkeypatch.setattr(model, "start", lambda inputs, noise=None: seen.append(inputs) or real(inputs, noise))
    model.block_training_step((inputs, targets), 0, block_idx)
    model.training_step((inputs, targets), 0)
    assert len(seen) == 2
    for read in seen:
        assert bool((read[:, -1] == UNKNOWN).all()) if p_span else torch.equal(read, inputs)


# Logits that add up.


@torch.no_grad()
def test_residual_logits_are_the_sum_of_the_readouts_at_every_exit() -> None:
    model, (inputs, _) = causal("residual", num_layers=6), random_batch()
    hidden, total = model.embed(inputs), torch.zeros(())
    for num_blocks in (1, 2, 3):
        for layer in model.layers[2 * num_blocks - 2 : 2 * num_blocks]:
            hidden = layer(hidden)
        total = total + model.readout(hidden)
        torch.testing.assert_close(model.exit_logits(inputs, num_blocks), total, rtol=1e-5, atol=1e-5)
    assert torch.equal(model(inputs), model.exit_logits(inputs))


def test_residual_end_to_end_learns_the_sum_through_all_blocks() -> None:
    model, (inputs, targets) = causal("residual", p_span=0.0), random_batch()
    hidden, total = model.embed(inputs), torch.zeros(())
    for layer in model.layers:
        hidden = layer(hidden)
        total = total + model.readout(hidden)
    expected, loss = cross_entropy(total, targets), model.training_step((inputs, targets), 0)
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    own, hand = gradients(model, loss), gradients(model, expected)
    assert set(own) == {name for name, _ in model.named_parameters()}
    assert_close(own, hand, own)


def test_residual_sums_have_no_stages(make_trainer: Any, tiny_data: Any) -> None:
    words = "stages of a pipeline and their exits need objective='features'; got objective='residual'"
    with pytest.raises(MisconfigurationException, match=words):
        causal("residual").stage_embed(random_batch())
    model = ByteTransformer(num_layers=2, width=16, num_heads=2, window_bytes=16, objective="residual")
    with pytest.raises(MisconfigurationException, match=words):
        make_trainer(strategy="rgc", max_steps=1, limit_val_batches=0).fit(model, tiny_data)


# Without z.


@pytest.mark.parametrize("block_idx", [0, 1, 2])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_loss_depends_on_z_for_those_sequences_only_that_are_shown_it(
    objective: str, block_idx: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = random_batch(64)
    for p_drop_z, low, high in ((0.0, 64, 64), (0.5, 16, 48), (1.0, 0, 0)):
        model = noisy(objective, p_drop_z=p_drop_z)
        losses = []
        for noise in (0.0, 1.0):
            monkeypatch.setattr(torch, "randn_like", lambda y, noise=noise: torch.full_like(y, noise))
            torch.manual_seed(3)
            losses.append(model.block_losses(batch, block_idx)[0])
        changed = int((losses[0] != losses[1]).sum())
        # 16 to 48 of 64 at one half: four standard deviations.
        assert low <= changed <= high


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_training_without_z_teaches_nothing_that_reads_it(objective: str) -> None:
    model = noisy(objective, p_drop_z=1.0)
    for block_idx in range(3):
        reached = gradients(model, model.block_training_step(random_batch(), 0, block_idx))
        silent = {name for name, gradient in reached.items() if not gradient.any()}
        table = set() if objective == "mse" else {"target_rows"}
        assert silent == {"z_in.weight", "norm_z.weight", "norm_z.bias", "z_gate"} | table


@torch.no_grad()
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_sweep_without_z_is_the_forward_of_training_without_it(objective: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, (inputs, targets) = noisy(objective, p_drop_z=1.0, p_span=0.0), random_batch()
    for block_idx, level in enumerate(model.sweep_sigmas):
        monkeypatch.setattr(
            diffusion_blocks, "sample_sigma", lambda uniform, *_, level=level: torch.full_like(uniform, level)
        )
        _, nats, _ = model.block_losses((inputs, targets), block_idx)
        logits = model.sweep(inputs, None, block_idx + 1)
        expected = F.cross_entropy(logits.mT, targets, reduction="none").mean(1)
        torch.testing.assert_close(nats, expected)


# Runs.


class WhatLearns(L.Callback):
    """List the parameters with a gradient at every step of every worker."""

    def __init__(self) -> None:
        self.steps: list[set[str]] = []

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self.steps.append({name for name, p in pl_module.named_parameters() if p.grad is not None})


@pytest.mark.parametrize("case", CASES, ids=str)
def test_blocks_learn_at_once_and_each_step_changes_one_block_and_the_interface(
    case: tuple[str, str], make_trainer: Any, tiny_data: Any
) -> None:
    model = lively(*case, window_bytes=16).train()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    watch = WhatLearns()
    strategy = BlockTrainStrategy(sync_every=2)
    trainer = make_trainer(strategy=strategy, max_steps=4, limit_val_batches=1, callbacks=[watch])
    trainer.fit(model, tiny_data)
    assert watch.steps == [taught(model, block_idx) for _, block_idx in product(range(4), range(3))]
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed == set(before) - ({"target_rows"} if case[1] == "mse" else set())
    assert all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_fit_by_blocks_learns_at_every_exit(case: tuple[str, str], make_trainer: Any, tiny_data: Any) -> None:
    sizes = {"num_layers": 2, "num_blocks": 2, "width": 32, "num_heads": 2, "window_bytes": 16}
    kind = {"ByteTransformer": ByteTransformer, "DiffusionBlocks": DiffusionBlocks}[case[0]]
    model = kind(**sizes, objective=case[1], lr=0.01, warmup_steps=5)  # type: ignore[arg-type]
    max_steps = 120 if case[1] == "mse" else 60  # its readout learns only once there is something to read
    make_trainer(strategy=BlockTrainStrategy(), max_steps=max_steps, limit_val_batches=0).fit(model, tiny_data)
    tiny_data.setup("validate")
    batch = next(iter(tiny_data.val_dataloader()))
    first, last = model.eval().exit_nats(batch, 0).mean((1, 2)).tolist()
    # The frequencies of the bytes alone cost 2.51 nats: below that, the context is used.
    assert first < 2.4 and last < 2.4


@pytest.mark.parametrize("objective", ["features", "residual"])
@pytest.mark.parametrize("lookahead", [0, 1])
def test_fit_by_blocks_with_own_exits_a_block_is_what_it_is_without_those_after_it(
    objective: Any, lookahead: int, make_trainer: Any, tiny_data: Any
) -> None:
    """But for what it has looked ahead to."""

    class Scaled(ByteTransformer):
        scale = 1.0

        def block_training_step(self, batch: Any, batch_idx: int, block_idx: int) -> Tensor:
            return super().block_training_step(batch, batch_idx, block_idx) * (self.scale if block_idx else 1.0)

    weights, strategies = [], []
    for scale in (1.0, 0.01):
        torch.manual_seed(0)
        model = Scaled(4, 16, 2, 16, num_blocks=2, objective=objective, exits="own", lookahead=lookahead)
        model.scale = scale
        strategies.append(BlockTrainStrategy(sync_every=2))
        make_trainer(strategy=strategies[-1], max_steps=6, limit_val_batches=0, gradient_clip_val=1.0).fit(
            model, tiny_data
        )
        weights.append(model.state_dict())
    same = {name for name, tensor in weights[0].items() if torch.equal(tensor, weights[1][name])}
    first = {name for name in weights[0] if name.startswith(("embed", "layers.0", "layers.1", "exits.0"))}
    assert same == (set() if lookahead else first)
    # Block 1 runs two frozen layers, and block 0 as many ahead; exits, which sums of logits run as well, are no layers.
    num_tokens = strategies[0].worker_tokens // 2
    assert strategies[0].prefix_tokens == (4 if lookahead else 2) * num_tokens
