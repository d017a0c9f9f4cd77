import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_blocktrain.edm import SIGMA_DATA, weight
from lightning_blocktrain.models import DiffusionBlocks
from lightning_blocktrain.models.block_model import UNKNOWN, hide_suffix
from lightning_blocktrain.models.diffusion_blocks import (
    sequence_cross_entropy,
    weighted_loss,
)
from lightning_blocktrain.models.transformer import LayerKind
from lightning_blocktrain.partition import band_table, partition

B, T, D, V = 3, 8, 16, 256
SMALL: dict[str, Any] = {"num_layers": 3, "num_blocks": 3, "width": D, "num_heads": 2, "window_bytes": T}

# Without a Trainer ``self.log`` warns that it has nowhere to log to.
pytestmark = pytest.mark.filterwarnings("ignore:You are trying to `self.log")


def lively(**options: Any) -> DiffusionBlocks:
    """Return a model whose logits differ clearly between bytes, contexts and z."""
    model = DiffusionBlocks(**{**SMALL, **options}).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and not name.startswith("noise_embedding"):
                parameter.normal_(std=0.4)
    return model


def random_batch(num_sequences: int = 4) -> tuple[Tensor, Tensor]:
    text = torch.randint(V, (num_sequences, T + 1))
    return text[:, :-1], text[:, 1:]


def noisy_targets(model: DiffusionBlocks, targets: Tensor, eps: Tensor, sigma: float) -> Tensor:
    return model.target_table[targets] + sigma * eps


def denoise(model: DiffusionBlocks, block_idx: int, inputs: Tensor, z: Tensor, sigma: Tensor) -> Tensor:
    return model.denoise(block_idx, model.embed_bytes(inputs), z, sigma)


def change_per_position(one: Tensor, other: Tensor) -> Tensor:
    return (one - other).abs().amax(dim=(0, 2))


# What leaks, and what does not.


@torch.no_grad()
@pytest.mark.parametrize("block_idx", range(B))
@pytest.mark.parametrize("changed", range(T))
def test_denoise_fixed_z_changed_byte_reaches_its_own_and_later_logits(block_idx: int, changed: int) -> None:
    model = lively()
    inputs, targets = random_batch()
    sigma = torch.full((4,), 2.0)
    z = noisy_targets(model, targets, torch.randn(4, T, D), 2.0)
    other = inputs.clone()
    other[:, changed] = (other[:, changed] + 1) % V
    change = change_per_position(*(denoise(model, block_idx, context, z, sigma) for context in (inputs, other)))
    assert bool((change[:changed] < 1e-5).all())
    assert bool((change[changed:] > 1e-4).all())


@torch.no_grad()
@pytest.mark.parametrize("changed", range(1, T))
def test_denoise_z_of_the_text_changed_byte_shows_one_position_earlier_only(changed: int) -> None:
    model = lively()
    text = torch.randint(V, (4, T + 1))
    other = text.clone()
    other[:, changed] = (other[:, changed] + 1) % V
    eps, sigma = torch.randn(4, T, D), torch.full((4,), 1.0)
    logits = [denoise(model, 1, t[:, :-1], noisy_targets(model, t[:, 1:], eps, 1.0), sigma) for t in (text, other)]
    change = change_per_position(*logits)
    assert bool((change[: changed - 1] < 1e-5).all())
    # z of position j - 1 is made from byte j: that is the answer, noised, and it must be seen.
    assert bool((change[changed - 1 :] > 1e-4).all())


@torch.no_grad()
def test_denoise_mlp_layers_see_no_other_position() -> None:
    model = lively(layer="mlp")
    inputs, _ = random_batch()
    z, sigma = torch.randn(4, T, D), torch.full((4,), 2.0)
    other = inputs.clone()
    other[:, 3] = (other[:, 3] + 1) % V
    change = change_per_position(denoise(model, 0, inputs, z, sigma), denoise(model, 0, other, z, sigma))
    assert (change > 1e-5).tolist() == [position == 3 for position in range(T)]


@torch.no_grad()
def test_denoise_window_shorter_than_the_longest_is_a_prefix() -> None:
    model = lively()
    inputs, _ = random_batch()
    z, sigma = torch.randn(4, T, D), torch.full((4,), 2.0)
    short = denoise(model, 0, inputs[:, :3], z[:, :3], sigma)
    torch.testing.assert_close(short, denoise(model, 0, inputs, z, sigma)[:, :3], rtol=1e-4, atol=1e-5)


# The target table, the streams and the start.


@pytest.mark.parametrize("norm", [0.3, 0.5, 1.0])
def test_target_table_rows_have_the_target_norm(norm: float) -> None:
    torch.testing.assert_close(lively(target_norm=norm).target_table.norm(dim=-1), torch.full((V,), norm))


@pytest.mark.parametrize("sigma", [1.0, 10.0])
def test_streams_before_the_gate_have_comparable_norms_and_the_gate_sets_their_ratio(sigma: float) -> None:
    model = DiffusionBlocks(**{**SMALL, "width": 128})
    inputs, targets = random_batch()
    seen: dict[str, Tensor] = {}
    for name in ("context", "norm_z", "noise_embedding"):
        model.get_submodule(name).register_forward_hook(lambda _, __, out, name=name: seen.update({name: out}))
    hidden: list[Tensor] = []
    model.layers[0].register_forward_pre_hook(lambda _, args: hidden.append(args[0]))
    z = noisy_targets(model, targets, torch.randn(4, T, 128), sigma)
    with torch.no_grad():
        denoise(model, 0, inputs, z, torch.full((4,), sigma))
    context, noisy = (seen[name].norm(dim=-1).mean() for name in ("context", "norm_z"))
    assert 0.8 < float(context / noisy) < 1.25
    assert float(seen["noise_embedding"].norm(dim=-1).mean()) < 0.2 * float(context)
    # Independent streams of norm sqrt(D), the noisy one behind its gate.
    expected = math.sqrt(128 * (1 + float(model.z_gate.detach().mean()) ** 2))
    assert float(hidden[0].norm(dim=-1).mean()) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("block_idx", range(B))
def test_untrained_unweighted_loss_is_log_of_the_vocabulary(block_idx: int) -> None:
    model = DiffusionBlocks(**SMALL, weighted=False)
    loss = model.block_training_step(random_batch(), 0, block_idx)
    assert float(loss.detach()) == pytest.approx(math.log(256), rel=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("sigma", [1.0, 3.0, 10.0])
def test_denoise_preconditions_as_edm_does(sigma: float) -> None:
    model = lively()
    inputs, _ = random_batch()
    z = torch.randn(4, T, D)
    total = sigma**2 + SIGMA_DATA**2
    embedding, norm = model.context
    hidden = norm(embedding(inputs))
    hidden = hidden + model.z_gate * model.norm_z(model.z_in(z / math.sqrt(total)))
    hidden = model.layers[1](hidden + model.noise_embedding(torch.full((4, 1, 1), math.log(sigma) / 4)))
    mixed = sigma * SIGMA_DATA / math.sqrt(total) * hidden + SIGMA_DATA**2 / total * z
    logits = denoise(model, 1, inputs, z, torch.full((4,), sigma))
    torch.testing.assert_close(logits, model.readout(mixed), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_denoise_reads_the_noise_level() -> None:
    model = lively()
    inputs, _ = random_batch()
    z = torch.randn(4, T, D)
    assert not torch.allclose(
        model.noise_embedding(torch.zeros(1, 1, 1)), model.noise_embedding(torch.full((1, 1, 1), 0.5))
    )
    one, other = (denoise(model, 0, inputs, z, torch.full((4,), sigma)) for sigma in (1.0, 10.0))
    assert not torch.allclose(one, other)


# The block-local loss.


def test_block_losses_noise_the_next_byte(record: Any) -> None:
    # So little noise that the nearest row of the table is the byte that z was made from.
    model = lively(sigma_min=1e-4, sigma_max=2e-4, p_span=0.0)
    calls = record(model)
    inputs, targets = random_batch()
    model.block_losses((inputs, targets), 1)
    [call] = calls
    assert torch.equal(call.inputs, inputs)
    assert torch.equal((call.z @ model.target_table.T).argmax(-1), targets)
    assert torch.equal(targets[:, :-1], inputs[:, 1:])


@pytest.mark.parametrize("gamma", [0.0, 0.1])
def test_block_losses_noise_has_the_level_that_is_reported(gamma: float, record: Any) -> None:
    model = lively(gamma=gamma)
    calls = record(model)
    inputs, targets = random_batch(64)
    _, _, sigma = model.block_losses((inputs, targets), 0)
    [call] = calls
    assert torch.equal(call.sigma, sigma)
    assert len(set(sigma.tolist())) > 60  # one level per sequence
    residual = (call.z - model.target_table.detach()[targets]).flatten(1) / sigma[:, None]
    # Unit normal draws, T * D = 128 a sequence: the standard deviation of one of 64 is off by 4 sigma = 25 % at most.
    assert residual.std(dim=1).sub(1).abs().max() < 0.25
    assert abs(float(residual.std()) - 1) < 0.03


def test_training_and_sweep_map_noise_to_the_same_blocks(record: Any) -> None:
    model = lively(gamma=0.0)
    bands = band_table(model.block_sigma_edges)
    calls = record(model)
    for block_idx in range(B):
        model.block_training_step(random_batch(64), 0, block_idx)
    model(random_batch()[0])
    assert [call.block_idx for call in calls] == [0, 1, 2, 0, 1, 2]
    for call in calls:
        _, low, high = bands[call.block_idx]
        # float32 levels against float64 edges.
        assert low * (1 - 1e-6) <= float(call.sigma.min()) <= float(call.sigma.max()) <= high * (1 + 1e-6)


def test_bands_overlap_by_gamma_and_descend() -> None:
    model = DiffusionBlocks(**SMALL, gamma=0.1)
    for (_, low, high), (wide_low, wide_high) in zip(band_table(model.block_sigma_edges), model.bands, strict=True):
        assert wide_low <= low < high <= wide_high
    assert model.bands[0][0] < model.bands[1][1] < model.bands[0][1]
    assert (model.bands[0][1], model.bands[2][0]) == (10.0, 1.0)


@pytest.mark.parametrize("block_idx", range(B))
def test_block_loss_reaches_its_block_and_the_interface_only(block_idx: int) -> None:
    model = lively()
    ran: list[int] = []
    for layer_idx, layer in enumerate(model.layers):
        layer.register_forward_hook(lambda *_, layer_idx=layer_idx: ran.append(layer_idx))
    torch.autograd.backward(model.block_training_step(random_batch(), 0, block_idx))
    cut = partition(model, model.configure_blocks())
    reached = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert reached == {*cut.block_names[block_idx], *cut.interface_names}
    assert ran == [block_idx]
    assert all(bool(p.grad.any()) for p in model.parameters() if p.grad is not None)


def test_configure_blocks_declares_no_prefix() -> None:
    model = DiffusionBlocks(**SMALL)
    layout = model.configure_blocks()
    assert (layout.layers, layout.readout, layout.num_blocks, layout.prefix) == (model.layers, model.readout, 3, "none")
    assert layout.stem is None


def test_configure_blocks_of_features_declares_the_frozen_prefix_and_its_stem() -> None:
    model = DiffusionBlocks(**SMALL, objective="denoise_features")
    layout = model.configure_blocks()
    assert (layout.num_blocks, layout.prefix, layout.stem) == (3, "frozen", model.context)
    names = partition(model, layout).block_names[0]
    assert {"context.0.weight", "context.1.weight", "context.1.bias"} <= set(names)


def test_sequence_cross_entropy_is_the_mean_of_each_sequence() -> None:
    _, targets = random_batch()
    logits = torch.randn(4, T, V)
    log_probability = logits.double().log_softmax(-1)
    expected = [-sum(float(log_probability[b, t, targets[b, t]]) for t in range(T)) / T for b in range(4)]
    assert sequence_cross_entropy(logits, targets).tolist() == pytest.approx(expected, rel=1e-5)


def test_weighted_loss_unequal_noise_is_the_per_sequence_formula_not_the_outer_product() -> None:
    cross_entropy, sigma = torch.tensor([1.0, 2.0, 6.0]), torch.tensor([0.1, 1.0, 10.0])
    weights = [(s * s + 0.25) / (0.5 * s) ** 2 for s in (0.1, 1.0, 10.0)]
    expected = sum(w * ce for w, ce in zip(weights, (1.0, 2.0, 6.0), strict=True)) / 3
    outer = float((weight(sigma)[:, None] * cross_entropy).mean())
    assert float(weighted_loss(cross_entropy, sigma)) == pytest.approx(expected, rel=1e-6)
    assert abs(expected - outer) > 1


@pytest.mark.parametrize(("weighted", "expected"), [(True, (104 * 1 + 5 * 3) / 2), (False, 2.0)])
def test_block_training_step_weighs_on_request(
    weighted: bool, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = DiffusionBlocks(**SMALL, weighted=weighted)
    losses = (torch.tensor([1.0, 3.0]), torch.tensor([7.0, 7.0]), torch.tensor([0.1, 1.0]))
    monkeypatch.setattr(model, "block_losses", lambda batch, block_idx: losses)
    assert float(model.block_training_step(random_batch(2), 0, 0)) == pytest.approx(expected, rel=1e-6)


def test_training_step_draws_every_block(record: Any) -> None:
    model = lively()
    calls = record(model)
    for _ in range(40):
        model.training_step(random_batch(1), 0)
    assert {call.block_idx for call in calls} == {0, 1, 2}  # one of three is missed with probability 3e-7


# Unknown positions.


def test_hide_suffix_hides_one_contiguous_end_and_never_the_first_byte() -> None:
    inputs, _ = random_batch(2000)
    hidden = hide_suffix(inputs, 0.5)
    unknown = hidden == UNKNOWN
    assert torch.equal(hidden[~unknown], inputs[~unknown])
    assert not unknown[:, 0].any()
    assert bool((unknown[:, 1:] >= unknown[:, :-1]).all())  # once unknown, unknown to the end
    # Four standard deviations of a share of 2,000.
    assert abs(float(unknown.any(dim=1).float().mean()) - 0.5) < 4 * math.sqrt(0.25 / 2000)
    assert set(unknown.sum(dim=1).tolist()) == set(range(T))


def test_hide_suffix_probability_zero_and_one() -> None:
    inputs, _ = random_batch(50)
    assert torch.equal(hide_suffix(inputs, 0.0), inputs)
    assert bool((hide_suffix(inputs, 1.0)[:, -1] == UNKNOWN).all())


def test_hide_suffix_window_of_one_byte_stays_known() -> None:
    inputs = torch.randint(V, (50, 1))
    assert torch.equal(hide_suffix(inputs, 1.0), inputs)


@pytest.mark.parametrize("p_span", [0.0, 1.0])
def test_block_losses_hide_inputs_as_asked(p_span: float, record: Any) -> None:
    model = lively(p_span=p_span)
    calls = record(model)
    model.block_losses(random_batch(), 0)
    assert bool((calls[0].inputs[:, -1] == UNKNOWN).all()) is (p_span == 1.0)


# Arguments, and training.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_blocks": 2}, "num_blocks must divide num_layers; got num_blocks=2, num_layers=3"),
        ({"sigma_min": 10.0}, "sigma_min must be positive and less than sigma_max.*got sigma_min=10.0"),
        ({"sigma_min": 0.0}, "sigma_min must be positive"),
        ({"gamma": -0.1}, "gamma must not be negative; got gamma=-0.1"),
        ({"target_norm": 0.0}, "target_norm must be greater than 0.*got target_norm=0.0"),
        ({"p_span": 1.5}, r"p_span must be in \[0, 1\]; got p_span=1.5"),
        ({"p_drop_z": 1.5}, r"p_drop_z in \[0, 1\]; got .*p_drop_z=1.5"),
        ({"p_drop_z": math.nan}, r"p_drop_z in \[0, 1\]; got .*p_drop_z=nan"),
        (
            {"objective": "features"},
            "objective must be one of denoise, denoise_features, mse; got objective='features'",
        ),
        ({"num_heads": 3}, r"width must be a multiple of 2 \* num_heads"),
        ({"layer": "conv"}, "layer must be 'attention' or 'mlp'"),
    ],
)
def test_constructor_bad_argument_is_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DiffusionBlocks(**{**SMALL, **options})


@pytest.mark.parametrize("layer", ["attention", "mlp"])
def test_fit_under_the_default_strategy_learns(layer: LayerKind, make_trainer: Any, tiny_data: Any) -> None:
    model = DiffusionBlocks(
        num_layers=2, num_blocks=2, width=32, num_heads=2, window_bytes=16, layer=layer, lr=0.01, warmup_steps=5
    )
    trainer = make_trainer(max_steps=80, limit_val_batches=4)
    [before] = trainer.validate(model, tiny_data, verbose=False)
    trainer.fit(model, tiny_data)
    [after] = trainer.validate(model, tiny_data, verbose=False)
    assert before["val/loss"] == pytest.approx(math.log(256), rel=1e-5)
    # The frequencies of the bytes alone cost 2.51 nats; below that, the context is used.
    assert after["val/loss"] < 2.3


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_fit_in_bfloat16_stays_finite(precision: str, make_trainer: Any, tiny_data: Any) -> None:
    model = DiffusionBlocks(num_layers=2, num_blocks=2, width=16, num_heads=2, window_bytes=16)
    trainer = make_trainer(max_steps=3, val_check_interval=3, limit_val_batches=2, precision=precision)
    trainer.fit(model, tiny_data)
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16 if "true" in precision else torch.float32}
    assert 0 < float(trainer.callback_metrics["val/bits_per_byte"]) < 8.2
