"""What the two byte-level language models share: optimizer recipe, logging names, evaluation, checkpoint check.

Owns no architecture and no training objective.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from typing_extensions import override

from lightning_blocktrain.errors import CheckpointMismatchError, explain
from lightning_blocktrain.metrics import BitsPerToken

Batch = tuple[Tensor, Tensor]
"""Input bytes and the byte after each of them, both int64 (B, T)."""


ARCHITECTURE = "architecture"
"""The checkpoint entry with the hyper-parameters that decide what the weights mean."""

MODEL_CLASS = "model_class"
"""The checkpoint entry with the name of the class."""


def warmup_cosine(step: int, warmup_steps: int, total_steps: int, final_frac: float = 0.1) -> float:
    """Return the learning-rate factor: linear warm-up, then a half cosine down to ``final_frac``."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return final_frac + (1 - final_frac) * 0.5 * (1 + math.cos(math.pi * progress))


class ByteModule(L.LightningModule):
    """Base of the byte-level models; a subclass adds its layers and its objective.

    Args:
        window_bytes: T, the longest window it can see.
        lr: Peak learning rate of AdamW.
        weight_decay: Decay of matrices; biases, norms and gates are not decayed.
        warmup_steps: Steps of linear warm-up; the cosine after it ends with the run.
    """

    retunable: ClassVar[frozenset[str]] = frozenset({"lr", "weight_decay", "warmup_steps"})
    """Hyper-parameters that may change when a checkpoint is loaded; all others belong to the weights."""

    def __init__(self, window_bytes: int, lr: float, weight_decay: float, warmup_steps: int) -> None:
        super().__init__()
        if window_bytes < 1 or not lr > 0 or not weight_decay >= 0 or warmup_steps < 0:
            raise ValueError(
                explain(
                    "window_bytes must be at least 1, lr greater than 0, weight_decay and warmup_steps not negative",
                    f"{window_bytes=}, {lr=}, {weight_decay=}, {warmup_steps=}",
                    "the usual values are 256, 1e-3, 0.1 and 50",
                )
            )
        self.window_bytes = window_bytes
        self.lr = lr
        self.weight_decay = weight_decay
        self.warmup_steps = warmup_steps
        self.bits_per_byte = BitsPerToken()

    def refuse_long_window(self, inputs: Tensor) -> None:
        """Refuse inputs (B, T) that are longer than the window the model was built for.

        Raises:
            ValueError: Naming both lengths.
        """
        if inputs.shape[1] > self.window_bytes:
            got = f"window_bytes={inputs.shape[1]} of the data, {self.window_bytes} of the model"
            raise ValueError(explain("the data's window_bytes must not exceed the model's", got, "make them equal"))

    def count_tokens(self, batch: Batch) -> int:
        """Return the number of target bytes in ``batch``."""
        return batch[1].numel()

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return fused AdamW (betas .9, .95) with warm-up and cosine; decay on matrices only."""
        matrices = [p for p in self.parameters() if p.dim() >= 2]
        vectors = [p for p in self.parameters() if p.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": self.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, 0.95), fused=True)
        total_steps = int(min(self.trainer.estimated_stepping_batches, 10**9))
        schedule = LambdaLR(optimizer, lambda step: warmup_cosine(step, self.warmup_steps, total_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def arguments(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        # Names with an underscore are LightningCLI's own.
        return {name: value for name, value in self.hparams.items() if not name.startswith("_")}

    def architecture(self) -> dict[str, Any]:
        """Return the hyper-parameters in which a checkpoint must agree with this model."""
        return {name: value for name, value in self.arguments().items() if name not in self.retunable}

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the architecture: ``load_from_checkpoint`` overwrites Lightning's own copy with its keywords."""
        checkpoint[MODEL_CLASS] = type(self).__name__
        checkpoint[ARCHITECTURE] = self.architecture()

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse the weights of another architecture.

        Raises:
            CheckpointMismatchError: Naming every field that differs.
        """
        if ARCHITECTURE in checkpoint:
            refuse_other_architecture(checkpoint[ARCHITECTURE], self.architecture())

    def evaluation_nats(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the nats that the whole model pays for each target byte, (B, T)."""
        raise NotImplementedError

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log ``val/loss`` (nats per byte) and ``val/bits_per_byte`` of the whole model."""
        self._evaluate("val", batch, batch_idx)

    @override
    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Log ``test/loss`` (nats per byte) and ``test/bits_per_byte`` of the whole model."""
        self._evaluate("test", batch, batch_idx)

    @override
    def predict_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Return the nats that the whole model pays for each target byte, (B, T)."""
        return self.evaluation_nats(batch, batch_idx)

    def _evaluate(self, stage: Literal["val", "test"], batch: Batch, batch_idx: int) -> None:
        nats = self.evaluation_nats(batch, batch_idx)
        self.bits_per_byte.update_nats(nats.double().sum(), nats.numel())
        options: dict[str, Any] = {"on_step": False, "on_epoch": True, "batch_size": nats.shape[0]}
        self.log(f"{stage}/loss", nats.mean(), prog_bar=True, **options)
        self.log(f"{stage}/bits_per_byte", self.bits_per_byte, **options)


def refuse_other_architecture(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Refuse weights that were trained for another model, block count or noise partition.

    Raises:
        CheckpointMismatchError: Naming every field that differs.
    """
    pairs = {name: (saved.get(name, "absent"), current.get(name, "absent")) for name in {**saved, **current}}
    differing = [f"{name}: saved {old}, now {new}" for name, (old, new) in pairs.items() if old != new]
    if differing:
        raise CheckpointMismatchError(
            explain(
                "a checkpoint must belong to the same model, block count and noise partition",
                "; ".join(differing),
                "build the model with the saved values, or load them with load_from_checkpoint",
            )
        )
