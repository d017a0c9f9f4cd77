"""Workers that torchrun or SLURM starts, on one node or several: the same script, and each process is one worker.

On one machine: ``torchrun --standalone --nproc-per-node 3 examples/workers_in_a_job.py --devices 3``. Devices and nodes
are what the launcher was told; add ``--exchange collective`` where all processes share a fast network.
"""

import argparse
import inspect
import typing
from collections.abc import Sequence

import lightning as L

from lightning_blocktrain import BlockTrainStrategy, ByteDataModule, DiffusionBlocks


def main(argv: Sequence[str] | None = None) -> None:
    """Train on the source of some standard modules; print the bits per byte held out, in one process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=3, help="processes per node")
    parser.add_argument("--nodes", type=int, default=1, help="nodes of the job")
    parser.add_argument("--exchange", choices=("http", "collective"), default="http", help="how updates travel")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps of every worker")
    parser.add_argument("--width", type=int, default=32, help="width of the model, a multiple of 4")
    args = parser.parse_args(argv)
    L.seed_everything(0, verbose=False)
    module = DiffusionBlocks(num_layers=3, num_blocks=3, width=args.width, window_bytes=64)
    files = [inspect.getfile(source) for source in (argparse, inspect, typing)]
    datamodule = ByteDataModule(files, window_bytes=64, batch_size=8)
    trainer = L.Trainer(
        strategy=BlockTrainStrategy(sync_every=10, exchange=args.exchange),
        accelerator="cpu",
        devices=args.devices,
        num_nodes=args.nodes,
        max_steps=args.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule)
    [scores] = trainer.validate(module, datamodule, verbose=False)
    if trainer.is_global_zero:
        num_workers = args.devices * args.nodes
        print(f"{num_workers} workers: {scores['val/bits_per_byte']:.3f} bits per byte after {args.steps} steps")


if __name__ == "__main__":
    main()
