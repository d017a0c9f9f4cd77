"""Where the time of a stage goes, and what the speed of a pipeline is made of.

Owns a clock per stage and two formulas. The parts are added up one by one, the wall time comes from one difference:
that they agree checks the bookkeeping.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

Section = Literal["busy", "wait_in", "wait_out", "copy", "optimizer"]

PARTS: tuple[Section, ...] = ("busy", "wait_in", "wait_out", "copy", "optimizer")
WORK: tuple[Section, ...] = ("busy", "copy", "optimizer")


@dataclass(frozen=True)
class TimeAccount:
    """Seconds of one stage since its start.

    Args:
        busy_s: Forward and backward passes, and the stage's Python code around them.
        wait_in_s: Waiting for an order, a snapshot or other stages' gradients.
        wait_out_s: Waiting for room to pass something on.
        copy_s: Copying into and out of shared memory.
        optimizer_s: Consensus, clipping, optimizer step.
        work_cpu_s: CPU seconds of this thread in ``busy``, ``copy`` and ``optimizer``: what the work costs where
            stages share cores. Without the other threads of its OpenMP team.
        wall_s: Seconds since the start, by a clock of its own.
        num_batches: Batches done.
        num_steps: Optimizer steps done.
    """

    busy_s: float = 0.0
    wait_in_s: float = 0.0
    wait_out_s: float = 0.0
    copy_s: float = 0.0
    optimizer_s: float = 0.0
    work_cpu_s: float = 0.0
    wall_s: float = 0.0
    num_batches: int = 0
    num_steps: int = 0

    def __sub__(self, earlier: "TimeAccount") -> "TimeAccount":
        """Return what happened between two accounts of the same stage."""
        names = [field.name for field in fields(self)]
        return TimeAccount(**{name: getattr(self, name) - getattr(earlier, name) for name in names})

    @property
    def closure_error(self) -> float:
        """Share of the wall time that no part holds; negative if parts overlap."""
        parts_s = self.busy_s + self.wait_in_s + self.wait_out_s + self.copy_s + self.optimizer_s
        return 1 - parts_s / self.wall_s if self.wall_s else 0.0

    def work_s(self, num_threads: int) -> float:
        """Return seconds of work per step: CPU time for a team of one thread, else the time on the clock."""
        wall_s = self.busy_s + self.copy_s + self.optimizer_s
        return (self.work_cpu_s if num_threads == 1 else wall_s) / max(1, self.num_steps)


class StageClock:
    """Keeps the account of the stage whose thread owns it: at every moment one part of it grows.

    It starts in ``wait_in``. What a stage's thread does between the named sections of an order, such as waiting for the
    GIL, is in the section around them.
    """

    def __init__(self) -> None:
        self._seconds: dict[Section, float] = dict.fromkeys(PARTS, 0.0)
        self._counts = TimeAccount()
        self._work_cpu_s = 0.0
        self._current: Section = "wait_in"
        self._start = self._since = time.perf_counter()
        self._cpu_since = time.thread_time()

    @contextmanager
    def section(self, name: Section) -> Iterator[None]:
        """Let one part of the account grow while the code inside runs; an inner section interrupts an outer one."""
        outer = self._current
        self._switch(name)
        try:
            yield
        finally:
            self._switch(outer)

    def _switch(self, name: Section) -> None:
        now, cpu = time.perf_counter(), time.thread_time()
        self._seconds[self._current] += now - self._since
        if self._current in WORK:
            self._work_cpu_s += cpu - self._cpu_since
        self._current, self._since, self._cpu_since = name, now, cpu

    def count(self, *, batches: int = 0, steps: int = 0) -> None:
        """Count finished batches and steps."""
        old = self._counts
        self._counts = replace(old, num_batches=old.num_batches + batches, num_steps=old.num_steps + steps)

    def read(self) -> TimeAccount:
        """Return the account up to now."""
        self._switch(self._current)
        parts: Any = {f"{name}_s": seconds for name, seconds in self._seconds.items()}
        wall_s = time.perf_counter() - self._start
        return replace(self._counts, **parts, work_cpu_s=self._work_cpu_s, wall_s=wall_s)


@dataclass(frozen=True)
class Decomposition:
    """What a ratio of step times is made of: ``T_bp / T_async = work * parallelism * orchestration``.

    Args:
        work: W = T_bp / sum of b_s; below 1 where the method computes more than backpropagation.
        parallelism: P = sum of b_s / max of b_s; S for perfect balance.
        orchestration: eta = max of b_s / T_async; 1 if the busiest stage never waits, less where stages share cores.
    """

    work: float
    parallelism: float
    orchestration: float


def decompose(bp_step_s: float, async_step_s: float, work_s: Sequence[float]) -> Decomposition:
    """Split the ratio of two step times.

    Args:
        bp_step_s: Seconds a step of global backpropagation.
        async_step_s: Seconds a step of the pipeline.
        work_s: Seconds of work per step of each stage, b_s.

    Source: *Bounded-Horizon Local Transformer Training on CPUs*, throughput decomposition.
    """
    return Decomposition(
        work=bp_step_s / sum(work_s),
        parallelism=sum(work_s) / max(work_s),
        orchestration=max(work_s) / async_step_s,
    )
