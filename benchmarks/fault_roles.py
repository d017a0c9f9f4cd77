"""What the processes of the fault harness do: a worker, a coordinator, and the undisturbed run in a simulator.

Owns the tiny model and the points where a worker can be disturbed; a coordinator, but for its founding, is in
``fault_coordinator``. Everything else is the package's own: the workers run ``WorkerRun`` over ``HttpTransport``, the
coordinator ``coordinator.serve.serving``.

What a process sends (see ``warm_fleet.Message``):

============  ====================================  ==================================================
who           kind                                  values
============  ====================================  ==================================================
worker        ``began``                             version of its block
worker        ``asks``                              round, point; waits for an answer
worker        ``receipt``                           entry, base version, verdict
worker        ``round``                             version of its block, digest of its replica
worker        ``done``                              version, digests of its replica and its interface
coordinator   ``listening``                         URL
coordinator   ``report``                            a closed round
coordinator   ``masters``                           digests by entry, verdicts given since the last reports
simulator     ``masters``                           digests by entry
============  ====================================  ==================================================
"""

import os
import signal
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from benchmarks.fault_coordinator import begin, coordinate, digest
from benchmarks.fault_plan import SEED, CoordinatorTold, Fault, Point, Shape, WorkerTold
from benchmarks.warm_fleet import ChildPipe
from lightning_blocktrain.partition import Partition, as_layout
from lightning_blocktrain.partition import partition as cut
from lightning_blocktrain.rounds import INTERFACE, OuterSGD, Receipt, RoundRules
from lightning_blocktrain.strategies.run_settings import RunSettings
from lightning_blocktrain.strategies.simulated_run import SimulatedRun
from lightning_blocktrain.strategies.worker_run import WorkerRun, masters_of
from lightning_blocktrain.transport.base import Submission, WorkerFacts
from lightning_blocktrain.transport.http import HttpTransport
from lightning_blocktrain.transport.terms import RunTerms

VOCABULARY, SEQUENCES, TOKENS = 16, 2, 6
STRETCH = 1000.0
"""How many times too long the update of a worker is that sends rubbish."""
POLL_S = 5.0


class TinyBlocks(nn.Module):
    """One layer per block on the embedded input, with dropout, so that the workers' random streams matter.

    Args:
        num_blocks: B.
        width: D.
    """

    def __init__(self, num_blocks: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_blocks))
        self.readout = nn.Linear(width, VOCABULARY)

    def block_loss(self, batch: tuple[Tensor, Tensor], block_idx: int) -> Tensor:
        """Return the cross entropy of the next token, nats, of block ``block_idx`` alone; tokens are (B, T)."""
        hidden = F.dropout(self.embed(batch[0]), 0.2)  # (B, T, D)
        hidden = hidden + torch.tanh(self.layers[block_idx](hidden))
        return F.cross_entropy(self.readout(hidden).flatten(0, -2), batch[1].flatten())


def make_module(shape: Shape) -> tuple[TinyBlocks, Partition]:
    """Return the run's first weights and their partition."""
    with torch.random.fork_rng([]):
        torch.manual_seed(SEED)
        module = TinyBlocks(shape.num_blocks, shape.width)
    layout = as_layout({"layers": module.layers, "readout": module.readout, "prefix": "none"})
    return module, cut(module, layout, shape.num_blocks)


def rules_of(shape: Shape) -> RoundRules:
    """Return what the rounds obey."""
    return RoundRules(deadline_s=shape.deadline_s, outlier_factor=shape.outlier_factor)


def terms_of(shape: Shape) -> RunTerms:
    """Return the terms of the run."""
    return RunTerms(
        num_blocks=shape.num_blocks,
        sync_every=shape.sync_every,
        rules=rules_of(shape),
        outer=OuterSGD(0.7, 0.9),
        num_workers=shape.num_workers,
        max_rounds=shape.num_rounds,
        join_timeout_s=60.0,
        silent_after_s=shape.silent_after_s,
    )


def settings_of(shape: Shape, replicas: int) -> RunSettings:
    """Return how a worker trains, or all of them in a simulator."""
    return RunSettings(replicas, shape.sync_every, 1, "keep", rules_of(shape), OuterSGD(0.7, 0.9), "lockstep")


def batch_of(step: int, worker_id: int) -> tuple[Tensor, Tensor]:
    """Return a worker's batch of an inner step: inputs and targets, (B, T) each."""
    generator = torch.Generator().manual_seed(1_000_003 * step + worker_id)
    text = torch.randint(VOCABULARY, (SEQUENCES, TOKENS + 1), generator=generator)
    return text[:, :-1], text[:, 1:]


def learn(module: TinyBlocks, workers: Any, worker: Any, optimizer: torch.optim.Optimizer, step: int) -> int:
    """Take one inner step as ``worker`` and return the number of its tokens."""
    batch = batch_of(step, worker.worker_id)
    with workers.acting(worker, optimizer):
        optimizer.zero_grad()
        module.block_loss(batch, worker.block_idx).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        worker.gradients = {}
    return batch[1].numel()


# A worker


class DisturbedRun(WorkerRun):
    """A worker's rounds, with what it was told to do wrong.

    Args:
        told: Which worker, and what.
        pipe: To tell of it on.
    """

    def __init__(self, told: WorkerTold, pipe: ChildPipe, module: TinyBlocks, partition: Partition) -> None:
        settings = settings_of(told.shape, 1)
        block_idx = told.worker_id % told.shape.num_blocks
        super().__init__(module, partition, settings, told.worker_id, block_idx, SEED, assembles=told.worker_id == 0)
        self._told, self._pipe = told, pipe

    @override
    def send_round(self) -> None:
        self.disturb("before_submit")
        super().send_round()
        self.disturb("after_submit")

    @override
    def take_round(self) -> None:
        super().take_round()
        self._pipe.send("round", self.version, self.digests()[self.entry])

    def digests(self) -> dict[str, str]:
        """Return the digests of the worker's replica and of its interface."""
        held = {self.entry: self.workers.block_names[self.worker.block_idx], INTERFACE: self.workers.interface_names}
        return {entry: digest({name: self.worker.local[name] for name in names}) for entry, names in held.items()}

    def disturb(self, point: Point) -> None:
        """Do what was planned for this point of this round."""
        fault = self._told.plan.get((self.version, point))
        if fault == "ask":
            self._pipe.ask(self.version, point)
        elif fault is not None:
            self._do(fault)

    def _do(self, fault: Fault) -> None:
        if fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "outstay":
            assert self._line is not None
            while self._line.fetch(self.entry, self.version, POLL_S) is None:
                pass
        else:
            for name in self.workers.block_names[self.worker.block_idx]:
                local, master = self.worker.local[name], self.workers.merged[name]
                local.copy_(master + STRETCH * (local - master) if fault == "stretch" else local * float("nan"))


class TellingTransport(HttpTransport):
    """A worker's line that tells what became of every update.

    Args:
        told: Where the coordinator is, and how patient to be.
        pipe: To tell of it on.
    """

    def __init__(self, told: WorkerTold, pipe: ChildPipe) -> None:
        super().__init__(
            told.url, told.run_id, told.token, reconnect_timeout_s=60.0, stall_timeout_s=told.stall_timeout_s
        )
        self._pipe = pipe

    @override
    def submit(self, entry: str, submission: Submission) -> Receipt:
        receipt = super().submit(entry, submission)
        self._pipe.send("receipt", entry, submission.base_version, str(receipt.verdict))
        return receipt


def work(told: WorkerTold, pipe: ChildPipe) -> None:
    """Be a worker: join, train until the run is over, and leave."""
    begin()
    _practise(told.shape)
    module, partition = make_module(told.shape)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    torch.manual_seed(SEED)
    with TellingTransport(told, pipe) as line:
        welcome = line.join(WorkerFacts(told.worker_id, host=f"worker-{told.worker_id}"))
        run = DisturbedRun(told, pipe, module, partition)
        run.begin(line, welcome)
        pipe.send("began", run.version)
        while not run.ended and run.version < told.shape.num_rounds:
            _step(run, module, optimizer, told.step_s)
        pipe.send("done", run.version, run.digests())
        line.leave()


def _practise(shape: Shape) -> None:
    # What a process does for the first time takes longer: not inside a round that is timed.
    module, _ = make_module(shape)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    module.block_loss(batch_of(0, 0), 0).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def _step(run: DisturbedRun, module: TinyBlocks, optimizer: torch.optim.Optimizer, step_s: float) -> None:
    began_at = time.monotonic()
    step = run.first_step + run.steps_in_round
    run.count_batch(run.worker, learn(module, run.workers, run.worker, optimizer, step))
    time.sleep(max(0.0, began_at + step_s - time.monotonic()))
    run.finish_step(last=False)


# The coordinator


def found(told: CoordinatorTold, pipe: ChildPipe) -> None:
    """Be the coordinator of a run, and found it unless it is stored."""
    coordinate(told, pipe, (terms_of(told.shape), masters_of(*make_module(told.shape))))


# The undisturbed run


def simulate(shape: Shape, pipe: ChildPipe) -> None:
    """Train the run in lockstep in this process, without a network."""
    begin()
    module, partition = make_module(shape)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    run = SimulatedRun(module, partition, settings_of(shape, shape.replicas), SEED)
    torch.manual_seed(SEED)
    num_steps = shape.num_rounds * shape.sync_every
    for step in range(num_steps):
        for worker in run.workers:
            run.count_batch(worker, learn(module, run.workers, worker, optimizer, step))
        run.finish_step(last=step + 1 == num_steps)
    pipe.send("masters", {entry: digest(tensors) for entry, tensors in run.coordinator.masters.items()}, {})
