"""The shared readout: which version a stage reads, and how the stages' gradients become one.

Pure functions; who stores and moves the snapshots is the backends' business.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from lightning_blocktrain.errors import explain

NamedWeights = Literal["uniform", "depth", "final"]
ConsensusWeights = NamedWeights | Sequence[float]


def consensus_weights(weights: ConsensusWeights, num_stages: int) -> tuple[float, ...]:
    """Return the weight of each stage's readout gradient; they sum to 1.

    Args:
        weights: ``uniform`` (the paper's), ``depth`` (proportional to the number of the stage, counted from 1, so
            that the final stage counts most), ``final`` (the final stage counts as much as S others, S / (2 S - 1),
            more than half), or one number per stage.
        num_stages: S.

    Raises:
        ValueError: If there is not one non-negative number per stage, or the final stage's is 0.
    """
    if isinstance(weights, str):
        named = {
            "uniform": [1.0] * num_stages,
            "depth": [stage_idx + 1.0 for stage_idx in range(num_stages)],
            "final": [1.0] * (num_stages - 1) + [float(num_stages)],
        }
        if weights not in named:
            rule = "consensus_weights must be 'uniform', 'depth', 'final' or one number per stage"
            raise ValueError(explain(rule, f"consensus_weights={weights!r}", "use 'uniform'"))
        raw = named[weights]
    else:
        raw = [float(weight) for weight in weights]
    if len(raw) != num_stages or not all(0 <= weight < float("inf") for weight in raw) or not raw[-1] > 0:
        rule = "consensus_weights must be one finite number of at least 0 per stage, the final one above 0"
        got = f"consensus_weights={weights!r} for num_stages={num_stages}"
        raise ValueError(explain(rule, got, "use 'uniform', 'depth' or 'final'"))
    return tuple(weight / sum(raw) for weight in raw)


def consensus(gradients: Sequence[Sequence[Tensor | None]], weights: Sequence[float]) -> list[Tensor | None]:
    """Return the weighted mean of the stages' readout gradients, ``sum_s w_s g_s``.

    A parameter that some stages do not use (a norm, where these have their own) gets the mean over those that do.

    Args:
        gradients: Per stage, one gradient per readout parameter; None where the stage does not use it.
        weights: Weight per stage; equal weights are summed first and scaled once.

    Returns:
        One gradient per readout parameter; None where no stage of a weight above 0 uses it.

    Source: *Bounded-Horizon Local Transformer Training on CPUs*: ``(1/S) [dl_S/dtheta(theta) + sum_{s<S} g_s]``.
    """
    return [_weighted(parts, weights) for parts in zip(*gradients, strict=True)]


def _weighted(parts: Sequence[Tensor | None], weights: Sequence[float]) -> Tensor | None:
    found = [(part, weight) for part, weight in zip(parts, weights, strict=True) if part is not None]
    share = sum(weight for _, weight in found)
    if not share:
        return None
    # Exactly 1 where all stages use it.
    scale = sum(weights) / share
    if len({weight for _, weight in found}) == 1:
        return torch.stack([part for part, _ in found]).sum(0).mul_(scale * found[0][1])
    return torch.stack([part * (scale * weight) for part, weight in found]).sum(0)


def pinned_version(step_idx: int, drained_at: int, stage_idx: int, num_stages: int) -> int:
    """Return the readout version that stage ``stage_idx`` reads for step ``step_idx`` at its natural lag.

    In a full pipeline stage s is ``S - 1 - s`` steps ahead of the final stage; a drain resets the lag to 0.

    Args:
        step_idx: Optimizer steps before the batch.
        drained_at: Optimizer steps before the last drain.
        stage_idx: s, from 0.
        num_stages: S.
    """
    return max(drained_at, step_idx - (num_stages - 1 - stage_idx))
