"""Guesses that the served model checks: its own text, whatever was guessed, in fewer traversals."""

from typing import Any

import pytest
import torch

from lightning_blocktrain.models.generation import Decoder, Draft, LocalWalker, Sampling, checked_continuation
from lightning_blocktrain.models.loading import Model
from lightning_blocktrain.serving.client import SweepClient
from tests.models.cases import causal, noisy
from tests.serving.local import TOKEN, all_forgotten, route_of, serving


def decoder_of(model: Model, sampling: Sampling) -> Decoder:
    return Decoder(LocalWalker(model, model.num_blocks), model.window_bytes, sampling)


def drafts(model: Model) -> dict[str, tuple[Model, int, int]]:
    """Return drafts by name, each with its bytes per chunk and its sweeps."""
    return {
        "the model itself": (model, 1, 1),
        "its first exit": (model.at_exit(1), 1, 1),
        "another": (causal("features", width=32, window_bytes=16), 1, 1),
        "sweeps": (noisy("denoise", window_bytes=24), 4, 2),
    }


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["the model itself", "its first exit", "another", "sweeps"])
def test_checked_text_is_that_of_one_byte_at_a_time(name: str, temperature: float) -> None:
    model = causal("features", window_bytes=32)
    draft, chunk_bytes, sweeps = drafts(model)[name]
    expected = model.generate(b"hello", 80, temperature=temperature, seed=3)
    sampling = Sampling(temperature, 3)
    guesses = Draft(decoder_of(draft, sampling), chunk_bytes, sweeps)
    chunks = list(checked_continuation(decoder_of(model, sampling), guesses, b"hello", 80, 4))
    assert b"".join(bytes(chunk.decided) for chunk in chunks) == expected
    if name == "the model itself":
        # Five bytes a traversal, but where the end of the window leaves no room.
        assert 16 <= len(chunks) <= 20


def test_a_draft_of_which_nothing_is_right_costs_one_traversal_per_byte() -> None:
    model, wrong = causal("features", window_bytes=32), causal("features", window_bytes=32)
    with torch.no_grad():
        wrong.readout.unembed.weight.neg_()  # what is likely there is unlikely here
    expected = model.generate(b"hello", 12, temperature=0)
    chunks = list(
        checked_continuation(decoder_of(model, Sampling(0.0)), Draft(decoder_of(wrong, Sampling(0.0))), b"hello", 12, 4)
    )
    assert [chunk.decided for chunk in chunks] == [(byte,) for byte in expected]


def test_checked_bytes_have_the_distribution_of_the_model() -> None:
    """Frequencies of the second byte after a prompt, over seeds, against the model's own probabilities."""
    model, draft = causal("features", window_bytes=32), causal("features", window_bytes=32)
    with torch.no_grad():
        for own in (model, draft):  # few bytes are likely, so that 2,000 seeds say something
            own.readout.unembed.weight[5:] *= 0.01
            own.readout.unembed.weight[:5] *= 0.3
        first = model.exit_logits(torch.tensor([[1]]))[0, -1].softmax(-1)
        pairs = torch.stack([torch.full((256,), 1), torch.arange(256)], dim=1)
        second = first @ model.exit_logits(pairs)[:, -1].softmax(-1)
    counts, num_right = torch.zeros(256), 0
    for seed in range(2000):
        sampling = Sampling(seed=seed)
        guesses = Draft(decoder_of(draft, sampling))
        chunks = list(checked_continuation(decoder_of(model, sampling), guesses, b"\x01", 2, 1))
        counts[[byte for chunk in chunks for byte in chunk.decided][1]] += 1
        num_right += len(chunks) == 1
    assert 50 < num_right < 1950  # both what was guessed right and what was not is in the sample
    error = (second * (1 - second) / 2000).sqrt()
    assert ((counts / 2000 - second).abs() <= 4.5 * error + 1e-3).all()


@pytest.mark.parametrize("name", ["its first exit", "sweeps"])
def test_hosts_check_guesses(name: str) -> None:
    model = causal("features", window_bytes=32)
    draft, chunk_bytes, sweeps = drafts(model)[name]
    expected = model.generate(b"hello", 60, seed=3)
    with serving(model, [0], [1], [2]) as servers, SweepClient(route_of(servers), TOKEN) as client:
        options: dict[str, Any] = {"draft_chunk_bytes": chunk_bytes, "draft_sweeps": sweeps, "seed": 3}
        chunks = list(client.stream_checked(b"hello", 60, draft, num_guesses=5, **options))
        assert b"".join(bytes(chunk.decided) for chunk in chunks) == expected
        assert servers[2].server.num_walks == len(chunks) <= 60


def test_served_blocks_may_guess_too() -> None:
    model, draft = causal("features", window_bytes=32), noisy("denoise", window_bytes=32)
    expected = model.generate(b"hello", 30, seed=3)
    with serving(model, [0, 1, 2]) as ours, serving(draft, [0], [1, 2]) as others:
        with SweepClient(route_of(ours), TOKEN) as client, SweepClient(route_of(others), TOKEN) as guesser:
            chunks = client.stream_checked(b"hello", 30, guesser, num_guesses=4, draft_chunk_bytes=4, seed=3)
            assert b"".join(bytes(chunk.decided) for chunk in chunks) == expected
        assert all(running.server.num_walks for running in others)
        assert all_forgotten([*ours, *others])


def test_wrong_arguments_of_a_draft_are_refused() -> None:
    model = causal("features", p_span=0.0)
    with serving(model, [0, 1, 2]) as servers, SweepClient(route_of(servers), TOKEN) as client:
        with pytest.raises(ValueError, match="num_guesses must be at least 1; got num_guesses=0"):
            client.stream_checked(b"a", 3, model, num_guesses=0)
        with pytest.raises(ValueError, match="trained on unknown bytes; got chunk_bytes=2"):
            client.stream_checked(b"a", 3, model, draft_chunk_bytes=2)
        assert servers[0].server.num_walks == 0
