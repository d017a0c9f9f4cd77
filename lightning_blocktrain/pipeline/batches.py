"""How a batch is cut into smaller ones along its first dimension."""

from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_blocktrain.errors import explain


def num_samples(batch: Any) -> int:
    """Return the first dimension of the batch's tensors, 1 if it has none.

    Raises:
        ValueError: If its tensors disagree.
    """
    sizes: set[int] = set()
    apply_to_collection(batch, Tensor, lambda t: sizes.add(len(t)) if t.dim() else None)
    if len(sizes) > 1:
        rule = "a batch that is cut must hold tensors of one first dimension"
        raise ValueError(explain(rule, f"sizes {sorted(sizes)}", "use micro_batches=1, or collate per sample"))
    return sizes.pop() if sizes else 1


def split_batch(batch: Any, num_parts: int) -> list[tuple[Any, float]]:
    """Cut a batch into at most ``num_parts`` parts, the larger ones first.

    Returns:
        The parts, and the share of the samples in each.
    """
    samples = num_samples(batch) if num_parts > 1 else 0
    if samples == 0:
        return [(batch, 1.0)]
    size, rest = divmod(samples, num_parts)
    parts, start = [], 0
    for part_idx in range(min(num_parts, samples)):
        end = start + size + (part_idx < rest)
        part = apply_to_collection(batch, Tensor, lambda t, a=start, b=end: t[a:b] if t.dim() else t)
        parts.append((part, (end - start) / samples))
        start = end
    return parts
