"""Stages in the Trainer's own process: one thread each, or in turn in the driver's thread.

Owns mailboxes and threads. Nothing is copied between stages: tensors travel by reference, and every parameter is
shared in place. ATen releases the GIL while it computes, and a backward pass on a CPU runs in the thread that calls
it, with that thread's own OpenMP team, so stages do run at the same time.

What bounds the memory: at most ``ring_slots`` orders wait in front of each stage.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_blocktrain.pipeline.account import StageClock
from lightning_blocktrain.pipeline.base import CLOSE_TIMEOUT_S, POLL_S, Pipeline
from lightning_blocktrain.pipeline.orders import Order, Report
from lightning_blocktrain.pipeline.stage import Stage
from lightning_blocktrain.pipeline.worker import (
    Pace,
    StageFailed,
    StageWorker,
    Stopped,
    credit_of,
    num_snapshots_kept,
)

T = TypeVar("T")


class Mailbox(Generic[T]):
    """A first-in first-out queue of at most ``capacity`` items between two threads.

    Args:
        capacity: Items it holds; None: any number.
        stop: Set when the pipeline is taken down.
    """

    def __init__(self, capacity: int | None, stop: threading.Event) -> None:
        self._capacity, self._stop = capacity, stop
        self._items: deque[T] = deque()
        self._changed = threading.Condition()

    def put(self, item: T, timeout_s: float | None = None) -> bool:
        """Add an item once there is room; return False after ``timeout_s`` without (None: never).

        Raises:
            Stopped: If the pipeline is taken down meanwhile.
        """
        with self._changed:
            if not self._wait(lambda: self._capacity is None or len(self._items) < self._capacity, timeout_s):
                return False
            self._items.append(item)
            self._changed.notify_all()
            return True

    def get(self, timeout_s: float | None = None) -> T | None:
        """Return the oldest item; None after ``timeout_s`` without one.

        Raises:
            Stopped: If the pipeline is taken down meanwhile.
        """
        with self._changed:
            if not self._wait(lambda: bool(self._items), timeout_s):
                return None
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    def _wait(self, ready: Callable[[], bool], timeout_s: float | None) -> bool:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            if self._stop.is_set():  # before what is there: a stage ends after the pass it is in
                raise Stopped
            if ready():
                return True
            if deadline is not None and time.monotonic() >= deadline:
                return False
            left_s = POLL_S if deadline is None else min(POLL_S, deadline - time.monotonic())
            self._changed.wait(max(0.0, left_s))


class SnapshotBoard:
    """The newest snapshots of the readout, oldest first; versions ascend.

    Args:
        num_kept: Snapshots that stay readable; 0: nobody reads one.
        stop: Set when the pipeline is taken down.
    """

    def __init__(self, num_kept: int, stop: threading.Event) -> None:
        self._snapshots: deque[tuple[int, list[Tensor]]] = deque(maxlen=num_kept)
        self._stop = stop
        self._changed = threading.Condition()

    def publish(self, version: int, tensors: Sequence[Tensor]) -> None:
        """Store copies of the readout's tensors."""
        if not self._snapshots.maxlen:
            return
        copies = [tensor.detach().clone() for tensor in tensors]
        with self._changed:
            self._snapshots.append((version, copies))
            self._changed.notify_all()

    def read(self, version: int | None) -> tuple[int, list[Tensor]]:
        """Return a snapshot, which nobody changes; None: the newest, else wait for that version.

        Raises:
            Stopped: If the pipeline is taken down meanwhile.
        """
        with self._changed:
            while True:
                for number, tensors in reversed(self._snapshots):
                    if version is None or number == version:
                        return number, tensors
                if self._stop.is_set():
                    raise Stopped
                self._changed.wait(POLL_S)


class Exchange:
    """Everything that stages in one process meet at.

    Args:
        num_stages: S.
        ring_slots: Orders that may wait in front of a stage.
        num_kept: Snapshots that stay readable.
    """

    def __init__(self, num_stages: int, ring_slots: int, num_kept: int = 1) -> None:
        self.stop = threading.Event()
        self.orders: list[Mailbox[Order]] = [Mailbox(ring_slots, self.stop) for _ in range(num_stages)]
        # As many steps as stage 0 can be ahead of the final one.
        self.gradients: list[Mailbox[tuple[int, list[Tensor | None]]]] = [
            Mailbox(None, self.stop) for _ in range(num_stages)
        ]
        self.credits: list[Mailbox[tuple[int, Tensor]]] = [Mailbox(None, self.stop) for _ in range(num_stages)]
        self.reports: Mailbox[Report] = Mailbox(None, threading.Event())  # readable after a failure too
        self.board = SnapshotBoard(num_kept, self.stop)


class ThreadLinks:
    """One stage's end of the exchange.

    Args:
        exchange: What all stages share.
        stage_idx: The stage.
        clock: The stage's clock.
        following: The next stage's worker where stages take turns in one thread; None: orders go to its mailbox.
    """

    def __init__(
        self, exchange: Exchange, stage_idx: int, clock: StageClock, following: StageWorker | None = None
    ) -> None:
        self._exchange, self._stage_idx, self._clock, self._following = exchange, stage_idx, clock, following

    def receive(self) -> Order:
        """Return the next order."""
        with self._clock.section("wait_in"):
            order = self._exchange.orders[self._stage_idx].get()
            assert order is not None
            return order

    def send(self, order: Order) -> None:
        """Pass an order to the next stage; where stages take turns, it carries it out first."""
        with self._clock.section("wait_out"):
            if self._following is not None:
                self._following.handle(order)
            else:
                self._exchange.orders[self._stage_idx + 1].put(order)

    def report(self, report: Report) -> None:
        """Tell the driver."""
        with self._clock.section("copy"):
            self._exchange.reports.put(report)

    def publish_snapshot(self, version: int, tensors: Sequence[Tensor]) -> None:
        """Offer copies of the readout's tensors."""
        with self._clock.section("copy"):
            self._exchange.board.publish(version, tensors)

    def read_snapshot(self, version: int | None, into: Sequence[Tensor]) -> int:
        """Copy a snapshot into the stage's own readout."""
        with self._clock.section("wait_in"):
            number, tensors = self._exchange.board.read(version)
        with self._clock.section("copy"), torch.no_grad():
            for mine, tensor in zip(into, tensors, strict=True):
                mine.copy_(tensor)
        return number

    def send_gradients(self, step_idx: int, gradients: Sequence[Tensor | None]) -> None:
        """Hand readout gradients over."""
        self._exchange.gradients[self._stage_idx].put((step_idx, list(gradients)))

    def receive_gradients(self, stage_idx: int, step_idx: int) -> list[Tensor | None]:
        """Return another stage's readout gradients of the same step."""
        with self._clock.section("wait_in"):
            found = self._exchange.gradients[stage_idx].get()
        assert found is not None
        if found[0] != step_idx:
            raise RuntimeError(f"the gradients of stage {stage_idx} are those of step {found[0]}, not {step_idx}")
        return found[1]

    def send_credit(self, batch_idx: int, credit: Tensor) -> None:
        """Hand the gradient for its hidden state to the stage before."""
        self._exchange.credits[self._stage_idx - 1].put((batch_idx, credit))

    def receive_credit(self, batch_idx: int) -> Tensor:
        """Return the next stage's gradient for what this one passed on."""
        with self._clock.section("wait_in"):
            found = self._exchange.credits[self._stage_idx].get()
        assert found is not None
        return credit_of(found, batch_idx)


class TurnsPipeline(Pipeline):
    """Stages that take turns in the driver's own thread: serial, and easy to step through with a debugger.

    Args:
        stages: The stages.
        pace: When they may go on; must be serial.
        first_step: Optimizer steps before the first order.
        timeout_s: Longest wait without any report.
        num_threads: Size of the OpenMP team while it works; None: as it is.
    """

    def __init__(
        self, stages: Sequence[Stage], pace: Pace, first_step: int, timeout_s: float, num_threads: int | None
    ) -> None:
        super().__init__(len(stages), first_step, True, timeout_s)
        self._num_threads = num_threads or torch.get_num_threads()
        self._exchange = Exchange(len(stages), 1, num_snapshots_kept(stages, pace))
        self._exchange.board.publish(first_step, stages[-1].snapshot)
        self._workers: list[StageWorker] = []
        for stage in reversed(stages):
            clock = StageClock()
            following = self._workers[0] if self._workers else None
            links = ThreadLinks(self._exchange, stage.stage_idx, clock, following)
            self._workers.insert(0, StageWorker(stage, links, clock, pace, first_step))

    @override
    def _send(self, order: Order, timeout_s: float) -> bool:
        outside = torch.get_num_threads()
        torch.set_num_threads(self._num_threads)
        try:
            self._workers[0].handle(order)
        except StageFailed as exc:
            self._exchange.reports.put(exc.report)
        finally:
            torch.set_num_threads(outside)
        return True

    @override
    def _receive(self, timeout_s: float) -> Report | None:
        return self._exchange.reports.get(0)

    @override
    def close(self) -> None:
        """Let go of the stages."""
        self._exchange.stop.set()
        self._workers = []


class ThreadPipeline(Pipeline):
    """Stages that run at the same time, one thread each.

    Args:
        stages: The stages.
        pace: When they may go on.
        first_step: Optimizer steps before the first order.
        timeout_s: Longest wait without any report.
        ring_slots: Orders that may wait in front of a stage.
        threads_per_stage: Size of each stage's OpenMP team.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        pace: Pace,
        first_step: int,
        timeout_s: float,
        ring_slots: int,
        threads_per_stage: int,
    ) -> None:
        super().__init__(len(stages), first_step, pace.serial, timeout_s)
        self._exchange = Exchange(len(stages), ring_slots, num_snapshots_kept(stages, pace))
        self._exchange.board.publish(first_step, stages[-1].snapshot)
        self._threads = [
            threading.Thread(
                target=_run_stage,
                args=(stage, self._exchange, pace, first_step, threads_per_stage),
                name=f"stage-{stage.stage_idx}",
                daemon=True,  # an interpreter that ends does not wait for a stage that hangs
            )
            for stage in stages
        ]
        for thread in self._threads:
            thread.start()

    @override
    def _send(self, order: Order, timeout_s: float) -> bool:
        return self._exchange.orders[0].put(order, timeout_s)

    @override
    def _receive(self, timeout_s: float) -> Report | None:
        return self._exchange.reports.get(timeout_s)

    @override
    def close(self) -> None:
        """End the threads: each finishes the pass it is in."""
        self._exchange.stop.set()
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._threads = []


def _run_stage(stage: Stage, exchange: Exchange, pace: Pace, first_step: int, num_threads: int) -> None:
    torch.set_num_threads(num_threads)  # for this thread alone, and before its first parallel region
    clock = StageClock()
    StageWorker(stage, ThreadLinks(exchange, stage.stage_idx, clock), clock, pace, first_step).run()
