"""One worker of a run that is coordinated elsewhere: start it as often as you like, on as many machines as you like.

URL and token come from the environment, as ``blocktrain coordinator`` prints them. The coordinator says which block
this worker trains and when the run is over; then the worker has the whole merged model. Without a URL the same script
trains all blocks by itself, with simulated workers.
"""

import argparse
import inspect
import typing
from collections.abc import Sequence

import lightning as L

from lightning_blocktrain import BlockTrainStrategy, ByteDataModule, DiffusionBlocks


def main(argv: Sequence[str] | None = None) -> None:
    """Train on the source of some standard modules; print the bits per byte of the merged model on what is held out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps at most; the run may end before")
    parser.add_argument("--sync-every", type=int, default=10, help="optimizer steps from merge to merge")
    parser.add_argument("--deadline-s", type=float, default=60.0, help="seconds after which a round does not wait")
    parser.add_argument("--width", type=int, default=32, help="width of the model, a multiple of 4")
    args = parser.parse_args(argv)
    L.seed_everything(0, verbose=False)
    module = DiffusionBlocks(num_layers=2, num_blocks=2, width=args.width, window_bytes=64)
    files = [inspect.getfile(source) for source in (argparse, inspect, typing)]
    datamodule = ByteDataModule(files, window_bytes=64, batch_size=8)
    trainer = L.Trainer(
        strategy=BlockTrainStrategy(sync_every=args.sync_every, deadline_s=args.deadline_s),
        accelerator="cpu",
        devices=1,
        max_steps=args.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, datamodule)
    [scores] = trainer.validate(module, datamodule, verbose=False)
    print(f"the merged model: {scores['val/bits_per_byte']:.3f} bits per byte")


if __name__ == "__main__":
    main()
