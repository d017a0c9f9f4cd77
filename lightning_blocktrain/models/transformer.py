"""Transformer layers for bytes, fast on a CPU: fused qkv, ``scaled_dot_product_attention``, a key-value cache.

Owns layers and readout; knows nothing of losses, noise, blocks or Lightning.

Shapes: ``B`` sequences, ``T`` bytes per window, ``D`` width, ``H`` heads, ``V`` = 256 byte values.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_blocktrain.errors import explain

VOCABULARY = 256
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


class CausalAttention(nn.Module):
    """Multi-head causal self-attention with one fused projection for queries, keys and values."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        if num_heads < 1 or width < 1 or width % num_heads:
            raise ValueError(
                explain(
                    "num_heads must divide width",
                    f"width={width}, num_heads={num_heads}",
                    "use heads of 32 to 64",
                )
            )
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Attend from each position to itself and those before it; (B, T, D) to (B, T, D).

        With a cache, ``x`` is either the first positions or exactly one new position.
        """
        B, T, D = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.num_heads, D // self.num_heads).permute(2, 0, 3, 1, 4)
        if cache is not None:
            k, v = cache.append(k, v)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=T > 1)  # (B, H, T, D / H)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(B, T, D))
        return out


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
        num_heads: H, a divisor of D.
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

    def forward(self, x: Tensor, cache: KeyValueCache | None = None) -> Tensor:
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


def init_weights(module: nn.Module, num_layers: int, std: float = 0.02) -> None:
    """Initialise as GPT-2 does: normal weights, zero biases, residual outputs scaled down by depth."""
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif name.endswith(("out.weight", "down.weight")):
            nn.init.normal_(parameter, std=std / (2 * num_layers) ** 0.5)
        elif parameter.dim() == 2:
            nn.init.normal_(parameter, std=std)


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
