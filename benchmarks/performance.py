"""What the strategy, the denoising block and the data module cost, as ratios from paired runs.

``python -m benchmarks.performance [--quick] [--steps N] [--pairs N] [--json FILE]``

* ``strategy_overhead``: one block, one worker, lockstep, against the same module under Lightning's default strategy.
* ``denoising_step``: a DiffusionBlocks block step against a causal step of the same layers and width.
* ``data_feed``: batches per second of the data module against steps per second of the smallest demo model.
* ``memory``: peak PSS of this process, what earlier measurements left behind included, and bytes of optimizer state:
  of the whole model trained end to end, and of one worker of the same model under ``blocktrain``.
"""

import argparse
import json
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning as L
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.paired import run_paired
from lightning_blocktrain import ByteDataModule, ByteTransformer, DiffusionBlocks, MemoryMonitor
from lightning_blocktrain.demo.arms import OptimizerBytes
from lightning_blocktrain.errors import explain

WIDTH, NUM_HEADS, WINDOW_BYTES, BATCH_SIZE = 128, 4, 128, 16
WARMUP_STEPS = 5


class StepTimes(L.Callback):
    """Notes when each training batch starts."""

    def __init__(self) -> None:
        self.starts: list[float] = []

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Note the time."""
        self.starts.append(time.perf_counter())

    @property
    def mean_s(self) -> float:
        """Mean seconds per step: with the ends of rounds, which a median would miss."""
        return (self.starts[-1] - self.starts[WARMUP_STEPS]) / (len(self.starts) - 1 - WARMUP_STEPS)


def trainer(strategy: str, num_steps: int, callbacks: list[L.Callback]) -> L.Trainer:
    """Return a silent Trainer on the CPU."""
    return L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_steps=num_steps,
        max_epochs=-1,
        callbacks=callbacks,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )


def fit_seconds(make: Callable[[], L.LightningModule], strategy: str, num_steps: int) -> float:
    """Return mean seconds per step of a fit of ``num_steps`` steps."""
    L.seed_everything(0, verbose=False)
    times = StepTimes()
    data = ByteDataModule(window_bytes=WINDOW_BYTES, batch_size=BATCH_SIZE)
    trainer(strategy, num_steps, [times]).fit(make(), data)
    return times.mean_s


def causal(num_layers: int) -> ByteTransformer:
    """Return a causal model of one block."""
    return ByteTransformer(num_layers, WIDTH, NUM_HEADS, WINDOW_BYTES, num_blocks=1)


def denoiser(num_layers: int) -> DiffusionBlocks:
    """Return a denoising model of one block."""
    return DiffusionBlocks(num_layers, 1, WIDTH, NUM_HEADS, WINDOW_BYTES)


def strategy_overhead(num_steps: int, num_pairs: int) -> dict[str, Any]:
    """Time one worker under ``blocktrain`` against the default strategy."""
    ours = run_paired(
        lambda: fit_seconds(lambda: causal(2), "blocktrain", num_steps),
        lambda: fit_seconds(lambda: causal(2), "auto", num_steps),
        num_pairs,
    )
    return {"what": "step under blocktrain / under the default strategy", "limit": 1.03, **asdict(ours)}


def denoising_step(num_steps: int, num_pairs: int) -> dict[str, Any]:
    """Time a DiffusionBlocks step of two layers against a causal step of two layers."""
    ours = run_paired(
        lambda: fit_seconds(lambda: denoiser(2), "auto", num_steps),
        lambda: fit_seconds(lambda: causal(2), "auto", num_steps),
        num_pairs,
    )
    return {"what": "DiffusionBlocks block step / causal step", "limit": 1.15, **asdict(ours)}


def data_feed(num_steps: int, num_pairs: int) -> dict[str, Any]:
    """Time a batch from the data module against a training step of the smallest demo model, the causal L_b = 2."""
    data = ByteDataModule(window_bytes=WINDOW_BYTES, batch_size=BATCH_SIZE)
    data.prepare_data()
    data.setup("fit")

    def batch_seconds() -> float:
        batches = iter(data.train_dataloader())
        next(batches)
        start = time.perf_counter()
        for _ in range(num_steps):
            next(batches)
        return (time.perf_counter() - start) / num_steps

    ours = run_paired(lambda: fit_seconds(lambda: causal(2), "auto", num_steps), batch_seconds, num_pairs)
    return {"what": "training step / batch from the data module", "at_least": 20.0, **asdict(ours)}


def memory(num_steps: int) -> dict[str, Any]:
    """Measure the peak PSS of training one model and the bytes of optimizer state, whole model against one worker."""
    result: dict[str, Any] = {}
    for name, strategy in {"whole model": "auto", "blocktrain, 3 simulated workers": "blocktrain"}.items():
        monitor, states = MemoryMonitor(), OptimizerBytes()
        module = ByteTransformer(6, WIDTH, NUM_HEADS, WINDOW_BYTES, num_blocks=3)
        data = ByteDataModule(window_bytes=WINDOW_BYTES, batch_size=BATCH_SIZE)
        trainer(strategy, num_steps, [monitor, states]).fit(module, data)
        result[name] = {f"peak_{monitor.measure}_mib": monitor.peak_mib, "optimizer_mem_bytes": states.worker_bytes}
    return result


def print_table(report: dict[str, Any]) -> None:
    """Print the ratios and the memory."""
    table = Table(title=f"{report['threads']} threads, interleaved pairs of runs")
    for column in ("what", "ratio", "95 % interval", "A, ms", "B, ms", "pairs", "target"):
        table.add_column(column)
    for row in report["ratios"]:
        target = f"at most {row['limit']}" if "limit" in row else f"at least {row['at_least']:.0f}"
        interval = f"{row['low']:.3f} - {row['high']:.3f}"
        times = f"{1e3 * row['a_s']:.3f}", f"{1e3 * row['b_s']:.3f}"
        table.add_row(row["what"], f"{row['ratio']:.3f}", interval, *times, str(row["num_pairs"]), target)
    Console(width=120).print(table)
    for name, values in report["memory"].items():
        print(name, ", ".join(f"{key}={value:,.0f}" for key, value in values.items()))


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run every measurement, print the table and return the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few steps: shows that it runs, measures nothing")
    parser.add_argument("--pairs", type=int, default=7, help="pairs per ratio")
    parser.add_argument("--steps", type=int, default=105, help=f"steps per fit, of which {WARMUP_STEPS} warm up")
    parser.add_argument("--json", type=Path, help="write the report here")
    args = parser.parse_args(argv)
    warnings.filterwarnings("ignore", module="lightning")
    steps, pairs = (10, 2) if args.quick else (args.steps, args.pairs)
    if steps < WARMUP_STEPS + 2 or pairs < 1:
        fix = f"use {WARMUP_STEPS + 2} steps and 1 pair, or more"
        parser.error(explain("steps must outlast the warm-up and pairs be at least 1", f"{steps=}, {pairs=}", fix))
    report = {
        "command": f"python -m benchmarks.performance --steps {steps} --pairs {pairs}",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "ratios": [strategy_overhead(steps, pairs), denoising_step(steps, pairs), data_feed(steps, pairs)],
        "memory": memory(min(steps, 30)),
    }
    print_table(report)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))
    return report


if __name__ == "__main__":
    main()
