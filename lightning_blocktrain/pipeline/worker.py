"""What a stage does with each order, whatever carries the orders.

Owns the sequence of a stage's work (the protocol of the methods) and the ``Links`` that a backend must offer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from torch import Tensor

from lightning_blocktrain.pipeline.account import StageClock
from lightning_blocktrain.pipeline.orders import (
    BatchOrder,
    BatchReport,
    DrainOrder,
    DrainReport,
    FailureReport,
    Order,
    Report,
    StepOrder,
    StepReport,
)
from lightning_blocktrain.pipeline.readout import pinned_version
from lightning_blocktrain.pipeline.stage import Stage

Lag = Literal["newest", "pinned"]


class Stopped(Exception):
    """The pipeline is being taken down; a stage that waits for something gives up with this."""


class StageFailed(Exception):
    """A stage could not carry out an order.

    Args:
        report: What the driver is told.
    """

    def __init__(self, report: FailureReport) -> None:
        super().__init__(report)
        self.report = report


class Links(Protocol):
    """A stage's connections. Every call may wait, and raises ``Stopped`` once the pipeline is being taken down.

    Each keeps its waiting and its copying in the sections of the clock it was built with.
    """

    def receive(self) -> Order:
        """Return the next order from the stage before (or the driver)."""
        ...

    def send(self, order: Order) -> None:
        """Pass an order to the next stage; the final stage has none and never calls it."""
        ...

    def report(self, report: Report) -> None:
        """Tell the driver; never waits."""
        ...

    def publish_snapshot(self, version: int, tensors: Sequence[Tensor]) -> None:
        """Offer the readout after ``version`` steps to the stages upstream; copies."""
        ...

    def read_snapshot(self, version: int | None, into: Sequence[Tensor]) -> int:
        """Copy a snapshot into ``into`` and return its version; None: the newest, else wait for that one."""
        ...

    def send_gradients(self, step_idx: int, gradients: Sequence[Tensor]) -> None:
        """Send readout gradients of a step to the final stage, which owns them afterwards."""
        ...

    def receive_gradients(self, stage_idx: int, step_idx: int) -> list[Tensor]:
        """Return the readout gradients of another stage; refuse those of another step."""
        ...


@dataclass(frozen=True)
class Pace:
    """When a stage may go on.

    Args:
        serial: One stage at a time: an order is passed on when the stage has done its own part.
        lag: Which snapshot upstream stages read: the newest, or the one of their natural lag.
        snapshot_every: Readout steps between two snapshots.
    """

    serial: bool = False
    lag: Lag = "newest"
    snapshot_every: int = 1


def num_snapshots_kept(stages: Sequence[Stage], pace: Pace) -> int:
    """Return how many snapshots must stay readable: none if no stage reads one, and more than one for pinned lags."""
    if not any(stage.reads_snapshot for stage in stages):
        return 0
    return len(stages) if pace.lag == "pinned" else 1


class StageWorker:
    """Carries out orders on one stage; lives in the stage's thread.

    Args:
        stage: The stage.
        links: Its connections.
        clock: The clock that ``links`` keeps too.
        pace: When it may go on.
        first_step: Optimizer steps before the first order.
    """

    def __init__(self, stage: Stage, links: Links, clock: StageClock, pace: Pace, first_step: int) -> None:
        self._stage, self._links, self._clock, self._pace = stage, links, clock, pace
        self._step_idx = self._drained_at = first_step

    def run(self) -> None:
        """Carry out orders until the pipeline is taken down; report the failure that ends it early."""
        try:
            while True:
                self.handle(self._links.receive())
        except Stopped:
            return
        except StageFailed as exc:
            self._links.report(exc.report)
        except BaseException as exc:  # in a connection, or an exit in the user's code
            self._links.report(FailureReport(self._stage.stage_idx, self._step_idx, exc))

    def handle(self, order: Order) -> None:
        """Carry out one order and pass it on.

        Raises:
            StageFailed: With the first cause, of this stage or (where stages take turns) of one after it.
        """
        self._step_idx = order.step_idx
        try:
            with self._clock.section("busy"):
                self._carry_out(order)
        except (Stopped, StageFailed):
            raise
        except Exception as exc:
            raise StageFailed(FailureReport(self._stage.stage_idx, order.step_idx, exc)) from exc

    def _carry_out(self, order: Order) -> None:
        if isinstance(order, BatchOrder):
            self._learn(order)
        elif isinstance(order, StepOrder):
            self._step(order)
        else:
            self._drain(order)

    def _learn(self, order: BatchOrder) -> None:
        stage, clock = self._stage, self._clock
        lag = order.step_idx - self._read_snapshot(order.step_idx)
        with stage.drawing():
            hidden = stage.forward(order.data, order.hidden)
        onward = replace(order, hidden=hidden.detach())
        if not self._pace.serial:
            self._pass_on(onward)
        with stage.drawing():
            loss, extras = stage.learn(order.data, hidden, order.divisor)
        clock.count(batches=1)
        self._links.report(BatchReport(stage.stage_idx, order.batch_idx, loss, extras, lag, clock.read()))
        if self._pace.serial:
            del hidden  # its graph is not needed while the next stages work
            self._pass_on(onward)

    def _read_snapshot(self, step_idx: int) -> int:
        stage = self._stage
        if not stage.reads_snapshot:
            return step_idx
        version = None
        if self._pace.lag == "pinned":
            version = pinned_version(step_idx, self._drained_at, stage.stage_idx, stage.num_stages)
        return self._links.read_snapshot(version, stage.snapshot)

    def _step(self, order: StepOrder) -> None:
        stage, clock, links = self._stage, self._clock, self._links
        if not self._pace.serial:
            self._pass_on(order)
        if stage.publishes:
            links.send_gradients(order.step_idx, stage.take_readout_gradients())
        members = range(len(stage.weights or ()) - 1)
        upstream = [links.receive_gradients(stage_idx, order.step_idx) for stage_idx in members]
        with clock.section("optimizer"):
            if stage.weights is not None:
                stage.agree(upstream)
            stage.step(order)
        clock.count(steps=1)
        if stage.is_final:
            if (order.step_idx + 1) % self._pace.snapshot_every == 0:
                links.publish_snapshot(order.step_idx + 1, stage.snapshot)
            links.report(StepReport(order.step_idx))
        if self._pace.serial:
            self._pass_on(order)

    def _drain(self, order: DrainOrder) -> None:
        stage = self._stage
        if stage.is_final:
            self._links.publish_snapshot(order.step_idx, stage.snapshot)
        self._drained_at = order.step_idx
        state = stage.optimizer_state() if order.with_state else None
        random_state = stage.random_state() if order.with_state else None
        self._links.report(DrainReport(stage.stage_idx, order.drain_idx, self._clock.read(), state, random_state))
        self._pass_on(order)

    def _pass_on(self, order: Order) -> None:
        if not self._stage.is_final:
            self._links.send(order)
