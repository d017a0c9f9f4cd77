"""Six worker processes on this machine: three blocks, two replicas of each, and a coordinator between them.

``devices=6`` is all that makes it so: the Trainer starts the coordinator, and this script five times more. The process
that you started is worker 0, which also validates, logs and saves. Kill one of the others: the run goes on without it.
"""

import argparse
import inspect
import typing
from collections.abc import Sequence
from typing import Any

import lightning as L
from rich.console import Console
from rich.table import Table
from typing_extensions import override

from lightning_blocktrain import BlockTrainStrategy, ByteDataModule, DiffusionBlocks


class RoundTable(L.Callback):
    """Collects one row per round and block, and prints them when the fit is over."""

    def __init__(self) -> None:
        self.table = Table("round", "block", "accepted", "missing", "moved by")
        self.num_seen = 0

    @override
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        """Add what has closed."""
        strategy = trainer.strategy
        if not isinstance(strategy, BlockTrainStrategy) or strategy.num_rounds_closed == self.num_seen:
            return
        self.num_seen = strategy.num_rounds_closed
        for report in strategy.round_reports:
            workers = (", ".join(map(str, ids)) or "-" for ids in (report.accepted, report.missing))
            self.table.add_row(str(report.round_idx), report.entry, *workers, f"{report.merged_delta_norm:.3f}")

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print the table, in one process."""
        if trainer.is_global_zero:
            Console(width=80).print(self.table)


def main(argv: Sequence[str] | None = None) -> None:
    """Train on the source of some standard modules; print the rounds and the bits per byte held out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=6, help="worker processes, at least one for each block")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps of every worker")
    parser.add_argument("--sync-every", type=int, default=10, help="optimizer steps from merge to merge")
    parser.add_argument("--deadline-s", type=float, default=60.0, help="seconds after which a round does not wait")
    parser.add_argument("--width", type=int, default=32, help="width of the model, a multiple of 4")
    args = parser.parse_args(argv)
    L.seed_everything(0, verbose=False)
    module = DiffusionBlocks(num_layers=3, num_blocks=3, width=args.width, window_bytes=64)
    files = [inspect.getfile(source) for source in (argparse, inspect, typing)]
    datamodule = ByteDataModule(files, window_bytes=64, batch_size=8)
    trainer = L.Trainer(
        strategy=BlockTrainStrategy(sync_every=args.sync_every, deadline_s=args.deadline_s),
        accelerator="cpu",
        devices=args.devices,
        max_steps=args.steps,
        callbacks=[RoundTable()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, datamodule)
    [scores] = trainer.validate(module, datamodule, verbose=False)
    print(f"{args.devices} workers: {scores['val/bits_per_byte']:.3f} bits per byte after {args.steps} steps")


if __name__ == "__main__":
    main()
