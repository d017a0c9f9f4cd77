import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_blocktrain.models import DiffusionBlocks
from lightning_blocktrain.models.block_model import UNKNOWN

B, T, D, V = 3, 8, 16, 256
SMALL: dict[str, Any] = {"num_layers": 3, "num_blocks": 3, "width": D, "num_heads": 2, "window_bytes": T}


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


def known_successor(inputs: Tensor) -> Tensor:
    """Map byte x to x + 1, and an unknown byte to 0."""
    return torch.where(inputs == UNKNOWN, 0, (inputs + 1) % V)


# The sweep.


@torch.no_grad()
@pytest.mark.parametrize("num_blocks", [1, 2, 3, None])
@pytest.mark.parametrize("objective", ["denoise", "denoise_features", "mse"])
def test_sweep_equals_the_euler_walk_by_hand(objective: str, num_blocks: int | None) -> None:
    model = lively(objective=objective)
    inputs, _ = random_batch()
    noise = torch.randn(4, T, D)
    sigmas = [10.0, 1.623, 1.0]  # the paper's grid, to four digits
    assert model.sweep_sigmas == pytest.approx(sigmas, abs=5e-4)
    sigmas = list(model.sweep_sigmas)
    z, hidden = 10.0 * noise, model.embed_bytes(inputs)
    for block_idx in range(num_blocks or 3):
        sigma = torch.full((4,), sigmas[block_idx])
        logits = model.denoise(block_idx, hidden, z, sigma)
        after, u = model.run_noisy(block_idx, hidden, z, sigma)
        if block_idx + 1 < 3:
            ratio = sigmas[block_idx + 1] / sigmas[block_idx]
            denoised = u if objective == "mse" else logits.softmax(-1) @ model.target_table
            z = ratio * z + (1 - ratio) * denoised
            hidden = after if objective == "denoise_features" else hidden
    torch.testing.assert_close(model.sweep(inputs, noise, num_blocks), logits, rtol=1e-4, atol=1e-5)


def test_sweep_runs_every_block_once_in_order_from_pure_noise(record: Any) -> None:
    model = lively()
    calls = record(model)
    inputs, _ = random_batch()
    noise = torch.randn(4, T, D)
    assert model.sweep(inputs, noise).dtype == torch.float32
    assert [call.block_idx for call in calls] == [0, 1, 2]
    assert torch.equal(calls[0].z, 10.0 * noise)
    assert [float(call.sigma[0]) for call in calls] == pytest.approx(list(model.sweep_sigmas))


def test_sweep_of_one_block_is_the_prior(record: Any) -> None:
    model = lively()
    inputs, _ = random_batch()
    noise = torch.randn(4, T, D)
    prior = model.denoise(0, model.embed_bytes(inputs), 10.0 * noise, torch.full((4,), 10.0))
    calls = record(model)
    assert torch.equal(model.sweep(inputs, noise, num_blocks=1), prior)
    assert [call.block_idx for call in calls] == [0]


def test_sweep_of_a_single_block_model_is_one_evaluation_at_sigma_max(record: Any) -> None:
    model = lively(num_blocks=1)
    calls = record(model)
    model(random_batch()[0])
    assert [(call.block_idx, float(call.sigma[0])) for call in calls] == [(0, 10.0)]


@pytest.mark.parametrize("num_blocks", [0, -1, 4])
def test_sweep_number_of_blocks_out_of_range_is_named(num_blocks: int) -> None:
    with pytest.raises(ValueError, match=rf"--exit\) must be in 1 \.\. 3; got num_blocks={num_blocks}"):
        lively().sweep(random_batch()[0], torch.randn(4, T, D), num_blocks)


def test_sweep_intervention_replaces_what_every_block_is_shown(record: Any) -> None:
    model = lively()
    calls = record(model)
    inputs, _ = random_batch()
    asked: list[int] = []

    def intervene(block_idx: int, z: Tensor) -> Tensor:
        asked.append(block_idx)
        return torch.full_like(z, float(block_idx))

    model.sweep(inputs, torch.randn(4, T, D), intervene=intervene)
    assert asked == [0, 1, 2]
    assert [set(call.z.flatten().tolist()) for call in calls] == [{0.0}, {1.0}, {2.0}]


def test_sweep_intervention_without_noise_is_refused() -> None:
    with pytest.raises(ValueError, match="a sweep with an intervention must start from noise"):
        lively().sweep(random_batch()[0], None, intervene=lambda _, z: z)


@torch.no_grad()
def test_sweep_intervention_that_returns_z_changes_nothing() -> None:
    model = lively()
    inputs, _ = random_batch()
    noise = torch.randn(4, T, D)
    assert torch.equal(model.sweep(inputs, noise, intervene=lambda _, z: z), model.sweep(inputs, noise))


@torch.no_grad()
def test_sweep_z_of_the_last_block_matters() -> None:
    model = lively()
    inputs, _ = random_batch()
    noise = torch.randn(4, T, D)
    blanked = model.sweep(inputs, noise, intervene=lambda block_idx, z: 0 * z if block_idx == 2 else z)
    assert not torch.allclose(blanked, model.sweep(inputs, noise))


def test_sweep_perfect_denoiser_walks_to_the_target_plus_lowest_noise(stub: Any) -> None:
    model = lively()
    inputs, targets = random_batch()
    noise = torch.randn(4, T, D)
    stub(model, lambda _: targets)
    y = model.target_table[targets].detach()
    for start in (torch.zeros_like(y), y):
        # The sampler's own start, sigma_max * noise, holds no y: each step brings its share of it.
        shown: list[Tensor] = []

        def watch(block_idx: int, z: Tensor, start: Tensor = start, shown: list[Tensor] = shown) -> Tensor:
            shown.append(z + start if block_idx == 0 else z)
            return shown[-1]

        logits = model.sweep(inputs, noise, intervene=watch)
        for z, sigma in zip(shown, model.sweep_sigmas, strict=True):
            expected = y + (sigma / 10.0) * (start - y) + sigma * noise
            torch.testing.assert_close(z, expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(logits.argmax(-1), targets)


def test_sweep_takes_no_gradient() -> None:
    assert not lively()(random_batch()[0]).requires_grad


# Evaluation.


def test_evaluation_repeats_and_leaves_the_global_random_stream_alone() -> None:
    model = lively()
    batch = random_batch()
    first = model.evaluation_nats(batch, 3)
    torch.rand(7)
    assert torch.equal(model.evaluation_nats(batch, 3), first)
    assert not torch.equal(model.evaluation_nats(batch, 4), first)
    state = torch.get_rng_state()
    model.evaluation_nats(batch, 3)
    model(batch[0])
    assert torch.equal(torch.get_rng_state(), state)


@torch.no_grad()
def test_evaluation_nats_are_those_of_one_sweep() -> None:
    model = lively()
    inputs, targets = random_batch()
    logits = model.sweep(inputs, model.draw_noise(inputs.shape, torch.Generator().manual_seed(5)))
    expected = -logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    torch.testing.assert_close(model.evaluation_nats((inputs, targets), 5), expected)


def test_draw_noise_is_standard_normal() -> None:
    noise = lively().draw_noise((64, T), torch.Generator().manual_seed(1))
    assert noise.shape == (64, T, D)
    # 8,192 draws: four standard errors.
    assert abs(float(noise.mean())) < 4 / math.sqrt(8192)
    assert abs(float(noise.std()) - 1) < 4 / math.sqrt(2 * 8192)


# Generation.


@pytest.fixture(params=[(1, 1), (3, 1), (3, 2), (8, 1)], ids=str)
def chunking(request: pytest.FixtureRequest) -> Iterator[dict[str, int]]:
    yield dict(zip(("chunk_bytes", "sweeps"), request.param, strict=True))


def test_generate_same_seed_repeats_and_another_differs(chunking: dict[str, int]) -> None:
    model, state = lively(), torch.get_rng_state()
    one = model.generate(b"abc", 20, seed=1, **chunking)
    assert one == model.generate(b"abc", 20, seed=1, **chunking)
    assert one != model.generate(b"abc", 20, seed=2, **chunking)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("num_bytes", [0, 1, 2, 7, 20])
def test_generate_returns_the_new_bytes_only(num_bytes: int, chunking: dict[str, int]) -> None:
    assert len(lively().generate(b"a prompt longer than the window", num_bytes, **chunking)) == num_bytes


def test_generate_empty_prompt_counts_as_a_newline(chunking: dict[str, int]) -> None:
    model = lively()
    assert model.generate(b"", 6, **chunking) == model.generate(b"\n", 6, **chunking)


@pytest.mark.parametrize("chunk_bytes", [1, 3, 4, 8])
def test_generate_as_many_sweeps_as_bytes_equals_one_byte_at_a_time(chunk_bytes: int, stub: Any) -> None:
    # Next bytes that depend on the inputs alone: the noise, which differs between the two, has no say.
    model = lively()
    stub(model, known_successor)
    expected = bytes(range(ord("b"), ord("b") + 12))
    assert model.generate(b"a", 12, chunk_bytes=1) == expected
    assert model.generate(b"a", 12, chunk_bytes=chunk_bytes, sweeps=chunk_bytes) == expected


def test_generate_fewer_sweeps_than_bytes_decides_from_unknown_inputs(stub: Any) -> None:
    model = lively()
    stub(model, known_successor)
    assert model.generate(b"a", 4, chunk_bytes=4) == b"b\0\0\0"
    assert model.generate(b"a", 4, chunk_bytes=4, sweeps=2) == b"bc\1\1"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_generate_more_sweeps_than_bytes_change_nothing(temperature: float) -> None:
    model = lively()
    bytes_of = [model.generate(b"abc", 4, chunk_bytes=4, sweeps=s, temperature=temperature) for s in (1, 4, 5, 7)]
    assert bytes_of[1] == bytes_of[2] == bytes_of[3]
    assert bytes_of[0] != bytes_of[1]
    assert bytes_of[0][0] == bytes_of[1][0]  # the first byte is decided from known bytes at once


def test_generate_reads_the_newest_bytes_that_fit_the_window(record: Any) -> None:
    model = lively()
    calls = record(model)
    model.generate(b"0123456789", 3, chunk_bytes=3)
    assert calls[0].inputs.tolist() == [[*b"456789", UNKNOWN, UNKNOWN]]
    assert len(calls) == B  # one sweep


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"chunk_bytes": 0}, "chunk_bytes must be in 1 .. window_bytes.*got chunk_bytes=0"),
        ({"chunk_bytes": T + 1}, "chunk_bytes must be in 1 .. window_bytes.*window_bytes=8"),
        ({"sweeps": 0}, "sweeps must be a whole number from 1 on; got sweeps=0"),
        ({"temperature": -1.0}, "temperature must be a finite number from 0 on; got temperature=-1.0"),
        ({"num_bytes": -1}, "num_bytes must be a whole number from 0 on; got num_bytes=-1"),
        ({"prompt": "abc"}, "prompt must be bytes.*prompt=str"),
    ],
)
def test_generate_bad_argument_is_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        lively().generate(**{"prompt": b"a", "num_bytes": 1, **options})
