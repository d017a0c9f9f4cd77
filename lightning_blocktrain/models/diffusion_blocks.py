"""DiffusionBlocks for bytes: each block denoises the embedding of the next byte inside its own noise band.

Owns the block-local objective, the sweep through all blocks and one-sweep generation. The noise formulas are
``edm``'s, the bands ``partition``'s.

Shapes: ``B`` sequences, ``T`` bytes per window, ``D`` width, ``V`` = 256 byte values, ``K`` draws of the noise.

Source: DiffusionBlocks (arXiv 2506.14202) and BlockTrain (arXiv 2606.24722). Different here: one causal stream of
T positions that carries both the clean byte and the noisy embedding of the next one, instead of a [clean | noisy]
sequence of twice the length; an *unknown* input row, so that one sweep can decide several bytes.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightning_blocktrain.edm import coefficients, euler_step, sample_sigma, weight
from lightning_blocktrain.errors import explain
from lightning_blocktrain.models.base import Batch, ByteModule
from lightning_blocktrain.models.transformer import (
    VOCABULARY,
    Layer,
    LayerKind,
    Readout,
    gumbel_noise,
    init_weights,
    refuse_generation,
    sample_bytes,
)
from lightning_blocktrain.partition import block_sigma_edges, block_slices, sweep_sigmas, widened_band
from lightning_blocktrain.protocols import BlockLayout

P_MEAN, P_STD = -1.2, 1.2
Z_GATE_INIT = 0.1
UNKNOWN = VOCABULARY
"""The input row that stands for a byte that is not decided yet."""

Intervention = Callable[[int, Tensor], Tensor]
"""``(block_idx, z) -> z``: what a block is shown instead of the walk's ``z``; for ablations."""


class NoiseEmbedding(nn.Module):
    """Embeds ``c_noise`` by Fourier features and a two-layer map."""

    frequencies: Tensor

    def __init__(self, width: int, num_frequencies: int = 16) -> None:
        super().__init__()
        self.register_buffer("frequencies", math.pi * torch.logspace(-1, 5, num_frequencies, base=2.0), False)
        self.hidden = nn.Linear(2 * num_frequencies, width)
        self.project = nn.Linear(width, width)

    def forward(self, c_noise: Tensor) -> Tensor:
        """Embed one noise level per sequence; (B, 1, 1) to (B, 1, D)."""
        angles = c_noise * self.frequencies
        features = torch.cat([angles.sin(), angles.cos()], dim=-1)
        embedded: Tensor = self.project(F.silu(self.hidden(features)))
        return embedded


class DiffusionBlocks(ByteModule):
    """Byte-level language model whose blocks learn independently, each to denoise one band of noise.

    ``block_idx`` 0 holds the first layers and the highest noise. Parameters outside ``layers`` (embeddings, target
    table, gate, readout) are the interface that all blocks share.

    Args:
        num_layers: L.
        num_blocks: B, a divisor of L; the bands depend on it.
        width: D.
        num_heads: H; D is a multiple of 2 H.
        window_bytes: T, the longest window.
        layer: ``attention``, or ``mlp`` for the paper's MLP block, which sees no other position.
        sigma_min: Lowest noise, > 0.
        sigma_max: Highest noise.
        gamma: Overlap of neighbouring bands, >= 0.
        target_norm: r, the norm of every row of the target table: how much ``z`` reveals.
        weighted: Multiply each sequence's cross entropy with EDM's weight; False: plain cross entropy.
        p_span: Probability that the inputs of a random suffix of a sequence are made unknown in training.
        lr: Peak learning rate.
        weight_decay: Decay of matrices.
        warmup_steps: Linear warm-up.
    """

    retunable = ByteModule.retunable | {"weighted", "p_span"}

    def __init__(
        self,
        num_layers: int = 6,
        num_blocks: int = 3,
        width: int = 128,
        num_heads: int = 4,
        window_bytes: int = 256,
        layer: LayerKind = "attention",
        sigma_min: float = 1.0,
        sigma_max: float = 10.0,
        gamma: float = 0.1,
        target_norm: float = 0.3,
        weighted: bool = True,
        p_span: float = 0.5,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        warmup_steps: int = 50,
    ) -> None:
        super().__init__(window_bytes, lr, weight_decay, warmup_steps)
        self.save_hyperparameters()
        if not target_norm > 0 or not 0 <= p_span <= 1:
            raise ValueError(
                explain(
                    "target_norm must be greater than 0 and p_span in [0, 1]",
                    f"target_norm={target_norm}, p_span={p_span}",
                    "the usual values are 0.3 and 0.5",
                )
            )
        self.num_blocks = num_blocks
        self.block_slices = block_slices(num_layers, num_blocks)
        self.block_sigma_edges = block_sigma_edges(num_blocks, sigma_min, sigma_max, P_MEAN, P_STD)
        self.bands = [widened_band(self.block_sigma_edges, b, gamma) for b in range(num_blocks)]
        self.sweep_sigmas = sweep_sigmas(num_blocks, sigma_min, sigma_max, P_MEAN, P_STD)
        self.target_norm = target_norm
        self.weighted = weighted
        self.p_span = p_span
        self.embed = nn.Embedding(VOCABULARY + 1, width)
        self.norm_context = nn.LayerNorm(width)
        self.target_rows = nn.Parameter(torch.empty(VOCABULARY, width))
        self.z_in = nn.Linear(width, width, bias=False)
        self.norm_z = nn.LayerNorm(width)
        # Most of z is noise at these levels: it enters small, so that it does not drown the context.
        self.z_gate = nn.Parameter(torch.full((width,), Z_GATE_INIT))
        self.noise_embedding = NoiseEmbedding(width)
        self.layers = nn.ModuleList(Layer(width, num_heads, layer) for _ in range(num_layers))
        # A tied head would let z pass to the logits through c_skip; it starts at zero and learns what z is worth.
        self.readout = Readout(width, zero_init=True)
        init_weights(self, num_layers)
        nn.init.zeros_(self.readout.unembed.weight)

    def configure_blocks(self) -> BlockLayout:
        """Return the layout: a block's loss runs no other block."""
        return BlockLayout(self.layers, self.readout, num_blocks=self.num_blocks, prefix="none")

    @property
    def target_table(self) -> Tensor:
        """``E_out``: one row of norm ``target_norm`` per byte value, (V, D)."""
        return self.target_norm * F.normalize(self.target_rows, dim=-1)

    def denoise(self, block_idx: int, inputs: Tensor, z: Tensor, sigma: Tensor) -> Tensor:
        """Return block ``block_idx``'s logits of the next byte at each position.

        Args:
            block_idx: Which block runs; never inferred from ``sigma``.
            inputs: Bytes, ``UNKNOWN`` where not decided, int64 (B, T).
            z: Noisy embeddings of the next bytes, (B, T, D).
            sigma: Noise level of each sequence, (B,).

        Returns:
            Logits, (B, T, V).
        """
        self.refuse_long_window(inputs)
        c = coefficients(sigma[:, None, None])
        hidden = self.norm_context(self.embed(inputs))
        # Both streams are normalised: c_in * z has norm sqrt(D) and would drown a freshly initialised embedding.
        hidden = hidden + self.z_gate * self.norm_z(self.z_in(c.c_in * z)) + self.noise_embedding(c.c_noise)
        for layer in self.layers[self.block_slices[block_idx]]:
            hidden = layer(hidden)
        logits: Tensor = self.readout(c.c_out * hidden + c.c_skip * z)
        return logits

    def block_losses(self, batch: Batch, block_idx: int) -> tuple[Tensor, Tensor]:
        """Return block ``block_idx``'s cross entropy per sequence, in nats per byte, and the noise levels drawn.

        One noise level per sequence, from the block's own widened band.

        Returns:
            Cross entropies (B,) and noise levels (B,).
        """
        inputs, targets = batch
        low, high = self.bands[block_idx]
        y = F.embedding(targets, self.target_table)  # (B, T, D); on a CPU indexing is slower backward
        # Drawn on the CPU: the normal's tail needs float64, which not every device has.
        sigma = sample_sigma(torch.rand(len(inputs), dtype=torch.float32, device="cpu"), low, high, P_MEAN, P_STD).to(y)
        z = y + sigma[:, None, None] * torch.randn_like(y)
        logits = self.denoise(block_idx, hide_suffix(inputs, self.p_span), z, sigma)
        return sequence_cross_entropy(logits, targets), sigma

    def block_training_step(self, batch: Batch, batch_idx: int, block_idx: int) -> Tensor:
        """Return the denoising loss of block ``block_idx``; no other block runs.

        Logs the plain cross entropy as ``train/local_ce/block{b}``. It says nothing about the assembled model: ``z``
        contains the target.
        """
        cross_entropy, sigma = self.block_losses(batch, block_idx)
        self.log(f"train/local_ce/block{block_idx}", cross_entropy.detach().mean(), batch_size=len(sigma))
        return weighted_loss(cross_entropy, sigma) if self.weighted else cross_entropy.mean()

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the loss of one block drawn at random, as DiffusionBlocks trains in one process."""
        block_idx = int(torch.randint(self.num_blocks, ())) if self.num_blocks > 1 else 0
        loss = self.block_training_step(batch, batch_idx, block_idx)
        self.log("train/loss", loss.detach(), prog_bar=True, batch_size=len(batch[0]))
        return loss

    @torch.no_grad()
    def sweep(
        self,
        inputs: Tensor,
        noise: Tensor,
        num_blocks: int | None = None,
        intervene: Intervention | None = None,
    ) -> Tensor:
        """Walk from pure noise down through the blocks, each evaluated once, and return the last one's logits.

        Args:
            inputs: Bytes, ``UNKNOWN`` where not decided, int64 (B, T).
            noise: Standard normal, (B, T, D); the walk starts at ``sigma_max * noise``.
            num_blocks: Stop after this many blocks; None: all. 1 gives the prior: ``z`` carries nothing.
            intervene: Replaces what each block is shown.

        Returns:
            Logits, float32 (B, T, V).

        Raises:
            ValueError: If ``num_blocks`` is not in 1 .. B.
        """
        last = (self.num_blocks if num_blocks is None else num_blocks) - 1
        if not 0 <= last < self.num_blocks:
            rule = f"num_blocks of a sweep must be in 1 .. {self.num_blocks}"
            raise ValueError(explain(rule, f"num_blocks={num_blocks}", "None sweeps through all blocks"))
        table = self.target_table
        z = self.sweep_sigmas[0] * noise.to(table.dtype)
        for block_idx, sigma in enumerate(self.sweep_sigmas[: last + 1]):
            shown = z if intervene is None else intervene(block_idx, z)
            logits = self.denoise(block_idx, inputs, shown, table.new_full((len(inputs),), sigma)).float()
            if block_idx < last:
                denoised = logits.softmax(-1).to(table.dtype) @ table
                z = euler_step(shown, denoised, sigma, self.sweep_sigmas[block_idx + 1])
        return logits

    def draw_noise(self, inputs: Tensor, seed: int) -> Tensor:
        """Return standard normal noise for ``inputs``, (B, T, D), the same on every device for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        shape = (*inputs.shape, self.target_rows.shape[1])
        return torch.randn(shape, generator=generator).to(self.target_rows.device)

    @override
    def forward(self, inputs: Tensor) -> Tensor:
        """Return one sweep's logits of the next byte at each position, from fixed noise; (B, T) to (B, T, V)."""
        return self.sweep(inputs, self.draw_noise(inputs, seed=0))

    @override
    def evaluation_nats(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return ``-log p`` of each target byte after one sweep from pure noise (K=1, a valid code length), (B, T).

        The noise depends on ``batch_idx`` alone: evaluations of the same data agree, and training's random stream is
        left as it was.
        """
        inputs, targets = batch
        logits = self.sweep(inputs, self.draw_noise(inputs, seed=batch_idx))
        return F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")

    def generate(
        self,
        prompt: bytes,
        num_bytes: int,
        *,
        chunk_bytes: int = 1,
        sweeps: int = 1,
        temperature: float = 1.0,
        seed: int = 0,
    ) -> bytes:
        """Continue ``prompt``, deciding ``chunk_bytes`` bytes at a time.

        The first sweep over a chunk does not know its bytes; each further sweep reads those of the sweep before as
        its inputs and decides them all again with the same noise, so that ``sweeps = chunk_bytes`` decides every byte
        from decided bytes only.

        Args:
            prompt: What to continue; empty counts as a newline.
            num_bytes: How many bytes to add.
            chunk_bytes: Bytes decided per sweep, 1 (autoregressive) to ``window_bytes``.
            sweeps: Sweeps per chunk, at least 1.
            temperature: 0 is greedy.
            seed: The same seed gives the same bytes.

        Returns:
            The new bytes only.

        Raises:
            ValueError: If ``prompt`` is not bytes, or a number is out of range.
        """
        refuse_generation(prompt, num_bytes, temperature)
        if not 1 <= chunk_bytes <= self.window_bytes or sweeps < 1:
            raise ValueError(
                explain(
                    "chunk_bytes must be in 1 .. window_bytes and sweeps at least 1",
                    f"chunk_bytes={chunk_bytes}, sweeps={sweeps}, window_bytes={self.window_bytes}",
                    "chunk_bytes=1, sweeps=1 is autoregressive",
                )
            )
        generator = torch.Generator().manual_seed(seed)
        text = list(prompt or b"\n")
        end = len(text) + num_bytes
        while len(text) < end:
            num_new = min(chunk_bytes, end - len(text))
            text += self._decide(text, num_new, sweeps, temperature, generator)
        return bytes(text[end - num_bytes :])

    def _decide(
        self, text: list[int], num_new: int, sweeps: int, temperature: float, generator: torch.Generator
    ) -> list[int]:
        """Return the next ``num_new`` bytes after ``text``."""
        known = text[-(self.window_bytes - num_new + 1) :]
        inputs = torch.tensor([known + [UNKNOWN] * (num_new - 1)], device=self.target_rows.device)
        noise = self.draw_noise(inputs, seed=int(torch.randint(2**62, (), generator=generator)))
        gumbel = gumbel_noise((num_new, VOCABULARY), generator)
        for _ in range(sweeps):
            logits = self.sweep(inputs, noise)[0, len(known) - 1 :].cpu()  # (num_new, V)
            decided = sample_bytes(logits, temperature, gumbel)
            inputs[0, len(known) :] = decided[:-1]
        return [int(byte) for byte in decided]


def hide_suffix(inputs: Tensor, p_span: float) -> Tensor:
    """Make the inputs of a random suffix unknown, in each sequence with probability ``p_span``; (B, T).

    The first byte stays known: something must be given.
    """
    if p_span == 0:
        return inputs
    B, T = inputs.shape
    start = torch.randint(1, max(T, 2), (B, 1), device=inputs.device)
    hidden = torch.rand(B, 1, device=inputs.device) < p_span
    return inputs.masked_fill(hidden & (torch.arange(T, device=inputs.device) >= start), UNKNOWN)


def sequence_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of each sequence in nats; (B, T, V) and (B, T) to (B,)."""
    nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return nats.view(targets.shape).mean(1)


def weighted_loss(cross_entropy: Tensor, sigma: Tensor) -> Tensor:
    """Return the mean over sequences of cross entropy times EDM weight; (B,) and (B,) to a scalar.

    Both have shape (B,): the released DiffusionBlocks code multiplies (B,) with (B, 1), an outer product in which
    the weight of a sequence no longer meets its own loss.
    """
    assert cross_entropy.shape == sigma.shape
    return (weight(sigma) * cross_entropy).mean()
