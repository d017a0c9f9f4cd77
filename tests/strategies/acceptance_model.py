"""A user's module and its data, in a file that does not know this package."""

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

VOCABULARY, TARGETS = 16, 5


class AcceptanceModel(L.LightningModule):
    """Three blocks of one layer, with what users put into modules: metrics, a frozen part, a layer in eval mode."""

    def __init__(self, width: int = 8, lr: float = 0.02) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.norm = nn.LayerNorm(width).requires_grad_(False)
        self.readout = nn.Linear(width, VOCABULARY)
        self.noise = nn.Dropout(0.1)
        self.unused_noise = nn.Dropout(0.5).eval()
        self.train_accuracy = MulticlassAccuracy(VOCABULARY)
        self.val_accuracy = MulticlassAccuracy(VOCABULARY)
        self.val_mean = MeanMetric()

    def configure_blocks(self) -> dict[str, Any]:
        return {"layers": self.layers, "readout": self.readout, "num_blocks": 3}

    def logits(self, inputs: Tensor, layers: Any) -> Tensor:
        hidden = self.noise(self.embed(inputs))
        for layer in layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return self.readout(self.norm(hidden))

    def loss_of(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def block_training_step(self, batch: list[Tensor], batch_idx: int, block_idx: int) -> Tensor:
        logits = self.logits(batch[0], self.layers[block_idx : block_idx + 1])
        loss = self.loss_of(logits, batch[1])
        self.train_accuracy(logits.flatten(0, 1), batch[1].flatten())
        self.log("train/accuracy", self.train_accuracy, on_step=False, on_epoch=True)
        self.log("train/loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss_of(self.logits(batch[0], self.layers), batch[1])

    def _evaluate(self, batch: list[Tensor], stage: str) -> None:
        logits = self.logits(batch[0], self.layers)
        self.val_accuracy(logits.flatten(0, 1), batch[1].flatten())
        self.val_mean(self.loss_of(logits, batch[1]))
        self.log(f"{stage}/accuracy", self.val_accuracy)
        self.log(f"{stage}/mean", self.val_mean)
        self.log(f"{stage}/loss", self.loss_of(logits, batch[1]), sync_dist=True)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self._evaluate(batch, "val")

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self._evaluate(batch, "test")

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.logits(batch[0], self.layers).argmax(-1)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"], weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def windows(num_windows: int, seed: int) -> TensorDataset:
    text = torch.randint(VOCABULARY, (num_windows, TARGETS + 1), generator=torch.Generator().manual_seed(seed))
    return TensorDataset(text[:, :-1], text[:, 1:])


class AcceptanceData(L.LightningDataModule):
    """48 training batches of two windows."""

    def train_dataloader(self) -> Any:
        return DataLoader(windows(96, 0), batch_size=2, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(windows(8, 1), batch_size=4)

    def test_dataloader(self) -> Any:
        return DataLoader(windows(8, 2), batch_size=4)

    def predict_dataloader(self) -> Any:
        return DataLoader(windows(8, 3), batch_size=4)
