"""Deciding bytes one chunk after the other, with the keys and values of decided bytes at hand.

Owns the window, the caches, the noise of its positions and the sampling. What the logits are is the model's business.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from lightning_blocktrain.errors import explain
from lightning_blocktrain.models.transformer import VOCABULARY, KeyValueCache


class WalksBlocks(Protocol):
    """A model whose next-byte logits can be asked for at an exit, position after position."""

    window_bytes: int

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        ...

    def new_caches(self, num_blocks: int) -> Sequence[KeyValueCache | None]:
        """Return empty caches for one window, of the layers before an exit."""
        ...

    def draw_noise(self, shape: Sequence[int], generator: torch.Generator) -> Tensor | None:
        """Return the noise of (B, T) positions; None for a model that needs none."""
        ...

    def exit_logits(
        self,
        inputs: Tensor,
        num_blocks: int | None = None,
        noise: Tensor | None = None,
        caches: Sequence[KeyValueCache | None] | None = None,
    ) -> Tensor:
        """Return logits (B, T, V) for the positions after those that the caches hold."""
        ...


class Decoder:
    """Continues one text.

    Every position keeps its noise while it is in the window, whether its byte is decided or not.

    Args:
        model: Decides.
        num_blocks: Blocks before the exit that decides.
        generator: Of all random numbers, on the CPU.
    """

    def __init__(self, model: WalksBlocks, num_blocks: int, generator: torch.Generator) -> None:
        self._model = model
        self._num_blocks = num_blocks
        self._generator = generator
        self._first: int | None = None
        """Where the window begins in the text."""

    @torch.no_grad()
    def decide(self, text: Sequence[int], num_new: int, sweeps: int, temperature: float) -> list[int]:
        """Return the next ``num_new`` bytes after ``text``, which is that of the last call and what it returned."""
        window = self._model.window_bytes
        if self._first is None or len(text) - self._first + num_new - 1 > window:
            keep = window if self._first is None else (window + 1) // 2
            self._begin(len(text) - min(len(text), keep, window - num_new + 1))
        assert self._first is not None
        fresh = list(text[self._first + self._num_cached :])
        gumbel = gumbel_noise((num_new, VOCABULARY), self._generator)
        noise = self._noise_of(len(fresh) + num_new - 1)
        logits = self._logits([*fresh, *[VOCABULARY] * (num_new - 1)], noise)[len(fresh) - 1 :]
        self._num_cached += len(fresh)
        self._noise = None if noise is None else noise[:, len(fresh) :]
        decided = sample_bytes(logits, temperature, gumbel)
        for _ in range(min(sweeps, num_new) - 1):  # after num_new sweeps every byte follows from decided ones
            self._rewind()
            later = self._logits(decided[:-1].tolist(), self._noise)
            decided[1:] = sample_bytes(later, temperature, gumbel[1:])
        self._rewind()
        return [int(byte) for byte in decided]

    def _begin(self, first: int) -> None:
        self._first, self._num_cached = first, 0
        self._caches = self._model.new_caches(self._num_blocks)
        self._noise = self._model.draw_noise((1, 0), self._generator)

    def _rewind(self) -> None:
        for cache in self._caches:
            if cache is not None:
                cache.rewind(self._num_cached)

    def _noise_of(self, length: int) -> Tensor | None:
        """Return the noise of the next positions: what those had that were there already, then fresh noise."""
        if self._noise is None:
            return None
        fresh = self._model.draw_noise((1, length - self._noise.shape[1]), self._generator)
        assert fresh is not None
        return torch.cat([self._noise, fresh], dim=1)

    def _logits(self, inputs: Sequence[int], noise: Tensor | None) -> Tensor:
        """Return the logits after each of these inputs, (T, V) on the CPU; the caches grow by them."""
        batch = torch.tensor([inputs], device=self._model.device)
        return self._model.exit_logits(batch, self._num_blocks, noise, self._caches)[0].float().cpu()


def refuse_generation(prompt: bytes, num_bytes: int, temperature: float) -> None:
    """Refuse what no model can generate from.

    Raises:
        ValueError: If ``prompt`` is not bytes, or a number is negative.
    """
    if not isinstance(prompt, bytes) or num_bytes < 0 or not temperature >= 0:
        raise ValueError(
            explain(
                "generate: prompt must be bytes, num_bytes and temperature at least 0",
                f"prompt={type(prompt).__name__}, num_bytes={num_bytes}, temperature={temperature}",
                "encode text with .encode()",
            )
        )


def sample_bytes(logits: Tensor, temperature: float, gumbel: Tensor) -> Tensor:
    """Pick one byte per row: greedy at temperature 0, else an exact sample by the Gumbel maximum.

    Args:
        logits: (..., V).
        temperature: Divides the logits, >= 0.
        gumbel: Standard Gumbel noise (..., V); the same noise always picks the same byte.

    Returns:
        Byte values, int64, (...).
    """
    return (logits if temperature == 0 else logits / temperature + gumbel).argmax(-1)


def gumbel_noise(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return standard Gumbel noise drawn from ``generator`` on the CPU."""
    return -torch.empty(shape).exponential_(generator=generator).clamp_min(1e-20).log()
