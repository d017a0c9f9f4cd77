"""From a checkpoint file to the model it holds, whichever of the two it is, and back.

Owns the choice of the class. Executes nothing from the file: it is read with ``weights_only=True``, and a class is
found by its name among those listed here.
"""

import inspect
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import torch

from lightning_blocktrain.errors import CheckpointMismatchError, explain
from lightning_blocktrain.models.base import MODEL_CLASS
from lightning_blocktrain.models.byte_transformer import ByteTransformer
from lightning_blocktrain.models.diffusion_blocks import DiffusionBlocks

Model = ByteTransformer | DiffusionBlocks
CLASSES: dict[Any, type[Model]] = {"ByteTransformer": ByteTransformer, "DiffusionBlocks": DiffusionBlocks}


def load_model(path: Path) -> Model:
    """Return the model of a checkpoint, in eval mode on the CPU.

    Args:
        path: A checkpoint that a Trainer has saved under any strategy.

    Raises:
        CheckpointMismatchError: If the file is no checkpoint of one of ``CLASSES``, or its weights do not fit.
    """
    checkpoint = read_checkpoint(path)
    name, arguments = arguments_of(checkpoint, path)
    try:
        model = CLASSES[name](**arguments)
        model.on_load_checkpoint(checkpoint)
        model.load_state_dict(checkpoint.get("state_dict", {}))
    except (RuntimeError, TypeError, ValueError) as exc:
        if isinstance(exc, CheckpointMismatchError):
            raise
        rule = "the weights must fit the model that the checkpoint describes"
        raise CheckpointMismatchError(explain(rule, str(path), "the file is damaged or was edited")) from exc
    return model.eval()


def arguments_of(checkpoint: Mapping[str, Any], path: Path) -> tuple[str, dict[str, Any]]:
    """Return the class of a checkpoint's model, a key of ``CLASSES``, and the arguments of its constructor.

    Raises:
        CheckpointMismatchError: If it is none of them.
    """
    name = checkpoint.get(MODEL_CLASS)
    if not isinstance(name, str) or name not in CLASSES:
        rule = f"the checkpoint must hold a {' or a '.join(CLASSES)}"
        raise CheckpointMismatchError(explain(rule, f"{path} with model_class={name!r}", "choose another file"))
    accepted = inspect.signature(CLASSES[name].__init__).parameters
    # LightningCLI stores names of its own beside the arguments.
    return name, {k: v for k, v in checkpoint.get("hyper_parameters", {}).items() if k in accepted}


def save_model(module: Model, path: Path) -> None:
    """Write a checkpoint of the weights, which Lightning and ``load_model`` load.

    Args:
        module: The model.
        path: Where to write; a file that is there is replaced when the new one is whole.

    Raises:
        ValueError: If it cannot be written there.
    """
    if path.is_dir():
        raise ValueError(explain("the checkpoint must be written to a file", f"{path}, a folder", "add a file name"))
    checkpoint = {
        "pytorch-lightning_version": L.__version__,
        "state_dict": module.state_dict(),
        "hyper_parameters": dict(module.hparams),
    }
    module.on_save_checkpoint(checkpoint)
    assert MODEL_CLASS in checkpoint
    partial = path.parent / f".{path.name}.part"
    try:
        torch.save(checkpoint, partial)
        partial.replace(path)
    except (OSError, RuntimeError) as exc:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        rule = "the checkpoint must be written to a file in a directory that exists"
        raise ValueError(explain(rule, f"{path} ({exc})", "choose another path")) from exc


def read_checkpoint(path: Path, mapped: bool = False) -> dict[str, Any]:
    """Return the entries of a checkpoint: tensors and plain values only.

    Args:
        path: The file.
        mapped: Whether its tensors stay in the file until they are read.

    Raises:
        CheckpointMismatchError: If there is no such file or it is something else.
    """
    fix = "pass a .ckpt file that a Trainer or 'blocktrain demo' has written"
    if not path.is_file():
        raise CheckpointMismatchError(explain("the checkpoint must be a file", str(path), fix))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the error below says it better
            checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as exc:  # a foreign file fails in whatever way it pleases the unpickler
        raise CheckpointMismatchError(explain("the file must be a checkpoint", str(path), fix)) from exc
    if not isinstance(checkpoint, dict):
        raise CheckpointMismatchError(explain("the file must be a checkpoint", str(path), fix))
    return checkpoint
