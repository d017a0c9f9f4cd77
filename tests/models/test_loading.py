"""Loading a checkpoint of either model, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_blocktrain.errors import CheckpointMismatchError
from lightning_blocktrain.models import ByteTransformer, DiffusionBlocks
from lightning_blocktrain.models.loading import CLASSES, Model, load_model

SIZES: dict[str, Any] = {"num_layers": 2, "num_blocks": 2, "width": 16, "num_heads": 2, "window_bytes": 8}


def checkpoint_of(model: Model) -> dict[str, Any]:
    checkpoint = {"state_dict": model.state_dict(), "hyper_parameters": dict(model.hparams)}
    model.on_save_checkpoint(checkpoint)
    return checkpoint


def saved(path: Path, content: object) -> Path:
    torch.save(content, path)
    return path


@pytest.mark.parametrize("name", list(CLASSES))
def test_load_model_returns_same_class_and_weights(tmp_path: Path, name: str) -> None:
    model = CLASSES[name](**SIZES)
    loaded = load_model(saved(tmp_path / "a.ckpt", checkpoint_of(model)))
    assert type(loaded) is type(model)
    assert not loaded.training
    for key, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], tensor)


def test_load_model_ignores_names_that_the_command_line_adds(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(DiffusionBlocks(**SIZES))
    checkpoint["hyper_parameters"] |= {"_instantiator": "anything", "_class_path": "anything"}
    assert isinstance(load_model(saved(tmp_path / "a.ckpt", checkpoint)), DiffusionBlocks)


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"\x80\x04K\x01."])
def test_load_model_of_foreign_bytes_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.ckpt"
    path.write_bytes(content)
    with pytest.raises(CheckpointMismatchError, match="must be a checkpoint"):
        load_model(path)


def test_load_model_of_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointMismatchError, match="must be a file"):
        load_model(tmp_path / "nothing.ckpt")


@pytest.mark.parametrize("name", [None, "GPT2", ["DiffusionBlocks"]])
def test_load_model_of_another_class_is_refused_by_name(tmp_path: Path, name: object) -> None:
    checkpoint = {**checkpoint_of(ByteTransformer(**SIZES)), "model_class": name}
    with pytest.raises(CheckpointMismatchError, match="ByteTransformer or a DiffusionBlocks"):
        load_model(saved(tmp_path / "a.ckpt", checkpoint))


def test_load_model_with_missing_weights_is_refused(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(ByteTransformer(**SIZES))
    checkpoint["state_dict"].popitem()
    with pytest.raises(CheckpointMismatchError, match="weights must fit"):
        load_model(saved(tmp_path / "a.ckpt", checkpoint))


class Marker:
    """Stands for code in a pickle: reading it with full unpickling would create the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return Path.touch, (self.path,)  # type: ignore[return-value]


def test_load_model_runs_no_code_from_the_file(tmp_path: Path) -> None:
    trace = tmp_path / "was_here"
    with pytest.raises(CheckpointMismatchError):
        load_model(saved(tmp_path / "a.ckpt", {"model_class": Marker(trace)}))
    assert not trace.exists()
