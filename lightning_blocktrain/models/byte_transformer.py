"""A causal byte-level Transformer, trainable end to end or block by block on stopped-gradient features."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightning_blocktrain.models.base import Batch, ByteModule
from lightning_blocktrain.models.transformer import (
    VOCABULARY,
    KeyValueCache,
    Layer,
    Readout,
    gumbel_noise,
    init_weights,
    refuse_generation,
    sample_bytes,
)
from lightning_blocktrain.partition import block_slices, default_num_blocks
from lightning_blocktrain.protocols import BlockLayout


class ByteTransformer(ByteModule):
    """Pre-norm causal Transformer over bytes with rotary positions and an untied readout.

    Under Lightning's own strategies it learns by backpropagation through all layers. Under ``blocktrain`` block b
    learns next-byte prediction through the shared readout from the features of the blocks before it, which are
    frozen: they run forward only, in the version fetched with the round. The embedding learns from block 0 only. Under
    ``rgc`` the stages of a pipeline learn at once, each from its own next-byte loss.

    Args:
        num_layers: L.
        width: D.
        num_heads: H; D is a multiple of 2 H.
        window_bytes: T, the longest window.
        num_blocks: B, a divisor of L; None: the largest divisor of L up to 4.
        lr: Peak learning rate.
        weight_decay: Decay of matrices.
        warmup_steps: Linear warm-up.
    """

    # Its blocks are only a cut: the weights mean the same under another one.
    retunable = ByteModule.retunable | {"num_blocks"}

    def __init__(
        self,
        num_layers: int = 6,
        width: int = 128,
        num_heads: int = 4,
        window_bytes: int = 256,
        num_blocks: int | None = None,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        warmup_steps: int = 50,
    ) -> None:
        super().__init__(window_bytes, lr, weight_decay, warmup_steps)
        self.save_hyperparameters()
        self.num_blocks = default_num_blocks(num_layers) if num_blocks is None else num_blocks
        self.block_slices = block_slices(num_layers, self.num_blocks)
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Layer(width, num_heads) for _ in range(num_layers))
        self.readout = Readout(width)
        init_weights(self, num_layers)

    def configure_blocks(self) -> BlockLayout:
        """Return the layout: block b reads the frozen features of the blocks before it."""
        return BlockLayout(self.layers, self.readout, num_blocks=self.num_blocks, prefix="frozen")

    def embed_bytes(self, inputs: Tensor) -> Tensor:
        """Return the hidden states before the first layer; (B, T) to (B, T, D)."""
        self.refuse_long_window(inputs)
        embedded: Tensor = self.embed(inputs)
        return embedded

    @override
    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits of the next byte at each position; (B, T) to (B, T, V)."""
        hidden = self.embed_bytes(inputs)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: Tensor = self.readout(hidden)
        return logits

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the next-byte cross entropy of the whole model, in nats."""
        inputs, targets = batch
        loss = F.cross_entropy(self(inputs).flatten(0, 1), targets.flatten())
        self.log("train/loss", loss.detach(), prog_bar=True, batch_size=len(inputs))
        return loss

    def block_training_step(self, batch: Batch, batch_idx: int, block_idx: int) -> Tensor:
        """Return the next-byte cross entropy after block ``block_idx``, in nats; earlier blocks are frozen."""
        inputs, targets = batch
        hidden = self._features(inputs, block_idx)
        for layer in self.layers[self.block_slices[block_idx]]:
            hidden = layer(hidden)
        loss = F.cross_entropy(self.readout(hidden).flatten(0, 1), targets.flatten())
        self.log(f"train/local_ce/block{block_idx}", loss.detach(), batch_size=len(inputs))
        return loss

    def stage_embed(self, batch: Batch) -> Tensor:
        """Return the hidden states before the first layer, (B, T, D), for a pipeline's first stage."""
        return self.embed_bytes(batch[0])

    def stage_loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return the next-byte cross entropy of ``logits`` (B, T, V) at any stage, in nats."""
        return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())

    def _features(self, inputs: Tensor, block_idx: int) -> Tensor:
        """Return what block ``block_idx`` reads; only block 0 trains the embedding."""
        if block_idx == 0:
            return self.embed_bytes(inputs)
        with torch.no_grad():
            hidden = self.embed_bytes(inputs)
            for layer in self.layers[: self.block_slices[block_idx].start]:
                hidden = layer(hidden)
        return hidden

    @override
    def evaluation_nats(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return ``-log p`` of each target byte under the whole model, (B, T)."""
        inputs, targets = batch
        return F.cross_entropy(self(inputs).transpose(1, 2).float(), targets, reduction="none")

    @torch.no_grad()
    def generate(self, prompt: bytes, num_bytes: int, *, temperature: float = 1.0, seed: int = 0) -> bytes:
        """Continue ``prompt`` byte by byte, reusing keys and values of the bytes before.

        A window that is full is restarted from its newer half.

        Args:
            prompt: What to continue; empty counts as a newline.
            num_bytes: How many bytes to add.
            temperature: 0 is greedy.
            seed: The same seed gives the same bytes.

        Returns:
            The new bytes only.

        Raises:
            ValueError: If ``prompt`` is not bytes, or a number is negative.
        """
        refuse_generation(prompt, num_bytes, temperature)
        generator = torch.Generator().manual_seed(seed)
        text = list(prompt or b"\n")
        caches: list[KeyValueCache] = []
        fresh: list[int] = []
        for _ in range(num_bytes):
            if not caches or caches[0].length == self.window_bytes:
                keep = self.window_bytes if not caches else (self.window_bytes + 1) // 2
                caches = [KeyValueCache(self.window_bytes) for _ in self.layers]
                fresh = text[-keep:]
            logits = self._next_logits(fresh, caches)
            byte = int(sample_bytes(logits, temperature, gumbel_noise((VOCABULARY,), generator)))
            text.append(byte)
            fresh = [byte]
        return bytes(text[len(prompt or b"\n") :])

    def _next_logits(self, fresh: list[int], caches: list[KeyValueCache]) -> Tensor:
        """Return the logits after the bytes in ``fresh``, (V,) on the CPU; the caches grow by them."""
        hidden = self.embed_bytes(torch.tensor([fresh], device=self.device))
        for layer, cache in zip(self.layers, caches, strict=True):
            hidden = layer(hidden, cache)
        logits: Tensor = self.readout(hidden[:, -1:])[0, 0]
        return logits.float().cpu()
