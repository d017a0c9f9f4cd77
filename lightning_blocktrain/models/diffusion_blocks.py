"""DiffusionBlocks for bytes: each block denoises the embedding of the next byte inside its own noise band.

Owns the objectives with noise and the sweep through all blocks. The noise formulas are ``edm``'s, the bands
``partition``'s, exits and generation ``block_model``'s.

Shapes: ``B`` sequences, ``T`` bytes per window, ``D`` width, ``V`` = 256 byte values, ``K`` draws of the noise.

Source: DiffusionBlocks (arXiv 2506.14202) and BlockTrain (arXiv 2606.24722). Different here: one causal stream of
T positions that carries both the clean byte and the noisy embedding of the next one, instead of a [clean | noisy]
sequence of twice the length; an *unknown* input row, so that one sweep can decide several bytes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightning_blocktrain.edm import coefficients, euler_step, sample_sigma, weight
from lightning_blocktrain.errors import explain
from lightning_blocktrain.models.base import Batch, ByteModule
from lightning_blocktrain.models.block_model import BlockModel, State
from lightning_blocktrain.models.generation import StepCaches
from lightning_blocktrain.models.transformer import VOCABULARY, LayerKind, Readout, init_weights
from lightning_blocktrain.partition import block_sigma_edges, sweep_sigmas, widened_band
from lightning_blocktrain.protocols import BlockLayout

NoisyObjective = Literal["denoise", "denoise_features", "mse"]

P_MEAN, P_STD = -1.2, 1.2
Z_GATE_INIT = 0.1
Intervention = Callable[[int, Tensor], Tensor]
"""``(block_idx, z) -> z``: what a block is shown instead of the walk's ``z``; for ablations."""


@lru_cache(maxsize=4)
@torch.inference_mode(False)  # the table of an evaluation serves the training after it
def noise_frequencies(number: int, device: torch.device) -> Tensor:
    """Return the frequencies by which ``c_noise`` is embedded, float32 (number,)."""
    return (math.pi * torch.logspace(-1, 5, number, base=2.0)).to(device)


class NoiseEmbedding(nn.Module):
    """Embeds ``c_noise`` by Fourier features and a two-layer map."""

    def __init__(self, width: int, num_frequencies: int = 16) -> None:
        super().__init__()
        self.num_frequencies = num_frequencies
        self.hidden = nn.Linear(2 * num_frequencies, width)
        self.project = nn.Linear(width, width)

    def forward(self, c_noise: Tensor) -> Tensor:
        """Embed one noise level per sequence; (B, 1, 1) to (B, 1, D)."""
        angles = c_noise * noise_frequencies(self.num_frequencies, c_noise.device)
        features = torch.cat([angles.sin(), angles.cos()], dim=-1).to(self.hidden.weight.dtype)
        embedded: Tensor = self.project(F.silu(self.hidden(features)))
        return embedded


class DiffusionBlocks(BlockModel):
    """Byte-level language model whose blocks learn independently, each to denoise one band of noise.

    ``block_idx`` 0 holds the first layers and the highest noise. Parameters outside ``layers`` (embeddings, target
    table, gate, readout) are the interface that all blocks share; with ``denoise_features`` the embedding of the
    context is block 0's.

    Args:
        num_layers: L.
        num_blocks: B, a divisor of L; the bands depend on it.
        width: D.
        num_heads: H; D is a multiple of 2 H.
        window_bytes: T, the longest window.
        layer: ``attention``, or ``mlp`` for the paper's MLP block, which sees no other position.
        objective: ``denoise``: the paper's; a block reads the context and ``z`` and its loss is the cross entropy of
            the next byte. ``denoise_features``: it reads the features of the blocks before it, frozen, in the place
            of the context. ``mse``: the regression of the embedding that the paper moved away from; a readout learns
            beside it, without effect on the blocks, and the target table stays as it was drawn, since a learned one
            would collapse.
        sigma_min: Lowest noise, > 0.
        sigma_max: Highest noise.
        gamma: Overlap of neighbouring bands, >= 0.
        target_norm: r, the norm of every row of the target table: how much ``z`` reveals.
        weighted: Multiply each sequence's loss with EDM's weight; False: the plain loss.
        p_span: Probability that the inputs of a random suffix of a sequence are made unknown in training.
        p_drop_z: Probability that a sequence is trained without ``z``: its loss is then a plain language model's.
        lr: Peak learning rate.
        weight_decay: Decay of matrices.
        warmup_steps: Linear warm-up.
    """

    retunable = ByteModule.retunable | {"weighted", "p_span", "p_drop_z"}

    def __init__(
        self,
        num_layers: int = 6,
        num_blocks: int = 3,
        width: int = 128,
        num_heads: int = 4,
        window_bytes: int = 256,
        layer: LayerKind = "attention",
        objective: NoisyObjective = "denoise",
        sigma_min: float = 1.0,
        sigma_max: float = 10.0,
        gamma: float = 0.1,
        target_norm: float = 0.3,
        weighted: bool = True,
        p_span: float = 0.5,
        p_drop_z: float = 0.0,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        warmup_steps: int = 50,
    ) -> None:
        super().__init__(
            num_layers, num_blocks, width, num_heads, window_bytes, layer, p_span, lr, weight_decay, warmup_steps
        )
        self.save_hyperparameters()
        if not target_norm > 0 or not 0 <= p_drop_z <= 1:
            got = f"target_norm={target_norm}, p_drop_z={p_drop_z}"
            rule = "target_norm must be greater than 0 and p_drop_z in [0, 1]"
            raise ValueError(explain(rule, got, "the usual values are 0.3 and 0"))
        if objective not in get_args(NoisyObjective):
            rule = f"objective must be one of {', '.join(get_args(NoisyObjective))}"
            raise ValueError(
                explain(rule, f"objective={objective!r}", "objectives without noise are ByteTransformer's")
            )
        self.objective = objective
        self.reads_prefix = objective == "denoise_features"
        self.block_sigma_edges = block_sigma_edges(num_blocks, sigma_min, sigma_max, P_MEAN, P_STD)
        self.bands = [widened_band(self.block_sigma_edges, b, gamma) for b in range(num_blocks)]
        self.sweep_sigmas = sweep_sigmas(num_blocks, sigma_min, sigma_max, P_MEAN, P_STD)
        self.target_norm = target_norm
        self.weighted = weighted
        self.p_drop_z = p_drop_z
        # The unknown row is always there, so that a checkpoint does not depend on p_span.
        self.context = nn.Sequential(nn.Embedding(VOCABULARY + 1, width), nn.LayerNorm(width))
        self.target_rows = nn.Parameter(torch.empty(VOCABULARY, width), requires_grad=objective != "mse")
        self.z_in = nn.Linear(width, width, bias=False)
        self.norm_z = nn.LayerNorm(width)
        # Most of z is noise at these levels: it enters small, so that it does not drown the context.
        self.z_gate = nn.Parameter(torch.full((width,), Z_GATE_INIT))
        self.noise_embedding = NoiseEmbedding(width)
        # A tied head would let z pass to the logits through c_skip; it starts at zero and learns what z is worth.
        self.readout = Readout(width, zero_init=True)
        init_weights(self, num_layers, width)
        nn.init.zeros_(self.readout.unembed.weight)

    def configure_blocks(self) -> BlockLayout:
        """Return the layout: a block's loss runs no other block, or those before it without gradient."""
        if self.reads_prefix:
            return BlockLayout(self.layers, self.readout, self.num_blocks, prefix="frozen", stem=self.context)
        return BlockLayout(self.layers, self.readout, self.num_blocks, prefix="none")

    @property
    def target_table(self) -> Tensor:
        """``E_out``: one row of norm ``target_norm`` per byte value, (V, D)."""
        return self.target_norm * F.normalize(self.target_rows, dim=-1)

    def embed_bytes(self, inputs: Tensor) -> Tensor:
        """Return the normalised embeddings of bytes, ``UNKNOWN`` among them; (B, T) to (B, T, D)."""
        self.refuse_long_window(inputs)
        embedded: Tensor = self.context(inputs)
        return embedded

    def run_noisy(
        self,
        block_idx: int,
        hidden: Tensor,
        z: Tensor | None,
        sigma: Tensor,
        shown: Tensor | None = None,
        caches: StepCaches | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run one block on what it reads and ``z``.

        Args:
            block_idx: Which block runs; never inferred from ``sigma``.
            hidden: The embedded context, or the features of the block before, (B, T, D).
            z: Noisy embeddings of the next bytes, (B, T, D); None: the block does without.
            sigma: Noise level of each sequence, (B,).
            shown: 1 for the sequences that are shown ``z``, 0 for the others, (B, 1, 1); None: all.
            caches: Keys and values of earlier positions.

        Returns:
            The hidden state after the block, and ``u = c_out * hidden + c_skip * z``, both (B, T, D).
        """
        c = coefficients(sigma[:, None, None])
        hidden = hidden + self.noise_embedding(c.c_noise)
        if z is not None:
            # Both streams are normalised: c_in * z has norm sqrt(D) and would drown a freshly initialised embedding.
            entering = self.z_gate * self.norm_z(self.z_in(c.c_in * z))
            hidden = hidden + (entering if shown is None else shown * entering)
        hidden = self.run_block(block_idx, hidden, caches)
        if z is None:
            return hidden, c.c_out * hidden
        skipped = c.c_skip * z
        return hidden, c.c_out * hidden + (skipped if shown is None else shown * skipped)

    def denoise(self, block_idx: int, hidden: Tensor, z: Tensor, sigma: Tensor) -> Tensor:
        """Return block ``block_idx``'s logits of the next byte at each position, (B, T, V); see ``run_noisy``."""
        logits: Tensor = self.readout(self.run_noisy(block_idx, hidden, z, sigma)[1])
        return logits

    # Training.

    def block_training_step(self, batch: Batch, batch_idx: int, block_idx: int) -> Tensor:
        """Return the loss of block ``block_idx``; no other block learns.

        Logs the plain cross entropy as ``train/local_ce/block{b}``. It says nothing about the assembled model: ``z``
        contains the target.
        """
        loss, cross_entropy, sigma = self.block_losses(batch, block_idx)
        self.log(f"train/local_ce/block{block_idx}", cross_entropy.detach().mean(), batch_size=len(sigma))
        return weighted_loss(loss, sigma) if self.weighted else loss.mean()

    def block_losses(self, batch: Batch, block_idx: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return block ``block_idx``'s losses before weighting, cross entropies in nats per byte, and noise levels.

        Each has the shape (B,). One noise level per sequence, from the block's own widened band.
        """
        inputs, targets = self.hide(batch)
        low, high = self.bands[block_idx]
        y = F.embedding(targets, self.target_table)  # (B, T, D); on a CPU indexing is slower backward
        # Drawn on the CPU: the normal's tail needs float64, which not every device has.
        sigma = sample_sigma(torch.rand(len(inputs), dtype=torch.float32, device="cpu"), low, high, P_MEAN, P_STD).to(y)
        eps = torch.randn_like(y)
        shown = None
        if self.p_drop_z:
            shown = (torch.rand(len(inputs), 1, 1, device=y.device) >= self.p_drop_z).to(y)
        hidden = self.features(block_idx, inputs, y, eps, shown)
        _, u = self.run_noisy(block_idx, hidden, y + sigma[:, None, None] * eps, sigma, shown)
        if self.objective != "mse":
            cross_entropy = sequence_cross_entropy(self.readout(u), targets)
            return cross_entropy, cross_entropy, sigma
        cross_entropy = sequence_cross_entropy(self.readout(u.detach()), targets)
        squared = (u - y).square().sum(-1).mean(1)
        # The readout's own loss rides along; the weight, at most 5 here, changes its step size only.
        return squared + cross_entropy, cross_entropy, sigma

    def features(self, block_idx: int, inputs: Tensor, y: Tensor, eps: Tensor, shown: Tensor | None = None) -> Tensor:
        """Return what block ``block_idx`` reads beside ``z``, (B, T, D).

        With ``denoise_features`` the blocks before it run without gradient, each at its own level of the sweep on the
        same noise: what a sweep with a perfect denoiser would show them.

        Args:
            block_idx: Which block reads.
            inputs: Bytes, (B, T).
            y: Embeddings of the next bytes, (B, T, D).
            eps: Standard normal noise, (B, T, D).
            shown: As in ``run_noisy``.
        """
        if not self.reads_prefix or block_idx == 0:
            return self.embed_bytes(inputs)
        with torch.no_grad():
            hidden = self.embed_bytes(inputs)
            for earlier, sigma in enumerate(self.sweep_sigmas[:block_idx]):
                hidden, _ = self.run_noisy(earlier, hidden, y + sigma * eps, y.new_full((len(y),), sigma), shown)
        return hidden

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the loss of one block drawn at random, as DiffusionBlocks trains in one process."""
        block_idx = int(torch.randint(self.num_blocks, ())) if self.num_blocks > 1 else 0
        loss = self.block_training_step(batch, batch_idx, block_idx)
        self.log("train/loss", loss.detach(), prog_bar=True, batch_size=len(batch[0]))
        return loss

    # The sweep: from pure noise down through the blocks, each evaluated once.

    @override
    def draw_noise(self, shape: Sequence[int], generator: torch.Generator) -> Tensor:
        """Return standard normal noise for (B, T) positions, (B, T, D), the same on every device."""
        return torch.randn((*shape, self.width), generator=generator).to(self.target_rows)

    @override
    def start(self, inputs: Tensor, noise: Tensor | None = None) -> State:
        """Return the embedded context, no logits yet and, unless the sweep is without it, ``z = sigma_max * noise``."""
        hidden = self.embed_bytes(inputs)
        return (hidden, hidden.new_empty(0), *([] if noise is None else [self.sweep_sigmas[0] * noise.to(hidden)]))

    @override
    def step(self, block_idx: int, state: State, caches: StepCaches | None = None) -> State:
        """Return what the next block reads, the logits of this block's exit, and ``z`` at the next noise level."""
        hidden, z = state[0], state[2] if len(state) > 2 else None
        sigma = self.sweep_sigmas[block_idx]
        after, u = self.run_noisy(block_idx, hidden, z, hidden.new_full((len(hidden),), sigma), None, caches)
        logits = self.readout(u).float()
        read_next = after if self.reads_prefix else hidden
        if z is None:
            return read_next, logits
        if block_idx + 1 < self.num_blocks:
            table = self.target_table
            denoised = u if self.objective == "mse" else logits.softmax(-1).to(table.dtype) @ table
            z = euler_step(z, denoised, sigma, self.sweep_sigmas[block_idx + 1])
        return read_next, logits, z

    @override
    def read(self, block_idx: int, state: State) -> Tensor:
        """Return the logits at the exit of block ``block_idx`` after its step, float32 (B, T, V)."""
        return state[1]

    @override
    def carried(self, state: State) -> dict[str, Tensor]:
        """Return ``z`` and the features of the block before; the context is embedded anew by whoever reads it."""
        features = {"hidden": state[0]} if self.reads_prefix else {}
        return features | ({"z": state[2]} if len(state) > 2 else {})

    @override
    def resumed(self, inputs: Tensor, carried: Mapping[str, Tensor]) -> State:
        """Return the state between two blocks, given the inputs and what ``carried`` returned of it."""
        hidden = carried["hidden"] if self.reads_prefix else self.embed_bytes(inputs)
        return (hidden, hidden.new_empty(0), *([carried["z"]] if "z" in carried else []))

    @torch.no_grad()
    def sweep(
        self,
        inputs: Tensor,
        noise: Tensor | None,
        num_blocks: int | None = None,
        intervene: Intervention | None = None,
    ) -> Tensor:
        """Walk from pure noise down through the blocks, each evaluated once, and return the last one's logits.

        Args:
            inputs: Bytes, ``UNKNOWN`` where not decided, int64 (B, T).
            noise: Standard normal, (B, T, D); the walk starts at ``sigma_max * noise``. None: without ``z``.
            num_blocks: Stop after this many blocks; None: all. 1 gives the prior: ``z`` carries nothing.
            intervene: Replaces what each block is shown; for a walk with noise.

        Returns:
            Logits, float32 (B, T, V).

        Raises:
            ValueError: If ``num_blocks`` is not in 1 .. B, or nothing is shown that could be replaced.
        """
        if noise is None and intervene is not None:
            rule = "a sweep with an intervention must start from noise"
            raise ValueError(explain(rule, "noise=None", "pass noise, or leave intervene out"))
        state = self.start(inputs, noise)
        last = self.refuse_no_exit(num_blocks) - 1
        for block_idx in range(last + 1):
            if intervene is not None:
                state = (*state[:2], intervene(block_idx, state[2]))
            state = self.step(block_idx, state)
        return self.read(last, state)

    @override
    def forward(self, inputs: Tensor) -> Tensor:
        """Return one sweep's logits of the next byte at each position, from fixed noise; (B, T) to (B, T, V)."""
        return self.sweep(inputs, self.draw_noise(inputs.shape, torch.Generator().manual_seed(0)))

    @override
    def exit_arguments(self, num_blocks: int) -> dict[str, Any]:
        """Return the arguments of the model that ends after ``num_blocks`` blocks, at the same levels of the sweep.

        Its bands are cut anew between the first and the last of them: they matter to further training only.
        """
        arguments = super().exit_arguments(num_blocks)
        if 1 < num_blocks < self.num_blocks:
            arguments["sigma_min"] = self.sweep_sigmas[num_blocks - 1]
        return arguments


def sequence_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of each sequence in nats; (B, T, V) and (B, T) to (B,)."""
    nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return nats.view(targets.shape).mean(1)


def weighted_loss(loss: Tensor, sigma: Tensor) -> Tensor:
    """Return the mean over sequences of loss times EDM weight; (B,) and (B,) to a scalar.

    Both have shape (B,): the released DiffusionBlocks code multiplies (B,) with (B, 1), an outer product in which
    the weight of a sequence no longer meets its own loss.
    """
    assert loss.shape == sigma.shape
    return (weight(sigma) * loss).mean()
