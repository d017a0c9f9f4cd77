"""Runs the arms of ``benchmarks.cpu_pipeline``, each in a process of its own, forked from this one.

``python -m benchmarks.pipeline_arms`` reads one JSON list of arms per line from standard input, runs them at the same
time and writes one JSON list of measurements per line. It has imported everything and computed nothing, so that a fork
costs no import and no OpenMP team is inherited. Memory is that of an arm together with this process.
"""

import contextlib
import gc
import json
import multiprocessing
import os
import queue
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import lightning as L
import psutil
import torch

from lightning_blocktrain import BoundedHorizonStrategy, ByteDataModule, ByteTransformer, MemoryMonitor
from lightning_blocktrain.pipeline.account import TimeAccount

BARRIER_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Arm:
    """One run.

    Args:
        name: What the tables call it.
        strategy: Options of ``BoundedHorizonStrategy``; None: Lightning's default strategy.
        threads: OpenMP threads of the process (of its main thread).
        num_layers: Layers of the model.
        width: Its width.
        window_bytes: Bytes per window.
        batch_size: Windows per step.
        warmup_steps: Steps before the timed ones: the pipeline fills.
        timed_steps: Timed steps.
        memory_steps: Steps after them in which memory is sampled.
        corpus: ``ByteDataModule``'s corpus, train and val file.
        val_batches: Held-out batches for bits per token.
        seed: Seed of weights and data order.
        lr: Learning rate.
    """

    name: str
    strategy: dict[str, Any] | None
    threads: int
    num_layers: int
    width: int
    window_bytes: int
    batch_size: int
    warmup_steps: int
    timed_steps: int
    memory_steps: int
    corpus: dict[str, str]
    val_batches: int
    seed: int = 0
    lr: float = 1e-3

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the run."""
        return self.warmup_steps + self.timed_steps + self.memory_steps


@dataclass(frozen=True)
class Moment:
    """What the clocks show at the end of a step."""

    wall_s: float
    cpu_s: float
    machine_busy_s: float
    steal_s: float
    accounts: tuple[TimeAccount, ...]


class Window(L.Callback):
    """Reads the clocks at both ends of the timed steps, then samples memory.

    Args:
        arm: The run.
        barrier: Where arms that run at the same time wait for one another before the timed steps.
    """

    def __init__(self, arm: Arm, barrier: Any) -> None:
        self._arm, self._barrier = arm, barrier
        self.memory = MemoryMonitor(sample_every_s=0.02, max_duty=0.3, pid=os.getppid())
        self.moments: list[Moment] = []

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Open and close the window."""
        if trainer.global_step == self._arm.warmup_steps:
            self._barrier.wait(BARRIER_TIMEOUT_S)
            self.moments.append(moment(trainer))
        elif trainer.global_step == self._arm.warmup_steps + self._arm.timed_steps:
            self.moments.append(moment(trainer))
            if self._arm.memory_steps:
                self.memory.start()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take the last sample."""
        self.memory.stop()


def moment(trainer: L.Trainer) -> Moment:
    """Read the clocks: of the wall, of this process tree, and of the machine."""
    tree = [psutil.Process(), *psutil.Process().children(recursive=True)]
    cpu_s = 0.0
    for process in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            cpu_s += times.user + times.system
    machine = psutil.cpu_times()
    busy_s = machine.user + machine.system + getattr(machine, "nice", 0.0)
    accounts = getattr(trainer.strategy, "accounts", ())
    return Moment(time.perf_counter(), cpu_s, busy_s, getattr(machine, "steal", 0.0), tuple(accounts))


def run_arm(arm: Arm, barrier: Any) -> dict[str, Any]:
    """Train one arm and return what was measured."""
    torch.set_num_threads(arm.threads)
    warnings.filterwarnings("ignore")
    L.seed_everything(arm.seed, verbose=False)
    heads = max(1, arm.width // 32)
    module = ByteTransformer(arm.num_layers, arm.width, heads, arm.window_bytes, lr=arm.lr)
    data = ByteDataModule(window_bytes=arm.window_bytes, batch_size=arm.batch_size, **arm.corpus)  # type: ignore[arg-type]
    window = Window(arm, barrier)
    strategy = "auto" if arm.strategy is None else BoundedHorizonStrategy(**arm.strategy)
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        max_steps=arm.num_steps,
        max_epochs=-1,
        gradient_clip_val=1.0,
        callbacks=[window],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=arm.val_batches,
        val_check_interval=10**9,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
    )
    trainer.fit(module, data)
    [scores] = trainer.validate(module, data, verbose=False) if arm.val_batches else [{}]
    settings = getattr(trainer.strategy, "settings", None)
    team = settings.num_threads(settings.num_stages or 1) if settings is not None and settings.overlaps else 0
    return measurement(arm, window, scores.get("val/bits_per_byte"), team)


def measurement(arm: Arm, window: Window, bits: float | None, team: int) -> dict[str, Any]:
    """Return the record of a finished run; ``team`` is the OpenMP threads of a stage, 0 where stages take turns."""
    first, last = window.moments
    wall_s, cpu_s = last.wall_s - first.wall_s, last.cpu_s - first.cpu_s
    cores = psutil.cpu_count() or 1
    # psutil counts in hundredths of a second, and a short window holds few of them.
    foreign_s = max(0.0, last.machine_busy_s - first.machine_busy_s - cpu_s) + last.steal_s - first.steal_s
    spans = [end - start for start, end in zip(first.accounts, last.accounts, strict=True)]
    # What comes out of the final stage: queues that fill up before it would count as speed.
    steps_per_s = spans[-1].num_steps / spans[-1].wall_s if spans else arm.timed_steps / wall_s
    return {
        "name": arm.name,
        "start_s": first.wall_s,
        "end_s": last.wall_s,
        "step_s": 1 / steps_per_s,
        "tokens_per_s": steps_per_s * arm.batch_size * arm.window_bytes,
        "cpu_s_per_step": cpu_s / (wall_s * steps_per_s),
        "cpu_frac": cpu_s / (wall_s * cores),
        "busy_frac": (last.machine_busy_s - first.machine_busy_s + last.steal_s - first.steal_s) / (wall_s * cores),
        "foreign_cpu_frac": foreign_s / (wall_s * cores),
        "peak_pss_mib": window.memory.peak_mib if arm.memory_steps else None,
        "memory_measure": window.memory.measure,
        "num_memory_samples": window.memory.num_samples,
        "bits_per_token": bits,
        "num_steps": arm.num_steps,
        "work_s": [span.work_s(team) for span in spans],
        "closure_error": max((abs(span.closure_error) for span in spans), default=None),
        "accounts": [asdict(span) for span in spans],
    }


def _child(arm: Arm, barrier: Any, results: Any) -> None:
    with contextlib.redirect_stdout(sys.stderr):  # standard output carries the records
        try:
            results.put(run_arm(arm, barrier))
        except BaseException as exc:
            barrier.abort()
            results.put({"name": arm.name, "error": f"{type(exc).__name__}: {exc}"})
            raise


def run_together(arms: Sequence[Arm]) -> list[dict[str, Any]]:
    """Run arms at the same time, each in a forked process; return their records in order."""
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(len(arms)), context.Queue()
    # Not daemons: an arm may have stages in processes of its own.
    children = [context.Process(target=_child, args=(arm, barrier, results)) for arm in arms]
    for child in children:
        child.start()
    records: list[dict[str, Any]] = []
    while len(records) < len(children):
        try:
            records.append(results.get(timeout=1.0))
        except queue.Empty:
            if dead := [child.exitcode for child in children if child.exitcode]:  # killed: no record will come
                records.append({"name": arms[0].name, "error": f"its process ended with exit code {dead[0]}"})
                break
    for child in children:
        child.join(10.0)
        child.kill()
    return sorted(records, key=lambda record: [arm.name for arm in arms].index(record["name"]))


def main() -> None:
    """Serve runs until standard input ends."""
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        arms = [Arm(**arm) for arm in json.loads(line)]
        print(json.dumps(run_together(arms)), flush=True)


if __name__ == "__main__":
    main()
