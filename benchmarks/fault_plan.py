"""What the processes of the fault harness are told, as plain values. Cheap to import."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

SEED = 11

Point = Literal["before_submit", "after_submit"]
"""When its local steps are done, and when block and interface have been judged."""
Fault = Literal["ask", "die", "outstay", "nan", "stretch"]
"""Wait for the harness; be killed; wait until the round has closed without it; send NaN; send a far too long update."""
Plan = Mapping[tuple[int, Point], Fault]
"""A worker's faults by round and point."""


@dataclass(frozen=True)
class Shape:
    """What is trained, by how many, under which rules.

    Args:
        num_blocks: B.
        replicas: Workers per block; worker w is on block w mod B.
        num_rounds: Rounds of every block.
        sync_every: Inner steps per round.
        width: D.
        step_s: What an inner step lasts at least: the workers share a few cores here, and would not where they belong.
        deadline_s: Of a round.
        silent_after_s: Without a sign of life for so long a worker is not waited for.
        outlier_factor: See ``RoundRules``.
    """

    num_blocks: int = 3
    replicas: int = 2
    num_rounds: int = 6
    sync_every: int = 2
    width: int = 64
    step_s: float = 0.05
    deadline_s: float = 30.0
    silent_after_s: float = 20.0
    outlier_factor: float | None = None

    @property
    def num_workers(self) -> int:
        """W."""
        return self.num_blocks * self.replicas

    @property
    def block_bytes(self) -> int:
        """Bytes of a block's tensors on the wire."""
        return 4 * self.width * (self.width + 1)


@dataclass(frozen=True)
class CoordinatorTold:
    """What a coordinator is told.

    Args:
        shape: Of the run.
        run_id: Of the run.
        token: Of the run.
        port: 0 lets the system choose.
        state_dir: Of its state.
        spool_dir: Of messages that arrive.
    """

    shape: Shape
    run_id: str
    token: str = field(repr=False)
    port: int
    state_dir: Path
    spool_dir: Path


@dataclass(frozen=True)
class WorkerTold:
    """What a worker is told.

    Args:
        shape: Of the run.
        run_id: Of the run.
        token: Of the run.
        url: Of the coordinator, or of a relay to it.
        worker_id: Who it is.
        plan: What it does wrong.
        step_s: What its inner steps last at least.
        stall_timeout_s: Of its transport.
    """

    shape: Shape
    run_id: str
    token: str = field(repr=False)
    url: str
    worker_id: int
    plan: Plan
    step_s: float
    stall_timeout_s: float
