"""Exits: every prefix of blocks is a smaller model of its own, by evaluation, as an object and as a file."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_blocktrain.models import ByteTransformer
from lightning_blocktrain.models.loading import load_model, save_model
from lightning_blocktrain.partition import partition
from tests.models.cases import CAUSAL, NOISY, SMALL, D, T, causal, lively, noisy, random_batch

TWO_LAYERS_EACH: dict[str, Any] = {"num_layers": 6}


@pytest.fixture(params=[*CAUSAL, *NOISY], ids=lambda case: case[1])
def case(request: pytest.FixtureRequest) -> tuple[str, str]:
    found: tuple[str, str] = request.param
    return found


def test_exit_nats_are_those_of_the_model_that_ends_there_bit_for_bit(case: tuple[str, str]) -> None:
    model, batch = lively(*case, **TWO_LAYERS_EACH), random_batch()
    exits = model.exit_nats(batch, 3)
    assert exits.shape == (3, 4, T) and not exits.requires_grad
    for exit_idx, nats in enumerate(exits):
        assert torch.equal(nats, model.at_exit(exit_idx + 1).evaluation_nats(batch, 3))
    assert torch.equal(exits[-1], model.evaluation_nats(batch, 3))
    assert len({float(nats.mean()) for nats in exits}) == 3


@torch.no_grad()
def test_exit_logits_are_those_of_the_walk(case: tuple[str, str]) -> None:
    model, (inputs, targets) = lively(*case), random_batch()
    noise = model.draw_noise(inputs.shape, torch.Generator().manual_seed(3))
    assert (noise is None) == (case in CAUSAL)
    for num_blocks, logits in enumerate(model.walk(inputs, noise), start=1):
        assert logits.dtype == torch.float32
        assert torch.equal(logits, model.exit_logits(inputs, num_blocks, noise))
        nats = -logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
        torch.testing.assert_close(model.exit_nats((inputs, targets), 3)[num_blocks - 1], nats)
    assert torch.equal(model.exit_logits(inputs, None, noise), logits)


def test_at_the_last_exit_is_the_model_itself(case: tuple[str, str]) -> None:
    model = lively(*case)
    same = model.at_exit(3)
    assert type(same) is type(model) and same.hparams == model.hparams
    assert all(torch.equal(same.state_dict()[name], tensor) for name, tensor in model.state_dict().items())


def test_at_exit_holds_copies_of_the_first_blocks_and_nothing_else(case: tuple[str, str]) -> None:
    model = lively(*case, **TWO_LAYERS_EACH)
    smaller = model.at_exit(2)
    mine, expected = smaller.state_dict(), {n for n in model.state_dict() if not n.startswith(("layers.4", "layers.5"))}
    assert set(mine) == expected
    before = {name: tensor.clone() for name, tensor in mine.items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert all(torch.equal(tensor, before[name]) for name, tensor in smaller.state_dict().items())


def test_at_exit_of_an_exit_is_the_same_model(case: tuple[str, str]) -> None:
    model, batch = lively(*case, num_layers=4, num_blocks=4), random_batch()
    direct, twice = model.at_exit(2), model.at_exit(3).at_exit(2)
    assert torch.equal(direct.evaluation_nats(batch, 0), twice.evaluation_nats(batch, 0))


def test_at_exit_keeps_every_other_argument() -> None:
    chosen: dict[str, Any] = {"lr": 0.5, "weight_decay": 0.0, "warmup_steps": 7, "p_span": 0.0}
    smaller = noisy("denoise", **chosen, weighted=False, p_drop_z=0.25, gamma=0.3).at_exit(1)
    expected = {**SMALL, **chosen, "num_layers": 1, "num_blocks": 1, "objective": "denoise"}
    expected |= {"weighted": False, "p_drop_z": 0.25, "gamma": 0.3}
    assert {name: smaller.hparams[name] for name in expected} == expected
    # A model that was not trained on unknown bytes must not pretend that it was.
    with pytest.raises(ValueError, match="needs a model that was trained on unknown bytes"):
        smaller.generate(b"a", 2, chunk_bytes=2)
    expected = {**SMALL, **chosen, "num_layers": 1, "num_blocks": 1, "objective": "features", "exits": "norm"}
    assert dict(causal("features", exits="norm", lookahead=2, **chosen).at_exit(1).hparams) == expected | {
        "lookahead": 2
    }


def test_at_exit_keeps_modes_precision_and_the_random_stream(case: tuple[str, str]) -> None:
    model, batch = lively(*case).to(torch.bfloat16), random_batch()
    state = torch.get_rng_state()
    smaller = model.at_exit(2)
    assert torch.equal(torch.get_rng_state(), state)
    assert {tensor.dtype for tensor in smaller.parameters()} == {torch.bfloat16}
    assert torch.equal(model.exit_nats(batch, 0)[1], smaller.evaluation_nats(batch, 0))
    assert not smaller.training and model.train().at_exit(2).training


@pytest.mark.parametrize("num_blocks", [0, -1, 4])
def test_exit_that_there_is_not_is_refused(num_blocks: int, case: tuple[str, str]) -> None:
    model, inputs = lively(*case), random_batch()[0]
    for ask in (
        lambda: model.at_exit(num_blocks),
        lambda: model.exit_logits(inputs, num_blocks),
        lambda: model.generate(b"a", 1, num_blocks=num_blocks),
    ):
        with pytest.raises(ValueError, match=rf"must be in 1 .. 3; got num_blocks={num_blocks}; leave it out"):
            ask()


def test_evaluation_at_exits_leaves_the_random_stream_alone(case: tuple[str, str]) -> None:
    model, batch = lively(*case), random_batch()
    state = torch.get_rng_state()
    model.exit_nats(batch, 0)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_exit_from_a_file_generates_the_bytes_of_the_exit(
    num_blocks: int, case: tuple[str, str], tmp_path: Path
) -> None:
    model = lively(*case, **TWO_LAYERS_EACH)
    save_model(model.at_exit(num_blocks), tmp_path / "small.ckpt")
    smaller = load_model(tmp_path / "small.ckpt")
    for options in ({"chunk_bytes": 1}, {"chunk_bytes": 3, "sweeps": 2}):
        own = smaller.generate(b"a prompt", 20, seed=3, **options)
        assert own == model.generate(b"a prompt", 20, num_blocks=num_blocks, seed=3, **options)
    if num_blocks < 3:
        assert own != model.generate(b"a prompt", 20, seed=3, **options)


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 4, 5])
def test_exits_of_diffusion_blocks_keep_the_levels_of_the_sweep(num_blocks: int) -> None:
    model = noisy("denoise", num_layers=5, num_blocks=5, sigma_min=0.3, sigma_max=20.0)
    smaller = model.at_exit(num_blocks)
    # The grid is computed anew from its ends: equal up to float64 rounding, far below the levels' float32.
    assert smaller.sweep_sigmas == pytest.approx(model.sweep_sigmas[:num_blocks], rel=1e-13)
    assert smaller.hparams.sigma_max == 20.0
    assert smaller.hparams.sigma_min == (0.3 if num_blocks in (1, 5) else model.sweep_sigmas[num_blocks - 1])


@torch.no_grad()
def test_mlp_layers_have_exits_too() -> None:
    model, batch = noisy("denoise", layer="mlp"), random_batch()
    assert torch.equal(model.exit_nats(batch, 0)[1], model.at_exit(2).evaluation_nats(batch, 0))


def test_draw_noise_of_a_causal_model_is_none() -> None:
    assert causal("features").draw_noise((1, T), torch.Generator()) is None
    noise = noisy("mse").draw_noise((1, T), torch.Generator())
    assert isinstance(noise, Tensor) and noise.shape == (1, T, D)


# Private exits.


def private(objective: str = "features", **options: Any) -> ByteTransformer:
    model = causal(objective, exits="norm", **options)
    assert model.exits is not None
    with torch.no_grad():
        for idx, own in enumerate(model.exits):
            own.norm.weight.fill_(0.5 + idx)
    return model


@torch.no_grad()
@pytest.mark.parametrize("objective", ["features", "residual"])
def test_private_norm_is_used_at_its_exit_and_nowhere_else(objective: str) -> None:
    model, (inputs, _) = private(objective=objective, **TWO_LAYERS_EACH), random_batch()
    assert model.exits is not None and len(model.exits) == 2
    before = list(model.walk(inputs))
    model.exits[1].norm.weight.mul_(2)  # where block 1 ends
    after = list(model.walk(inputs))
    changed = [not torch.equal(one, other) for one, other in zip(before, after, strict=True)]
    assert changed == [False, True, objective == "residual"]
    hidden = model.embed(inputs)
    for layer in model.layers[:4]:
        hidden = layer(hidden)
    own = torch.nn.functional.layer_norm(hidden, (D,), model.exits[1].norm.weight) @ model.readout.unembed.weight.T
    if objective == "features":
        torch.testing.assert_close(after[1], own)


def test_private_exit_becomes_the_readout_of_the_smaller_model() -> None:
    model, batch = private(**TWO_LAYERS_EACH), random_batch()
    smaller = model.at_exit(2)
    assert smaller.exits is not None and len(smaller.exits) == 1
    assert torch.equal(smaller.readout.norm.weight, model.exits[1].norm.weight)  # type: ignore[index]
    assert torch.equal(smaller.exit_nats(batch, 0), model.exit_nats(batch, 0)[:2])


@pytest.mark.filterwarnings("ignore:You are trying to `self.log")
@pytest.mark.parametrize("block_idx", [0, 1, 2])
def test_private_norm_is_trained_by_the_block_that_ends_there(block_idx: int) -> None:
    model = private()
    model.block_training_step(random_batch(), 0, block_idx).backward()
    assert model.exits is not None
    reached = [own.norm.weight.grad is not None for own in model.exits]
    assert reached == [block_idx == 0, block_idx == 1]
    assert (model.readout.norm.weight.grad is not None) == (block_idx == 2)
    assert model.readout.unembed.weight.grad is not None


@pytest.mark.filterwarnings("ignore:You are trying to `self.log")
def test_own_exits_share_nothing_and_become_the_readout_of_the_smaller_model() -> None:
    model, batch = causal("features", exits="own"), random_batch()
    assert model.exits is not None
    model.block_training_step(batch, 0, 1).backward()
    assert [own.unembed.weight.grad is not None for own in model.exits] == [False, True]
    assert model.readout.unembed.weight.grad is None
    smaller = model.at_exit(2)
    assert torch.equal(smaller.readout.unembed.weight, model.exits[1].unembed.weight)
    assert torch.equal(smaller.exit_nats(batch, 0), model.exit_nats(batch, 0)[:2])


@pytest.mark.parametrize(("exits", "own_heads"), [("shared", 0), ("norm", 2), ("own", 3)])
def test_layout_gives_every_block_the_exit_that_it_alone_trains(exits: str, own_heads: int) -> None:
    model = causal("features", exits=exits)
    cut = partition(model, model.configure_blocks())
    heads = [[n for n in names if n.startswith(("exits", "readout"))] for names in cut.block_names]
    assert [bool(names) for names in heads] == [own_heads > block_idx for block_idx in range(3)]
    assert (
        cut.interface_names
        == {
            "shared": ("readout.norm.weight", "readout.norm.bias", "readout.unembed.weight"),
            "norm": ("readout.norm.weight", "readout.norm.bias", "readout.unembed.weight"),
            "own": (),
        }[exits]
    )


def test_stages_read_out_through_the_exit_of_the_block_in_which_they_end() -> None:
    model = causal("features", exits="own", num_layers=6)
    exits = model.stage_exits()
    assert exits is not None and model.exits is not None
    assert [list(model.exits).index(own) for own in exits] == [0, 0, 1, 1, 1]
    assert causal("features", exits="own", num_blocks=1).stage_exits() is None


def test_blocks_with_exits_of_their_own_are_part_of_the_architecture() -> None:
    shared, own = causal("features"), causal("features", exits="own")
    assert "num_blocks" not in shared.architecture() and own.architecture()["num_blocks"] == 3


def test_unknown_exits_are_named() -> None:
    with pytest.raises(ValueError, match="exits must be 'shared' or 'norm' or 'own'; got exits='private'"):
        causal("features", exits="private")
