"""Fits of a script that a worker process passes over, because they were over when rank 0 started it.

Owns what such a process knows of them: the paths and the score that rank 0's checkpoint callbacks had in the end, so
that a script may go on from ``best_model_path``. Of everything else that a fit leaves it knows nothing.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerStatus
from torch import Tensor

PATHS = ("best_model_path", "last_model_path")
SCORE = "best_model_score"

_finished: list[list[dict[str, Any]]] = []


def note_fit(trainer: L.Trainer) -> None:
    """Note what the checkpoint callbacks of a Trainer have after its fit of several processes; rank 0 calls it."""
    _finished.append([_results(callback) for callback in trainer.checkpoint_callbacks])


def noted_fits() -> list[list[dict[str, Any]]]:
    """Return what was noted, by fit and checkpoint callback, as plain values."""
    return list(_finished)


def _results(callback: object) -> dict[str, Any]:
    score = getattr(callback, SCORE, None)
    paths = {name: getattr(callback, name) for name in PATHS if hasattr(callback, name)}
    return {**paths, SCORE: float(score)} if isinstance(score, Tensor) else paths


def pass_over(trainer: L.Trainer, noted: Sequence[Mapping[str, Any]]) -> None:
    """Leave a Trainer as if its fit had ended, with what was noted of it."""
    trainer.state.status, trainer.state.stage = TrainerStatus.FINISHED, None
    take_results(trainer.checkpoint_callbacks, noted)


def take_results(callbacks: Iterable[object], noted: Sequence[Mapping[str, Any]]) -> None:
    """Give checkpoint callbacks what was noted of rank 0's, in the same order."""
    for callback, results in zip(callbacks, noted, strict=False):
        for name, value in results.items():
            setattr(callback, name, torch.tensor(value) if name == SCORE else value)
