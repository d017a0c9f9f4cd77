import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_blocktrain.models import ByteTransformer
from lightning_blocktrain.partition import partition
from lightning_blocktrain.protocols import BlockLayout

# Without a Trainer ``self.log`` warns that it has nowhere to log to.
pytestmark = pytest.mark.filterwarnings("ignore:You are trying to `self.log")

D, T = 16, 8
SMALL: dict[str, Any] = {"num_layers": 4, "width": D, "num_heads": 2, "window_bytes": T, "num_blocks": 2}


def lively(**options: Any) -> ByteTransformer:
    """Return a model whose logits differ clearly between bytes and between contexts, without lookahead."""
    model = ByteTransformer(**{**SMALL, "lookahead": 0, **options}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.5)
    return model


def random_batch(num_sequences: int = 3) -> tuple[Tensor, Tensor]:
    text = torch.randint(256, (num_sequences, T + 1))
    return text[:, :-1], text[:, 1:]


def manual_cross_entropy(logits: Tensor, targets: Tensor) -> float:
    shifted = logits.double() - logits.double().amax(-1, keepdim=True)
    log_probability = shifted - shifted.exp().sum(-1, keepdim=True).log()
    return -float(log_probability.gather(-1, targets[..., None]).mean())


@torch.no_grad()
def recomputed(model: ByteTransformer, prompt: bytes, num_bytes: int) -> tuple[bytes, list[Tensor]]:
    """Greedy bytes and their logits without any cache; a full window goes on from its newer half."""
    text, logits = list(prompt), []
    context = text[-T:]
    for _ in range(num_bytes):
        logits.append(model(torch.tensor([context]))[0, -1])
        text.append(int(logits[-1].argmax()))
        context = [*context, text[-1]] if len(context) < T else text[-((T + 1) // 2) :]
    return bytes(text[len(prompt) :]), logits


@torch.no_grad()
@pytest.mark.parametrize("changed", range(T))
def test_forward_changed_byte_reaches_only_its_own_and_later_logits(changed: int) -> None:
    model = lively()
    inputs, _ = random_batch()
    other = inputs.clone()
    other[:, changed] = (other[:, changed] + 1) % 256
    difference = (model(inputs) - model(other)).abs().amax(dim=(0, 2))
    assert bool((difference[:changed] < 1e-5).all())
    assert bool((difference[changed:] > 1e-3).all())


def test_forward_window_shorter_than_the_longest_is_a_prefix() -> None:
    model = lively()
    inputs, _ = random_batch()
    torch.testing.assert_close(model(inputs[:, :3]), model(inputs)[:, :3])


@torch.no_grad()
def test_losses_equal_the_manual_cross_entropy() -> None:
    model = lively()
    batch = random_batch()
    expected = manual_cross_entropy(model(batch[0]), batch[1])
    assert float(model.training_step(batch, 0)) == pytest.approx(expected, rel=1e-5)
    # The last block reads what all layers before it make of the input.
    assert float(model.block_training_step(batch, 0, 1)) == pytest.approx(expected, rel=1e-5)
    assert float(model.evaluation_nats(batch, 0).mean()) == pytest.approx(expected, rel=1e-5)
    first = model.embed(batch[0])
    for layer in model.layers[:2]:
        first = layer(first)
    expected = manual_cross_entropy(model.readout(first), batch[1])
    assert float(model.block_training_step(batch, 0, 0)) == pytest.approx(expected, rel=1e-5)


def test_evaluation_nats_are_per_byte() -> None:
    model = lively()
    inputs, targets = random_batch()
    nats = model.evaluation_nats((inputs, targets), 0)
    expected = -model(inputs).log_softmax(-1)[1, 2, targets[1, 2]]
    torch.testing.assert_close(nats[1, 2], expected)


def test_untrained_model_is_nearly_uniform() -> None:
    # Logits of std .4 cost .5 * .4^2 = .08 nats above ln 256.
    model = ByteTransformer(**SMALL)
    assert float(model.training_step(random_batch(), 0).detach()) == pytest.approx(math.log(256) + 0.08, abs=0.2)


@pytest.mark.parametrize("block_idx", [0, 1])
def test_block_loss_reaches_its_block_and_the_interface_only(block_idx: int) -> None:
    model = lively()
    torch.autograd.backward(model.block_training_step(random_batch(), 0, block_idx))
    cut = partition(model, model.configure_blocks())
    reached = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert reached == {*cut.block_names[block_idx], *cut.interface_names}
    assert ("embed.weight" in reached) == (block_idx == 0)  # the embedding is block 0's
    assert all("readout" in name for name in cut.interface_names)
    assert all(bool(p.grad.any()) for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("objective", ["features", "residual"])
@pytest.mark.parametrize("exits", ["shared", "norm", "own"])
@pytest.mark.parametrize(("lookahead", "block_idx", "read_at"), [(1, 0, 1), (1, 2, 3), (2, 0, 2), (9, 1, 3), (2, 3, 3)])
def test_lookahead_adds_the_loss_at_a_later_exit(
    objective: Any, exits: Any, lookahead: int, block_idx: int, read_at: int
) -> None:
    options: dict[str, Any] = {"num_blocks": 4, "objective": objective, "exits": exits}
    model, own = lively(lookahead=lookahead, **options), lively(**options)
    model.load_state_dict(own.state_dict())
    batch = random_batch()
    expected = float(own.block_training_step(batch, 0, block_idx).detach())
    if read_at > block_idx:
        expected += float(own.exit_nats(batch, 0)[read_at].mean())
    assert float(model.block_training_step(batch, 0, block_idx).detach()) == pytest.approx(expected, rel=1e-5)


def test_lookahead_teaches_a_block_through_the_next_one() -> None:
    model, own = lively(num_blocks=4, exits="own", lookahead=1), lively(num_blocks=4, exits="own")
    model.load_state_dict(own.state_dict())
    batch = random_batch()
    for block_idx in (1, 3):
        found = []
        for chosen in (model, own):
            chosen.zero_grad()
            torch.autograd.backward(chosen.block_training_step(batch, 0, block_idx))
            found.append(chosen.layers[block_idx].mlp.up.weight.grad)  # type: ignore[union-attr]
        assert torch.equal(*found) is (block_idx == 3)  # nothing follows the last one


def test_block_loss_of_one_block_equals_training_step_bit_for_bit() -> None:
    model = lively(num_blocks=1)
    batch = random_batch()
    results = []
    for loss in (model.training_step(batch, 0), model.block_training_step(batch, 0, 0)):
        results.append([loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_configure_blocks_default_number_is_a_divisor_up_to_four() -> None:
    assert ByteTransformer(num_layers=6, width=D, num_heads=2).configure_blocks().num_blocks == 3


def test_configure_blocks_declares_what_is_frozen() -> None:
    model = ByteTransformer(**SMALL, lookahead=1)
    layout = BlockLayout(model.layers, model.readout, 2, prefix="frozen", stem=model.embed, lookahead=1)
    assert model.configure_blocks() == layout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_blocks": 3}, "num_blocks must divide num_layers; got num_blocks=3, num_layers=4"),
        ({"num_blocks": 0}, "num_blocks must divide num_layers"),
        ({"num_layers": 0, "num_blocks": None}, "the model has no layers"),
        ({"p_span": -0.1}, r"p_span must be in \[0, 1\]; got p_span=-0.1"),
        ({"objective": "mse"}, "objective must be 'features' or 'residual'; got objective='mse'"),
        ({"lookahead": -1}, "lookahead must be a number of blocks, 0 or more; got lookahead=-1"),
        ({"lookahead": 1.5}, "0 or more; got lookahead=1.5"),
        ({"lookahead": True}, "0 or more; got lookahead=True"),
        ({"lookahead": "1"}, "0 or more; got lookahead='1'"),
        ({"num_heads": 3}, r"width must be a multiple of 2 \* num_heads"),
    ],
)
def test_constructor_bad_argument_is_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ByteTransformer(**{**SMALL, **options})


@pytest.mark.parametrize("prompt", [b"a", b"hello", b"exactly8", b"a prompt longer than the window"])
def test_generate_greedy_equals_recomputation_past_the_window(prompt: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    model = lively()
    seen: list[Tensor] = []

    def greedy(logits: Tensor, temperature: float, gumbel: Tensor) -> Tensor:
        seen.append(logits)
        return logits.argmax(-1)

    monkeypatch.setattr("lightning_blocktrain.models.generation.sample_bytes", greedy)
    expected, logits = recomputed(model, prompt, 3 * T)
    assert model.generate(prompt, 3 * T, temperature=0) == expected
    torch.testing.assert_close(torch.cat(seen), torch.stack(logits).log_softmax(-1), rtol=1e-4, atol=1e-4)


def test_generate_same_seed_repeats_and_another_differs() -> None:
    model = lively()
    one = model.generate(b"abc", 20, seed=1)
    assert one == model.generate(b"abc", 20, seed=1)
    assert one != model.generate(b"abc", 20, seed=2)


def test_generate_leaves_the_global_random_stream_alone() -> None:
    model, state = lively(), torch.get_rng_state()
    model.generate(b"abc", 5)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("num_bytes", [0, 1, 20])
def test_generate_returns_the_new_bytes_only(num_bytes: int) -> None:
    assert len(lively().generate(b"abc", num_bytes)) == num_bytes


def test_generate_empty_prompt_counts_as_a_newline() -> None:
    model = lively()
    assert model.generate(b"", 12, seed=3) == model.generate(b"\n", 12, seed=3)


def test_generate_window_of_one_byte_goes_on() -> None:
    assert len(lively(window_bytes=1).generate(b"abc", 4)) == 4


@pytest.mark.parametrize(
    ("prompt", "num_bytes", "temperature", "words"),
    [("abc", 1, 1.0, "prompt=str"), (b"a", -1, 1.0, "num_bytes=-1"), (b"a", 1, -1.0, "temperature=-1.0")],
)
def test_generate_bad_argument_is_refused(prompt: Any, num_bytes: int, temperature: float, words: str) -> None:
    with pytest.raises(ValueError, match=f"; got {words}; "):
        lively().generate(prompt, num_bytes, temperature=temperature)


def test_fit_under_the_default_strategy_learns(make_trainer: Any, tiny_data: Any) -> None:
    model = ByteTransformer(num_layers=2, width=32, num_heads=2, window_bytes=16, lr=0.01, warmup_steps=5)
    trainer = make_trainer(max_steps=60, limit_val_batches=4)
    [before] = trainer.validate(model, tiny_data, verbose=False)
    trainer.fit(model, tiny_data)
    [after] = trainer.validate(model, tiny_data, verbose=False)
    assert before["val/loss"] > 5.4
    # The frequencies of the bytes alone cost 2.51 nats; below 2 the context is used.
    assert after["val/loss"] < 2.0


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_fit_in_bfloat16_stays_finite(precision: str, make_trainer: Any, tiny_data: Any) -> None:
    model = ByteTransformer(num_layers=2, width=16, num_heads=2, window_bytes=16)
    trainer = make_trainer(max_steps=3, val_check_interval=3, limit_val_batches=2, precision=precision)
    trainer.fit(model, tiny_data)
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16 if "true" in precision else torch.float32}
    assert 0 < float(trainer.callback_metrics["val/bits_per_byte"]) < 8.2
