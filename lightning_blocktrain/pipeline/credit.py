"""Credit from the next stage: what a stage keeps of a batch until the gradient of the loss after it comes back.

Owns the kept batch and the weights that its graph needs. Who sends the gradient, and when a stage waits for it, is
``worker``'s business.
"""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Credit = Literal["local", "next_stage"]
"""What a stage learns from: its own loss, or that and the loss of the stage after it."""


class WeightStash:
    """Lets the graph of one forward pass outlive an optimizer step.

    The graph refers to the live weights until ``keep`` copies them, so a graph that no step overtakes costs nothing.
    Not covered: layers that run forward again in their backward pass (activation checkpointing) do so with the newer
    weights.

    Args:
        parameters: What the step will change; each dense.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._live = sorted(parameters, key=Tensor.data_ptr)
        self._starts = [parameter.data_ptr() for parameter in self._live]
        self._copies: dict[int, Tensor] = {}
        self._used: set[int] = set()

    def saving(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Return the context of the forward pass."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def keep(self) -> None:
        """Copy the weights that the graph has saved; call it before a step changes them."""
        for idx in self._used - self._copies.keys():
            self._copies[idx] = self._live[idx].detach().clone()

    def _pack(self, tensor: Tensor) -> Any:
        idx = bisect_right(self._starts, tensor.data_ptr()) - 1
        offset = tensor.data_ptr() - self._starts[idx] if idx >= 0 else -1
        if offset < 0 or offset >= self._live[idx].nbytes:
            return tensor, tensor._version
        self._used.add(idx)  # by address: what is saved may be a view, such as the transpose
        return idx, offset // tensor.element_size(), tensor.size(), tensor.stride()

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed[0], Tensor):
            saved: Tensor = packed[0]
            if saved._version != packed[1]:  # autograd does not look where there are hooks
                raise RuntimeError("a tensor that the backward pass needs was changed in place after it was saved")
            return saved
        idx, offset, size, stride = packed
        weights: Tensor = self._copies.get(idx, self._live[idx]).detach()
        return weights.as_strided(size, stride, weights.storage_offset() + offset)


@dataclass(frozen=True)
class OpenBatch:
    """A batch that waits for its credit.

    Args:
        batch_idx: The batch.
        hidden: What the stage passed on, (B, T, D), with its graph.
        gradient: Gradient of the stage's own loss with respect to it, (B, T, D).
        private: The parameters of the stage's private exit that it reached, and their gradients.
        stash: The weights of the graph; None if no step comes before the credit.
    """

    batch_idx: int
    hidden: Tensor
    gradient: Tensor
    private: list[tuple[Tensor, Tensor]]
    stash: WeightStash | None


def credit_for(received: Tensor, batch: OpenBatch | None) -> Tensor:
    """Return the gradient of a stage's own loss, and of no other, for what it received; (B, T, D).

    Args:
        received: What its forward pass was given, a leaf.
        batch: What waits for credit; None where the backward pass is done and has met ``received`` on its way.
    """
    if batch is None:
        assert received.grad is not None
        return received.grad
    (found,) = torch.autograd.grad(batch.hidden, received, batch.gradient, retain_graph=True)
    return found
