"""The contract of a pipeline, and what every backend shares: counting orders, gathering reports, first failures.

Threads: the driver's thread alone calls a pipeline.

| call | waits for |
|---|---|
| ``learn`` | room in front of stage 0; when serial, all stages' reports on the batch |
| ``step`` | the same; when serial, the final stage's step |
| ``finished`` | nothing, or one batch to finish |
| ``drain`` | all stages |
| ``close`` | the stages to end, at most ``CLOSE_TIMEOUT_S``; groups: the pass they are in |
"""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_blocktrain.errors import StageError, explain
from lightning_blocktrain.pipeline.account import TimeAccount
from lightning_blocktrain.pipeline.orders import (
    BatchOrder,
    BatchReport,
    Clip,
    DrainOrder,
    DrainReport,
    FailureReport,
    Order,
    Report,
    StepOrder,
    StepReport,
)

POLL_S = 0.1
"""How often whoever waits looks whether the pipeline is being taken down."""

CLOSE_TIMEOUT_S = 4.0
"""Longest wait for stages to end, all of them together."""


@dataclass(frozen=True)
class FinishedBatch:
    """A batch that every stage has learnt from, but for credit that may still be on its way.

    Args:
        batch_idx: Running number since the pipeline was built.
        stages: What each stage reported.
    """

    batch_idx: int
    stages: tuple[BatchReport, ...]


class Pipeline(ABC):
    """Stages at work, seen by the driver.

    Args:
        num_stages: S.
        first_step: Optimizer steps before the first order.
        serial: Whether every order is carried out before the next.
        timeout_s: Longest wait without any report.
    """

    def __init__(self, num_stages: int, first_step: int, serial: bool, timeout_s: float) -> None:
        self.num_stages = num_stages
        self.num_steps, self.num_batches = first_step, 0
        self._serial, self._timeout_s = serial, timeout_s
        self._steps_done, self._num_finished = first_step, 0
        self._partial: dict[int, list[BatchReport]] = {}
        self._finished: deque[FinishedBatch] = deque()
        self._num_drains = 0
        self._drained: list[DrainReport] = []
        self._accounts = [TimeAccount() for _ in range(num_stages)]
        self._failure: StageError | MisconfigurationException | None = None

    @property
    def accounts(self) -> tuple[TimeAccount, ...]:
        """The newest time account that each stage has reported."""
        return tuple(self._accounts)

    @property
    def num_in_flight(self) -> int:
        """Batches that some stage has not finished."""
        return self.num_batches - self._num_finished

    def learn(self, data: Any, divisor: float) -> None:
        """Order one batch.

        Args:
            data: The batch; it belongs to the pipeline until it is finished.
            divisor: What the loss is divided by before its backward pass.
        """
        self._raise_failure()
        self._give(BatchOrder(self.num_batches, self.num_steps, data, divisor))
        self.num_batches += 1
        if self._serial:
            self._wait(lambda: self.num_in_flight == 0)

    def step(self, groups: tuple[dict[str, Any], ...], clip: Clip | None) -> None:
        """Order one optimizer step.

        Args:
            groups: Hyper-parameters of every group of the user's optimizer.
            clip: How each stage clips.
        """
        self._raise_failure()
        self._give(StepOrder(self.num_steps, groups, clip))
        self.num_steps += 1
        if self._serial:
            self._wait(lambda: self._steps_done == self.num_steps)

    def finished(self, wait: bool) -> list[FinishedBatch]:
        """Return the batches finished since the last call, oldest first.

        Args:
            wait: Whether to wait for one if there is none.
        """
        self._take_reports()
        if wait and self.num_in_flight:
            self._wait(lambda: bool(self._finished))
        batches = list(self._finished)
        self._finished.clear()
        return batches

    def drain(self, with_state: bool = False) -> list[DrainReport]:
        """Wait until every stage has done all orders; return what each reports, stage 0 first.

        Afterwards all stages stand at the same number of steps and the live module holds their weights.
        """
        self._raise_failure()
        self._num_drains += 1
        self._drained = []
        self._give(DrainOrder(self.num_steps, with_state, self._num_drains))
        self._wait(lambda: len(self._drained) == self.num_stages)
        return sorted(self._drained, key=lambda report: report.stage_idx)

    def fits(self, data: Any) -> bool:
        """Return whether there is room for a batch; a backend with fixed room was made for a certain size."""
        return True

    @abstractmethod
    def close(self) -> None:
        """End every stage and free what they hold; twice without harm, and in any state."""

    @abstractmethod
    def _send(self, order: Order, timeout_s: float) -> bool:
        """Give an order to stage 0; return False if there was no room for ``timeout_s``."""

    @abstractmethod
    def _receive(self, timeout_s: float) -> Report | None:
        """Return the next report, or None after ``timeout_s``; 0 does not wait."""

    def _give(self, order: Order) -> None:
        deadline = time.monotonic() + self._timeout_s
        while not self._send(order, POLL_S):
            if self._take_reports():
                deadline = time.monotonic() + self._timeout_s
            self._refuse_late(deadline)

    def _wait(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self._timeout_s
        self._take_reports()
        while not done():
            report = self._receive(POLL_S)
            if report is not None:
                self._take(report)
                deadline = time.monotonic() + self._timeout_s
            self._refuse_late(deadline)

    def _refuse_late(self, deadline: float) -> None:
        if time.monotonic() > deadline:
            waiting = sorted({r.stage_idx for reports in self._partial.values() for r in reports})
            got = f"stage_timeout_s={self._timeout_s:g} without a report at step {self.num_steps}"
            done = f"stages that reported on an unfinished batch: {waiting}"
            raise StageError(explain("a stage must report in time", f"{got} ({done})", "raise stage_timeout_s"))

    def _take_reports(self) -> bool:
        """Take every report that is there; return whether there was one."""
        taken = False
        while (report := self._receive(0)) is not None:
            self._take(report)
            taken = True
        return taken

    def _take(self, report: Report) -> None:
        if isinstance(report, FailureReport):
            self._failure = self._failure or _as_error(report)
            self.close()  # Lightning skips the teardown where a callback meets the failure again
            self._raise_failure()
        elif isinstance(report, StepReport):
            self._steps_done = report.step_idx + 1
        elif isinstance(report, DrainReport):
            self._accounts[report.stage_idx] = report.account
            if report.drain_idx == self._num_drains:  # not of one that was interrupted
                self._drained.append(report)
        else:
            self._accounts[report.stage_idx] = report.account
            reports = self._partial.setdefault(report.batch_idx, [])
            reports.append(report)
            if len(reports) == self.num_stages:
                stages = sorted(self._partial.pop(report.batch_idx), key=lambda report: report.stage_idx)
                self._finished.append(FinishedBatch(report.batch_idx, tuple(stages)))
                self._num_finished += 1

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def _as_error(report: FailureReport) -> StageError | MisconfigurationException:
    cause = report.cause
    if isinstance(cause, MisconfigurationException):
        return cause
    error = StageError(f"stage {report.stage_idx} failed at step {report.step_idx}: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error
