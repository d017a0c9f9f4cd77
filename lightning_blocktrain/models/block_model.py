"""What the byte-level models share beyond a Trainer's needs: a walk through blocks with an exit after each of them.

Owns exits, evaluation at them and generation from them; refuses to own any training objective. A subclass says what a
block reads and does (``start``, ``step``, ``read``), and everything here runs on that: each prefix of blocks is a
smaller model of its own.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightning_blocktrain.errors import explain
from lightning_blocktrain.models.base import Batch, ByteModule
from lightning_blocktrain.models.generation import (
    Caches,
    Decoder,
    LocalWalker,
    Sampling,
    StepCaches,
    continuation,
)
from lightning_blocktrain.models.generation_arguments import checked_exit, refuse_chunks, refuse_generation
from lightning_blocktrain.models.transformer import UNKNOWN, KeyValueCache, Layer, LayerKind
from lightning_blocktrain.partition import block_slices

State = tuple[Tensor, ...]
"""What is handed from block to block; the first tensor is what the next one's layers read, (B, T, D)."""


class BlockModel(ByteModule):
    """Base of the byte-level models: layers in blocks, one exit after each.

    Args:
        num_layers: L.
        num_blocks: B, a divisor of L.
        width: D.
        num_heads: H; D is a multiple of 2 H.
        window_bytes: T, the longest window.
        layer: ``attention`` or ``mlp``.
        p_span: Probability that the inputs of a random suffix of a sequence are made unknown in training.
        lr: Peak learning rate.
        weight_decay: Decay of matrices.
        warmup_steps: Linear warm-up.
    """

    readout: nn.Module

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        width: int,
        num_heads: int,
        window_bytes: int,
        layer: LayerKind,
        p_span: float,
        lr: float,
        weight_decay: float,
        warmup_steps: int,
    ) -> None:
        super().__init__(window_bytes, lr, weight_decay, warmup_steps)
        if not 0 <= p_span <= 1:
            raise ValueError(explain("p_span must be in [0, 1]", f"p_span={p_span}", "the usual values are 0 and 0.5"))
        self.num_blocks = num_blocks
        self.block_slices = block_slices(num_layers, num_blocks)
        self.width = width
        self.p_span = p_span
        self.layers = nn.ModuleList(Layer(width, num_heads, layer) for _ in range(num_layers))

    def run_block(self, block_idx: int, hidden: Tensor, caches: StepCaches | None = None) -> Tensor:
        """Return the hidden states after block ``block_idx``; (B, T, D) to (B, T, D)."""
        for layer_idx in range(len(self.layers))[self.block_slices[block_idx]]:
            hidden = self.layers[layer_idx](hidden, None if caches is None else caches[layer_idx])
        return hidden

    @abstractmethod
    def start(self, inputs: Tensor, noise: Tensor | None = None) -> State:
        """Return what block 0 reads.

        Args:
            inputs: Bytes, ``UNKNOWN`` where not decided, int64 (B, T).
            noise: What ``draw_noise`` gave for these positions.
        """

    @abstractmethod
    def step(self, block_idx: int, state: State, caches: StepCaches | None = None) -> State:
        """Run block ``block_idx`` on what it reads; return what the block after it would read.

        Args:
            block_idx: Which block.
            state: What ``start``, or the step of the block before, returned.
            caches: Keys and values of earlier positions, which grow by these.
        """

    @abstractmethod
    def read(self, block_idx: int, state: State) -> Tensor:
        """Return the logits of the next byte at the exit of block ``block_idx`` after its step, float32 (B, T, V)."""

    def walk(self, inputs: Tensor, noise: Tensor | None = None) -> Iterator[Tensor]:
        """Run the blocks one after the other and yield the logits at every exit, float32 (B, T, V)."""
        state = self.start(inputs, noise)
        for block_idx in range(self.num_blocks):
            state = self.step(block_idx, state)
            yield self.read(block_idx, state)

    def draw_noise(self, shape: Sequence[int], generator: torch.Generator) -> Tensor | None:
        """Return the noise that a walk over (B, T) positions starts from; None for a model that needs none."""
        return None

    @property
    def has_noise(self) -> bool:
        """Whether walks start from noise."""
        return self.draw_noise((1, 0), torch.Generator()) is not None

    def exit_logits(
        self,
        inputs: Tensor,
        num_blocks: int | None = None,
        noise: Tensor | None = None,
        caches: Caches | None = None,
        num_read: int | None = None,
    ) -> Tensor:
        """Return the logits at the exit after ``num_blocks`` blocks (None: all of them), float32 (B, T, V).

        Args:
            inputs: Bytes, ``UNKNOWN`` where not decided, int64 (B, T).
            num_blocks: Blocks before the exit.
            noise: What ``draw_noise`` gave for these positions.
            caches: Keys and values of earlier positions, which grow by these.
            num_read: How many of the last positions are read out; None: all.

        Raises:
            ValueError: If ``num_blocks`` is not in 1 .. B.
        """
        last = self.refuse_no_exit(num_blocks) - 1
        state = self.start(inputs, noise)
        for block_idx in range(last + 1):
            state = self.step(block_idx, state, caches)
        return self.read(last, state if num_read is None else newest(state, num_read))

    def carried(self, state: State) -> dict[str, Tensor]:
        """Return the tensors of a state between two blocks that whoever runs the next one needs beside the inputs."""
        return {str(idx): tensor for idx, tensor in enumerate(state)}

    def resumed(self, inputs: Tensor, carried: Mapping[str, Tensor]) -> State:
        """Return the state between two blocks, given the inputs (B, T) and what ``carried`` returned of it.

        Raises:
            KeyError: If a tensor is missing.
        """
        return tuple(carried[str(idx)] for idx in range(len(carried)))

    def refuse_no_exit(self, num_blocks: int | None) -> int:
        """Return the number of blocks before an exit; None is the last one's.

        Raises:
            ValueError: If there is no such exit.
        """
        return checked_exit(num_blocks, self.num_blocks)

    def hide(self, batch: Batch) -> Batch:
        """Return a training batch in which the inputs of random suffixes are unknown."""
        inputs, targets = batch
        return hide_suffix(inputs, self.p_span), targets

    # Evaluation.

    @torch.no_grad()
    def exit_nats(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the nats that the model pays for each target byte when it is cut off after each block, (B, B, T).

        The noise, where there is any, depends on ``batch_idx`` alone: evaluations of the same data agree, and the
        random stream of a training stays as it was.
        """
        inputs, targets = batch
        noise = self.draw_noise(inputs.shape, torch.Generator().manual_seed(batch_idx))
        exits = self.walk(inputs, noise)
        return torch.stack([F.cross_entropy(logits.transpose(1, 2), targets, reduction="none") for logits in exits])

    @override
    def evaluation_nats(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the nats that the whole model pays for each target byte, (B, T)."""
        inputs, targets = batch
        noise = self.draw_noise(inputs.shape, torch.Generator().manual_seed(batch_idx))
        logits = self.exit_logits(inputs, noise=noise)
        return F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")

    def exit_arguments(self, num_blocks: int) -> dict[str, Any]:
        """Return the constructor's arguments of the model that ends after ``num_blocks`` blocks."""
        num_layers = self.block_slices[num_blocks - 1].stop
        return {**self.arguments(), "num_layers": num_layers, "num_blocks": num_blocks}

    def exit_state(self, num_blocks: int) -> dict[str, Any]:
        """Return tensors by the names that they have in the model that ends after ``num_blocks`` blocks, and others."""
        return self.state_dict()

    def at_exit(self, num_blocks: int) -> Self:
        """Return the smaller model that ends after ``num_blocks`` blocks, with copies of their weights.

        Its logits are those of this model's exit, bit for bit. It is where this model is; the random stream stays.

        Raises:
            ValueError: If ``num_blocks`` is not in 1 .. B.
        """
        arguments = self.exit_arguments(self.refuse_no_exit(num_blocks))
        with torch.random.fork_rng(devices=[]):
            smaller = type(self)(**arguments).to(device=self.device, dtype=self.dtype)
        mine = self.exit_state(num_blocks)
        smaller.load_state_dict({name: mine[name] for name in smaller.state_dict()})
        return smaller.train(self.training)

    # Generation.

    @torch.no_grad()
    def generate(
        self,
        prompt: bytes,
        num_bytes: int,
        *,
        num_blocks: int | None = None,
        chunk_bytes: int = 1,
        sweeps: int = 1,
        num_draws: int = 1,
        temperature: float = 1.0,
        seed: int = 0,
    ) -> bytes:
        """Continue ``prompt``, deciding ``chunk_bytes`` bytes at a time; keys and values of decided bytes are reused.

        The first walk over a chunk does not know its bytes; each further sweep reads those of the sweep before as its
        inputs and decides them all again with the same noise, so that ``sweeps = chunk_bytes`` decides every byte from
        decided bytes only. A window that is full is restarted from its newer half.

        Args:
            prompt: What to continue; empty counts as a newline.
            num_bytes: How many bytes to add.
            num_blocks: Blocks before the exit that decides; None: all.
            chunk_bytes: Bytes decided per sweep, 1 (autoregressive) to ``window_bytes``; above 1 the model must have
                been built with ``p_span`` above 0.
            sweeps: Sweeps per chunk, at least 1.
            num_draws: K, walks from noise of their own whose probabilities are averaged; a model without noise needs 1.
            temperature: 0 is greedy.
            seed: The same seed gives the same bytes.

        Returns:
            The new bytes only.

        Raises:
            ValueError: If ``prompt`` is not bytes, or a number is out of range.
        """
        refuse_generation(prompt, num_bytes, temperature, seed)
        refuse_chunks(self, chunk_bytes, sweeps, num_draws)
        decoder = Decoder(self.walker(num_blocks), self.window_bytes, Sampling(temperature, seed, num_draws))
        chunks = continuation(decoder, prompt, num_bytes, chunk_bytes, sweeps)
        return b"".join(bytes(chunk.decided) for chunk in chunks)

    def walker(self, num_blocks: int | None = None) -> LocalWalker:
        """Return what walks through the blocks before an exit, for one text."""
        return LocalWalker(self, self.refuse_no_exit(num_blocks))

    def new_caches(self, num_blocks: int) -> Caches:
        """Return empty caches for one window, of the layers before the exit after ``num_blocks`` blocks."""
        layers = self.layers[: self.block_slices[num_blocks - 1].stop]
        return [KeyValueCache(self.window_bytes) if layer.attention is not None else None for layer in layers]


def newest(state: State, num_positions: int) -> State:
    """Return a state's last ``num_positions`` positions; what has none stays as it is."""
    return tuple(tensor[:, tensor.shape[1] - num_positions :] if tensor.dim() > 1 else tensor for tensor in state)


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
