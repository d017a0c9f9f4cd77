"""A user's script with several fits on three processes, that prints what a Lightning user would look at."""

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from lightning_blocktrain import BlockTrainStrategy, OuterSGD
from tests.strategies.acceptance_model import AcceptanceData, AcceptanceModel


def digest(module: nn.Module) -> str:
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in module.state_dict().values())).hexdigest()


def trainer_of(folder: Path, name: str, devices: int, *callbacks: L.Callback, **options: Any) -> L.Trainer:
    strategy = BlockTrainStrategy(sync_every=2, interface_every=2, outer_optimizer=OuterSGD(0.7, 0.9))
    given = {"max_epochs": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "precision": "bf16-mixed"}
    return L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=devices,
        callbacks=[LearningRateMonitor(), *callbacks],
        logger=CSVLogger(folder, name),
        default_root_dir=folder,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{**given, **options},
    )


class Batches:
    """The first of the training batches, in a loader of the user's own."""

    def __init__(self, num_batches: int) -> None:
        self.batches = list(AcceptanceData().train_dataloader())[:num_batches]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        return iter(self.batches)


def states(module: nn.Module) -> list[bool]:
    return [p.requires_grad for p in module.parameters()] + [part.training for part in module.modules()]


def tell(trainer: L.Trainer, name: str, **values: Any) -> None:
    if trainer.is_global_zero:
        metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
        told = {"name": name, "step": trainer.global_step, "metrics": metrics, **values}
        print("RESULT " + json.dumps(told), flush=True)


def saves(folder: Path) -> list[ModelCheckpoint]:
    best = ModelCheckpoint(folder, "best", monitor="val/loss", save_last=True, enable_version_counter=False)
    return [best, ModelCheckpoint(folder, "{step}", every_n_train_steps=6, save_top_k=-1)]


def fit_whole(folder: Path) -> str:
    """Fit in one process and then in three; evaluate; return the path of the best checkpoint."""
    for devices in (1, 3):
        L.seed_everything(5, verbose=False)
        module, data = AcceptanceModel(), AcceptanceData()
        before, frozen = states(module), digest(module.norm)
        trainer = trainer_of(folder, f"whole{devices}", devices, *saves(folder / f"whole{devices}"))
        trainer.fit(module, datamodule=data)
        rounds = trainer.strategy.num_rounds_closed  # type: ignore[attr-defined]
        facts = {"digest": digest(module), "states": states(module) == before, "frozen": digest(module.norm) == frozen}
        tell(trainer, f"whole{devices}", rounds=rounds, **facts)
    [validated] = trainer.validate(module, datamodule=data, verbose=False)
    [tested] = trainer.test(module, datamodule=data, ckpt_path="best", verbose=False)
    predicted = trainer.predict(module, datamodule=data)
    trainer.save_checkpoint(folder / "after.ckpt")
    tell(trainer, "evaluated", validated=validated, tested=tested, predicted=[list(p.shape) for p in predicted or []])
    return trainer.checkpoint_callback.best_model_path  # type: ignore[union-attr]


def fit_resumed(folder: Path, best: str) -> None:
    """Go on from the middle of the fit before, with another seed; every process finds the best checkpoint."""
    assert Path(best).name == "best.ckpt"
    AcceptanceModel.load_from_checkpoint(best)
    L.seed_everything(77, verbose=False)
    module = AcceptanceModel()
    trainer = trainer_of(folder, "resumed", 3, *saves(folder / "resumed"))
    trainer.fit(module, datamodule=AcceptanceData(), ckpt_path=folder / "whole3" / "step=6.ckpt")
    rounds = trainer.strategy.num_rounds_closed  # type: ignore[attr-defined]
    tell(trainer, "resumed", digest=digest(module), rounds=rounds)


def fit_uneven(folder: Path) -> None:
    """Let the last process run out of data after five steps of eight."""
    L.seed_everything(6, verbose=False)
    mine = Batches(30 if os.environ.get("LOCAL_RANK") == "2" else 48)
    module = AcceptanceModel()
    trainer = trainer_of(folder, "uneven", 3, max_epochs=1, enable_checkpointing=False)
    trainer.fit(module, mine)
    tell(trainer, "uneven", accepted_tokens=trainer.strategy.accepted_tokens)  # type: ignore[attr-defined]


def fit_stopped(folder: Path) -> None:
    """Stop early, by rank 0's validation alone, on the last checkpoint of a fit before."""
    L.seed_everything(7, verbose=False)
    module = AcceptanceModel()
    stop = EarlyStopping("val/loss", min_delta=100.0, patience=1)
    again = ModelCheckpoint(folder / "resumed", "again", save_last=True)
    trainer = trainer_of(folder, "stopped", 3, stop, again, max_epochs=7)
    trainer.fit(module, datamodule=AcceptanceData(), ckpt_path="last")
    tell(trainer, "stopped", stopped_epoch=stop.stopped_epoch)


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    best = fit_whole(folder)
    fit_resumed(folder, best)
    fit_uneven(folder)
    fit_stopped(folder)


if __name__ == "__main__":
    main()
