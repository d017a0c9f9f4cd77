"""What a stage does with each order, whatever carries the orders.

Owns the sequence of a stage's work (the protocol of the methods) and the ``Links`` that a backend must offer.

Under ``credit="next_stage"`` a batch is finished when the gradient of the next stage's loss has come back. Stages that
overlap learn from the next batch meanwhile: a batch is finished, and a step taken, after the forward pass of the batch
that follows. The delay is one batch, in every stage but the final one.
"""

from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from torch import Tensor

from lightning_blocktrain.pipeline.account import StageClock
from lightning_blocktrain.pipeline.credit import OpenBatch, WeightStash, credit_for
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

    def send_gradients(self, step_idx: int, gradients: Sequence[Tensor | None]) -> None:
        """Send readout gradients of a step to the final stage, which owns them afterwards."""
        ...

    def receive_gradients(self, stage_idx: int, step_idx: int) -> list[Tensor | None]:
        """Return the readout gradients of another stage; refuse those of another step."""
        ...

    def send_credit(self, batch_idx: int, credit: Tensor) -> None:
        """Send the gradient of the own loss for what the stage before passed on; that stage owns it afterwards."""
        ...

    def receive_credit(self, batch_idx: int) -> Tensor:
        """Return the next stage's gradient for what this one passed on, (B, T, D); refuse that of another batch."""
        ...


@dataclass(frozen=True)
class Pace:
    """When a stage may go on.

    Args:
        serial: One stage at a time: an order is passed on when the stage has done its own part.
        lag: Which snapshot upstream stages read: the newest, or the one of their natural lag; serial stages then wait
            one batch for credit too, as stages that overlap do.
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


def credit_of(message: tuple[int, Tensor], batch_idx: int) -> Tensor:
    """Return the credit in a message.

    Raises:
        RuntimeError: If it is that of another batch.
    """
    found, credit = message
    if found != batch_idx:
        raise RuntimeError(f"the credit is that of batch {found}, not {batch_idx}")
    return credit


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
        self._delays = stage.awaits_credit and (not pace.serial or pace.lag == "pinned")
        self._open: deque[OpenBatch | StepOrder] = deque()  # what waits for credit, and the steps behind it

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
        received = order.hidden
        if received is not None and stage.gives_credit:
            received = received.detach().requires_grad_()
        stash = WeightStash(stage.stepped) if self._delays else None
        with stage.drawing(), stash.saving() if stash is not None else nullcontext():
            hidden = stage.forward(order.data, received)
        onward = replace(order, hidden=hidden.detach())
        if not self._pace.serial:
            self._pass_on(onward)
        with stage.drawing():
            if stage.awaits_credit:
                loss, extras, batch = stage.judge(order, hidden, stash)
                self._open.append(batch)
            else:
                loss, extras = stage.learn(order.data, hidden, order.divisor)
                batch = None
        if received is not None and stage.gives_credit:
            self._links.send_credit(order.batch_idx, credit_for(received, batch))
        del hidden, batch  # its graph is not needed while the next stages work, unless it waits for credit
        if self._delays:
            self._settle(num_left=1)
        clock.count(batches=1)
        self._links.report(BatchReport(stage.stage_idx, order.batch_idx, loss, extras, lag, clock.read()))
        if self._pace.serial:
            self._pass_on(onward)
            if not self._delays:
                self._settle()

    def _settle(self, num_left: int = 0) -> None:
        """Finish what waits, oldest first, but for the newest ``num_left``."""
        while len(self._open) > num_left:
            oldest = self._open.popleft()
            if isinstance(oldest, StepOrder):
                for later in self._open:
                    if isinstance(later, OpenBatch) and later.stash is not None:
                        later.stash.keep()
                self._take_step(oldest)
            else:
                self._stage.finish(oldest, self._links.receive_credit(oldest.batch_idx))

    def _read_snapshot(self, step_idx: int) -> int:
        stage = self._stage
        if not stage.reads_snapshot:
            return step_idx
        version = None
        if self._pace.lag == "pinned":
            version = pinned_version(step_idx, self._drained_at, stage.stage_idx, stage.num_stages)
        return self._links.read_snapshot(version, stage.snapshot)

    def _step(self, order: StepOrder) -> None:
        if not self._pace.serial:
            self._pass_on(order)
        if self._stage.publishes:
            self._links.send_gradients(order.step_idx, self._stage.take_readout_gradients())
        self._open.append(order)
        if not self._delays:
            self._settle()
        if self._pace.serial:
            self._pass_on(order)

    def _take_step(self, order: StepOrder) -> None:
        stage, clock, links = self._stage, self._clock, self._links
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

    def _drain(self, order: DrainOrder) -> None:
        stage = self._stage
        self._settle()
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
