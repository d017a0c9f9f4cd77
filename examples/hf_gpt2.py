"""A GPT-2 of Hugging Face's ``transformers``, trained in stages that learn at the same time (``rgc``).

The module takes the parts off ``GPT2Model`` and says how to run them; its layers are the library's own. Here they
start at random and read bytes. ``--strategy auto`` trains the same module end to end.

Shapes: ``B`` sequences, ``T`` bytes per window, ``D`` width, ``V`` = 256 byte values.
"""

import argparse
import math
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_blocktrain  # noqa: F401  registers strategy="rgc" and its companions
from lightning_blocktrain.data import ByteDataModule

try:
    from transformers import GPT2Config, GPT2Model
except ImportError as exc:
    raise SystemExit(f"hf_gpt2.py needs transformers; got {exc}; run pip install 'lightning-blocktrain[hf]'") from exc

STRATEGIES = ("rgc", "rgc_serial", "broadcast", "broadcast_serial", "live", "bp_groups", "auto")

Batch = Sequence[Tensor]
"""Input bytes and the byte after each of them, both int64 (B, T)."""


class GPT2Bytes(L.LightningModule):
    """GPT-2 over bytes, with a readout that is not tied to the embedding: stages cannot share weights.

    Args:
        num_layers: Layers.
        width: D, a multiple of ``num_heads``.
        num_heads: Heads of each layer.
        window_bytes: T, the longest window.
        lr: Learning rate.
    """

    def __init__(
        self, num_layers: int = 4, width: int = 64, num_heads: int = 4, window_bytes: int = 128, lr: float = 1e-3
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        config = GPT2Config(
            vocab_size=256,
            n_positions=window_bytes,
            n_embd=width,
            n_layer=num_layers,
            n_head=num_heads,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            resid_pdrop=0.0,
            bos_token_id=None,
            eos_token_id=None,
        )
        gpt2 = GPT2Model(config)
        self.embed, self.position, self.layers = gpt2.wte, gpt2.wpe, gpt2.h
        head = nn.Linear(width, 256, bias=False)
        nn.init.normal_(head.weight, std=config.initializer_range)
        self.readout = nn.Sequential(gpt2.ln_f, head)

    def configure_blocks(self) -> dict[str, Any]:
        """Say which layers are cut into stages, and what turns a hidden state into logits."""
        return {"layers": self.layers, "readout": self.readout}

    def stage_embed(self, batch: Batch) -> Tensor:
        """Return the hidden states before the first layer, (B, T, D)."""
        inputs = batch[0]
        hidden: Tensor = self.embed(inputs) + self.position(torch.arange(inputs.shape[1], device=inputs.device))
        return hidden

    def stage_kwargs(self, batch: Batch, hidden: Tensor) -> dict[str, Any]:
        """Return what every layer needs beside the hidden states: the causal mask, added to attention scores.

        ``GPT2Model`` would make it; a layer run on its own is told, since not every version masks by itself.
        """
        window_bytes = hidden.shape[1]
        blocked = torch.full((window_bytes, window_bytes), torch.finfo(hidden.dtype).min, device=hidden.device)
        return {"attention_mask": blocked.triu(diagonal=1)[None, None], "use_cache": False}  # (1, 1, T, T)

    def stage_loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return the next-byte loss of any stage's logits (B, T, V), in nats per byte."""
        return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits of the next byte; (B, T) to (B, T, V)."""
        hidden = self.stage_embed([inputs])
        keywords = self.stage_kwargs([inputs], hidden)
        for layer in self.layers:
            output = layer(hidden, **keywords)
            hidden = output[0] if isinstance(output, tuple) else output  # a tuple in older versions
        logits: Tensor = self.readout(hidden)
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the loss of the whole model, in nats per byte; stages do not call it."""
        return self.stage_loss(self(batch[0]), batch)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log the bits per byte of the whole model."""
        nats = self.training_step(batch, batch_idx)
        self.log("val/bits_per_byte", nats / math.log(2), batch_size=batch[1].numel())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW over all parameters: each stage steps its own share of them."""
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def main(argv: Sequence[str] | None = None) -> None:
    """Train on the running Python's documentation and print the bits per byte of text held out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", choices=STRATEGIES, default="rgc", help="how to train (default: rgc)")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps (default: 300)")
    parser.add_argument("--num-layers", type=int, default=4, help="layers, in at most 4 equal stages (default: 4)")
    parser.add_argument("--width", type=int, default=64, help="width of the model, a multiple of 4 (default: 64)")
    parser.add_argument("--window-bytes", type=int, default=128, help="bytes per window (default: 128)")
    args = parser.parse_args(argv)
    L.seed_everything(0, verbose=False)
    module = GPT2Bytes(args.num_layers, args.width, window_bytes=args.window_bytes)
    datamodule = ByteDataModule("python-docs", args.window_bytes, batch_size=16)
    trainer = L.Trainer(
        strategy=args.strategy,
        accelerator="cpu",
        devices=1,
        max_steps=args.steps,
        logger=False,
        enable_checkpointing=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(module, datamodule)
    [scores] = trainer.validate(module, datamodule, verbose=False)
    print(f"{args.strategy}: {scores['val/bits_per_byte']:.3f} bits per byte after {args.steps} steps")


if __name__ == "__main__":
    main()
