"""Bits per token as summed nats over summed tokens, and how the tokens of a batch are counted.

Owns the formula, the torchmetrics object that accumulates its two sums, and the one count that strategies and
callbacks share, so that the rates of a method and of its control compare. Refuses to own the losses: what a
number means (``val/bits_per_byte``, ``val/sweep_ce_k16``) is decided by the module that logs it.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric

from lightning_blocktrain.errors import explain
from lightning_blocktrain.protocols import CountsTokens

Number = TypeVar("Number", float, Tensor)


def bits_per_token(nats: Number, num_tokens: Number | int) -> Number:
    """Return ``nats / num_tokens / ln 2``.

    Args:
        nats: Summed negative log likelihood, in nats.
        num_tokens: Tokens that the sum covers.

    Returns:
        Bits per token, of the type of ``nats``; for bytes as tokens (V = 256) this is bits per byte.

    Raises:
        ZeroDivisionError: If both are Python numbers and ``num_tokens`` is 0; tensors give nan or inf.
    """
    return nats / num_tokens / math.log(2)


class BitsPerToken(Metric):
    """Accumulate nats in float64 and tokens in int64; compute bits per token over all of them.

    A mean of batch means would weigh short batches too heavily, and a float32 count stops at 2^24 tokens. Both
    sums keep their types when the module that owns the metric is cast (``.half()``, ``.to(torch.bfloat16)``,
    ``precision="bf16-true"``). Across processes both are summed; with a strategy that opens no process group,
    set ``distributed_available_fn`` and ``dist_sync_fn`` on the object or evaluate in one process.

    Args:
        ignore_index: Targets of this value are neither scored nor counted.
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False
    nats: Tensor
    num_tokens: Tensor

    def __init__(self, ignore_index: int = -100) -> None:
        super().__init__()
        self.ignore_index = ignore_index
        self.add_state("nats", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("num_tokens", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Add the tokens of one batch.

        Args:
            logits: Unnormalised log probabilities, (..., V), any floating type; scored in float32 or wider.
            targets: Indices below V or ``ignore_index``, (...), int64.

        Raises:
            ValueError: If the leading shape of ``logits`` is not that of ``targets``.
        """
        if logits.ndim < 1 or logits.shape[:-1] != targets.shape:
            raise ValueError(
                explain(
                    "logits must have the shape of targets and one more axis of size V",
                    f"logits {tuple(logits.shape)}, targets {tuple(targets.shape)}",
                    "pass logits (..., V) and targets (...)",
                )
            )
        flat = logits.detach().reshape(-1, logits.shape[-1])
        wide = flat if flat.dtype == torch.float64 else flat.float()
        # Per-token values first: a float32 sum over a batch would already round.
        per_token = F.cross_entropy(wide, targets.reshape(-1), ignore_index=self.ignore_index, reduction="none")
        self._add(per_token, (targets != self.ignore_index).sum())

    def update_nats(self, nats: Tensor, num_tokens: int) -> None:
        """Add a loss that was computed elsewhere.

        Args:
            nats: Negative log likelihoods in nats, any shape: summed here, so a sum over tokens or one value per
                token (never a mean).
            num_tokens: Number of tokens behind them, at least 0.

        Raises:
            ValueError: If ``num_tokens`` is negative.
        """
        if num_tokens < 0:
            raise ValueError(
                explain(
                    "num_tokens must be at least 0",
                    f"num_tokens={num_tokens}",
                    "pass the number of tokens that the nats were summed over",
                )
            )
        # torchmetrics wraps only ``update``: without these two lines ``compute`` would answer from its cache.
        self._computed = None
        self._update_count += 1
        self._add(nats.detach(), torch.tensor(num_tokens))

    def compute(self) -> Tensor:
        """Return bits per token, float64 scalar; nan (after torchmetrics' own warning) before any token."""
        return bits_per_token(self.nats, self.num_tokens)

    def _add(self, nats: Tensor, num_tokens: Tensor) -> None:
        # Not in place: the states that ``Trainer.validate`` leaves are inference tensors, which ``fit`` may not change.
        self.nats = self.nats + nats.to(self.nats.device).double().sum()
        self.num_tokens = self.num_tokens + num_tokens.to(self.num_tokens.device)

    def _apply(self, fn: Callable[..., Any], exclude_state: Sequence[str] = ()) -> "BitsPerToken":
        super()._apply(fn, exclude_state=(*exclude_state, "nats"))
        # Follow the device only, never the type; MPS has no float64, so there the sum stays in host memory.
        device = torch.device("cpu") if self.device.type == "mps" else self.device
        self.nats = self.nats.to(device)
        self._defaults["nats"] = torch.zeros((), dtype=torch.float64, device=device)
        return self


def count_tokens(module: object, batch: Any) -> int:
    """Return the target tokens of a batch: by the module's own ``count_tokens``, else what the batch shows.

    Args:
        module: The module that trains on the batch.
        batch: One batch, any nesting of tensors.

    Returns:
        The module's count; without one, the elements of the first integer tensor of two or more dimensions, else the
        samples in the batch (first dimension of the first tensor), else 1.
    """
    if isinstance(module, CountsTokens):
        return int(module.count_tokens(batch))
    tensors = [tensor for tensor in _tensors_in(batch) if tensor.dim() > 0]
    ids = next((t for t in tensors if t.dim() > 1 and not t.is_floating_point()), None)
    return ids.numel() if ids is not None else len(tensors[0]) if tensors else 1


def _tensors_in(batch: Any) -> Iterator[Tensor]:
    # Any mapping, not only a dict: tokenizers return their own.
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for part in batch.values():
            yield from _tensors_in(part)
    elif isinstance(batch, list | tuple):
        for part in batch:
            yield from _tensors_in(part)
