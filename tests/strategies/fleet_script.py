"""An ordinary user's script for the tests of several processes; ``--fault`` makes something happen at a step."""

import argparse
import hashlib
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import lightning as L
import psutil
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_blocktrain import BlockTrainStrategy

FAULT_STEP = 5


class Model(L.LightningModule):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.readout = nn.Linear(width, 16)

    def configure_blocks(self) -> dict[str, Any]:
        return {"layers": self.layers, "readout": self.readout, "num_blocks": 2}

    def loss(self, batch: list[Tensor], layers: Any) -> Tensor:
        hidden = F.dropout(self.embed(batch[0]), 0.1, self.training)
        for layer in layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return F.cross_entropy(self.readout(hidden).flatten(0, 1), batch[1].flatten())

    def block_training_step(self, batch: list[Tensor], batch_idx: int, block_idx: int) -> Tensor:
        loss = self.loss(batch, self.layers[block_idx : block_idx + 1])
        self.log("train/loss", loss, sync_dist=True)
        return loss

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch, self.layers)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val/loss", self.loss(batch, self.layers))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9), "interval": "step"}]


class Fault(L.Callback):
    """Does what ``kind`` says after ``FAULT_STEP`` steps, once."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step != FAULT_STEP:
            return
        if self.kind == "worker" and trainer.global_rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if trainer.is_global_zero:
            if self.kind == "coordinator":
                [process] = [p for p in psutil.Process().children() if "coordinator_main" in " ".join(p.cmdline())]
                process.kill()
            if self.kind == "raise":
                raise ZeroDivisionError("the user's own fault")
            if self.kind in ("sigint", "sigterm", "sigkill"):
                os.kill(os.getpid(), getattr(signal, self.kind.upper()))


class Report(L.Callback):
    """Writes which processes there are once training runs, and which hooks each rank saw."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hooks: set[str] = set()

    def on_train_start(self, trainer: L.Trainer, *args: Any) -> None:
        (self.folder / f"pid{trainer.global_rank}").write_text(str(os.getpid()))
        if trainer.is_global_zero:
            pids = [process.pid for process in psutil.Process().children()]
            (self.folder / "children").write_text(json.dumps(pids))

    def on_validation_start(self, *args: Any) -> None:
        self.hooks.add("validation")

    def on_save_checkpoint(self, *args: Any) -> None:
        self.hooks.add("checkpoint")

    def on_train_end(self, trainer: L.Trainer, *args: Any) -> None:
        seen = {
            "hooks": sorted(self.hooks),
            "step": trainer.global_step,
            "lr": trainer.optimizers[0].param_groups[0]["lr"],
            "callbacks": [type(callback).__name__ for callback in trainer.callbacks],  # type: ignore[attr-defined]
            "loggers": [type(logger).__name__ for logger in trainer.loggers],
            "flags": all(parameter.requires_grad for parameter in trainer.lightning_module.parameters()),
            "state": len(trainer.optimizers[0].state),
        }
        (self.folder / f"seen{trainer.global_rank}").write_text(json.dumps(seen))


def digest(module: nn.Module) -> str:
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in module.state_dict().values())).hexdigest()


def best_path(trainer: L.Trainer) -> str:
    return getattr(trainer.checkpoint_callback, "best_model_path", "")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--fault", default="")
    parser.add_argument("--fits", type=int, default=1)
    parser.add_argument("--deadline-s", type=float, default=60.0)
    parser.add_argument("--exchange", default="http")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--resume", default=None)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--codec", default="fp32")
    args = parser.parse_args()
    if args.fault == "import" and "LOCAL_RANK" in os.environ:
        raise ImportError("no such thing in a worker")
    for fit_idx in range(args.fits):
        L.seed_everything(3 + fit_idx, verbose=False)
        module = Model()
        text = torch.randint(16, (64, 6))
        data = DataLoader(TensorDataset(text[:, :-1], text[:, 1:]), batch_size=2, shuffle=True)
        trainer = L.Trainer(
            strategy=BlockTrainStrategy(
                sync_every=2,
                deadline_s=args.deadline_s,
                replicas=args.replicas,
                exchange=args.exchange,
                codec=args.codec,
            ),
            num_nodes=args.nodes,
            accelerator="cpu",
            devices=args.devices,
            max_epochs=args.epochs,
            callbacks=[
                ModelCheckpoint(args.folder / f"ckpt{fit_idx}", monitor="val/loss", enable_version_counter=False),
                Report(args.folder),
                Fault(args.fault),
            ],
            default_root_dir=args.folder,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        held_out = DataLoader(TensorDataset(text[:8, :-1], text[:8, 1:]), batch_size=4)
        trainer.fit(module, data, held_out, ckpt_path=args.resume)
        [scores] = trainer.validate(module, DataLoader(TensorDataset(text[:8, :-1], text[:8, 1:])), verbose=False)
        after = {"digest": digest(module), "val": scores["val/loss"], "best": best_path(trainer)}
        (args.folder / f"after{trainer.global_rank}").write_text(json.dumps(after))
        if not trainer.is_global_zero:
            continue
        loaded = Model.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)  # type: ignore[union-attr]
        result = {
            "digest": digest(module),
            "checkpoint": digest(loaded),
            "val": scores["val/loss"],
            "step": trainer.global_step,
            "rounds": trainer.strategy.num_rounds_closed,  # type: ignore[attr-defined]
            "accepted_tokens": trainer.strategy.accepted_tokens,  # type: ignore[attr-defined]
            "threads": [t.name for t in threading.enumerate() if t.name.startswith("blocktrain")],
            "ended_at": time.time(),
        }
        print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
