import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from lightning_blocktrain.models.generation_arguments import refuse_generation
from lightning_blocktrain.models.sampling import gumbel_noise, sample_bytes
from lightning_blocktrain.models.transformer import (
    VOCABULARY,
    CausalAttention,
    KeyValueCache,
    Layer,
    Mlp,
    Readout,
    init_weights,
    rotate,
)

B, T, D, H = 2, 7, 16, 4


@pytest.fixture
def layers() -> nn.ModuleList:
    return nn.ModuleList(Layer(D, H) for _ in range(2)).eval()


def run(layers: nn.ModuleList, x: Tensor, caches: list[KeyValueCache] | None = None) -> Tensor:
    for idx, layer in enumerate(layers):
        x = layer(x, None if caches is None else caches[idx])
    return x


@pytest.mark.parametrize("width", [16, 32, 48])
def test_layer_parameter_count_is_the_closed_form(width: int) -> None:
    assert sum(p.numel() for p in Layer(width, 4).parameters()) == 12 * width**2 + 13 * width


def test_mlp_layer_has_no_attention_parameters() -> None:
    assert sum(p.numel() for p in Layer(D, H, "mlp").parameters()) == 8 * D**2 + 7 * D


@torch.no_grad()
@pytest.mark.parametrize("changed", range(T))
def test_layers_changed_position_reaches_only_itself_and_later(layers: nn.ModuleList, changed: int) -> None:
    x = torch.randn(B, T, D)
    other = x.clone()
    other[:, changed] += 1.0 + torch.randn(D)
    difference = (run(layers, x) - run(layers, other)).abs().amax(dim=(0, 2))
    assert difference[:changed].max() < 1e-6 if changed else True
    assert difference[changed:].min() > 1e-4


@torch.no_grad()
def test_mlp_layer_changed_position_reaches_only_itself() -> None:
    layer = Layer(D, H, "mlp")
    x = torch.randn(B, T, D)
    other = x.clone()
    other[:, 3] += 1.0 + torch.randn(D)
    changed = (layer(x) - layer(other)).abs().amax(dim=(0, 2)) > 1e-6
    assert changed.tolist() == [position == 3 for position in range(T)]


def turned(x: Tensor) -> Tensor:
    """Turn each pair of channels (i, i + size / 2) by ``position * 10000 ** (-2 i / size)``, as complex numbers."""
    half = x.shape[-1] // 2
    speed = 10_000.0 ** (-torch.arange(half) / half)
    angles = torch.arange(x.shape[-2])[:, None] * speed
    pairs = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([pairs.real, pairs.imag], dim=-1)


def test_rotation_of_positions_makes_products_depend_on_distance_alone() -> None:
    q, k = torch.randn(1, 8), torch.randn(1, 8)
    near, far = (rotate(q, start + 3) @ rotate(k, start).T for start in (0, 500))
    torch.testing.assert_close(near, far, atol=1e-4, rtol=0)
    assert abs(float(near - rotate(q, 4) @ rotate(k, 0).T)) > 1e-2


@torch.no_grad()
def test_attention_equals_the_explicit_softmax_formula() -> None:
    attention = CausalAttention(D, H)
    x = torch.randn(B, T, D)
    q, k, v = (part.unflatten(-1, (H, D // H)).transpose(1, 2) for part in attention.qkv(x).chunk(3, dim=-1))
    q, k = turned(q), turned(k)
    scores = q @ k.transpose(-1, -2) / (D // H) ** 0.5
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    mixed = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
    expected = attention.out(mixed.transpose(1, 2).flatten(2))
    torch.testing.assert_close(attention(x), expected)


@torch.no_grad()
@pytest.mark.parametrize("prefill", [1, 3, T])
def test_cached_layers_equal_recomputation(layers: nn.ModuleList, prefill: int) -> None:
    x = torch.randn(B, T, D)
    caches = [KeyValueCache(T) for _ in layers]
    parts = [run(layers, x[:, :prefill], caches)]
    parts += [run(layers, x[:, position : position + 1], caches) for position in range(prefill, T)]
    torch.testing.assert_close(torch.cat(parts, dim=1), run(layers, x))
    assert [cache.length for cache in caches] == [T, T]


@torch.no_grad()
def test_cached_layers_take_several_positions_at_a_time_and_rewind(layers: nn.ModuleList) -> None:
    x = torch.randn(B, T, D)
    caches = [KeyValueCache(T) for _ in layers]
    first = run(layers, x[:, :2], caches)
    run(layers, torch.randn(B, T - 2, D), caches)  # taken back
    for cache in caches:
        cache.rewind(2)
    rest = run(layers, x[:, 2:], caches)
    torch.testing.assert_close(torch.cat([first, rest], dim=1), run(layers, x))


@pytest.mark.parametrize("num_heads", [3, 0, -2, 32])
def test_attention_heads_that_do_not_divide_name_the_rule(num_heads: int) -> None:
    with pytest.raises(
        ValueError, match=f"width must be a multiple of 2 \\* num_heads; got width=16, num_heads={num_heads}"
    ):
        CausalAttention(D, num_heads)


def test_layer_unknown_kind_is_named() -> None:
    with pytest.raises(ValueError, match="layer must be 'attention' or 'mlp'; got layer='conv'"):
        Layer(D, H, "conv")  # type: ignore[arg-type]


def test_mlp_maps_each_position_with_the_hidden_width() -> None:
    mlp = Mlp(D, 4 * D)
    assert mlp.up.weight.shape == (4 * D, D)
    assert mlp(torch.randn(B, T, D)).shape == (B, T, D)


def test_readout_with_zero_init_is_uniform() -> None:
    logits = Readout(D, zero_init=True)(torch.randn(B, T, D))
    assert logits.shape == (B, T, VOCABULARY)
    assert torch.equal(logits, torch.zeros(B, T, VOCABULARY))


def test_readout_without_zero_init_is_not_uniform() -> None:
    assert Readout(D)(torch.randn(B, T, D)).std() > 0


def test_init_weights_scales_residual_outputs_down_by_depth() -> None:
    torch.manual_seed(0)
    layer = Layer(64, 4)
    init_weights(layer, num_layers=8, width=64)
    weights = layer.state_dict()
    for name, std in (("attention.qkv", 0.05), ("mlp.up", 0.05), ("attention.out", 0.0125), ("mlp.down", 0.0125)):
        # 4,096 draws or more: the relative error of a standard deviation is 1.1 % at most.
        assert float(weights[f"{name}.weight"].std()) == pytest.approx(std, rel=0.06)
        assert weights[f"{name}.bias"].abs().max() == 0
    assert torch.equal(layer.norm_mlp.weight, torch.ones(64))


def test_sample_bytes_at_temperature_zero_is_the_largest_logit() -> None:
    logits = torch.randn(5, VOCABULARY)
    loud = 1000 * torch.randn(5, VOCABULARY)
    assert torch.equal(sample_bytes(logits, 0, loud), logits.argmax(-1))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_sample_bytes_frequencies_follow_the_softmax(temperature: float) -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    num_draws = 20_000
    noise = gumbel_noise((num_draws, 4), torch.Generator().manual_seed(0))
    counts = sample_bytes(logits.expand(num_draws, 4), temperature, noise).bincount(minlength=4)
    expected = (logits.double() / temperature).softmax(-1) * num_draws
    # The seed is fixed; a correct sampler falls below this p-value once in 1,000 seeds.
    assert stats.chisquare(counts.numpy(), expected.numpy()).pvalue > 1e-3


def test_gumbel_noise_is_standard_gumbel_and_follows_its_generator() -> None:
    noise = gumbel_noise((20_000,), torch.Generator().manual_seed(0))
    assert torch.equal(noise, gumbel_noise((20_000,), torch.Generator().manual_seed(0)))
    assert not torch.equal(noise, gumbel_noise((20_000,), torch.Generator().manual_seed(1)))
    assert stats.kstest(noise.numpy(), "gumbel_r").pvalue > 1e-3


@pytest.mark.parametrize(
    ("prompt", "num_bytes", "temperature", "got"),
    [
        ("text", 1, 1.0, "prompt=str"),
        (b"a", -1, 1.0, "num_bytes=-1"),
        (b"a", 1, -0.5, "temperature=-0.5"),
        (b"a", 1, float("nan"), "temperature=nan"),
    ],
)
def test_refuse_generation_bad_argument_is_named(prompt: bytes, num_bytes: int, temperature: float, got: str) -> None:
    with pytest.raises(ValueError, match=rf" must be .*; got {got}; "):
        refuse_generation(prompt, num_bytes, temperature, 0)


def test_refuse_generation_limits_are_allowed() -> None:
    assert refuse_generation(b"", 0, 0.0, 0) is None  # type: ignore[func-returns-value]
