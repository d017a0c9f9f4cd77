"""Cached decoding against a slow reference that computes every window anew."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_blocktrain.models.block_model import UNKNOWN
from lightning_blocktrain.models.generation import (
    Decision,
    Decoder,
    LocalWalker,
    Sampling,
    Walk,
    walk_inputs,
    walk_noise,
)
from lightning_blocktrain.models.loading import Model
from lightning_blocktrain.models.sampling import gumbel_at, gumbel_noise, position_generator, sample_bytes
from tests.models.cases import CAUSAL, NOISY, T, causal, lively, noisy


def noise_at(model: Model, seed: int, positions: range) -> Tensor | None:
    """Return the noise of these positions of a text, (1, T, D)."""
    drawn = [model.draw_noise((1, 1), position_generator(seed, position, "noise")) for position in positions]
    return torch.cat([noise for noise in drawn if noise is not None], dim=1) if drawn[0] is not None else None


@torch.no_grad()
def recomputed(
    model: Model,
    prompt: bytes,
    num_bytes: int,
    num_blocks: int,
    chunk_bytes: int,
    sweeps: int,
    temperature: float,
    seed: int,
) -> tuple[bytes, list[Tensor]]:
    """Return the new bytes, and the logits that each choice was made from, without any cache.

    The window begins at the newest bytes that fit; when the next chunk does not fit, it begins anew at its newer half,
    or later. Noise belongs to a position of the text.
    """
    text, seen, first = list(prompt or b"\n"), [], None
    end = len(text) + num_bytes
    while len(text) < end:
        new = min(chunk_bytes, end - len(text))
        if first is None or len(text) - first + new - 1 > T:
            keep = T if first is None else (T + 1) // 2
            first = len(text) - min(keep, T - new + 1, len(text))
        noise = noise_at(model, seed, range(first, len(text) + new - 1))
        gumbel = gumbel_at(seed, len(text), new)
        guess = [UNKNOWN] * (new - 1)
        for sweep in range(min(sweeps, new)):
            logits = model.exit_logits(torch.tensor([[*text[first:], *guess]]), num_blocks, noise)[0, -new:]
            decided = sample_bytes(logits, temperature, gumbel).tolist()
            seen.append(logits[min(sweep, 1) :])
            guess = decided[:-1]
        text += decided
    return bytes(text[end - num_bytes :]), seen


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
@pytest.mark.parametrize("case", [*CAUSAL, *NOISY, "mlp"], ids=str)
def test_generate_equals_recomputation_at_every_exit_chunk_and_number_of_sweeps(
    case: Any, num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = noisy("denoise", layer="mlp") if case == "mlp" else lively(*case)
    seen: list[Tensor] = []

    def watched(logits: Tensor, temperature: float, gumbel: Tensor) -> Tensor:
        seen.append(logits)
        return sample_bytes(logits, temperature, gumbel)

    monkeypatch.setattr("lightning_blocktrain.models.generation.sample_bytes", watched)
    texts = ((b"", 2, 0.0), (b"a prompt longer than the window", 1, 1.0), (b"abc", 2, 1.0))
    # Windows restart in all of them: the new bytes are three windows long.
    for (prompt, sweeps, temperature), chunk_bytes in product(texts, (1, 3, 8)):
        seen.clear()
        choices: dict[str, Any] = {"chunk_bytes": chunk_bytes, "sweeps": sweeps, "temperature": temperature, "seed": 5}
        expected, logits = recomputed(model, prompt, 3 * T, num_blocks, **choices)
        assert model.generate(prompt, 3 * T, num_blocks=num_blocks, **choices) == expected
        # Attention over a cache sums in another order.
        torch.testing.assert_close(torch.cat(seen), torch.cat(logits).log_softmax(-1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", CAUSAL, ids=str)
@pytest.mark.parametrize("chunk_bytes", [2, 4, 8])
def test_as_many_sweeps_as_bytes_decide_as_one_byte_at_a_time(case: tuple[str, str], chunk_bytes: int) -> None:
    model = lively(*case, window_bytes=64)
    expected = model.generate(b"abc", 24, temperature=0)
    assert model.generate(b"abc", 24, chunk_bytes=chunk_bytes, sweeps=chunk_bytes, temperature=0) == expected
    assert model.generate(b"abc", 24, chunk_bytes=chunk_bytes, temperature=0) != expected


@pytest.mark.parametrize("case", [*CAUSAL, *NOISY], ids=str)
def test_only_bytes_that_are_not_cached_are_computed(case: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = lively(*case, window_bytes=32)
    lengths: list[int] = []
    real = model.exit_logits

    def counted(inputs: Tensor, *rest: Any) -> Tensor:
        lengths.append(inputs.shape[1])
        return real(inputs, *rest)

    monkeypatch.setattr(model, "exit_logits", counted)
    model.generate(b"0123456789", 8, num_blocks=2)
    assert lengths == [10, *[1] * 7]
    lengths.clear()
    # The prompt with 3 unknown bytes; 3 decided ones anew; the chunk before with 3 unknown ones; 3 anew.
    model.generate(b"0123456789", 8, chunk_bytes=4, sweeps=2)
    assert lengths == [13, 3, 7, 3]


@pytest.mark.parametrize("case", [*CAUSAL, *NOISY], ids=str)
def test_several_bytes_at_a_time_without_training_on_unknown_ones_are_refused(case: tuple[str, str]) -> None:
    model = lively(*case, p_span=0.0)
    assert len(model.generate(b"a", 3, sweeps=4)) == 3
    with pytest.raises(ValueError, match=r"trained on unknown bytes; got chunk_bytes=2, p_span=0; train with p_span"):
        model.generate(b"a", 2, chunk_bytes=2)


def test_caches_belong_to_the_layers_before_the_exit() -> None:
    model = causal("features", num_layers=6)
    assert [len(model.new_caches(num_blocks)) for num_blocks in (1, 2, 3)] == [2, 4, 6]
    assert set(noisy("denoise", layer="mlp").new_caches(3)) == {None}


def test_decoder_continues_what_it_returned() -> None:
    model = causal("features")
    decoder, text = Decoder(LocalWalker(model, 3), model.window_bytes, Sampling()), list(b"abc")
    for num_new in (1, 3, 2):
        text += decoder.decide(text, num_new, 1).decided
    assert len(text) == 9 and all(0 <= byte < 256 for byte in text)


@pytest.mark.parametrize("guess", ["right", "wrong", "partly"])
def test_checked_guesses_give_the_bytes_that_one_at_a_time_gives(guess: str) -> None:
    model = causal("features", window_bytes=16)
    expected = list(model.generate(b"abc", 40, seed=3))
    walks: list[Walk] = []
    local = LocalWalker(model, model.num_blocks)

    def counted(walk: Walk) -> Decision:
        walks.append(walk)
        return local(walk)

    decoder, text = Decoder(counted, model.window_bytes, Sampling(seed=3)), list(b"abc")
    while len(text) < 43:
        after = expected[len(text) - 3 :][:4]
        right = {"right": len(after), "wrong": 0, "partly": min(2, len(after))}[guess]
        text += decoder.check(text, [*after[:right], *((byte + 1) % 256 for byte in after[right:])]).decided
    assert text[3:43] == expected
    assert {"right": 9, "partly": 14}.get(guess, 40) <= len(walks) <= {"right": 14, "partly": 20}.get(guess, 40)
    # Guesses that were right are not computed again while the window stays.
    num_restarts = sum(walk.start == 0 for walk in walks)
    assert sum(len(walk.inputs) for walk in walks if walk.start) <= 5 * (len(walks) - num_restarts)


def test_draws_are_averaged_and_each_has_noise_of_its_own() -> None:
    model = noisy("denoise")
    inputs = tuple(b"hello")
    walk = Walk(0, inputs, 7, 2, Sampling(seed=5, num_draws=3))
    found = LocalWalker(model, 3)(walk)
    batch, noise = walk_inputs(model, walk), walk_noise(model, walk)
    assert noise is not None and batch.shape == (3, 5) and noise.shape == (3, 5, model.width)
    assert len({tuple(drawn.flatten().tolist()) for drawn in noise}) == 3
    with torch.no_grad():
        mean = model.exit_logits(batch, 3, noise).softmax(-1).mean(0)[-2:]
    assert found.probs == pytest.approx([float(mean[idx, byte]) for idx, byte in enumerate(found.decided)], rel=1e-4)
    assert model.generate(b"hello", 20, num_draws=3, seed=5) == model.generate(b"hello", 20, num_draws=3, seed=5)


@pytest.mark.parametrize("case", CAUSAL, ids=str)
def test_draws_of_a_model_without_noise_are_refused(case: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match=r"num_draws above 1 needs a model with noise; got .*, num_draws=2"):
        lively(*case).generate(b"a", 2, num_draws=2)


def test_random_numbers_of_a_position_depend_on_the_seed_and_the_position_alone() -> None:
    assert torch.equal(gumbel_at(3, 10, 5)[2:], gumbel_at(3, 12, 3))
    assert not torch.equal(gumbel_at(3, 10, 1), gumbel_at(4, 10, 1))
    drawn = [torch.randn(4, generator=position_generator(0, 0, purpose)) for purpose in ("noise", "gumbel")]
    assert not torch.equal(*drawn)


def test_sample_bytes_has_the_probabilities_of_the_softmax() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.2])
    gumbel = gumbel_noise((20_000, 3), torch.Generator().manual_seed(0))
    for temperature in (1.0, 2.0):
        counts = sample_bytes(probabilities.log().expand(20_000, 3), temperature, gumbel).bincount(minlength=3)
        expected = probabilities ** (1 / temperature)
        # Four standard errors of a share of 20,000 are at most 0.0142.
        torch.testing.assert_close(counts / 20_000, expected / expected.sum(), atol=0.0142, rtol=0)
    assert sample_bytes(probabilities.log(), 0.0, torch.tensor([0.0, 9.0, 9.0])) == 0
    for nearly_greedy in (1e-30, 1e-50):  # dividing by these would overflow
        assert sample_bytes(probabilities.log(), nearly_greedy, torch.tensor([0.0, 9.0, 9.0])) == 0


@pytest.mark.parametrize("seed", [-1, 2**63, 1.5, True])
def test_a_seed_that_is_none_is_refused(seed: Any) -> None:
    with pytest.raises(ValueError, match=r"seed must be a whole number in 0 \.\. 2\*\*63 - 1; got seed="):
        causal("features").generate(b"a", 1, seed=seed)


def test_numbers_beyond_every_use_are_refused() -> None:
    with pytest.raises(ValueError, match="temperature must be a finite number from 0 on; got temperature=inf"):
        causal("features").generate(b"a", 1, temperature=float("inf"))
    with pytest.raises(ValueError, match=r"num_draws must be in 1 \.\. 64; got num_draws=65"):
        noisy("denoise").generate(b"a", 1, num_draws=65)
