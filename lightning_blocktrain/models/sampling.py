"""How bytes are drawn: random numbers that belong to a seed and a position, and the Gumbel maximum.

Whoever draws a position, and however often, draws the same.
"""

from hashlib import blake2b
from typing import Literal

import torch
from torch import Tensor

from lightning_blocktrain.models.transformer import VOCABULARY


def sample_bytes(logits: Tensor, temperature: float, gumbel: Tensor) -> Tensor:
    """Pick one byte per row: greedy at temperature 0, else an exact sample by the Gumbel maximum.

    Args:
        logits: (..., V).
        temperature: What the logits are divided by, >= 0; the noise is multiplied instead, so that none overflows.
        gumbel: Standard Gumbel noise (..., V); the same noise always picks the same byte.

    Returns:
        Byte values, int64, (...).
    """
    return (logits + temperature * gumbel).argmax(-1)


def position_generator(seed: int, position: int, purpose: Literal["noise", "gumbel"]) -> torch.Generator:
    """Return the generator of a position's random numbers, on the CPU."""
    digest = blake2b(f"{seed}/{purpose}/{position}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little", signed=True))


def gumbel_at(seed: int, first: int, length: int) -> Tensor:
    """Return the Gumbel noise of the bytes at positions ``first`` .. ``first + length - 1`` of a text, (length, V)."""
    generators = (position_generator(seed, first + idx, "gumbel") for idx in range(length))
    return torch.stack([gumbel_noise((VOCABULARY,), generator) for generator in generators])


def gumbel_noise(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return standard Gumbel noise drawn from ``generator`` on the CPU."""
    return -torch.empty(shape).exponential_(generator=generator).clamp_min(1e-20).log()
