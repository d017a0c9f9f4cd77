import math
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from torch import Tensor

from lightning_blocktrain.errors import CheckpointMismatchError
from lightning_blocktrain.models import ByteTransformer, DiffusionBlocks
from lightning_blocktrain.models.base import (
    ARCHITECTURE,
    ByteModule,
    refuse_other_architecture,
    warmup_cosine,
)

SMALL: dict[str, Any] = {"num_layers": 2, "width": 16, "num_heads": 2, "window_bytes": 16, "warmup_steps": 3}


Kind = type[ByteTransformer] | type[DiffusionBlocks]


class RecordRates(L.Callback):
    """Keep the learning rate with which each step was taken."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


@pytest.fixture
def saved(make_trainer: Any, tiny_data: Any, tmp_path: Path) -> Any:
    """Return a function that trains a model for one step and returns the path of its checkpoint."""

    def save(model: ByteModule) -> Path:
        trainer = make_trainer(max_steps=1, limit_val_batches=0)
        trainer.fit(model, tiny_data)
        path = tmp_path / f"{type(model).__name__}.ckpt"
        trainer.save_checkpoint(path)
        return path

    return save


# The optimizer recipe.


@pytest.mark.parametrize(
    ("step", "expected"),
    [(0, 0.1), (4, 0.5), (9, 1.0), (10, 1.0), (60, 0.55), (110, 0.1), (10_000, 0.1)],
)
def test_warmup_cosine_has_the_closed_forms_values(step: int, expected: float) -> None:
    assert warmup_cosine(step, warmup_steps=10, total_steps=110) == pytest.approx(expected, rel=1e-12)


def test_warmup_cosine_rises_then_falls_and_stays_in_range() -> None:
    factors = [warmup_cosine(step, 10, 110) for step in range(200)]
    assert factors[:10] == sorted(factors[:10])
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert all(0 < factor <= 1 for factor in factors)


def test_warmup_cosine_without_warmup_starts_at_the_peak() -> None:
    assert warmup_cosine(0, 0, 100) == 1.0
    assert warmup_cosine(0, 0, 0) == 1.0


def test_warmup_cosine_run_shorter_than_the_warmup_never_divides_by_zero() -> None:
    assert [warmup_cosine(step, 4, 2) for step in range(5)] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_fit_takes_every_step_at_the_scheduled_rate(make_trainer: Any, tiny_data: Any) -> None:
    record = RecordRates()
    model = ByteTransformer(**SMALL, lr=0.01)
    make_trainer(max_steps=8, limit_val_batches=0, callbacks=[record]).fit(model, tiny_data)
    assert record.rates == pytest.approx([0.01 * warmup_cosine(step, 3, 8) for step in range(8)], rel=1e-6)


@pytest.mark.parametrize("kind", [ByteTransformer, DiffusionBlocks])
def test_optimizer_decays_matrices_only_and_holds_every_parameter_once(
    kind: Kind, make_trainer: Any, tiny_data: Any
) -> None:
    model = kind(**{**SMALL, "num_blocks": 2}, weight_decay=0.3)
    trainer = make_trainer(max_steps=1, limit_val_batches=0)
    trainer.fit(model, tiny_data)
    decay_of = {id(p): group["weight_decay"] for group in trainer.optimizers[0].param_groups for p in group["params"]}
    assert sum(len(group["params"]) for group in trainer.optimizers[0].param_groups) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        assert decay_of[id(parameter)] == (0.3 if parameter.dim() == 2 else 0.0), name
    assert trainer.optimizers[0].defaults["betas"] == (0.9, 0.95)


@pytest.mark.parametrize(
    ("option", "got"),
    [
        ({"window_bytes": 0}, "window_bytes=0"),
        ({"lr": 0.0}, "lr=0.0"),
        ({"lr": math.nan}, "lr=nan"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1"),
        ({"warmup_steps": -1}, "warmup_steps=-1"),
    ],
)
def test_module_argument_out_of_range_is_named(option: dict[str, Any], got: str) -> None:
    with pytest.raises(ValueError, match=f"must be at least 1, lr greater than 0.*got .*{got}"):
        ByteTransformer(**{**SMALL, **option})


# Evaluation.


def test_count_tokens_is_the_number_of_target_bytes() -> None:
    batch = (torch.zeros(3, 5, dtype=torch.int64), torch.zeros(3, 5, dtype=torch.int64))
    assert ByteTransformer(**SMALL).count_tokens(batch) == 15


def test_evaluation_nats_without_a_model_is_not_implemented() -> None:
    batch = (torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64))
    with pytest.raises(NotImplementedError):
        ByteModule(4, 1e-3, 0.1, 1).evaluation_nats(batch, 0)


@pytest.mark.parametrize("kind", [ByteTransformer, DiffusionBlocks])
def test_validate_test_and_predict_after_fit_agree(kind: Kind, make_trainer: Any, tiny_data: Any) -> None:
    trainer = make_trainer(max_steps=2, limit_val_batches=2)
    model = kind(**SMALL, num_blocks=2)
    trainer.fit(model, tiny_data)
    trainer.validate(model, tiny_data, verbose=False)
    assert math.isfinite(trainer.callback_metrics["val/loss"])
    [tested] = trainer.test(model, tiny_data, verbose=False)
    nats: list[Tensor] = trainer.predict(model, tiny_data)
    assert all(part.shape[1:] == (16,) for part in nats)
    mean = float(torch.cat(nats).double().mean())
    # Lightning averages float32 batch means; the metric sums in float64.
    assert tested["test/loss"] == pytest.approx(mean, rel=1e-5)
    assert tested["test/bits_per_byte"] == pytest.approx(mean / math.log(2), rel=1e-6)


# Checkpoints.


@pytest.mark.parametrize("kind", [ByteTransformer, DiffusionBlocks])
def test_checkpoint_loads_weights_only_and_restores_the_model(kind: Kind, saved: Any) -> None:
    model = kind(**SMALL, num_blocks=2, lr=0.02)
    path = saved(model)
    content = torch.load(path, weights_only=True)
    assert content[ARCHITECTURE] == model.architecture()
    back = kind.load_from_checkpoint(path)
    assert back.hparams == model.hparams
    assert all(torch.equal(back.state_dict()[name], tensor) for name, tensor in model.state_dict().items())


def test_load_with_another_noise_partition_names_the_fields(saved: Any) -> None:
    path = saved(DiffusionBlocks(**SMALL, num_blocks=2))
    with pytest.raises(
        CheckpointMismatchError, match=r"got sigma_max: saved 10\.0, now 20\.0; gamma: saved 0\.1, now 0;"
    ):
        DiffusionBlocks.load_from_checkpoint(path, sigma_max=20.0, gamma=0)


def test_load_with_another_block_count_names_the_field(saved: Any) -> None:
    path = saved(DiffusionBlocks(**SMALL, num_blocks=2))
    with pytest.raises(CheckpointMismatchError, match="got num_blocks: saved 2, now 1;"):
        DiffusionBlocks.load_from_checkpoint(path, num_blocks=1)


def test_load_with_other_heads_is_refused_though_every_shape_fits(saved: Any) -> None:
    path = saved(ByteTransformer(**SMALL))
    with pytest.raises(CheckpointMismatchError, match="num_heads: saved 2, now 4"):
        ByteTransformer.load_from_checkpoint(path, num_heads=4)


def test_load_into_another_model_names_the_fields(saved: Any) -> None:
    path = saved(ByteTransformer(**SMALL))
    with pytest.raises(ValueError, match="got objective='features'; objectives without noise are ByteTransformer's"):
        DiffusionBlocks.load_from_checkpoint(path, num_blocks=2)
    with pytest.raises(CheckpointMismatchError, match=r"objective: saved features, now mse.*sigma_min: saved absent"):
        DiffusionBlocks.load_from_checkpoint(path, num_blocks=2, objective="mse")


def test_resume_with_another_noise_partition_is_refused(saved: Any, make_trainer: Any, tiny_data: Any) -> None:
    path = saved(DiffusionBlocks(**SMALL, num_blocks=2))
    other = DiffusionBlocks(**SMALL, num_blocks=2, sigma_min=0.5)
    with pytest.raises(CheckpointMismatchError, match=r"got sigma_min: saved 1\.0, now 0\.5;"):
        make_trainer(max_steps=2).fit(other, tiny_data, ckpt_path=path)


def test_load_with_other_training_options_is_allowed(saved: Any) -> None:
    path = saved(DiffusionBlocks(**SMALL, num_blocks=2))
    options: dict[str, Any] = {"lr": 0.5, "weight_decay": 0.0, "warmup_steps": 7}
    options |= {"weighted": False, "p_span": 0.0, "p_drop_z": 0.5}
    model = DiffusionBlocks.load_from_checkpoint(path, **options)
    assert {name: getattr(model, name) for name in options} == options


def test_load_transformer_under_another_cut_gives_the_same_logits(saved: Any) -> None:
    model = ByteTransformer(**SMALL, num_blocks=2)
    other = ByteTransformer.load_from_checkpoint(saved(model), num_blocks=1)
    inputs = torch.randint(256, (2, 16))
    assert other.num_blocks == 1
    assert torch.equal(other(inputs), model(inputs))


def test_architecture_built_by_the_cli_equals_a_plain_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The default of ``args`` would be pytest's own command line.
    monkeypatch.setattr(sys, "argv", ["train.py"])
    options = [f"--model.{name}={value}" for name, value in SMALL.items()]
    quiet = {"logger": False, "accelerator": "cpu", "default_root_dir": str(tmp_path)}
    cli = LightningCLI(
        ByteTransformer,
        run=False,
        args=options,
        seed_everything_default=1,
        trainer_defaults=quiet,
        save_config_callback=None,
    )
    assert "_instantiator" in cli.model.hparams
    assert cli.model.architecture() == ByteTransformer(**SMALL).architecture()


def test_refuse_other_architecture_equal_ones_pass() -> None:
    assert refuse_other_architecture({"width": 8, "layer": "mlp"}, {"layer": "mlp", "width": 8}) is None  # type: ignore[func-returns-value]


def test_refuse_other_architecture_names_fields_missing_on_either_side() -> None:
    with pytest.raises(CheckpointMismatchError, match="got width: saved 8, now absent; depth: saved absent, now 2;"):
        refuse_other_architecture({"width": 8}, {"depth": 2})


@pytest.mark.parametrize("model", [ByteTransformer, DiffusionBlocks])
def test_data_with_a_longer_window_than_the_model_is_refused_with_both_lengths(model):
    module = model(num_layers=2, num_blocks=2, width=16, num_heads=2, window_bytes=8)
    with pytest.raises(ValueError, match="got window_bytes=9 of the data, 8 of the model"):
        module(torch.zeros(1, 9, dtype=torch.int64))
