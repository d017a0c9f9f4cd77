"""Cached decoding against a slow reference that computes every window anew."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_blocktrain.models.block_model import UNKNOWN
from lightning_blocktrain.models.generation import Decoder, gumbel_noise, sample_bytes
from lightning_blocktrain.models.loading import Model
from tests.models.cases import CAUSAL, NOISY, T, causal, lively, noisy


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
    or later. Noise belongs to a position for as long as its window lasts.
    """
    generator, text, seen = torch.Generator().manual_seed(seed), list(prompt or b"\n"), []
    end, first, noise = len(text) + num_bytes, None, None
    while len(text) < end:
        new = min(chunk_bytes, end - len(text))
        if first is None or len(text) - first + new - 1 > T:
            keep = T if first is None else (T + 1) // 2
            first, noise = len(text) - min(keep, T - new + 1, len(text)), None
        gumbel = gumbel_noise((new, 256), generator)
        length = len(text) - first + new - 1
        fresh = model.draw_noise((1, length - (0 if noise is None else noise.shape[1])), generator)
        noise = fresh if noise is None or fresh is None else torch.cat([noise, fresh], dim=1)
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
        torch.testing.assert_close(torch.cat(seen), torch.cat(logits), rtol=1e-4, atol=1e-4)


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
    model, generator = causal("features"), torch.Generator().manual_seed(0)
    decoder, text = Decoder(model, 3, generator), list(b"abc")
    for num_new in (1, 3, 2):
        text += decoder.decide(text, num_new, 1, 1.0)
    assert len(text) == 9 and all(0 <= byte < 256 for byte in text)


def test_sample_bytes_has_the_probabilities_of_the_softmax() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.2])
    gumbel = gumbel_noise((20_000, 3), torch.Generator().manual_seed(0))
    for temperature in (1.0, 2.0):
        counts = sample_bytes(probabilities.log().expand(20_000, 3), temperature, gumbel).bincount(minlength=3)
        expected = probabilities ** (1 / temperature)
        # Four standard errors of a share of 20,000 are at most 0.0142.
        torch.testing.assert_close(counts / 20_000, expected / expected.sum(), atol=0.0142, rtol=0)
    assert sample_bytes(probabilities.log(), 0.0, torch.tensor([0.0, 9.0, 9.0])) == 0
