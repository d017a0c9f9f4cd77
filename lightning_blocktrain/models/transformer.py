"""Transformer layers for bytes, fast on a CPU: fused qkv, rotary positions, ``scaled_dot_product_attention``, a cache.

Owns layers and readout; knows nothing of losses, noise, blocks or Lightning.

Shapes: ``B`` sequences, ``T`` bytes per window, ``D`` width, ``H`` heads, ``V`` = 256 byte values.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right

from lightning_blocktrain.errors import explain

VOCABULARY = 256
UNKNOWN = VOCABULARY
"""The input row that stands for a byte that is not decided yet."""
ROTARY_BASE = 10_000.0
INIT_GAIN = 0.4
"""Size of a linear map's output for inputs of size 1, before training."""
LayerKind = Literal["attention", "mlp"]


class KeyValueCache:
    """Keys and values of the positions seen so far, for one layer.

    Args:
        max_length: Positions it can hold.
    """

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        self.length = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store new positions and return all stored ones; tensors are (B, H, T, D / H)."""
        if self._keys is None or self._values is None:
            shape = (*keys.shape[:2], self.max_length, keys.shape[3])
            self._keys, self._values = keys.new_empty(shape), values.new_empty(shape)
        start, self.length = self.length, self.length + keys.shape[2]
        self._keys[:, :, start : self.length] = keys
        self._values[:, :, start : self.length] = values
        return self._keys[:, :, : self.length], self._values[:, :, : self.length]

    def rewind(self, length: int) -> None:
        """Forget all positions but the first ``length``."""
        assert 0 <= length <= self.length
        self.length = length


class JointCache:
    """The caches of several texts whose new positions stand one behind the other in one sequence, for one layer.

    So the linear maps of a layer see all positions at once, and attention every text by itself.

    Args:
        caches: One per text.
        lengths: New positions of each.
    """

    def __init__(self, caches: Sequence[KeyValueCache], lengths: Sequence[int]) -> None:
        self.caches = tuple(caches)
        self.lengths = list(lengths)


@lru_cache(maxsize=16)
@torch.inference_mode(False)  # the table of an evaluation serves the training after it
def rotary_table(length: int, size: int, device: torch.device) -> Tensor:
    """Return cosines and sines of every position's angles, float32 (2, length, size).

    Args:
        length: Positions.
        size: Channels of one head, an even number; channel i turns together with channel ``i + size / 2``.
        device: Where the table is wanted.

    Source: RoFormer (arXiv 2104.09864).
    """
    half = torch.arange(size // 2, dtype=torch.float64) / (size // 2)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), ROTARY_BASE**-half).repeat(1, 2)
    return torch.stack([angles.cos(), angles.sin()]).float().to(device)


def rotate(x: Tensor, start: int = 0) -> Tensor:
    """Turn queries or keys (..., T, size) by their positions ``start`` .. ``start + T - 1``.

    Their products then depend on the distance of two positions alone.
    """
    T, size = x.shape[-2:]
    # A power of two, so that a growing text does not fill the table's cache.
    cos, sin = rotary_table(1 << (start + T - 1).bit_length(), size, x.device)[:, start : start + T].to(x.dtype)
    left, right = x.chunk(2, dim=-1)
    turned: Tensor = x * cos + torch.cat([-right, left], dim=-1) * sin
    return turned


class CausalAttention(nn.Module):
    """Multi-head causal self-attention with rotary positions and one projection for queries, keys and values."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        if num_heads < 1 or width < 1 or width % (2 * num_heads):
            raise ValueError(
                explain(
                    "width must be a multiple of 2 * num_heads",
                    f"width={width}, num_heads={num_heads}",
                    "use heads of 32 to 64",
                )
            )
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, cache: KeyValueCache | JointCache | None = None) -> Tensor:
        """Attend from each position to itself and those before it; (B, T, D) to (B, T, D).

        With a cache, ``x`` are the positions after those that it holds.
        """
        B, T, D = x.shape
        qkv = self.qkv(x).view(B, T, 3, self.num_heads, D // self.num_heads).permute(2, 0, 3, 1, 4)
        if isinstance(cache, JointCache):
            texts = zip(qkv.split(cache.lengths, dim=3), cache.caches, strict=True)
            mixed = torch.cat([attend(own, kept) for own, kept in texts], dim=2)
        else:
            mixed = attend(qkv, cache)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(B, T, D))
        return out


def attend(qkv: Tensor, cache: KeyValueCache | None) -> Tensor:
    """Return what each position takes from itself and those before it; (3, B, H, T, size) to (B, H, T, size)."""
    T = qkv.shape[3]
    start = 0 if cache is None else cache.length
    q, k = rotate(qkv[:2], start)
    v = qkv[2]
    if cache is not None:
        k, v = cache.append(k, v)
    if start and T > 1:
        mask = causal_lower_right(T, start + T)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return F.scaled_dot_product_attention(q, k, v, is_causal=T > 1)


class Mlp(nn.Module):
    """Two linear maps with a GELU between them."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map every position by itself; (B, T, D) to (B, T, D)."""
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out


class Layer(nn.Module):
    """One pre-norm layer: attention (unless ``kind="mlp"``) and an MLP of four times the width, both residual.

    With attention it holds ``12 D^2 + 13 D`` parameters.

    Args:
        width: D.
        num_heads: H; D is a multiple of 2 H.
        kind: ``attention``, or ``mlp`` for a layer that does not look at other positions.
    """

    def __init__(self, width: int, num_heads: int, kind: LayerKind = "attention") -> None:
        super().__init__()
        if kind not in ("attention", "mlp"):
            raise ValueError(explain("layer must be 'attention' or 'mlp'", f"layer={kind!r}", "choose one"))
        self.attention = CausalAttention(width, num_heads) if kind == "attention" else None
        self.norm_attention = nn.LayerNorm(width) if kind == "attention" else nn.Identity()
        self.mlp = Mlp(width, 4 * width)
        self.norm_mlp = nn.LayerNorm(width)

    def forward(self, x: Tensor, cache: KeyValueCache | JointCache | None = None) -> Tensor:
        """Apply the layer; (B, T, D) to (B, T, D)."""
        if self.attention is not None:
            x = x + self.attention(self.norm_attention(x), cache)
        out: Tensor = x + self.mlp(self.norm_mlp(x))
        return out


class Readout(nn.Module):
    """Final norm and unembedding, shared by all blocks.

    Args:
        width: D.
        zero_init: Start with all logits 0, so that an untrained model is uniform.
    """

    def __init__(self, width: int, zero_init: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.unembed = nn.Linear(width, VOCABULARY, bias=False)
        if zero_init:
            nn.init.zeros_(self.unembed.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return byte logits; (B, T, D) to (B, T, V)."""
        logits: Tensor = self.unembed(self.norm(hidden))
        return logits


class ExitNorm(nn.Module):
    """The shared unembedding behind a norm of an exit's own.

    Args:
        width: D.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, hidden: Tensor, readout: Readout) -> Tensor:
        """Return byte logits; (B, T, D) to (B, T, V)."""
        logits: Tensor = readout.unembed(self.norm(hidden))
        return logits


class OwnExit(Readout):
    """A readout of an exit's own; takes the shared one for the form's sake."""

    def forward(self, hidden: Tensor, readout: Readout | None = None) -> Tensor:
        """Return byte logits; (B, T, D) to (B, T, V)."""
        return super().forward(hidden)


def init_weights(module: nn.Module, num_layers: int, width: int) -> None:
    """Initialise as GPT-2 does: normal weights, zero biases, residual outputs scaled down by depth.

    GPT-2's own ``std = .02`` belongs to its widths of 768 and more: in a narrow model it makes the output of a layer
    small. Here it is ``INIT_GAIN / sqrt(D)``.

    Args:
        module: What is initialised, in place.
        num_layers: L of the whole model.
        width: D.
    """
    std = INIT_GAIN / width**0.5
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif name.endswith(("out.weight", "down.weight")):
            nn.init.normal_(parameter, std=std / (2 * num_layers) ** 0.5)
        elif parameter.dim() == 2:
            nn.init.normal_(parameter, std=std)
