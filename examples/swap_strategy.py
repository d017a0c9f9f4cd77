"""The one-string swap: the same module and data, trained end to end (``auto``) or block by block (``blocktrain``).

Equal steps compare equal tokens: one step of ``blocktrain`` trains every block on a batch of its own.
"""

import argparse
from collections.abc import Sequence

import lightning as L

import lightning_blocktrain  # noqa: F401  registers strategy="blocktrain"
from lightning_blocktrain.data import ByteDataModule
from lightning_blocktrain.models import ByteTransformer


def main(argv: Sequence[str] | None = None) -> None:
    """Train on the running Python's documentation and print the bits per byte of text held out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--strategy", choices=("blocktrain", "auto"), default="blocktrain", help="what to swap")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps")
    parser.add_argument("--num-layers", type=int, default=6, help="layers, cut into equal blocks, at most 4")
    parser.add_argument("--width", type=int, default=128, help="width of the model, a multiple of 4")
    parser.add_argument("--window-bytes", type=int, default=128, help="bytes per window")
    args = parser.parse_args(argv)
    L.seed_everything(0, verbose=False)
    module = ByteTransformer(args.num_layers, args.width, window_bytes=args.window_bytes)
    datamodule = ByteDataModule("python-docs", args.window_bytes, batch_size=16)
    trainer = L.Trainer(
        strategy=args.strategy, devices=1, max_steps=args.steps, logger=False, enable_checkpointing=False
    )
    trainer.fit(module, datamodule)
    [scores] = trainer.test(module, datamodule, verbose=False)
    print(f"{args.strategy}: {scores['test/bits_per_byte']:.3f} bits per byte after {args.steps} steps")


if __name__ == "__main__":
    main()
