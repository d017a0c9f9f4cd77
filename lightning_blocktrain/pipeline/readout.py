"""The shared readout: which version a stage reads, and how the stages' gradients become one.

Pure functions; who stores and moves the snapshots is the backends' business.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from lightning_blocktrain.errors import explain

ConsensusWeights = Literal["uniform", "depth"] | Sequence[float]


def consensus_weights(weights: ConsensusWeights, num_stages: int) -> tuple[float, ...]:
    """Return the weight of each stage's readout gradient; they sum to 1.

    Args:
        weights: ``uniform`` (the paper's), ``depth`` (proportional to the number of the stage, counted from 1, so
            that the final stage counts most), or one number per stage.
        num_stages: S.

    Raises:
        ValueError: If there is not one non-negative number per stage, or the final stage's is 0.
    """
    if isinstance(weights, str):
        if weights not in ("uniform", "depth"):
            rule = "consensus_weights must be 'uniform', 'depth' or one number per stage"
            raise ValueError(explain(rule, f"consensus_weights={weights!r}", "use 'uniform'"))
        raw = [1.0 if weights == "uniform" else stage_idx + 1.0 for stage_idx in range(num_stages)]
    else:
        raw = [float(weight) for weight in weights]
    if len(raw) != num_stages or not all(0 <= weight < float("inf") for weight in raw) or not raw[-1] > 0:
        rule = "consensus_weights must be one finite number of at least 0 per stage, the final one above 0"
        got = f"consensus_weights={weights!r} for num_stages={num_stages}"
        raise ValueError(explain(rule, got, "use 'uniform' or 'depth'"))
    return tuple(weight / sum(raw) for weight in raw)


def consensus(gradients: Sequence[Sequence[Tensor]], weights: Sequence[float]) -> list[Tensor]:
    """Return the weighted mean of the stages' readout gradients, ``sum_s w_s g_s``.

    Args:
        gradients: Per stage, one gradient per readout parameter.
        weights: Weight per stage, summing to 1; equal weights are summed first and scaled once.

    Source: *Bounded-Horizon Local Transformer Training on CPUs*: ``(1/S) [dl_S/dtheta(theta) + sum_{s<S} g_s]``.
    """
    if len(set(weights)) == 1:
        return [torch.stack(list(parts)).sum(0).mul_(weights[0]) for parts in zip(*gradients, strict=True)]
    return [
        torch.stack([part * weight for part, weight in zip(parts, weights, strict=True)]).sum(0)
        for parts in zip(*gradients, strict=True)
    ]


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
