"""What travels through a pipeline: orders down the chain of stages, reports back to the driver.

The driver speaks to stage 0 only; each stage passes an order on to the next, with its own hidden state in the place
of the one it received. So every stage sees the same orders in the same sequence.
"""

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from lightning_blocktrain.pipeline.account import TimeAccount


@dataclass(frozen=True)
class Clip:
    """How a stage clips its own gradients.

    Args:
        value: Largest L2 norm, or largest absolute value.
        algorithm: Which of the two.
    """

    value: float
    algorithm: Literal["norm", "value"] = "norm"


@dataclass(frozen=True)
class BatchOrder:
    """Learn from one batch: add its gradients.

    Args:
        batch_idx: Running number of the batch since the pipeline was built.
        step_idx: Optimizer steps ordered before it.
        data: The batch, as the module's hooks take it.
        divisor: What the loss is divided by before its backward pass.
        hidden: What the stage before made of it, (B, T, D); None for stage 0.
    """

    batch_idx: int
    step_idx: int
    data: Any
    divisor: float
    hidden: Tensor | None = None


@dataclass(frozen=True)
class StepOrder:
    """Take one optimizer step with the gradients gathered since the last one.

    Args:
        step_idx: Running number of the step.
        groups: Hyper-parameters of every parameter group of the user's optimizer.
        clip: How to clip; None: not at all.
    """

    step_idx: int
    groups: tuple[dict[str, Any], ...]
    clip: Clip | None


@dataclass(frozen=True)
class DrainOrder:
    """Report when everything ordered before is done.

    Args:
        step_idx: Optimizer steps ordered before it.
        with_state: Whether to report the stage's optimizer state and random stream too.
        drain_idx: Running number of the drain.
    """

    step_idx: int
    with_state: bool
    drain_idx: int


Order = BatchOrder | StepOrder | DrainOrder


@dataclass(frozen=True)
class BatchReport:
    """What one stage made of one batch.

    Args:
        stage_idx: The stage.
        batch_idx: The batch.
        loss: Its local loss.
        extras: Further scalars that ``stage_loss`` returned.
        lag: Optimizer steps between the snapshot it read and the batch.
        account: Where its time went so far.
    """

    stage_idx: int
    batch_idx: int
    loss: float
    extras: dict[str, float]
    lag: int
    account: TimeAccount


@dataclass(frozen=True)
class StepReport:
    """The final stage has taken a step, and so have all others before it or soon."""

    step_idx: int


@dataclass(frozen=True)
class DrainReport:
    """A stage has done everything that was ordered.

    Args:
        stage_idx: The stage.
        drain_idx: The drain that it answers.
        account: Where its time went so far.
        optimizer_state: State of its optimizer by parameter name; None if it was not asked for.
        random_state: Its random stream; None if it was not asked for or draws from the process's.
    """

    stage_idx: int
    drain_idx: int
    account: TimeAccount
    optimizer_state: dict[str, dict[str, Any]] | None = None
    random_state: Tensor | None = None


@dataclass(frozen=True)
class FailureReport:
    """A stage has failed and works no more.

    Args:
        stage_idx: The stage.
        step_idx: The step it was in.
        cause: The error; one from another process is rebuilt from its text.
    """

    stage_idx: int
    step_idx: int
    cause: BaseException


Report = BatchReport | StepReport | DrainReport | FailureReport
