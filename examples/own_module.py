"""Your own LightningModule, trained block by block or in stages: what it must offer, on data of its own.

``configure_blocks`` says which layers are cut. ``--strategy blocktrain`` needs one more hook, ``block_training_step``,
which gives one block's loss; ``--strategy rgc`` needs two others, ``stage_embed`` and ``stage_loss``, and runs the
layers between them itself. Neither asks for the hooks of the other. The rest is an ordinary module, which
``--strategy auto`` trains end to end. The module imports nothing from ``lightning_blocktrain``, and its checkpoint
loads where that package is not installed.

Shapes: ``B`` sequences, ``T`` bytes per window, ``D`` width, ``V`` = 256 byte values.
"""

import argparse
import inspect
import math
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

Batch = Sequence[Tensor]
"""Input bytes and the byte after each of them, both int64 (B, T)."""


class ConvLayer(nn.Module):
    """A residual causal convolution."""

    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.reach = 2 * dilation
        self.norm = nn.LayerNorm(width)
        self.conv = nn.Conv1d(width, width, kernel_size=3, dilation=dilation)

    def forward(self, x: Tensor) -> Tensor:
        """Mix each position with earlier ones; (B, T, D) to (B, T, D)."""
        past = F.pad(self.norm(x).transpose(1, 2), (self.reach, 0))  # (B, D, reach + T)
        return x + F.gelu(self.conv(past)).transpose(1, 2)


class ConvLanguageModel(L.LightningModule):
    """Byte-level language model of causal convolutions.

    Args:
        num_layers: Layers.
        num_blocks: Blocks, a divisor of ``num_layers``; the number of stages is the strategy's own.
        width: D.
        lr: Learning rate.
    """

    def __init__(self, num_layers: int = 4, num_blocks: int = 2, width: int = 64, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.num_blocks = num_blocks
        self.lr = lr
        self.embed = nn.Embedding(256, width)
        self.layers = nn.ModuleList(ConvLayer(width, dilation=2**idx) for idx in range(num_layers))
        self.readout = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))

    def configure_blocks(self) -> dict[str, Any]:
        """Say what is cut into blocks or stages; a block's loss runs the blocks before it, frozen."""
        return {
            "layers": self.layers,
            "readout": self.readout,
            "num_blocks": self.num_blocks,
            "prefix": "frozen",
        }

    def block_training_step(self, batch: Batch, batch_idx: int, block_idx: int) -> Tensor:
        """Return the next-byte loss right after block ``block_idx``, in nats per byte."""
        inputs, targets = batch
        layers_per_block = len(self.layers) // self.num_blocks
        first = block_idx * layers_per_block
        # Block 0 has no layer before it and trains the embedding; the others read frozen features.
        with torch.set_grad_enabled(block_idx == 0):
            hidden = self.embed(inputs)
            for layer in self.layers[:first]:
                hidden = layer(hidden)
        for layer in self.layers[first : first + layers_per_block]:
            hidden = layer(hidden)
        loss = F.cross_entropy(self.readout(hidden).flatten(0, 1), targets.flatten())
        self.log(f"train/local_ce/block{block_idx}", loss.detach())
        return loss

    def stage_embed(self, batch: Batch) -> Tensor:
        """Return what the first layer reads, (B, T, D)."""
        hidden: Tensor = self.embed(batch[0])
        return hidden

    def stage_loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return the next-byte loss of any stage's logits (B, T, V), in nats per byte; the strategy logs it."""
        return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits of the next byte; (B, T) to (B, T, V)."""
        hidden = self.embed(inputs)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: Tensor = self.readout(hidden)
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the next-byte loss of the whole model, in nats per byte; only ``auto`` calls it in training."""
        inputs, targets = batch
        return F.cross_entropy(self(inputs).flatten(0, 1), targets.flatten())

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log the bits per byte of the whole model."""
        nats = self.training_step(batch, batch_idx)
        self.log("val/bits_per_byte", nats / math.log(2), batch_size=batch[1].numel())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW over all parameters: each worker or stage steps its own share of them."""
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def byte_loader(text: bytes, window_bytes: int = 128, *, shuffle: bool) -> DataLoader[tuple[Tensor, ...]]:
    """Return batches of 16 windows that tile ``text``."""
    num_windows = (len(text) - 1) // window_bytes
    ids = torch.tensor(list(text[: num_windows * window_bytes + 1]))
    windows = TensorDataset(ids[:-1].view(-1, window_bytes), ids[1:].view(-1, window_bytes))
    return DataLoader(windows, batch_size=16, shuffle=shuffle)


def main(argv: Sequence[str] | None = None) -> None:
    """Train on the source of some standard modules, print the bits per byte held out and save a checkpoint."""
    import lightning_blocktrain  # noqa: F401  registers both strategies; here, since the class does without it

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", choices=("blocktrain", "rgc", "auto"), default="blocktrain", help="how to train")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps")
    parser.add_argument("--width", type=int, default=64, help="width of the model")
    parser.add_argument("--out", type=Path, default=Path("checkpoints"), help="directory of the checkpoint")
    args = parser.parse_args(argv)
    text = "".join(inspect.getsource(module) for module in (argparse, inspect, typing)).encode()
    cut = len(text) * 9 // 10
    train, held_out = byte_loader(text[:cut], shuffle=True), byte_loader(text[cut:], shuffle=False)
    L.seed_everything(0, verbose=False)
    module = ConvLanguageModel(width=args.width)
    saver = ModelCheckpoint(args.out, filename="own_module", enable_version_counter=False)
    trainer = L.Trainer(
        strategy=args.strategy,
        devices=1,
        max_steps=args.steps,
        logger=False,
        callbacks=[saver],
        num_sanity_val_steps=0,
    )
    trainer.fit(module, train, held_out)
    [scores] = trainer.validate(module, held_out, verbose=False)
    print(f"{args.strategy}: {scores['val/bits_per_byte']:.3f} bits per byte; checkpoint {saver.best_model_path}")


if __name__ == "__main__":
    main()
