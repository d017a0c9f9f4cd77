"""Tensors that a process does not hold: the same objects, with shape, dtype and flag, on the memory of one NaN.

Owns their form. Whoever reads one sees NaN, and the user's optimizer keeps its parameters. Tensors that are not
floating stay: they cannot say that they hold nothing.
"""

from collections.abc import Collection

import torch
from torch import Tensor, nn

from lightning_blocktrain.partition import Partition


def nothing_like(tensor: Tensor) -> Tensor:
    """Return NaN in the shape, dtype and device of a floating tensor, and the memory of one value."""
    return torch.full((), torch.nan, dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)


def release(
    module: nn.Module,
    partition: Partition,
    kept_blocks: Collection[int] | None,
    read_blocks: Collection[int],
    for_good: bool,
) -> set[str]:
    """Release the floating tensors of the blocks that are not kept; return the names of all their tensors.

    Args:
        module: The live module.
        partition: Its partition.
        kept_blocks: Whose tensors stay; None: all.
        read_blocks: Of the others, those that still run in this process: what nobody trains stays with them.
        for_good: Whether parameters that nobody trains, and of which no coordinator has a copy, are released as well.
    """
    if kept_blocks is None:
        return set()
    others = {name: b for b, names in enumerate(partition.block_names) if b not in kept_blocks for name in names}
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        is_trained = tensor.requires_grad or not isinstance(tensor, nn.Parameter)
        is_plain = type(tensor.data) is Tensor and tensor.is_floating_point()
        if name in others and is_plain and (is_trained or (for_good and others[name] not in read_blocks)):
            tensor.data = nothing_like(tensor)
    return set(others)
