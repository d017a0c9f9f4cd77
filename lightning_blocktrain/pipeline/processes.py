"""Stages as processes of their own, for modules whose Python code would hold the GIL.

Owns the processes and their links. Parameters and buffers lie in shared memory, where every stage and the live module
see the same bytes; hidden states and gradients travel through rings (``ring``).

Memory map of a run, all of it anonymous shared memory that ends with the last process that maps it:

| what | size | writers | readers |
|---|---|---|---|
| parameters and buffers | the model | the stage that owns each | all |
| orders, one ring per stage | ``ring_slots`` x (batch + hidden state) | driver or stage s - 1 | stage s |
| readout gradients, one ring per upstream stage | steps in flight x readout | stage s | final stage |
| credit, one ring per stage but the first | 2 x hidden state | stage s + 1 | stage s |
| snapshots | readout; S x readout for pinned lags | final stage | upstream stages, under one lock |

Stages are forked from a server process that has imported torch and frozen its heap, so that they share what the
import costs.
"""

import multiprocessing
import multiprocessing.forkserver
import pickle
import signal
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from multiprocessing.connection import Connection, wait
from typing import Any

import psutil
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from typing_extensions import override

from lightning_blocktrain.errors import explain
from lightning_blocktrain.pipeline.account import StageClock
from lightning_blocktrain.pipeline.base import CLOSE_TIMEOUT_S, POLL_S, Pipeline
from lightning_blocktrain.pipeline.orders import (
    BatchOrder,
    DrainOrder,
    DrainReport,
    FailureReport,
    Order,
    Report,
    StepOrder,
)
from lightning_blocktrain.pipeline.ring import RingReader, RingWriter, StopFlag, make_ring, pack, payload_bytes
from lightning_blocktrain.pipeline.stage import Stage
from lightning_blocktrain.pipeline.worker import Pace, StageWorker, Stopped, credit_of, num_snapshots_kept

ORDERS = {kind.__name__: kind for kind in (BatchOrder, StepOrder, DrainOrder)}


class SharedBoard:
    """Snapshots of the readout in shared memory.

    Args:
        context: The multiprocessing context.
        num_kept: Snapshots that stay readable, at least 1.
        like: Tensors of the readout.
        stop: Set when the pipeline is taken down.
    """

    def __init__(self, context: Any, num_kept: int, like: Sequence[Tensor], stop: Any) -> None:
        self._slots = pack([list(like) for _ in range(num_kept)])
        self._versions = pack(torch.full((num_kept,), -1, dtype=torch.int64))
        self._changed, self._stop = context.Condition(), stop

    def publish(self, version: int, tensors: Sequence[Tensor]) -> None:
        """Copy the readout's tensors over the oldest snapshot."""
        with self._changed:
            slot_idx = int(self._versions.argmin())
            for stored, tensor in zip(self._slots[slot_idx], tensors, strict=True):
                stored.copy_(tensor.detach())
            self._versions[slot_idx] = version
            self._changed.notify_all()

    def read(self, version: int | None, into: Sequence[Tensor]) -> int:
        """Copy a snapshot into ``into`` and return its version; None: the newest, else wait for that one.

        Raises:
            Stopped: If the pipeline is taken down meanwhile.
        """
        with self._changed:
            while True:
                newest = int(self._versions.max())
                wanted = newest if version is None else version
                if wanted in self._versions.tolist():
                    slot_idx = self._versions.tolist().index(wanted)
                    with torch.no_grad():
                        for mine, stored in zip(into, self._slots[slot_idx], strict=True):
                            mine.copy_(stored)
                    return wanted
                if self._stop.is_set():
                    raise Stopped
                self._changed.wait(POLL_S)


@dataclass(frozen=True)
class Ends:
    """The ends of the rings and pipes that one stage holds.

    Args:
        inbox: Orders from the stage before.
        outbox: Orders to the next stage; None for the final one.
        gradients_out: Readout gradients to the final stage; None in it.
        gradients_in: Those of the upstream stages, in the final one.
        board: The snapshots.
        reports: Pipe to the driver.
        credit_out: Credit to the stage before; None if it awaits none.
        credit_in: Credit from the next stage; None if this one awaits none.
    """

    inbox: RingReader
    outbox: RingWriter | None
    gradients_out: RingWriter | None
    gradients_in: tuple[RingReader, ...]
    board: SharedBoard
    reports: Connection
    credit_out: RingWriter | None = None
    credit_in: RingReader | None = None

    def close(self) -> None:
        """Close this process's copies."""
        ends: list[Any] = [self.inbox, self.outbox, self.gradients_out, *self.gradients_in, self.reports]
        ends += [self.credit_out, self.credit_in]
        for end in ends:
            if end is not None:
                end.close()


class ProcessLinks:
    """One stage's connections to the other processes.

    Args:
        ends: What the stage holds.
        clock: The stage's clock.
    """

    def __init__(self, ends: Ends, clock: StageClock) -> None:
        self._ends, self._clock = ends, clock

    def receive(self) -> Order:
        """Return the next order, copied out of its slot."""
        with self._clock.section("wait_in"):
            self._ends.inbox.wait()
        with self._clock.section("copy"):
            return _order(self._ends.inbox.read())

    def send(self, order: Order) -> None:
        """Copy an order into the next stage's ring."""
        outbox = self._ends.outbox
        assert outbox is not None
        with self._clock.section("wait_out"):
            outbox.wait()
        with self._clock.section("copy"):
            outbox.write(_message(order))

    def report(self, report: Report) -> None:
        """Tell the driver."""
        if isinstance(report, FailureReport):
            report = replace(report, cause=_portable(report.cause))
        elif isinstance(report, DrainReport) and report.optimizer_state is not None:
            report = replace(report, optimizer_state=pack(report.optimizer_state))
        with self._clock.section("copy"):
            self._ends.reports.send(report)

    def publish_snapshot(self, version: int, tensors: Sequence[Tensor]) -> None:
        """Copy the readout into shared memory."""
        with self._clock.section("copy"):
            self._ends.board.publish(version, tensors)

    def read_snapshot(self, version: int | None, into: Sequence[Tensor]) -> int:
        """Copy a snapshot into the stage's own readout."""
        with self._clock.section("wait_in" if version is not None else "copy"):
            return self._ends.board.read(version, into)

    def send_gradients(self, step_idx: int, gradients: Sequence[Tensor | None]) -> None:
        """Copy readout gradients into the ring to the final stage."""
        ring = self._ends.gradients_out
        assert ring is not None
        with self._clock.section("wait_out"):
            ring.wait()
        with self._clock.section("copy"):
            ring.write((step_idx, list(gradients)))

    def receive_gradients(self, stage_idx: int, step_idx: int) -> list[Tensor | None]:
        """Return another stage's readout gradients of the same step."""
        ring = self._ends.gradients_in[stage_idx]
        with self._clock.section("wait_in"):
            ring.wait()
        with self._clock.section("copy"):
            found, gradients = ring.read()
        if found != step_idx:
            raise RuntimeError(f"the gradients of stage {stage_idx} are those of step {found}, not {step_idx}")
        return list(gradients)

    def send_credit(self, batch_idx: int, credit: Tensor) -> None:
        """Copy the gradient for its hidden state into the ring to the stage before."""
        ring = self._ends.credit_out
        assert ring is not None
        with self._clock.section("wait_out"):
            ring.wait()
        with self._clock.section("copy"):
            ring.write((batch_idx, credit))

    def receive_credit(self, batch_idx: int) -> Tensor:
        """Return the next stage's gradient for what this one passed on."""
        ring = self._ends.credit_in
        assert ring is not None
        with self._clock.section("wait_in"):
            ring.wait()
        with self._clock.section("copy"):
            return credit_of(ring.read(), batch_idx)


class ProcessPipeline(Pipeline):
    """Stages that run at the same time, one process each.

    Args:
        stages: The stages, of a module whose parameters and buffers lie in shared memory (``share``).
        pace: When they may go on.
        first_step: Optimizer steps before the first order.
        timeout_s: Longest wait without any report.
        ring_slots: Orders that may wait in front of a stage.
        threads_per_stage: Size of each stage's OpenMP team.
        batch_bytes: Bytes of the largest batch.
        hidden_bytes: Bytes of the largest hidden state.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        pace: Pace,
        first_step: int,
        timeout_s: float,
        ring_slots: int,
        threads_per_stage: int,
        batch_bytes: int,
        hidden_bytes: int,
    ) -> None:
        super().__init__(len(stages), first_step, pace.serial, timeout_s)
        context = multiprocessing.get_context("forkserver")
        self._owns_server = _start_server(context)
        self._stop = StopFlag()
        self._batch_bytes = batch_bytes
        self._processes: list[Any] = []
        self._first: RingWriter | None = None
        self._first, ends, self._reports = self._connect(context, stages, pace, ring_slots, batch_bytes, hidden_bytes)
        self._ends = ends  # a semaphore's name lasts as long as the object in the process that made it
        try:
            ends[0].board.publish(first_step, stages[-1].snapshot)
            for stage, held in zip(stages, ends, strict=True):
                self._processes.append(_start_stage(context, stage, held, pace, first_step, threads_per_stage))
        except BaseException:
            self.close()
            raise
        finally:
            for held in ends:  # the stages alone keep theirs: one that dies ends the pipes that lead to and from it
                held.close()

    def _connect(
        self,
        context: Any,
        stages: Sequence[Stage],
        pace: Pace,
        ring_slots: int,
        batch_bytes: int,
        hidden_bytes: int,
    ) -> tuple[RingWriter, list[Ends], list[Connection]]:
        """Return the driver's end of the orders, every stage's ends, and the driver's ends of the reports."""
        readout = stages[-1].snapshot
        board = SharedBoard(context, max(1, num_snapshots_kept(stages, pace)), readout, self._stop)
        orders = [make_ring(context, ring_slots, batch_bytes + hidden_bytes, self._stop) for _ in stages]
        # At most every other order on its way from a stage to the final one is a step.
        steps_ahead = [(distance * (ring_slots + 1) + 1) // 2 for distance in range(len(stages) - 1, 0, -1)]
        gradients = [make_ring(context, num, payload_bytes(readout), self._stop) for num in steps_ahead]
        # A stage passes on one batch more before it takes the credit of the one before.
        credit = {s.stage_idx: make_ring(context, 2, hidden_bytes, self._stop) for s in stages if s.awaits_credit}
        ends, reports = [], []
        for stage in stages:
            reader, writer = context.Pipe(duplex=False)
            idx = stage.stage_idx
            outbox, gradients_out = (None, None) if stage.is_final else (orders[idx + 1][0], gradients[idx][0])
            gradients_in = tuple(reader for _, reader in gradients) if stage.is_final else ()
            credit_out = credit[idx - 1][0] if stage.gives_credit else None
            credit_in = credit[idx][1] if stage.awaits_credit else None
            ends.append(Ends(orders[idx][1], outbox, gradients_out, gradients_in, board, writer, credit_out, credit_in))
            reports.append(reader)
        return orders[0][0], ends, reports

    @override
    def fits(self, data: Any) -> bool:
        """Return whether the rings have room for a batch."""
        return payload_bytes(data) <= self._batch_bytes

    @override
    def _send(self, order: Order, timeout_s: float) -> bool:
        assert self._first is not None
        try:
            if not self._first.wait(timeout_s):
                return False
            self._first.write(_message(order))
        except Stopped:  # stage 0 is gone; why, its report or its exit code says
            return False
        return True

    @override
    def _receive(self, timeout_s: float) -> Report | None:
        sentinels = [process.sentinel for process in self._processes]
        ready = wait([*self._reports, *sentinels], timeout_s)
        for reader in self._reports:
            if reader in ready:
                try:
                    report: Report = reader.recv()
                except (EOFError, OSError):
                    continue
                return report
        if not any(sentinel in ready for sentinel in sentinels):
            return None
        # A stage that loses its neighbour ends too, with exit code 0, and may be seen first: the cause is another.
        if all(process.exitcode in (None, 0) for process in self._processes):
            wait([s for s, process in zip(sentinels, self._processes, strict=True) if process.is_alive()], POLL_S)
        dead = [idx for idx, process in enumerate(self._processes) if not process.is_alive()]
        dead.sort(key=lambda idx: self._processes[idx].exitcode == 0)
        process = self._processes[dead[0]]
        text = f"its process {process.pid} ended with exit code {process.exitcode}"
        if not any(account.wall_s for account in self._accounts):  # no stage has got as far as a report
            text += "; its traceback is above; a script needs if __name__ == '__main__': and must be a file"
        cause = RuntimeError(text)
        return FailureReport(dead[0], self.num_steps, cause)

    @override
    def close(self) -> None:
        """End the processes: first by asking, then by killing."""
        self._stop.set()
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        for end in (self._first, *self._reports):
            if end is not None:
                end.close()
        self._processes, self._reports, self._ends, self._first = [], [], [], None
        if self._owns_server:
            _stop_server()
            self._owns_server = False


def share(module: nn.Module) -> None:
    """Move the parameters and buffers of ``module`` into one piece of shared memory."""
    tensors = _tensors(module)
    for tensor, shared in zip(tensors, pack([tensor.data for tensor in tensors]), strict=True):
        tensor.data = shared


def unshare(module: nn.Module) -> None:
    """Move the parameters and buffers of ``module`` back into memory of its own."""
    for tensor in _tensors(module):
        tensor.data = tensor.data.clone()


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _start_server(context: Any) -> bool:
    """Have the fork server import torch before it forks; return whether it is ours to stop."""
    server = multiprocessing.forkserver._forkserver
    if getattr(server, "_forkserver_pid", None) is not None:
        return False
    context.set_forkserver_preload(["lightning_blocktrain.pipeline.preload"])
    return True


def _stop_server() -> None:
    """Stop the fork server, unless it has others' children: they would count as dead from then on."""
    server: Any = multiprocessing.forkserver._forkserver
    if server._forkserver_pid is None:
        return
    with suppress(psutil.NoSuchProcess):
        if psutil.Process(server._forkserver_pid).children():
            return
    server._stop()


def _start_stage(
    context: Any, stage: Stage, ends: Ends, pace: Pace, first_step: int, num_threads: int
) -> multiprocessing.Process:
    state = stage.optimizer.state
    state.update(zip(list(state), pack(list(state.values())), strict=True))  # together: a process takes few descriptors
    process: multiprocessing.Process = context.Process(
        target=_run_stage,
        args=(stage, ends, pace, first_step, num_threads),
        name=f"stage-{stage.stage_idx}",
        daemon=True,
    )
    try:
        process.start()
    except (pickle.PicklingError, AttributeError, TypeError) as exc:
        rule = "backend='processes' pickles the module and its optimizer"
        fix = "define classes and functions at the top of a file, or use backend='threads'"
        raise MisconfigurationException(explain(rule, str(exc), fix)) from exc
    return process


def _run_stage(stage: Stage, ends: Ends, pace: Pace, first_step: int, num_threads: int) -> None:
    torch.set_num_threads(num_threads)  # before any parallel region
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver is interrupted too, and takes the pipeline down
    clock = StageClock()
    StageWorker(stage, ProcessLinks(ends, clock), clock, pace, first_step).run()


def _message(order: Order) -> tuple[str, dict[str, Any]]:
    return type(order).__name__, {field.name: getattr(order, field.name) for field in fields(order)}


def _order(message: tuple[str, dict[str, Any]]) -> Order:
    kind, values = message
    order: Order = ORDERS[kind](**values)
    return order


def _portable(cause: BaseException) -> BaseException:
    """Return an error with the same text whose class every process can build, and the traceback as a note."""
    portable: BaseException = RuntimeError(f"{type(cause).__name__}: {cause}")
    known = type(cause).__module__.partition(".")[0] in ("builtins", "lightning", "lightning_blocktrain")
    if known and isinstance(cause, Exception):
        with suppress(TypeError):  # some take more than a text
            same = type(cause)(str(cause))
            portable = same if str(same) == str(cause) else portable  # a KeyError quotes its text again
    portable.add_note("".join(traceback.format_exception(cause)))
    return portable
